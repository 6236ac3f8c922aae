"""Losses of scripts: what one process computes, and the same loss as scripts for ranks write it, rightly and wrongly.

A loss is a sum over tokens N over a divisor D. `form` says what N and D are, `how` where the script gets the loss from:

    how             on a rank
    model           engine(**batch).loss
    handle          handle.loss(outputs, batch)
    items           handle.loss(outputs, batch, num_items), over the labels of all micro-batches of a step
    loss_function   engine(**batch).loss of a model whose loss_function the script has set
    sharded_call    from handle.sharded_call of whole batches
    recipe          N / D of the replica by a differentiable all-gather, as accelerate and transformers document it
    local_mean      N / D of the rank
    local_sum       N of the rank
    local_share     N of the rank / D of the replica
    mean_of_means   the average of the ranks' local means: wrong where ranks hold unlike many labels
    first_right     recipe at the first batch, local_mean afterwards: wrong
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.integration.tiny import VOCAB

FORMS = ("plain", "weighted", "weighted by labels", "smoothed", "focal")
OF_LOGITS = ("recipe", "local_mean", "local_sum", "local_share", "mean_of_means", "first_right")
# How often each is drawn: what is refused by name trains nothing.
_HOW = {
    "model": 3,
    "handle": 2,
    "items": 1,
    "loss_function": 2,
    "sharded_call": 1.5,
    "recipe": 2,
    "local_mean": 1,
    "local_sum": 1,
    "local_share": 1,
    "mean_of_means": 0.5,
    "first_right": 0.5,
}
_TERMS = {"": 6, "z": 1, "z where": 1, "penalty": 1, "local z": 0.4, "annealed": 1, "annealed local z": 0.4}
_LOCAL = ("local_mean", "local_sum", "local_share", "first_right")


@dataclass(frozen=True)
class Loss:
    """What a script backpropagates.

    Args:
        form: of `FORMS`: cross entropy; weighted by class, over the sum of the weights or over the labels; with label
            smoothing; focal.
        how: see above.
        declared: the section says so in "loss".
        term: added to it: log-sum-exp squared by handle.mean, that where a mask says, a penalty on parameters by
            handle.mean, a rank's own mean (wrong), and those that begin at zero.
        scale: of the loss.
    """

    form: str
    how: str
    declared: bool
    term: str
    scale: float

    @property
    def section(self) -> dict[str, str]:
        """What the section says."""
        if not self.declared:
            return {}
        return {"loss": self.how if self.how.startswith("local") else "replica_mean"}

    def describe(self) -> str:
        """For people."""
        parts = [
            f"loss {self.form} by {self.how}",
            "declared" if self.declared else "",
            f"with {self.term}" if self.term else "",
            f"times {self.scale}" if self.scale != 1 else "",
        ]
        return " ".join(filter(None, parts))


def draw(rng: random.Random) -> Loss:
    """Any of them."""
    how = rng.choices(list(_HOW), list(_HOW.values()))[0]
    form = rng.choice(FORMS) if how in (*OF_LOGITS, "loss_function") else "plain"
    has_terms = how in ("model", "handle", "recipe", "loss_function")
    return Loss(
        form=form,
        how=how,
        declared=how in OF_LOGITS and rng.random() < (0.8 if how.startswith("local") else 0.4),
        term=rng.choices(list(_TERMS), list(_TERMS.values()))[0] if has_terms else "",
        scale=rng.choice([1.0, 1.0, 1.0, 0.25]),
    )


def prepare(loss: Loss, model: Any) -> None:
    """Set what the script sets on the model before training."""
    if loss.how == "loss_function":
        model.loss_function = lambda logits, labels, vocab_size, **more: _loss_function(loss, logits, labels, more)


def whole(loss: Loss, model: Any, batch: dict[str, Tensor], step: int, num_items: int) -> Tensor:
    """The loss on one process.

    Args:
        num_items: labels of all micro-batches of the step.
    """
    inputs = {name: entry for name, entry in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1].float()
    labels = batch["labels"][:, 1:]
    total, divisor = _sums(loss.form, logits, labels)
    if loss.how == "items":
        divisor = torch.tensor(float(num_items))
    if loss.how == "local_sum":  # by definition over the number of labels
        divisor = labels.ne(-100).sum()
    value = total / divisor.clamp(min=1e-9)
    values = logits.logsumexp(-1).square()
    counts = labels.ne(-100)
    if _counts_term(loss, step) and loss.term == "penalty":
        value = value + 1e-2 * _penalty(model)
    elif _counts_term(loss, step):
        where = counts & (labels % 2 == 0) if loss.term == "z where" else counts
        value = value + 1e-2 * values[where].mean()
    return value * loss.scale


def of_rank(
    loss: Loss, engine: Any, handle: Any, batch: dict[str, Any], step: int, num_items: Any
) -> tuple[Tensor, tuple[float, float]]:
    """What the script of a rank gives to backward, and that with its weight in the mean over the ranks.

    Args:
        batch: this rank's shard; whole for "sharded_call".
        num_items: of handle.count_items, for "items".
    """
    if loss.how == "sharded_call":
        results = handle.sharded_call(engine, **batch)
        value = -results.log_probs.sum() / batch["labels"][:, 1:].ne(-100).sum() * loss.scale
        return value, (value.item(), 1.0)
    outputs = engine(**batch)
    if loss.how in ("model", "loss_function"):
        value, told = outputs.loss, None
    elif loss.how in ("handle", "items"):
        value, told = handle.loss(outputs, batch, num_items), None
    else:
        value, told = _of_logits(loss, outputs.logits, batch["shift_labels"], handle.replica.sp_group, step)
    if _counts_term(loss, step):
        value = value + 1e-2 * _term(loss, outputs.logits, batch, engine, handle)
    value = value * loss.scale
    if told is None:
        return value, (value.item(), 1.0)
    mean, weight = told
    return value, (mean * loss.scale, weight)


def mean_of(form: str, logits: Tensor, labels: Tensor) -> Tensor:
    """N / D of labels at the places of their logits."""
    total, divisor = _sums(form, logits, labels)
    return total / divisor


def _sums(form: str, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """N and D of these tokens."""
    flat, labels = _at_least_fp32(logits).reshape(-1, logits.shape[-1]), labels.reshape(-1)
    count = labels.ne(-100).sum().to(flat)
    if form.startswith("weighted"):
        weights = torch.where(torch.arange(flat.shape[-1]) % 3 == 0, 5.0, 1.0).to(flat)
        total = nn.functional.cross_entropy(flat, labels, weight=weights, reduction="sum")
        by_weight = weights[labels.clamp(min=0)].where(labels.ne(-100), flat.new_zeros(())).sum()
        return total, by_weight if form == "weighted" else count
    if form == "smoothed":
        return nn.functional.cross_entropy(flat, labels, reduction="sum", label_smoothing=0.1), count
    if form == "focal":
        by_token = nn.functional.cross_entropy(flat, labels, reduction="none")
        return (by_token * (1 - (-by_token).exp()).square()).sum(), count
    return nn.functional.cross_entropy(flat, labels, reduction="sum"), count


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits if logits.dtype is torch.float64 else logits.float()


def _of_logits(
    loss: Loss, logits: Tensor, labels: Tensor, group: Any, step: int
) -> tuple[Tensor, tuple[float, float] | None]:
    total, divisor = _sums(loss.form, logits, labels)
    if loss.how == "local_sum":
        divisor = labels.ne(-100).sum().to(total)
    how = ("local_mean" if step else "recipe") if loss.how == "first_right" else loss.how
    if how == "recipe":
        sums = GatheredSums.apply(torch.stack([total, divisor.to(total)]), group)
        return sums[0] / sums[1].clamp(min=1e-9), None
    own = (float(total.detach() / divisor) if divisor else 0.0, float(divisor))
    if how == "local_mean":
        return total / divisor, own
    if how == "local_sum":
        return total, own
    of_replica = divisor.detach().clone()
    dist.all_reduce(of_replica, group=group)
    if how == "local_share":
        return total / of_replica.clamp(min=1e-9), own
    means = GatheredSums.apply(torch.stack([total / divisor.clamp(min=1e-9)]), group)
    return means[0] / dist.get_world_size(group), None


class GatheredSums(torch.autograd.Function):
    """Sums over the ranks of a group; the backward adds up gradients as that of a gather, in subgroups of gloo too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        summed = values.detach().clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None]:
        grads = grads.contiguous().clone()
        dist.all_reduce(grads, group=ctx.group)
        return grads, None


def _counts_term(loss: Loss, step: int) -> bool:
    return bool(loss.term) and not (loss.term.startswith("annealed") and step == 0)


def _term(loss: Loss, logits: Tensor, batch: dict[str, Any], engine: Any, handle: Any) -> Tensor:
    values: Tensor = logits.float().logsumexp(-1).square()
    if loss.term == "penalty":
        return handle.mean(_penalty(engine.module), batch)
    labels = batch["shift_labels"]
    if loss.term.endswith("local z"):
        return values[labels.ne(-100)].mean() if labels.ne(-100).any() else values.sum() * 0
    where = labels.ne(-100) & (labels % 2 == 0) if loss.term == "z where" else None
    return handle.mean(values, batch, where=where)


def _penalty(model: Any) -> Tensor:
    """On the gains of norms, which ZeRO-3 does not partition where they are small."""
    named = [parameter for name, parameter in model.named_parameters() if name.endswith("norm.weight")]
    return torch.stack([parameter.float().square().sum() for parameter in named]).sum()


def _loss_function(loss: Loss, logits: Tensor, labels: Tensor | None, more: dict[str, Any]) -> Tensor:
    """As transformers calls it."""
    shifted = more.get("shift_labels")
    if shifted is None:
        assert labels is not None
        shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    total, divisor = _sums(loss.form, logits, shifted)
    items = more.get("num_items_in_batch")
    return total / (divisor if items is None else items)


def is_local(loss: Loss) -> bool:
    """Whether ranks give unlike values to backward."""
    return loss.how in _LOCAL


assert VOCAB % 3, "a third of the classes, and no more, has another weight"
