"""Count the tokens of placed documents by zone: in one group of ranks, in groups of one node, on several nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ds_hetero.common.announce import announce
from ds_hetero.runtime.attention.batch_layout import BatchLayout

ZONES = ("local", "node", "cluster")


class DocumentZones:
    """Counts the tokens of this replica's batches by zone, see `ds_hetero.values.placement.Lane.zone`.

    Args:
        node: by unit of the placement (a group of the schedule), the number of its node.
    """

    def __init__(self, node: Sequence[int]) -> None:
        self._node = node
        self._tokens: Counter[str] = Counter()  # by zone, since the last `take_shares`
        self._moved_tokens = 0  # tokens that one rank holds and another one attends to
        self._is_announced = False

    def record_batch(self, batch: BatchLayout) -> None:
        """Count the tokens of a batch, unless it is a single document that was sharded by length."""
        if batch.placement.is_stream and len(batch.placement.rows[0].documents) < 2:
            return
        self._moved_tokens += batch.batch_size * sum(move.tokens for move in batch.placement.moves)
        for lane in batch.placement.lanes:
            tokens = sum(stop - start for start, stop in lane.spans)
            self._tokens[lane.zone(self._node)] += batch.batch_size * tokens

    def take_shares(self) -> dict[str, float]:
        """Return the share of the tokens since the last call by zone; empty without tokens."""
        tokens, self._tokens = self._tokens, Counter()
        total = tokens.total()
        return {zone: tokens[zone] / total for zone in ZONES} if total else {}

    def announce_once(self, shares: dict[str, float]) -> None:
        """Announce the shares at the first call that has some; on rank 0."""
        if not shares or self._is_announced:
            return
        self._is_announced = True
        text = (
            f"documents: {shares['local']:.0%} of the tokens lie inside one group of ranks, {shares['node']:.0%} are "
            f"cut inside a node, {shares['cluster']:.0%} between nodes"
        )
        if self._moved_tokens:
            text += f"; {self._moved_tokens:,} tokens change ranks before attention and after it"
        announce(text)
