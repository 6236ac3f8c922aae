"""Answer of ``ds-hetero plan --lengths``: the schedule that is fastest for batches of documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ds_hetero.cli.planning.answer import Answer
from ds_hetero.cli.printing import print_lines, print_table
from ds_hetero.cli.scenario import Scenario
from ds_hetero.common.text import time_text

if TYPE_CHECKING:
    from ds_hetero.planner.documents.for_lengths import PlannedForLengths

_SAMPLED_BATCHES = 8  # batches that are drawn from a distribution of lengths; chosen, never measured


def lengths_answer(scenario: Scenario, source: str, seed: int) -> Answer:
    """Choose the schedule that is fastest for batches of documents.

    Args:
        source: name of a distribution of document lengths, or file of lengths.
        seed: seed with which the batches are drawn.
    """
    from ds_hetero.cli.options import draw_batches, read_distribution
    from ds_hetero.planner.documents.for_lengths import plan_for_lengths

    distribution, work = read_distribution(source), scenario.workload
    batches = draw_batches(distribution, work.seq_len, _SAMPLED_BATCHES, seed)
    planned = plan_for_lengths(scenario.cost_of_documents, batches)
    assert planned.best.block_s is not None, "the best candidate fits into memory"
    blocks_s = planned.best.block_s * scenario.model.num_layers
    tokens_per_s = work.seq_len * work.micro_batch / blocks_s
    schedule = planned.best.schedule.to_dict()
    data = {
        "schedule": schedule,
        "predicted": {**planned.best.to_dict(), "tokens_per_s": tokens_per_s},
        "candidates": [candidate.to_dict() for candidate in planned.candidates],
        "lengths": {"distribution": distribution.name, "batches": planned.batches, "seed": seed},
    }
    show = partial(_show_for_lengths, scenario, planned, distribution.name, tokens_per_s)
    return Answer(schedule, replace(scenario, lengths=tuple(batches[0])), lambda: data, show)


def _show_for_lengths(scenario: Scenario, planned: PlannedForLengths, distribution: str, tokens_per_s: float) -> None:
    """Print the candidates for batches of documents, and the chosen schedule."""
    assert planned.best.block_s is not None, "the best candidate fits into memory"
    columns = ("schedule", "block", "over ideal", "as a stream")
    print_table(columns, _candidate_rows(planned), "Schedules for batches of documents")
    print_lines(
        f"{scenario.model.name}, rows of {scenario.workload.seq_len} tokens, documents as in {distribution}, "
        f"{planned.batches} batches\n"
        f"chosen:     {planned.best.name}\n"
        f"predicted:  {time_text(planned.best.block_s)} per block, "
        f"{tokens_per_s:,.0f} tokens/s through all blocks"
    )


def _candidate_rows(planned: PlannedForLengths) -> Iterator[tuple[str, ...]]:
    """Yield a row for each schedule: mean time of a block, ratio to the ideal, mean time if rows are cut by length."""
    ideal_s = planned.candidates[0].ideal_s
    for candidate in planned.candidates:
        if candidate.block_s is None or candidate.stream_s is None:
            yield candidate.name, "-", "-", str(candidate.reason)
        else:
            over = f"{candidate.block_s / ideal_s:.3f}"
            yield candidate.name, time_text(candidate.block_s), over, time_text(candidate.stream_s)
