"""Compare the first answer of ``ds-hetero plan`` with the plan that was its answer before it searched over jobs.

    python -m benchmarks.best_job [--rigs N] [--json] [--output FILE]

Before: sequence parallelism over all GPUs under ZeRO-3 with recomputation, whole loss. Now: the best job. For every rig
full training of a 1B, LoRA of an 8B and QLoRA of a 32B, at two lengths. At the shorter one every answer's alternatives
are checked by asking for their kind alone. Results are written as they come; jobs that the file has are not searched
again. The command ends with 1 if an answer is slower than before, or if an alternative is not what its kind alone
gives.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure.results import FOLDER, header, write
from ds_hetero.cluster import Cluster, load_cluster
from ds_hetero.cluster.notation import read_notation
from ds_hetero.common.tables import framed_table
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.models import load_model
from ds_hetero.models.trained_weights import read_training
from ds_hetero.planner.jobs.job import FoundJobs, JobTask
from ds_hetero.planner.jobs.kinds import Freedom
from ds_hetero.planner.jobs.search import search_jobs
from ds_hetero.planner.jobs.sequence import MIN_GAIN
from ds_hetero.planner.planning import plan

RIGS = (
    ("3090x2,4070ti | 5090", "10GbE"),
    ("5090,3090x2", None),
    ("4090x2,3090x2", None),
    ("4090,3090", None),
    ("3060x2", None),
    ("3090x4", None),
    ("3090x4 | 3090x4", "10GbE"),
    ("4x4090 | 2x3090", "10GbE"),
    ("5090 | 4090 | 3090", "10GbE"),
    ("5090,4090x2,3090x2 | A6000,4070ti,3060", "10GbE"),
    ("5090,4090,3090,A6000,4070ti,3060,4080,A5000", None),
    ("gb10 | gb10", "25"),
    ("A6000x2,3090x2", None),
    ("4xL40S | 4xA10G", "25Gbit/s"),
    ("4xA100-80GB | 4xL40S", "25"),
    ("2xH100 | A100-80GB", "1Gbit/s"),
    ("8xA100-SXM-40GB", None),
    ("8xH100", None),
    ("8xH100 | 8xA100-80GB", "25"),
    ("8xH100 | 8xH100", "50"),
)
"""Line of GPUs, and the network between nodes."""

TRAININGS = (("full", "llama-3.2-1b"), ("lora", "llama-3.1-8b"), ("qlora", "qwen2.5-32b"))
LENGTHS = (8_192, 32_768)
BATCH = 8  # sequences of a step
RESULT = FOLDER / "best_job.json"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One job: rig, training and length, before and now."""

    gpus: str
    train: str
    model: str
    seq_len: int
    before_s: float | None  # step of the plan before; None if it did not fit
    now_s: float | None  # step of the best job; None if nothing fits
    kind: str
    settings: str
    search_s: float
    unlike_alone: tuple[str, ...]  # kinds that are another job when asked for alone

    @property
    def gain(self) -> float | None:
        """How many times as fast as before."""
        return self.before_s / self.now_s if self.before_s and self.now_s else None

    @property
    def is_slower(self) -> bool:
        """Whether the answer is slower than before, beyond `MIN_GAIN`, or missing."""
        if self.before_s is None:
            return False
        return self.now_s is None or self.now_s > self.before_s * (1 + MIN_GAIN)


def rows(rigs: int, known: Sequence[Row]) -> Iterator[Row]:
    """Yield the rows of the first ``rigs`` rigs, those in ``known`` as they are."""
    row_of = {(row.gpus, row.train, row.seq_len): row for row in known}
    for gpus, network in RIGS[:rigs]:
        cluster = load_cluster(read_notation(gpus, network).content)
        for train, model in TRAININGS:
            for seq_len in LENGTHS:
                yield row_of.get((gpus, train, seq_len)) or _row(gpus, cluster, train, model, seq_len)


def _row(gpus: str, cluster: Cluster, train: str, model_name: str, seq_len: int) -> Row:
    model, training = load_model(model_name), read_training(train)
    work = Workload(
        seq_len=seq_len, micro_batches=BATCH, adapter_rank=training.adapter_rank, quantization=training.quantization
    )
    try:
        before_s = plan(cluster, model, work).step_s
    except PlanError:
        before_s = None
    task = JobTask(cluster=cluster, model=model, workload=work, batch=BATCH, freedom=Freedom())
    started = time.perf_counter()
    try:
        found = search_jobs(task)
    except PlanError:
        found = None
    search_s = time.perf_counter() - started
    return Row(
        gpus=gpus,
        train=train,
        model=model_name,
        seq_len=seq_len,
        before_s=before_s,
        now_s=None if found is None else found.best.step_s,
        kind="nothing fits" if found is None else found.best.kind,
        settings="" if found is None else ", ".join(found.best.settings),
        search_s=search_s,
        unlike_alone=() if found is None or seq_len != LENGTHS[0] else tuple(_unlike_alone(task, found)),
    )


def _unlike_alone(task: JobTask, found: FoundJobs) -> Iterator[str]:
    """Yield the kinds whose job is another one when only this kind is searched."""
    for job in found.jobs:
        alone = search_jobs(replace(task, freedom=Freedom(kinds=(job.kind,)))).best
        if alone.step_s != job.step_s or alone.planned.plan != job.planned.plan:
            yield job.kind


def _table(done: list[Row]) -> str:
    """Return the rows as a table."""

    def rate(row: Row, step_s: float | None) -> str:
        return "does not fit" if step_s is None else f"{BATCH * row.seq_len / step_s:,.0f}"

    cells = []
    for row in done:
        gain = "" if row.gain is None else f"{row.gain:.2f} x"
        cells.append(
            (row.gpus, row.train, f"{row.seq_len // 1024}K", rate(row, row.before_s), rate(row, row.now_s), gain)
            + (row.kind, row.settings, f"{row.search_s:.1f} s")
        )
    columns = ("GPUs", "train", "length", "before, tokens/s", "now", "gain", "kind", "settings", "search")
    return framed_table(columns, cells, width=200)


def main() -> int:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rigs", type=int, default=len(RIGS), help="so many of the rigs, from the first on")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    done: list[Row] = []
    for row in rows(arguments.rigs, _known(arguments.output)):
        done.append(row)
        print(f"{row.gpus}, {row.train}, {row.seq_len}: {row.gain}", file=sys.stderr)
        result = _result(done)
        write(result, arguments.output)
    if arguments.json:
        print(json.dumps(result))
    else:
        print(_table(done))
        print("\n".join(f"{name}: {value}" for name, value in result["summary"].items()))
    return int(bool(result["summary"]["slower"] or result["summary"]["unlike_alone"]))


def _known(output: Path) -> list[Row]:
    """Return the rows of a file of results; none if there is no such file."""
    if not output.exists():
        return []
    fields = Row.__dataclass_fields__
    rows_of_file = json.loads(output.read_text())["rows"]
    return [
        Row(**{**{name: row[name] for name in fields}, "unlike_alone": tuple(row["unlike_alone"])})
        for row in rows_of_file
    ]


def _result(done: Sequence[Row]) -> dict[str, Any]:
    """Return the content of the file of results."""
    gains = [row.gain for row in done if row.gain is not None]
    summary = {
        "jobs": len(done),
        "planned_before": sum(row.before_s is not None for row in done),
        "planned_now": sum(row.now_s is not None for row in done),
        "median_gain": median(gains) if gains else None,
        "largest_gain": max(gains, default=None),
        "slower": sum(row.is_slower for row in done),
        "unlike_alone": sum(len(row.unlike_alone) for row in done),
        "longest_search_s": max(row.search_s for row in done),
    }
    rows_of_file = [{**asdict(row), "gain": row.gain} for row in done]
    return {**header("python -m benchmarks.best_job"), "rows": rows_of_file, "summary": summary}


if __name__ == "__main__":
    sys.exit(main())
