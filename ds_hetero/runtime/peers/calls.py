"""The calls that all ranks make together, in the order in which this rank made them.

A step is a contract: every rank takes the batch, runs its forward and backward, and steps. A rank that leaves one of
them out keeps the others waiting for ever. So each rank records its calls. The loader's exchange carries how many have
followed the last one, and ranks that wait elsewhere compare their records (`diagnosis`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ds_hetero.common.text import ranks_by_value, ranks_text
from ds_hetero.errors import StepError

FETCH = "the next batch"
FORWARD = "a forward"
BACKWARD = "a backward"
STEP = "the engine's step"
SAVE = "the saving of a checkpoint"
SWITCH = "a comparison of requires_grad, which has changed on it (freeze and unfreeze parameters on every rank alike)"
INTERRUPTED = ", which ended with "
REMEDY = (
    "Every rank has to use every batch and to make the same calls. Decide `continue`, `break`, the end of training and "
    "what follows a caught exception on all ranks together, for instance by an all_reduce of a flag."
)
GATHERS_DIFFER = (
    "ZeRO-3 gathers parameters where a module is called, so all ranks have to call the same modules in the same order. "
    "Let what these calls lie in be gathered at once: deepspeed.utils.set_z3_leaf_modules(model, [Block]) before "
    'deepspeed.initialize, with the class that every rank calls and that chooses among them{known}. Or set "stage": 2 '
    'in "zero_optimization".'
)

_KEPT = 64  # the latest calls; ranks that differ are never more than a fetch apart

T = TypeVar("T")


class Counts(NamedTuple):
    """Calls of this rank since its last fetch."""

    forwards: int  # on shards and with gradients, where ranks wait for one another
    backwards: int
    steps: int
    number: int  # of the fetch that begins, in its epoch

    def __str__(self) -> str:
        passes = (
            f"{_times(self.forwards, 'forward')}, {_times(self.backwards, 'backward')}, {_times(self.steps, 'step')}"
        )
        return f"ran {passes} since its last batch and waits for batch {self.number} of its epoch"


_UNKNOWN_COUNTS = Counts(-1, -1, -1, -1)


class History(NamedTuple):
    """The latest calls of one rank."""

    calls: Sequence[str]  # what it called, oldest first
    num_before: int  # calls before these
    has_left: bool  # whether it has left a loop over its batches, before the loop's end, since its last fetch

    def at(self, index: int) -> str | None:
        """Return the call of that number since the start; None where it is not known, or not made yet."""
        place = index - self.num_before
        return self.calls[place] if 0 <= place < len(self.calls) else None

    @property
    def end(self) -> int:
        """Calls made so far."""
        return self.num_before + len(self.calls)


class Calls:
    """The calls of this process; `own_calls` is the one instance."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._latest: deque[str] = deque(maxlen=kept)
        self.number = 0
        self._since_fetch = dict.fromkeys((FORWARD, BACKWARD, STEP), 0)
        self._training_thread: int | None = None
        self._has_left = False

    def record(self, call: str) -> None:
        """Add a call that all ranks make."""
        self._latest.append(call)
        self.number += 1
        if call in self._since_fetch:
            self._since_fetch[call] += 1
            self._training_thread = threading.get_ident()

    def fail(self, error: BaseException) -> None:
        """Note that ``error`` ended the latest call on this rank."""
        if self._latest:
            self._latest[-1] += f"{INTERRUPTED}{type(error).__name__}: {error}"

    def begin_fetch(self, number: int) -> Counts:
        """Record a fetch; return what was called since the last one.

        A loader that is read by a thread of its own, ahead of the training, says nothing about steps.
        """
        forwards, backwards, steps = (self._since_fetch[call] for call in (FORWARD, BACKWARD, STEP))
        counts = Counts(forwards, backwards, steps, number)
        self._since_fetch = dict.fromkeys(self._since_fetch, 0)
        if self._training_thread not in (None, threading.get_ident()):
            return _UNKNOWN_COUNTS
        self._has_left = False
        self.record(FETCH)
        return counts

    def giving(self, batch: T) -> Iterator[T]:
        """Yield one batch; note if the loop over the batches is left there, before its end."""
        try:
            yield batch
        except GeneratorExit:
            self.leave_loop()
            raise

    def leave_loop(self) -> None:
        """Note that this rank has left a loop over its batches before the loop's end."""
        self._has_left = True

    def history(self) -> History:
        """Return the latest calls."""
        latest = list(self._latest)
        return History(latest, self.number - len(latest), self._has_left)


own_calls = Calls()
"""What this process has called."""

own_gathers = Calls(kept=1024)
"""The modules for which this process has gathered parameters on ZeRO-3; a rank is at most one forward ahead."""


def first_difference(histories: Mapping[int, History]) -> Mapping[int, str] | None:
    """Return the first calls of the same number that differ, by rank; None where all ranks agree."""
    first = max((history.num_before for history in histories.values()), default=0)
    for index in range(first, min((history.end for history in histories.values()), default=0)):
        calls = {rank: str(history.at(index)) for rank, history in histories.items()}
        if len(set(calls.values())) > 1:
            return calls
    return None


def expect_same_counts(counts: Sequence[Counts]) -> None:
    """Refuse ranks, by their counts, that did unlike things since a fetch. Raises `StepError` on every rank."""
    if len(set(counts)) == 1 or _UNKNOWN_COUNTS in counts:
        return
    groups = ranks_by_value(enumerate(counts))
    usual = max(groups, key=lambda did: (len(groups[did]), did))
    unusual = "; ".join(f"{ranks_text(ranks)} {did}" for did, ranks in groups.items() if did != usual)
    raise StepError(f"the ranks went different ways: {unusual}; the other ranks {usual}. {REMEDY}")


def _times(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
