"""The command ``python -m benchmarks.lab qlora``: its options, its measurement, and its table."""

from __future__ import annotations

import tempfile
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.emulation.emulator import emulate
from benchmarks.lab.qlora import ADAPTER_RANK, CLUSTER, PLANNED, QloraPlan, measure, save_model, summarize
from benchmarks.measure.contenders import Shape
from benchmarks.measure.ranks import Report


class QloraTable:
    """Three ranks of speeds and memories 2:1:1."""

    help = 'three ranks 2:1:1 in speed and memory: QLoRA in the planned pipeline, against device_map="balanced"'

    def add_options(self, parser: ArgumentParser) -> None:
        """Add size of model, batch and memory."""
        parser.add_argument("--layers", type=int, default=8, help="of the model")
        parser.add_argument("--samples", type=int, default=8, help="sequences of an optimizer step")
        parser.add_argument("--memory-mib", type=int, default=48, help="memory of the two slower ranks")

    def run(self, options: Namespace, report: Report) -> dict[str, Any]:
        """See `benchmarks.lab.qlora`."""
        heads = options.heads or 4
        tokens = (options.tokens or [256])[0]
        shape = Shape(num_heads=heads, num_kv_heads=heads // 2, hidden_size=64 * heads, num_layers=options.layers)
        with tempfile.TemporaryDirectory(prefix="ds_hetero_qlora_") as folder, emulate(CLUSTER) as emulated:
            save_model(shape, tokens, folder)
            plan = QloraPlan(
                folder=folder,
                shape=shape,
                tokens=tokens,
                samples=options.samples,
                unit_bytes=options.memory_mib * 2**20,
                rounds=options.rounds or (3 if options.quick else 9),
                budget_s=120 if options.quick else 900,
            )
            measured = emulated.run(measure, plan, on_report=report)[0]
        settings = {key: value for key, value in asdict(plan).items() if key != "folder"}
        return {"task": settings, "adapter_rank": ADAPTER_RANK, "summary": summarize(measured), "found": measured}

    def show(self, result: dict[str, Any], console: Console) -> None:
        """Print the steps of all contenders, and what was predicted."""
        summary, task = result["summary"], result["task"]
        console.print(
            f"EMULATED: {result['found']['text']}\n"
            f"Llama of {task['shape']['num_layers']} layers, hidden size {task['shape']['hidden_size']}; QLoRA (NF4) "
            f"of rank {result['adapter_rank']}, {task['samples']} sequences of {task['tokens']} tokens a step"
        )
        table = Table("job", "step", "tokens/s", "times as fast")
        tokens = task["samples"] * task["tokens"]
        steps = {PLANNED: summary["planned_s"], summary["fastest_balanced"]: summary["balanced_s"]}
        warm_ups = {f"{name}, warm-up": step_s for name, step_s in summary["slower_s"].items()}
        for name, step_s in {**steps, **warm_ups}.items():
            gain = summary["balanced_s"] / step_s
            table.add_row(name, f"{step_s:.2f} s", f"{tokens / step_s:,.0f}", f"{gain:.2f} x")
        console.print(table)
        console.print(
            f"{summary['gain']:.2f} times as fast as {summary['fastest_balanced']}, median of {summary['rounds']} "
            f"pairs; predicted {summary['predicted_s']:.2f} s, {summary['prediction_error']:+.1%}; cores of others "
            f"{summary['foreign_cores']:.1f}"
        )
