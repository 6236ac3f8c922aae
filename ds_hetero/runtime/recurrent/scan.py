"""Run a scan along a sequence that is split over ranks: gated delta rule, Kimi delta attention, Mamba-2.

There are two ways. By an all-to-all (`scan_by_all_to_all`), every rank exchanges its tokens of all heads for all
tokens of its own heads, runs the unchanged kernel on each document, and sends the outputs back. Or every rank keeps its
tokens, and states are passed between ranks (`pass_states`), if the scan allows it and fewer bytes are sent. Both work
with any kernel and any placement.

Dimension key: B batch, s this rank's tokens, L tokens of the whole sequence, H heads, h those of this rank.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn

from ds_hetero.runtime.attention.batch_layout import BatchLayout
from ds_hetero.runtime.recurrent.replica_all_to_all import Cuts, all_to_all_of, shared_heads, to_sequence, to_shards
from ds_hetero.runtime.recurrent.scan_call import PassedState, Scan, Tensors
from ds_hetero.runtime.recurrent.sequences import sequences_of
from ds_hetero.runtime.recurrent.state_passing import chains_of, pass_states
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_clock import UNTIMED, Clock
from ds_hetero.values.placement import Range, Rows
from ds_hetero.values.splits import Split, share


def head_cuts(replica: Replica, num_heads: int) -> Cuts:
    """Return each rank's heads ``[start, stop)``: shared out in proportion to the schedule's tokens."""
    return Split(share(num_heads, replica.schedule.token_weights)).ranges


def scan(call: Scan, replica: Replica, batch: BatchLayout, clock: Clock = UNTIMED) -> Tensor:
    """Run a scan over the whole sequence; return this rank's tokens of the output, [B, s, H, D].

    Caller: every rank of the replica, once per layer.
    Collectives: those of `pass_states` or of `scan_by_all_to_all`, the same on all ranks.
    """
    if call.passed_state is not None and should_pass_states(call, call.passed_state, replica, batch):
        return pass_states(call, call.passed_state, replica, batch, clock)
    return scan_by_all_to_all(call, replica, batch, clock)


def should_pass_states(call: Scan, passed: PassedState, replica: Replica, batch: BatchLayout) -> bool:
    """Whether `pass_states` sends at most as many bytes over all ranks as `scan_by_all_to_all`.

    The cost model has the same rule (`ds_hetero.cost.recurrent`). Example: ranks with 3 and 1 tokens. Of the 4 tokens,
    rank 0 computes the heads 3/4 and sends 3 x 1/4; rank 1 sends 1 x 3/4: together (4 - (9 + 1) / 4) = 1.5 tokens.
    """
    like = call.inputs[call.output_like]
    token_bytes = like.element_size() * prod(like.shape[2:])
    token_bytes += sum(x.element_size() * prod(x.shape[2:]) for x in call.inputs.values())
    tokens, length = batch.placement.rank_tokens, batch.placement.length
    all_to_all_bytes = token_bytes * batch.batch_size * (length - sum(count * count for count in tokens) / length)
    num_heads, width = like.shape[2], prod(like.shape[3:]) * call.inputs[passed.reader].shape[-1]
    state_bytes = 4 * num_heads * (width + 1)  # in float32: a state, and one decay per head
    return state_bytes * chains_of(replica, batch).moved_states <= all_to_all_bytes


def scan_by_all_to_all(call: Scan, replica: Replica, batch: BatchLayout, clock: Clock = UNTIMED) -> Tensor:
    """Run `scan` by an all-to-all: exchange this rank's tokens of all heads for all tokens of this rank's heads.

    Collectives: forward one all_to_all_single for each data type of the inputs and one for the output; the same again
        backward.
    """
    like = call.inputs[call.output_like]
    num_heads = like.shape[2]
    all_to_all, cuts = all_to_all_of(replica, batch), head_cuts(replica, num_heads)
    local_heads = cuts[all_to_all.index]
    heads_each = {name: num_heads // x.shape[2] for name, x in call.inputs.items()}
    input_cuts = {name: shared_heads(cuts, each) for name, each in heads_each.items()}
    gathered = to_sequence(list(call.inputs.values()), list(input_cuts.values()), all_to_all, clock)
    inputs = {}
    for name, x in zip(call.inputs, gathered, strict=True):
        inputs[name] = _repeat_shared_heads(x, heads_each[name], input_cuts[name][all_to_all.index], local_heads)
    parameters = {name: parameter[slice(*local_heads)] for name, parameter in call.parameters.items()}
    start, stop = local_heads
    if start == stop:
        # An empty output, but part of the graph: other ranks wait for this rank's backward, and ZeRO for gradients of
        # all parameters.
        out = inputs[call.output_like] + sum(parameter.sum() for parameter in parameters.values())
    else:
        out = torch.cat([_scan_rows(call, inputs, parameters, rows) for rows in sequences_of(batch)])
    return to_shards(out.to(like.dtype), cuts, all_to_all, clock)


def _repeat_shared_heads(x: Tensor, heads_each: int, shared_range: Range, local_heads: Range) -> Tensor:
    """Repeat shared heads, one for each of the local heads, if the local heads begin or end inside a group.

    Example: local value heads [1, 4), two to a key head. The key heads [0, 2) become 0 1 1, one for each value head.

    Args:
        heads_each: number of local heads that share one head of x.
        shared_range: heads ``[start, stop)`` that x has.
        local_heads: heads ``[start, stop)`` of this rank.
    """
    start, stop = local_heads
    if start % heads_each == 0 and stop % heads_each == 0:
        return x
    first = shared_range[0] * heads_each
    # By slices: an index tensor from the host would wait for the device.
    return x.repeat_interleave(heads_each, dim=2)[:, :, start - first : stop - first]


def _scan_rows(call: Scan, inputs: Tensors, parameters: Tensors, rows: Rows) -> Tensor:
    """Return the output [b, L, h, D] of some rows of the batch; zeros outside of all sequences."""
    length = next(iter(inputs.values())).shape[1]
    parts: list[Tensor] = []
    num_done = 0  # tokens that the parts have
    for start, stop in rows.documents:
        inputs_of_document = {name: x[rows.start : rows.stop, start:stop] for name, x in inputs.items()}
        part = call.compute(inputs_of_document, parameters)
        parts.append(_pad_front(part, start - num_done))
        num_done = stop
    out = torch.cat(parts, 1)
    return nn.functional.pad(out, (0, 0, 0, 0, 0, length - num_done))


def _pad_front(part: Tensor, count: int) -> Tensor:
    """Put ``count`` tokens of zeros before ``part`` [b, n, h, D]."""
    return nn.functional.pad(part, (0, 0, 0, 0, count, 0)) if count else part
