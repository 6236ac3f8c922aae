"""One rank of the job: a loop as a user writes it, with what the comparison needs recorded at every step."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.long_run.course import SEGMENTS, cores_at, section, step_of
from benchmarks.long_run.examples import emulated_speed
from benchmarks.long_run.job import (
    Job,
    as_batch,
    evaluation_rows,
    make_loader,
    make_model,
    make_optimizer,
    make_scheduler,
    tokens_and_checksum,
    training_rows,
)
from benchmarks.long_run.records import Records
from benchmarks.long_run.start import configuration, own_node, parser_of_rank, start_rank

CHECKPOINT = "checkpoint"
AWAITS_EVENT = "awaits-event"  # file that is there while the driver waits for the job to go on
_TAG = "last"


def main() -> None:
    """Train one segment of the job."""
    parser = parser_of_rank()
    parser.add_argument("--segment", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    options = parser.parse_args()
    job = Job.read(options.folder / "job.json")
    records, handle = start_rank(options.events)

    import deepspeed
    import torch.distributed as dist

    nodes = _nodes_of_ranks()
    records.add("init", rank=dist.get_rank(), world_size=len(nodes))
    begins_at = max((record["step"] for record in records.read() if record["event"] == "step"), default=0)
    begins_at = _from_rank_0(begins_at)
    segment = SEGMENTS[options.segment]
    model = make_model(job)
    optimizer = make_optimizer(job, model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=make_scheduler(job, optimizer),
        config=configuration(
            {
                **section(job, segment, nodes, begins_at, options.save_every),
                "evaluation": "sharded",
                "report": str(options.folder / f"run-{options.segment}"),
            },
            gradient_clipping=job.clip,
            bf16={"enabled": job.dtype == "bf16"},
        ),
    )
    records.add("built", rank=dist.get_rank(), world_size=len(nodes))
    loader = handle.elastic(handle.dataloader(make_loader(training_rows(job))))
    if loader.resumed_step is None:
        _load_checkpoint(engine, loader, options.folder / CHECKPOINT)
    records.add("ready", rank=dist.get_rank(), world_size=len(nodes), nodes=nodes, step=engine.global_steps)
    _train(handle, engine, loader, job, options, nodes, records)


def _train(
    handle: Any, engine: Any, loader: Any, job: Job, options: argparse.Namespace, nodes: list[str], records: Records
) -> None:
    import torch.distributed as dist

    rank, end = dist.get_rank(), step_of(job, SEGMENTS[options.segment].until)
    held_out = evaluation_rows(job)
    speed = emulated_speed(cores_at(job, engine.global_steps)[nodes[rank]])
    speed.attach(engine.module)
    began_s = time.perf_counter()
    while engine.global_steps < end:
        for batch in loader:
            speed.cores = cores_at(job, engine.global_steps)[nodes[rank]]
            learning_rate = engine.optimizer.param_groups[0]["lr"]
            loss = handle.loss(engine(**batch), batch)
            engine.backward(loss)
            engine.step()
            tokens_by_rank, checksum = _counts(batch)
            step, ended_s = engine.global_steps, time.perf_counter()
            if rank == 0:
                records.add(
                    "step",
                    step=step,
                    world_size=len(nodes),
                    loss=loss.item(),
                    norm=float(engine.get_global_grad_norm()),
                    lr=learning_rate,
                    tokens=sum(tokens_by_rank),
                    tokens_by_node=dict(zip(nodes, tokens_by_rank, strict=True)),
                    checksum=checksum,
                    seconds=ended_s - began_s,
                    changes=len(handle.schedule_changes),
                )
            is_evaluated = step % job.evaluate_every == 0 or step == job.steps
            if is_evaluated:
                mean_loss = _evaluate(engine, held_out)
                if rank == 0:
                    records.add("evaluation", step=step, loss=mean_loss)
            if is_evaluated or step >= end:
                state = {"loader": loader.state_dict()}
                engine.save_checkpoint(str(options.folder / CHECKPOINT), _TAG, client_state=state)
                if rank == 0:
                    records.add("checkpoint", step=step)
            if job.pause_s and (options.folder / AWAITS_EVENT).exists():
                time.sleep(job.pause_s)
            began_s = time.perf_counter()
            if step >= end:
                return


def _evaluate(engine: Any, rows: list[dict[str, Tensor]]) -> float:
    """Return the mean loss of rows, which all ranks share."""
    engine.eval()
    with torch.no_grad():
        losses = [float(engine(**as_batch([row])).loss) for row in rows]
    engine.train()
    return sum(losses) / len(losses)


def _load_checkpoint(engine: Any, loader: Any, folder: Path) -> None:
    """Load the checkpoint of the segment before, or of this one if the whole run was stopped in it."""
    if (folder / "latest").exists():
        _, client_state = engine.load_checkpoint(str(folder))
        loader.load_state_dict(client_state["loader"])


def _counts(shard: Any) -> tuple[list[int], int]:
    """Return the tokens of every rank, and the checksum of the whole batch; on every rank."""
    import torch.distributed as dist

    tokens, checksum = tokens_and_checksum(shard)
    counts = torch.zeros(dist.get_world_size() + 1, dtype=torch.int64)
    counts[dist.get_rank()], counts[-1] = tokens, checksum
    dist.all_reduce(counts)
    *tokens_by_rank, whole_checksum = counts.tolist()
    return tokens_by_rank, whole_checksum


def _nodes_of_ranks() -> list[str]:
    """Return the node of every rank."""
    import torch.distributed as dist

    nodes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(nodes, own_node())
    return nodes


def _from_rank_0(value: int) -> int:
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


if __name__ == "__main__":
    main()
