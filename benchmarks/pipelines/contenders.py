"""Train whole steps of a small Llama under a plan, and under DeepSpeed's own PipelineEngine."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn

import ds_hetero
from benchmarks.measure.models import VOCABULARY, trained_model
from benchmarks.pipelines.plans import Task
from ds_hetero.values.plans import Plan

Step = Callable[[], float]
"""Runs one optimizer step and returns the loss of the global batch."""

_IGNORED = -100


def batch_of(task: Task) -> dict[str, Tensor]:
    """Return the global batch of every step; steps are measured, not loaders."""
    tokens = torch.randint(VOCABULARY, (task.samples, task.tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def step_of(plan: Plan, task: Task) -> Step:
    """Return the step of this engine under a plan. Caller: every rank of the world, after any `stock_step`."""
    if plan.is_replicas:
        return _sequence_step(plan, task)
    return step_with(engine_of(plan, task), batch_of(task))


def step_with(engine: Any, batch: Mapping[str, Tensor]) -> Step:
    """Return the step of an engine of pipelines."""

    def step() -> float:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return float(loss)

    return step


def engine_of(plan: Plan, task: Task, section: Mapping[str, Any] = types.MappingProxyType({})) -> Any:
    """Return the engine that runs a plan of pipelines.

    Args:
        plan: of all ranks.
        task: has the model.
        section: further keys of the section.

    Caller: every rank of the world.
    """
    deepspeed.init_distributed("gloo", verbose=False)
    ds_hetero.register()
    model = trained_model(task.shape, task.tokens, "sdpa")
    schedule = {key: value for key, value in plan.to_dict().items() if key != "predicted"}
    return _initialize(model, {"heterogeneity": {**section, "schedule": schedule}})


def _sequence_step(plan: Plan, task: Task) -> Step:
    """Return the step of sequence parallelism over all ranks: micro-batches of one sequence, one after the other."""
    deepspeed.init_distributed("gloo", verbose=False)
    handle = ds_hetero.register()
    model = trained_model(task.shape, task.tokens, "sdpa")
    section = {"schedule": plan.schedules[0].to_dict(), "checks": {"compare_every": "off"}}
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": task.samples}
    config = {**sizes, "sequence_parallel_size": dist.get_world_size(), "heterogeneity": section}
    engine = _initialize(model, config)
    whole_batch = batch_of(task)
    rows = repeat([{name: entry[i : i + 1] for name, entry in whole_batch.items()} for i in range(task.samples)])
    shards = iter(handle.for_engine(engine).dataloader((row for step in rows for row in step), batches="same"))

    def step() -> float:
        total = 0.0
        for _ in range(task.samples):
            shard = next(shards)
            loss = handle.loss(engine(**shard), shard)
            engine.backward(loss)
            engine.step()
            total += float(loss.detach())
        return total / task.samples

    return step


def _initialize(model: nn.Module, config: dict[str, Any]) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    common = {"zero_optimization": {"stage": 1}, "gradient_clipping": 1.0, "steps_per_print": 10**6}
    return deepspeed.initialize(model=model, optimizer=optimizer, config={**common, **config})[0]


# --- DeepSpeed's own ----------------------------------------------------------------------------------


def stock_step(task: Task) -> Step:
    """Return the step of DeepSpeed's PipelineEngine, with equal stages. Caller: every rank of the world."""
    deepspeed.init_distributed("gloo", verbose=False)
    model = trained_model(task.shape, task.tokens, "sdpa")
    decoder = model.model
    layers = [
        decoder.embed_tokens,
        *(_Layer(layer, decoder.rotary_emb) for layer in decoder.layers),
        nn.Sequential(decoder.norm, model.lm_head),
    ]
    module = PipelineModule(
        layers=layers, num_stages=dist.get_world_size(), loss_fn=_mean_loss, partition_method="type:_Layer"
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": task.samples,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**6,
    }
    trained_parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained_parameters, lr=1e-4)
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    tokens = batch_of(task)["input_ids"]
    targets = nn.functional.pad(tokens[:, 1:], (0, 1), value=_IGNORED)
    rows = [(tokens[i : i + 1], targets[i : i + 1]) for i in range(task.samples)]
    return lambda: float(engine.train_batch(iter(rows)))


class _Layer(nn.Module):
    """A layer of the decoder in the form of DeepSpeed's pipelines: hidden states in, hidden states out."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, hidden: Tensor) -> Tensor:
        positions = torch.arange(hidden.shape[1])[None]
        embeddings = self.rotary(hidden, positions)
        output: Tensor = self.layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=embeddings)
        return output


def _mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=_IGNORED)
