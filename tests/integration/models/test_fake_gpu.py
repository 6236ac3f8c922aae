"""A step of a real model at real size on a GPU that does not exist: no layer waits for the host, no devices mix."""

import json
import subprocess
import sys

import pytest

from tests.support import ROOT


@pytest.mark.slow
def test_a_step_waits_once_and_launches_about_as_much_as_stock_ulysses():
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.fake_gpu", "--quick", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        timeout=900,
    )
    result = json.loads(run.stdout.splitlines()[-1])
    assert [row for row in result["ranks"] if "error" in row] == []
    assert (result["syncs_in_layers"], result["mixtures"]) == (0, 0)
    for row in result["ranks"]:
        forward = {place: count for place, count in row["sync_places"].items() if place.startswith("forward")}
        assert sum(forward.values()) == 1
        assert "gather_headers" in next(iter(forward))
        # The checks of a step wait for the device once, after the backward; then one message goes out and comes back.
        checks = {place: count for place, count in row["sync_places"].items() if "step_checks" in place}
        assert list(checks.values()) == [1] and "_on_host" in next(iter(checks))
        messages = [count for place, count in row["sync_places"].items() if "step: _to_copy runtime/coll" in place]
        assert messages == [1, 1]
        assert row["peak_bytes"] > row["resting_bytes"] > 0
    assert {row["ours"] for row in result["launches"]} == {17}
    assert all(row["ratio"] <= 1.0 for row in result["launches"])
    counts = {row["ring"]: (row["forward"], row["backward"]) for row in result["launches_in_rings"]}
    # Uneven shares cost no launch. Groups of unlike sizes copy each of their shards by itself.
    rings = {"ring of 8": (33, 72), "uneven ring of 8": (33, 72)}
    assert counts == {**rings, "two unequal groups of 4": (15, 24), "groups of 6 and 2": (40, 69)}
    # Of divided experts the host waits once, for the numbers of rows that are the sizes of the next messages.
    experts = result["experts"]
    assert list(experts["syncs"].values()) == [1] and experts["mixtures"] == []
    assert "forward: tolist" in next(iter(experts["syncs"])) and "exchange_counts" in next(iter(experts["syncs"]))
    assert run.returncode == 0


@pytest.mark.slow
def test_a_layer_of_a_tensor_group_never_waits_for_the_host():
    """Beside single ranks: the collectives of both regions, and those of the exchange, which are the same."""
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.fake_gpu.tensor_groups", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        timeout=600,
    )
    rows = {row["stage"]: row for row in json.loads(run.stdout.splitlines()[-1])}
    assert run.returncode == 0
    assert [row["sync_places_in_layers"] for row in rows.values()] == [{}] * 5
    launches = {stage: (row["launches"], row["collectives"]) for stage, row in rows.items()}
    assert launches == {
        "two single ranks in an all-to-all": (175, 6),
        "two tensor groups of 2 in an all-to-all": (184, 17),
        "two tensor groups of 4 in an all-to-all": (184, 17),
        "two single ranks in a ring": (187, 6),
        "two tensor groups of 2 in a ring": (196, 17),
    }


@pytest.mark.slow
def test_a_recorded_step_is_played_on_its_cluster_and_on_a_faster_one(tmp_path):
    """Products of two layers and the head of both ranks are those that the model's parameters ask for."""
    from ds_hetero.cluster.files import load_cluster
    from ds_hetero.cost.replay import ATTENTION, PRODUCT, WAIT, Operation, PostedCall, replay
    from ds_hetero.models import load_model
    from ds_hetero.reporting.recorded_step import read_recorded_step

    file, cluster, length = tmp_path / "step.json", "workstation-4090-3090", 8192
    words = ["record", str(file), "--model", "llama-3.2-1b", "--cluster", cluster, "--length", str(length)]
    words += ["--layers", "2", "--zero-stage", "1"]
    subprocess.run([sys.executable, "-m", "benchmarks.fake_gpu.played", *words], check=True, cwd=ROOT, timeout=600)
    record = read_recorded_step(file)

    model = load_model("llama-3.2-1b")
    weights = 2 * (model.attention_parameters + model.mlp_parameters)
    products = 6 * length * (weights + model.vocab_size * model.hidden_size)
    again = (
        2 * length * (2 * weights + model.vocab_size * model.hidden_size)
    )  # most of a layer, of an MLP's tile, of logits
    flops = sum(e.flops for of_rank in record.events for e in of_rank if isinstance(e, Operation) and e.kind == PRODUCT)
    assert products < flops <= products + again

    def message_bytes(rank, sends):
        calls = [event for event in record.events[rank] if isinstance(event, PostedCall)]
        return [message.num_bytes for call in calls for message in call.messages if message.sends == sends]

    assert message_bytes(0, True) == message_bytes(1, False) != []
    assert message_bytes(1, True) == message_bytes(0, False) != []

    replayed = replay(record.events, load_cluster(cluster), record.host_share)
    assert all(of_rank[ATTENTION] > 0 for of_rank in replayed.by_kind_s)
    assert min(of_rank.get(WAIT, 0.0) for of_rank in replayed.by_kind_s) < 0.5 * replayed.step_s
    fast = load_cluster("hexiseq-setting-1").subset([0, 1])
    assert replay(record.events, fast, record.host_share).step_s < 0.5 * replayed.step_s
