"""Table of attention times by sequence length and device speed, which the planners of the hetero-ring paper read."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ds_hetero.common.arrays import Floats
from ds_hetero.errors import PlanError


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileTable:
    """Times of self-attention, by sequence length and by the speed of the device.

    Example: ``lengths=(1024, 4096)``, ``speeds=(0.5, 1.0)`` and ``seconds=((0.2, 0.1), (3.2, 1.6))`` say that 4096
    tokens take 3.2 s on a device of half the fastest device's speed.

    Raises:
        PlanError: lengths or speeds are not positive and ascending, a row or column is missing, or a time is not
            positive and finite.
    """

    lengths: tuple[int, ...]  # tokens, ascending
    speeds: tuple[float, ...]  # relative to the fastest device, ascending; the last is 1
    seconds: tuple[tuple[float, ...], ...]  # ``seconds[i][j]`` for ``lengths[i]`` at ``speeds[j]``

    def __post_init__(self) -> None:
        for name, values in (("lengths", self.lengths), ("speeds", self.speeds)):
            if not values or any(a >= b for a, b in pairwise(values)) or values[0] <= 0:
                raise PlanError(f"{name} of a profile table must be positive and ascending, got {values}.")
        shape = {len(row) for row in self.seconds}
        if len(self.seconds) != len(self.lengths) or shape != {len(self.speeds)}:
            raise PlanError(
                f"seconds of a profile table needs a row for each of {len(self.lengths)} lengths and a column for each "
                f"of {len(self.speeds)} speeds, got {len(self.seconds)} rows of {sorted(shape)} columns."
            )
        if any(not 0 < value < float("inf") for row in self.seconds for value in row):
            raise PlanError("seconds of a profile table must be positive and finite.")

    def seconds_at(self, length: Floats, speed: float) -> Floats:
        """Return the seconds of attention over every ``length`` at one speed, interpolated between the table's points.

        Lengths, speeds and times are on logarithmic scales. Below the shortest length the curve continues with the
        slope between the two shortest ones, above the longest with that between the two longest ones. A speed outside
        the table's speeds counts as the nearest of them.
        """
        log_lengths, log_speeds = np.log(self.lengths), np.log(self.speeds)
        log_seconds = np.array([np.interp(np.log(speed), log_speeds, row) for row in np.log(self.seconds)])
        log_length = np.log(length)
        result = np.interp(log_length, log_lengths, log_seconds)
        if len(log_lengths) > 1:
            slopes = np.diff(log_seconds) / np.diff(log_lengths)
            before = log_seconds[0] + slopes[0] * (log_length - log_lengths[0])
            beyond = log_seconds[-1] + slopes[-1] * (log_length - log_lengths[-1])
            result = np.where(log_length < log_lengths[0], before, result)
            result = np.where(log_length > log_lengths[-1], beyond, result)
        return np.asarray(np.exp(result))
