"""What a rank's calls write: `Ring` says so by sizes and ranges, these tests by marking every element."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from ds_hetero.batch.ring_steps import Ring, make_rings
from ds_hetero.batch.ring_table import RingTable
from tests.unit.batch.test_ring_table import tables


def _counted(ring: Ring, source: int, num_keys: int) -> list[np.ndarray]:
    """Return, for each sub-ring, how many calls have each key [rows, heads, keys] of a source."""
    num_rows = ring.table.placement.rows[-1].stop
    counts = []
    for sub, calls in zip(ring.sub_rings, ring.calls[source], strict=True):
        count = np.zeros((num_rows, sub.kv_heads.stop - sub.kv_heads.start, num_keys), int)
        for call in calls:
            count[call.keys] += 1
        counts.append(count)
    return counts


@given(tables())
def test_what_is_written_by_first_calls_and_once_is_known(table: RingTable) -> None:
    for rank in range(table.size):
        (ring,) = make_rings([table], rank)
        num_tokens = ring.tokens.stop - ring.tokens.start
        written = np.zeros((table.placement.rows[-1].stop, ring.num_q, num_tokens), int)
        for calls in (calls for of_source in ring.calls for calls in of_source):
            for call in calls:
                written[call.queries] += call.first
        assert written.max(initial=0) <= 1
        assert ring.first_calls_cover_queries == bool((written == 1).all())

        for source in range(table.size):
            num_keys = num_tokens if source == ring.position else ring.num_travelling_keys(source)
            is_once = all((count == 1).all() for count in _counted(ring, source, num_keys))
            assert (source in ring.sources_with_each_key_once) == is_once


@given(tables())
def test_own_gradients_are_stored_only_before_any_arrives(table: RingTable) -> None:
    for rank in range(table.size):
        (ring,) = make_rings([table], rank)
        arrivals = [
            transfer.due
            for round_ in ring.backward_grad_rounds
            for transfer in round_.receives
            if transfer.source == ring.position
        ]
        own_step = next((s for s in range(ring.steps) if ring.backward_source(s) == ring.position), None)
        if ring.stores_own_key_gradients:
            assert own_step is not None
            assert all(due > own_step for due in arrivals)
