"""Train whole steps of a small model through DeepSpeed engines: forward, backward, optimizer.

The contenders are those of `contenders`, each with a model and an engine of its own, all in the same processes. Stock
is set up as DeepSpeed's tutorial on Ulysses says: `register_with_transformers`, its mpu, and its loss, averaged over
ranks by tokens. Ours is set up as docs/quickstart.md says. The model's parameters and every batch are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from itertools import repeat
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_single
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import ds_hetero
from benchmarks.measure.contenders import (
    Shape,
    TorchRing,
    contiguous_positions,
    set_up_ringmaster,
    zigzag_positions,
)
from benchmarks.measure.models import VOCABULARY, trained_model
from ds_hetero.engine.handle import Handle
from ds_hetero.runtime.data.shards import PLACEHOLDER_POSITION
from ds_hetero.values.placement import stream_placement
from ds_hetero.values.schedule import Schedule

Step = Callable[[int], float]
"""Runs one training step on sequences of so many tokens and returns the loss of the whole batch."""

_IGNORED = -100


def make_step(name: str, shape: Shape, max_length: int) -> Step:
    """Set a contender up on this rank. Every rank calls it in the same order, with "stock" before any of ours."""
    deepspeed.init_distributed("gloo", verbose=False)
    makers = {
        "stock": _stock,
        "torch-ring": _torch_ring,
        "ringmaster": _ringmaster,
        "ulysses": _engine,
        "ring": _engine,
    }
    return makers[name](name, shape, max_length)


def _engine_for(model: Any, shape: Shape, mpu: Any = None, **config: Any) -> Any:
    ds_config = {
        "train_micro_batch_size_per_gpu": shape.batch_size,
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0,
        **config,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config, mpu=mpu)[0]


def _batch(shape: Shape, length: int, positions: list[int]) -> dict[str, Tensor]:
    """Return this rank's shard of a batch; a rank without tokens gets one column. Steps are measured, not loaders."""
    if not positions:
        column = {"input_ids": 0, "position_ids": PLACEHOLDER_POSITION, "shift_labels": _IGNORED}
        return {name: torch.full((shape.batch_size, 1), value) for name, value in column.items()}
    tokens = torch.randint(VOCABULARY, (shape.batch_size, length), generator=torch.Generator().manual_seed(1))
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=_IGNORED)
    return {
        "input_ids": tokens[:, positions],
        "position_ids": torch.tensor([positions] * shape.batch_size),
        "shift_labels": labels[:, positions],
    }


def _stock(name: str, shape: Shape, max_length: int) -> Step:
    """Return the step of stock DeepSpeed Ulysses."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = trained_model(shape, max_length, "sdpa")
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=num_ranks,
        micro_batch_size=shape.batch_size,
    )
    engine = _engine_for(model, shape, mpu, sequence_parallel_size=num_ranks)
    batch = cache(lambda length: _batch(shape, length, contiguous_positions(length, rank, num_ranks)))
    return lambda length: _documented_step(engine, batch(length), mpu.get_sequence_parallel_group())


def _torch_ring(name: str, shape: Shape, max_length: int) -> Step:
    """Return the step of torch's ring attention."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, **_: Any) -> tuple[Tensor, None]:
        out: Tensor = TorchRing.apply(q, k, v, dist.group.WORLD)
        return out.transpose(1, 2), None

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
    engine = _engine_for(trained_model(shape, max_length, name), shape)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    batch = cache(lambda length: _batch(shape, length, zigzag_positions(length, rank, num_ranks)))
    return lambda length: _documented_step(engine, batch(length), dist.group.WORLD)


def _ringmaster(name: str, shape: Shape, max_length: int) -> Step:
    """Return the step of ringmaster's Ulysses."""
    import ringmaster

    attention = set_up_ringmaster(shape)
    AttentionMaskInterface.register(attention, lambda *args, **kwargs: None)
    model = trained_model(shape, max_length, attention)
    ringmaster.wire_recurrent_layers(model)
    engine = _engine_for(model, shape)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    batch = cache(lambda length: _batch(shape, length, contiguous_positions(length, rank, num_ranks)))
    return lambda length: _documented_step(engine, batch(length), dist.group.WORLD)


def _documented_step(engine: Any, batch: Mapping[str, Tensor], group: Any) -> float:
    """Train a step as in DeepSpeed's tutorial and transformers' Trainer: means over ranks, weighted by their tokens."""
    labels = batch["shift_labels"]
    logits = engine(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    loss = engine.module.loss_function(logits=logits, labels=None, shift_labels=labels, vocab_size=VOCABULARY)
    losses = all_gather_single(loss[None], 0, group)
    counts = all_gather_single(labels.ne(_IGNORED).sum()[None], 0, group)
    loss = (losses * counts).sum() / counts.sum()
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def _engine(name: str, shape: Shape, max_length: int) -> Step:
    return make_scheduled_step(name, shape, max_length)


def make_scheduled_step(schedule: str | Schedule, shape: Shape, max_length: int) -> Step:
    """Return the step of this engine with a schedule or a strategy's name.

    Every rank calls it in the same order, after any "stock".
    """
    num_ranks = dist.get_world_size()
    handle = ds_hetero.register()
    model = trained_model(shape, max_length, "sdpa")
    section = {"schedule": schedule if isinstance(schedule, str) else schedule.to_dict()}
    engine = _engine_for(model, shape, sequence_parallel_size=num_ranks, heterogeneity=section)
    engine_handle = handle.for_engine(engine)
    running = engine_handle.schedule
    batch = cache(lambda length: _batch(shape, length, stream_placement(running, length).positions(dist.get_rank())))

    def step(length: int) -> float:
        shard = batch(length)
        outputs = engine(input_ids=shard["input_ids"], position_ids=shard["position_ids"])
        loss = engine_handle.loss(outputs, shard)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def make_loaded_step(
    schedule: Schedule, shape: Shape, length: int, replan: Mapping[str, Any]
) -> tuple[Callable[[], float], Handle]:
    """Return a step like `make_scheduled_step` with the engine's loader, so that the schedule may change between steps.

    Args:
        schedule: at first.
        shape: of the model.
        length: tokens of every sequence.
        replan: value of this key in the section.

    Returns:
        The step, and the handle whose latest model it trains.
    """
    handle = ds_hetero.register()
    model = trained_model(shape, length, "sdpa")
    section = {"schedule": schedule.to_dict(), "replan": dict(replan)}
    engine = _engine_for(model, shape, sequence_parallel_size=dist.get_world_size(), heterogeneity=section)
    tokens = torch.randint(VOCABULARY, (shape.batch_size, length), generator=torch.Generator().manual_seed(1))
    shards = iter(handle.dataloader(repeat({"input_ids": tokens, "labels": tokens}), batches="same"))

    def step() -> float:
        shard = next(shards)
        loss = handle.loss(engine(**shard), shard)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step, handle


def alone_step(shape: Shape, max_length: int) -> Step:
    """Return the step without any engine: the whole sequence on the calling rank; no other rank takes part."""
    # Under a name of its own, because the usual one may be stock's by now.
    AttentionInterface.register("alone", sdpa_attention_forward)
    AttentionMaskInterface.register("alone", lambda *args, **kwargs: None)
    model = trained_model(shape, max_length, "alone")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = cache(lambda length: _batch(shape, length, list(range(length))))

    def step(length: int) -> float:
        whole_batch = batch(length)
        logits = model(input_ids=whole_batch["input_ids"], position_ids=whole_batch["position_ids"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), whole_batch["shift_labels"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step
