"""Who is slow? A score per rank, and a message when a rank stays behind the others.

A rank's score is the computing time of a typical rank over its own, at most 1: a rank of score 0.7 computes for 1 / 0.7
of the time that the others do, and they wait for it. Typical is the median of the ranks that have work, the faster one
of two. Computing time is that of attention and of the rest of forward and backward, without any waiting; a rank's own
is its median over the latest steps, see `ds_hetero.job.rank_times.RECENT_STEPS`.

A rank is a straggler when two observations in a row put it at least 10 % behind, or one 20 %. With 5 % of noise per
step the medians of ten steps have 2 %, so that chance alone puts hardly a rank there once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median_low
from typing import NamedTuple

from ds_hetero.common.text import time_text
from ds_hetero.job.job_times import JobTimes
from ds_hetero.job.rank_times import RECENT_STEPS

BEHIND = 0.9  # score below which a rank is behind
FAR_BEHIND = 0.8  # below which one observation is enough
OBSERVATIONS_IN_A_ROW = 2  # observations in a row before a rank is named, or said to have caught up


class Remedy(NamedTuple):
    """Change that would let the others wait less."""

    subject: str  # of the sentence that says what it saves, with its verb
    setting: str


OF_TOKENS = Remedy("Re-planning is", '"replan": {"enabled": true}')
OF_SAMPLES = Remedy(
    "Samples in proportion to speed are", '"schedule" with the file that "ds-hetero replicas --out FILE" writes'
)
OF_LAYERS = Remedy("Moving layers is", '"replan": {"enabled": true}')


def scores(own_s: Sequence[float]) -> list[float]:
    """Score of every rank; 1 for ranks without work. ``own_s``: seconds that each rank computes in a step."""
    working = [seconds for seconds in own_s if seconds > 0]
    typical_s = median_low(working) if working else 0.0
    return [min(typical_s / seconds, 1.0) if seconds > 0 else 1.0 for seconds in own_s]


class Stragglers:
    """Follows the scores; on rank 0.

    Args:
        gain: share of a step that the remedy is predicted to save by these times; None where nothing can be said. It
            is called when a rank is named, since it may search.
        remedy: what could be done; None where there is nothing.
    """

    def __init__(self, gain: Callable[[JobTimes], float | None], remedy: Remedy | None = OF_TOKENS) -> None:
        self._gain, self._remedy = gain, remedy
        self._behind: dict[int, int] = {}  # observations in a row, by rank; negative: since it caught up
        self.named: set[int] = set()

    def observe(self, step: int, seen: JobTimes) -> list[str]:
        """Take an observation of all ranks into account; return what there is to say now."""
        own_s = [rank.own_median_s for rank in seen.ranks]
        lines = []
        for rank, score in enumerate(scores(own_s)):
            is_behind = score < BEHIND
            if is_behind == (rank in self.named):
                self._behind.pop(rank, None)
                continue
            self._behind[rank] = self._behind.get(rank, 0) + 1
            if self._behind[rank] < OBSERVATIONS_IN_A_ROW and score >= FAR_BEHIND:
                continue
            del self._behind[rank]
            if is_behind:
                self.named.add(rank)
                lines.append(self._straggler_text(step, rank, score, seen))
            else:
                self.named.remove(rank)
                lines.append(f"step {step}: rank {rank} is no straggler any more, its score is {score:.2f}")
        return lines

    def _straggler_text(self, step: int, rank: int, score: float, seen: JobTimes) -> str:
        own = seen.ranks[rank]
        text = (
            f"step {step}: rank {rank} is a straggler: it computes for {time_text(own.own_median_s)} of a step "
            f"(median of the last {RECENT_STEPS}, {time_text(own.own_min_s)} to {time_text(own.own_max_s)}), "
            f"a typical rank for {time_text(score * own.own_median_s)}: score {score:.2f}"
        )
        if self._remedy is None:
            return f"{text}."
        gain = self._gain(seen)
        if gain is None or gain <= 0:
            return f"{text}. {self._remedy.subject} not predicted to save anything."
        return f"{text}. {self._remedy.subject} predicted to save {gain:.0%} of a step: {self._remedy.setting}."

    def restart(self) -> None:
        """Forget what was observed under another plan, or before a pause."""
        self._behind.clear()
