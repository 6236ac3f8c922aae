"""Train the benchmark's model by other fault-tolerant methods; started by `rivals`.

stock      DeepSpeed alone under torchrun, with a checkpoint on disk every few steps
torchft    three replicas of one process each, which average the gradients of those that are alive

Each rank takes a sample of its own. The sample's number gives the step and the rank, so every rank knows the next one,
however often it is restarted.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from benchmarks.elastic.small_model import LR, SAMPLES, make_loader, make_model
from benchmarks.elastic.training import JsonLog

RANKS = 3


class _Samples:
    """Samples in the order of one process, shuffled in every epoch."""

    def __init__(self) -> None:
        self._rows = make_loader().dataset

    def batch(self, number: int) -> dict[str, torch.Tensor]:
        """Return a sample by its number, as a batch."""
        epoch, index = divmod(number, SAMPLES)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        return {name: entry[None] for name, entry in self._rows[int(order[index])].items()}


def train_stock(options: argparse.Namespace, log: Callable[..., None]) -> None:
    """Run one rank of stock DeepSpeed."""
    import deepspeed
    import torch.distributed as dist

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes a minute
    deepspeed.init_distributed("gloo")
    model, samples, rank = make_model(), _Samples(), dist.get_rank()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=LR), config=config
    )
    if (options.folder / "latest").exists():
        engine.load_checkpoint(str(options.folder))
    log("ready", rank=rank, step=engine.global_steps)
    while True:
        number = engine.global_steps * RANKS + rank
        engine.backward(engine(**samples.batch(number)).loss)
        engine.step()
        log("step", step=engine.global_steps, sample=number, world_size=RANKS)
        time.sleep(options.pause_s)
        if engine.global_steps % options.every == 0:
            engine.save_checkpoint(str(options.folder))


def train_torchft(options: argparse.Namespace, log: Callable[..., None]) -> None:
    """Train one replica under torchft, which replaces ranks while the job continues."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model, samples, rank = make_model(), _Samples(), options.replica
    inner = torch.optim.AdamW(model.parameters(), lr=LR)

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=3)),
        min_replica_size=RANKS - 1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"replica{rank}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        timeout=timedelta(seconds=10),
        hostname="127.0.0.1",
        init_sync=False,
    )
    replicated, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    log("ready", rank=rank, step=manager.current_step())
    while True:
        number, before = manager.current_step() * RANKS + rank, manager.current_step()
        optimizer.zero_grad()
        replicated(**samples.batch(number)).loss.backward()
        took_part, num_replicas = manager.is_participating(), manager.num_participants()
        optimizer.step()
        if took_part and manager.current_step() == before + 1:
            log("step", step=manager.current_step(), sample=number, world_size=num_replicas)
        time.sleep(options.pause_s)


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("stock", "torchft"))
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="of checkpoints")
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--pause-s", type=float, default=0.05, help="after each step")
    options = parser.parse_args()
    log = JsonLog(options.events)
    log("spawn", rank=int(os.environ.get("RANK", options.replica)))
    {"stock": train_stock, "torchft": train_torchft}[options.kind](options, log)


if __name__ == "__main__":
    main()
