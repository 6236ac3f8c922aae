"""Rules by which the weights of tokens on all ranks are right or wrong.

Every rule is a function of the numbers of all ranks, so every rank comes to the same verdict. A rule returns an error
for a loss that is wrong, `Undecided` for one that may be right, and None otherwise:

    rule                    compares
    check_declared_key      the declared loss with values that are equal in every replica
    check_values            the values given to backward, between the ranks of a replica
    check_label_count       the labels that the loader counted with those that the model got
    check_forward           weights within a rank, then between the ranks of a replica, then between replicas;
                            afterwards the size of the gradient with the value of the loss
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

import torch

from ds_hetero.errors import BatchError, ConfigError
from ds_hetero.runtime.step_checks.protocol import Undecided, Verdict
from ds_hetero.runtime.step_checks.token_weight_records import DRAWN_TOKENS, ForwardNumbers, StepTotals

# Relative differences that rounding explains. fp32: sums over V in another order. Half: gradients of 8 bits of mantissa
# (2^-8), softmax by some scripts in bf16 too.
_RTOL, _RTOL_HALF = 1e-3, 3e-2
# Share of a gradient that is not w (p - y), up to which the loss is token cross entropy; of half precision, as above.
_MAX_RESIDUAL, _MAX_RESIDUAL_HALF = 2e-3, 6e-2
# Ranks that follow the recipe compute with the same numbers; they differ by the order of their sums, or where compilers
# fuse a product and a sum.
_RTOL_VALUES, _RTOL_VALUES_HALF = 16 * torch.finfo(torch.float32).eps, 1e-3


@dataclass(frozen=True, kw_only=True)
class StepOfRanks:
    """The numbers of all ranks about one step, and what the job's configuration says of its losses.

    Attributes:
        totals: by rank.
        replicas: the ranks of each replica.
        convention: ``"loss"`` of the section, if declared.
        accumulation: micro-batches of an optimizer step.
        weighs_by_items: replicas take different batches, whose labels all have one weight.
        scales: the engine multiplies losses by a factor of its own, as for fp16.
        earlier_labels: labels by rank of the first forward of the first step and of the step before.
    """

    totals: Sequence[StepTotals]
    replicas: Sequence[Sequence[int]]
    convention: str | None
    accumulation: int
    weighs_by_items: bool
    scales: bool
    earlier_labels: Sequence[Sequence[float]]

    @property
    def is_half(self) -> bool:
        """Whether a rank has losses or logits of half precision."""
        return any(total.is_half or total.has_half_logits for total in self.totals)

    @property
    def rtol(self) -> float:
        """Relative difference of weights that rounding explains."""
        return _RTOL_HALF if self.is_half else _RTOL

    @property
    def has_own_losses(self) -> bool:
        """Whether a script has computed a loss itself."""
        return any(total.unscaled for total in self.totals)

    def remedy(self) -> str:
        """Return the advice for a wrong loss."""
        if self.convention is None:
            return REMEDY
        return (
            f'"heterogeneity.loss" is "{self.convention}", and this loss is something else, or of other labels than '
            "the batch has. Use handle.loss, which needs no key; or change labels before the loader counts them."
        )


def check_declared_key(step: StepOfRanks) -> Verdict:
    """Refuse a section whose "loss" declares a loss of each rank, if all ranks of each replica give one value.

    Equal values given to backward are the loss of the replica.
    """
    is_of_rank = step.convention not in (None, "replica_mean")
    if not is_of_rank or not all(total.unscaled for total in step.totals):
        return None
    totals_of_replicas = [[step.totals[rank] for rank in ranks] for ranks in step.replicas if len(ranks) > 1]
    has_one_value = [_have_same_values(totals) and totals[0].size > 0 for totals in totals_of_replicas]
    if not totals_of_replicas or not all(has_one_value):
        return None
    return ConfigError(
        f'"heterogeneity.loss" is "{step.convention}", but the loss given to backward is the same on all '
        f"ranks of each replica (by rank {_mean_values(step.totals)}), as it is by handle.loss and by the recipe. "
        "Leave the key out."
    )


def check_values(step: StepOfRanks) -> Verdict:
    """Refuse values of losses that differ between the ranks of a replica, unless the section declares them."""
    if not step.has_own_losses or step.convention not in (None, "replica_mean"):
        return None
    if all(_have_same_values([step.totals[rank] for rank in ranks]) for ranks in step.replicas):
        return None
    return ConfigError(
        f"the loss given to backward differs between the ranks of a replica (by rank {_mean_values(step.totals)}), so "
        "it is not the mean over the replica's tokens. Use handle.loss, or say what it is: "
        '"heterogeneity": {"loss": "local_mean"}, a mean over the rank\'s own labels; "local_sum", their sum; '
        '"local_share", their sum over the number of labels in the replica.'
    )


def check_label_count(step: StepOfRanks) -> Verdict:
    """Refuse a step that is divided by the loader's count of labels, if the model got another number of labels."""
    totals = step.totals
    if not step.weighs_by_items or any(total.items < 0 for total in totals):
        return None
    if any(total.forwards != step.accumulation or total.backwards != total.forwards for total in totals):
        return None
    labels, items = sum(total.labels for total in totals), totals[0].items
    if labels == items:
        return None
    return BatchError(
        f"the loss of this step is divided by {items:.0f} labels, which the loader counted over all ranks, but the "
        f"model was given {labels:.0f} labels that count (by rank {[int(total.labels) for total in totals]}). "
        "Change labels in the dataset or the collator, before the loader counts them."
    )


def check_forward(step: StepOfRanks, forwards: Sequence[ForwardNumbers]) -> Verdict:
    """Check the weights of one forward, whose numbers are ``forwards`` by rank."""
    known_ranks = [rank for rank, forward in enumerate(forwards) if forward.samples > 0]
    if not known_ranks:
        return None
    max_residual = _MAX_RESIDUAL_HALF if step.is_half else _MAX_RESIDUAL
    if max(forwards[rank].residual for rank in known_ranks) > max_residual:
        return Undecided(_OF_ANOTHER_KIND) if step.has_own_losses else None
    if any(not _are_close(forwards[rank].min_weight, forwards[rank].max_weight, step.rtol) for rank in known_ranks):
        return Undecided(_BY_TOKEN) if step.has_own_losses else None
    for ranks in step.replicas:
        known_in_replica = [rank for rank in ranks if rank in known_ranks]
        weights = [forwards[rank].mean for rank in known_in_replica]
        if weights and not _are_close(min(weights), max(weights), step.rtol):
            return _check_ranks(step, forwards, known_in_replica)
    return _check_replicas(step, forwards, known_ranks) or _check_gradient_size(step, forwards, known_ranks)


def _check_ranks(step: StepOfRanks, forwards: Sequence[ForwardNumbers], ranks: Sequence[int]) -> Verdict:
    """Judge ranks of a replica whose weights differ, though each rank has one weight."""
    weights = [forwards[rank].mean for rank in ranks]
    labels = [forwards[rank].labels for rank in ranks]
    tokens = [forwards[rank].tokens for rank in ranks]
    finding = (
        f"{BY_RANK}: {_shares(weights)} on ranks {list(ranks)}, relative to the largest, with "
        f"{[int(count) for count in labels]} labels each, where one process weighs every label of a batch alike."
    )
    # Weights by class are alike inside a rank by chance if it has few labels: always of one label, and of four drawn
    # ones of two classes one time in eight.
    has_few = step.has_own_losses and min(forwards[rank].samples for rank in ranks) < DRAWN_TOKENS
    if _are_proportional(weights, [1 / count for count in labels], step.rtol):
        reason = "They go with one over the rank's own labels, as of a mean over these that is averaged over ranks."
        return Undecided(finding, subject=BY_RANK) if has_few else ConfigError(f"{finding} {reason} {step.remedy()}")
    # The weights to which mistakes seen in scripts lead: they tell a fault from a loss that weighs by rank on purpose.
    # Example of tokens over labels: 1.07 on a rank of 28 labels among 30 tokens, 1.25 on one of 8 among 10.
    known_mistakes = [
        labels,  # a sum, weighed by labels
        tokens,  # a sum, weighed by tokens
        [1 / count for count in tokens],  # a mean over tokens, those without a label too
        [t / n for t, n in zip(tokens, labels, strict=True)],  # a mean over labels, weighed by tokens
        [n / t for t, n in zip(tokens, labels, strict=True)],  # a mean over tokens, weighed by labels
    ]
    for labels_before in step.earlier_labels:  # a mean over labels, weighed by those of an earlier batch
        known_mistakes.append([labels_before[rank] / forwards[rank].labels for rank in ranks])
    is_mistake = any(_are_proportional(weights, mistake, step.rtol) for mistake in known_mistakes)
    equals_mean = all(_are_close(forwards[rank].value, forwards[rank].expected, step.rtol) for rank in ranks)
    if equals_mean or (is_mistake and not has_few):
        return ConfigError(f"{finding} {step.remedy()}")
    if has_few and not is_mistake:
        return Undecided(_BY_TOKEN)
    return Undecided(finding, subject=BY_RANK)


def _check_replicas(step: StepOfRanks, forwards: Sequence[ForwardNumbers], known_ranks: Sequence[int]) -> Verdict:
    """Judge the weights of replicas: all labels have to have one weight, or the means of all replicas have."""
    weights, means, num_labels = [], [], []
    for ranks in step.replicas:
        known_rank = next((rank for rank in ranks if rank in known_ranks), None)
        if known_rank is None:
            continue
        labels_of_replica = sum(forwards[rank].labels for rank in ranks)
        num_labels.append(labels_of_replica)
        weights.append(forwards[known_rank].mean)
        means.append(forwards[known_rank].mean * labels_of_replica)
    if len(weights) < 2 or _are_close(min(weights), max(weights), step.rtol):
        return None
    if not step.weighs_by_items and _are_close(min(means), max(means), step.rtol):
        return None
    text = (
        f"{_BY_REPLICA}: {_shares(weights)} relative to the largest, with "
        f"{[int(count) for count in num_labels]} labels each. One process weighs every label alike, or the mean "
        "of every batch."
    )
    return ConfigError(f"{text} {REMEDY}") if step.weighs_by_items else Undecided(text, subject=_BY_REPLICA)


def _check_gradient_size(step: StepOfRanks, forwards: Sequence[ForwardNumbers], known_ranks: Sequence[int]) -> Verdict:
    """Refuse a loss with the value of the batch's mean, but another gradient."""
    if step.scales or step.weighs_by_items:
        return None
    world_size = len(step.totals)
    for ranks in step.replicas:
        known_in_replica = [rank for rank in ranks if rank in known_ranks]
        if not known_in_replica:
            continue
        shares = [forwards[rank].value / (forwards[rank].expected or float("nan")) for rank in ranks]
        if all(_are_close(share, 1 / world_size, 10 * _RTOL_VALUES) for share in shares):
            return Undecided(_DIVIDED.format(world_size))
        if not all(_are_close(share, 1.0, 10 * _RTOL_VALUES) for share in shares):
            continue
        labels = sum(forwards[rank].labels for rank in ranks)
        expected_weight = world_size / (len(step.replicas) * labels * step.totals[0].divisor)
        scale = forwards[known_in_replica[0]].mean / expected_weight
        if not _are_close(scale, 1.0, step.rtol):
            return ConfigError(
                f"the loss given to backward has the value of the mean over the batch's labels, and {scale:.4g} "
                "times its gradient. A sum over ranks by torch.distributed.all_reduce carries no gradient. "
                f"{REMEDY}"
            )
    return None


BY_RANK = "the loss given to backward weighs labels by rank"
_BY_REPLICA = "the loss given to backward weighs labels by replica"
_BY_TOKEN = (
    "the loss given to backward weighs tokens unlike each other, as losses with weights by class or by position do: "
    "only its value and the sums in it are checked for whether it is divided by the same on all ranks"
)
_DIVIDED = (
    "the loss given to backward is the mean over the batch's labels, divided by {}, which is the number of ranks. "
    "If it is divided for the ranks, training is that of one process with smaller gradients: leave the "
    "division out, the engine averages over the ranks by itself"
)
_OF_ANOTHER_KIND = (
    "the loss given to backward is not the cross entropy of single tokens, or more than that: only its value and the "
    "sums in it are checked for whether it weighs the tokens of all ranks alike"
)
REMEDY = (
    "Use engine(**batch).loss or handle.loss; give terms of your own to handle.mean(per_token, batch); or say what the "
    'loss is: "heterogeneity": {"loss": "local_mean"}, a mean over the rank\'s own labels; "local_sum", their sum; '
    '"local_share", their sum over the number of labels in the replica.'
)


def _have_same_values(totals: Sequence[StepTotals]) -> bool:
    """Whether ranks gave the same losses to backward, and NaN equally often."""
    values, size = [total.values for total in totals], max(total.size for total in totals)
    rtol = _RTOL_VALUES_HALF if any(total.is_half for total in totals) else _RTOL_VALUES
    return max(values) - min(values) <= rtol * size and len({total.unknown for total in totals}) == 1


def _mean_values(totals: Sequence[StepTotals]) -> list[str]:
    """Return the approximate mean loss of each rank in a step, by rank, as texts for a message."""
    return [f"{total.values / max(total.backwards, 1):.6g}" for total in totals]


def _shares(weights: Sequence[float]) -> list[str]:
    """Return each weight divided by the largest weight, as texts for a message."""
    return [f"{weight / max(weights, key=abs):.4g}" for weight in weights]


def _are_close(a: float, b: float, rtol: float) -> bool:
    """Whether two numbers are equal up to rounding; NaN is equal to nothing."""
    return not isnan(a) and not isnan(b) and abs(a - b) <= rtol * max(abs(a), abs(b))


def _are_proportional(weights: Sequence[float], others: Sequence[float], rtol: float) -> bool:
    """Whether weights are proportional to ``others``; False if these are the same on all ranks, or not positive."""
    if min(others) <= 0 or _are_close(min(others), max(others), rtol):
        return False
    ratios = [weight / other for weight, other in zip(weights, others, strict=True)]
    return _are_close(min(ratios), max(ratios), rtol)
