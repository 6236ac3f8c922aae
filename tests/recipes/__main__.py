"""Reads recipes, runs their jobs, writes what was found.

python -m tests.recipes read axolotl CHECKOUT       # facts.json, from a work tree or a bare repository
python -m tests.recipes run                         # every job without an outcome, two ranks; outcomes.json
python -m tests.recipes run --again --only llama    # those whose line has this word, again
python -m tests.recipes write                       # counts and reasons in docs/evidence/framework-recipes.md
python -m tests.recipes list                        # the same, with rare reasons and every recipe by name
"""

from __future__ import annotations

import argparse
import os

import torch

from tests.recipes.jobs import Job
from tests.recipes.outcomes import (
    PAGE,
    all_jobs,
    load_facts,
    load_outcomes,
    render,
    save_facts,
    save_outcomes,
    unsaid,
    with_lists,
)
from tests.recipes.reading import READERS, read
from tests.recipes.training import SHARINGS, Outcome, Trained, compare, train
from tests.support import run_deepspeed, start_server

_LONGEST_REASON = 400
NEAR, TOLERANCE_64 = 1e-2, 1e-9
"""What rounding may make of a job in 32 bits, and in 64."""


def outcomes_of(jobs: list[Job]) -> dict[Job, dict[str, Outcome]]:
    """Train jobs on one process and on two ranks; in starts of their own where one leaves ranks behind."""
    try:
        expected = run_deepspeed(train, 1, jobs, "", env={"ACCELERATE_USE_CPU": "true"}, timeout_s=90 + 60 * len(jobs))[
            0
        ]
        found: dict[Job, dict[str, Outcome]] = {job: {} for job in jobs}
        for sharing in SHARINGS:
            by_rank = run_deepspeed(
                train, 2, jobs, sharing, env={"ACCELERATE_USE_CPU": "false"}, timeout_s=90 + 60 * len(jobs)
            )
            for job, right, *results in zip(jobs, expected, *by_rank, strict=False):
                found[job][sharing] = _outcome(results, right)
            for job in jobs[len(by_rank[0]) :]:
                found[job] = outcomes_of([job])[job]
        for job, by_sharing in found.items():
            for sharing, outcome in by_sharing.items():
                if outcome.kind == "wrong" and outcome.error <= NEAR:
                    by_sharing[sharing] = _in_64_bits(job, sharing, outcome)
        return found
    except AssertionError as error:
        if len(jobs) > 1:
            return {job: outcome for one in jobs for job, outcome in outcomes_of([one]).items()}
        return {jobs[0]: {sharing: Outcome("obscure", str(error)[-1500:]) for sharing in SHARINGS}}


def _in_64_bits(job: Job, sharing: str, rounded: Outcome) -> Outcome:
    """Judge a job whose difference may be rounding: in 64 bits such a one is a hundred times below the tolerance."""
    alone = run_deepspeed(train, 1, [job], "", torch.float64, env={"ACCELERATE_USE_CPU": "true"}, timeout_s=200)[0][0]
    of_ranks = run_deepspeed(
        train, 2, [job], sharing, torch.float64, env={"ACCELERATE_USE_CPU": "false"}, timeout_s=200
    )
    if not isinstance(alone, Trained):
        return Outcome("wrong", f"{rounded.why}; in 64 bits one process ends: {_last_line(alone.why)}")
    twin = _outcome([results[0] for results in of_ranks], alone, TOLERANCE_64)
    if twin.kind != "exact":
        return Outcome("wrong", f"{rounded.why}; in 64 bits: {twin.why}", rounded.error)
    return Outcome("exact", f"in 64 bits, to {twin.error:.1e} ({rounded.error:.1e} in 32 bits)", twin.error)


def _outcome(results: list[Trained | Outcome], expected: Trained | Outcome, tolerance: float = 1e-5) -> Outcome:
    """What ranks came to; where one process does not train a job, they may have refused it by name all the same."""
    ended = [result for result in results if isinstance(result, Outcome)]
    if isinstance(expected, Outcome):
        refused = [result for result in ended if result.kind == "refused"]
        return refused[0] if len(refused) == len(results) else Outcome("not run", _last_line(expected.why))
    if not ended:
        return compare([result for result in results if isinstance(result, Trained)], expected, tolerance)
    alike = len(ended) == len(results) and len({result.kind for result in ended}) == 1
    return ended[0] if alike else Outcome("obscure", f"ranks differ: {[str(result)[-700:] for result in results]}")


def _last_line(text: str) -> str:
    return "one process does not train it either: " + text.strip().rpartition("\n")[2]


def _run(only: str, *, again: bool, at_once: int, most: int) -> None:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    start_server(["tests.recipes.training", "trl"], deepspeed=True)
    recorded = load_outcomes()
    for name in unsaid(recorded):
        del recorded[name]
    jobs = [job for job in all_jobs() if only in str(job) and (again or str(job) not in recorded)][:most]
    for start in range(0, len(jobs), at_once):
        for job, by_sharing in outcomes_of(jobs[start : start + at_once]).items():
            recorded[str(job)] = {
                s: [
                    outcome.kind,
                    outcome.why[-_LONGEST_REASON:] if outcome.kind == "obscure" else outcome.why[:_LONGEST_REASON],
                ]
                for s, outcome in by_sharing.items()
            }
            print(f"{job}: {', '.join(f'{s} {outcome.kind}' for s, outcome in by_sharing.items())}", flush=True)
            for outcome in by_sharing.values():
                if outcome.kind in ("wrong", "obscure"):
                    print(f"    {outcome.why}", flush=True)
        save_outcomes(recorded)
        print(f"{min(start + at_once, len(jobs))} of {len(jobs)}", flush=True)


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(prog="python -m tests.recipes", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    reading = commands.add_parser("read")
    reading.add_argument("framework", choices=READERS)
    reading.add_argument("checkout")
    running = commands.add_parser("run")
    running.add_argument("--only", default="", help="jobs whose line has this text")
    running.add_argument("--again", action="store_true", help="those with an outcome, too")
    running.add_argument("--at-once", type=int, default=6, help="jobs in one start of ranks")
    running.add_argument("--most", type=int, default=10_000, help="jobs of this run; the most frequent come first")
    commands.add_parser("write")
    commands.add_parser("list")
    given = parser.parse_args()
    if given.command == "read":
        facts = load_facts()
        commit, recipes = read(given.framework, given.checkout)
        save_facts({**facts, given.framework: {"commit": commit, "recipes": recipes}})
    elif given.command == "run":
        _run(given.only, again=given.again, at_once=given.at_once, most=given.most)
    elif given.command == "list":
        print(render(with_names=True))
    else:
        PAGE.write_text(with_lists(PAGE.read_text()))


if __name__ == "__main__":
    main()
