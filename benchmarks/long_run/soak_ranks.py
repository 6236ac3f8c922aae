"""One rank of the soak: a tiny model on rows of changing lengths, with all that a long job switches on."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.elastic.small_model import VOCAB, make_model
from benchmarks.long_run.examples import emulated_speed
from benchmarks.long_run.readings import read_own_process
from benchmarks.long_run.start import cluster_of, configuration, own_node, parser_of_rank, start_rank

NODES = ("n0", "n1", "n2")
EVALUATE_EVERY, CHECKPOINT_EVERY, SLOW_FOR = 500, 1000, 2000  # steps
_LENGTHS = (24, 160)  # tokens
_ROWS = 997  # of an epoch
_SLOW = 0.5  # of a core: one node at a time, so that re-planning changes the schedule


def main() -> None:
    """Train."""
    parser = parser_of_rank()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--read-every", type=int, required=True)
    options = parser.parse_args()
    records, handle = start_rank(options.events)
    node = own_node()

    import deepspeed
    import torch.distributed as dist

    model = make_model(width=48, length=_LENGTHS[1], layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration_of(options.folder))
    loader = handle.elastic(handle.dataloader(_make_loader()))
    world_size = dist.get_world_size()
    records.add("ready", rank=dist.get_rank(), world_size=world_size, step=engine.global_steps)
    speed = emulated_speed(1.0)
    speed.attach(engine.module)
    held_out, began_s = [_row(number) for number in range(4)], time.perf_counter()
    while engine.global_steps < options.steps:
        for batch in loader:
            speed.cores = _SLOW if NODES[engine.global_steps // SLOW_FOR % len(NODES)] == node else 1.0
            engine.backward(handle.loss(engine(**batch), batch))
            engine.step()
            step = engine.global_steps
            if step % options.read_every == 0:
                seconds = (time.perf_counter() - began_s) / options.read_every
                changes = len(handle.schedule_changes)
                reading = {"rank": dist.get_rank(), "seconds": seconds, "changes": changes, **read_own_process()}
                records.add("reading", step=step, node=node, **reading)
            if step % EVALUATE_EVERY == 0:
                _evaluate(engine, held_out)
            if step % CHECKPOINT_EVERY == 0:
                client_state = {"loader": loader.state_dict()}
                engine.save_checkpoint(str(options.folder / "checkpoint"), "last", client_state=client_state)
            if step % options.read_every == 0:
                began_s = time.perf_counter()
            if step >= options.steps:
                return


def configuration_of(folder: Path) -> dict[str, Any]:
    """Return ds_config.json; report, monitor and checkpoints are in ``folder``."""
    return configuration(
        {
            "cluster": cluster_of(NODES, [1.0] * len(NODES)),
            "seq_len": _LENGTHS[1],
            "placement": "stream",
            "replan": {"enabled": True},
            "elastic": {"every_steps": 50},
            "evaluation": "sharded",
            "report": str(folder / "report"),
        },
        gradient_clipping=1.0,
        csv_monitor={"enabled": True, "output_path": str(folder / "monitor"), "job_name": "soak"},
    )


class _Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of changing lengths."""

    def __len__(self) -> int:
        return _ROWS

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {name: tensor[0] for name, tensor in _row(number).items()}


def _row(number: int) -> dict[str, Tensor]:
    """Return row ``number`` as a batch of one."""
    length = random.Random(number).randint(*_LENGTHS)
    ids = torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids, "labels": ids}


def _make_loader() -> Any:
    generator = torch.Generator().manual_seed(7)
    return torch.utils.data.DataLoader(_Rows(), batch_size=1, shuffle=True, generator=generator)


def _evaluate(engine: Any, rows: list[dict[str, Tensor]]) -> None:
    engine.eval()
    with torch.no_grad():
        for row in rows:
            engine(**row)
    engine.train()


if __name__ == "__main__":
    main()
