"""Record the calls that all ranks have to make together, in the order in which this rank makes them.

In every step each rank takes the batch, runs its forward and backward, and steps. If a rank leaves one of these calls
out, the other ranks wait for ever. So each rank records its calls. At every fetch of a batch ranks exchange how many
calls they have made since the fetch before; ranks that wait elsewhere compare their records (`diagnosis`).
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
    "Let the parameters of the block around these calls be gathered at once: "
    "deepspeed.utils.set_z3_leaf_modules(model, [Block]) before deepspeed.initialize, with the class that every rank "
    'calls and that chooses among them{known}. Or set "stage": 2 in "zero_optimization".'
)

_NUM_RECORDED_CALLS = 64  # of one rank; chosen: ranks that differ are never more than a fetch apart

T = TypeVar("T")


class Counts(NamedTuple):
    """Numbers of calls of this rank since its last fetch of a batch, at the begin of the next fetch."""

    forwards: int  # of sharded batches and with gradients: ranks wait for one another in them
    backwards: int
    steps: int
    number: int  # of the fetch that begins, in its epoch

    def __str__(self) -> str:
        forwards, backwards = _count_text(self.forwards, "forward"), _count_text(self.backwards, "backward")
        calls = f"{forwards}, {backwards}, {_count_text(self.steps, 'step')}"
        return f"ran {calls} since its last batch and waits for batch {self.number} of its epoch"


_UNKNOWN_COUNTS = Counts(-1, -1, -1, -1)  # see `Calls.begin_fetch`


class History(NamedTuple):
    """The latest calls of one rank."""

    calls: Sequence[str]  # oldest first
    num_before: int  # number of earlier calls, which are forgotten
    has_left: bool  # since its last fetch, the rank has left a loop over its batches before the loop's end

    def at(self, index: int) -> str | None:
        """Return the call with this index since the start; None if the call is forgotten, or not made yet."""
        local_index = index - self.num_before
        return self.calls[local_index] if 0 <= local_index < len(self.calls) else None

    @property
    def end(self) -> int:
        """Number of calls made so far."""
        return self.num_before + len(self.calls)


class Calls:
    """A record of calls of this process, such as `own_calls`.

    Args:
        num_recorded: how many calls to remember.

    Attributes:
        number: how many calls this process has recorded since its start.
    """

    def __init__(self, num_recorded: int = _NUM_RECORDED_CALLS) -> None:
        self._latest: deque[str] = deque(maxlen=num_recorded)
        self.number = 0
        self._since_fetch = dict.fromkeys((FORWARD, BACKWARD, STEP), 0)
        self._training_thread: int | None = None
        self._has_left = False

    def record(self, call: str) -> None:
        """Record a call that all ranks have to make, such as `FORWARD`."""
        self._latest.append(call)
        self.number += 1
        if call in self._since_fetch:
            self._since_fetch[call] += 1
            self._training_thread = threading.get_ident()

    def fail(self, error: BaseException) -> None:
        """Record that ``error`` ended the latest call on this rank."""
        if self._latest:
            self._latest[-1] += f"{INTERRUPTED}{type(error).__name__}: {error}"

    def begin_fetch(self, number: int) -> Counts:
        """Record that the fetch of batch ``number`` begins; return the counts of calls since the fetch before.

        The counts are `_UNKNOWN_COUNTS` if a thread other than the training thread reads the loader in advance.
        """
        forwards, backwards, steps = (self._since_fetch[call] for call in (FORWARD, BACKWARD, STEP))
        counts = Counts(forwards, backwards, steps, number)
        self._since_fetch = dict.fromkeys(self._since_fetch, 0)
        if self._training_thread not in (None, threading.get_ident()):
            return _UNKNOWN_COUNTS
        self._has_left = False
        self.record(FETCH)
        return counts

    def yield_batch(self, batch: T) -> Iterator[T]:
        """Yield one batch; record if the user's loop over the batches ends at this batch, for example by ``break``."""
        try:
            yield batch
        except GeneratorExit:
            self.leave_loop()
            raise

    def leave_loop(self) -> None:
        """Record that this rank has left a loop over its batches before the loop's end."""
        self._has_left = True

    def history(self) -> History:
        """Return the latest calls."""
        latest = list(self._latest)
        return History(latest, self.number - len(latest), self._has_left)


own_calls = Calls()
"""The calls of this process that all ranks have to make together."""

own_gathers = Calls(num_recorded=1024)
"""The modules for which this process has gathered parameters on ZeRO-3. Ranks are at most one forward apart."""


def first_difference(histories: Mapping[int, History]) -> Mapping[int, str] | None:
    """Return the calls of all ranks at the first index at which they differ, by rank; None if there is none.

    Compares indices that every rank has made and remembers. Example: rank 0 called a b c and rank 1 called a c, so the
    result is {0: "b", 1: "c"}.
    """
    first = max((history.num_before for history in histories.values()), default=0)
    for index in range(first, min((history.end for history in histories.values()), default=0)):
        calls = {rank: str(history.at(index)) for rank, history in histories.items()}
        if len(set(calls.values())) > 1:
            return calls
    return None


def expect_same_counts(counts: Sequence[Counts]) -> None:
    """Raise an error if ranks made different calls since the last fetch.

    Args:
        counts: of every rank, in rank order; the same on all ranks.

    Raises:
        StepError: the counts differ; the same error on every rank.
    """
    if len(set(counts)) == 1 or _UNKNOWN_COUNTS in counts:
        return
    ranks_by_counts = ranks_by_value(enumerate(counts))
    most_common = max(ranks_by_counts, key=lambda counts: (len(ranks_by_counts[counts]), counts))
    texts = [f"{ranks_text(ranks)} {counts}" for counts, ranks in ranks_by_counts.items() if counts != most_common]
    raise StepError(f"the ranks went different ways: {'; '.join(texts)}; the other ranks {most_common}. {REMEDY}")


def _count_text(count: int, noun: str) -> str:
    """Return a count for people, such as "2 forwards"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
