"""Measure pipelines with unequal stages on an emulated cluster of two nodes over 1 Gbit/s.

    python -m benchmarks.pipelines                       # all cases
    python -m benchmarks.pipelines --cases 4:3:2:1       # one of them

These train alternately in the same processes: our plan, HexiScale's as described, pure sequence parallelism, the best
uniform grids, DeepSpeed's own PipelineEngine with equal stages, and deliberately worse plans. Predictions are printed,
too. On equal ranks, equal stages run under both engines. On pairs of equal ranks six plans with tensor stages run, and
tensor groups with tokens by speed beside uniform grids of tensor and sequence parallelism ("tensor-groups"). Then
the peak memory of every rank is compared with the plan's, and a rank is slowed down to 40 % during a job.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.emulation.cluster import EmulatedCluster, EmulatedNode
from benchmarks.emulation.emulator import RankLab, emulate
from benchmarks.measure.contenders import Shape
from benchmarks.measure.results import FOLDER, header, progress, write
from benchmarks.pipelines.memory import measure_memory
from benchmarks.pipelines.plans import Candidate, Task, candidates, grouped_candidates, tensor_candidates
from benchmarks.pipelines.replan import measure_replan
from benchmarks.pipelines.run import Contest, measure_equal, measure_plans
from benchmarks.pipelines.tables import show, summarize, summarize_memory, summarize_replan
from ds_hetero.cluster import Cluster

LINK_BIT_PER_S, LINK_DELAY_S = 1e9, 100e-6


@dataclass(frozen=True)
class Case:
    """The measurement on one cluster.

    Args:
        speeds: of the ranks, by node. measure: called on every rank. summarize: makes the result. choose: returns the
        plans. cores: of all ranks together. Their communication threads need the rest: with 1.4 of two cores a message
        takes up
            to 4 ms longer than with 1.
    """

    speeds: tuple[tuple[float, ...], ...]
    measure: Callable[[RankLab, Contest], dict[str, Any]]
    summarize: Callable[[Mapping[str, Any]], dict[str, Any]]
    choose: Callable[[Cluster, Task, int], list[Candidate]] = candidates
    cores: float = 1.4


CASES = {
    "4:3:2:1": Case(((4.0, 3.0), (2.0, 1.0)), measure_plans, summarize, cores=1.0),
    "4:4:3:2:2:1": Case(((4.0, 4.0, 3.0), (2.0, 2.0, 1.0)), measure_plans, summarize),
    "equal": Case(((1.0, 1.0), (1.0, 1.0)), measure_equal, summarize),
    "memory": Case(((4.0, 3.0), (2.0, 1.0)), measure_memory, summarize_memory),
    "tensor": Case(((2.0, 2.0), (1.0, 1.0)), measure_plans, summarize, tensor_candidates, 1.0),
    "tensor-memory": Case(((2.0, 2.0), (1.0, 1.0)), measure_memory, summarize_memory, tensor_candidates),
    "tensor-groups": Case(((2.0, 2.0), (1.0, 1.0)), measure_plans, summarize, grouped_candidates, 1.0),
    "replan": Case(((1.0,), (1.0,)), measure_replan, summarize_replan),
}

_HEADS = 12  # which 4 and 6 ranks share evenly


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(words)
    console = Console(stderr=True)
    begin = time.perf_counter()
    result: dict[str, Any] = {
        **header(" ".join(["python -m benchmarks.pipelines", *words])),
        "emulated": True,
        "cases": [],
    }
    for name in options.cases:
        with progress(console) as report, emulate(_cluster(name)) as emulated:
            contest = Contest(_task(options), CASES[name].choose, options.plans, options.rounds, options.budget)
            measured = emulated.run(CASES[name].measure, contest, on_report=report)[0]
        result["cases"].append({"name": name, **measured, "summary": CASES[name].summarize(measured)})
    result["seconds"] = round(time.perf_counter() - begin, 1)
    output = options.output or FOLDER / "pipelines.json"
    write(result, output)
    if options.json:
        print(json.dumps(result))
    else:
        show(result, Console(width=None if sys.stdout.isatty() else 130))
    console.print(f"written to {output}")


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipelines", description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--plans", type=int, default=10, help="that are measured beside DeepSpeed's own engine")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every contender at most")
    parser.add_argument("--budget", type=float, default=120, help="seconds of a case, after which no round begins")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=288, help="a multiple of 12, the heads")
    parser.add_argument("--tokens", type=int, default=128, help="of a sequence")
    parser.add_argument("--samples", type=int, default=8, help="of an optimizer step")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    parser.add_argument("--output", type=Path, help="the result file; default: in benchmarks/results")
    return parser


def _task(options: argparse.Namespace) -> Task:
    shape = Shape(
        num_heads=_HEADS,
        num_kv_heads=_HEADS,
        head_dim=options.hidden // _HEADS,
        hidden_size=options.hidden,
        num_layers=options.layers,
    )
    return Task(shape, options.tokens, options.samples)


def _cluster(name: str) -> EmulatedCluster:
    speeds = CASES[name].speeds
    total = sum(map(sum, speeds))
    nodes = tuple(
        EmulatedNode(speeds=node_speeds, link_bit_per_s=LINK_BIT_PER_S, link_delay_s=LINK_DELAY_S)
        for node_speeds in speeds
    )
    return EmulatedCluster(nodes=nodes, fastest_cores=min(0.6, CASES[name].cores * max(map(max, speeds)) / total))


if __name__ == "__main__":
    main()
