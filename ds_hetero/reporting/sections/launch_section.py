"""Answers to two questions about a plan on the page: what it costs, and how it is launched."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ds_hetero.cost.price import BILLION, JOULES_PER_KWH, MILLION, Price, duration_text
from ds_hetero.reporting.described_plan import DescribedPlan
from ds_hetero.reporting.html import Page, preformatted


def price_cards(prices: Sequence[Price]) -> dict[str, str]:
    """MFU, money and energy of replicas that step together, as far as they are known."""
    step_s = max(price.step_s for price in prices)
    tokens = sum(price.tokens for price in prices)
    shares = [price.mfu * price.step_s / step_s for price in prices]
    cards = {"Of the peaks (MFU)": f"{sum(shares) / len(shares):.1%}"}
    money = [price.money * step_s / price.step_s for price in prices if price.money is not None]
    if len(money) == len(prices):
        cards["Price of a million tokens"] = f"{MILLION * sum(money) / tokens:,.3g}"
    joules = [price.joules for price in prices if price.joules is not None]
    if len(joules) == len(prices):
        cards["Energy of a million tokens"] = f"{MILLION * sum(joules) / tokens / JOULES_PER_KWH:,.3g} kWh"
    cards["A billion tokens take"] = duration_text(BILLION / tokens * step_s)
    return cards


def add_launch(page: Page, described: DescribedPlan) -> None:
    """How to run it: the section, and the launch."""
    ranks = described.plan.ranks
    nodes = [node for cluster in described.scenario.clusters for node in cluster.nodes]
    section = {"heterogeneity": {"schedule": "plan.json"}}
    launch = "deepspeed --hostfile hostfile train.py --deepspeed ds_config.json"
    if len(nodes) == 1:
        launch = f"deepspeed --num_gpus {len(ranks)} train.py --deepspeed ds_config.json"
    hosts = "\n".join(f"{node.name} slots={len(node.devices)}" for node in nodes)
    savers = described.scenario.workload.memory_savers
    page.section(
        "Run it",
        "Save the plan file below as plan.json beside the script, and add this section to ds_config.json:",
        preformatted(json.dumps(section, indent=2)),
        *(
            ["The hosts, in the order of the ranks, with your names of them (hostfile):", preformatted(hosts)]
            * (len(nodes) > 1)
        ),
        "Add import ds_hetero; ds_hetero.register() before the Trainer or the engine is made, and launch as before:",
        preformatted(launch),
        f"The plan counts on {', '.join(savers)}: the job has to set it." if savers else "",
    )
