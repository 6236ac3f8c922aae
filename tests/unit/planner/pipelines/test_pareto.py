"""The front of time, money and energy: no plan on it is beaten, and the fastest and the cheapest are on it."""

import json

import pytest

from ds_hetero.cluster.files import cluster_from_dict
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.models import load_model
from ds_hetero.planner.pipelines.pareto import NUM_LIMITS, pareto_front
from ds_hetero.planner.pipelines.planning import plan_pipelines
from tests.unit.planner.pipelines.test_pipelines_planning import run

MODEL, WORK = load_model("llama-3.2-1b"), Workload(seq_len=4096)
FEW = {"effort_s": 0.02, "from_published": False}
NODES = [{"name": "a", "device": "A800-SXM-80GB", "count": 2}, {"name": "b", "device": "RTX-3090", "count": 2}]
COMMAND = (
    *("--model", "llama-3.2-1b", "--seq-len", "4096"),
    *("--parallel", "full", "--global-batch", "8", "--objective", "pareto"),
)


def cluster_of(**prices):
    """Two fast devices and two slow ones, with money for an hour by name."""
    devices = {name.replace("_", "-"): {"price_per_hour": price} for name, price in prices.items()}
    network = {"bandwidth_gb_per_s": 10, "latency_us": 10}
    return {"nodes": NODES, "network": network, "devices": devices}


def test_no_plan_of_the_front_is_beaten():
    """Of a cheap and a dear kind: the fastest plan has both, and the cheapest one leaves the dear devices out."""
    cluster = cluster_from_dict(cluster_of(A800_SXM_80GB=1.0, RTX_3090=5.0))
    asked = []

    def search(objective, at_most_s):
        asked.append((objective, at_most_s))
        return plan_pipelines(cluster, MODEL, WORK, 8, objective=objective, at_most_s=at_most_s, **FEW)

    front = pareto_front(search, cluster.devices)
    assert [name for name, most_s in asked if most_s is None] == ["time", "cost", "energy"]
    assert len(asked) <= 1 + 2 * (1 + NUM_LIMITS)
    assert len(front) > 1
    assert not any(one.beats(other) for one in front for other in front if one is not other)
    assert front[0].planned.step_s <= search("time", None).step_s
    cheapest = min(front, key=lambda choice: choice.money)
    assert cheapest.money <= 1e6 * search("cost", None).value * 1.001
    assert set(cheapest.planned.busy) <= {0, 1}
    thriftiest = min(front, key=lambda choice: choice.kwh)
    assert thriftiest.kwh <= 1e6 * search("energy", None).value / 3.6e6 * 1.001


def test_what_nobody_has_a_price_for_has_no_front():
    device = {"peak_tflops": 100, "memory_gib": 80, "memory_bandwidth_gb_per_s": 2000}
    nodes = [{"name": "a", "device": "x", "count": 1, "link": {"bandwidth_gb_per_s": 1, "latency_us": 1}}]
    cluster = cluster_from_dict({"nodes": nodes, "devices": {"x": device}})
    with pytest.raises(PlanError, match="neither price_per_hour nor watts"):
        pareto_front(lambda *_: None, cluster.devices)


def test_the_command_line_has_it_as_table_json_and_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("ds_hetero.cli.planning.pareto.plan_pipelines", lambda *a, **k: plan_pipelines(*a, **k, **FEW))
    path, picture = tmp_path / "cluster.json", tmp_path / "front.png"
    path.write_text(json.dumps(cluster_of(A800_SXM_80GB=1.0, RTX_3090=5.0)))
    assert run(["plan", "--cluster", str(path), *COMMAND, "--out", str(picture)]) == 0
    told = capsys.readouterr().out
    assert "price" in told and "2 A800-SXM-80GB" in told
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert run(["plan", "--cluster", str(path), *COMMAND, "--json"]) == 0
    front = json.loads(capsys.readouterr().out)["front"]
    assert [choice["step_s"] for choice in front] == sorted(choice["step_s"] for choice in front)
    assert all(choice["per_million_tokens"] > 0 and choice["plan"]["pipelines"] for choice in front)


@pytest.mark.parametrize(
    ("further", "message"),
    [
        (["--at-most-s", "3"], "--objective pareto is for --parallel full, without --at-most-s"),
        (["--out", "front.json"], "--out must end in .svg or .png"),
    ],
)
def test_what_a_front_is_not_for_is_refused(further, message, capsys):
    assert run(["plan", "--cluster", "hexiscale-case-study", *COMMAND, *further]) == 2
    assert message in capsys.readouterr().err
