"""Complete the plan of a search for execution: micro-batches in flight, ranks, memory, and the `Plan` of a plan file.

By default a stage has as many micro-batches in flight as 1F1B needs: the number of stages from this one to the last.
With more micro-batches in flight slow sends are hidden, where memory allows them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ds_hetero.common.reading import JsonDict
from ds_hetero.cost.stages.stage import DeviceBlock, PlacedPipeline, StageCosts
from ds_hetero.planner.pipeline_search.block_ranks import ranks_of_blocks
from ds_hetero.planner.pipeline_search.block_times import stage_options
from ds_hetero.planner.pipeline_search.cuts import LayerCut
from ds_hetero.planner.pipeline_search.evaluate import PlanCandidate, Shape
from ds_hetero.values.plans import Pipeline, Plan, PlannedModel, Stage, ZeroOwners
from ds_hetero.values.plans.timetable import default_in_flight
from ds_hetero.values.schedule import Schedule

# Chosen, never measured.
MORE_IN_FLIGHT = (1, 3)  # numbers of additional micro-batches in flight that are tried
LEAST_KEEPING_GAIN = 1e-3  # share of a pipeline's time that additional micro-batches in flight must save
NEAR_CRITICAL_FRACTION = 0.9  # pipelines that take less than this share of the slowest one's time keep the default


@dataclass(frozen=True, slots=True)
class Finished:
    """A plan with its micro-batches in flight, and its times with them."""

    candidate: PlanCandidate  # evaluated with exact times
    in_flight: tuple[tuple[int, ...], ...]  # micro-batches in flight, by pipeline and stage
    pipeline_s: tuple[float, ...]  # time of every pipeline
    step_s: float  # time of the whole step

    @property
    def slowest_pipeline_s(self) -> float:
        """Time of the slowest pipeline."""
        return max(self.pipeline_s)

    @property
    def makeups(self) -> list[list[int]]:
        """Indices of the pipelines, grouped by equal kinds of devices, layers and micro-batches."""
        indices: dict[object, list[int]] = {}
        for i, pipeline in enumerate(self.candidate.placed):
            kinds = tuple(block._replace(node=0) for block in pipeline.blocks)
            batches = pipeline.layers, pipeline.micro_batch_size, pipeline.micro_batches
            indices.setdefault((kinds, *batches), []).append(i)
        return list(indices.values())


def finish(costs: StageCosts, candidate: PlanCandidate) -> Finished:
    """Choose the micro-batches in flight of every stage, and time every pipeline with them."""
    # Pipelines with equal layers and micro-batches are timed once.
    pairs = list(zip(candidate.cuts, candidate.micro_batches, strict=True))
    choices: dict[tuple[LayerCut, int], _InFlight] = {}
    for cut, number in dict.fromkeys(pairs):
        choices[cut, number] = _InFlight(default_in_flight(len(cut.layers)), costs.pipeline_s(*cut.times, number))
    # Other cost models keep 1F1B's default. With weighted owners, the weights already use the memory that the default
    # leaves free; published cost models know the default alone.
    if costs.owners == "even":
        critical_s = NEAR_CRITICAL_FRACTION * max(choice.pipeline_s for choice in choices.values())
        for (cut, number), shape in dict(zip(pairs, candidate.shapes, strict=True)).items():
            default = choices[cut, number]
            if default.pipeline_s >= critical_s:
                limits = max_in_flight(costs, shape, cut, len(candidate.shapes))
                choices[cut, number] = _best_in_flight(costs, cut, number, limits, default)
    in_flight = [choices[pair] for pair in pairs]
    pipeline_s = [choice.pipeline_s for choice in in_flight]
    slowest = candidate.cuts[pipeline_s.index(max(pipeline_s))]
    return Finished(
        candidate=candidate,
        in_flight=tuple(choice.by_stage for choice in in_flight),
        pipeline_s=tuple(pipeline_s),
        step_s=costs.step_s(max(pipeline_s), candidate.sync, slowest.overlap_s),
    )


class _InFlight(NamedTuple):
    """Micro-batches in flight of one pipeline."""

    by_stage: tuple[int, ...]
    pipeline_s: float  # the pipeline's time with them


def max_in_flight(costs: StageCosts, shape: Shape, cut: LayerCut, pipelines: int) -> tuple[int, ...]:
    """Return by stage how many micro-batches in flight memory allows, never more than on the stage before.

    The default of 1F1B is always allowed, since the search has checked it.
    """
    options = stage_options(costs, shape.blocks, shape.micro_batch_size, pipelines)
    assert options is not None
    last = len(cut.layers) - 1
    limits = []
    for j, (option, layers) in enumerate(zip(options, cut.layers, strict=True)):
        default = last + 1 - j
        limits.append(max(default, option.max_in_flight(layers, j == 0, j == last)))
    return tuple(accumulate(limits, min))


def _best_in_flight(
    costs: StageCosts, cut: LayerCut, micro_batches: int, limits: Sequence[int], default: _InFlight
) -> _InFlight:
    """Return the micro-batches in flight with the shortest time: those of the default, or a few more.

    Four stages have 4, 3, 2 and 1 by default. With one more each they have 5, 4, 3 and 1, since the last stage runs
    every backward at once. A send that takes as long as a forward is then hidden; it costs the activations of one more
    micro-batch.

    Args:
        limits: micro-batches in flight that memory allows, by stage.
    """
    if limits == default.by_stage:
        return default
    best = default
    for more in MORE_IN_FLIGHT:
        in_flight = []
        for number, limit in zip(default.by_stage[:-1], limits[:-1], strict=True):
            in_flight.append(max(min(number + more, limit, micro_batches), number))
        by_stage = (*in_flight, 1)
        if by_stage == default.by_stage:
            continue
        seconds = costs.pipeline_s(*cut.times, micro_batches, by_stage)
        if seconds < best.pipeline_s * (1 - LEAST_KEEPING_GAIN):
            best = _InFlight(by_stage, seconds)
    return best


def memory_bytes(costs: StageCosts, finished: Finished) -> list[list[tuple[float, ...]]]:
    """Return the peak memory of a device by pipeline, stage and part of the stage (devices of one kind and node)."""
    by_pipeline = []
    owned_bytes = iter(costs.owned_bytes(finished.candidate.placed))  # by pipeline, stage and part, in one sequence
    for placed, in_flight in zip(finished.candidate.placed, finished.in_flight, strict=True):
        options = stage_options(costs, placed.blocks, placed.micro_batch_size, len(finished.candidate.shapes))
        assert options is not None
        last = len(placed.layers) - 1
        by_stage = []
        for j, (option, layers) in enumerate(zip(options, placed.layers, strict=True)):
            num_kept = costs.kept_in_flight(in_flight[j])  # micro-batches whose activations count
            need_bytes = []
            for part in option.parts:
                need = part.memory_bytes(layers, j == 0, j == last, num_kept, placed.micro_batches)
                need_bytes.append(need + next(owned_bytes))
            by_stage.append(tuple(need_bytes))
        by_pipeline.append(by_stage)
    return by_pipeline


def memory_by_rank(costs: StageCosts, finished: Finished, ranks: Sequence[Sequence[Sequence[int]]]) -> dict[int, float]:
    """Return the peak memory of every rank that works, by ascending rank.

    Args:
        ranks: ranks of every stage, by pipeline and stage.
    """
    pool_of_rank = costs.pools.of_rank
    by_rank: dict[int, float] = {}
    needs = memory_bytes(costs, finished)
    for pipeline, stage_needs, stage_ranks in zip(finished.candidate.placed, needs, ranks, strict=True):
        for block, part_needs, members in zip(pipeline.blocks, stage_needs, stage_ranks, strict=True):
            need_of_pool = {(part.kind, part.node): need for part, need in zip(block.parts, part_needs, strict=True)}
            for rank in members:
                pool = pool_of_rank[rank]
                by_rank[rank] = need_of_pool[pool.kind, pool.node]
    return dict(sorted(by_rank.items()))


def to_plan(costs: StageCosts, finished: Finished) -> Plan:
    """Return the plan as the value that a plan file holds: ranks, layers, owners of optimizer state, predictions."""
    candidate, model = finished.candidate, costs.model
    placed = candidate.placed
    ranks = ranks_of_blocks(costs.pools, [pipeline.blocks for pipeline in placed])
    pipelines = []
    for pipeline, stage_ranks, in_flight in zip(placed, ranks, finished.in_flight, strict=True):
        pipelines.append(_to_pipeline(costs, pipeline, stage_ranks, in_flight))
    return Plan(
        pipelines=tuple(pipelines),
        model=PlannedModel(num_layers=model.num_layers, num_heads=model.num_heads, num_kv_heads=model.num_kv_heads),
        seq_len=costs.seq_len,
        zero=ZeroOwners(stage=1 if len(pipelines) > 1 else 0, owner_weights=_owner_weights(costs, placed, ranks)),
        activation_checkpointing=costs.activation_checkpointing,
        predicted=_predicted(costs, finished, memory_by_rank(costs, finished, ranks)),
    )


def _to_pipeline(
    costs: StageCosts, pipeline: PlacedPipeline, ranks: Sequence[tuple[int, ...]], in_flight: Sequence[int]
) -> Pipeline:
    """Return one pipeline as a plan file has it; ``ranks`` and ``in_flight`` are by stage."""
    first_layers = list(accumulate(pipeline.layers, initial=0))  # of every stage, and of one behind the last
    default = default_in_flight(len(pipeline.layers))
    stages = []
    for j, block in enumerate(pipeline.blocks):
        stage = Stage(
            ranks=tuple(sorted(ranks[j])),
            layers=(first_layers[j], first_layers[j + 1]),
            inner=block.inner,
            tensor_size=block.tensor_size,
            schedule=_schedule(costs, pipeline.micro_batch_size, block, ranks[j]),
            in_flight=in_flight[j] if in_flight[j] != default[j] else None,
        )
        stages.append(stage)
    return Pipeline(
        stages=tuple(stages), micro_batch_size=pipeline.micro_batch_size, micro_batches=pipeline.micro_batches
    )


def _predicted(costs: StageCosts, finished: Finished, memory_bytes: Mapping[int, float]) -> JsonDict:
    """Return the predictions that a plan file keeps under its key ``predicted``."""
    samples = sum(pipeline.micro_batch_size * pipeline.micro_batches for pipeline in finished.candidate.placed)
    return {
        "cost_model": costs.name,
        "step_s": finished.step_s,
        "pipeline_s": list(finished.pipeline_s),
        "gradients_s": finished.candidate.gradients_s,
        "tokens_per_s": samples * costs.seq_len / finished.step_s,
        "memory_bytes": {str(rank): int(need) for rank, need in memory_bytes.items()},
    }


def _schedule(costs: StageCosts, micro_batch_size: int, block: DeviceBlock, ranks: tuple[int, ...]) -> Schedule | None:
    """Return the schedule of a stage that shares sequences, on the stage's ranks; None for other stages."""
    if block.inner != "sequence":
        return None
    schedule = costs.schedule(block, micro_batch_size)
    assert schedule is not None
    return schedule.of_tensor_groups(ranks, block.tensor_size)


def _owner_weights(
    costs: StageCosts, placed: Sequence[PlacedPipeline], ranks: Sequence[Sequence[Sequence[int]]]
) -> tuple[tuple[int, float], ...]:
    """Return (rank, weight as an owner of optimizer state), by ascending rank; empty if all weights are equal."""
    weights = costs.owner_weights(placed)
    if weights is None or len(set(weights)) == 1:
        return ()
    weight_of_part = iter(weights)
    pairs = []
    for pipeline, stage_ranks in zip(placed, ranks, strict=True):
        for block, members in zip(pipeline.blocks, stage_ranks, strict=True):
            next_rank = iter(members)  # part by part
            for part in block.parts:
                weight = next(weight_of_part)
                pairs += [(rank, weight) for rank in itertools.islice(next_rank, part.size)]
    return tuple(sorted(pairs))
