"""Hooks of an engine whose model is a stage of a pipeline."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hetero.engine.arguments import refusals
from ds_hetero.engine.patching import Function
from ds_hetero.errors import BatchError
from ds_hetero.frameworks.deepspeed.pipeline.pipelined_engine import PipelinedEngine
from ds_hetero.runtime.data.shards import WholeBatch, read_batch
from ds_hetero.runtime.devices import default_device
from ds_hetero.runtime.pipeline.batches import StageBatch, micro_batches, of_at_most, samples_of_step

_MEASURES = "fused_lm_head"  # by which TRL's trainers ask for outputs with what they log of tokens
_ITEMS = "num_items_in_batch"
_NOT_FOR_MODELS = (_ITEMS, "use_cache", "return_dict", _MEASURES)


def run_passes(pipelined: PipelinedEngine, forward: Function, *args: object, **batch: Any) -> object:
    """Replace the engine's forward: run all passes of a step, or forwards alone; return outputs with the mean ``loss``.

    Args:
        args: nothing; a batch is given by names.
        batch: the global batch, the same on every rank.

    Caller: every rank of the world.
    Collectives: the hops of the pipelines, the buckets of gradients, and one all_reduce of the loss; another one of
    three numbers, where the batch asks for measures of its tokens as TRL does.
    """
    if args:
        raise BatchError("give the engine a batch by names: engine(**batch).")
    if lines := refusals(batch, in_pipelines=True):
        raise BatchError("the engine was given what pipelines do not take:\n" + "\n".join(lines))
    is_training = pipelined.engine.module.training and torch.is_grad_enabled()
    if is_training and pipelined.loss is not None:
        raise BatchError(
            "engine.step() must follow every forward of a training step: with pipelines a forward runs all "
            "micro-batches of a step, and the plan says how many there are."
        )
    whole = read_batch({name: entry for name, entry in batch.items() if name not in _NOT_FOR_MODELS})
    stage = pipelined.stage
    measures = torch.zeros(3, device=default_device()) if batch.get(_MEASURES) else None
    stage.measures = None if measures is None else measures.clone()
    buffers = pipelined.buffers if is_training else None
    if buffers is not None:
        buffers.begin_passes()
    loss = _loss_of_passes(pipelined, whole, batch.get(_ITEMS), is_training)
    if buffers is not None:
        buffers.end_passes()
    if is_training:
        pipelined.engine.optimizer.sync.send_rest()  # of parameters that one stage uses and all hold
    dist.all_reduce(loss)
    if measures is not None:
        assert stage.measures is not None
        measures = measures if _is_copy(pipelined) else stage.measures
        dist.all_reduce(measures)
    if is_training:
        pipelined.clock.join()
        pipelined.loss = loss
    else:
        pipelined.clock.drop_step()
    outputs = pipelined.outputs_with(loss, measures)
    return outputs.to_tuple() if batch.get("return_dict") is False else outputs


def _is_copy(pipelined: PipelinedEngine) -> bool:
    """Whether another rank computes the same loss as this one."""
    stage = pipelined.plan.stage_of(dist.get_rank())
    return stage is not None and stage.inner == "tensor" and dist.get_rank() != stage.ranks[0]


def _loss_of_passes(pipelined: PipelinedEngine, whole: WholeBatch, num_items: Any, is_training: bool) -> Tensor:
    """Return this rank's summand of the loss: of its labels, over ``num_items`` or over all of them."""
    plan, rank = pipelined.plan, dist.get_rank()
    place, stage = plan.place_of(rank), plan.stage_of(rank)
    dtype = torch.promote_types(pipelined.stage.dtype, torch.float32)
    nothing = torch.zeros((), dtype=dtype, device=default_device())
    num_labels = whole.num_labels()
    if num_labels is None:
        raise BatchError("a batch needs labels: the last stages compute the loss from them.")
    if place is None or stage is None:
        return nothing
    assert pipelined.runner is not None
    scale = 1 / max(num_labels if num_items is None else float(num_items), 1)
    steps = [whole] if is_training else list(of_at_most(whole, samples_of_step(plan)))
    batches = [StageBatch(whole=rows, scale=scale) for step in steps for rows in micro_batches(plan, place[0], step)]
    sync = pipelined.engine.optimizer.sync
    value = pipelined.runner.train(batches, sync) if is_training else pipelined.runner.evaluate(batches)
    return nothing if value is None or _is_copy(pipelined) else value.to(dtype)


def keep_books(pipelined: PipelinedEngine, backward: Function, loss: Tensor, **kwargs: object) -> Tensor:
    """Replace the engine's backward: gradients exist already. Raises `BatchError`: ``loss`` is another one."""
    expected = pipelined.loss
    if expected is None:
        raise BatchError("engine.backward needs the loss of a forward of this step, in training mode.")
    if not torch.equal(loss.detach().to(expected), expected):
        raise BatchError(
            f"with pipelines the forward computes the gradients of the loss that it returns, {expected.item():.6g}, "
            f"but engine.backward was given {loss.item():.6g}. Give it engine(**batch).loss as it is; other losses and "
            "added terms are not supported."
        )
    return loss


def expect_passes(pipelined: PipelinedEngine) -> None:
    """Refuse a step without a forward; after it, the next may begin."""
    if pipelined.loss is None:
        raise BatchError("engine.step() needs a forward of this step before it.")
    pipelined.loss = None
