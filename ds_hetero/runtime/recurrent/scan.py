"""A scan along the whole sequence: gated delta rule, Kimi delta attention, Mamba-2.

Heads are traded for tokens: every rank gives its tokens of all heads and gets all tokens of its own heads, in the order
of the sequence; the kernel runs on them as it is, document by document; the outputs travel back. Or, where states can
be passed on and that moves fewer bytes, every rank keeps its tokens (`pass_states`). Either way any kernel serves,
and any placement.

Dimension key: B batch, s this rank's tokens, L tokens of the whole sequence, H heads, h those of this rank.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn

from ds_hetero.runtime.attention.batch_layout import BatchLayout
from ds_hetero.runtime.recurrent.head_trade import Cuts, head_trade, shared_heads, to_sequence, to_shards
from ds_hetero.runtime.recurrent.scan_call import PassedState, Scan, Tensors
from ds_hetero.runtime.recurrent.sequences import sequences_of
from ds_hetero.runtime.recurrent.state_passing import chains_of, pass_states
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_clock import UNTIMED, Clock
from ds_hetero.values.placement import Range, Rows
from ds_hetero.values.splits import Split, share


def head_cuts(replica: Replica, num_heads: int) -> Cuts:
    """Return heads ``[start, stop)`` of every rank of the replica, in proportion to the schedule's tokens."""
    return Split(share(num_heads, replica.schedule.token_weights)).ranges


def scan(call: Scan, replica: Replica, batch: BatchLayout, clock: Clock = UNTIMED) -> Tensor:
    """Run a scan over the whole sequence; return this rank's tokens of the output, [B, s, H, D].

    Caller: every rank of the replica, once per layer.
    Collectives: those of `pass_states` or of `trade_heads`, the same on all ranks.
    """
    if call.passed_state is not None and passes_states(call, call.passed_state, replica, batch):
        return pass_states(call, call.passed_state, replica, batch, clock)
    return trade_heads(call, replica, batch, clock)


def passes_states(call: Scan, passed: PassedState, replica: Replica, batch: BatchLayout) -> bool:
    """Whether passing states sends no more bytes, over all ranks, than trading heads; the cost model's rule too."""
    like = call.inputs[call.output_like]
    token_bytes = like.element_size() * prod(like.shape[2:])
    token_bytes += sum(x.element_size() * prod(x.shape[2:]) for x in call.inputs.values())
    tokens, length = batch.placement.rank_tokens, batch.placement.length
    traded = token_bytes * batch.batch_size * (length - sum(count * count for count in tokens) / length)
    num_heads, width = like.shape[2], prod(like.shape[3:]) * call.inputs[passed.reader].shape[-1]
    state_bytes = 4 * num_heads * (width + 1)
    return state_bytes * chains_of(replica, batch).moved_states <= traded


def trade_heads(call: Scan, replica: Replica, batch: BatchLayout, clock: Clock = UNTIMED) -> Tensor:
    """`scan` by trading heads for tokens.

    Collectives: forward one all_to_all_single for each data type of the inputs and one for the output; the same again
        backward.
    """
    like = call.inputs[call.output_like]
    num_heads = like.shape[2]
    trade, cuts = head_trade(replica, batch), head_cuts(replica, num_heads)
    own = cuts[trade.index]
    heads_each = {name: num_heads // x.shape[2] for name, x in call.inputs.items()}
    input_cuts = {name: shared_heads(cuts, each) for name, each in heads_each.items()}
    gathered = to_sequence(list(call.inputs.values()), list(input_cuts.values()), trade, clock)
    inputs = {
        name: _one_for_each(x, heads_each[name], input_cuts[name][trade.index], own)
        for name, x in zip(call.inputs, gathered, strict=True)
    }
    parameters = {name: parameter[slice(*own)] for name, parameter in call.parameters.items()}
    if own[0] == own[1]:
        # Nothing, but in the graph: the others wait for this rank's backward, and ZeRO for gradients of all parameters.
        out = inputs[call.output_like] + sum(parameter.sum() for parameter in parameters.values())
    else:
        out = torch.cat([_rows_of(call, inputs, parameters, rows) for rows in sequences_of(batch)])
    return to_shards(out.to(like.dtype), cuts, trade, clock)


def _one_for_each(x: Tensor, heads_each: int, held: Range, own: Range) -> Tensor:
    """Repeat heads that serve several, where ``own`` ends inside such a group: one for each head then."""
    if own[0] % heads_each == 0 and own[1] % heads_each == 0:
        return x
    first = held[0] * heads_each  # by slices, since an index from the host would let it wait for the device
    return x.repeat_interleave(heads_each, dim=2)[:, :, own[0] - first : own[1] - first]


def _rows_of(call: Scan, inputs: Tensors, parameters: Tensors, rows: Rows) -> Tensor:
    """Return the output of some rows of the batch: zero outside of every sequence."""
    length = next(iter(inputs.values())).shape[1]
    parts, at = [], 0
    for start, stop in rows.documents:
        part = call.compute({name: x[rows.start : rows.stop, start:stop] for name, x in inputs.items()}, parameters)
        parts.append(_behind_zeros(part, start - at))
        at = stop
    out = torch.cat(parts, 1)
    return nn.functional.pad(out, (0, 0, 0, 0, 0, length - at))


def _behind_zeros(part: Tensor, count: int) -> Tensor:
    return nn.functional.pad(part, (0, 0, 0, 0, count, 0)) if count else part
