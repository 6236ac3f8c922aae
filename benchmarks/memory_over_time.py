"""Check that engines, and thousands of steps of varying lengths, leave no memory behind.

    python -m benchmarks.memory_over_time [--json] [--engines 6] [--steps 3000] [--output FILE]

Both checks run on two gloo ranks with a small Llama on ZeRO-1, in processes of their own:

    engines   are built, trained for three steps, destroyed and deleted, one after another. Resident memory after the
              last one must be within 5 % of that of stock Ulysses in the same procedure
    steps     of random lengths from 60 to 500 tokens, every second batch of packed documents, on an uneven schedule.
              Resident memory must grow by less than 1 KiB a step from step 500 on; threads and open files must not
              grow. For comparison, stock Ulysses takes steps of the same lengths, unpacked, in equal shards

Before each reading, every 50 steps, Python collects garbage and glibc returns its free pages: memory that only waits
for either is not counted. Besides resident memory, the bytes that glibc has given out and the blocks that Python uses
are read: if these do not grow, resident memory grows because free memory is strewn over more pages.

The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.long_run.readings import read_own_process
from benchmarks.measure.ranks import LOOPBACK, Report, run
from benchmarks.measure.results import FOLDER, header, progress, write

RESULT = FOLDER / "memory_over_time.json"
MAX_RATIO, MAX_BYTES_PER_STEP = 1.05, 1024
_WARM, _PERIOD, _WINDOW = 500, 50, 5  # steps before the growth counts; steps between looks; looks in a median
_GROWTHS = {"bytes": "resident_bytes", "heap_bytes": "heap_bytes", "python_blocks": "python_blocks"}  # in the result
_VOCABULARY, _LENGTHS = 512, (60, 500)
_SCHEDULE = {
    "version": 1,
    "num_heads": 8,
    "num_kv_heads": 8,
    "groups": [{"ranks": [0], "tokens": [3], "heads": [8]}, {"ranks": [1], "tokens": [1], "heads": [8]}],
}


def main() -> int:
    """Run the command; return 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--engines", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    if args.steps < 2 * _WARM:
        parser.error(f"--steps must be at least {2 * _WARM}, got {args.steps}")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)  # in the ranks: what is freed leaves the process at once
    with progress(Console(stderr=True)) as report:
        engines = {
            kind: run(_train_engines, [LOOPBACK] * 2, kind, args.engines, on_report=report)
            for kind in ("stock", "ours")
        }
        steps = {
            kind: run(_train_steps, [LOOPBACK] * 2, kind, args.steps, on_report=report) for kind in ("stock", "ours")
        }
    result = {
        **header(" ".join(["python -m benchmarks.memory_over_time", *sys.argv[1:]])),
        "engines_resident_bytes": engines,
        "steps": steps,
        "ratio": max(ours[-1] / stock[-1] for ours, stock in zip(engines["ours"], engines["stock"], strict=True)),
        **{
            f"{name}_per_step_{kind}": max(_growth(of_rank[reading]) for of_rank in by_rank)
            for kind, by_rank in steps.items()
            for name, reading in _GROWTHS.items()
        },
        "others_constant": all(
            _constant(of_rank[name]) for of_rank in steps["ours"] for name in ("threads", "open_files")
        ),
    }
    write(result, args.output)
    if args.json:
        print(json.dumps(result))
    else:
        _show(result)
    passed = (
        result["ratio"] <= MAX_RATIO
        and result["bytes_per_step_ours"] < MAX_BYTES_PER_STEP
        and result["others_constant"]
    )
    return 0 if passed else 1


def _growth(readings: list[int]) -> float:
    """Return growth per step from `_WARM` on, between medians around either end: single batches do not count."""
    warm = readings[_WARM // _PERIOD - 1 :]
    first, last = median(warm[:_WINDOW]), median(warm[-_WINDOW:])
    return (last - first) / (_PERIOD * (len(warm) - _WINDOW))


def _constant(counts: list[int]) -> bool:
    """Return True if a count did not change after the warm-up."""
    return len(set(counts[_WARM // _PERIOD - 1 :])) == 1


def _show(result: dict[str, Any]) -> None:
    """Print the table."""
    table = Table("", "rank 0", "rank 1", title="Resident memory, MiB")
    for kind, by_rank in result["engines_resident_bytes"].items():
        for number in (0, -1):
            label = f"{kind}, after engine {len(by_rank[0]) if number else 1}"
            table.add_row(label, *(f"{of_rank[number] / 2**20:.0f}" for of_rank in by_rank))
    for kind, by_rank in result["steps"].items():
        for step in range(_WARM, _PERIOD * len(by_rank[0]["resident_bytes"]) + 1, _WARM):
            cells = (f"{of_rank['resident_bytes'][step // _PERIOD - 1] / 2**20:.1f}" for of_rank in by_rank)
            table.add_row(f"{kind}, step {step}", *cells)
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    print(f"ours / stock after the last engine: {result['ratio']:.3f} (at most {MAX_RATIO})")
    growth, of_stock = result["bytes_per_step_ours"], result["bytes_per_step_stock"]
    print(f"growth: {growth:.0f} bytes per step (below {MAX_BYTES_PER_STEP}); stock's {of_stock:.0f}")
    for name, unit in (("heap_bytes", "bytes that glibc has given out"), ("python_blocks", "blocks of Python")):
        ours, stock = (result[f"{name}_per_step_{kind}"] for kind in ("ours", "stock"))
        print(f"of these in use: {ours:.2f} {unit} per step; stock's {stock:.2f}")
    print(f"threads and open files: {'constant' if result['others_constant'] else 'they change'}")


# --- on a rank --------------------------------------------------------------------------------------


def _train_engines(rank: int, report: Report, kind: str, count: int) -> list[int]:
    """Return the resident bytes after each engine was deleted."""
    resident = []
    for number in range(count):
        report(number / count, f"{kind}: engine {number + 1} of {count}")
        _train_one(kind)
        resident.append(read_own_process()["resident_bytes"])
    return resident


def _train_one(kind: str) -> None:
    """Build an engine, train it for three steps, and destroy it.

    Args:
        kind: ``"stock"`` for DeepSpeed Ulysses, ``"ours"`` for this engine.
    """
    model = _model(512)
    if kind == "stock":
        engine, shards = _stock_engine(model, [_batch(256, number) for number in range(3)])
    else:
        engine, shards = _our_engine(model, [_batch(256, number) for number in range(3)], "ulysses")
    for shard in shards:
        _step(engine, shard)
    engine.destroy()


def _model(hidden_size: int) -> Any:
    """Return a Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"intermediate_size": 2 * hidden_size, "num_hidden_layers": 2, "num_attention_heads": 8}
    return LlamaForCausalLM(LlamaConfig(hidden_size=hidden_size, **sizes, vocab_size=_VOCABULARY, use_cache=False))


def _initialize(model: Any, mpu: Any = None, **config: Any) -> Any:
    """Return a DeepSpeed engine on ZeRO-1."""
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, **config}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)[0]


def _stock_engine(model: Any, batches: Iterable[dict[str, torch.Tensor]]) -> tuple[Any, Iterator[dict[str, Any]]]:
    """Make an engine as DeepSpeed's tutorial on Ulysses does; its shards are of one size."""
    import torch.distributed as dist

    def shard(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        length = batch["input_ids"].shape[1] // 2
        local_tokens = slice(dist.get_rank() * length, (dist.get_rank() + 1) * length)
        positions = torch.arange(2 * length)[None, local_tokens]
        return {
            "input_ids": batch["input_ids"][:, local_tokens],
            "labels": batch["labels"][:, local_tokens],
            "position_ids": positions,
        }

    mpu = _stock_mpu(model.config.hidden_size)
    return _initialize(model, mpu, sequence_parallel_size=2), map(shard, batches)


@cache
def _stock_mpu(hidden_size: int) -> Any:
    """Register stock Ulysses, once per process; return its groups."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.init_distributed("gloo", verbose=False)
    return UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=_model(hidden_size),
        core_attn_implementation="sdpa",
        sequence_parallel_size=2,
        micro_batch_size=1,
    )


def _our_engine(model: Any, batches: Any, schedule: Any) -> tuple[Any, Iterator[dict[str, Any]]]:
    """Return an engine of ds_hetero, and an iterator over this rank's shards of the batches."""
    import ds_hetero

    handle = ds_hetero.register()
    engine = _initialize(model, heterogeneity={"schedule": schedule}, sequence_parallel_size=2)
    return engine, iter(handle.for_engine(engine).dataloader(batches, batches="same"))


def _step(engine: Any, shard: dict[str, Any]) -> None:
    """Train one step."""
    import ds_hetero

    outputs = engine(**shard)
    loss = outputs.loss if "labels" in shard else ds_hetero.register().for_engine(engine).loss(outputs, shard)
    engine.backward(loss)
    engine.step()


def _batch(length: int, seed: int, documents: bool = False) -> dict[str, torch.Tensor]:
    """Return a random batch of one sequence, of several documents if ``documents`` is set."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(_VOCABULARY, (1, length), generator=generator)
    batch = {"input_ids": ids, "labels": ids}
    if documents:
        starts = torch.rand(length, generator=generator) < 0.03
        starts[0] = True
        index = torch.arange(length)
        batch["position_ids"] = (index - torch.where(starts, index, 0).cummax(0).values)[None]
    return batch


def _train_steps(rank: int, report: Report, kind: str, count: int) -> dict[str, list[int]]:
    """Return resident bytes, threads and open files every `_PERIOD` steps."""
    lengths = random.Random(0)

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        for number in range(count):
            yield _batch(lengths.randint(*_LENGTHS), number, documents=kind == "ours" and number % 2 == 1)

    model = _model(64)
    engine, shards = _stock_engine(model, batches()) if kind == "stock" else _our_engine(model, batches(), _SCHEDULE)
    names = ("resident_bytes", "heap_bytes", "python_blocks", "threads", "open_files")
    readings: dict[str, list[int]] = {name: [] for name in names}
    for number, shard in enumerate(shards):
        _step(engine, shard)
        if (number + 1) % _PERIOD == 0:
            reading = read_own_process()
            for name in names:
                readings[name].append(reading[name])
        report((number + 1) / count, f"{kind}: step {number + 1} of {count}")
    return readings


if __name__ == "__main__":
    sys.exit(main())
