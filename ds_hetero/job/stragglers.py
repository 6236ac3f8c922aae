"""Detect stragglers: score every rank, and report a rank that stays behind the others.

A rank's score is the computing time of a typical rank divided by its own, at most 1. A rank with score 0.7 computes
1 / 0.7 = 1.43 times as long as the others, and they wait for it. The typical rank is the median of the ranks that have
work, the faster one of the middle two. Computing time is that of attention and of the rest of forward and backward,
without any waiting, as the median over the latest steps (`ds_hetero.job.rank_times.RECENT_STEPS`).

    not named    score < 0.9 twice in a row, or < 0.8 once     -> named, with a message
    named        score >= 0.9 twice in a row                   -> not named, with a message

With 5 % of noise per step, medians of ten steps have a noise of 2 %, so that chance alone names hardly any rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median_low
from typing import NamedTuple

from ds_hetero.common.text import time_text
from ds_hetero.job.job_times import JobTimes
from ds_hetero.job.named_ranks import NamedRanks
from ds_hetero.job.rank_times import RECENT_STEPS

STRAGGLER_SCORE = 0.9  # a rank with a lower score is behind; 1 less five times the noise of a median
CLEAR_STRAGGLER_SCORE = 0.8  # below this score, one observation is enough; chosen, never measured


class Remedy(NamedTuple):
    """Change of the configuration after which ranks would wait less for a straggler."""

    subject: str  # first words of "... predicted to save 10% of a step": "Re-planning is"
    setting: str  # the key to add to the section


MOVE_TOKENS = Remedy("Re-planning is", '"replan": {"enabled": true}')
SHARE_SAMPLES = Remedy(
    "Samples in proportion to speed are", '"schedule" with the file that "ds-hetero replicas --out FILE" writes'
)
MOVE_LAYERS = Remedy("Moving layers is", '"replan": {"enabled": true}')


def scores(compute_s: Sequence[float]) -> list[float]:
    """Return the score of every rank; 1 for ranks without work.

    Args:
        compute_s: seconds that each rank computes in a step.
    """
    positive_s = [seconds for seconds in compute_s if seconds > 0]
    typical_s = median_low(positive_s) if positive_s else 0.0
    return [min(typical_s / seconds, 1.0) if seconds > 0 else 1.0 for seconds in compute_s]


class Stragglers:
    """Names stragglers by the scores of successive observations; on rank 0.

    Args:
        gain: returns the share of a step that the remedy is predicted to save at these times; None if that cannot be
            predicted. Called only when a rank is named, since it may run a search.
        remedy: None if no setting would help.
    """

    def __init__(self, gain: Callable[[JobTimes], float | None], remedy: Remedy | None = MOVE_TOKENS) -> None:
        self._gain, self._remedy = gain, remedy
        self._named = NamedRanks()

    @property
    def named_ranks(self) -> set[int]:
        """The ranks that are named as stragglers."""
        return self._named.ranks

    def observe(self, step: int, job_times: JobTimes) -> list[str]:
        """Score all ranks by their times in one observation; return messages about new and former stragglers."""
        compute_s = [rank.own_median_s for rank in job_times.ranks]
        lines = []
        for rank, score in enumerate(scores(compute_s)):
            is_behind = score < STRAGGLER_SCORE
            if not self._named.changes(rank, is_behind, at_once=score < CLEAR_STRAGGLER_SCORE):
                continue
            if is_behind:
                lines.append(self._straggler_text(step, rank, score, job_times))
            else:
                lines.append(f"step {step}: rank {rank} is no longer a straggler, its score is {score:.2f}")
        return lines

    def _straggler_text(self, step: int, rank: int, score: float, job_times: JobTimes) -> str:
        """Return the message that names a straggler and the remedy, with the predicted gain."""
        times = job_times.ranks[rank]
        text = (
            f"step {step}: rank {rank} is a straggler: it computes for {time_text(times.own_median_s)} of a step "
            f"(median of the last {RECENT_STEPS}, {time_text(times.own_min_s)} to {time_text(times.own_max_s)}), "
            f"a typical rank for {time_text(score * times.own_median_s)}: score {score:.2f}"
        )
        if self._remedy is None:
            return f"{text}."
        gain = self._gain(job_times)
        if gain is None or gain <= 0:
            return f"{text}. {self._remedy.subject} not predicted to save anything."
        return f"{text}. {self._remedy.subject} predicted to save {gain:.0%} of a step: {self._remedy.setting}."

    def restart(self) -> None:
        """Discard the observations under another plan, or before a pause; named ranks stay named."""
        self._named.restart()
