"""Why a plan looks as it does, and why there is none, in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ds_hetero.common.text import bytes_text, time_text
from ds_hetero.common.units import GIB
from ds_hetero.cost.stages.stage import NO_SYNC, DeviceBlock, StageCosts, StageOption
from ds_hetero.planner.pipeline_search.block_times import links_between, stage_options
from ds_hetero.planner.pipeline_search.blocks import block_of
from ds_hetero.planner.pipeline_search.cuts import LayerCut
from ds_hetero.planner.pipeline_search.evaluate import PlanCandidate
from ds_hetero.planner.pipeline_search.finish import Finished, memory_bytes

CLOSE = 0.02  # of the period: a stage or link this near to it is named as its reason; chosen, never measured


def block_text(costs: StageCosts, block: DeviceBlock) -> str:
    """``2 RTX-4090 on b (tensor)``, ``1 A100 on a + 1 V100 on b (sequence)``."""
    inner = "" if block.inner == "one" else f" ({block.inner})"
    kinds, nodes = costs.pools.kinds, costs.cluster.nodes
    parts = [f"{part.size} {kinds[part.kind].device.name} on {nodes[part.node].name}" for part in block.parts]
    return f"{' + '.join(parts)}{inner}"


def shape_text(candidate: PlanCandidate) -> str:
    """``4 pipelines of 6 stages`` or ``3 pipelines of 2 to 5 stages``."""
    stages = [len(shape.blocks) for shape in candidate.shapes]
    low, high = min(stages), max(stages)
    of = f"{low} stage{'s' if low > 1 else ''}" if low == high else f"{low} to {high} stages"
    return f"{len(stages)} pipeline{'s' if len(stages) > 1 else ''} of {of}"


def reasons_of(
    costs: StageCosts, finished: Finished, value: float = 1.0, others: Sequence[PlanCandidate] = ()
) -> list[str]:
    """Return what decides the time of a plan: a stage, a link or the gradients; its memory; and the next best shape."""
    candidate = finished.candidate
    slowest = finished.pipeline_s.index(finished.pipelines_s)
    cut, blocks = candidate.cuts[slowest], candidate.shapes[slowest].blocks
    number = candidate.micro_batches[slowest]
    name = f"pipeline {slowest}" if len(candidate.cuts) > 1 else "the pipeline"
    reasons = [f"{shape_text(candidate)}; {name} ends last, after {time_text(finished.pipelines_s)}"]
    reasons.append(_period_text(costs, blocks, cut))
    fill = max(0.0, 1 - number * cut.period_s / finished.pipelines_s)
    reasons.append(f"filling and draining {name} takes {100 * fill:.0f} % of its {number} micro-batches' time")
    if len(candidate.cuts) > 1:
        shown = max(0.0, finished.step_s - costs.step_s(finished.pipelines_s, NO_SYNC, 0.0))
        whole = max(shown, candidate.gradients_s)  # a published model may count them more than once
        reasons.append(
            f"gradients and parameters of {len(candidate.cuts)} pipelines take {time_text(whole)}, of which "
            f"{time_text(shown)} ({100 * shown / finished.step_s:.0f} % of the step) show"
        )
    reasons.append(_memory_text(costs, finished))
    weights = costs.owner_weights(candidate.placed)
    if weights is not None and min(weights) < max(weights):
        reasons.append(
            f"optimizer state goes where memory is free: ranks own in proportions of {min(weights):.2g} to 1"
        )
    idle = costs.cluster.num_ranks - candidate.num_devices
    if idle:
        reasons.append(f"{idle} devices stay idle: no place was found where they add more than they cost")
    makeups = {shape_text(candidate)}
    for other in others:
        if shape_text(other) not in makeups:
            loss = 100 * (other.value / value - 1)
            reasons.append(f"the next best shape, {shape_text(other)}, loses {loss:.1f} %")
            break
    return reasons


def _period_text(costs: StageCosts, blocks: Sequence[DeviceBlock], cut: LayerCut) -> str:
    """The bottleneck of a micro-batch: a stage, a link, or a round trip over several."""
    stage_s = [forward + backward for forward, backward in zip(cut.forward_s, cut.backward_s, strict=True)]
    busiest = stage_s.index(max(stage_s))
    period = f"one micro-batch every {time_text(cut.period_s)}"
    if costs.hop_in_step or stage_s[busiest] >= cut.period_s * (1 - CLOSE):
        return f"{period}, set by stage {busiest}: {cut.layers[busiest]} layers on {block_text(costs, blocks[busiest])}"
    slowest = cut.hop_s.index(max(cut.hop_s))
    link = costs.cluster.link_classes[links_between(costs, tuple(blocks))[slowest]].name
    hop = f"the link {link!r} between stages {slowest} and {slowest + 1} ({time_text(cut.hop_s[slowest])} a hop)"
    if cut.hop_s[slowest] >= cut.period_s * (1 - CLOSE):
        return f"{period}, set by {hop}"
    return (
        f"{period}, set by the round trip over several stages, longer than the {time_text(stage_s[busiest])} of the "
        f"slowest stage; most of it is {hop}"
    )


def _memory_text(costs: StageCosts, finished: Finished) -> str:
    tightest = (2.0, "")
    for i, (placed, needs) in enumerate(zip(finished.candidate.placed, memory_bytes(costs, finished), strict=True)):
        options = stage_options(costs, placed.blocks, placed.micro_batch_size, len(finished.candidate.cuts))
        assert options is not None
        for j, (need, option) in enumerate(zip(needs, options, strict=True)):
            for of_part, part in zip(need, option.parts, strict=True):
                left = 1 - of_part / part.capacity_bytes
                if left < tightest[0]:
                    where = f"stage {j} of pipeline {i}, {block_text(costs, placed.blocks[j])}"
                    of = memory_text(part, of_part, first=j == 0, last=j == len(needs) - 1)
                    tightest = left, f"memory is tightest on {where}: {of}"
    return tightest[1]


def memory_text(option: StageOption, need: float, *, first: bool, last: bool) -> str:
    """``12.3 of 38.5 GiB a device (NCCL's communicators 1.2)``, the latter where they count."""
    text = f"{bytes_text(need)} of {bytes_text(option.capacity_bytes)} GiB a device"
    communicators = option.memory.communicator_bytes(first, last)
    return f"{text} (NCCL's communicators {bytes_text(communicators)})" if communicators else text


def nothing_fits(models: Sequence[StageCosts], at_most_s: float | None) -> str:
    """Say by how much the model misses, where, and what would fit, under the cost model with most room."""
    stages = [block_of(pool, 1) for pool in models[0].pools.pools for _ in pool.ranks][: models[0].model.num_layers]
    last = len(stages) - 1

    def rooms_of(costs: StageCosts) -> tuple[list[StageOption], list[int]]:
        options = stage_options(costs, tuple(stages), 1, 1)
        assert options is not None
        kept = costs.kept_by_default(last + 1)
        rooms = [option.max_layers(j == 0, j == last, kept[j]) for j, option in enumerate(options)]
        return options, rooms

    costs = max(models, key=lambda each: sum(rooms_of(each)[1]))
    model, cluster = costs.model, costs.cluster
    options, rooms = rooms_of(costs)
    missing = model.num_layers - sum(rooms)
    if missing <= 0 and min(rooms) and at_most_s is not None:
        return f"no plan of {model.name} takes at most {at_most_s} s per step. Allow more, or use a smaller batch."
    tight = min(range(len(rooms)), key=lambda j: rooms[j])
    option = options[tight]
    need = option.memory_bytes(1, tight == 0, tight == last, 1) - option.capacity_bytes
    layer_gib = option.memory.layer_bytes / GIB
    counts = Counter(costs.pools.kinds[block.kind].device.name for block in stages)
    devices = ", ".join(f"{count} {name}" for name, count in counts.items())
    where = (
        f"one layer on stage {tight}, {block_text(costs, stages[tight])}, already exceeds it by {need / GIB:.1f} GiB"
        if need > 0
        else f"a layer takes {layer_gib:.1f} GiB of model states, {max(missing, 1) * layer_gib:.0f} GiB are missing"
    )
    communicators = option.memory.communicator_bytes(tight == 0, tight == last)
    # They are in what is needed, and so in what is missing.
    counted = f"; stage {tight} counts {bytes_text(communicators)} GiB of NCCL's communicators" if communicators else ""
    return (
        f"no plan of {model.name} with sequences of {costs.seq_len} tokens fits on {cluster.num_ranks} devices. A "
        f"pipeline of one stage per device ({devices}) has room for {sum(rooms)} of {model.num_layers} layers; {where}"
        f"{counted}. What would fit: a smaller model, shorter sequences, or more or larger devices."
    )
