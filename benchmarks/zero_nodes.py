"""Compare ZeRO-3 with shards over all ranks and with shards inside each node, on two nodes over a slow link.

    python -m benchmarks.zero_nodes [--json] [--micro-batches 1 4] [--budget-s 60] [--rate-gbit-per-s 1] [--output FILE]

Whole training steps of a small Llama on nodes of 2 + 1 ranks, weights 3 : 1 : 2, alternate in the same processes, for
every number of micro-batches of a step. Gradient buckets are a seventh of the model in both, as DeepSpeed's are for a
model of 3.5 billion parameters. The link is emulated. Bytes are those that the first node's interface has sent and
received, with headers. The losses of the first steps are compared with one process. The exit code is 1 unless shards
inside nodes are twice as fast, send at most 1.05 times the gradients, and all losses agree to 1e-5.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.emulation.network import emulate
from benchmarks.emulation.relay import DEVICE
from benchmarks.measure.ranks import Report, run
from benchmarks.measure.results import FOLDER, header, write
from benchmarks.measure.statistics import compare
from benchmarks.measure.turns import alternate

RESULT = FOLDER / "zero_nodes.json"
FLAT, INSIDE = "over all ranks", "inside nodes"
NODES, WEIGHTS = [2, 1], [3, 1, 2]
FASTER, BYTES, LOSSES = 2.0, 1.05, 1e-5
_TOKENS, _MIN_PAIRS, _STEPS, _RATE, _BUCKET = 16, 5, 3, 1e-3, 2_000_000


def main() -> int:
    """Run the command; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4], help="of a step")
    parser.add_argument("--budget-s", type=float, default=60.0, help="seconds of timed steps, for each of them")
    parser.add_argument("--rate-gbit-per-s", type=float, default=1.0, help="of the link between the nodes")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    rows = []
    with (
        Progress(console=Console(stderr=True)) as progress,
        emulate(nodes=len(NODES), rate_bit_per_s=args.rate_gbit_per_s * 1e9) as net,
    ):
        by_rank = [net.nodes[node] for node, count in enumerate(NODES) for _ in range(count)]
        for micro_batches in args.micro_batches:
            task = progress.add_task(f"{micro_batches} micro-batches", total=1.0)
            row = run(
                _measure,
                by_rank,
                micro_batches,
                args.budget_s,
                on_report=lambda done, now, task=task: progress.update(task, completed=done),
            )[0]
            seconds = row.pop("seconds")
            rows.append({"micro_batches": micro_batches, **row, **asdict(compare(seconds[FLAT], seconds[INSIDE]))})
        network = net.describe()
    result = {**header(" ".join(["python -m benchmarks.zero_nodes", *sys.argv[1:]])), "network": network, "rows": rows}
    write(result, args.output)
    print(json.dumps(result) if args.json else "\n".join([f"emulated link: {network}", *map(_text, rows)]))
    return 0 if all(map(_reaches, rows)) else 1


def _reaches(row: dict[str, Any]) -> bool:
    """Return True if a row reaches all targets."""
    sent = max(row["bytes_per_step"][INSIDE]) / row["gradient_bytes"]
    return bool(row["ratio"] >= FASTER and sent <= BYTES and max(row["loss_error"].values()) <= LOSSES)


def _text(row: dict[str, Any]) -> str:
    """Return the result of one number of micro-batches in words."""
    low, high = row["interval"]
    lines = [
        f"{row['micro_batches']} micro-batches: {row['ratio']:.2f} x the steps per second, 95 % interval {low:.2f} to "
        f"{high:.2f}, {row['pairs']} pairs, {row['foreign_cores']:.2f} cores used by others"
    ]
    for name, seconds in ((FLAT, row["peer_s"]), (INSIDE, row["ours_s"])):
        sent, received = (count / row["gradient_bytes"] for count in row["bytes_per_step"][name])
        lines.append(
            f"  {name + ':':16}{seconds:.3f} s a step; the first node sends {sent:.3f} and receives {received:.3f} of "
            f"the gradients' {row['gradient_bytes'] / 1e6:.1f} MB; losses within {row['loss_error'][name]:.1e}"
        )
    return "\n".join(lines)


# --- on a rank --------------------------------------------------------------------------------------


def _measure(rank: int, report: Report, micro_batches: int, budget_s: float) -> dict[str, Any]:
    """Time the steps of both settings on this rank."""
    import torch.distributed as dist

    ids = torch.randint(0, 512, (_STEPS * micro_batches * 3, 1, _TOKENS), generator=torch.Generator().manual_seed(1))
    expected = _one_process(ids.split(3 * micro_batches)) if rank == 0 else []
    sections: dict[str, dict[str, Any]] = {FLAT: {}, INSIDE: {"zero_within": NODES}}
    steps = {name: _step(section, ids[rank::3], micro_batches) for name, section in sections.items()}
    errors, traffic = {}, {}
    for name, step in steps.items():
        losses = torch.tensor([step() for _ in range(_STEPS)], dtype=torch.float64)
        dist.all_reduce(losses)
        errors[name] = max((abs(a / 3 - b) / b for a, b in zip(losses.tolist(), expected, strict=False)), default=0.0)
        dist.barrier()
        before = _bytes()
        for _ in range(_STEPS):
            step()
        dist.barrier()
        traffic[name] = [(after - start) / _STEPS for after, start in zip(_bytes(), before, strict=True)]
    turns = asdict(alternate(steps, budget_s, _MIN_PAIRS, report, []))
    numel = sum(param.numel() for param in _model().parameters())
    return {**turns, "loss_error": errors, "bytes_per_step": traffic, "gradient_bytes": 4 * numel}


def _bytes() -> tuple[int, int]:
    """Return the bytes that this node has sent and received so far."""
    line = next(line for line in Path("/proc/thread-self/net/dev").read_text().splitlines() if DEVICE in line)
    fields = line.split(":")[1].split()
    return int(fields[8]), int(fields[0])


def _model() -> Any:
    """Return a small Llama with the same weights on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=512, max_position_embeddings=_TOKENS, use_cache=False))


def _one_process(steps: tuple[torch.Tensor, ...]) -> list[float]:
    """Return the losses of one process whose steps take the batches of all ranks."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
    losses = []
    for ids in steps:
        loss = model(input_ids=ids[:, 0], labels=ids[:, 0]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _step(section: dict[str, Any], ids: torch.Tensor, micro_batches: int) -> Callable[[], float]:
    """Return a training step of an engine of its own, which returns this rank's loss; batches repeat."""
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model = _model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": _BUCKET},
        "sequence_parallel_size": 1,
        "heterogeneity": {"schedule": "ulysses", "zero_partition": WEIGHTS, **section},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, fused=True)  # as on GPUs
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    handle = handle.for_engine(engine)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    batches: Iterator[Any] = cycle(handle.dataloader(rows, batches="own"))

    def step() -> float:
        losses = []
        for batch in islice(batches, micro_batches):
            loss = handle.loss(engine(**batch), batch)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
        return sum(losses) / micro_batches

    return step


if __name__ == "__main__":
    sys.exit(main())
