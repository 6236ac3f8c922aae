"""Jobs in few starts of ranks; a draw that hangs is ended by its own timeout and blamed by its number.

    parent      ranks                                   files of a draw
    start       for each draw: arm the timer, train     <number>.<rank>   what the rank came to, pickled
    compare     a bare error ends the rank              <number>.<rank>.stack   where it was when the timer went off

A draw of a company that is not exact or refused is run again by itself: one before it may have left the ranks apart.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import re
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

from tests.integration.combinations.compare import Outcome, Tolerance, Trained, compared
from tests.support import run_deepspeed

AT_ONCE = 8  # draws in one start of ranks
_SHOWN_OF_STACK = 6000  # characters, from the end, where the thread that waits stands
TIMEOUT_S = 60.0  # of a draw, which takes one or two seconds on an idle machine
# What a rank says where another one failed first.
_CONSEQUENCES = ("PeerError", "closed by peer", "reset by peer")
# A deadlock that the engine's watch found, and blames on the script.
_DEADLOCK = ("can never meet", "in which the others wait", "has left the loop")


class Job(Protocol):
    """What is drawn."""

    kind: str
    world_size: int

    @property
    def tolerance(self) -> Tolerance:
        """How far ranks may be off."""

    def describe(self) -> str:
        """For people."""

    def alone(self) -> Trained:
        """What one process of plain torch, or of the framework without DeepSpeed, comes to."""

    def on_ranks(self, rank: int) -> Trained:
        """What this rank comes to."""


class _End(NamedTuple):
    """How a job ended on one process: trained, refused with this text, or an error with this trace."""

    trained: Trained | None
    refusal: str = ""
    error: str = ""


def outcomes_of(
    jobs: Mapping[int, Job],
    *,
    processes: int = 1,
    timeout_s: float = TIMEOUT_S,
    told: Callable[[int, Outcome], None] = lambda number, outcome: None,
) -> dict[int, Outcome]:
    """What becomes of these jobs, by number.

    Args:
        jobs: by number.
        processes: starts of ranks at a time.
        timeout_s: of one draw.
        told: called with each outcome as it is known.
    """
    companies: dict[tuple[str, int], list[int]] = defaultdict(list)
    for number, job in jobs.items():
        companies[job.kind, job.world_size].append(number)
    starts = [
        {number: jobs[number] for number in numbers[begin : begin + AT_ONCE]}
        for numbers in companies.values()
        for begin in range(0, len(numbers), AT_ONCE)
    ]
    outcomes: dict[int, Outcome] = {}

    def run(start: Mapping[int, Job]) -> None:
        for number, outcome in _outcomes_of_start(start, timeout_s).items():
            outcomes[number] = outcome
            told(number, outcome)

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(run, starts))
    return dict(sorted(outcomes.items()))


def outcomes_by_name(jobs: Mapping[str, Job]) -> dict[str, Outcome]:
    """Return the outcomes of these jobs, which share starts of ranks, by name."""
    by_number = outcomes_of(dict(enumerate(jobs.values())))
    return dict(zip(jobs, by_number.values(), strict=True))


def _outcomes_of_start(jobs: Mapping[int, Job], timeout_s: float) -> dict[int, Outcome]:
    """Of draws that go with each other into one start of ranks."""
    references = _run_references(jobs, timeout_s)
    outcomes = {number: Outcome("no reference", end.error) for number, end in references.items() if not end.trained}
    able = {number: job for number, job in jobs.items() if number not in outcomes}
    outcomes |= _run_ranks(able, references, timeout_s)
    if len(able) > 1:
        for number in able:
            if outcomes[number].is_failure:
                outcomes |= _run_ranks({number: able[number]}, references, timeout_s)
    return outcomes


def _run_references(jobs: Mapping[int, Job], timeout_s: float) -> dict[int, _End]:
    """How each job ends on one process."""
    try:
        (ends,) = run_deepspeed(
            _references, 1, dict(jobs), timeout_s=timeout_s * len(jobs), env={"ACCELERATE_USE_CPU": "true"}
        )
    except AssertionError as error:
        return dict.fromkeys(jobs, _End(None, error=str(error)))
    return dict(ends)


def _references(rank: int, jobs: Mapping[int, Job]) -> dict[int, _End]:
    _be_quiet()
    ends, environment = {}, dict(os.environ)
    for number, job in jobs.items():
        ends[number] = _ending(job.alone)
        _forget_frameworks(environment)
    return ends


def _run_ranks(jobs: Mapping[int, Job], references: Mapping[int, _End], timeout_s: float) -> dict[int, Outcome]:
    """Outcomes of draws that share a start; the number of ranks is the same of all."""
    if not jobs:
        return {}
    world_size = next(iter(jobs.values())).world_size
    with tempfile.TemporaryDirectory(prefix="draws_") as folder:
        said = ""
        try:
            run_deepspeed(
                _train_all,
                world_size,
                dict(jobs),
                folder,
                timeout_s,
                timeout_s=30 + (timeout_s + 5) * len(jobs),
                env={"ACCELERATE_USE_CPU": "false"},
            )
        except AssertionError as error:
            said = str(error)
        return {
            number: _outcome(job, _ends_of(number, world_size, folder), references[number].trained, said)
            for number, job in jobs.items()
        }


def _ends_of(number: int, world_size: int, folder: str) -> list[_End | str | None]:
    """By rank, how the draw ended; the stack of one whose time was over; None of a rank that has not come to it."""
    ends: list[_End | str | None] = []
    for rank in range(world_size):
        path, stack = Path(folder, f"{number}.{rank}"), Path(folder, f"{number}.{rank}.stack")
        if path.exists():
            ends.append(pickle.loads(path.read_bytes()))
        else:
            ends.append(stack.read_text(errors="replace") if stack.exists() else None)
    return ends


def _outcome(job: Job, ends: Sequence[_End | str | None], expected: Trained | None, said: str) -> Outcome:
    assert expected is not None
    complete = [end for end in ends if isinstance(end, _End)]
    stacks = {rank: end for rank, end in enumerate(ends) if isinstance(end, str) and end}
    if stacks:
        return Outcome("hang", "\n".join(f"rank {rank}: {stack[-_SHOWN_OF_STACK:]}" for rank, stack in stacks.items()))
    errors = [(rank, end.error) for rank, end in enumerate(ends) if isinstance(end, _End) and end.error]
    if errors:
        errors.sort(key=lambda pair: any(sign in pair[1] for sign in _CONSEQUENCES))  # the cause first
        return Outcome("bare", f"rank {errors[0][0]} of {sorted(rank for rank, _ in errors)}: {errors[0][1]}")
    if len(complete) < len(ends):
        return Outcome("bare", said or f"ranks ended without a word: {ends}")
    refusals = {_without_numbers(end.refusal) for end in complete}
    if any(refusals):
        text = complete[0].refusal
        if len(refusals) > 1:
            return Outcome("bare", "ranks end unlike each other: " + " | ".join(end.refusal[:300] for end in complete))
        return Outcome("hang" if any(sign in text for sign in _DEADLOCK) else "refused", text)
    return compared([end.trained for end in complete if end.trained is not None], expected, job.tolerance)


def _without_numbers(text: str) -> str:
    return re.sub(r"[-+0-9.e]*\d", "#", text)[:160]


def _train_all(rank: int, jobs: Mapping[int, Job], folder: str, timeout_s: float) -> None:
    """Train one draw after the other; leave what it came to in files, so that a hang takes nothing with it."""
    import ds_hetero

    _be_quiet()
    environment = dict(os.environ)
    for number, job in jobs.items():
        stack = Path(folder, f"{number}.{rank}.stack")
        with open(stack, "w") as file:
            faulthandler.dump_traceback_later(timeout_s, exit=True, file=file)
            end = _ending(lambda: job.on_ranks(rank))  # noqa: B023
            faulthandler.cancel_dump_traceback_later()
        temporary = Path(folder, f"{number}.{rank}.part")
        temporary.write_bytes(pickle.dumps(end))
        temporary.rename(Path(folder, f"{number}.{rank}"))
        stack.unlink()
        if end.error:
            raise SystemExit(f"draw {number}: {end.error[-300:]}")
        ds_hetero.register().undo()
        _forget_frameworks(environment)


def _ending(train: Callable[[], Trained]) -> _End:
    from ds_hetero.errors import HeteroError, PeerError

    try:
        return _End(train())
    except PeerError:
        return _End(None, error="PeerError: " + traceback.format_exc()[-3000:])
    except HeteroError as error:
        return _End(None, refusal=f"{type(error).__name__}: {' '.join(str(error).split())}")
    except Exception:
        return _End(None, error=traceback.format_exc()[-4000:])


def _forget_frameworks(environment: Mapping[str, str]) -> None:
    """Forget what a draw has left in this process, so that the next begins as a job does."""
    import gc

    import torch
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    torch.set_default_dtype(torch.float32)
    os.environ.clear()
    os.environ.update(environment)
    gc.collect()


def _be_quiet() -> None:
    import logging
    import multiprocessing
    import warnings

    # Ranks are daemons of the parent, which may have no children, and loaders have worker processes.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    # As in a job that a launcher has started. Ranks come from a fork server, and would start another one for the
    # workers of their loaders, which imports everything: 25 s on two busy cores.
    multiprocessing.set_start_method("fork", force=True)

    warnings.filterwarnings("ignore")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
