"""Replay recorded steps: compare with steps measured in the CPU lab, and with the cost model at real size.

    python -m benchmarks.fake_gpu.played lab [FILE ...]       results of `python -m benchmarks.prediction`
    python -m benchmarks.fake_gpu.played size                 jobs of real size
    python -m benchmarks.fake_gpu.played record FILE --model llama-3.1-8b --cluster cloud-l40s-a10g --length 65536

`lab` runs a step of every schedule of a result on gloo ranks, records what they compute, post and wait for, and replays
it at the rates that were profiled for that result. `size` records all ranks of a job on GPUs that do not exist, and
replays them on its cluster. It prints the prediction of the calibrated cost model, too, and the last rank's seconds of
matmuls, attention and memory-bound kernels, and of waits for messages and for its host. One and two layers are
recorded; a step of all layers is extrapolated linearly. `record` writes the step of one job for ``ds-hetero trace
--from-code FILE``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.fake_gpu.jobs import Setting
from benchmarks.fake_gpu.recorder import MESSAGE
from benchmarks.measure import ranks
from benchmarks.measure.results import FOLDER, header, progress, write
from benchmarks.measure.workers import in_order
from benchmarks.proof import events as posted
from ds_hetero.cluster import cluster_from_dict
from ds_hetero.cost.replay import Event, Operation, PostedCall, PostedMessage, Sync, Wait, replay
from ds_hetero.cost.terms.host import launch_time_factor
from ds_hetero.reporting.recorded_step import RecordedStep

LAB = tuple(FOLDER / f"prediction_{link}.json" for link in ("loopback", "1gbit", "200mbit"))
_UNEVEN = ("all_to_all_single", "alltoall_base")  # whose elements for every rank are recorded


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    lab = commands.add_parser("lab")
    lab.add_argument("files", nargs="*", type=Path, default=[file for file in LAB if file.exists()])
    size = commands.add_parser("size")
    size.add_argument("--only", default="", help="jobs whose name has this in it")
    record = commands.add_parser("record")
    record.add_argument("file", type=Path)
    record.add_argument("--model", required=True, help="preset")
    record.add_argument("--cluster", required=True, help="preset or file")
    record.add_argument("--length", type=int, required=True, help="tokens of a sequence")
    record.add_argument("--zero-stage", type=int, default=3)
    record.add_argument("--layers", type=int, help="of the model; left out, all")
    for each in (size, record):
        each.add_argument("--processes", type=int, default=2, help="ranks that are recorded at a time")
    for each in (lab, size):
        each.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
        each.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    if options.command == "record":
        setting = Setting(
            model=options.model, cluster=options.cluster, length=options.length, zero_stage=options.zero_stage
        )
        options.file.write_text(json.dumps(record_step(setting, options.layers, options.processes).to_dict()))
        return
    rows = lab_rows(options.files) if options.command == "lab" else size_rows(options)
    errors = [abs(row["error"]) for row in rows]
    result = {
        **header(" ".join(["python -m benchmarks.fake_gpu.played", *sys.argv[1:]])),
        "pairs": len(rows),
        "median_error": median(errors),
        "largest_error": max(errors),
        "rows": rows,
    }
    write(result, options.output or FOLDER / f"played_{options.command}.json")
    if options.json:
        print(json.dumps(result))
    else:
        _show(result)


# --- records


def played_events(events: Iterable[Any]) -> tuple[Event, ...]:
    """Return recorded events in the form of `ds_hetero.cost.replay`, without waits for calls of an earlier step."""
    replayed: list[Event] = []
    known_works = set()
    for event in events:
        if isinstance(event, posted.Call):
            known_works.add(event.work)
            replayed.append(_call(event))
        elif isinstance(event, posted.Wait):
            if event.work in known_works:
                replayed.append(Wait(event.work))
        elif isinstance(event, Sync) or event.kind != MESSAGE:
            replayed.append(event)
    return tuple(replayed)


def _call(call: posted.Call) -> PostedCall:
    """Return a recorded call in the form of `ds_hetero.cost.replay`."""
    messages = tuple(
        PostedMessage(message.sends, call.ranks[message.peer], message.num_bytes) for message in call.messages
    )
    posted_call = PostedCall(call.work, call.name, call.communicator, call.ranks, messages=messages)
    if call.splits is not None and call.name in _UNEVEN:
        itemsize = _itemsize(str(call.shape[0]))
        return posted_call._replace(sent_bytes=tuple(itemsize * elements for elements in call.splits[0]))
    tensors = [tensor for tensor in call.shape if isinstance(tensor, tuple)]
    sizes = [sum(_itemsize(dtype) * elements for dtype, elements in tensor) for tensor in tensors]
    return posted_call._replace(num_bytes=max(sizes, default=0))


def _itemsize(dtype: str) -> int:
    itemsize: int = getattr(torch, dtype).itemsize
    return itemsize


def record_step(setting: Setting, layers: int | None, processes: int) -> RecordedStep:
    """Record all ranks of a job, each in its own process, forked with everything imported; ``processes`` at a time."""
    from benchmarks.fake_gpu.step import use_device

    use_device()
    tasks = [(setting, rank, layers) for rank in range(setting.job(layers).world_size)]
    events = in_order(_record_rank, tasks, processes, start_method="fork")
    return RecordedStep(
        name=setting.name,
        model=setting.model,
        cluster=setting.cluster,
        host_share=launch_time_factor(setting.workload),
        events=tuple(events),
    )


def _record_rank(task: tuple[Setting, int, int | None]) -> tuple[Event, ...]:
    from benchmarks.fake_gpu.step import run_step

    setting, rank, layers = task
    return played_events(run_step(setting.job(layers), rank, messages=True).events)


# --- against the lab


def lab_rows(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return one row for every schedule of every result."""
    rows, recorded = [], {}
    for file in files:
        result = json.loads(file.read_text())
        cluster = cluster_from_dict(_with_peaks_reached(result["cluster"]))
        for row in result["rows"]:
            key = json.dumps([row["schedule"], result["tokens"]])
            if key not in recorded:
                recorded[key] = ranks.run(
                    _record_live, [ranks.LOOPBACK] * cluster.num_ranks, row["schedule"], result["tokens"]
                )
            step = replay(recorded[key], cluster)
            rows.append(
                {
                    "name": f"{row['name']}, {file.stem.rpartition('_')[2]}",
                    "measured_s": row["measured_s"],
                    "predicted_s": row["predicted_s"],
                    "played_s": step.step_s,
                    "error": step.step_s / row["measured_s"] - 1,
                    "by_kind_s": dict(step.by_kind_s[step.last_rank]),
                }
            )
    return rows


def _with_peaks_reached(cluster: dict[str, Any]) -> dict[str, Any]:
    """Convert a profile of an earlier release, whose fractions of a peak may exceed 1: raise the peak instead."""
    devices = {}
    for name, device in cluster["devices"].items():
        shares = {key: device["efficiency"][key] for key in ("matmul", "attention_forward", "attention_backward")}
        exceeded = max(1.0, *shares.values())
        efficiency = device["efficiency"] | {key: share / exceeded for key, share in shares.items()}
        devices[name] = device | {"peak_tflops": device["peak_tflops"] * exceeded, "efficiency": efficiency}
    return cluster | {"devices": devices}


def _record_live(rank: int, report: Any, schedule: dict[str, Any], tokens: int) -> tuple[Event, ...]:
    """Record the step of one gloo rank."""
    from benchmarks.fake_gpu.live import recording_live
    from benchmarks.prediction import step_of

    step, undo = step_of(rank, schedule, tokens)
    step()
    with recording_live() as events:
        step()
    undo()
    return played_events(events)


# --- at real size

_LAYERS = 1, 2  # that are recorded; a step of all of them is a line through the two
_LENGTHS = (16_384, 3), (32_768, 3), (32_768, 1), (65_536, 3), (65_536, 1), (131_072, 3)  # tokens and ZeRO stage
PAIRS = tuple(
    Setting(model=model, cluster=cluster, length=length, zero_stage=stage)
    for model, cluster in (
        ("llama-3.2-3b", "workstation-4090-3090"),
        ("llama-3.2-1b", "workstation-4090-3090"),
        ("qwen3-4b", "workstation-4090-3090"),
        ("llama-3.1-8b", "a100-v100"),
        ("llama-3.1-8b", "hexiseq-setting-1"),
    )
    for length, stage in _LENGTHS
)


def size_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row for every job."""
    rows = []
    settings = [setting for setting in PAIRS if options.only in setting.name]
    with progress(Console(stderr=True)) as report:
        for done, setting in enumerate(settings):
            report(done / len(settings), setting.name)
            rows.append(_size_row(setting, options.processes))
            write({"rows": rows}, options.output or FOLDER / "played_size.json")  # what is there if it is ended early
    return rows


def _size_row(setting: Setting, processes: int) -> dict[str, Any]:
    """Return a row with a job of all layers: replayed, and predicted by the cost model."""
    cost = setting.cost_model()
    few, more = (record_step(setting, layers, processes) for layers in _LAYERS)
    fewer, most = (replay(record.events, cost.cluster, record.host_share) for record in (few, more))
    ratio = (cost.model.num_layers - _LAYERS[0]) / (_LAYERS[1] - _LAYERS[0])
    rank = most.last_rank
    by_kind_s = {
        kind: (1 - ratio) * fewer.by_kind_s[rank].get(kind, 0.0) + ratio * seconds
        for kind, seconds in most.by_kind_s[rank].items()
    }
    step_s = sum(by_kind_s.values())
    prediction = cost.predict(setting.schedule())
    return {
        "name": setting.name,
        "rank": rank,
        "predicted_s": prediction.iteration_s,
        "terms_s": prediction.to_dict()["terms"],
        "parts_s": dict(prediction.parts_s),
        "played_s": step_s,
        "error": prediction.iteration_s / step_s - 1,
        "by_kind_s": by_kind_s,
        "launches": sum(isinstance(event, Operation) for event in more.events[rank]),
    }


def _show(result: dict[str, Any]) -> None:
    """Print the table."""
    kinds = sorted({kind for row in result["rows"] for kind in row["by_kind_s"]})
    has_measured = "measured_s" in result["rows"][0]
    table = Table("job", *(["measured, s"] if has_measured else []), "played, s", "predicted, s", "error", *kinds)
    for row in result["rows"]:
        seconds = [row[key] for key in ("measured_s", "played_s", "predicted_s") if key in row]
        shares = [f"{row['by_kind_s'].get(kind, 0.0) / row['played_s']:.0%}" for kind in kinds]
        table.add_row(row["name"], *(f"{each:.3f}" for each in seconds), f"{row['error']:+.1%}", *shares)
    Console(width=None if sys.stdout.isatty() else 170).print(table)
    print(f"{result['pairs']} pairs: median error {result['median_error']:.1%}, largest {result['largest_error']:.1%}")


if __name__ == "__main__":
    main()
