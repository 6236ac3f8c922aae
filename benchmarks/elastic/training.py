"""Run one rank of the benchmark's job; and the same training by plain torch in one process."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.elastic.small_model import CLIP, LENGTH, LR, make_loader, make_model, make_scheduler, norm_of, trained

LOOPS = ("own", "pipelines", "accelerate", "trainer", "trainer_of_pipelines", "sft")
SPEEDS = (4.0, 3.0, 2.0, 1.0, 1.0, 1.0)  # of ranks; emulated in the plan alone


def train_alone(
    num_steps: int, *, is_lora: bool = False, layers: int = 2, batch_size: int = 1
) -> list[dict[str, float]]:
    """Return loss, gradient norm and parameter norm of every step of this process."""
    model, rows = make_model(is_lora=is_lora, layers=layers), []
    optimizer = torch.optim.AdamW(trained(model), lr=LR)
    scheduler, loader = make_scheduler(optimizer), make_loader(batch_size=batch_size)
    while len(rows) < num_steps:
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rows.append({"loss": loss.item(), "norm": norm.item(), "parameters": norm_of(trained(model))})
    return rows[:num_steps]


def _section(options: argparse.Namespace, world_size: int) -> dict[str, Any]:
    nodes = [
        {"name": f"n{i}", "device": f"d{i}", "count": 1, "link": {"bandwidth_gb_per_s": 1000, "latency_us": 1}}
        for i in range(world_size)
    ]
    devices = {
        f"d{i}": {
            "peak_tflops": 0.02 * SPEEDS[i],
            "memory_gib": 8,
            "memory_bandwidth_gb_per_s": 10 * SPEEDS[i],
        }
        for i in range(world_size)
    }
    network = {"bandwidth_gb_per_s": 1000, "latency_us": 1}
    return {
        "cluster": {"nodes": nodes, "network": network, "devices": devices},
        "seq_len": options.length,
        **({"zero_partition": list(SPEEDS[:world_size])} if options.stage else {}),
        "checks": {"compare_every": "off"},
        "elastic": {"every_steps": options.every} if options.every else {},
    }


def _configuration(options: argparse.Namespace, world_size: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": options.stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "heterogeneity": _section(options, world_size),
    }


def _say_nothing(event: str, **details: Any) -> None:
    pass


class JsonLog:
    """Log of the events of all ranks, one line each."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, event: str, **details: Any) -> None:
        """Write an event."""
        line = {"event": event, "time": time.time(), "pid": os.getpid(), **details}
        line["agent"] = os.environ.get("DS_HETERO_ELASTIC_AGENT")
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    """Run one rank of the job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--lora", action="store_true", help="LoRA: its adapters alone are trained")
    parser.add_argument("--loop", choices=LOOPS, default="own")
    parser.add_argument("--pause-s", type=float, default=0.05)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of the longest sequence")
    parser.add_argument("--turns", action="store_true", help="log no step: time them by turns with and without saves")
    parser.add_argument("--local_rank", type=int)
    options = parser.parse_args()
    log = JsonLog(options.events)
    log("spawn")
    import deepspeed
    import torch.distributed as dist

    import ds_hetero

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes a minute
    handle = ds_hetero.register()
    deepspeed.init_distributed("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    log("init", rank=rank, world_size=world_size)
    if options.loop != "own":
        _train_by(options, handle, world_size, log)
        return
    model = make_model(is_lora=options.lora, width=options.width, length=options.length)
    optimizer = torch.optim.AdamW(trained(model), lr=LR)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=make_scheduler(optimizer),
        config=_configuration(options, world_size),
    )
    log("built", rank=rank, world_size=world_size)
    loader = handle.elastic(handle.dataloader(make_loader(options.length, is_even=options.turns)))
    log("ready", rank=rank, world_size=world_size, step=engine.global_steps)
    _train(handle, engine, loader, options, log)
    log("done", rank=rank, step=engine.global_steps)


def _train_by(options: argparse.Namespace, handle: Any, world_size: int, log: Callable[..., None]) -> None:
    """Train by another loop than the custom one over one replica."""
    from benchmarks.elastic import loops, trainer  # imported by jobs that need them: their start is timed

    config = _configuration(options, world_size)
    if "pipelines" in options.loop:
        config = loops.configuration_of_pipelines(config, world_size)
    if options.loop == "pipelines":
        loops.train_pipelines(handle, config, options.steps, log, options.pause_s, is_lora=options.lora)
    elif options.loop == "accelerate":
        loops.train_by_accelerate(handle, config, options.steps, world_size, log, options.pause_s)
    else:
        trainer.train(config, options.steps, world_size, log, options.pause_s, loop=options.loop)


def _train(handle: Any, engine: Any, loader: Any, options: argparse.Namespace, log: JsonLog) -> None:
    """Train in a custom loop over one replica."""
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_fp32_param

    turns = None
    if options.turns:
        from benchmarks.elastic.cost import Turns

        snapshots = handle.registry.latest.elastic.snapshots
        turns = Turns(snapshots, log if dist.get_rank() == 0 else _say_nothing, is_given=options.every > 0)
    while engine.global_steps < options.steps:
        for batch in loader:
            loss = handle.loss(engine(**batch), batch)
            engine.backward(loss)
            engine.step()
            if turns is not None:
                loss.item()
                turns.after_step(engine.global_steps)
                continue
            parameters = trained(engine.module)
            full_parameters = [safe_get_full_fp32_param(parameter) for parameter in parameters]
            full_parameters = [p if w is None else w for w, p in zip(full_parameters, parameters, strict=True)]
            if dist.get_rank() == 0:
                norm = engine.get_global_grad_norm()
                numbers = {"loss": loss.item(), **({} if norm is None else {"norm": float(norm)})}
                size = dist.get_world_size()
                log("step", step=engine.global_steps, world_size=size, **numbers, parameters=norm_of(full_parameters))
            time.sleep(options.pause_s)
            if engine.global_steps >= options.steps:
                return


if __name__ == "__main__":
    main()
