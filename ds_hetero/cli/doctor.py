"""``ds-hetero doctor``: would ds_hetero work here, and if not, why?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from ds_hetero.config import SECTION, HeterogeneitySection, read_section
from ds_hetero.cost import Workload
from ds_hetero.errors import HeteroError
from ds_hetero.extras import TRAINING
from ds_hetero.job.forecast import Searcher, forecast, forecast_text, mixed_precision, workload_from
from ds_hetero.job.resolve import clusters_of_replicas, needs_planner, resolve, sp_size_of
from ds_hetero.models import ModelSpec, load_model
from ds_hetero.runtime.attention.kernels import available
from ds_hetero.schedule import Schedule

__all__ = ["Job", "examine", "show"]

_OPTIONAL = ("triton", "flash-attn")
_HEAD_DIM = 128  # of today's models


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What the configuration is checked against.

    Args:
        world_size: processes. num_heads, num_kv_heads: of the model, where ``model`` does not tell.
        model: config.json, folder or preset, None if not given; seq_len: tokens to plan for where the section has none.
        checkpointing: of the activations.
    """

    world_size: int
    num_heads: int
    num_kv_heads: int
    model: str | None = None
    seq_len: int | None = None
    checkpointing: bool = False


def examine(config: Path | None, job: Job) -> dict[str, Any]:
    """Everything that `show` prints, as plain data; ``healthy`` says whether training would start."""
    packages = _packages()
    section = None if config is None else _section(config, job)
    healthy = all(p["problem"] is None or p["optional"] for p in packages) and (
        section is None or not section["problem"]
    )
    return {"healthy": healthy, "packages": packages, "devices": _devices(), "section": section}


def _packages() -> list[dict[str, Any]]:
    """Installed versions against the ranges that this release was tested with."""
    rows: list[dict[str, Any]] = []
    for text in requires("ds-hetero") or ():
        requirement = Requirement(text)
        optional = requirement.name in _OPTIONAL
        if requirement.marker is not None and not optional and requirement.name not in TRAINING:
            continue
        try:
            found: str | None = version(requirement.name)
        except PackageNotFoundError:
            found = None
        problem = "not installed" if found is None else None
        if found is not None and not requirement.specifier.contains(found, prereleases=True):
            problem = f"needs {requirement.specifier}"
        if requirement.name not in {row["name"] for row in rows}:
            rows.append({"name": requirement.name, "version": found, "optional": optional, "problem": problem})
    return rows


def _devices() -> list[dict[str, Any]]:
    """Every device with the kernels that work on it, by dtype; a reason for those that do not."""
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or [torch.device("cpu")]
    rows = []
    for device in devices:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        kernels = {
            str(dtype).removeprefix("torch."): available(device, dtype, _HEAD_DIM)
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        }
        rows.append({"device": str(device), "name": name, "kernels": kernels})
    return rows


def _section(config: Path, job: Job) -> dict[str, Any]:
    found: dict[str, Any] = {"problem": None, "enabled": True, "schedules": [], "decided": None, "predicted": None}
    try:
        data = json.loads(config.read_text())
        section = read_section(data)
        if section is None:
            return {**found, "enabled": False}
        return {**found, **_resolved(section, data, job)}
    except (OSError, ValueError) as error:
        known = isinstance(error, HeteroError)
        return {**found, "problem": str(error) if known else f"{config}: {error}"}


def _resolved(section: HeterogeneitySection, data: dict[str, Any], job: Job) -> dict[str, Any]:
    """The schedules, and the prediction where devices and model are known; or when and how they will be decided."""
    sizes = {"sequence_parallel_size of ds_config": data.get("sequence_parallel_size")}
    sp_size = sp_size_of(sizes) or job.world_size
    follows = needs_planner(section) or section.schedule == "proportional"
    if follows and section.cluster == "measure" and sp_size > 1:
        then = "the fastest schedule is searched for" if needs_planner(section) else "tokens follow their speeds"
        text = (
            f'"schedule": {json.dumps(section.schedule)}: the ranks are measured at the start of the job, and {then}. '
        )
        return {"decided": text + "To see it now, profile them (ds-hetero profile) and name the file as the cluster."}
    model = None if job.model is None else load_model(job.model)
    seq_len = section.seq_len or job.seq_len
    if needs_planner(section) and (model is None or seq_len is None) and sp_size > 1:
        missing = " and ".join(
            text for text, value in (("--model", model), ('--seq-len or "seq_len"', seq_len)) if value is None
        )
        text = f'"schedule": {json.dumps(section.schedule)}: searched for at the start of the job. To see it now, give '
        return {"decided": f"{text}{missing}."}

    def training(num_replicas: int) -> tuple[ModelSpec, Workload]:
        assert model is not None and seq_len is not None
        dtype = mixed_precision(data) or torch.bfloat16
        workload = workload_from(
            data,
            section,
            num_replicas,
            seq_len=seq_len,
            element_bytes=dtype.itemsize,
            checkpointing=job.checkpointing,
            on_host=False,
        )
        return model, workload

    planned = needs_planner(section) and sp_size > 1
    searcher = Searcher(*training(max(job.world_size // sp_size, 1)), section.layout) if planned else None
    schedules = resolve(
        section,
        num_heads=job.num_heads if model is None else model.num_heads,
        num_kv_heads=job.num_kv_heads if model is None else model.num_kv_heads,
        world_size=job.world_size,
        sp_sizes=sizes,
        search=searcher,
    ).schedules
    found: dict[str, Any] = {"schedules": [schedule.to_dict() for schedule in schedules]}
    if section.cluster != "measure" and model is not None and seq_len is not None:
        clusters = clusters_of_replicas(section, None, [schedule.sp_size for schedule in schedules])
        plans = {} if searcher is None else searcher.plans
        forecasts = forecast(schedules, clusters, *training(len(schedules)), plans)
        found["predicted"] = [each.prediction.to_dict() for each in forecasts]
        found["decided"] = forecast_text(forecasts)
    return found


def show(report: dict[str, Any], as_json: bool) -> None:
    """Print the report on stdout."""
    if as_json:
        print(json.dumps(report))
        return
    console = Console()
    packages = Table("package", "version", "verdict", title="Packages")
    for row in report["packages"]:
        packages.add_row(row["name"], row["version"] or "-", row["problem"] or "works")
    console.print(packages)
    kernels = Table("device", "dtype", "kernel", "verdict", title=f"Attention kernels, head size {_HEAD_DIM}")
    for row in report["devices"]:
        for dtype, verdicts in row["kernels"].items():
            for kernel, reason in verdicts.items():
                kernels.add_row(f"{row['device']} ({row['name']})", dtype, kernel, reason or "works")
    console.print(kernels)
    section = report["section"]
    if section is not None:
        state = section["problem"] or (
            "it is sound" if section["enabled"] else "absent or disabled: stock DeepSpeed runs"
        )
        console.print(f'"{SECTION}": {state}', markup=False)
        if section["decided"] is not None:
            console.print(section["decided"], markup=False, highlight=False, soft_wrap=True)
        for schedule in section["schedules"] if section["predicted"] is None else ():
            console.print(_schedule_table(Schedule.from_dict(schedule)))
    console.print("healthy" if report["healthy"] else "not healthy: see above")


def _schedule_table(schedule: Schedule) -> Table:
    """Ranks as rows: their group's place in the ring, their share of the tokens, their heads."""
    table = Table("rank", "group", "tokens", "query heads", title=f"Schedule, {schedule.layout}")
    whole = sum(group.weight for group in schedule.groups)
    for rank in schedule.ranks:
        position = schedule.ring_position(rank)
        group = schedule.ring_groups[position]
        index = group.ranks.index(rank)
        share = f"{group.tokens[index] / whole:.1%}"
        table.add_row(str(rank), str(position), share, f"{group.heads[index]} of {schedule.num_heads}")
    return table
