"""Draw jobs, train them, and say what became of them; see the package.

    python -m tests.integration.combinations --seed 7 --draws 1000 [--jobs 2] [--json FILE]
    python -m tests.integration.combinations --seed 7 --only 42 [43 ...]

Exit code 1 where a job was neither exact nor refused by name.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tests.support import start_server

_KINDS = ("exact", "refused", "wrong", "hang", "bare", "no reference")
_PACKAGE = "tests.integration.combinations"
_FIRST_WORDS = 14  # of a refusal, by which refusals are counted


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the number of the first draw")
    parser.add_argument("--only", type=int, nargs="+", help="the numbers of some draws, which are described")
    parser.add_argument("--kind", help="draws of one kind alone, such as loop")
    parser.add_argument("--jobs", type=int, default=1, help="starts of ranks at a time")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds of one draw")
    parser.add_argument("--json", type=Path, help="a file for all outcomes")
    arguments = parser.parse_args()
    start_server([f"{_PACKAGE}.draw"], deepspeed=True)
    # By names that ranks can import, and after the server has started: it is forked without what this process loads.
    from tests.integration.combinations.draw import drawn
    from tests.integration.combinations.running import outcomes_of

    numbers = range(arguments.first, arguments.first + arguments.draws)
    chosen = numbers if arguments.only is None else arguments.only
    jobs = {number: drawn(arguments.seed, number) for number in chosen}
    if arguments.kind is not None:
        jobs = {number: job for number, job in jobs.items() if job.kind == arguments.kind}
    progress = _Progress(arguments.seed, jobs)
    outcomes = outcomes_of(jobs, processes=arguments.jobs, timeout_s=arguments.timeout, told=progress.tell)
    progress.end()
    for number in arguments.only or ():
        print(f"{number}: {jobs[number].describe()}\n{outcomes[number].kind}: {outcomes[number].why}")
    _print_table(jobs, outcomes)
    _print_refusals(jobs, outcomes)
    _print_failures(arguments.seed, jobs, outcomes)
    if arguments.json is not None:
        records = [
            {"number": n, "kind": jobs[n].kind, "outcome": o.kind, "why": o.why, "job": jobs[n].describe()}
            for n, o in outcomes.items()
        ]
        arguments.json.write_text(json.dumps({"seed": arguments.seed, "draws": records}, indent=1))
    return int(any(outcome.is_failure for outcome in outcomes.values()))


class _Progress:
    """A bar on a terminal; a line for each failure, and one for every hundred draws, anywhere."""

    def __init__(self, seed: int, jobs: dict[int, Any]) -> None:
        from tqdm import tqdm

        self._seed, self._jobs, self._counts = seed, jobs, Counter[str]()
        self._bar = tqdm(total=len(jobs), unit="draw", disable=not sys.stderr.isatty())
        self._started, self._num_done = time.monotonic(), 0

    def tell(self, number: int, outcome: Any) -> None:
        """One draw is done."""
        self._counts[outcome.kind] += 1
        self._num_done += 1
        self._bar.update()
        self._bar.set_postfix(self._counts)
        if outcome.is_failure:
            why = " ".join(outcome.why.split())
            self._bar.write(f"{number} {self._jobs[number].kind} {outcome.kind}: {why[:100]} ... {why[-200:]}")
        if self._num_done % 100 == 0:
            passed = time.monotonic() - self._started
            self._bar.write(f"{self._num_done} of {len(self._jobs)} in {passed:.0f} s: {dict(self._counts)}")
        sys.stdout.flush()

    def end(self) -> None:
        """All are done."""
        self._bar.close()
        passed = time.monotonic() - self._started
        print(f"{len(self._jobs)} draws in {passed:.0f} s, {passed / max(len(self._jobs), 1):.2f} s each")


def _print_table(jobs: dict[int, Any], outcomes: dict[int, Any]) -> None:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for number, outcome in outcomes.items():
        counts[jobs[number].kind][outcome.kind] += 1
        counts["all"][outcome.kind] += 1
    print(f"\n{'kind':12}" + "".join(f"{kind:>14}" for kind in _KINDS) + f"{'refused, %':>14}")
    for name in sorted(counts, key=lambda name: (name == "all", name)):
        of_kind = counts[name]
        share = 100 * of_kind["refused"] / sum(of_kind.values())
        print(f"{name:12}" + "".join(f"{of_kind[kind]:14}" for kind in _KINDS) + f"{share:14.0f}")


def _print_refusals(jobs: dict[int, Any], outcomes: dict[int, Any]) -> None:
    words: dict[str, list[int]] = defaultdict(list)
    for number, outcome in outcomes.items():
        if outcome.kind == "refused":
            words[" ".join(outcome.why.split()[:_FIRST_WORDS])].append(number)
    for text, numbers in sorted(words.items(), key=lambda pair: -len(pair[1])):
        print(f"refused {len(numbers)} times, such as {numbers[0]}: {text}")


def _print_failures(seed: int, jobs: dict[int, Any], outcomes: dict[int, Any]) -> None:
    for number, outcome in outcomes.items():
        if outcome.is_failure:
            print(
                f"\n{outcome.kind}: {outcome.why[-1500:]}\n{jobs[number].kind}: {jobs[number].describe()}\n"
                f"    python -m {_PACKAGE} --seed {seed} --only {number}"
            )


if __name__ == "__main__":
    sys.exit(main())
