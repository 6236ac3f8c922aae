"""The last steps of a plan: more micro-batches in flight where they hide hops, ranks, memory, the plan file's value."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

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
MORE_IN_FLIGHT = (1, 3)  # micro-batches beyond 1F1B's own that are tried
LEAST_KEEPING_GAIN = 1e-3  # of a pipeline's time, for which a stage keeps activations of more micro-batches
NEAR_CRITICAL_FRACTION = 0.9  # of the slowest pipeline's time, from which on a pipeline may keep more


@dataclass(frozen=True, slots=True)
class Finished:
    """A candidate with everything that its execution needs."""

    candidate: PlanCandidate  # by the last word of the cost model
    in_flight: tuple[tuple[int, ...], ...]  # by pipeline and stage
    pipeline_s: tuple[float, ...]  # of every pipeline
    step_s: float  # of the whole step

    @property
    def pipelines_s(self) -> float:
        """The slowest pipeline."""
        return max(self.pipeline_s)

    @property
    def makeups(self) -> list[list[int]]:
        """Pipelines that are alike in kinds, layers and batches."""
        alike: dict[object, list[int]] = {}
        for i, pipeline in enumerate(self.candidate.placed):
            kinds = tuple((block.kind, block.size, block.inner, block.others) for block in pipeline.blocks)
            alike.setdefault((kinds, *pipeline[1:]), []).append(i)
        return list(alike.values())


def finish(costs: StageCosts, candidate: PlanCandidate) -> Finished:
    """Choose micro-batches in flight (a published cost model knows 1F1B's alone), and time every pipeline."""
    count, pairs = len(candidate.shapes), list(zip(candidate.cuts, candidate.micro_batches, strict=True))
    known = {
        (cut, number): (default_in_flight(len(cut.layers)), costs.pipeline_s(*cut.times, number))
        for cut, number in dict.fromkeys(pairs)
    }
    if costs.owners == "even":
        late_s = NEAR_CRITICAL_FRACTION * max(seconds for _, seconds in known.values())
        for (cut, number), shape in dict(zip(pairs, candidate.shapes, strict=True)).items():
            seconds = known[cut, number][1]
            if seconds >= late_s:
                known[cut, number] = _best_in_flight(
                    costs, cut, number, most_in_flight(costs, shape, cut, count), seconds
                )
    chosen = [known[pair] for pair in pairs]
    times = [seconds for _, seconds in chosen]
    last = candidate.cuts[times.index(max(times))]
    return Finished(
        candidate=candidate,
        in_flight=tuple(in_flight for in_flight, _ in chosen),
        pipeline_s=tuple(times),
        step_s=costs.step_s(max(times), candidate.sync, last.overlap_s),
    )


def most_in_flight(costs: StageCosts, shape: Shape, cut: LayerCut, pipelines: int) -> tuple[int, ...]:
    """Micro-batches in flight that fit into the memory of every stage, not rising from stage to stage."""
    options, last = stage_options(costs, shape.blocks, shape.micro_batch_size, pipelines), len(cut.layers) - 1
    assert options is not None
    most = []
    for j, (option, layers) in enumerate(zip(options, cut.layers, strict=True)):
        most.append(max(last + 1 - j, option.most_in_flight(layers, j == 0, j == last)))
    return tuple(accumulate(most, min))


def _best_in_flight(
    costs: StageCosts, cut: LayerCut, micro_batches: int, most: Sequence[int], default_s: float
) -> tuple[tuple[int, ...], float]:
    default = default_in_flight(len(cut.layers))
    best = default, default_s
    for more in MORE_IN_FLIGHT:
        raised = tuple(min(number + more, limit, micro_batches) for number, limit in zip(default, most, strict=True))
        raised = (*(max(number, own) for number, own in zip(raised[:-1], default, strict=False)), 1)
        if raised == default or most == default:
            continue
        seconds = costs.pipeline_s(*cut.times, micro_batches, raised)
        if seconds < best[1] * (1 - LEAST_KEEPING_GAIN):
            best = raised, seconds
    return best


def memory_bytes(costs: StageCosts, finished: Finished) -> list[list[tuple[float, ...]]]:
    """Peak memory of one device of every part of every stage, by pipeline."""
    by_pipeline = []
    on_top = iter(costs.owned_bytes(finished.candidate.placed))
    for placed, in_flight in zip(finished.candidate.placed, finished.in_flight, strict=True):
        options = stage_options(costs, placed.blocks, placed.micro_batch_size, len(finished.candidate.shapes))
        assert options is not None
        last = len(placed.layers) - 1
        by_pipeline.append(
            [
                tuple(
                    part.memory_bytes(
                        layers, j == 0, j == last, costs.kept_in_flight(in_flight[j]), placed.micro_batches
                    )
                    + next(on_top)
                    for part in option.parts
                )
                for j, (option, layers) in enumerate(zip(options, placed.layers, strict=True))
            ]
        )
    return by_pipeline


def memory_by_rank(costs: StageCosts, finished: Finished, ranks: Sequence[Sequence[Sequence[int]]]) -> dict[int, float]:
    """Peak memory of every rank, ascending; ``ranks`` are those of every stage, by pipeline."""
    pool_of = {rank: (pool.kind, pool.node) for pool in costs.pools.pools for rank in pool.ranks}
    by_rank: dict[int, float] = {}
    for pipeline, needs, of_stages in zip(finished.candidate.placed, memory_bytes(costs, finished), ranks, strict=True):
        for block, of_parts, own in zip(pipeline.blocks, needs, of_stages, strict=True):
            need = {(part.kind, part.node): most for part, most in zip(block.parts, of_parts, strict=True)}
            by_rank |= {rank: need[pool_of[rank]] for rank in own}
    return dict(sorted(by_rank.items()))


def to_plan(costs: StageCosts, finished: Finished) -> Plan:
    """Return the value of the plan file, with what it predicts."""
    candidate, model = finished.candidate, costs.model
    placed = candidate.placed
    ranks = ranks_of_blocks(costs.pools, [pipeline.blocks for pipeline in placed])
    pipelines = []
    for i, pipeline in enumerate(placed):
        stops = list(accumulate(pipeline.layers))
        default = default_in_flight(len(stops))
        stages = [
            Stage(
                ranks=tuple(sorted(ranks[i][j])),
                layers=(stops[j] - pipeline.layers[j], stops[j]),
                inner=block.inner,
                schedule=_schedule(costs, pipeline.micro_batch_size, block, ranks[i][j]),
                in_flight=finished.in_flight[i][j] if finished.in_flight[i][j] != default[j] else None,
            )
            for j, block in enumerate(pipeline.blocks)
        ]
        pipelines.append(
            Pipeline(
                stages=tuple(stages), micro_batch_size=pipeline.micro_batch_size, micro_batches=pipeline.micro_batches
            )
        )
    return Plan(
        pipelines=tuple(pipelines),
        model=PlannedModel(num_layers=model.num_layers, num_heads=model.num_heads, num_kv_heads=model.num_kv_heads),
        seq_len=costs.seq_len,
        zero=ZeroOwners(stage=1 if len(pipelines) > 1 else 0, owner_weights=_owner_weights(costs, placed, ranks)),
        activation_checkpointing=costs.activation_checkpointing,
        predicted=_predicted(costs, finished, memory_by_rank(costs, finished, ranks)),
    )


def _predicted(costs: StageCosts, finished: Finished, memory_bytes: Mapping[int, float]) -> JsonDict:
    """Content of the plan file's key of that name."""
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
    if block.inner != "sequence":
        return None
    schedule = costs.schedule(block.parts, micro_batch_size)
    assert schedule is not None
    return schedule.on_ranks(ranks)


def _owner_weights(
    costs: StageCosts, placed: Sequence[PlacedPipeline], ranks: Sequence[Sequence[Sequence[int]]]
) -> tuple[tuple[int, float], ...]:
    """Of every rank, ascending; none where all own alike."""
    weights = costs.owner_weights(placed)
    if weights is None or len(set(weights)) == 1:
        return ()
    parts = [part for pipeline in placed for block in pipeline.blocks for part in block.parts]
    of_parts = itertools.chain.from_iterable(itertools.chain.from_iterable(ranks))  # part by part
    pairs = [(next(of_parts), weight) for part, weight in zip(parts, weights, strict=True) for _ in range(part.size)]
    return tuple(sorted(pairs))
