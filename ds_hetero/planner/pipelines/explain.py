"""Explain in sentences why a plan of pipelines looks as it does, or why no plan fits."""

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
from ds_hetero.values.plans.stages import inner_text

CLOSE = 0.02  # a stage or link whose time is within 2 % of the period is named as its cause; chosen, never measured


def block_text(costs: StageCosts, block: DeviceBlock) -> str:
    """Describe a block: ``2 RTX-4090 on b (tensor)``, ``1 A100 on a + 1 V100 on b (sequence)``."""
    inner = "" if block.inner == "one" else f" ({inner_text(block.inner, block.tensor_size)})"
    kinds, nodes = costs.pools.kinds, costs.cluster.nodes
    parts = [f"{part.size} {kinds[part.kind].device.name} on {nodes[part.node].name}" for part in block.parts]
    return f"{' + '.join(parts)}{inner}"


def shape_text(candidate: PlanCandidate) -> str:
    """Describe the pipelines of a plan: ``4 pipelines of 2 to 6 stages``, or ``2 replicas`` of one stage each."""
    num_stages = [len(shape.blocks) for shape in candidate.shapes]  # by pipeline
    low, high, plural = min(num_stages), max(num_stages), "s" if len(num_stages) > 1 else ""
    if high == 1:  # a pipeline of one stage holds the whole model
        return f"{len(num_stages)} replica{plural}"
    stages_text = f"{low} stages" if low == high else f"{low} to {high} stages"
    return f"{len(num_stages)} pipeline{plural} of {stages_text}"


def reasons_of(
    costs: StageCosts, finished: Finished, value: float = 1.0, others: Sequence[PlanCandidate] = ()
) -> list[str]:
    """Return sentences on a plan: what limits its speed, where memory is tightest, and the next best shape.

    Args:
        value: value of the objective for the plan.
        others: other plans of the search, best first.
    """
    candidate = finished.candidate
    slowest = finished.pipeline_s.index(finished.slowest_pipeline_s)
    cut, blocks = candidate.cuts[slowest], candidate.shapes[slowest].blocks
    number = candidate.micro_batches[slowest]
    name = f"pipeline {slowest}" if len(candidate.cuts) > 1 else "the pipeline"
    reasons = [f"{shape_text(candidate)}; {name} ends last, after {time_text(finished.slowest_pipeline_s)}"]
    reasons.append(_period_text(costs, blocks, cut))
    fill_share = max(0.0, 1 - number * cut.period_s / finished.slowest_pipeline_s)
    reasons.append(f"filling and draining {name} takes {100 * fill_share:.0f} % of its {number} micro-batches' time")
    if len(candidate.cuts) > 1:
        visible_s = max(0.0, finished.step_s - costs.step_s(finished.slowest_pipeline_s, NO_SYNC, 0.0))
        total_s = max(visible_s, candidate.gradients_s)  # a published model may count them more than once
        reasons.append(
            f"gradients and parameters of {len(candidate.cuts)} pipelines take {time_text(total_s)}, of which "
            f"{time_text(visible_s)} ({100 * visible_s / finished.step_s:.0f} % of the step) show"
        )
    reasons.append(_memory_text(costs, finished))
    weights = costs.owner_weights(candidate.placed)
    if weights is not None and min(weights) < max(weights):
        reasons.append(
            f"optimizer state goes where memory is free: ranks own in proportions of {min(weights):.2g} to 1"
        )
    num_idle = costs.cluster.num_ranks - candidate.num_devices
    if num_idle:
        reasons.append(f"{num_idle} devices stay idle: no place was found where they add more than they cost")
    for other in others:
        if shape_text(other) != shape_text(candidate):
            loss = 100 * (other.value / value - 1)
            reasons.append(f"the next best shape, {shape_text(other)}, loses {loss:.1f} %")
            break
    return reasons


def _period_text(costs: StageCosts, blocks: Sequence[DeviceBlock], cut: LayerCut) -> str:
    """Say how often a micro-batch passes, and what limits it: a stage, a link, or a round trip over several stages."""
    stage_s = [forward + backward for forward, backward in zip(cut.forward_s, cut.backward_s, strict=True)]
    busiest = stage_s.index(max(stage_s))
    period_text = f"one micro-batch every {time_text(cut.period_s)}"
    if costs.hop_in_step or stage_s[busiest] >= cut.period_s * (1 - CLOSE):
        stage_text = f"{cut.layers[busiest]} layers on {block_text(costs, blocks[busiest])}"
        return f"{period_text}, set by stage {busiest}: {stage_text}"
    slowest = cut.hop_s.index(max(cut.hop_s))
    link = costs.cluster.link_classes[links_between(costs, tuple(blocks))[slowest]].name
    hop_text = f"the link {link!r} between stages {slowest} and {slowest + 1} ({time_text(cut.hop_s[slowest])} a hop)"
    if cut.hop_s[slowest] >= cut.period_s * (1 - CLOSE):
        return f"{period_text}, set by {hop_text}"
    return (
        f"{period_text}, set by the round trip over several stages, longer than the {time_text(stage_s[busiest])} of "
        f"the slowest stage; most of it is {hop_text}"
    )


def _memory_text(costs: StageCosts, finished: Finished) -> str:
    """Say on which stage the smallest share of memory stays free."""
    least_free_share, text = 2.0, ""  # 2.0: above any share
    for i, (placed, needs) in enumerate(zip(finished.candidate.placed, memory_bytes(costs, finished), strict=True)):
        options = stage_options(costs, placed.blocks, placed.micro_batch_size, len(finished.candidate.cuts))
        assert options is not None
        for j, (stage_needs, option) in enumerate(zip(needs, options, strict=True)):
            for need_bytes, part in zip(stage_needs, option.parts, strict=True):
                free_share = 1 - need_bytes / part.capacity_bytes
                if free_share < least_free_share:
                    least_free_share = free_share
                    where = f"stage {j} of pipeline {i}, {block_text(costs, placed.blocks[j])}"
                    need_text = memory_text(part, need_bytes, first=j == 0, last=j == len(needs) - 1)
                    text = f"memory is tightest on {where}: {need_text}"
    return text


def memory_text(option: StageOption, need_bytes: float, *, first: bool, last: bool) -> str:
    """Describe the memory of a stage: ``12.3 of 38.5 GiB a device (NCCL's communicators 1.2)``.

    The parentheses are left out where the cost model does not count communicators.

    Args:
        first: whether it is the first stage of its pipeline.
        last: whether it is the last stage.
    """
    text = f"{bytes_text(need_bytes)} of {bytes_text(option.capacity_bytes)} GiB a device"
    communicators = option.memory.communicator_bytes(first, last)
    return f"{text} (NCCL's communicators {bytes_text(communicators)})" if communicators else text


def nothing_fits(models: Sequence[StageCosts], at_most_s: float | None) -> str:
    """Say how many layers do not fit, on which stage memory is tightest, and what would fit.

    The numbers are those of one stage per device, under the cost model that has room for most layers.

    Args:
        at_most_s: longest step that is acceptable; None for any.
    """
    stages = [block_of(pool, 1) for pool in models[0].pools.pools for _ in pool.ranks][: models[0].model.num_layers]
    last = len(stages) - 1

    def options_and_rooms(costs: StageCosts) -> tuple[list[StageOption], list[int]]:
        """Return times and memory of every stage (one device each), and how many layers fit into each stage."""
        options = stage_options(costs, tuple(stages), 1, 1)
        assert options is not None
        in_flight = costs.kept_by_default(last + 1)
        rooms = [option.max_layers(j == 0, j == last, in_flight[j]) for j, option in enumerate(options)]
        return options, rooms

    def total_room(costs: StageCosts) -> int:
        """Return the number of layers that fit into all stages together."""
        _, rooms = options_and_rooms(costs)
        return sum(rooms)

    costs = max(models, key=total_room)
    model, cluster = costs.model, costs.cluster
    options, rooms = options_and_rooms(costs)
    missing = model.num_layers - sum(rooms)
    if missing <= 0 and min(rooms) and at_most_s is not None:
        return f"no plan of {model.name} takes at most {at_most_s} s per step. Allow more, or use a smaller batch."
    tightest = min(range(len(rooms)), key=lambda j: rooms[j])
    option = options[tightest]
    excess_bytes = option.memory_bytes(1, tightest == 0, tightest == last, 1) - option.capacity_bytes
    layer_gib = option.memory.layer_bytes / GIB
    counts = Counter(costs.pools.kinds[block.kind].device.name for block in stages)
    devices = ", ".join(f"{count} {name}" for name, count in counts.items())
    where = (
        f"one layer on stage {tightest}, {block_text(costs, stages[tightest])}, already exceeds its memory by "
        f"{excess_bytes / GIB:.1f} GiB"
        if excess_bytes > 0
        else f"a layer takes {layer_gib:.1f} GiB of model states, {max(missing, 1) * layer_gib:.0f} GiB are missing"
    )
    # The missing bytes include the communicators.
    communicators = option.memory.communicator_bytes(tightest == 0, tightest == last)
    communicators_text = ""
    if communicators:
        communicators_text = f"; stage {tightest} counts {bytes_text(communicators)} GiB of NCCL's communicators"
    return (
        f"no plan of {model.name} with sequences of {costs.seq_len} tokens fits on {cluster.num_ranks} devices. A "
        f"pipeline of one stage per device ({devices}) has room for {sum(rooms)} of {model.num_layers} layers; {where}"
        f"{communicators_text}. What would fit: a smaller model, shorter sequences, or more or larger devices."
    )
