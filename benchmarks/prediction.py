"""Compare the calibrated cost model's predictions with training steps on ranks that it has profiled.

    python -m benchmarks.prediction [--cores 0.6 0.45 0.3 0.15] [--tokens 4096] [--rounds 3] [--link 1gbit] [--json]

Gloo ranks on this machine, each limited to a share of a core (`benchmarks.emulation.quota`), are profiled with
`ds_hetero.profiler.measure`. Then a small Llama is trained through DeepSpeed engines with one schedule after the other.
The output is predicted and measured seconds per step, and whether every two schedules whose measured steps differ by
more than a tenth are in the same order in the prediction. Targets: a median error of 10 %, and all pairs in order.

The schedules are uniform, proportional and bad ones, and the planner's for the measured cluster. Each has several
turns, in an order that is reversed every time. The column "machine" says how fast the ranks computed matmuls around
their turns, relative to the time after the profile: other work on a shared machine changes caches and memory rates,
which no profile can contain. Turns in which it differs by more than 5 % do not count, unless a schedule has no others.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.emulation.awake import awake_cores
from benchmarks.emulation.network import emulate
from benchmarks.emulation.quota import SpeedLimits, speed_limits
from benchmarks.measure import ranks
from benchmarks.measure.machine import cpu_s_of, describe_machine, machine_busy_s
from benchmarks.measure.results import FOLDER, write
from benchmarks.measure.workloads import workload
from ds_hetero.cluster import cluster_from_dict
from ds_hetero.cost import make_cost_model
from ds_hetero.models import load_model
from ds_hetero.planner.planning import plan
from ds_hetero.values.baselines import proportional, ring, ulysses, usp
from ds_hetero.values.placement import stream_placement
from ds_hetero.values.schedule import Group, Schedule

_HEADS, _KV_HEADS, _HEAD_DIM, _LAYERS, _VOCABULARY = 8, 4, 64, 2, 512
MODEL = {
    "model_type": "llama",
    "hidden_size": _HEADS * _HEAD_DIM,
    "intermediate_size": 1408,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "vocab_size": _VOCABULARY,
    "hidden_act": "silu",
}
_LINKS = {"loopback": None, "1gbit": (1e9, 100e-6), "200mbit": (2e8, 500e-6)}
_PLAN = "plan"
MEDIAN_ERROR, CLEAR = 0.10, 0.10
DISTURBED = 0.05  # a turn counts if the machine computes as fast as when it was profiled, to within this


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if the targets are met."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=True)
    options.output = options.output or FOLDER / f"prediction_{options.link}.json"
    outcome = run(options, console)
    write(outcome, options.output)
    if options.json:
        print(json.dumps(outcome))
    else:
        show(outcome, Console(width=None if sys.stdout.isatty() else 120))
    console.print(f"written to {options.output}")
    return 0 if outcome["met"] else 1


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prediction", description=__doc__.partition("\n")[0])
    parser.add_argument("--cores", type=float, nargs="+", default=[0.6, 0.45, 0.3, 0.15], help="of each rank")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3, help="times that every schedule has its turn")
    parser.add_argument("--steps", type=int, default=2, help="timed steps per turn, after one to warm up")
    parser.add_argument("--link", choices=_LINKS, default="loopback")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--output", type=Path, help="left out, prediction_LINK.json among the results")
    return parser


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Profile, train and predict; return plain data."""
    num_ranks = len(options.cores)
    schedules = candidates(options.cores)
    link = _LINKS[options.link]
    shaped = {"rate_bit_per_s": link[0], "delay_s": link[1]} if link else {"rate_bit_per_s": 1.0, "methods": ["none"]}
    columns = (TextColumn("{task.description:40}"), BarColumn(), TimeElapsedColumn())
    with (
        speed_limits(num_ranks) as limits,
        emulate(nodes=num_ranks, **shaped) as network,
        awake_cores(),
        Progress(*columns, console=console) as progress,
    ):
        task = progress.add_task("starting ranks", total=1 + options.rounds * (len(schedules) + 1))
        results = ranks.run(
            measure,
            network.nodes,
            limits,
            options.cores,
            [(name, schedule.to_dict()) for name, schedule in schedules.items()],
            options.tokens,
            options.rounds,
            options.steps,
            on_report=lambda done, now: progress.update(task, completed=done, description=now),
        )
        described = network.describe()
    cluster = results[0][0]
    cost = make_cost_model("calibrated", cluster_from_dict(cluster), load_model(MODEL), workload(options.tokens))
    rows = []
    for name, schedule in (schedules | {_PLAN: planned(cluster, options.tokens)}).items():
        turns = [_turn(of_ranks) for of_ranks in zip(*(result[1][name] for result in results), strict=True)]
        clean = [turn for turn in turns if abs(turn["machine"] - 1) <= DISTURBED]
        prediction = cost.predict(schedule)
        rows.append(
            {
                "name": name,
                "schedule": schedule.to_dict(),
                "predicted_s": prediction.iteration_s,
                "measured_s": median(second for turn in clean or turns for second in turn["seconds"]),
                "clean_turns": len(clean),
                "turns": turns,
                "prediction": prediction.to_dict(),
            }
        )
    return judge(rows) | {
        "rows": rows,
        "cores": options.cores,
        "tokens": options.tokens,
        "link": described,
        "limited": cluster["profile"]["limited"],
        "machine": describe_machine(),
        "profile_s": cluster["profile"].get("seconds"),
        "fit_errors": cluster["profile"]["fit_errors"],
        "cluster": {key: value for key, value in cluster.items() if key != "profile"},
    }


def _turn(of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one turn of a schedule: a step takes as long as on its slowest rank."""
    return {
        "seconds": [max(times) for times in zip(*(turn["seconds"] for turn in of_ranks), strict=True)],
        "machine": mean(turn["machine"] for turn in of_ranks),
        "others_cores": of_ranks[0]["others_cores"],
    }


def judge(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors, and pairs of schedules in the wrong order whose measured times differ by more than a tenth.

    Schedules without an undisturbed turn are left out. If they are more than a third of all, the targets are missed.
    """
    clean = [row for row in rows if row["clean_turns"]]
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in clean or rows]
    clear, swapped = 0, []
    for a, b in combinations(clean, 2):
        fast, slow = sorted((a, b), key=lambda row: float(row["measured_s"]))
        if slow["measured_s"] > (1 + CLEAR) * fast["measured_s"]:
            clear += 1
            if fast["predicted_s"] >= slow["predicted_s"]:
                swapped.append([fast["name"], slow["name"]])
    met = median(errors) <= MEDIAN_ERROR and not swapped and 3 * len(clean) >= 2 * len(rows)
    return {
        "median_error": median(errors),
        "largest_error": max(errors),
        "pairs": clear,
        "swapped": swapped,
        "met": met,
    }


def planned(cluster: dict[str, Any], tokens: int) -> Schedule:
    """Return the planner's schedule for a measured cluster; the same on every rank and in this process."""
    return plan(cluster_from_dict(cluster), load_model(MODEL), workload(tokens)).schedule


def candidates(cores: Sequence[float]) -> dict[str, Schedule]:
    """Return uniform schedules, proportional ones, and mixtures of ranks; few of them are good."""
    num_ranks = len(cores)
    shape = (_HEADS, _KV_HEADS)
    schedules = {
        "ulysses": ulysses(num_ranks, *shape),
        "ring": ring(num_ranks, *shape),
        "ring, proportional": proportional(cores, *shape),
    }
    if num_ranks % 2 == 0 and num_ranks > 2:
        schedules["usp 2 x 2"] = usp(num_ranks, *shape, num_ranks // 2)
        half = num_ranks // 2
        fast, slow = tuple(range(half)), tuple(range(half, num_ranks))
        mixed = tuple(range(0, num_ranks, 2)), tuple(range(1, num_ranks, 2))
        for name, groups in (("fast and slow apart", (fast, slow)), ("fast and slow mixed", mixed)):
            schedules[f"{name}, proportional"] = _weighted(groups, cores)
        schedules["fast and slow apart, even tokens"] = _weighted((fast, slow), cores, tokens=[1.0] * num_ranks)
    schedules["ulysses, proportional"] = _weighted((tuple(range(num_ranks)),), cores)
    schedules["ring, too much to the slowest"] = proportional(list(reversed(cores)), *shape)
    return schedules


def _weighted(
    groups: Sequence[tuple[int, ...]], cores: Sequence[float], tokens: Sequence[float] | None = None
) -> Schedule:
    """Return a schedule with heads by speed, at least one per rank, and tokens so that groups finish together."""
    parts = []
    for group in groups:
        heads = [1] * len(group)
        for _ in range(_HEADS - len(group)):
            least = min(range(len(group)), key=lambda i: (heads[i] + 1) / cores[group[i]])
            heads[least] += 1
        speed = min(cores[rank] / n for rank, n in zip(group, heads, strict=True))
        group_cores = sum(cores[rank] for rank in group)
        share = (
            [speed * cores[rank] / group_cores for rank in group]
            if tokens is None
            else [tokens[rank] for rank in group]
        )
        parts.append(Group(ranks=tuple(group), tokens=tuple(share), heads=tuple(heads)))
    layout = "zigzag" if len(parts) > 1 else "contiguous"
    return Schedule(num_heads=_HEADS, num_kv_heads=_KV_HEADS, groups=tuple(parts), layout=layout)


# --- on every rank ----------------------------------------------------------------------------------


def measure(
    rank: int,
    report: Callable[[float, str], None],
    limits: SpeedLimits,
    cores: Sequence[float],
    schedules: Sequence[tuple[str, dict[str, Any]]],
    tokens: int,
    num_rounds: int,
    num_steps: int,
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Profile all ranks, then train with all schedules in turn; return the cluster file and the turns by schedule."""
    from ds_hetero.profiler.kernel_probe import profile_ranks

    limited = limits.limit(rank, cores[rank]) or "not limited"
    say = report if rank == 0 else lambda done, now: None
    say(0, "profiling")
    begin = time.perf_counter()
    cluster = profile_ranks(window_s=0.5, show_progress=False)
    cluster["profile"] |= {"seconds": time.perf_counter() - begin, "limited": limited}
    turns = [*schedules, (_PLAN, planned(cluster, tokens).to_dict())]
    turns_by_schedule: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in turns}
    profiled = before = _speed()
    for turn in range(num_rounds):
        for number, (name, schedule) in enumerate(reversed(turns) if turn % 2 else turns):
            say(1 + turn * len(turns) + number, name)
            result = _train(rank, schedule, tokens, num_steps)
            after = _speed()
            turns_by_schedule[name].append(result | {"machine": (before + after) / 2 / profiled})
            before = after
    return cluster, turns_by_schedule


def _speed() -> float:
    """Return the matmul rate of all ranks at once, which says how fast the machine is at the moment."""
    import torch.distributed as dist

    from benchmarks.lab.planning import product_rate

    dist.barrier()
    return product_rate(0.5)


def _train(rank: int, schedule: dict[str, Any], tokens: int, num_steps: int) -> dict[str, Any]:
    """Train some steps under a schedule; return their seconds."""
    import os

    import torch
    import torch.distributed as dist

    run_step, undo = step_of(rank, schedule, tokens)
    seconds = []
    for step in range(num_steps + 1):
        if step == 1:
            busy_s, own_s, start_s = machine_busy_s(), cpu_s_of([os.getpid()]), time.perf_counter()
        dist.barrier()
        begin = time.perf_counter()
        run_step()
        seconds.append(time.perf_counter() - begin)
    ours = torch.tensor([cpu_s_of([os.getpid()]) - own_s])
    dist.all_reduce(ours)
    others = (machine_busy_s() - busy_s - ours.item()) / (time.perf_counter() - start_s)
    undo()
    return {"seconds": seconds[1:], "others_cores": others}


def step_of(rank: int, schedule: dict[str, Any], tokens: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a training step under a schedule, and a function that undoes the engine's patches. Caller: every rank."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    import ds_hetero

    deepspeed.init_distributed("gloo", verbose=False)
    handle = ds_hetero.register()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL, max_position_embeddings=tokens, use_cache=False))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "sequence_parallel_size": dist.get_world_size(),
        "heterogeneity": {"schedule": schedule},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    positions = stream_placement(handle.schedule, tokens).positions(rank)
    ids = torch.randint(_VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(1))
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    shard = {
        "input_ids": ids[:, positions],
        "position_ids": torch.tensor([positions]),
        "shift_labels": labels[:, positions],
    }

    def step() -> None:
        outputs = engine(input_ids=shard["input_ids"], position_ids=shard["position_ids"])
        engine.backward(handle.loss(outputs, shard))
        engine.step()

    return step, handle.undo


# --- for people -------------------------------------------------------------------------------------


def show(outcome: dict[str, Any], console: Console) -> None:
    """Print a table and the verdict."""
    speeds = ", ".join(f"{cores:g}" for cores in outcome["cores"])
    limited = f"ranks of {speeds} cores ({outcome['limited']})"
    table = Table(title=f"Seconds per step of {outcome['tokens']:,} tokens on {limited}; {outcome['link']}")
    for heading in ("schedule", "measured", "predicted", "error", "clean turns", "machine", "others' cores"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    for row in sorted(outcome["rows"], key=lambda row: float(row["measured_s"])):
        error = row["predicted_s"] / row["measured_s"] - 1
        cells = f"{row['measured_s']:.3f}", f"{row['predicted_s']:.3f}", f"{error:+.1%}"
        turns = row["turns"]
        machine = " ".join(f"{turn['machine']:.0%}" for turn in turns)
        others = f"{mean(turn['others_cores'] for turn in turns):.2f}"
        table.add_row(row["name"], *cells, f"{row['clean_turns']} of {len(turns)}", machine, others)
    console.print(table)
    console.print(
        f"Median error {outcome['median_error']:.1%} (target {MEDIAN_ERROR:.0%}), "
        f"largest {outcome['largest_error']:.1%}; "
        f"{outcome['pairs'] - len(outcome['swapped'])} of {outcome['pairs']} clear pairs ranked alike."
    )
    fits = Table(title="Fit of the profile, by term")
    for heading in ("term", "median error", "largest"):
        fits.add_column(heading, justify="left" if heading == "term" else "right")
    for term, error in outcome["fit_errors"].items():
        fits.add_row(term, f"{error['median']:.1%}", f"{error['largest']:.1%}")
    console.print(fits)
    console.print("[green]MET[/]" if outcome["met"] else "[red]NOT MET[/]")


if __name__ == "__main__":
    sys.exit(main())
