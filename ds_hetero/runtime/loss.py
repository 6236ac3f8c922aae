"""The loss of a sequence spread over ranks, scaled so that DeepSpeed's plain average of gradients is its gradient.

DeepSpeed, shown no sequence parallelism, averages over all W ranks: it applies 1/W times the sum over ranks of what
each rank's backward produced. Attention carries gradients between the ranks of a replica, so if every rank r of
replica R starts its backward with the same factor c on S_r, the sum of its token losses, then the sum over R's ranks
is c times the gradient of S_R, the sum of S_r over R. With n_R valid tokens in R, P replicas, and N valid tokens
(``num_items``) in all micro-batches of all replicas of one optimizer step:

    wanted                                      factor c on S_r        value returned, equal on all ranks of R
    mean over replicas of S_R / n_R             W / (P n_R)            S_R / n_R
    token mean: sum of all S_R / N              W / N                  W S_R / (|R| N)

The second is what one process computes on the whole batch; its values, averaged over ranks and added up over the
micro-batches, are the loss of the whole batch. An engine that divides by the number of micro-batches, as DeepSpeed's
backward does without ``scale_wrt_gas=False``, is right for the first; for the second it has to be undone.

A loss that a training script computes itself is brought to the same factor. With n_r valid tokens on rank r:

    convention        loss on rank r              its own factor on S_r
    replica_mean      S_R / n_R, by a differentiable all_gather, whose backward adds up over the |R| ranks   |R| / n_R
    local_mean        S_r / n_r                   1 / n_r
    local_sum         S_r                         1
    local_share       S_r / n_R                   1 / n_R

A module that every rank runs whole has samples where these have tokens: its ``"sample_mean"``, the mean over a rank's
samples, is a ``"local_mean"``.

Dimension key: B batch, s tokens of this rank, V vocabulary.

The load-balancing loss of a mixture of experts over sequences that ranks hold parts of.

    loss = E * sum over e of f_e * P_e

f_e is the share of tokens that are sent to expert e (times the experts a token is sent to) and P_e the mean probability
of expert e, both over the tokens of all layers (Switch Transformer, arXiv:2101.03961, equations 4 to 6, as transformers
sums them over layers). A product of means is no mean: counts and probabilities are added up over the replica first.

Dimension key: T tokens of the rank's part of the batch, E experts.

Log-probabilities and losses of tokens from logits, keeping nothing of the size of the logits but the logits. Where
ranks have the logits of a part of the words each, they exchange three numbers a token: the largest log-sum-exp, and
in one message the sum of exponentials and the logit of the label (Megatron-LM, arXiv:1909.08053, section 3).

``torch.nn.functional.cross_entropy(logits.float(), ...)`` keeps two fp32 copies of them: 32 GB for 32K tokens and a
vocabulary of 128K. Here log-sum-exps are kept, and the softmax is computed again, chunk by chunk, for the gradient.

Dimension key: B batch, s tokens of this rank, T tokens B * s, V vocabulary, or this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node

from ds_hetero.errors import BatchError
from ds_hetero.runtime.data.shards import IGNORE_INDEX
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.vocabulary import VocabularyPart

_NODES_SEARCHED = 32  # of the graph above a loss, for what users add to it
_MARK = "ds_hetero_loss"  # of a model's outputs

CONVENTIONS = ("replica_mean", "local_mean", "local_sum", "local_share")


def sequence_parallel_loss(
    loss_sum: Tensor,
    num_tokens: Tensor | int,
    replica: Replica,
    num_items: Tensor | float | None = None,
    divisor: int = 1,
    num_labels: Tensor | float | None = None,
) -> Tensor:
    """The replica's loss as a scalar to call backward on; table above.

    Args:
        loss_sum: scalar, this rank's token losses added up. A mean times ``num_tokens`` will do.
        num_tokens: how many there are. Where it is 0, ``loss_sum`` counts as 0, even if it is NaN, and so does its
            gradient.
        num_items: valid tokens of the optimizer step over all ranks, see `count_items`; left out, each micro-batch of
            each replica weighs the same.
        divisor: with ``num_items``: what the engine will divide by, to be undone.
        num_labels: without ``num_items``: what to divide by in place of n_R.

    Returns:
        A scalar of ``loss_sum``'s dtype; 0 where no rank of the replica has a valid token.

    Caller: every rank of the replica, once per micro-batch.
    Collectives: one all_reduce of two numbers forward, none backward.
    """
    world_size, device = dist.get_world_size(), loss_sum.device
    num_tokens = torch.as_tensor(num_tokens, device=device)
    loss_sum = loss_sum.masked_fill(num_tokens == 0, 0.0)
    replica_total = torch.stack([loss_sum.detach().double(), num_tokens.double()])
    dist.all_reduce(replica_total, group=replica.sp_group)
    replica_sum, replica_tokens = replica_total.unbind()
    if num_items is None:
        count = replica_tokens if num_labels is None else torch.as_tensor(num_labels, device=device).double()
        value = replica_sum / count.clamp(min=1)
        factor = world_size / (replica.num_replicas * count.clamp(min=1))
    else:
        factor = world_size * divisor / torch.as_tensor(num_items, device=device).double().clamp(min=1)
        value = replica_sum * factor / replica.sp_size
    dtype = loss_sum.dtype
    return _with_factor(loss_sum, value.to(dtype), factor.to(dtype))


def mean_over_replica(
    mean: Tensor, num_tokens: Tensor | int, replica: Replica, num_items: Tensor | float | None = None
) -> Tensor:
    """S_R / n_R of the ranks' means S_r / n_r, by the convention ``"replica_mean"``.

    Args:
        mean: scalar, over this rank's tokens. Where there are none, it counts as 0, even if it is NaN.
        num_items: what to divide by in place of n_R.

    Caller: every rank of the replica.
    Collectives: one all_reduce of two numbers forward, none backward.
    """
    num_tokens = torch.as_tensor(num_tokens, device=mean.device)
    mean = mean.masked_fill(num_tokens == 0, 0.0)
    total = torch.stack([mean.detach().double() * num_tokens, num_tokens.double()])
    dist.all_reduce(total, group=replica.sp_group)
    divisor = total[1].clamp(min=1) if num_items is None else torch.as_tensor(num_items, device=mean.device).double()
    value, factor = total[0] / divisor, replica.sp_size * num_tokens / divisor
    whole: Tensor = _MeanOverReplica.apply(mean, value.to(mean.dtype), factor.to(mean.dtype))  # type: ignore[no-untyped-call]
    return whole


def rescaled_loss(
    loss: Tensor,
    convention: str,
    num_tokens: Tensor | int | None,
    replica: Replica,
    num_items: Tensor | float | None = None,
    divisor: int = 1,
) -> Tensor:
    """The same value, with a gradient as that of `sequence_parallel_loss`.

    Args:
        loss: scalar, by ``convention``. Where no token counts, it counts as 0, even if it is NaN.
        convention: one of `CONVENTIONS`; table at the top.
        num_tokens: this rank's valid tokens; not needed for ``"replica_mean"`` without ``num_items``.
        num_items: valid tokens of the optimizer step over all ranks; left out, each micro-batch of each replica weighs
            the same.
        divisor: with ``num_items``: what the engine will divide by, to be undone.

    Caller: every rank of the replica, once per micro-batch.
    Collectives: one all_reduce of one integer, where ``num_tokens`` is needed.
    """
    world_size, device = dist.get_world_size(), loss.device
    if convention == "replica_mean" and num_items is None:
        ratio = world_size / (replica.num_replicas * replica.sp_size)
        return loss if ratio == 1 else _with_factor(loss, loss.detach(), loss.new_tensor(ratio))
    assert num_tokens is not None
    own_tokens = torch.as_tensor(num_tokens, device=device).to(torch.int64)
    replica_tokens = own_tokens.clone()
    dist.all_reduce(replica_tokens, group=replica.sp_group)
    counted = replica_tokens if convention == "replica_mean" else own_tokens
    per_unit = {  # the inverse of the convention's own factor
        "replica_mean": replica_tokens.double() / replica.sp_size,
        "local_mean": own_tokens.double(),
        "local_sum": torch.ones_like(own_tokens, dtype=torch.float64),
        "local_share": replica_tokens.double(),
    }
    if num_items is None:
        wanted = world_size / (replica.num_replicas * replica_tokens.double().clamp(min=1))
    else:
        wanted = world_size * divisor / torch.as_tensor(num_items, device=device).double().clamp(min=1)
    loss = loss.masked_fill(counted == 0, 0.0)
    return _with_factor(loss, loss.detach(), (wanted * per_unit[convention]).to(loss.dtype))


def loss_of_replica(loss: Tensor, replica: Replica, *, adds_up: bool = False) -> Tensor:
    """A loss by the convention ``"replica_mean"`` in the scale that the engine averages.

    Args:
        adds_up: losses of replicas and micro-batches add up to that of the optimizer step, since each was divided by
            the labels of all; else they are averaged over replicas.
    """
    share = dist.get_world_size() / (replica.num_replicas * replica.sp_size)
    factor = share * (replica.num_replicas if adds_up else 1)
    value = loss.detach() * (dist.get_world_size() / replica.sp_size if adds_up else 1)
    return _with_factor(loss, value, loss.new_tensor(factor))


def scaled_loss(loss: Tensor, factor: Tensor | float) -> Tensor:
    """``loss`` times a factor by which the engine's average is right; where it is 0, also of a loss that is NaN."""
    factor = torch.as_tensor(factor, device=loss.device).to(loss.dtype)
    loss = loss.masked_fill(factor == 0, 0.0)
    return _with_factor(loss, loss.detach() * factor, factor)


def ratio(total: Tensor, count: Tensor | float) -> Tensor:
    """A sum over this rank's samples divided by a number that adds up over ranks; zero where there is nothing.

    Where ranks take different batches, the term is weighed by its counts; see `ds_hetero.runtime.data.loss_weights`.
    """
    value: Tensor = _Ratio.apply(total, torch.as_tensor(count, device=total.device))  # type: ignore[no-untyped-call]
    return value


class _Ratio(torch.autograd.Function):
    """Divides, and keeps the denominator as ``unit``."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor) -> Tensor:
        ctx.unit = count.detach()
        ctx.save_for_backward(count)
        return torch.where(count == 0, 0.0, total / count.masked_fill(count == 0, 1)).to(total.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (count,) = ctx.saved_tensors
        return torch.where(count == 0, 0.0, grad / count.masked_fill(count == 0, 1)).to(grad.dtype), None


def shown_loss(loss: Tensor, factor: float, value: Tensor | None = None) -> Tensor:
    """``loss``, or another value, whose gradient is multiplied by ``factor``; known to be scaled."""
    if factor == 0:
        loss = loss.masked_fill(torch.ones_like(loss, dtype=torch.bool), 0.0)
    return _with_factor(loss, loss.detach() if value is None else value, loss.new_tensor(factor))


def is_scaled(loss: Tensor) -> bool:
    """Whether ``loss`` was made here: is a result of the functions above, or a few operations away from one."""
    todo, seen = [loss.grad_fn], 0
    while todo and seen < _NODES_SEARCHED:
        node = todo.pop(0)
        seen += 1
        if node is None:
            continue
        if _makes_scaled(node):
            return True
        todo += [following for following, _ in node.next_functions]
    return False


def has_unscaled_term(loss: Tensor) -> bool:
    """Whether a part of ``loss``, which `is_scaled`, does not come from the functions above.

    Such a term would be averaged over ranks as it is, each rank's tokens by another weight than in the loss. Functions
    of scaled losses alone are right. Costs a walk over the few nodes above them; where there is a term, over a path
    from it to the first parameter.
    """
    todo, seen = [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen or _makes_scaled(node):
            continue
        if not node.next_functions:
            return True
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
    return False


def _makes_scaled(node: Node) -> bool:
    return node.name() == f"{_ValueWithFactor.__name__}Backward"


def mark_loss_of_batch(outputs: object) -> None:
    """Mark the outputs of a model whose ``loss`` is that of the whole batch, in the scale of the engine's average."""
    setattr(outputs, _MARK, True)


def has_loss_of_batch(outputs: object) -> bool:
    """Whether `mark_loss_of_batch` has marked ``outputs``."""
    return bool(getattr(outputs, _MARK, False))


def expect_same_scalar(value: Tensor, replica: Replica) -> None:
    """Refuse a scalar that differs in a replica, as a mean over own tokens does. Raises `BatchError` on every rank.

    Caller: every rank of the replica.
    Collectives: one all_reduce of two numbers.
    """
    scalar = value.detach().double()
    extremes = torch.stack([scalar, -scalar])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=replica.sp_group)
    largest, smallest = float(extremes[0]), -float(extremes[1])
    if largest > smallest:
        raise BatchError(
            f"handle.mean takes a scalar that is the same on all ranks, such as a penalty on parameters; this one is "
            f"between {smallest:.6g} and {largest:.6g}. Of a quantity of the tokens, give one value per token, [B, s]: "
            "a mean over the rank's own would weigh ranks alike, which hold unequal shards."
        )


def count_items(num_tokens: Tensor | int, device: torch.device) -> Tensor:
    """Valid tokens of one optimizer step, over all ranks.

    Args:
        num_tokens: valid tokens of this rank's shards of all its micro-batches.

    Caller: every rank of the world, once per optimizer step.
    Collectives: one all_reduce of one integer.
    """
    total = torch.as_tensor(num_tokens, device=device).to(torch.int64).clone()
    dist.all_reduce(total)
    return total


@torch.no_grad()
def measure_tokens(logits: Tensor, labels: Tensor, part: VocabularyPart | None = None) -> Tensor:
    """Return what people watch beside the loss, ``[3]``: labels that count, entropies and hits of the first guess.

    Args:
        logits: [B, s, V].
        labels: [B, s], of the token at the same place; those that do not count are `IGNORE_INDEX`.
        part: words of the logits; None for all. With it the ranks of its group call this together, and get the same.

    Collectives: with ``part``, two all_reduces of the largest of numbers by token, and two of sums.
    """
    counts = labels != IGNORE_INDEX
    of_tokens = logits[counts].float()
    lse, (best, guess) = of_tokens.logsumexp(-1), of_tokens.max(-1)
    if part is not None:
        lse, own = _lse_of_parts(lse, part), best
        best = part.largest(own.clone())
        # Of words with equal logits the first one is the guess, as without parts.
        guess = -part.largest(-(guess + part.start).masked_fill(own < best, torch.iinfo(guess.dtype).max))
    log_p = of_tokens - lse[:, None]
    entropy = -(log_p.exp() * log_p).sum()
    hits = (guess == labels[counts]).sum()
    if part is not None:
        entropy = part.summed(entropy)
    return torch.stack([counts.sum(), entropy, hits]).to(logits.device, torch.float32)


def _lse_of_parts(lse_T: Tensor, part: VocabularyPart, of_label_T: Tensor | None = None) -> Tensor:
    """Log-sum-exps of all words from those of this rank's; ``of_label_T`` is added up over the ranks in place."""
    largest_T = part.largest(lse_T.clone())
    sums = [(lse_T - largest_T).exp(), *(() if of_label_T is None else (of_label_T,))]
    summed = part.summed(torch.stack(sums))
    if of_label_T is not None:
        of_label_T.copy_(summed[1])
    return largest_T + summed[0].log()


def _with_factor(x: Tensor, value: Tensor, factor: Tensor) -> Tensor:
    loss: Tensor = _ValueWithFactor.apply(x, value, factor)  # type: ignore[no-untyped-call]
    return loss


class _ValueWithFactor(torch.autograd.Function):
    """Forward returns ``value``, backward multiplies by ``factor``: the loss shown and the loss differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (factor,) = ctx.saved_tensors
        return grad * factor, None, None


class _MeanOverReplica(_ValueWithFactor):
    """Of another name, since it is not of the engine's scale yet."""


def load_balancing_loss(gates: Sequence[Tensor], top_k: int, real: Tensor, replica: Replica) -> Tensor:
    """Return the loss of the whole batch, equal on all ranks of the replica.

    Args:
        gates: by layer, the router's logits [T, E].
        top_k: experts that a token is sent to.
        real: [T], 1 where a token counts; padding and placeholders do not.

    Caller: every rank of the replica, in the forward; the gradient of the loss may be taken on every rank, and adds up
    over them to that of one process when the ranks' losses do.
    Collectives: one all_reduce of 2 E + 1 numbers forward, one backward.
    """
    num_experts, weights = gates[0].shape[-1], real.to(torch.float32)
    counts = torch.zeros(num_experts, dtype=torch.float32, device=weights.device)
    probabilities = torch.zeros_like(counts)
    for logits_TE in gates:
        routed_TE = torch.softmax(logits_TE, dim=-1)
        chosen_Tk = torch.topk(routed_TE.detach(), top_k, dim=-1).indices
        counts = counts.scatter_add(0, chosen_Tk.reshape(-1), weights.repeat_interleave(top_k))
        probabilities = probabilities + (routed_TE.float() * weights[:, None]).sum(0)
    rows = weights.sum()[None] * len(gates)
    sums: Tensor = _SumOverReplica.apply(torch.cat([counts, probabilities, rows]), replica)  # type: ignore[no-untyped-call]
    counts, probabilities, rows = torch.split(sums, [num_experts, num_experts, 1])
    loss: Tensor = num_experts * (counts.detach() / rows.detach() * (probabilities / rows.detach())).sum()
    return loss


class _SumOverReplica(torch.autograd.Function):
    """A sum over the ranks; its gradient on a rank is the sum of what all ranks' losses make of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, replica: Replica) -> Tensor:
        ctx.replica = replica
        total = x.clone()
        dist.all_reduce(total, group=replica.sp_group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.replica.sp_group)
        return total, None


def token_log_probs(
    logits: Tensor, labels: Tensor, chunk_tokens: int = 1024, part: VocabularyPart | None = None
) -> Tensor:
    """The log-probability of the label of each token.

    logits   [B, s, V] or [T, V]
    labels   [B, s] or [T], of the token at the same place
    result   as labels, fp32 (fp64 for fp64 logits); 0 where the label is `IGNORE_INDEX`

    Args:
        chunk_tokens: tokens whose softmax exists at once.
        part: words of the logits; None for all. With it the ranks of its group call this together, get the same, and
            begin the backward with the same gradient.

    Collectives: with ``part``, two all_reduces of a number and of two by token forward, none backward.
    """
    logits_TV, labels_T = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    log_probs_T: Tensor = _TokenLogProbs.apply(logits_TV, labels_T, chunk_tokens, part)  # type: ignore[no-untyped-call]
    return log_probs_T.view(labels.shape)


def cross_entropy_sum(
    logits: Tensor, shift_labels: Tensor, chunk_tokens: int = 1024, part: VocabularyPart | None = None
) -> Tensor:
    """Token losses added up in fp32; see `token_log_probs`.

    logits        [B, s, V] or [T, V]
    shift_labels  [B, s] or [T]; -100 is not counted
    result        scalar, fp32 (fp64 for fp64 logits)
    """
    return -token_log_probs(logits, shift_labels, chunk_tokens, part).sum()


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, labels_T: Tensor, chunk_tokens: int, part: VocabularyPart | None
    ) -> Tensor:
        accumulate = torch.promote_types(logits_TV.dtype, torch.float32)
        lse_T = logits_TV.new_empty(len(labels_T), dtype=accumulate)
        of_label_T = torch.empty_like(lse_T)
        for logits, labels, lse, out in _chunks(chunk_tokens, logits_TV, labels_T, lse_T, of_label_T):
            logits = logits.to(accumulate)
            lse.copy_(logits.logsumexp(-1))
            rows, own = _rows_of(labels, part)
            out.copy_(logits.gather(-1, rows[:, None])[:, 0].masked_fill(~own, 0.0))
        if part is not None:
            lse_T = _lse_of_parts(lse_T, part, of_label_T)
        ctx.save_for_backward(logits_TV, labels_T, lse_T)
        ctx.chunk_tokens, ctx.part = chunk_tokens, part
        return (of_label_T - lse_T).masked_fill_(labels_T == IGNORE_INDEX, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None, None]:
        logits_TV, labels_T, lse_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        for logits, labels, lse, grad, out in _chunks(ctx.chunk_tokens, logits_TV, labels_T, lse_T, grad_T, grad_TV):
            softmax = logits.to(lse.dtype, copy=True).sub_(lse[:, None]).exp_()
            rows, own = _rows_of(labels, ctx.part)
            softmax.scatter_add_(-1, rows[:, None], -own[:, None].to(softmax.dtype))
            out.copy_(softmax.mul_((-grad * (labels != IGNORE_INDEX))[:, None]))
            del softmax  # before the next chunk makes its own
        return grad_TV, None, None, None


def _rows_of(labels: Tensor, part: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    """Places of labels among the logits of this rank, 0 for those that are not there; and whether they are."""
    counted = labels != IGNORE_INDEX
    if part is not None:
        return part.local(labels, counted)
    return labels.masked_fill(~counted, 0), counted


def _chunks(size: int, *tensors: Tensor) -> zip[tuple[Tensor, ...]]:
    return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)
