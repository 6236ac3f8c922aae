"""The two passes of one layer that carries a state along the sequence: from tokens to times.

The runtime (`ds_hetero.runtime.recurrent`) splits a scan in one of two ways, whichever sends fewer bytes:

    heads for tokens    a rank gives its tokens of all heads, scans all tokens of its own heads, and gets the outputs of
                        its tokens back. Heads are shared out in proportion to tokens, to a whole head.
                        pass    longest work outside the scan + exchanges + longest scan
    states (Mamba-2)    a rank scans its own tokens of all heads, gets the state before them from the ranks that hold
                        earlier ones, and adds what it contributes.
                        pass    longest work with scan + states + longest addition

The exchanges of heads move B L (1 - sum of h_r^2) times the width of inputs and outputs, h_r being rank r's share;
states are as large for any L. A convolution takes a few tokens from the ranks before: one start-up and no time for its
bytes.

Dimension key: B assignments, D ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Bools, Floats, Ints
from ds_hetero.cost.model import Span
from ds_hetero.cost.terms import flops
from ds_hetero.cost.terms.exchange import exchange_s
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.cost.terms.host import checkpoint_copy_s_D
from ds_hetero.cost.terms.rates import AchievedRates
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec


class RecurrentTimes(NamedTuple):
    """One forward or backward, in seconds.

    ``work_BD`` before the exchange (outside the scan; where states are passed on, the scan as well) and ``scan_BD``
    after it (the scan, or what states add to it) by rank, ``exchange_B`` of all ranks together.
    """

    work_BD: Floats
    exchange_B: Floats
    scan_BD: Floats

    @property
    def before_B(self) -> Floats:
        """Work before the exchange of the slowest rank."""
        return np.asarray(self.work_BD.max(axis=1))

    @property
    def total_B(self) -> Floats:
        """Time of the pass."""
        return np.asarray(self.before_B + self.exchange_B + self.scan_BD.max(axis=1))


class RecurrentLayer:
    """Times of a layer that carries a state, for one cluster, model and workload.

    Attributes:
        token_s_D: forward and backward outside the scan, per token.
        fixed_s_D: the same for a rank that has tokens, whatever their number.
        scan_s_D: forward and backward of the scan, per token that the rank holds.
    """

    def __init__(self, cluster: Cluster, model: ModelSpec, workload: Workload, rates: AchievedRates) -> None:
        layers = model.recurrent
        assert layers is not None, "the model has no layers that carry a state"
        self._layers, self._workload, self._rates = layers, workload, rates
        self._whole = Grouping(cluster, [range(cluster.num_ranks)])
        batch, element = workload.micro_batch, workload.element_bytes
        products = flops.recurrent_matmul_flops(model) * rates.s_per_flop
        elements = flops.recurrent_elements(model) * element * rates.memory_s_per_byte
        self._token_s_D, self._fixed_s_D = (
            batch * (products + elements),
            products * rates.half_tokens + rates.kernel_overhead_s,
        )
        per_head, per_key_head = layers.input_bytes(element)
        moved = per_head + per_key_head * layers.num_key_heads / layers.num_heads + layers.head_dim * element
        self._head_s_D = batch * (layers.scan_flops * rates.s_per_flop + moved * rates.memory_s_per_byte)
        out = layers.head_dim * element
        self._addition_s_D = (
            layers.num_heads
            * batch
            * (2 * layers.key_dim * layers.head_dim * rates.s_per_flop + 3 * out * rates.memory_s_per_byte)
        )
        self._copy_s_D = checkpoint_copy_s_D(cluster.devices, model, workload)
        self._repeats = 2 if workload.activation_checkpointing else 1
        passes = self._repeats + flops.MATMUL_BACKWARD
        self.token_s_D, self.fixed_s_D = passes * self._token_s_D, passes * self._fixed_s_D
        self.token_s_D = self.token_s_D + self._repeats * self._copy_s_D
        self.scan_s_D = passes * layers.num_heads * self._head_s_D

    def passes(self, grouping: Grouping, tokens_BD: Floats) -> tuple[RecurrentTimes, RecurrentTimes]:
        """Return one forward and one backward, without what the backward computes again."""
        heads_BD = heads_by_tokens(tokens_BD, self._layers.num_heads)
        exchange_B = self._exchange_s(tokens_BD, heads_BD)
        work_BD = tokens_BD * self._token_s_D + np.where(tokens_BD > 0, self._fixed_s_D, 0.0)
        scan_BD = heads_BD * (self._workload.seq_len * self._head_s_D)
        if not self._layers.delta_rule:
            passes_B = self._passes_states(grouping, tokens_BD)
            exchange_B = np.where(passes_B, self._states_s(grouping, tokens_BD), exchange_B)
            own_BD = self._layers.num_heads * tokens_BD * self._head_s_D
            work_BD = work_BD + np.where(passes_B[:, None], own_BD, 0.0)
            scan_BD = np.where(passes_B[:, None], tokens_BD * self._addition_s_D, scan_BD)
        forward = RecurrentTimes(work_BD + tokens_BD * self._copy_s_D, exchange_B, scan_BD)
        return forward, RecurrentTimes(flops.MATMUL_BACKWARD * work_BD, exchange_B, flops.MATMUL_BACKWARD * scan_BD)

    def busy_s(self, grouping: Grouping, tokens_D: Floats) -> Floats:
        """Time that every rank computes, forward, backward and again, ``[D]``."""
        forward, backward = self.passes(grouping, tokens_D[None])
        compute = [times.work_BD[0] + times.scan_BD[0] for times in (forward, backward)]
        return np.asarray(self._repeats * compute[0] + compute[1])

    def spans(self, times: RecurrentTimes, phase: str, begin_s: float, share: float) -> tuple[list[Span], float]:
        """Bars of one pass, all scaled by ``share``, and when it ends."""
        ready_s = begin_s + share * float(times.before_B[0])
        arrived_s = ready_s + share * float(times.exchange_B[0])
        spans = []
        for rank, (work_s, scan_s) in enumerate(zip(times.work_BD[0], times.scan_BD[0], strict=True)):
            worked_s = begin_s + share * float(work_s)
            spans.append(Span.of(rank, "compute", "non_attention", begin_s, worked_s, phase=phase))
            spans.append(Span.of(rank, "network", "all_to_all", ready_s, arrived_s, phase=phase))
            if scan_s:
                scanned_s = arrived_s + share * float(scan_s)
                spans.append(Span.of(rank, "compute", "non_attention", arrived_s, scanned_s, phase=phase))
        return spans, begin_s + share * float(times.total_B[0])

    def _passes_states(self, grouping: Grouping, tokens_BD: Floats) -> Bools:
        """Whether states are passed on, by the runtime's rule (`ds_hetero.runtime.recurrent.scan`), ``[B]``."""
        layers, work = self._layers, self._workload
        per_head, per_key_head = layers.input_bytes(work.element_bytes)
        token_bytes = layers.num_heads * (per_head + layers.head_dim * work.element_bytes)
        token_bytes += layers.num_key_heads * per_key_head
        moved_B = moved_states(grouping, tokens_BD)
        traded_B = work.seq_len - (tokens_BD**2).sum(axis=1) / work.seq_len
        return np.asarray((moved_B > 0) & (moved_B * layers.state_bytes <= token_bytes * traded_B))

    def _states_s(self, grouping: Grouping, tokens_BD: Floats) -> Floats:
        """States of every rank to all others, as if none were first; and the convolution's tokens, ``[B]``."""
        pieces_BD = np.where(tokens_BD > 0, 2.0 if _is_zigzag(grouping) else 1.0, 0.0)
        bytes_BD = np.where(tokens_BD > 0, float(self._workload.micro_batch * self._layers.state_bytes), 0.0)
        states_B = exchange_s(self._whole, pieces_BD, bytes_BD)[:, 0]
        return np.asarray(states_B + 2 * self._whole.exchange_latency_s[0])

    def _exchange_s(self, tokens_BD: Floats, heads_BD: Ints) -> Floats:
        """Inputs one way, the output the other way (or their gradients), and the convolution's tokens, ``[B]``.

        Inputs of another data type travel on their own: three start-ups for the delta rule with the convolution's.
        """
        if self._whole.cluster.num_ranks == 1:
            return np.zeros(len(tokens_BD))
        layers, work = self._layers, self._workload
        per_head, per_key_head = layers.input_bytes(work.element_bytes)
        inputs_BD = work.micro_batch * (per_head * heads_BD + per_key_head * self._key_heads(heads_BD)).astype(
            np.float64
        )
        outputs_BD = (work.micro_batch * layers.head_dim * work.element_bytes * heads_BD).astype(np.float64)
        both = exchange_s(self._whole, np.concatenate([tokens_BD, tokens_BD]), np.concatenate([inputs_BD, outputs_BD]))[
            :, 0
        ]
        width_BD = inputs_BD + outputs_BD
        packed_BD = 2 * (tokens_BD * width_BD.sum(axis=1, keepdims=True) + work.seq_len * width_BD)
        copies_B = (packed_BD * self._rates.memory_s_per_byte).max(axis=1)
        calls = 4 if layers.delta_rule and work.element_bytes != 4 else 3
        count = len(tokens_BD)
        return np.asarray(both[:count] + both[count:] + copies_B + calls * self._whole.exchange_latency_s[0])

    def _key_heads(self, heads_BD: Ints) -> Ints:
        """Key heads that every rank needs; one that lies on a cut goes to both sides."""
        each = self._layers.num_heads // self._layers.num_key_heads
        stop_BD = np.cumsum(heads_BD, axis=1)
        start_BD = stop_BD - heads_BD
        return np.asarray(np.where(heads_BD > 0, -(-stop_BD // each) - start_BD // each, 0))


def _is_zigzag(grouping: Grouping) -> bool:
    return grouping.zigzag and grouping.num_groups > 1


def moved_states(grouping: Grouping, tokens_BD: Floats) -> Ints:
    """States of one row that all ranks together send forward, where every rank is a group of its own, ``[B]``.

    Every rank with tokens holds one piece, or in a zigzag two, and needs the states of all pieces before its last.
    """
    count_B = (tokens_BD > 0).sum(axis=1)
    return np.asarray((3 if _is_zigzag(grouping) else 1) * (count_B * (count_B - 1) // 2))


def heads_by_tokens(tokens_BD: Floats, num_heads: int) -> Ints:
    """Whole heads in proportion to tokens, by largest remainder, as the runtime cuts them; ties to the lower rank."""
    ideal_BD = tokens_BD * (num_heads / tokens_BD.sum(axis=1, keepdims=True))
    heads_BD = np.floor(ideal_BD + 1e-9).astype(np.int64)
    missing_B = num_heads - heads_BD.sum(axis=1, keepdims=True)
    order_BD = np.argsort(np.round(heads_BD - ideal_BD, 9), axis=1, kind="stable")
    place_BD = np.empty_like(order_BD)
    np.put_along_axis(place_BD, order_BD, np.arange(tokens_BD.shape[1])[None], axis=1)
    return np.asarray(heads_BD + (place_BD < missing_B))
