"""Start a job: all ranks read and compare section and facts, and rank 0 decides on the plan for all of them.

    request = agree_on_request(world, read_section)            # the section, parsed once, and its plan file, read once
    facts = agree_on_facts(world, read)                        # every rank reads, all compare
    start = start_job(world, facts, clusters, plan=request.plan)  # of replicas or pipelines, the same on every rank

Every rank stops with the same message, before any of them acts, if one rank finds a fault. The capabilities of the
devices are compared as well. Only rank 0 reads schedule and cluster files, searches and predicts. Nothing here knows a
framework or keeps state: a job that goes on with other ranks is started again, with another `World`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ds_hetero.cluster import Cluster, load_cluster
from ds_hetero.common.announce import announce
from ds_hetero.common.atomic_writing import write_whole
from ds_hetero.common.private_files import make_cache_folder
from ds_hetero.common.reading import JsonDict, JsonObject, shortened
from ds_hetero.common.text import ranks_by_value, ranks_text
from ds_hetero.decision.batches import plan_of_batches
from ds_hetero.decision.chosen_text import (
    chosen_pipelines_text,
    chosen_schedules_text,
    kept_attention_lines,
    ring_gradient_lines,
)
from ds_hetero.decision.decide import JobStart, decide, depends_on_measuring
from ds_hetero.decision.decide_pipelines import check_pipeline_section, idle_keys
from ds_hetero.decision.expert_weights import experts_text
from ds_hetero.decision.facts import JobFacts, TrainingFacts
from ds_hetero.decision.other_kernels import other_kernel_lines
from ds_hetero.decision.resolve import (
    check_plan_fits,
    given_plan,
    is_of_pipelines,
    needs_planner,
    replica_size,
    sp_size_of,
)
from ds_hetero.decision.start_text import forecast_text, pipelines_text, searched_text
from ds_hetero.errors import ConfigError
from ds_hetero.job.bf16_support import device_without_bf16, dtype_of, expect_native_bf16
from ds_hetero.planner.published.hetero_ring import FORMULA, LUT, table_text
from ds_hetero.profiler.cache import cache_folder, describe_age
from ds_hetero.profiler.kernel_probe import profile_cached
from ds_hetero.reporting.run_file import expect_writable
from ds_hetero.runtime.architectures import expect_built_for
from ds_hetero.runtime.attention.kernels import AttentionKernel, rates_of, select
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.devices import collectives_library, default_device, device_memory_bytes, has_native_bf16
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.values.baselines import STRATEGIES
from ds_hetero.values.deprecated_keys import deprecation_lines
from ds_hetero.values.plans import BatchSplit, Plan
from ds_hetero.values.schedule import Schedule
from ds_hetero.values.section import SECTION, HeterogeneitySection, KernelName, KernelWish

logger = logging.getLogger(__name__)

T = TypeVar("T")
_MISSING = "missing"  # the value of a key on ranks that lack the key
_DEFAULT_HEAD_DIM = 128  # for a model whose configuration has none; that of Llama and Qwen
_MAX_LISTED = 8  # groups of a schedule, and replicas of a job, that a line lists; chosen, never measured


@dataclass(frozen=True)
class World:
    """This rank and the number of ranks, with `on_all_ranks`, which raises an error of one rank on all of them."""

    rank: int
    size: int

    @classmethod
    def current(cls) -> World:
        """Return this rank in the default process group; rank 0 of 1 without a process group."""
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else cls(0, 1)

    def on_all_ranks(self, compute: Callable[[], T]) -> list[T]:
        """See `ds_hetero.runtime.collectives.on_all_ranks`."""
        return on_all_ranks(compute)


class ClusterCache:
    """Measurements of the live ranks, cached.

    Models with the same kernel, data type, head size and soft cap share one cluster.
    """

    def __init__(self) -> None:
        self._clusters: dict[tuple[int, str, str, int | None, float | None], Cluster] = {}

    @waiting_for_peers("measuring the ranks")
    def measure(self, world: World, facts: JobFacts) -> Cluster:
        """Return the cluster of the live ranks, measured as the job will train.

        Args:
            facts: facts of the job, of which kernel, data type, head size and soft cap are used.

        Caller: every rank of the world.
        Collectives: the first time, those of `ds_hetero.profiler.cache.measure_cached`.
        """
        request = facts.section.attention
        head_dim, softcap = facts.model.head_dim, facts.model.softcap
        key = world.size, dtype_of(facts), str(request), head_dim, softcap  # the same on every rank
        if key not in self._clusters:
            kernel = requested_kernel(request, world.rank)
            content, is_new = profile_cached(getattr(torch, dtype_of(facts)), kernel, head_dim, softcap)
            self._clusters[key] = load_cluster(content)
            if world.rank == 0:
                announce(f"{world.size} ranks, {describe_age(content, is_new)}")
        return self._clusters[key]


def agree_on_facts(
    world: World, read: Callable[[], JobFacts], *, has_kernel: bool = True, in_pipelines: bool = False
) -> JobFacts:
    """Read the facts of the job on every rank and compare them.

    Args:
        read: returns this rank's facts; an error that it raises on any rank is raised on all.
        has_kernel: whether an attention kernel of ours will run, which must work on every rank.
        in_pipelines: whether the model is divided into stages of pipelines.

    Caller: every rank of the world.
    Collectives: one `on_all_ranks`.

    Raises:
        HeteroError: the same one on every rank.
        PeerError: another rank failed with an error that is not a `HeteroError`.
    """

    def examine() -> tuple[JobFacts, str | None, str, str, str]:
        expect_built_for(default_device())
        facts = read()
        if world.rank == 0 and facts.section.report is not None:
            expect_writable(facts.section.report)
        if has_kernel:
            check_facts(facts, world.size, world.rank)
        without_bf16 = device_without_bf16(facts, default_device())
        capabilities = describe_capabilities(facts, world.rank) if world.size > 1 else ""
        rates = _attention_rates(facts, world.rank) if has_kernel else ""
        return facts, without_bf16, device_name(), capabilities, rates

    reports = world.on_all_ranks(examine)
    facts_by_rank, without_bf16, devices, capabilities, rates = zip(*reports, strict=True)
    _expect_equal([_compared_facts(facts) for facts in facts_by_rank])
    expect_native_bf16(facts_by_rank[0], without_bf16, in_pipelines=in_pipelines)
    if has_kernel:
        expect_known_devices(facts_by_rank[0].section.attention, devices)
    for line in capability_lines(capabilities) if world.rank == 0 else ():
        announce(line)
    facts: JobFacts = facts_by_rank[world.rank]
    return replace(facts, attention_rates=rates) if any(rates) else facts


def check_facts(facts: JobFacts, world_size: int, rank: int = 0) -> None:
    """Refuse facts that cannot work, as far as this rank can see by itself, before anything is measured.

    Raises:
        ConfigError: see `expect_kernel`; or the world cannot be divided into replicas of the requested size.
        ModelError: the planner is to search for a schedule, and no cost model describes the model.
    """
    if needs_planner(facts.section) and sp_size_of(facts.sp_sizes) != 1:
        facts.model.expect_spec()
    if facts.section.schedule in STRATEGIES:
        replica_size(facts.sp_sizes, world_size)
    expect_kernel(facts, rank)


def expect_kernel(facts: JobFacts, rank: int = 0) -> None:
    """Refuse a requested kernel that is unknown, or does not work on this rank's device. Raises `ConfigError`."""
    if requested_kernel(facts.section.attention, rank) is not None:
        _kernel_of(facts, rank)


def _attention_rates(facts: JobFacts, rank: int) -> str:
    """Return the name of the catalogue's rates for the kernel that this rank will run; empty if it has none."""
    if not facts.model.is_split:
        return ""
    device, dtype = default_device(), getattr(torch, dtype_of(facts))
    head_dim = facts.model.head_dim or _DEFAULT_HEAD_DIM
    return rates_of(_kernel_of(facts, rank), device, dtype, head_dim, facts.model.softcap)


def _kernel_of(facts: JobFacts, rank: int) -> AttentionKernel:
    """Return the kernel that this rank will run. Raises `ConfigError`: none works here."""
    device = torch.device(default_device().type)
    dtype = getattr(torch, dtype_of(facts))
    head_dim = facts.model.head_dim or _DEFAULT_HEAD_DIM
    return select(device, dtype, head_dim, facts.model.softcap, requested_kernel(facts.section.attention, rank))


def device_name() -> str:
    """Return the maker's name of this rank's device; ``"CPU"`` for a CPU."""
    device = default_device()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def requested_kernel(requested: KernelWish, rank: int) -> KernelName | None:
    """Return the kernel that the section requests for this rank; None lets the rank choose its best.

    Args:
        requested: one kernel for all ranks, a list by rank, or a mapping from parts of device names.

    Raises:
        ConfigError: the list has no entry for this rank, or several keys of the mapping fit its device.
    """
    if isinstance(requested, list):
        if rank >= len(requested):
            raise ConfigError(
                f'"{SECTION}.attention" names kernels for {len(requested)} ranks, and this is rank {rank}. Give it one '
                "entry per rank."
            )
        return requested[rank]
    if not isinstance(requested, dict):
        return requested
    matching_keys = [part for part in requested if _is_part_of(part, device_name())]
    if len(matching_keys) > 1:
        raise ConfigError(
            f'"{SECTION}.attention": {" and ".join(map(repr, matching_keys))} are both parts of the name of rank '
            f"{rank}'s device, {device_name()}. Make the keys longer, so that one fits."
        )
    return requested[matching_keys[0]] if matching_keys else None


def expect_known_devices(requested: KernelWish, names: Sequence[str]) -> None:
    """Raise `ConfigError` for a list with more or fewer kernels than ranks, or for a key that matches no device."""
    if isinstance(requested, list) and len(requested) != len(names):
        raise ConfigError(
            f'"{SECTION}.attention" has {len(requested)} entries; there are {len(names)} ranks. '
            "Give it one entry per rank."
        )
    for part in requested if isinstance(requested, dict) else ():
        if not any(_is_part_of(part, name) for name in names):
            raise ConfigError(
                f'"{SECTION}.attention": "{part}" is not part of any device\'s name. They are '
                f"{', '.join(dict.fromkeys(names))}."
            )


def _is_part_of(part: str, name: str) -> bool:
    """Return True if ``part`` occurs in a device's name; case is ignored."""
    return part.lower() in name.lower()


def describe_capabilities(facts: JobFacts, rank: int) -> str:
    """Describe this rank's capabilities for the job in one line. Raises `ConfigError`: no kernel works here."""
    device = default_device()
    parts = [f"{device_name()} ({_architecture(device)})" if device.type == "cuda" else device_name()]
    if facts.model.is_split:
        parts.append(f"attention by {_kernel_of(facts, rank).name}")
    parts.append("bfloat16 native" if has_native_bf16(device) else "bfloat16 not native")
    parts.append(f"torch {torch.__version__}")
    if device.type == "cuda":
        parts.append(" ".join(collectives_library()))
    return ", ".join(parts)


def capability_lines(by_rank: Sequence[str]) -> list[str]:
    """Return a line for each set of ranks with the same `describe_capabilities`; none if all ranks are alike."""
    kinds = ranks_by_value(enumerate(by_rank))
    return [f"{ranks_text(ranks)}: {text}" for text, ranks in kinds.items()] if len(kinds) > 1 else []


def _architecture(device: torch.device) -> str:
    """Return a GPU's architecture by its maker's name, such as "sm_86" or "gfx942"."""
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName)
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def expect_same_sections(sections: Sequence[HeterogeneitySection | None]) -> None:
    """Refuse sections that differ between ranks. Raises `ConfigError`: names key, ranks and values."""
    keys_by_rank: list[JsonDict] = []
    for section in sections:
        keys_by_rank.append({} if section is None else dict(_leaves(section.model_dump(exclude_unset=True), SECTION)))
    _expect_equal(keys_by_rank)


def _compared_facts(facts: JobFacts) -> JsonDict:
    """Return the facts that must be equal on all ranks, as the section must be."""
    return {
        "model": facts.model.name,
        "num_heads": facts.model.num_heads,
        "num_kv_heads": facts.model.num_kv_heads,
        "dtype": dtype_of(facts),
        "sequence-parallel size": dict(facts.sp_sizes),
    }


def _expect_equal(values_by_rank: Sequence[JsonObject]) -> None:
    """Refuse values that differ between ranks. Raises `ConfigError`: names the value and the ranks.

    Args:
        values_by_rank: of each rank, the values by name.
    """
    names: dict[str, None] = {}  # of all ranks, in order of their first use
    for values_of_rank in values_by_rank:
        names.update(dict.fromkeys(values_of_rank))
    for name in names:
        values = [values_of_rank.get(name, _MISSING) for values_of_rank in values_by_rank]
        if any(value != values[0] for value in values):
            ranks_of_value = ranks_by_value((rank, shortened(value)) for rank, value in enumerate(values))
            listed = "; ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in ranks_of_value.items())
            raise ConfigError(f"the ranks must agree, but {name} is {listed}. Give every rank the same.")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield path and value of every leaf of nested objects; a list of plain values is one leaf.

    ``{"a": {"b": 1, "c": [2, 3]}}`` yields ``a.b``, 1 and ``a.c``, [2, 3].
    """
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}")
    elif isinstance(value, Sequence) and any(isinstance(inner, Mapping) for inner in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value


def start_job(
    world: World,
    facts: JobFacts,
    clusters: ClusterCache,
    before: JobStart | None = None,
    *,
    plan: Plan | None = None,
    read_impossible_stage_kinds: Callable[[], Mapping[str, str]] = dict,
) -> JobStart:
    """Decide on the plan on rank 0, and send it to all ranks.

    Args:
        clusters: measurements so far; used if the section says ``"cluster": "measure"``, and added to.
        before: result of an earlier start with the same model; None at the first start. If the section has not changed,
            its plan stays, even if more facts of the training are known now: loaders may use that plan already.
        plan: from the section's file, see `Request`.
        read_impossible_stage_kinds: returns `PipelineFacts.impossible_stage_kinds`; called on rank 0.

    Caller: every rank of the world, once or twice per model.
    Collectives: one `on_all_ranks`; before it, if the live ranks are measured, those of `ClusterCache.measure`.

    Raises:
        HeteroError: the same one on every rank.
        PeerError: another rank failed with an error that is not a `HeteroError`.
    """
    model = facts.model
    if before is not None and before.section == facts.section:
        heads = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads}
        check_plan_fits(before.plan, **heads, sp_sizes=facts.sp_sizes)
        return replace(before, facts=facts)
    has_pipelines = plan is not None and is_of_pipelines(plan, facts.section)
    measured: Cluster | None = None
    if not has_pipelines and depends_on_measuring(facts, world.size):
        measured = clusters.measure(world, facts)
    start: JobStart | None = None
    on_host = default_device().type == "cpu"

    def decide_on_rank_0() -> tuple[Plan, tuple[float, ...] | None, tuple[float, ...] | None, bool, bool] | None:
        nonlocal start
        if world.rank > 0:
            return None
        start = decide(
            facts,
            world.size,
            measured=measured,
            on_host=on_host,
            plan=plan,
            impossible_stage_kinds=read_impossible_stage_kinds(),
        )
        return start.plan, start.zero_weights, start.expert_weights, start.is_predicted, start.keeps_attention

    decision = world.on_all_ranks(decide_on_rank_0)[0]
    if start is None:
        assert decision is not None
        plan, weights, expert_weights, is_predicted, keeps_attention = decision
        start = JobStart(
            facts=facts,
            plan=plan,
            zero_weights=weights,
            expert_weights=expert_weights,
            is_predicted=is_predicted,
            keeps_attention=keeps_attention,
        )
    return start


def announce_start(start: JobStart) -> None:
    """Announce that the engine is on, with the plan and its prediction; on rank 0. Records of level DEBUG say more.

    Pipelines that were searched for are saved as a file, whose path is announced: a later job may name it as its
    schedule.
    """
    for line in deprecation_lines(start.section):
        announce(line)
    if start.is_of_pipelines:
        kept = None if start.searched is None else _saved_plan_text(_save_plan(start.plan))
        for text in (
            chosen_pipelines_text(start.plan, start.searched, kept),
            *idle_keys(start.section, start.plan),
            *ring_gradient_lines(start),
        ):
            announce(text)
        if start.searched is not None:
            logger.debug("%s\n%s", pipelines_text(start.plan), searched_text(start.searched))
        return
    announce(f"on, {plan_text(start.plan, start.section)}")
    if start.experts_choice:
        announce(start.experts_choice)
    if start.expert_weights is not None:
        announce(experts_text(start.expert_weights, start.facts, start.plan, start.forecasts))
    for line in (*kept_attention_lines(start), *ring_gradient_lines(start), *other_kernel_lines(start)):
        announce(line)
    if start.forecasts and start.section.strategy in (LUT.name, FORMULA.name):
        announce(table_text(start.forecasts[0].cost))
    if start.forecasts:
        announce(chosen_schedules_text(start.forecasts))
        logger.debug("the schedule\n%s", forecast_text(start.forecasts))
    elif start.no_forecast_reason:
        announce(f"no prediction of the step time: {start.no_forecast_reason}")
    if (
        start.section.replan.enabled
        and not start.section.sets_batch_by_rank
        and all(schedule.sp_size == 1 for schedule in start.plan.schedules)
    ):
        announce(
            '"replan" changes nothing here: it moves tokens between the ranks of a replica, and every replica is one '
            'rank. "replan": {"report_only": true} names slow ranks, and "ds-hetero replicas" shares out samples.'
        )


def plan_text(plan: Plan, section: HeterogeneitySection) -> str:
    """Describe a plan of replicas: ``4 ranks, schedule four_ranks.json: groups 2, heads 6+2 | 5+3, tokens ...``."""
    num_ranks = len(plan.ranks)
    ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
    if section.sets_batch_by_rank and plan.batch_split is not None:
        sizes = [str(size) for size in plan.batch_split.micro_batch_sizes]
        return f"{ranks}, whole samples by rank: {' | '.join(_first_few(sizes))} in a micro-batch"
    source = section.strategy if isinstance(section.strategy, str) else "given inline"
    if source.endswith(".json"):
        source = Path(source).name
    replicas_of_shape: dict[Schedule, list[int]] = {}  # replicas with the same schedule, up to the first rank
    for number, schedule in enumerate(plan.schedules):
        replicas_of_shape.setdefault(schedule.shifted(0), []).append(number)
    count = f"{len(plan.pipelines)} replicas, " if len(plan.pipelines) > 1 else ""
    return f"{ranks}, {count}schedule {source}: {_shapes_text(replicas_of_shape)}"


def _first_few(texts: Sequence[str]) -> list[str]:
    """Return the first `_MAX_LISTED` texts, and ``"3 more"`` for the others."""
    num_more = len(texts) - _MAX_LISTED
    more = [f"{num_more} more"] if num_more > 0 else []
    return [*texts[:_MAX_LISTED], *more]


def _shapes_text(replicas_of_shape: dict[Schedule, list[int]]) -> str:
    """Return ``replica 0, 1: groups ...; replica 2: groups ...``; without numbers if all replicas are alike."""
    if len(replicas_of_shape) == 1:
        return _shape_text(next(iter(replicas_of_shape)))
    texts = []
    for shape, numbers in replicas_of_shape.items():
        texts.append(f"replica {', '.join(map(str, numbers))}: {_shape_text(shape)}")
    return "; ".join(_first_few(texts))


def _shape_text(schedule: Schedule) -> str:
    """Return ``groups 2, heads 6+2 | 5+3, tokens 4:1 | 3:2``, groups in ring order."""
    heads = ["+".join(map(str, group.heads)) for group in schedule.ring_groups]
    tokens = [":".join(f"{weight:.4g}" for weight in group.tokens) for group in schedule.ring_groups]
    heads_text, tokens_text = " | ".join(_first_few(heads)), " | ".join(_first_few(tokens))
    return f"groups {len(schedule.groups)}, heads {heads_text}, tokens {tokens_text}"


def _save_plan(plan: Plan) -> Path | None:
    """Write a plan into the user's cache folder, completely or not at all; None if that fails."""
    folder = cache_folder()
    if folder is None:
        return None
    path = folder / "plans" / f"{plan.fingerprint:016x}.json"
    try:
        make_cache_folder(folder)
        make_cache_folder(path.parent)
        write_whole(path, json.dumps(plan.to_dict(), indent=1))
    except (OSError, ConfigError) as error:
        logger.warning("cannot keep the plan in %s: %s", path, error)
        return None
    return path


def _saved_plan_text(path: Path | None) -> str:
    """Return the line that says where the plan was saved, and how a later job uses it."""
    if path is None:
        return "kept:       nowhere; handle.plan.to_dict() is the content of its file"
    return f'kept:       {path}; add it as "schedule" to skip the search'


@dataclass(frozen=True)
class ReplicaBatches:
    """The batches of one replica, if the replicas of a job take different batches."""

    split: BatchSplit  # the batches of all replicas
    replica_id: int  # index of this rank's replica


@dataclass(frozen=True)
class Request:
    """The user's request to a job: the section, and the plan that it contains or names."""

    section: HeterogeneitySection | None  # None if the configuration has no section, or switches it off
    plan: Plan | None  # from the section, its file or its batches; None if the planner is to search for one

    @property
    def is_of_pipelines(self) -> bool:
        """Whether the model is divided into stages of pipelines, by this plan or by the one that will be searched."""
        return self.section is not None and is_of_pipelines(self.plan, self.section)

    def batches_of(self, rank: int) -> ReplicaBatches | None:
        """Return the batches of a rank if the replicas of the plan take different ones; None otherwise.

        Loaders need them before a model exists.
        """
        if self.plan is None or self.plan.batch_split is None or self.is_of_pipelines:
            return None
        place = self.plan.place_of(rank)
        assert place is not None
        return ReplicaBatches(self.plan.batch_split, place[0])


@waiting_for_peers("reading what the section asks for")
def agree_on_request(
    world: World, read: Callable[[], HeterogeneitySection | None], training: TrainingFacts | None = None
) -> Request:
    """Read the section on every rank and compare it; rank 0 also reads the plan that the section names.

    Args:
        read: returns the section; an error that it raises on any rank is raised on all.
        training: from the configuration, with the global batch.

    Caller: every rank of the world.
    Collectives: one `on_all_ranks`, or two.

    Raises:
        HeteroError: on every rank, when sections are wrong or differ, the plan does not fit the world, or its stages do
            not follow a key of the section.
    """

    def read_request() -> Request:
        """Read this rank's section, and on rank 0 the plan that it names."""
        section = read()
        if section is None or world.rank > 0:
            return Request(section, None)
        plan = given_plan(section, world.size)
        if plan is not None and is_of_pipelines(plan, section):
            check_pipeline_section(section)
        return Request(section, plan)

    by_rank = world.on_all_ranks(read_request)
    expect_same_sections([request.section for request in by_rank])
    section = by_rank[0].section
    # With "parallel": "full" the batches of pipelines are the plan's, and "batch" is refused later.
    if section is None or section.batch is None or section.parallel == "full":
        return by_rank[0]
    memory = world.on_all_ranks(device_memory_bytes) if section.batch == "by_speed" else []
    known_memory = memory if all(memory) else []
    return Request(section, plan_of_batches(section.batch, training or TrainingFacts(), world.size, known_memory))
