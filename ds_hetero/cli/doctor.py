"""``ds-hetero doctor``: would ds_hetero work here, and if not, why?"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from ds_hetero.baselines import FROM_DEVICES
from ds_hetero.cli.doctor_installation import HEAD_DIM, installed_packages, kernels_by_device
from ds_hetero.cli.doctor_pipelines import examine_pipelines
from ds_hetero.cluster import load_cluster
from ds_hetero.common.limits import MAX_RANKS, is_whole, whole_rule
from ds_hetero.common.reading import read_file, shortened
from ds_hetero.config import SECTION
from ds_hetero.errors import ConfigError, HeteroError, ModelError
from ds_hetero.integrations.deepspeed.batch_sizes import expect_batch_of_replicas
from ds_hetero.integrations.deepspeed.facts import read_training_facts, section_of
from ds_hetero.integrations.deepspeed.keys import expect_supported_keys
from ds_hetero.job.decide import decide
from ds_hetero.job.facts import JobFacts, ModelFacts
from ds_hetero.job.plan_files import plan_in_file
from ds_hetero.job.report import forecast_text
from ds_hetero.job.resolve import clusters_of_replicas, needs_planner, replica_size, sp_size_of
from ds_hetero.job.start import check_facts, expect_kernel
from ds_hetero.models import load_model
from ds_hetero.reporting.run_file import expect_writable
from ds_hetero.schedule import Schedule
from ds_hetero.zero.partition import check_weights, is_even

__all__ = ["examine", "model_facts", "model_of", "show"]

_NO_MODEL = "no model was given."


def model_of(source: str | None) -> nn.Module | None:
    """The model that would be trained, without weights; None where none was given, or transformers cannot build it.

    Args:
        source: config.json, folder or preset.

    Raises:
        ModelError: the source cannot be read.
    """
    if source is None or find_spec("transformers") is None:
        return None
    from ds_hetero.integrations.transformers.facts import model_without_weights

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
    """What the options of the command say of the model.

    Args:
        source: config.json, folder or preset; None if not given.
        model: from `model_of`.
        num_heads: query heads, where there is no ``source``.
        num_kv_heads: key/value heads, where there is no ``source``.
        seq_len: tokens to plan for, where the section has none.
        checkpointing: of the activations of every layer.

    Raises:
        ModelError: the source cannot be read; or neither a cost model nor transformers knows such models.
    """
    facts = ModelFacts(
        name="model",
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        no_spec_reason=_NO_MODEL,
        max_seq_len=seq_len,
        checkpointing=checkpointing,
    )
    if model is not None:
        from ds_hetero.integrations.transformers.facts import describe_model

        with contextlib.suppress(ModelError):  # `examine` says what is wrong with it
            of_model = describe_model(model)
            names = ("name", "num_heads", "num_kv_heads", "no_spec_reason", "head_dim", "softcap", "causal")
            facts = replace(facts, **{name: getattr(of_model, name) for name in names})
    try:
        spec = None if source is None else load_model(source)
    except ModelError:
        if model is None:
            raise
        return facts  # it can be trained all the same, without a search
    if spec is None:
        return facts
    facts = replace(facts, num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads)
    return replace(facts, name=spec.name, spec=spec, no_spec_reason="")


def examine(config: Path | None, facts: ModelFacts, world_size: int, model: nn.Module | None = None) -> dict[str, Any]:
    """Everything that `show` prints, as plain data; ``healthy`` says whether training would start.

    Args:
        config: ds_config.json whose section is checked, if any.
        facts: of the model to be trained, from `model_facts`.
        world_size: processes of the job.
        model: from `model_of`.
    """
    packages = installed_packages()
    section = None if config is None else _section(config, facts, world_size, model)
    healthy = all(p["problem"] is None or p["optional"] for p in packages) and (
        section is None or not section["problem"]
    )
    return {"healthy": healthy, "packages": packages, "devices": kernels_by_device(), "section": section}


def _section(config: Path, model_facts: ModelFacts, world_size: int, model: nn.Module | None) -> dict[str, Any]:
    report: dict[str, Any] = {"problem": None, "enabled": True, "schedules": [], "decided": None, "predicted": None}
    try:
        if not is_whole(world_size, 1, MAX_RANKS):
            raise ConfigError(f"--world-size must be {whole_rule(world_size, 1, MAX_RANKS)}, got {world_size}.")
        ds_config = read_file(config, "DeepSpeed configuration", ConfigError)
        if not isinstance(ds_config, Mapping):
            raise ConfigError(f"{config}: a DeepSpeed configuration is a JSON object, got {shortened(ds_config)}.")
        section, training = section_of(ds_config), read_training_facts(ds_config)
        if section is None:
            return {**report, "enabled": False}
        expect_supported_keys(ds_config)
        if section.report is not None:
            expect_writable(section.report)
        sp_sizes = {"sequence_parallel_size of ds_config": training.sp_size}
        facts = JobFacts(section=section, model=model_facts, training=training, sp_sizes=sp_sizes)
        pipelines = examine_pipelines(facts, ds_config, world_size, model)
        if pipelines is not None:
            return {**report, **pipelines}
        if model is not None:
            from ds_hetero.integrations.transformers.model_checks import check_model

            check_model(model)
        return {**report, **_decision(facts, ds_config, world_size, model)}
    except HeteroError as error:
        return {**report, "problem": str(error)}


def _decision(
    facts: JobFacts, ds_config: Mapping[str, Any], world_size: int, model: nn.Module | None
) -> dict[str, Any]:
    """The schedules, and the prediction where devices and model are known; or when and how they will be decided."""
    section = facts.section
    _check_before_deciding(facts, ds_config, world_size, model)
    if later := _decided_at_start(facts, world_size):
        return {"decided": later}
    if section.cluster == "measure" and section.zero_partition == "memory":  # shares of the measured memory
        facts = replace(facts, section=section.model_copy(update={"zero_partition": "uniform"}))
    decision = decide(facts, world_size, measured=None, on_host=False)
    if decision.plan.batch_split is not None:
        expect_batch_of_replicas(ds_config, decision.plan.batch_split, world_size, facts.training.sp_size)
    if decision.zero_weights is not None:
        _expect_partition(ds_config, decision.zero_weights, model)
    report: dict[str, Any] = {"schedules": [schedule.to_dict() for schedule in decision.plan.schedules]}
    if decision.forecasts:
        report["predicted"] = [replica.prediction.to_dict() for replica in decision.forecasts]
        report["decided"] = forecast_text(decision.forecasts)
    elif decision.no_forecast_reason is not None and facts.model.spec is not None:
        report["decided"] = f"no prediction of the step time: {decision.no_forecast_reason}"
    return report


def _check_before_deciding(
    facts: JobFacts, ds_config: Mapping[str, Any], world_size: int, model: nn.Module | None
) -> None:
    """What the start of a job refuses whatever is measured or searched for.

    Raises:
        HeteroError: as the start of the job.
    """
    section = facts.section
    if facts.model.no_spec_reason == _NO_MODEL:
        expect_kernel(facts)
    else:
        check_facts(facts, world_size)
    if isinstance(section.zero_partition, list):
        check_weights(section.zero_partition, world_size, zero_stage=facts.training.zero_stage)
        _expect_partition(ds_config, section.zero_partition, model)
    if plan_in_file(section, world_size) is None:
        size = replica_size(facts.sp_sizes, world_size)
        if section.cluster != "measure":
            clusters_of_replicas(section, load_cluster(section.cluster), [size] * (world_size // size))


def _expect_partition(ds_config: Mapping[str, Any], weights: Sequence[float], model: nn.Module | None) -> None:
    """Refuse unequal ZeRO partitions that DeepSpeed's settings rule out; says nothing where DeepSpeed is missing.

    Raises:
        ConfigError: as the start of the job.
    """
    if not is_even(weights) and find_spec("deepspeed") is not None:
        from ds_hetero.integrations.deepspeed.zero.optimizers import expect_possible

        expect_possible(ds_config, weights, model)


def _decided_at_start(facts: JobFacts, world_size: int) -> str | None:
    """Why the schedule is only decided when the job starts; None where it can be decided now."""
    section, model = facts.section, facts.model
    if (sp_size_of(facts.sp_sizes) or world_size) == 1:
        return None
    name = f'"schedule": {json.dumps(section.schedule)}'
    if section.cluster == "measure" and (needs_planner(section) or section.schedule in FROM_DEVICES):
        rule = "the fastest schedule is searched for" if needs_planner(section) else "tokens follow their speeds"
        return (
            f"{name}: the ranks are measured at the start of the job, and {rule}. To see it now, profile them "
            "(ds-hetero profile) and name the file as the cluster."
        )
    seq_len = section.seq_len or model.max_seq_len
    if needs_planner(section) and (model.spec is None or seq_len is None):
        options = (("--model", model.spec), ('--seq-len or "seq_len"', seq_len))
        missing = " and ".join(text for text, value in options if value is None)
        return f"{name}: searched for at the start of the job. To see it now, give {missing}."
    return None


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
    kernels = Table("device", "dtype", "kernel", "verdict", title=f"Attention kernels, head size {HEAD_DIM}")
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
    total_weight = sum(group.weight for group in schedule.groups)
    for rank in schedule.ranks:
        position = schedule.ring_position(rank)
        group = schedule.ring_groups[position]
        index = group.ranks.index(rank)
        share = f"{group.tokens[index] / total_weight:.1%}"
        table.add_row(str(rank), str(position), share, f"{group.heads[index]} of {schedule.num_heads}")
    return table
