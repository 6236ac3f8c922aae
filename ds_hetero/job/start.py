"""What all ranks must agree on before training: the section, the model, and the schedules that follow from them.

A rank that finds a fault tells all others before anybody acts, so that every rank stops with the same message and none
waits for ever. Only rank 0 reads the schedule and cluster files, searches and predicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_hetero import __version__
from ds_hetero.cluster import Cluster
from ds_hetero.config import SECTION, HeterogeneitySection, read_section
from ds_hetero.cost import Workload
from ds_hetero.errors import ConfigError, ModelError, PlanError, ScheduleError
from ds_hetero.integrations.transformers.model_checks import check_model, head_counts, pretrained_of
from ds_hetero.job.forecast import Searcher, forecast, model_of, training_dtype, workload_of
from ds_hetero.job.prediction_check import Outlook, announce
from ds_hetero.job.resolve import (
    check_plan_fits,
    cluster_of_job,
    clusters_of_replicas,
    needs_measuring,
    needs_planner,
    plan_in_file,
    resolve,
    sp_size_of,
)
from ds_hetero.models import ModelSpec
from ds_hetero.plan import BatchSplit, Plan, read_plan
from ds_hetero.planner import PlannedSchedule
from ds_hetero.profiler.kernel_probe import kernel_probe, profile_cached
from ds_hetero.profiler.measure import cache_folder, default_device
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.zero.memory import weights_by_memory

__all__ = ["Agreement", "ReplicaBatches", "agree_on_plan", "agree_on_replica_batches"]


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What the ranks have agreed on for one model.

    Args:
        section: the configuration's.
        plan: what every rank does.
        outlook: what is predicted; without forecasts on ranks other than 0, and where the devices are not known.
        weights_by_memory: ZeRO shares of all ranks, where the section asks for ``"zero_partition": "memory"``.
    """

    section: HeterogeneitySection
    plan: Plan
    outlook: Outlook
    weights_by_memory: tuple[float, ...] | None = None


def agree_on_plan(
    model: nn.Module,
    ds_config: Mapping[str, Any],
    sp_sizes: Mapping[str, int | None],
    *,
    before: Agreement | None,
    profiles: dict[tuple[str | None, str], dict[str, Any]],
) -> Agreement:
    """Check the section and the model on every rank, resolve the plan on rank 0, and hand it to all.

    Args:
        model: the model to be split.
        ds_config: the DeepSpeed configuration, with the section.
        sp_sizes: see `ds_hetero.job.resolve.sp_size_of`.
        before: an earlier agreement on the same model. If the section has not changed, its plan stays, whatever
            has become known of the training since: loaders may rely on them already.
        profiles: of the ranks, by kernel and dtype, as far as this process has measured them; added to.

    Caller: every rank of the world, once or twice per model.
    Collectives: two rounds of `all_gather_bytes`; between them, where the live ranks are to be measured, those of
        `ds_hetero.profiler.measure.measure_cached`.

    Raises:
        HeteroError: the same one on every rank.
        PeerError: another rank failed in a way that is no rule of ds_hetero's.
    """

    def examine() -> dict[str, Any]:
        section = read_section(ds_config)
        assert section is not None
        check_model(model)
        pretrained = pretrained_of(model)
        if needs_planner(section):
            model_of(pretrained)
        dtype = training_dtype(pretrained, ds_config)
        if needs_measuring(section):
            kernel_probe(dtype, section.attention)
        num_heads, num_kv_heads = head_counts(pretrained)
        return {
            SECTION: section.model_dump(exclude_unset=True),
            "model": type(pretrained).__name__,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "dtype": str(dtype).removeprefix("torch."),
            "sequence-parallel size": dict(sp_sizes),
            "versions": {name: version(name) for name in ("torch", "deepspeed", "transformers")}
            | {"ds_hetero": __version__},
        }

    facts = on_all_ranks(examine)
    _expect_equal(facts)
    section = HeterogeneitySection.model_validate(facts[0][SECTION])
    heads = {name: facts[0][name] for name in ("num_heads", "num_kv_heads")}
    settled = before is not None and before.section == section
    alone = sp_size_of(sp_sizes) == 1 or dist.get_world_size() == 1
    measured = None
    if needs_measuring(section) and not settled and (not alone or section.zero_partition == "memory"):
        kind = section.attention, facts[0]["dtype"]
        if kind not in profiles:
            profiles[kind] = _measure(section, getattr(torch, kind[1]))
        measured = profiles[kind]
    outlook = Outlook(())

    def settle() -> dict[str, Any]:
        nonlocal outlook
        if dist.get_rank() > 0:
            return {}
        if settled:
            assert before is not None
            check_plan_fits(before.plan, **heads, sp_sizes=sp_sizes)
            return {}
        on_host = default_device().type == "cpu"
        whole = cluster_of_job(section, measured, dist.get_world_size())
        training = _Training(pretrained_of(model), ds_config, section, on_host, whole)
        searcher = None
        if needs_planner(section):
            num_replicas = dist.get_world_size() // (sp_size_of(sp_sizes) or dist.get_world_size())
            searcher = Searcher(*training.of(num_replicas), section.layout)
        plan = resolve(
            section,
            **heads,
            world_size=dist.get_world_size(),
            sp_sizes=sp_sizes,
            measured=measured,
            search=searcher,
        )
        weights = None
        if section.zero_partition == "memory":
            weights = _weights_by_memory(section, plan, training, measured)
            training = replace(training, zero_weights=weights)
        outlook = _outlook(section, plan, training, measured, {} if searcher is None else searcher.plans)
        return {"plan": plan.to_dict(), "weights by memory": weights}

    told = on_all_ranks(settle)[0]
    if before is not None and settled:
        return before
    weights = told["weights by memory"]
    return Agreement(
        section=section,
        plan=read_plan(told["plan"]),
        outlook=outlook,
        weights_by_memory=None if weights is None else tuple(weights),
    )


@dataclass(frozen=True)
class ReplicaBatches:
    """The batches of one replica among replicas that take different ones.

    Args:
        split: the batches of all replicas.
        replica_id: index of this rank's replica.
    """

    split: BatchSplit
    replica_id: int


def agree_on_replica_batches(ds_config: Mapping[str, Any]) -> ReplicaBatches | None:
    """Return this rank's batches where the replicas of the section's plan take different ones.

    They are needed before there is a model.

    Caller: every rank of the world.
    Collectives: one `all_gather_bytes`.

    Raises:
        HeteroError: as `agree_on_plan`.
    """

    def read() -> dict[str, Any] | None:
        section = read_section(ds_config)
        plan = plan_in_file(section, dist.get_world_size()) if section is not None and dist.get_rank() == 0 else None
        return None if plan is None or plan.batch_split is None else plan.to_dict()

    content = on_all_ranks(read)[0]
    if content is None:
        return None
    plan = read_plan(content)
    place = plan.place_of(dist.get_rank())
    assert plan.batch_split is not None and place is not None
    return ReplicaBatches(plan.batch_split, place[0])


def _measure(section: HeterogeneitySection, dtype: torch.dtype) -> dict[str, Any]:
    measured, fresh = profile_cached(dtype, section.attention)
    if dist.get_rank() == 0:
        known = "measured now" if fresh else "as measured before"
        announce(f"{dist.get_world_size()} ranks, {known}; profiles are kept in {cache_folder()}")
    return measured


@dataclass(frozen=True)
class _Training:
    """What is trained, as the planning half sees it once the number of replicas is known."""

    pretrained: Any
    ds_config: Mapping[str, Any]
    section: HeterogeneitySection
    on_host: bool
    whole: Cluster | None  # of all replicas, where it is known
    zero_weights: tuple[float, ...] | None = None  # found from the devices' memory; the section's own need no finding

    def of(self, num_replicas: int) -> tuple[ModelSpec, Workload]:
        workload = workload_of(self.pretrained, self.ds_config, self.section, num_replicas, on_host=self.on_host)
        if self.zero_weights is not None and num_replicas == 1:
            workload = replace(workload, zero_weights=self.zero_weights)
        if num_replicas > 1:
            workload = replace(workload, zero_cluster=self.whole)
        return model_of(self.pretrained), workload


def _weights_by_memory(
    section: HeterogeneitySection,
    plan: Plan,
    training: _Training,
    measured: Mapping[str, Any] | None,
) -> tuple[float, ...]:
    """ZeRO shares of all ranks, in the order of the replicas, whose ranks are consecutive."""
    clusters = clusters_of_replicas(section, measured, [schedule.sp_size for schedule in plan.schedules])
    found = forecast(plan.schedules, clusters, *training.of(len(plan.pipelines)), {})
    return weights_by_memory([(each.cost, each.prediction) for each in found])


def _outlook(
    section: HeterogeneitySection,
    plan: Plan,
    training: _Training,
    measured: Mapping[str, Any] | None,
    searched: Mapping[Cluster, PlannedSchedule],
) -> Outlook:
    """Forecasts, wherever the devices are known; a model that no cost model describes is trained without one."""
    if section.cluster == "measure" and measured is None:
        return Outlook(())
    clusters = clusters_of_replicas(section, measured, [schedule.sp_size for schedule in plan.schedules])
    split = plan.batch_split
    try:
        model, work = training.of(len(plan.pipelines))
        works = [work] * len(plan.pipelines)
        if split is not None:
            batches = zip(split.micro_batch_sizes, split.micro_batches, strict=True)
            works = [replace(work, micro_batch=size, micro_batches=count) for size, count in batches]
        each = zip(plan.schedules, clusters, works, strict=True)
        return Outlook(tuple(chain.from_iterable(forecast([s], [c], model, w, searched) for s, c, w in each)))
    except (ModelError, PlanError, ScheduleError) as error:
        return Outlook((), str(error))


def _expect_equal(facts: list[dict[str, Any]]) -> None:
    for name in facts[0]:
        values = [fact[name] for fact in facts]
        if any(value != values[0] for value in values):
            raise ConfigError(f"the ranks must agree, but {name} by rank is {values}. Give every rank the same.")
