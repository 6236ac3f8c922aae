"""Times of the forward and backward of one linear-attention or SSM layer, computed from every rank's tokens.

The runtime (`ds_hetero.runtime.recurrent`) splits a scan over ranks in one of two ways, whichever sends fewer bytes:

    heads for tokens    Each rank sends its tokens of all heads, scans all tokens of some heads, and receives the
                        outputs of its tokens. Heads are split in proportion to tokens, in whole heads.
                        pass    longest work outside the scan + all-to-alls + longest scan
    states (Mamba-2)    Each rank scans its own tokens of all heads, receives the states of the ranks with earlier
                        tokens, and adds what these states contribute to its outputs.
                        pass    longest work with the scan + transfer of states + longest addition

For micro-batches of B sequences, the all-to-alls move B L (1 - sum of h_r^2) times the width of inputs and outputs,
where h_r is rank r's share of L tokens; states have the same size for any L. A convolution needs a few tokens of
earlier ranks: one start-up counts, and no time for the bytes.

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
    """Seconds of the three parts of one forward or backward."""

    work_BD: Floats  # compute of every rank before the exchange: all work but the scan; with states, the scan as well
    exchange_B: Floats  # all-to-alls of heads, or transfer of states
    scan_BD: Floats  # compute of every rank after the exchange: the scan, or the addition of earlier states' outputs

    @property
    def before_B(self) -> Floats:
        """Time of the slowest rank before the exchange."""
        return np.asarray(self.work_BD.max(axis=1))

    @property
    def total_B(self) -> Floats:
        """Time of the pass: slowest rank before the exchange, exchange, slowest rank after it."""
        return np.asarray(self.before_B + self.exchange_B + self.scan_BD.max(axis=1))


class RecurrentLayer:
    """Times of a linear-attention or SSM layer, for one cluster, model and workload.

    Attributes:
        token_s_D: seconds per token of forward and backward outside the scan, recomputation included.
        fixed_s_D: seconds of forward and backward outside the scan that do not depend on the number of tokens; a rank
            without tokens does not take them.
        scan_s_D: seconds of forward and backward of the scan, per token of the rank's shard.
    """

    def __init__(self, cluster: Cluster, model: ModelSpec, workload: Workload, rates: AchievedRates) -> None:
        layers = model.recurrent
        assert layers is not None, "the model has no linear-attention or SSM layers"
        self._layers, self._workload, self._rates = layers, workload, rates
        self._all_ranks = Grouping(cluster, [range(cluster.num_ranks)])  # scans exchange over all ranks
        batch, element = workload.micro_batch, workload.element_bytes
        matmul_s = flops.recurrent_matmul_flops(model) * rates.s_per_flop
        elementwise_s = flops.recurrent_elements(model) * element * rates.memory_s_per_byte
        self._token_s_D = batch * (matmul_s + elementwise_s)
        self._fixed_s_D = matmul_s * rates.half_tokens + rates.kernel_overhead_s
        # Scan of one token by one head: its FLOPs, and its inputs and output in memory.
        per_head, per_key_head = layers.input_bytes(element)
        scan_bytes = per_head + per_key_head * layers.num_key_heads / layers.num_heads + layers.head_dim * element
        self._head_s_D = batch * (layers.scan_flops * rates.s_per_flop + scan_bytes * rates.memory_s_per_byte)
        # Addition of an earlier state's part to the output of one token: a matmul with the state; read, add, write.
        output_bytes = layers.head_dim * element
        self._addition_s_D = (
            layers.num_heads
            * batch
            * (2 * layers.key_dim * layers.head_dim * rates.s_per_flop + 3 * output_bytes * rates.memory_s_per_byte)
        )
        self._copy_s_D = checkpoint_copy_s_D(cluster.devices, model, workload, recurrent=True)
        num_runs = 2 if workload.activation_checkpointing else 1  # of the forward
        # Kept attention is no attention of these layers: here the pass of the backward has the whole forward in it.
        self._repeats = 1 if workload.keeps_attention else num_runs
        num_forwards = num_runs + flops.MATMUL_BACKWARD  # a backward takes the time of so many forwards
        self.token_s_D, self.fixed_s_D = num_forwards * self._token_s_D, num_forwards * self._fixed_s_D
        self.token_s_D = self.token_s_D + num_runs * self._copy_s_D
        self.scan_s_D = num_forwards * layers.num_heads * self._head_s_D

    def passes(self, grouping: Grouping, tokens_BD: Floats) -> tuple[RecurrentTimes, RecurrentTimes]:
        """Return the times of one forward and one backward; with kept attention the backward recomputes the layer."""
        heads_BD = heads_by_tokens(tokens_BD, self._layers.num_heads)
        exchange_B = self._exchange_s(tokens_BD, heads_BD)
        work_BD = tokens_BD * self._token_s_D + np.where(tokens_BD > 0, self._fixed_s_D, 0.0)
        scan_BD = heads_BD * (self._workload.seq_len * self._head_s_D)
        if not self._layers.delta_rule:
            sends_states_B = self._sends_states(grouping, tokens_BD)
            exchange_B = np.where(sends_states_B, self._states_s(grouping, tokens_BD), exchange_B)
            local_scan_BD = self._layers.num_heads * tokens_BD * self._head_s_D
            work_BD = work_BD + np.where(sends_states_B[:, None], local_scan_BD, 0.0)
            scan_BD = np.where(sends_states_B[:, None], tokens_BD * self._addition_s_D, scan_BD)
        forward = RecurrentTimes(work_BD + tokens_BD * self._copy_s_D, exchange_B, scan_BD)
        backward = RecurrentTimes(flops.MATMUL_BACKWARD * work_BD, exchange_B, flops.MATMUL_BACKWARD * scan_BD)
        if self._workload.keeps_attention:
            backward = RecurrentTimes(*(again + once for again, once in zip(forward, backward, strict=True)))
        return forward, backward

    def busy_s(self, grouping: Grouping, tokens_D: Floats) -> Floats:
        """Return the time that every rank computes in forward, recomputation and backward, ``[D]``."""
        forward, backward = self.passes(grouping, tokens_D[None])
        forward_D, backward_D = (times.work_BD[0] + times.scan_BD[0] for times in (forward, backward))
        return np.asarray(self._repeats * forward_D + backward_D)

    def spans(self, times: RecurrentTimes, phase: str, begin_s: float, share: float) -> tuple[list[Span], float]:
        """Return when each rank is busy in one pass, with all times scaled by ``share``, and when the pass ends."""
        exchange_start_s = begin_s + share * float(times.before_B[0])
        exchange_stop_s = exchange_start_s + share * float(times.exchange_B[0])
        spans = []
        for rank, (work_s, scan_s) in enumerate(zip(times.work_BD[0], times.scan_BD[0], strict=True)):
            work_stop_s = begin_s + share * float(work_s)
            spans.append(Span.of(rank, "compute", "non_attention", begin_s, work_stop_s, phase=phase))
            spans.append(Span.of(rank, "network", "all_to_all", exchange_start_s, exchange_stop_s, phase=phase))
            if scan_s:
                scan_stop_s = exchange_stop_s + share * float(scan_s)
                spans.append(Span.of(rank, "compute", "non_attention", exchange_stop_s, scan_stop_s, phase=phase))
        return spans, begin_s + share * float(times.total_B[0])

    def _sends_states(self, grouping: Grouping, tokens_BD: Floats) -> Bools:
        """Whether the runtime sends states instead of heads (`ds_hetero.runtime.recurrent.scan`), ``[B]``."""
        layers, work = self._layers, self._workload
        per_head, per_key_head = layers.input_bytes(work.element_bytes)
        token_bytes = layers.num_heads * (per_head + layers.head_dim * work.element_bytes)
        token_bytes += layers.num_key_heads * per_key_head
        num_states_B = moved_states(grouping, tokens_BD)
        num_tokens_B = work.seq_len - (tokens_BD**2).sum(axis=1) / work.seq_len  # tokens that all-to-alls would send
        return np.asarray((num_states_B > 0) & (num_states_B * layers.state_bytes <= token_bytes * num_tokens_B))

    def _states_s(self, grouping: Grouping, tokens_BD: Floats) -> Floats:
        """Return the time to send the states of every rank to all others, and the convolution's tokens, ``[B]``.

        This is an upper bound, since in truth only later ranks need a rank's states.
        """
        pieces_BD = np.where(tokens_BD > 0, 2.0 if _is_zigzag(grouping) else 1.0, 0.0)
        bytes_BD = np.where(tokens_BD > 0, float(self._workload.micro_batch * self._layers.state_bytes), 0.0)
        states_s_B = exchange_s(self._all_ranks, pieces_BD, bytes_BD)[:, 0]
        return np.asarray(states_s_B + 2 * self._all_ranks.exchange_latency_s[0])

    def _exchange_s(self, tokens_BD: Floats, heads_BD: Ints) -> Floats:
        """Return the time of the all-to-alls of inputs and outputs, and of the convolution's tokens, ``[B]``.

        In the backward gradients travel instead, and take as long. There is one start-up for each: inputs, outputs,
        convolution. The delta rule has a fourth if elements are not fp32, since some of its inputs are fp32 and travel
        alone.
        """
        if self._all_ranks.cluster.num_ranks == 1:
            return np.zeros(len(tokens_BD))
        layers, work = self._layers, self._workload
        per_head, per_key_head = layers.input_bytes(work.element_bytes)
        inputs_BD = work.micro_batch * (per_head * heads_BD + per_key_head * self._key_heads(heads_BD)).astype(
            np.float64
        )
        outputs_BD = (work.micro_batch * layers.head_dim * work.element_bytes * heads_BD).astype(np.float64)
        # Both all-to-alls as rows of one call: the first B rows are inputs, the others outputs; there is one group.
        transfer_s = exchange_s(
            self._all_ranks, np.concatenate([tokens_BD, tokens_BD]), np.concatenate([inputs_BD, outputs_BD])
        )[:, 0]
        token_bytes_BD = inputs_BD + outputs_BD  # per token, of a rank's heads
        packed_BD = 2 * (tokens_BD * token_bytes_BD.sum(axis=1, keepdims=True) + work.seq_len * token_bytes_BD)
        copy_s_B = (packed_BD * self._rates.memory_s_per_byte).max(axis=1)
        num_calls = 4 if layers.delta_rule and work.element_bytes != 4 else 3
        num_rows = len(tokens_BD)
        latency_s = num_calls * self._all_ranks.exchange_latency_s[0]
        return np.asarray(transfer_s[:num_rows] + transfer_s[num_rows:] + copy_s_B + latency_s)

    def _key_heads(self, heads_BD: Ints) -> Ints:
        """Count the key heads that every rank needs for its heads; two ranks may need the same one."""
        heads_per_key_head = self._layers.num_heads // self._layers.num_key_heads
        stop_BD = np.cumsum(heads_BD, axis=1)
        start_BD = stop_BD - heads_BD
        key_stop_BD = -(-stop_BD // heads_per_key_head)
        key_start_BD = start_BD // heads_per_key_head
        return np.asarray(np.where(heads_BD > 0, key_stop_BD - key_start_BD, 0))


def _is_zigzag(grouping: Grouping) -> bool:
    """Whether every group holds two pieces of the sequence, and not one."""
    return grouping.zigzag and grouping.num_groups > 1


def moved_states(grouping: Grouping, tokens_BD: Floats) -> Ints:
    """Count the states of one sequence that all ranks together send, if every rank is a group, ``[B]``.

    Every rank with tokens holds one piece of the sequence, or two in a zigzag layout. It needs the states of all pieces
    before its last one, except its own. Example: three ranks send 0 + 1 + 2 = 3 states; in a zigzag layout, of pieces
    0 1 2 2 1 0, rank 2 needs 2 states, rank 1 needs 3, and rank 0 needs 4, together 9.
    """
    count_B = (tokens_BD > 0).sum(axis=1)
    return np.asarray((3 if _is_zigzag(grouping) else 1) * (count_B * (count_B - 1) // 2))


def heads_by_tokens(tokens_BD: Floats, num_heads: int) -> Ints:
    """Split the heads in proportion to tokens as the runtime does, by largest remainder; ties go to the lower rank."""
    ideal_BD = tokens_BD * (num_heads / tokens_BD.sum(axis=1, keepdims=True))
    heads_BD = np.floor(ideal_BD + 1e-9).astype(np.int64)
    missing_B = num_heads - heads_BD.sum(axis=1, keepdims=True)
    order_BD = np.argsort(np.round(heads_BD - ideal_BD, 9), axis=1, kind="stable")
    place_BD = np.empty_like(order_BD)
    np.put_along_axis(place_BD, order_BD, np.arange(tokens_BD.shape[1])[None], axis=1)
    return np.asarray(heads_BD + (place_BD < missing_B))
