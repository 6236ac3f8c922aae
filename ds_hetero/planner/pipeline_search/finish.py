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
    pairs = list(zip(candidate.cuts, candidate.micro_batches, strict=True))
    choices: dict[tuple[LayerCut, int], tuple[tuple[int, ...], float]] = {}  # in flight, and the pipeline's time
    for cut, number in dict.fromkeys(pairs):
        choices[cut, number] = default_in_flight(len(cut.layers)), costs.pipeline_s(*cut.times, number)
    # Owners by weight get the memory that 1F1B's own number leaves, and published cost models know that number alone.
    if costs.owners == "even":
        late_s = NEAR_CRITICAL_FRACTION * max(seconds for _, seconds in choices.values())
        for (cut, number), shape in dict(zip(pairs, candidate.shapes, strict=True)).items():
            _, seconds = choices[cut, number]
            if seconds >= late_s:
                most = most_in_flight(costs, shape, cut, len(candidate.shapes))
                choices[cut, number] = _best_in_flight(costs, cut, number, most, seconds)
    chosen = [choices[pair] for pair in pairs]
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
    options = stage_options(costs, shape.blocks, shape.micro_batch_size, pipelines)
    assert options is not None
    last = len(cut.layers) - 1
    most = []
    for j, (option, layers) in enumerate(zip(options, cut.layers, strict=True)):
        most.append(max(last + 1 - j, option.most_in_flight(layers, j == 0, j == last)))
    return tuple(accumulate(most, min))


def _best_in_flight(
    costs: StageCosts, cut: LayerCut, micro_batches: int, most: Sequence[int], default_s: float
) -> tuple[tuple[int, ...], float]:
    """Micro-batches in flight by stage, and the pipeline's time with them.

    Four stages have 4, 3, 2 and 1 by default. With one more each they have 5, 4, 3 and 1, since the last stage goes
    backward at once: a hop of the length of a forward is then hidden, for one micro-batch's activations more.

    Args:
        most: what memory allows, by stage.
    """
    default = default_in_flight(len(cut.layers))
    if most == default:
        return default, default_s
    best, best_s = default, default_s
    for more in MORE_IN_FLIGHT:
        raised = []
        for number, limit in zip(default[:-1], most[:-1], strict=True):
            raised.append(max(min(number + more, limit, micro_batches), number))
        in_flight = (*raised, 1)
        if in_flight == default:
            continue
        seconds = costs.pipeline_s(*cut.times, micro_batches, in_flight)
        if seconds < best_s * (1 - LEAST_KEEPING_GAIN):
            best, best_s = in_flight, seconds
    return best, best_s


def memory_bytes(costs: StageCosts, finished: Finished) -> list[list[tuple[float, ...]]]:
    """Peak memory of one device of every part of every stage, by pipeline."""
    by_pipeline = []
    owned_bytes = iter(costs.owned_bytes(finished.candidate.placed))  # part by part, of all pipelines
    for placed, in_flight in zip(finished.candidate.placed, finished.in_flight, strict=True):
        options = stage_options(costs, placed.blocks, placed.micro_batch_size, len(finished.candidate.shapes))
        assert options is not None
        last = len(placed.layers) - 1
        by_stage = []
        for j, (option, layers) in enumerate(zip(options, placed.layers, strict=True)):
            kept = costs.kept_in_flight(in_flight[j])
            needs = []
            for part in option.parts:
                need = part.memory_bytes(layers, j == 0, j == last, kept, placed.micro_batches)
                needs.append(need + next(owned_bytes))
            by_stage.append(tuple(needs))
        by_pipeline.append(by_stage)
    return by_pipeline


def memory_by_rank(costs: StageCosts, finished: Finished, ranks: Sequence[Sequence[Sequence[int]]]) -> dict[int, float]:
    """Peak memory of every rank, ascending; ``ranks`` are those of every stage, by pipeline."""
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
    """Return the value of the plan file, with what it predicts."""
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
    """The value of one pipeline; ``ranks`` and ``in_flight`` by stage."""
    cuts = list(accumulate(pipeline.layers, initial=0))
    default = default_in_flight(len(pipeline.layers))
    stages = []
    for j, block in enumerate(pipeline.blocks):
        stage = Stage(
            ranks=tuple(sorted(ranks[j])),
            layers=(cuts[j], cuts[j + 1]),
            inner=block.inner,
            schedule=_schedule(costs, pipeline.micro_batch_size, block, ranks[j]),
            in_flight=in_flight[j] if in_flight[j] != default[j] else None,
        )
        stages.append(stage)
    return Pipeline(
        stages=tuple(stages), micro_batch_size=pipeline.micro_batch_size, micro_batches=pipeline.micro_batches
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
    """Weight of every rank as an owner, by ascending rank; empty if all own alike."""
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
