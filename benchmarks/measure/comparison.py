"""Run one contest on a rank: peer and ours alternately, over several scopes and lengths."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure.contenders import CONTESTS, Contender, Shape, make_contender
from benchmarks.measure.ranks import Report
from benchmarks.measure.traffic import Traffic
from benchmarks.measure.turns import alternate

LAYER, STEP = "layer", "step"


@dataclass(frozen=True)
class Plan:
    """The measurements of one set of ranks.

    Args:
        contest: key of `CONTESTS`.
        num_ranks: number of processes.
        cases: (scope, tokens), in this order; layers come before steps, which leave stock registered.
        budget_s: seconds for each case.
        min_pairs: least number of runs of each contender, however long they take.
        shape: of the attention layer.
    """

    contest: str
    num_ranks: int
    cases: tuple[tuple[str, int], ...]
    budget_s: float
    min_pairs: int
    shape: Shape


def measure(rank: int, report: Report, plan: Plan, own_pids: Sequence[int]) -> dict[str, Any]:
    """Return the results of all cases by `alternate` ("cases"), and the bytes of a layer by contender ("traffic")."""
    names = CONTESTS[plan.contest]
    layers = {name: make_contender(name, plan.shape) for name in names}
    traffic = {name: _traffic(layers[name], plan) for name in names}
    steps: dict[str, Callable[[int], float]] = {}
    outcomes = []
    for done, (scope, tokens) in enumerate(plan.cases):
        if scope == STEP and not steps:
            steps = _steps(names, plan)
        actions: dict[str, Callable[[], object]] = {
            name: layers[name].layer(plan.shape, tokens) if scope == LAYER else _bound(steps[name], tokens)
            for name in names
        }
        outcomes.append(
            alternate(
                actions,
                plan.budget_s,
                plan.min_pairs,
                lambda share, now, done=done: report(done + share, now) if rank == 0 else None,  # type: ignore[misc]
                own_pids,
            )
        )
    return {"cases": [asdict(turns) for turns in outcomes], "traffic": traffic}


def _bound(step: Callable[[int], float], tokens: int) -> Callable[[], float]:
    return lambda: step(tokens)


def _steps(names: Sequence[str], plan: Plan) -> dict[str, Callable[[int], float]]:
    from benchmarks.measure.training import make_step

    longest = max(tokens for _, tokens in plan.cases)
    return {name: make_step(name, plan.shape, longest) for name in names}


def _traffic(contender: Contender, plan: Plan) -> dict[str, Any]:
    """Return the bytes that one layer, forward and backward, makes this rank send."""
    tokens = min(tokens for _, tokens in plan.cases)
    layer = contender.layer(plan.shape, tokens)
    layer()  # opens connections
    before = sent_by_device()
    with Traffic() as traffic:
        layer()
    return {
        "tokens": tokens,
        "payload_bytes": sum(traffic.sent_bytes.values()),
        "calls": sum(traffic.calls.values()),
        "by_operator": {name: [count, traffic.sent_bytes[name]] for name, count in traffic.calls.items()},
        "device_bytes": sent_by_device() - before,
    }


def sent_by_device() -> int:
    """Return the bytes that this node's network device has sent, with TCP/IP headers.

    Without a node, the loopback device.
    """
    device = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == device:
            return int(counters.split()[8])
    raise LookupError(f"no network device {device}")
