"""Measure the cost of the checks of a step: pairs of steps with checks and with ``"checks": "off"``.

    python -m benchmarks.step_checks [--quick] [--json] [--seconds 100] [--output FILE]

A Llama of a few layers trains on 2 and 4 ranks, on batches of 1,024 and 8,192 tokens. A pair is an optimizer step of
two engines in the same process, one of them with checks. Comparisons of a piece of a batch are off in both, because
they do not belong to every step. The result is the median ratio of times over pairs, with its quartiles and its 95 %
interval, and the cores that other processes used meanwhile: on a busy machine it means little. All cases take about
seven minutes. --quick: 2 ranks, 1,024 tokens, 15 seconds, and no file.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import ranks, results
from benchmarks.measure.statistics import compare

RESULT = results.FOLDER / "step_checks.json"
RANKS, TOKENS, GOAL = (2, 4), (1024, 8192), 1.01
_MIN_PAIRS = 9
_KINDS: dict[str, Any] = {"off": "off", "on": {"compare_every": "off"}}


def measure_steps(rank: int, report: ranks.Report, tokens: int, budget_s: float) -> dict[str, Any]:
    """Return the seconds of steps with and without checks on the slowest rank, and the cores that others used."""
    import torch.distributed as dist

    import ds_hetero
    from benchmarks.measure.turns import alternate

    size, handle = dist.get_world_size(), ds_hetero.register()
    actions = {kind: _steps_of(handle, _KINDS[kind], size, tokens) for kind in _KINDS}
    turns = alternate(actions, budget_s, _MIN_PAIRS, report, [])
    return {"seconds": turns.seconds, "foreign_cores": turns.foreign_cores}


def _steps_of(handle: Any, checks: Any, size: int, tokens: int) -> Any:
    """Return a function that runs one optimizer step of an engine with or without checks."""
    import deepspeed
    import torch

    from benchmarks.measure.contenders import Shape
    from benchmarks.measure.models import VOCABULARY, trained_model

    model = trained_model(Shape(num_heads=4, num_kv_heads=4, head_dim=32, num_layers=3), tokens, "sdpa")
    group = {"ranks": list(range(size)), "tokens": [1] * size, "heads": [4 // size] * size}
    section = {"schedule": {"version": 1, "num_heads": 4, "num_kv_heads": 4, "groups": [group]}, "checks": checks}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # where DeepSpeed has 1.0
        "heterogeneity": section,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), config=config
    )
    ids = torch.randint(0, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0))
    (batch,) = handle.for_engine(engine).dataloader([{"input_ids": ids, "labels": ids.clone()}], batches="same")

    def step() -> None:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()

    return step


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 ranks, 1,024 tokens, 15 seconds")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--seconds", type=float, default=100.0, help="of each case; at least nine pairs")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    cases = [(2, 1024)] if args.quick else list(product(RANKS, TOKENS))
    budget_s = 15.0 if args.quick else args.seconds
    result = results.header(" ".join(["python -m benchmarks.step_checks", *sys.argv[1:]]))
    result["cases"] = []
    with results.progress(Console(stderr=True)) as report:
        for number, (size, tokens) in enumerate(cases):

            def tell(done: float, now: str, number: int = number, name: str = f"{size} ranks, {tokens:,}") -> None:
                report((number + done) / len(cases), f"{name}: {now}")

            measured = ranks.run(measure_steps, [ranks.LOOPBACK] * size, tokens, budget_s, on_report=tell)[0]
            seconds = measured["seconds"]
            ratio = compare(seconds["on"], seconds["off"])  # above 1: checks cost time
            result["cases"].append({"ranks": size, "tokens": tokens, **asdict(ratio), **measured})
    if not args.quick:
        results.write(result, args.output)
    if args.json:
        print(json.dumps(result))
    else:
        _show(result["cases"])
    return 0


def _show(cases: list[dict[str, Any]]) -> None:
    """Print the table of cases, and the goal."""
    table = Table("ranks", "tokens", "without, ms", "with, ms", "ratio", "quartiles", "95 %", "others' cores")
    for case in cases:
        spread = [" to ".join(f"{value:.3f}" for value in case[name]) for name in ("quartiles", "interval")]
        times = [f"{1e3 * case[name]:.0f}" for name in ("ours_s", "peer_s")]
        size = str(case["ranks"]), f"{case['tokens']:,}"
        table.add_row(*size, *times, f"{case['ratio']:.3f}", *spread, f"{case['foreign_cores']:.1f}")
    Console().print(table)
    print(f"goal: a ratio of {GOAL} at most, on a machine with no other work")


if __name__ == "__main__":
    sys.exit(main())
