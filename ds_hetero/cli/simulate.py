"""``ds-hetero simulate``: predict the time and the memory of a given schedule."""

from __future__ import annotations

from ds_hetero.cli.printing import print_json, terms_text
from ds_hetero.cli.scenario import Scenario, read_schedule
from ds_hetero.common.text import bytes_text, time_text
from ds_hetero.planner.explain import describe

__all__ = ["run"]


def run(scenario: Scenario, source: str, as_json: bool) -> None:
    """Predict and print. A schedule that does not fit into memory is predicted all the same, and said not to fit."""
    cost = scenario.cost
    schedule = read_schedule(source, cost)
    prediction = cost.predict(schedule)
    if as_json:
        # The prediction's own keys are at the top, and under the name that they have in a plan.
        predicted = prediction.to_dict()
        print_json({**predicted, "predicted": predicted, "schedule": schedule.to_dict()})
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "rank", "device", "tokens", "heads", "busy", "memory GiB", "of", title=describe(schedule, scenario.cluster)
    )
    tokens = schedule.tokens(scenario.workload.seq_len)
    for position, group in enumerate(schedule.ring_groups):
        for rank, heads in zip(group.ranks, group.heads, strict=True):
            busy = f"{100 * prediction.busy_s[rank] / prediction.block_s:.0f} %"
            need, capacity = bytes_text(prediction.memory_bytes[rank]), bytes_text(cost.capacity_bytes_D[rank])
            row = (rank, scenario.cluster.devices[rank].name, tokens[rank], heads, busy, need, capacity)
            table.add_row(*map(str, row), end_section=rank == group.ranks[-1] and position + 1 < schedule.ring_size)
    console = Console()
    console.print(table)
    lines = [
        f"predicted:  {time_text(prediction.block_s)} per block, {time_text(prediction.iteration_s)} per iteration, "
        f"{prediction.tokens_per_s:,.0f} tokens/s ({terms_text(prediction)})",
        f"bottleneck: {prediction.bottleneck.text}",
        f"bound:      {100 * prediction.bound_s / prediction.block_s:.1f} % of the speed at perfect balance",
        f"memory:     {prediction.reason or 'fits'}",
    ]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
