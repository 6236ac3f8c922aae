"""Simulate a placement of documents step by step over a few layers: when does the last rank end?

There is no barrier. A rank computes the blocks of its rings in order, rings between nodes first, and a block when its
keys and values have arrived. These travel ahead of the computation, one transfer at a time into a rank, and between
nodes one at a time through the NICs of a node. In the backward gradients travel home, and a layer begins when they have
arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.reproduce.zeppelin_setting import BACKWARD_COMPUTE, BACKWARD_WIRE, Setting

LAYERS = 8

Pieces = Sequence[tuple[int, int]]


def block_s(lengths: Sequence[int], pieces: Sequence[Pieces], node: Sequence[int], setting: Setting) -> float:
    """Return the time of one layer, forward and backward, on average over `LAYERS`.

    Args:
        lengths: of the documents.
        pieces: ranks of every document, with their tokens.
        node: of every rank.
        setting: the model and the cluster.
    """
    rings = [(n, sorted(ring)) for n, ring in zip(lengths, pieces, strict=True) if len(ring) > 1]
    rings.sort(key=lambda ring: (-len({node[rank] for rank, _ in ring[1]}), -ring[0]))
    tokens, local_pairs = [0] * setting.ranks, [0.0] * setting.ranks
    for n, ring in zip(lengths, pieces, strict=True):
        for rank, count in ring:
            tokens[rank] += count
            local_pairs[rank] += n * n / 2 if len(ring) == 1 else 0.0
    total_s = 0.0
    for compute, wire, linear in ((1.0, 1.0, 1.0), (BACKWARD_COMPUTE, BACKWARD_WIRE, 2.0)):
        end_s = [0.0] * setting.ranks
        token_s = linear * setting.linear_s + setting.experts_wire_s
        for _ in range(LAYERS):
            ready_s = [at + token_s * count for at, count in zip(end_s, tokens, strict=True)]
            now_s, home_s = _rings(rings, ready_s, node, setting, compute * setting.pair_s, wire, wire > 1)
            local_s = (compute * pairs * setting.pair_s for pairs in local_pairs)
            end_s = [max(at + own, home) for at, own, home in zip(now_s, local_s, home_s, strict=True)]
        total_s += max(end_s)
    return total_s / LAYERS


def _rings(
    rings: Sequence[tuple[int, Pieces]],
    ready_s: Sequence[float],
    node: Sequence[int],
    setting: Setting,
    pair_s: float,
    wire: float,
    backward: bool,
) -> tuple[list[float], list[float]]:
    """Return when every rank has finished its rings, and when the gradients of its keys and values are home."""
    now_s, home_s = list(ready_s), [0.0] * len(ready_s)
    port_s: dict[tuple[str, int], float] = {}
    for _, ring in rings:
        size = len(ring)
        arrived_s = [ready_s[rank] for rank, _ in ring]  # of the block that a member is to compute next
        done_s = [0.0] * size  # of the block of every member, once all before in the ring have added to its gradients
        for step in range(size):
            if step:
                arrived_s = _passed_on(ring, arrived_s, step, node, setting, wire, port_s)
            for at, (rank, count) in enumerate(ring):
                source = (at - step) % size
                now_s[rank] = max(now_s[rank], arrived_s[at]) + count * ring[source][1] / 2 * pair_s
                done_s[source] = max(done_s[source], now_s[rank])
        if backward:
            for at, (rank, count) in enumerate(ring):
                crosses = node[ring[at - 1][0]] != node[rank]
                last_hop_s = wire / 2 * setting.wire_s(count, crosses=crosses, routed=True)
                home_s[rank] = max(home_s[rank], done_s[at] + last_hop_s)
    return now_s, home_s


def _passed_on(
    ring: Pieces,
    arrived_s: Sequence[float],
    step: int,
    node: Sequence[int],
    setting: Setting,
    wire: float,
    port_s: dict[tuple[str, int], float],
) -> list[float]:
    """Return when the latest blocks of every member have reached the next one."""
    size = len(ring)
    next_s = [0.0] * size
    for at, (rank, _) in enumerate(ring):
        sender, source = ring[at - 1][0], ring[(at - step) % size]
        crosses = node[sender] != node[rank]
        port = ("node", node[rank]) if crosses else ("rank", rank)
        start_s = max(arrived_s[at - 1], port_s.get(port, 0.0))
        next_s[at] = start_s + wire * setting.wire_s(source[1], crosses=crosses, routed=True)
        port_s[port] = next_s[at]
    return next_s
