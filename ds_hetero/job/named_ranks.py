"""Ranks that a job has named in a message, and when one is named or no longer is.

One observation may be an accident, so a rank's state changes after several in a row that contradict it:

    not named    observed so, twice in a row        -> named
    named        observed otherwise, twice in a row -> not named
"""

from __future__ import annotations

OBSERVATIONS_IN_A_ROW = 2


class NamedRanks:
    """The ranks that are named, and the observations that contradict their state.

    Attributes:
        ranks: that are named.
    """

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self._num_contrary: dict[int, int] = {}  # by rank, in a row; ranks with none are left out

    def changes(self, rank: int, is_so: bool, *, at_once: bool = False) -> bool:
        """Note an observation of a rank; return True if the rank is named from now on, or no longer named.

        Args:
            is_so: whether the rank was observed to be what ranks are named for.
            at_once: whether this observation alone is enough.
        """
        if is_so == (rank in self.ranks):
            self._num_contrary.pop(rank, None)
            return False
        self._num_contrary[rank] = self._num_contrary.get(rank, 0) + 1
        if self._num_contrary[rank] < OBSERVATIONS_IN_A_ROW and not at_once:
            return False
        del self._num_contrary[rank]
        self.ranks ^= {rank}
        return True

    def restart(self) -> None:
        """Forget the observations; named ranks stay named."""
        self._num_contrary.clear()
