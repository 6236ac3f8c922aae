"""Forward, backward and step of an engine whose model is a stage of a pipeline.

Without pipelines, a script calls the engine's forward and backward for each micro-batch. Here the forward runs all
forwards and backwards of an optimizer step, the backward only checks its argument, and the step is
`PipelineOptimizer.step`.
"""

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
from ds_hetero.runtime.pipeline.batches import StageBatch, micro_batches, parts_of_rows, samples_of_step

# Argument with which TRL's trainers ask for three sums over tokens that they log, such as entropy and accuracy.
_MEASURES_KEY = "fused_lm_head"
_ITEMS_KEY = "num_items_in_batch"
_HANDLED_HERE = (_ITEMS_KEY, "use_cache", "return_dict", _MEASURES_KEY)  # arguments that the model does not get


def run_passes(pipelined: PipelinedEngine, forward: Function, *args: object, **batch: Any) -> object:
    """Replace the engine's forward: run all forwards and backwards of a step, or in evaluation only forwards.

    Args:
        args: must be empty; a batch is given by names.
        batch: the global batch, the same on every rank.

    Returns:
        The model's outputs, whose ``loss`` is the mean over the global batch.

    Caller: every rank of the world.
    Collectives: sends between stages, those of the gradients' buckets, and one all_reduce of the loss; one more of
        three numbers if the batch asks for measures of its tokens, as TRL's do.

    Raises:
        BatchError: the batch has arguments that pipelines do not take, or no step followed the last forward.
    """
    if args:
        raise BatchError("give the engine a batch by names: engine(**batch).")
    if lines := refusals(batch, in_pipelines=True):
        raise BatchError("pipelines do not take these arguments of the engine's forward:\n" + "\n".join(lines))
    is_training = pipelined.engine.module.training and torch.is_grad_enabled()
    if is_training and pipelined.loss is not None:
        raise BatchError(
            "engine.step() must follow every forward of a training step: with pipelines a forward runs all "
            "micro-batches of a step, and the plan says how many there are."
        )
    whole = read_batch({name: entry for name, entry in batch.items() if name not in _HANDLED_HERE})
    stage = pipelined.stage
    measures = torch.zeros(3, device=default_device()) if batch.get(_MEASURES_KEY) else None
    stage.measures = None if measures is None else measures.clone()
    buffers = pipelined.buffers if is_training else None
    if buffers is not None:
        buffers.begin_passes()
    loss = _loss_of_passes(pipelined, whole, batch.get(_ITEMS_KEY), is_training)
    if buffers is not None:
        buffers.end_passes()
    if is_training:
        # Before the all_reduce: a rank may hold parameters that only other stages have reached.
        pipelined.engine.optimizer.sync.send_rest()
    dist.all_reduce(loss)
    if measures is not None:
        assert stage.measures is not None
        measures = measures if _is_copy(pipelined) else stage.measures  # zeros on a copy, so that one rank counts
        dist.all_reduce(measures)
    if is_training:
        pipelined.clock.join()
        pipelined.loss = loss
    else:
        pipelined.clock.drop_step()
    outputs = pipelined.outputs_with(loss, measures)
    return outputs.to_tuple() if batch.get("return_dict") is False else outputs


def _is_copy(pipelined: PipelinedEngine) -> bool:
    """Return whether a lower rank, which holds the same tokens, computes the same loss."""
    rank = dist.get_rank()
    stage = pipelined.plan.stage_of(rank)
    return stage is not None and rank != stage.holders_with(rank)[0]


def _loss_of_passes(pipelined: PipelinedEngine, whole: WholeBatch, num_items: Any, is_training: bool) -> Tensor:
    """Run the passes, and return this rank's summand of the loss; the sum over all ranks is the loss of the batch.

    Args:
        whole: the global batch.
        num_items: the number by which the sum over labels is divided; None for the number of labels.
        is_training: whether to run backwards, too.
    """
    plan, rank = pipelined.plan, dist.get_rank()
    place, stage = plan.place_of(rank), plan.stage_of(rank)
    dtype = torch.promote_types(pipelined.stage.dtype, torch.float32)
    zero = torch.zeros((), dtype=dtype, device=default_device())
    num_labels = whole.num_labels()
    if num_labels is None:
        raise BatchError("a batch needs labels: the last stages compute the loss from them.")
    if place is None or stage is None:
        return zero
    assert pipelined.runner is not None
    scale = 1 / max(num_labels if num_items is None else float(num_items), 1)
    pipeline, _ = place
    steps = [whole] if is_training else list(parts_of_rows(whole, samples_of_step(plan)))
    batches = []
    for rows_of_step in steps:
        for rows in micro_batches(plan, pipeline, rows_of_step):
            batches.append(StageBatch(batch=rows, scale=scale))
    sync = pipelined.engine.optimizer.sync
    value = pipelined.runner.train(batches, sync) if is_training else pipelined.runner.evaluate(batches)
    return zero if value is None or _is_copy(pipelined) else value.to(dtype)


def keep_books(pipelined: PipelinedEngine, backward: Function, loss: Tensor, **kwargs: object) -> Tensor:
    """Replace the engine's backward: only check ``loss``, since the forward has made the gradients.

    Raises:
        BatchError: there was no forward in this step, or ``loss`` is not the loss that it returned.
    """
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
