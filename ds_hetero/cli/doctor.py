"""``ds-hetero doctor``: would ds_hetero work here, and if not, why?"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from ds_hetero.config import SECTION, read_section, resolve
from ds_hetero.errors import HeteroError
from ds_hetero.runtime.kernels import available
from ds_hetero.schedule import Schedule

__all__ = ["examine", "show"]

_OPTIONAL = ("triton", "flash-attn")
_HEAD_DIM = 128  # of today's models


def examine(config: Path | None, world_size: int, num_heads: int, num_kv_heads: int) -> dict[str, Any]:
    """Everything that `show` prints, as plain data; ``healthy`` says whether training would start."""
    packages = _packages()
    section = None if config is None else _section(config, world_size, num_heads, num_kv_heads)
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
        if requirement.marker is not None and not optional:
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


def _section(config: Path, world_size: int, num_heads: int, num_kv_heads: int) -> dict[str, Any]:
    try:
        data = json.loads(config.read_text())
        section = read_section(data)
        if section is None:
            return {"problem": None, "enabled": False, "schedules": []}
        sizes = {"sequence_parallel_size of ds_config": data.get("sequence_parallel_size")}
        schedules = resolve(
            section, num_heads=num_heads, num_kv_heads=num_kv_heads, world_size=world_size, sp_sizes=sizes
        )
    except (OSError, ValueError) as error:
        known = isinstance(error, HeteroError)
        return {"problem": str(error) if known else f"{config}: {error}", "enabled": True, "schedules": []}
    return {"problem": None, "enabled": True, "schedules": [schedule.to_dict() for schedule in schedules]}


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
        for schedule in section["schedules"]:
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
