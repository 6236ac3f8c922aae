"""Train the benchmark's model in pipelines, and in a loop of accelerate; and the same in one process."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.elastic.small_model import CLIP, LR, make_loader, make_model, make_scheduler, norm_of, trained

GLOBAL, LAYERS = 4, 4  # samples of a step of pipelines, and layers that they are cut from
_LOG_EVERY = 3
_MODEL = {"num_layers": LAYERS, "num_heads": 12, "num_kv_heads": 6}


def plan_of(world_size: int) -> dict[str, Any]:
    """Return a plan of pipelines for ``world_size`` ranks: stages of one rank, of sequences and of tensors."""

    def stage(ranks: list[int], first: int, last: int, **more: Any) -> dict[str, Any]:
        return {"ranks": ranks, "layers": [first, last], **more}

    def pipeline(samples: int, *stages: dict[str, Any]) -> dict[str, Any]:
        return {"micro_batch_size": 1, "micro_batches": samples, "stages": list(stages)}

    group = {"ranks": [0, 1], "tokens": [3, 1], "heads": [8, 4]}
    schedule = {"version": 1, "num_heads": 12, "num_kv_heads": 6, "layout": "zigzag", "groups": [group]}
    sequence = stage([0, 1], 0, 3, inner="sequence", schedule=schedule)
    tensor = stage([0, 1], 0, 3, inner="tensor")
    pipelines = {
        1: [pipeline(4, stage([0], 0, 4))],
        2: [pipeline(4, stage([0], 0, 3), stage([1], 3, 4))],
        3: [pipeline(3, stage([0], 0, 1), stage([1], 1, 4)), pipeline(1, stage([2], 0, 4))],
        4: [pipeline(3, sequence, stage([2], 3, 4)), pipeline(1, stage([3], 0, 4))],
        5: [pipeline(2, tensor, stage([2], 3, 4)), pipeline(2, stage([3], 0, 2), stage([4], 2, 4))],
        6: [
            pipeline(2, sequence, stage([2], 3, 4)),
            pipeline(2, *(stage([3 + i], i, i + 1 + i // 2) for i in range(3))),
        ],
    }
    return {"version": 2, "model": _MODEL, "pipelines": pipelines[world_size]}


def configuration_of_pipelines(config: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Return a configuration with a plan of pipelines for ``world_size`` ranks."""
    section = {
        "schedule": plan_of(world_size),
        "checks": {"compare_every": "off"},
        "elastic": config["heterogeneity"]["elastic"],
    }
    batch = {"train_micro_batch_size_per_gpu": GLOBAL, "gradient_accumulation_steps": 1}
    return {**config, **batch, "zero_optimization": {"stage": 1}, "heterogeneity": section}


def norm_of_owned(engine: Any) -> float:
    """Return the Euclidean norm of all parameters of an engine of pipelines, each from its owner; on every rank."""
    squares = torch.tensor(norm_of(list(engine.optimizer.sync.owned.values())) ** 2, dtype=torch.float64)
    dist.all_reduce(squares)
    return math.sqrt(squares.item())


def train_pipelines(
    handle: Any, config: dict[str, Any], num_steps: int, log: Callable[..., None], pause_s: float, *, is_lora: bool
) -> None:
    """Train stages of pipelines; log every step."""
    import deepspeed

    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_model(is_lora=is_lora, layers=LAYERS)
    optimizer = torch.optim.AdamW(trained(model), lr=LR)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=make_scheduler(optimizer), config=config
    )
    log("built", rank=rank, world_size=world_size)
    loader = handle.elastic(handle.dataloader(make_loader(batch_size=GLOBAL)))
    log("ready", rank=rank, world_size=world_size, step=engine.global_steps)
    while engine.global_steps < num_steps:
        for batch in loader:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            parameters = norm_of_owned(engine)
            if rank == 0:
                numbers = {"loss": loss.item(), "norm": engine.get_global_grad_norm(), "parameters": parameters}
                log("step", step=engine.global_steps, world_size=world_size, **numbers)
            time.sleep(pause_s)
            if engine.global_steps >= num_steps:
                return


class _Mean:
    """The mean loss since the last log, which a script keeps itself."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


def train_by_accelerate(
    handle: Any,
    config: dict[str, Any] | None,
    num_steps: int,
    world_size: int,
    log: Callable[..., None],
    pause_s: float = 0.0,
) -> None:
    """Train in a loop of accelerate; log every step, and every few steps the mean loss.

    Args:
        handle: of `ds_hetero.register`; None for one process without ds_hetero.
        config: of DeepSpeed; None for one process without DeepSpeed.
    """
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig

    options: dict[str, Any] = {"cpu": True}
    if config is not None:
        options = {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config)}
        if world_size > 1:
            handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
            options["parallelism_config"] = ParallelismConfig(
                sp_backend="deepspeed", sp_size=world_size, dp_shard_size=1, sp_handler=handler
            )
    accelerator = Accelerator(**options)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, make_loader(), make_scheduler(optimizer)
    )
    mean, rank, step = _Mean(), int(os.environ.get("RANK", "0")), 0
    log("built", rank=rank, world_size=world_size)
    if handle is not None:
        loader = handle.elastic(loader, extra={"mean": mean})
        step = loader.resumed_step or 0
    log("ready", rank=rank, world_size=world_size, step=step)
    while step < num_steps:
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            mean.losses.append(loss.item())
            numbers = {"loss": loss.item(), "norm": float(norm), "parameters": norm_of(_whole(model, config))}
            if rank == 0:
                log("step", step=step, world_size=world_size, **numbers)
            if step % _LOG_EVERY == 0:
                if rank == 0:
                    log("log", step=step, logged=sum(mean.losses) / len(mean.losses))
                mean.losses.clear()
            time.sleep(pause_s)
            if step >= num_steps:
                return


def _whole(model: Any, config: dict[str, Any] | None) -> list[torch.Tensor]:
    if config is None:
        return list(model.parameters())
    from deepspeed.utils import safe_get_full_fp32_param

    gathered = [(safe_get_full_fp32_param(parameter), parameter) for parameter in model.module.parameters()]
    return [parameter if full is None else full for full, parameter in gathered]


def train_alone(num_steps: int) -> list[dict[str, float]]:
    """Return the numbers of every step of accelerate's loop in this process, with logged means at their steps."""
    from accelerate.utils import patch_environment

    rows: list[dict[str, float]] = []

    def log(event: str, **numbers: Any) -> None:
        if event == "step":
            rows.append({name: numbers[name] for name in ("loss", "norm", "parameters")})
        elif event == "log":
            rows[-1]["logged"] = numbers["logged"]

    with patch_environment(ACCELERATE_USE_CPU="true"):  # launchers that start later inherit the environment
        train_by_accelerate(None, None, num_steps, 1, log)
    return rows
