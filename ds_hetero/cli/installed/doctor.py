"""``ds-hetero doctor``: checks whether training would start on this machine.

`ds_hetero.cli.installed.doctor_section` has the checks of a section of ds_config.json.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ds_hetero.cli.options import AS_JSON, FILE, TOKENS
from ds_hetero.cli.printing import print_lines, print_table
from ds_hetero.common.extras import OPTIONAL_PACKAGES, Package, installed_packages, is_installed
from ds_hetero.common.reading import JsonDict, JsonObject
from ds_hetero.common.terminal import coloured
from ds_hetero.errors import ModelError
from ds_hetero.models import load_model
from ds_hetero.values.schedule import Schedule
from ds_hetero.values.section import SECTION

if TYPE_CHECKING:
    from torch import nn

    from ds_hetero.decision.facts import ModelFacts

HEAD_DIM = 128  # head size with which attention kernels are tried; most models have it


@click.command
@click.option("--config", type=FILE, help="A ds_config.json whose section is to be checked.")
@click.option("--world-size", type=int, default=1, help="Processes of the job, to check a schedule against.")
@click.option("--num-heads", type=int, default=32, help="Query heads of the model, where --model is left out.")
@click.option("--num-kv-heads", type=int, default=8, help="KV heads of the model, where --model is left out.")
@click.option("--model", help="Hugging Face config.json or its folder, or a preset: to plan and predict.")
@click.option("--seq-len", type=TOKENS, help="Tokens to plan for, where the section has no seq_len.")
@click.option("--checkpointing/--no-checkpointing", default=False, help="Activation checkpointing of every layer.")
@AS_JSON
def doctor(config: Path | None, world_size: int, model: str | None, as_json: bool, **facts_of_job: Any) -> None:
    """Say what is installed, which kernels work on this machine's devices, and what a section comes to."""
    if not is_installed("torch"):
        _end_without_torch(config, as_json)
    with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed logs as it is imported
        module = model_of(model)
        report = examine(config, model_facts(model, module, **facts_of_job), world_size, module)
    if as_json:
        print(json.dumps(report))
    else:
        _show(report)
    if not report["healthy"]:
        raise click.exceptions.Exit(1)


def _end_without_torch(config: Path | None, as_json: bool) -> NoReturn:
    """Print installed and missing packages, and end with exit code 1: without torch, nothing else can be checked."""
    packages = list(map(_package, installed_packages()))
    report = {"healthy": False, "packages": packages, "devices": [], "section": None}
    if as_json:
        print(json.dumps(report))
    else:
        _show_packages(report)
        section_text = "" if config is None else f', and "{SECTION}" of {config.name} is checked'
        print_lines(f'kernels are tried{section_text} where torch is installed: pip install "ds-hetero[train]"')
        print(coloured("not healthy: see above", "bad"))
    raise click.exceptions.Exit(1)


def model_of(source: str | None) -> nn.Module | None:
    """Return the model of a config.json or preset, without weights; None without a source, or without transformers.

    Raises:
        ModelError: the file cannot be read, or transformers refuses its values.
    """
    if source is None or find_spec("transformers") is None:
        return None
    from ds_hetero.frameworks.transformers.model.facts import model_without_weights

    return model_without_weights(source)


def model_facts(
    source: str | None,
    model: nn.Module | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    seq_len: int | None,
    checkpointing: bool,
) -> ModelFacts:
    """Return the facts of the model that the command's options give.

    Args:
        source: ``--model``; None if it was left out.
        model: the model without weights; None without transformers or ``source``.

    Raises:
        ModelError: the model cannot be built, and the planner does not know its configuration either.
    """
    from ds_hetero.decision.facts import NO_MODEL, ModelFacts

    facts = ModelFacts(
        name="model",
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        no_spec_reason=NO_MODEL,
        max_seq_len=seq_len,
        checkpointing=checkpointing,
    )
    if model is not None:
        from ds_hetero.frameworks.transformers.model.facts import describe_model

        with contextlib.suppress(ModelError):  # `examine` reports the faults of the model
            model_description = describe_model(model)
            names = ("name", "num_heads", "num_kv_heads", "no_spec_reason", "head_dim", "softcap", "causal")
            facts = replace(facts, **{name: getattr(model_description, name) for name in names})
    try:
        spec = None if source is None else load_model(source)
    except ModelError:
        if model is None:
            raise
        return facts  # the planner does not know the model, but it can be trained
    if spec is None:
        return facts
    facts = replace(facts, num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads)
    return replace(facts, name=spec.name, spec=spec, no_spec_reason="")


def examine(config: Path | None, facts: ModelFacts, world_size: int, model: nn.Module | None = None) -> JsonDict:
    """Return the report as plain data; ``healthy`` says whether training would start.

    Args:
        model: the model without weights; None if it cannot be built here.
    """
    from ds_hetero.cli.installed.doctor_section import examine_section

    packages = list(map(_package, installed_packages()))
    section = None if config is None else examine_section(config, facts, world_size, model)
    healthy = all(package["problem"] is None or package["optional"] for package in packages)
    healthy = healthy and (section is None or not section["problem"])
    return {"healthy": healthy, "packages": packages, "devices": _kernels_by_device(), "section": section}


def _package(package: Package) -> JsonDict:
    """Return plain data of a package; ``problem`` is None if a tested release is installed."""
    if package.is_tested:
        problem = None
    elif package.release is None:
        problem = "not installed"
    else:
        problem = f"needs {package.tested}"
    optional = package.name in OPTIONAL_PACKAGES
    return {"name": package.name, "version": package.release, "optional": optional, "problem": problem}


def _kernels_by_device() -> list[JsonDict]:
    """Return the attention kernels of every device by dtype: None for one that works, else the reason."""
    import torch

    from ds_hetero.runtime.attention.kernels import available

    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or [torch.device("cpu")]
    rows = []
    for device in devices:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        kernels = {
            str(dtype).removeprefix("torch."): available(device, dtype, HEAD_DIM)
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        }
        rows.append({"device": str(device), "name": name, "kernels": kernels})
    return rows


def _show_packages(report: JsonObject) -> None:
    """Print the table of packages."""
    packages = ((row["name"], row["version"] or "-", row["problem"] or "works") for row in report["packages"])
    print_table(("package", "version", "verdict"), packages, "Packages")


def _show(report: JsonObject) -> None:
    """Print the report for people: packages, kernels, section, and whether training would start."""
    _show_packages(report)
    print_table(
        ("device", "kernel", "dtypes", "verdict"), _kernel_rows(report), f"Attention kernels, head size {HEAD_DIM}"
    )
    section = report["section"]
    if section is not None:
        verdict = "it is sound" if section["enabled"] else "absent or disabled: stock DeepSpeed runs"
        print_lines(f'"{SECTION}": {section["problem"] or verdict}')
        for line in section["deprecated"]:
            print_lines(line)
        if section["decided"] is not None:
            print_lines(section["decided"])
        for data in section["schedules"] if section["predicted"] is None else ():
            schedule = Schedule.from_dict(data)
            columns = ("rank", "group", "tokens", "query heads")
            print_table(columns, _rank_rows(schedule), f"Schedule, {schedule.layout}")
    print(coloured("healthy", "good") if report["healthy"] else coloured("not healthy: see above", "bad"))


def _kernel_rows(report: JsonObject) -> Iterator[tuple[str, ...]]:
    """Yield a row for each device, attention kernel and verdict, with the dtypes to which it applies."""
    for device in report["devices"]:
        dtypes_of_verdict: dict[tuple[str, str], list[str]] = {}
        for dtype, reasons in device["kernels"].items():
            for kernel, reason in reasons.items():
                dtypes_of_verdict.setdefault((kernel, reason or "works"), []).append(dtype)
        for (kernel, verdict), dtypes in sorted(dtypes_of_verdict.items()):
            yield f"{device['device']} ({device['name']})", kernel, ", ".join(dtypes), verdict


def _rank_rows(schedule: Schedule) -> Iterator[tuple[str, ...]]:
    """Yield a row for each rank: position of its group in the ring, share of the tokens, and heads."""
    total_weight = sum(group.weight for group in schedule.groups)
    for rank in schedule.ranks:
        position = schedule.ring_position(rank)
        group = schedule.ring_groups[position]
        index = group.ranks.index(rank)
        share = f"{group.tokens[index] / total_weight:.1%}"
        yield str(rank), str(position), share, f"{group.heads[index]} of {schedule.num_heads}"
