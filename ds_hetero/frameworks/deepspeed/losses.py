"""The losses that training scripts compute themselves, brought to the scale that the engine's average needs.

`Handle.loss` and the Trainer give the engine a loss of the right scale, and it is known as such. Any other loss follows
a convention (`ds_hetero.runtime.loss.CONVENTIONS`): the one that ``"loss"`` in the "heterogeneity" section declares, or
``"replica_mean"``, the recipe that accelerate and transformers document. The recipe gives all ranks of a replica one
value, the others each its own: the checks of a step look at that (`ds_hetero.runtime.step_checks.token_weights`). Where
they are off, the ranks compare their losses at an engine's first backward.

Several backwards for one optimizer step: exact by ZeRO 0 and 3, refused where ZeRO 1 and 2 would drop gradients.

ZeRO 1 and 2 put the gradients of the backward that ends an accumulation in the place of those that the optimizer is to
step on, so that a second such backward drops the first one's. ZeRO 3 tells a new backward from another phase of the one
before by a forward between them: of two backwards after two forwards it drops the first one's gradients, also while it
accumulates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hetero.engine.adapters import SplitModel
from ds_hetero.engine.unlike_losses import UnlikeLosses, term_of_rank
from ds_hetero.engine.whole_model import WholeModel
from ds_hetero.errors import BatchError, ConfigError, StepError
from ds_hetero.frameworks.deepspeed.protocols import Engine
from ds_hetero.runtime.backends import message_device
from ds_hetero.runtime.data.shard_info import shard_info
from ds_hetero.runtime.data.shards import IGNORE_INDEX
from ds_hetero.runtime.loss import has_unscaled_term, is_scaled, rescaled_loss
from ds_hetero.values.section import SECTION

_ADDED_TERM = (
    "the loss given to backward is the engine's plus a term computed from this rank's shard. One process would "
    "weigh the term by tokens; as it is, ranks weigh alike, whose shards are unequal. Make the term with "
    "handle.mean(per_token, batch), the mean over the tokens of the whole batch of values [B, s] (handle = "
    "ds_hetero.register()). It also takes a scalar that is the same on all ranks, such as a penalty on parameters."
)
_TERM_OF_SAMPLES = (
    "the loss given to backward is that of handle.loss, with num_items, plus a term ({}) of this rank's own samples, "
    "whose weight is not known. Make the term with handle.mean(per_token, batch, num_items=num_items); or leave "
    "num_items out of handle.loss: what every term is divided by is then read from the graph of the loss."
)
# Relative difference below which two ranks' losses count as one value. Ranks that follow the recipe compute with the
# same numbers; they differ by the order of their sums, or where compilers fuse a product and a sum.
_SAME, _SAME_HALF = 16 * torch.finfo(torch.float32).eps, 1e-3


class LossScaling:
    """Scales the losses given to the backward of one engine, by the convention that the section declares."""

    def __init__(self, model: SplitModel | WholeModel) -> None:
        self._model = model
        self._checked: set[str] = set()
        self._weighing = UnlikeLosses(model) if isinstance(model, WholeModel) else None

    def scale(self, loss: Tensor, divisor: int, micro_step: int) -> Tensor:
        """Return the loss to differentiate: its value is that of ``loss``.

        Args:
            loss: scalar, of the batch that the model saw last.
            divisor: what the engine's backward will divide by.
            micro_step: of a model that runs whole, see `MicroBatchOrder.micro_step`.

        Caller: every rank of the world, once per micro-batch.
        Collectives: without checks of a step, at first, one all_gather of two numbers over the world; see
            `rescaled_loss` for the others.

        Raises:
            ConfigError: the loss follows another convention than it should, or is the engine's plus a term that is not;
                on every rank.
            BatchError: the batch did not come from the loader, so that its labels or samples are not known; on every
                rank.
        """
        weights = self._model.token_weights
        if weights is not None:
            weights.note_backward(loss, divisor, is_scaled=is_scaled(loss))
        factors = self._model.token_factors
        if factors is not None and not is_scaled(loss):
            factors.note_backward(loss)
        local_weights = self._model.local_weights
        if local_weights is not None and not is_scaled(loss):
            local_weights.note_values(loss)
        if isinstance(self._model, WholeModel):
            loss = self._by_unit(self._model, loss, divisor, micro_step)
        elif not is_scaled(loss):
            loss = self._by_convention(loss, divisor)
        elif has_unscaled_term(loss):
            raise ConfigError(_ADDED_TERM)
        self._model.note_scaled_loss()
        return loss

    def _by_unit(self, model: WholeModel, loss: Tensor, divisor: int, micro_step: int) -> Tensor:
        """Weigh the terms of a loss as parts of those of the global batch."""
        if not model.takes_unlike_batches:
            return loss
        batch = model.batches.use(micro_step)
        assert self._weighing is not None
        if not is_scaled(loss):
            return self._weighing.weigh(loss, batch, divisor)
        if (term := term_of_rank(loss, model.times_ranks)) is not None:
            raise ConfigError(_TERM_OF_SAMPLES.format(term))
        return loss

    def release(self) -> None:
        """Leave the graph of a loss as it was, after its backward."""
        if self._weighing is not None:
            self._weighing.release()

    def _by_convention(self, loss: Tensor, divisor: int) -> Tensor:
        replica = self._model.replica
        convention = self._model.loss_convention or "replica_mean"
        is_checked = self._model.token_weights is not None or convention in self._checked
        if not is_checked and self._expect(convention, loss):
            self._checked.add(convention)
        info = shard_info(self._model.latest_positions)
        labels = None if info is None else info.labels
        num_items = None if info is None else info.num_items
        needs_items = replica.batch_split is not None
        if (needs_items and num_items is None) or (labels is None and (needs_items or convention != "replica_mean")):
            raise BatchError(
                f'a loss by the convention "{convention}" needs the labels of its batch, which are not known here: '
                "give the model the position_ids of a batch from ds_hetero's loader as they are, not a copy; or use "
                "handle.loss."
            )
        num_tokens = None if labels is None else labels.ne(IGNORE_INDEX).sum()
        return rescaled_loss(loss, convention, num_tokens, replica, num_items if needs_items else None, divisor)

    def expect_scaled(self) -> None:
        """Refuse gradients of a loss that needed scaling, before a step. Raises `ConfigError` on every rank."""
        model = self._model
        if model.end_step() and (model.loss_convention is not None or model.replica.batch_split is not None):
            raise ConfigError(
                "backward was called on the loss itself, which leaves it without the scale that the engine's average "
                "needs. Call engine.backward(loss), or take the loss from handle.loss."
            )

    def _expect(self, convention: str, loss: Tensor) -> bool:
        """Compare the ranks' losses; False where they tell nothing yet, since no rank has a label."""
        replica = self._model.replica
        device = message_device()
        own = torch.tensor([replica.replica_id, float(loss.detach())], dtype=torch.float64, device=device)
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own)
        rows = [(int(row[0]), float(row[1])) for row in gathered]
        if not any(value and not math.isnan(value) for _, value in rows):
            return False
        by_rank = [f"{value:.6g}" for _, value in rows]
        by_replica = [[v for r, v in rows if r == replica_id] for replica_id in sorted({r for r, _ in rows})]
        same = _SAME if loss.element_size() >= 4 else _SAME_HALF
        alike = [_all_alike(values, same) for values in by_replica if len(values) > 1]
        if convention == "replica_mean" and not all(alike):
            raise ConfigError(
                f"the loss given to backward differs between the ranks of a replica (by rank {by_rank}), so it is not "
                "the mean over the replica's tokens. Use handle.loss, or say what it is: "
                f'"{SECTION}": {{"loss": "local_mean"}}, a mean over the rank\'s own labels; "local_sum", their sum; '
                '"local_share", their sum over the number of labels in the replica.'
            )
        if convention != "replica_mean" and alike and all(alike):
            raise ConfigError(
                f'"{SECTION}.loss" is "{convention}", but the loss given to backward is the same on all ranks of each '
                f"replica (by rank {by_rank}), as it is by handle.loss and by the recipe. Leave the key out."
            )
        return True


def _all_alike(values: Sequence[float], same: float) -> bool:
    """Whether a replica's ranks have one loss, up to a relative difference; NaN is that of no label at all."""
    known = [value for value in values if not math.isnan(value)]
    if len(known) != len(values):
        return not known
    return max(known) - min(known) <= same * max(abs(value) for value in known)


class BackwardsOfStep:
    """The backwards of one engine since its last step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._are_averaged = False  # the gradients, for the step

    def begin(self) -> None:
        """Note that a backward begins. Raises `StepError`: it would drop the gradients of the one before."""
        stage = self._engine.zero_optimization_stage()
        if self._are_averaged and stage in (1, 2) and not self._engine.inside_no_sync_ctxt:
            raise StepError(
                f"a second backward without engine.step() between: with gradient_accumulation_steps="
                f"{self._engine.gradient_accumulation_steps()} the first has averaged the gradients for the step, and "
                f"on ZeRO stage {stage} the second would put its own in their place. Add the losses and call "
                "engine.backward once; or set gradient_accumulation_steps to the number of backwards and call "
                "engine.step() after each; or call them inside `with engine.coalesce_grad_reduction():`. To drop the "
                "gradients of the first, call engine.zero_grad()."
            )
        optimizer: Any = self._engine.optimizer
        if getattr(optimizer, "_epilogue_ran_this_backward", False):  # as DeepSpeed does when a forward begins
            optimizer.clear_backward_seen_flag()

    def end(self) -> None:
        """Note that a backward has ended."""
        is_last = self._engine.is_gradient_accumulation_boundary() and not self._engine.inside_no_sync_ctxt
        self._are_averaged = self._are_averaged or is_last

    def forget(self) -> None:
        """Note that the gradients have been used or dropped."""
        self._are_averaged = False
