"""The start of a job: all ranks agree on what they have read, and rank 0 decides for all of them.

    facts = agree_on_facts(world, read)                        # every rank reads, all compare
    start = start_job(world, facts, clusters)                  # the plan, the same on every rank

A rank that finds a fault lets all others know before anybody acts, so that every rank stops with the same message.
Only rank 0 reads the schedule and cluster files, searches and predicts. Nothing here knows a framework or keeps state
of its own: a job that goes on with other ranks is started again, with another `World`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ds_hetero.baselines import STRATEGIES
from ds_hetero.cluster import Cluster, load_cluster
from ds_hetero.common.reading import shortened
from ds_hetero.config import SECTION, HeterogeneitySection
from ds_hetero.errors import ConfigError
from ds_hetero.job.capabilities import (
    USUAL_HEAD_DIM,
    capability_lines,
    device_name,
    expect_known_devices,
    own_capabilities,
    requested_kernel,
)
from ds_hetero.job.decide import Decision, decide, depends_on_measuring
from ds_hetero.job.facts import JobFacts
from ds_hetero.job.forecast import Forecast
from ds_hetero.job.plan_files import replicas_in_file
from ds_hetero.job.report import announce, forecast_text, plan_text
from ds_hetero.job.resolve import check_plan_fits, needs_planner, replica_size, sp_size_of
from ds_hetero.plans import BatchSplit, Plan
from ds_hetero.profiler.cache import describe_age
from ds_hetero.profiler.kernel_probe import profile_cached
from ds_hetero.reporting.run_file import expect_writable
from ds_hetero.runtime.attention.kernels import select
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.devices import default_device, has_native_bf16
from ds_hetero.runtime.peers.calls import ranks_by_value, ranks_text
from ds_hetero.runtime.peers.waiting import waiting_for_peers

__all__ = [
    "JobStart",
    "MeasuredClusters",
    "ReplicaBatches",
    "World",
    "agree_on_facts",
    "agree_on_replica_batches",
    "announce_start",
    "check_facts",
    "expect_kernel",
    "expect_same_sections",
    "start_job",
]

T = TypeVar("T")
_MISSING = "missing"


@dataclass(frozen=True)
class World:
    """The ranks of a job, and how they fail together.

    Args:
        rank: of this process.
        size: ranks of the job.
    """

    rank: int
    size: int

    @classmethod
    def current(cls) -> World:
        """The ranks of the default process group; one rank without it."""
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else cls(0, 1)

    def on_all_ranks(self, compute: Callable[[], T]) -> list[T]:
        """See `ds_hetero.runtime.collectives.on_all_ranks`."""
        return on_all_ranks(compute)


@dataclass(frozen=True, kw_only=True)
class JobStart:
    """What the ranks have agreed on for one model.

    Args:
        facts: that all ranks have read alike.
        plan: what every rank does.
        zero_weights: ZeRO shares of all ranks, where the section asks for ``"zero_partition": "memory"``.
        forecasts: on rank 0, one per replica; none where the devices are not known or no cost model describes the job.
        no_forecast_reason: on rank 0, why there is no forecast although the devices are known.
    """

    facts: JobFacts
    plan: Plan
    zero_weights: tuple[float, ...] | None = None
    forecasts: tuple[Forecast, ...] = ()
    no_forecast_reason: str | None = None

    @property
    def section(self) -> HeterogeneitySection:
        """The "heterogeneity" section."""
        return self.facts.section


class MeasuredClusters:
    """The live ranks as clusters, measured once for all models that compute attention alike."""

    def __init__(self) -> None:
        self._clusters: dict[tuple[int, str, str, int | None, float | None], Cluster] = {}

    @waiting_for_peers("measuring the ranks")
    def of(self, world: World, facts: JobFacts) -> Cluster:
        """Return the cluster of the live ranks, measured as the job will train.

        Args:
            world: the ranks of the job.
            facts: of the job, of which kernel, data type, head size and soft cap count.

        Caller: every rank of the world.
        Collectives: the first time, those of `ds_hetero.profiler.cache.measure_cached`.
        """
        wish, trained = facts.section.attention, (facts.model.head_dim, facts.model.softcap)
        key = world.size, facts.computed_dtype, str(wish), *trained  # the same on every rank
        if key not in self._clusters:
            requested = requested_kernel(wish, world.rank)
            content, is_new = profile_cached(getattr(torch, facts.computed_dtype), requested, *trained)
            self._clusters[key] = load_cluster(content)
            if world.rank == 0:
                announce(f"{world.size} ranks, {describe_age(content, is_new)}")
        return self._clusters[key]


def agree_on_facts(world: World, read: Callable[[], JobFacts]) -> JobFacts:
    """Read the facts of the job on every rank and compare them.

    Args:
        world: the ranks of the job.
        read: returns this rank's facts; what it raises on any rank is raised on all.

    Caller: every rank of the world.
    Collectives: one `on_all_ranks`.

    Raises:
        HeteroError: the same one on every rank.
        PeerError: another rank failed in a way that is no rule of ds_hetero's.
    """

    def examine() -> tuple[JobFacts, str | None, str, str]:
        facts = read()
        if world.rank == 0 and facts.section.report is not None:
            expect_writable(facts.section.report)
        slow = check_facts(facts, world.size, world.rank)
        return facts, slow, device_name(), own_capabilities(facts, world.rank) if world.size > 1 else ""

    examined = world.on_all_ranks(examine)
    of_ranks, slow_types, devices, capabilities = zip(*examined, strict=True)
    _expect_equal_facts(of_ranks)
    expect_known_devices(of_ranks[0].section.attention, devices)
    if world.rank == 0 and any(slow is not None for slow in slow_types):
        announce(_by_device(slow_types))
    for line in capability_lines(capabilities) if world.rank == 0 else ():
        announce(line)
    facts: JobFacts = of_ranks[world.rank]
    return facts


def check_facts(facts: JobFacts, world_size: int, rank: int = 0) -> str | None:
    """Refuse what this rank alone can see of a job to be impossible, before anything is measured.

    Args:
        facts: as this rank has read them.
        world_size: ranks of the job.
        rank: this one.

    Returns:
        See `expect_kernel`.

    Raises:
        ConfigError: see `expect_kernel`; or the world cannot be divided into replicas of the given size.
        ModelError: a schedule is to be searched for, and no cost model describes the model.
    """
    if needs_planner(facts.section) and sp_size_of(facts.sp_sizes) != 1:
        facts.model.expect_spec()
    if facts.section.schedule in STRATEGIES:
        replica_size(facts.sp_sizes, world_size)
    return expect_kernel(facts, rank)


def expect_kernel(facts: JobFacts, rank: int = 0) -> str | None:
    """Refuse a kernel that does not work on this rank's device.

    Args:
        facts: as this rank has read them.
        rank: this one.

    Returns:
        What the device computes slowly though it works, for people; None if there is nothing.

    Raises:
        ConfigError: the kernel that the section names does not work on this rank's device, or no kernel knows it.
    """
    device, dtype = default_device(), getattr(torch, facts.computed_dtype)
    head_dim = facts.model.head_dim or USUAL_HEAD_DIM
    if (requested := requested_kernel(facts.section.attention, rank)) is not None:
        select(torch.device(device.type), dtype, head_dim, facts.model.softcap, requested)
    if dtype is torch.bfloat16 and not has_native_bf16(device):
        return f"{torch.cuda.get_device_name(device)} does not compute in bfloat16 itself"
    return None


def _by_device(slow_types: Sequence[str | None]) -> str:
    """``rank 2, 3: Tesla T4 does not ...``, and what to do."""
    ranks: dict[str, list[str]] = {}
    for rank, slow in enumerate(slow_types):
        if slow is not None:
            ranks.setdefault(slow, []).append(str(rank))
    listed = "; ".join(f"rank {', '.join(held_by)}: {slow}" for slow, held_by in ranks.items())
    return f'{listed}: attention is several times slower there. "fp16" in place of "bf16" is fast on such devices.'


def expect_same_sections(sections: Sequence[HeterogeneitySection | None]) -> None:
    """Refuse sections that differ between ranks.

    Args:
        sections: by rank; None where there is none.

    Raises:
        ConfigError: names key, ranks and values.
    """
    _expect_equal([{} if section is None else _view(section) for section in sections])


def _expect_equal_facts(facts_by_rank: Sequence[JobFacts]) -> None:
    """Refuse facts that differ between ranks where they must not."""
    views = [
        _view(facts.section)
        | {
            "model": facts.model.name,
            "num_heads": facts.model.num_heads,
            "num_kv_heads": facts.model.num_kv_heads,
            "dtype": facts.computed_dtype,
            "sequence-parallel size": dict(facts.sp_sizes),
        }
        for facts in facts_by_rank
    ]
    _expect_equal(views)


def _view(section: HeterogeneitySection) -> dict[str, Any]:
    return dict(_leaves(section.model_dump(exclude_unset=True), SECTION))


def _expect_equal(views: Sequence[Mapping[str, Any]]) -> None:
    for name in dict.fromkeys(name for view in views for name in view):
        values = [view.get(name, _MISSING) for view in views]
        if any(value != values[0] for value in values):
            by_rank = ranks_by_value((rank, shortened(value)) for rank, value in enumerate(values)).items()
            listed = "; ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in by_rank)
            raise ConfigError(f"the ranks must agree, but {name} is {listed}. Give every rank the same.")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Path and value of everything in nested objects and lists of them, lists of plain values as one."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}")
    elif isinstance(value, Sequence) and any(isinstance(inner, Mapping) for inner in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value


def start_job(world: World, facts: JobFacts, clusters: MeasuredClusters, before: JobStart | None = None) -> JobStart:
    """Have rank 0 decide on the plan, and hand it to all ranks.

    Args:
        world: the ranks of the job.
        facts: from `agree_on_facts`.
        clusters: measured so far; used where the section says ``"cluster": "measure"``, and added to.
        before: an earlier start with the same model. If the section has not changed, its plan stays, whatever has
            become known of the training since: loaders may rely on it already.

    Caller: every rank of the world, once or twice per model.
    Collectives: one `on_all_ranks`; before it, where the live ranks are to be measured, those of `MeasuredClusters.of`.

    Raises:
        HeteroError: the same one on every rank.
        PeerError: another rank failed in a way that is no rule of ds_hetero's.
    """
    model = facts.model
    if before is not None and before.section == facts.section:
        heads = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads}
        check_plan_fits(before.plan, **heads, sp_sizes=facts.sp_sizes)
        return replace(before, facts=facts)
    measured: Cluster | None = None
    if depends_on_measuring(facts, world.size):
        measured = clusters.of(world, facts)
    decision: Decision | None = None
    on_host = default_device().type == "cpu"

    def decide_on_rank_0() -> tuple[Plan, tuple[float, ...] | None] | None:
        nonlocal decision
        if world.rank > 0:
            return None
        decision = decide(facts, world.size, measured=measured, on_host=on_host)
        return decision.plan, decision.zero_weights

    decided = world.on_all_ranks(decide_on_rank_0)[0]
    assert decided is not None
    start = JobStart(facts=facts, plan=decided[0], zero_weights=decided[1])
    if decision is None:
        return start
    return replace(start, forecasts=decision.forecasts, no_forecast_reason=decision.no_forecast_reason)


def announce_start(start: JobStart) -> None:
    """Say that the engine is on, and what is predicted of the plan; for rank 0.

    Args:
        start: of the job.
    """
    announce(f"on, {plan_text(start.plan, start.section)}")
    if start.forecasts:
        announce(f"the schedule\n{forecast_text(start.forecasts)}")
    elif start.no_forecast_reason:
        announce(f"no prediction of the step time: {start.no_forecast_reason}")
    if start.section.replan.enabled and all(schedule.sp_size == 1 for schedule in start.plan.schedules):
        announce(
            '"replan" changes nothing here: it moves tokens between the ranks of a replica, and every replica is one '
            'rank. "replan": {"report_only": true} names slow ranks, and "ds-hetero replicas" shares out samples.'
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


def agree_on_replica_batches(world: World, read: Callable[[], HeterogeneitySection | None]) -> ReplicaBatches | None:
    """Return this rank's batches where the replicas of the section's plan take different ones.

    They are needed before there is a model.

    Args:
        world: the ranks of the job.
        read: returns the section; what it raises on any rank is raised on all.

    Caller: every rank of the world.
    Collectives: one `on_all_ranks`.

    Raises:
        HeteroError: as `start_job`.
    """

    def plan_of_rank_0() -> Plan | None:
        section = read()
        if section is None or world.rank > 0 or section.parallel == "full":
            return None
        return replicas_in_file(section, world.size)

    plan = world.on_all_ranks(plan_of_rank_0)[0]
    if plan is None or plan.batch_split is None:
        return None
    place = plan.place_of(world.rank)
    assert place is not None
    return ReplicaBatches(plan.batch_split, place[0])
