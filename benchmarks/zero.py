"""Check that weighted ZeRO costs no time where weights are equal.

    python -m benchmarks.zero [--json] [--ranks 2] [--stages 1 2] [--budget-s 20] [--output FILE]

Whole training steps of a small Llama (forward, backward, optimizer) alternate in the same processes: with DeepSpeed's
own optimizer of stages 1 and 2; with this engine's and equal weights, which must not be slower; and with a rank that
owns three quarters, where updated parameters are gathered by broadcasts. Engine and model are otherwise the same: fp32,
AdamW, one kernel thread per rank, loopback. The exit code is 1 if stock / ours is below 0.98 with equal weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.measure.ranks import LOOPBACK, Report, run
from benchmarks.measure.results import FOLDER, header, write
from benchmarks.measure.statistics import compare
from benchmarks.measure.turns import alternate

RESULT = FOLDER / "zero.json"
TARGET = 0.98
EQUAL, UNEQUAL = "equal weights", "3 : 1"
_TOKENS, _MIN_PAIRS = 256, 11


def main() -> int:
    """Run the command; return 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2], choices=(1, 2))
    parser.add_argument("--budget-s", type=float, default=20.0, help="seconds per stage")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    rows = []
    with Progress(console=Console(stderr=True)) as progress:
        for stage in args.stages:
            task = progress.add_task(f"ZeRO-{stage}", total=1.0)
            outcome = run(
                _measure,
                [LOOPBACK] * args.ranks,
                stage,
                args.budget_s,
                on_report=lambda done, now, task=task: progress.update(task, completed=done, description=now),
            )[0]
            progress.update(task, completed=1.0, description=f"ZeRO-{stage}")
            seconds = outcome["seconds"]
            for name in (EQUAL, UNEQUAL):
                against_stock = asdict(compare(seconds["stock"], seconds[name]))
                rows.append({"stage": stage, "ours": name, "foreign_cores": outcome["foreign_cores"], **against_stock})
    result = {
        **header(" ".join(["python -m benchmarks.zero", *sys.argv[1:]])),
        "ranks": args.ranks,
        "tokens": _TOKENS,
        "rows": rows,
    }
    write(result, args.output)
    if args.json:
        print(json.dumps(result))
    else:
        _show(rows)
    return 0 if all(row["ratio"] >= TARGET for row in rows if row["ours"] == EQUAL) else 1


def _show(rows: list[dict[str, Any]]) -> None:
    """Print the table of stages."""
    headings = ("stage", "ours", "pairs", "stock, ms", "ours, ms", "stock / ours", "95 % interval", "others' cores")
    table = Table(*headings, title="Training steps: medians, and the median of paired ratios")
    for row in rows:
        low, high = row["interval"]
        table.add_row(
            str(row["stage"]),
            row["ours"],
            str(row["pairs"]),
            f"{row['peer_s'] * 1e3:.1f}",
            f"{row['ours_s'] * 1e3:.1f}",
            f"{row['ratio']:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{row['foreign_cores']:.2f}",
        )
    Console(width=None if sys.stdout.isatty() else 110).print(table)


# --- on a rank --------------------------------------------------------------------------------------


def _measure(rank: int, report: Report, stage: int, budget_s: float) -> dict[str, Any]:
    """Time the steps of one stage on this rank."""
    import torch.distributed as dist

    unequal = [3.0] + [1.0] * (dist.get_world_size() - 1)
    kinds: dict[str, Any] = {"stock": None, EQUAL: "uniform", UNEQUAL: unequal}
    steps = {name: _step(stage, partition) for name, partition in kinds.items()}
    return asdict(alternate(steps, budget_s, _MIN_PAIRS, report, []))


def _step(stage: int, partition: Any) -> Callable[[], object]:
    """Return a training step of an engine of its own; without ``partition`` it has DeepSpeed's optimizer."""
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    import ds_hetero
    from ds_hetero.frameworks.deepspeed.zero.optimizers import OPTIMIZERS

    handle = ds_hetero.register()
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=512, max_position_embeddings=_TOKENS, use_cache=False))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "sequence_parallel_size": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1_000_000},
        "heterogeneity": {"schedule": "ulysses", "zero_partition": partition or "uniform"},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with patch.dict(OPTIMIZERS, clear=partition is None):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    ids = torch.randint(0, 512, (1, _TOKENS))
    (batch,) = handle.dataloader([{"input_ids": ids, "labels": ids}], batches="own")

    def step() -> None:
        loss = handle.loss(engine(**batch), batch)
        engine.backward(loss)
        engine.step()

    return step


if __name__ == "__main__":
    sys.exit(main())
