"""The best job of replicas: every device, or every node, trains as many samples of a batch as its speed allows.

All replicas run equally many micro-batches, so that ``"batch"`` of a job describes them: samples of each rank. In a
micro-batch of n samples replica i trains b_i >= 1 of them in t_i(b_i). The sizes are those with the least maximum: one
sample after the other goes to the replica that ends first with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats
from ds_hetero.common.reading import JsonDict
from ds_hetero.cost import make_cost_model
from ds_hetero.cost.model import CostModel, Prediction
from ds_hetero.cost.workload import Workload
from ds_hetero.planner.jobs.job import Job, JobTask, Refused, does_not_fit_text
from ds_hetero.planner.jobs.kinds import BATCH
from ds_hetero.planner.jobs.quick import micro_batch_and_shared_s, short_search
from ds_hetero.planner.jobs.sequence import MIN_GAIN, cluster_of, ranks_left_out
from ds_hetero.planner.jobs.settings import (
    keeping_attention,
    may_keep_attention,
    offloadings,
    recomputations,
    tilings,
    zero_settings,
)
from ds_hetero.planner.results.planned import Planned
from ds_hetero.values.plans import BatchSplit, Plan
from ds_hetero.values.schedule import Schedule

# Settings of one group of ranks whose replicas are sized. The limit is by group: of three GPUs, one of them small, ten
# settings of all three come before the first of the other two, which may be faster. Chosen, never measured.
_MAX_SIZED_SETTINGS = 10
_MAX_ACCUMULATIONS = 6  # numbers of micro-batches that are tried, few first; chosen, never measured


@dataclass(frozen=True, kw_only=True)
class PlannedBatch(Planned):
    """Samples and schedule of every replica, and their prediction."""

    split: BatchSplit
    predictions: tuple[Prediction, ...]  # of a step of every replica as if it were the slowest
    replica_of_rank: tuple[int, ...]
    ranks_of_replica: tuple[tuple[int, ...], ...]
    shared_s: float  # part of the step in which all replicas exchange gradients and parameters

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """Memory of every rank."""
        need = [0] * len(self.replica_of_rank)
        for ranks, prediction in zip(self.ranks_of_replica, self.predictions, strict=True):
            for rank, size in zip(ranks, prediction.memory_bytes, strict=True):
                need[rank] = size
        return tuple(need)

    @cached_property
    def busy(self) -> dict[int, float]:
        """Share of the step, 0 to 1, in which each rank computes."""
        return {
            rank: min(1.0, (self.predictions[replica].iteration_s - self.shared_s) / self.step_s)
            for rank, replica in enumerate(self.replica_of_rank)
        }

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """Schedules of the replicas, with the ranks of the job."""
        return self.plan.schedules

    def to_dict(self) -> JsonDict:
        """Plain data for ``--json``."""
        return {
            "schedule": self.plan.to_replicas_dict(),
            "batch": list(self.split.micro_batch_sizes),
            "micro_batches": self.split.micro_steps,
            "predicted": {
                "step_s": self.step_s,
                "tokens_per_s": self.tokens_per_s,
                "memory_bytes": list(self.memory_bytes),
                "feasible": True,
            },
            "search_s": self.search_s,
        }


class _Replica(NamedTuple):
    """Cluster and schedule of one replica; all replicas on equal devices have the same schedule."""

    cluster: Cluster
    schedule: Schedule


class _Group(NamedTuple):
    """Ranks of a job, divided into replicas; they are numbered as in the whole cluster."""

    ranks: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...]


class _Setting(NamedTuple):
    """Replicas and settings of a job before its micro-batches are chosen; sorted by a lower bound of the step."""

    least_s: float
    order: int
    group: _Group
    workload: Workload


def best_batch(task: JobTask, rank_sets: Sequence[tuple[int, ...]]) -> Job | Refused:
    """Return the fastest job of replicas over one of the sets of ranks, or why there is none."""
    if task.cluster.num_ranks == 1:
        return Refused(kind=BATCH, reason="there is one GPU")
    if task.batch == 1:
        return Refused(kind=BATCH, reason="one sequence a step cannot be shared as a batch (--micro-batches 8)")
    if task.workload.zero_within:
        return Refused(kind=BATCH, reason="ZeRO inside nodes is for one replica")
    if task.workload.experts is not None:
        return Refused(kind=BATCH, reason="experts are divided among the ranks of one replica")
    search = _BatchSearch(task)
    job = search.best(rank_sets)
    return job or Refused(kind=BATCH, reason=search.why_not)


class _BatchSearch:
    """One search for the fastest job of replicas, with caches of schedules, cost models and times of replicas."""

    def __init__(self, task: JobTask) -> None:
        self._task = task
        self._replicas: dict[object, _Replica | None] = {}
        self._costs: dict[object, CostModel] = {}
        self._lines: dict[object, _Line | None] = {}
        self.why_not = f"a batch of {task.batch} does not fit any number of replicas"

    def best(self, rank_sets: Sequence[tuple[int, ...]]) -> Job | None:
        """Return the fastest job; None if none fits. Offloads are tried only if no job fits without them."""
        groups = list(self._groups(rank_sets))
        for with_offloads in (False, True):
            best: Job | None = None
            settings = sorted(self._settings(groups, with_offloads=with_offloads), key=lambda one: one[:2])
            num_sized: Counter[object] = Counter()
            for setting in settings:
                best_s = inf if best is None else best.step_s
                if setting.least_s >= best_s * (1 - MIN_GAIN):
                    break
                limited = setting.group, setting.workload.keeps_attention
                if num_sized[limited] == _MAX_SIZED_SETTINGS:
                    continue
                num_sized[limited] += 1
                job = self._sized(setting)
                if job is not None and job.step_s < best_s * (1 - MIN_GAIN):
                    best = job
            if best is not None:
                return best
        return None

    def _groups(self, rank_sets: Sequence[tuple[int, ...]]) -> Iterator[_Group]:
        """Yield every set of ranks divided into replicas of one rank, and into replicas of one node."""
        for ranks in rank_sets:
            if len(ranks) <= self._task.batch:
                yield _Group(ranks, tuple((rank,) for rank in ranks))
            by_node: dict[int, list[int]] = {}
            for rank in ranks:
                by_node.setdefault(int(self._task.cluster.node_of_rank[rank]), []).append(rank)
            if 1 < len(by_node) <= self._task.batch and len(by_node) < len(ranks):
                yield _Group(ranks, tuple(tuple(members) for members in by_node.values()))

    def _settings(self, groups: Sequence[_Group], *, with_offloads: bool) -> Iterator[_Setting]:
        """Yield every group under every ZeRO stage, recomputation and offload, with a lower bound of the step."""
        task = self._task
        for group in groups:
            num_replicas = len(group.replicas)
            cluster = cluster_of(task.cluster, group.ranks)
            shares_sequences = num_replicas < len(group.ranks)
            base = replace(
                task.workload,
                micro_batch=1,
                micro_batches=1,
                data_parallel=num_replicas,
                zero_cluster=cluster,
                # Replicas of one rank run the model's own attention, which keeps nothing.
                keep_attention=task.workload.keep_attention and shares_sequences,
            )
            order = 0
            for zero in zero_settings(base, cluster, task.freedom):
                kinds = recomputations(zero, task.freedom)
                if shares_sequences and may_keep_attention(base, task.freedom):
                    kinds += keeping_attention(kinds)
                for recomputed in kinds:
                    works = offloadings(recomputed, cluster, task.freedom) if with_offloads else [recomputed]
                    for work in works:
                        yield _Setting(self._least_s(group, work), order, group, work)
                        order += 1

    def _least_s(self, group: _Group, work: Workload) -> float:
        """Lower bound of a step: perfect balance of all samples, and ZeRO's traffic."""
        rates = 0.0
        shared_s = 0.0
        for members in group.replicas:
            cost = self._cost(members, replace(work, zero_stage=0))
            rates += 1 / (cost.model.num_layers * cost.bound_s)
        first = self._cost(group.replicas[0], work)
        outside = first.outside_blocks_s(np.zeros(first.cluster.num_ranks))
        shared_s = outside.get("zero_s", 0.0)
        least_micro_batch_s = first.model.num_layers * first.floor_s
        return max(self._task.batch / rates, least_micro_batch_s) + shared_s

    def _sized(self, setting: _Setting) -> Job | None:
        """Return the job with the fewest micro-batches, and then the fewest tiles, that fits; None if none fits."""
        num_replicas, batch = len(setting.group.replicas), self._task.batch
        counts = [count for count in range(1, batch // num_replicas + 1) if batch % count == 0]
        if not self._task.freedom.may_choose("micro_batch"):
            samples = num_replicas * self._task.workload.micro_batch
            counts = [batch // samples] if batch % samples == 0 else []
        # The key "batch" rules "tile_tokens" out. Replicas of several ranks have schedules instead, and may have tiles.
        has_schedules = num_replicas < len(setting.group.ranks)
        tiled = tilings(setting.workload, self._task.freedom) if has_schedules else [setting.workload]
        for count in counts[:_MAX_ACCUMULATIONS]:
            for work in tiled:
                job = self._with_micro_batches(setting.group, replace(work, micro_batches=count), batch // count)
                if job is not None:
                    return job
        return None

    def _with_micro_batches(self, group: _Group, work: Workload, samples: int) -> Job | None:
        """Return the job whose replicas together train ``samples`` samples a micro-batch; None if they do not fit."""
        sizes = self._sizes(group, work, samples)
        if sizes is None:
            return None
        predictions = []
        for members, size in zip(group.replicas, sizes, strict=True):
            replica = self._replica(members, work)
            assert replica is not None
            predictions.append(self._cost(members, replace(work, micro_batch=size)).predict(replica.schedule))
        short = next((prediction for prediction in predictions if not prediction.feasible), None)
        if short is not None:
            self.why_not = does_not_fit_text(short.reason)
            return None
        return self._job(group, work, sizes, predictions)

    def _job(self, group: _Group, work: Workload, sizes: tuple[int, ...], predictions: Sequence[Prediction]) -> Job:
        """Make the job of replicas that fit into memory, from the samples (``sizes``) and the prediction of each."""
        task = self._task
        number_of_rank = {rank: number for number, rank in enumerate(sorted(group.ranks))}
        members_of = tuple(tuple(number_of_rank[rank] for rank in members) for members in group.replicas)
        replica_of_rank = [0] * len(group.ranks)
        schedules = []
        for index, members in enumerate(members_of):
            for rank in members:
                replica_of_rank[rank] = index
            replica = self._replica(group.replicas[index], work)
            assert replica is not None
            schedules.append(replica.schedule.shifted(members[0]))
        split = BatchSplit(micro_batch_sizes=sizes, micro_batches=(work.micro_batches,) * len(sizes))
        shared_s = predictions[0].parts_s.get("zero_s", 0.0)
        step_s = max(prediction.iteration_s for prediction in predictions)
        planned = PlannedBatch(
            plan=Plan.of_replicas(schedules, split),
            search_s=0.0,
            step_s=step_s,
            tokens=work.seq_len * task.batch,
            idle_ranks=(),
            split=split,
            predictions=tuple(predictions),
            replica_of_rank=tuple(replica_of_rank),
            ranks_of_replica=members_of,
            shared_s=shared_s,
        )
        return Job(
            kind=BATCH,
            cluster=cluster_of(task.cluster, group.ranks),
            whole_cluster=task.cluster,
            left_out=ranks_left_out(task.cluster, group.ranks),
            workload=work,
            planned=planned,
            limit=_limit(planned),
        )

    # --- samples of replicas

    def _sizes(self, group: _Group, work: Workload, samples: int) -> tuple[int, ...] | None:
        """Return the samples of every replica in a micro-batch; None if they do not fit into memory."""
        lines = []
        for members in group.replicas:
            line = self._line(members, work, samples)
            if line is None:
                return None
            lines.append(line)
        sizes = [1] * len(lines)
        if sum(line.most for line in lines) < samples:
            self.why_not = (
                f"does not fit: all GPUs together hold {sum(line.most for line in lines)} sequences at a time"
            )
            return None
        for _ in range(samples - len(sizes)):
            ends = [line.of(size + 1) for line, size in zip(lines, sizes, strict=True)]
            sizes[ends.index(min(ends))] += 1
        return tuple(sizes)

    def _line(self, members: tuple[int, ...], work: Workload, samples: int) -> _Line | None:
        """Return a replica's time as a function of its samples, up to the most that fit; None if not even one fits."""
        replica = self._replica(members, work)
        if replica is None:
            return None
        # Groups share the lines of equal replicas, although ZeRO's traffic of each group is its own: a line only
        # decides how many samples a replica gets. The time of the job is predicted with the group's own traffic.
        key = (self._key(members), replace(work, zero_cluster=None), samples)
        if key not in self._lines:
            self._lines[key] = self._line_through_two_points(members, work, replica.schedule, samples)
        return self._lines[key]

    def _line_through_two_points(
        self, members: tuple[int, ...], work: Workload, schedule: Schedule, samples: int
    ) -> _Line | None:
        """Continue a replica's predicted time and memory from one and two samples; None if one sample does not fit."""
        one_s, one_bytes, capacity = self._time_and_memory(members, replace(work, micro_batch=1), schedule)
        if (one_bytes > capacity).any():
            replica_cost = self._cost(members, replace(work, micro_batch=1))
            self.why_not = does_not_fit_text(replica_cost.predict(schedule).reason)
            return None
        two_s, two_bytes, _ = self._time_and_memory(members, replace(work, micro_batch=2), schedule)
        grows = np.maximum(two_bytes - one_bytes, 1.0)
        most = 1 + int(np.min((capacity - one_bytes) // grows))
        return _Line(one_s, max(two_s - one_s, 0.0), min(most, samples))

    def _time_and_memory(
        self, members: tuple[int, ...], work: Workload, schedule: Schedule
    ) -> tuple[float, Floats, Floats]:
        """Return the seconds of a micro-batch with its share of the step's exchange, and each rank's need and capacity.

        Memory is in bytes, ``[D]``.
        """
        cost = self._cost(members, work)
        grouping, tokens_D, heads_D = cost.arrays(schedule)
        micro_batch_s, shared_s = micro_batch_and_shared_s(cost, grouping, tokens_D, heads_D)
        return (
            float(micro_batch_s + shared_s / work.micro_batches),
            cost.memory_bytes(grouping, tokens_D, heads_D),
            cost.capacity_bytes_D,
        )

    # --- kinds of replicas

    def _key(self, members: tuple[int, ...]) -> object:
        """Return a cache key, equal for replicas whose devices, link inside the node and host memory are equal."""
        cluster = self._task.cluster
        node = cluster.nodes[int(cluster.node_of_rank[members[0]])]
        return (tuple(cluster.devices[rank] for rank in members), replace(node.link, name=""), node.host_memory_bytes)

    def _cost(self, members: tuple[int, ...], work: Workload) -> CostModel:
        """Return the cost model of a replica."""
        key = (self._key(members), work)
        if key not in self._costs:
            cluster = cluster_of(self._task.cluster, members)
            self._costs[key] = make_cost_model("calibrated", cluster, self._task.model, work)
        return self._costs[key]

    def _replica(self, members: tuple[int, ...], work: Workload) -> _Replica | None:
        """Return the schedule of a replica; None if a short search finds none that fits.

        A single rank has one schedule for all settings; that of a node depends on recomputation and the ZeRO stage.
        """
        settings = (work.activation_checkpointing, work.keeps_attention, work.zero_stage)
        key = (self._key(members), len(members) > 1 and settings)
        if key not in self._replicas:
            cost = self._cost(members, work)
            schedule = short_search(cost)
            self._replicas[key] = None if schedule is None else _Replica(cost.cluster, schedule)
        return self._replicas[key]


class _Line(NamedTuple):
    """Time of a replica's micro-batch, linear in its samples, and the most samples that fit into its memory."""

    one_s: float
    further_s: float  # of every sample after the first
    most: int

    def of(self, samples: int) -> float:
        """Seconds of a micro-batch; infinite if it does not fit."""
        return self.one_s + (samples - 1) * self.further_s if samples <= self.most else inf


def _limit(planned: PlannedBatch) -> str:
    """Say what limits the speed of replicas: their exchange, or the slowest of them."""
    if planned.shared_s > planned.step_s / 3:
        return f"gradients and parameters between GPUs take {100 * planned.shared_s / planned.step_s:.0f} % of a step"
    busy = [planned.busy[ranks[0]] for ranks in planned.ranks_of_replica]
    return f"replicas compute for {100 * min(busy):.0f} to {100 * max(busy):.0f} % of a step"
