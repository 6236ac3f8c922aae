"""Where the tokens of placed documents lie: inside one group, on groups of one node, or on several nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ds_hetero.decision.start_text import announce
from ds_hetero.runtime.attention.batch_layout import BatchLayout

ZONES = ("local", "node", "cluster")


class DocumentZones:
    """Counts the tokens of this replica's batches by zone, see `ds_hetero.values.placement.Lane.zone`.

    Args:
        node: of every unit of the replica's schedule.
    """

    def __init__(self, node: Sequence[int]) -> None:
        self._node = node
        self._tokens: Counter[str] = Counter()
        self._is_announced = False

    def record_batch(self, batch: BatchLayout) -> None:
        """Count the tokens of a batch."""
        for lane in batch.placement.lanes:
            tokens = sum(stop - start for start, stop in lane.spans)
            self._tokens[lane.zone(self._node)] += batch.batch_size * tokens

    def take_shares(self) -> dict[str, float]:
        """Shares of the tokens since the last call, by zone; nothing where there were none."""
        tokens, self._tokens = self._tokens, Counter()
        total = tokens.total()
        return {zone: tokens[zone] / total for zone in ZONES} if total else {}

    def announce_once(self, shares: dict[str, float]) -> None:
        """Say at the first observation where documents lie; for rank 0."""
        if not shares or self._is_announced:
            return
        self._is_announced = True
        announce(
            f"documents: {shares['local']:.0%} of the tokens lie inside one group of ranks, {shares['node']:.0%} are "
            f"cut inside a node, {shares['cluster']:.0%} between nodes"
        )
