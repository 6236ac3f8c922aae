"""Recorded steps on clusters, worked out by hand: one stream a device, calls of a communicator in order, shared ports.

The device does 10^12 operations and moves 10^9 bytes a second; links inside the node move 10^9 bytes a second.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ds_hetero.cli.app import app
from ds_hetero.cluster import cluster_from_dict
from ds_hetero.cost.replay import (
    HOST,
    MEMORY,
    PRODUCT,
    WAIT,
    Event,
    Operation,
    PostedCall,
    PostedMessage,
    Sync,
    Wait,
    replay,
)
from ds_hetero.errors import PlanError
from ds_hetero.reporting.recorded_step import RecordedStep, read_recorded_step, trace_of_record

BOTH = (0, 1)


def _product(seconds: float) -> Operation:
    return Operation("mm", "mlp", False, PRODUCT, int(seconds * 1e12), 0, rows=1)


def _moved(seconds: float) -> Operation:
    return Operation("add", "norm", False, MEMORY, 0, int(seconds * 1e9))


def _gather(number: int, seconds: float, communicator: str = "a") -> PostedCall:
    """A gather whose whole tensor two ranks have after so many seconds: each receives half of it."""
    return PostedCall(number, "_allgather_base", communicator, BOTH, num_bytes=int(2 * seconds * 1e9))


def _cluster(ranks: int = 2, **more: Any) -> Any:
    device = {"peak_tflops": 1, "memory_gib": 8, "memory_bandwidth_gb_per_s": 1, **more}
    node = {"name": "n", "device": "d", "count": ranks, "link": {"bandwidth_gb_per_s": 1, "latency_us": 0}}
    return cluster_from_dict({"nodes": [node], "devices": {"d": device}})


@pytest.mark.parametrize(
    ("events", "seconds", "exposed"),
    [
        # Both compute a second and gather for two, which rank 1 waits for at once.
        ([[_product(1), _gather(1, 2), Wait(1)]] * 2, 3, 2),
        # The gather runs under three seconds of work.
        ([[_product(1), _gather(1, 2), _moved(3), Wait(1)]] * 2, 4, 0),
        # Rank 0 comes two seconds later.
        ([[_product(3), _gather(1, 2), Wait(1)], [_product(1), _gather(1, 2), Wait(1)]], 5, 2),
        # Two calls of a communicator follow one another.
        ([[_gather(1, 2), _gather(2, 1), Wait(2)]] * 2, 3, 3),
        # So do two of different ones over the same port.
        ([[_gather(1, 2, "a"), _gather(2, 1, "b"), Wait(2)]] * 2, 3, 3),
        # The second call is asked for before the first by rank 1 on another communicator: order counts by communicator.
        ([[_gather(1, 2, "a"), _gather(2, 1, "b"), Wait(1)], [_gather(1, 1, "b"), _gather(2, 2, "a"), Wait(2)]], 3, 3),
    ],
    ids=["exposed", "hidden", "late", "in order", "one port", "two communicators"],
)
def test_a_step_takes(events: Sequence[Sequence[Event]], seconds: float, exposed: float) -> None:
    replayed = replay(events, _cluster())
    assert replayed.step_s == pytest.approx(seconds)
    assert replayed.by_kind_s[replayed.last_rank].get(WAIT, 0.0) == pytest.approx(exposed)


def test_messages_of_a_pair_meet_in_the_order_of_posting_and_both_ways_at_once() -> None:
    def swap(peer: int, number: int, seconds: float) -> PostedCall:
        size = int(seconds * 1e9)
        return PostedCall(
            number, "", "ring", BOTH, messages=(PostedMessage(True, peer, size), PostedMessage(False, peer, size))
        )

    events = [[swap(1 - rank, 1, 2), swap(1 - rank, 2, 1), Wait(1), _product(1), Wait(2)] for rank in BOTH]
    replayed = replay(events, _cluster())
    assert replayed.step_s == pytest.approx(3)  # the second swap hides under the product
    assert [span.stop_s for span in replayed.spans[0] if span.stream == "network"] == pytest.approx([2, 2, 3, 3])


def test_messages_to_one_rank_in_one_call_have_sizes_of_their_own() -> None:
    sizes = (1_000_000_000, 2_000_000_000)
    events = [
        [PostedCall(1, "", "ring", BOTH, messages=tuple(PostedMessage(rank == 0, 1 - rank, n) for n in sizes)), Wait(1)]
        for rank in BOTH
    ]
    assert replay(events, _cluster()).step_s == pytest.approx(3)


def test_an_uneven_all_to_all_takes_as_long_as_its_busiest_port() -> None:
    sent = ((0, 1_000_000_000), (3_000_000_000, 0))
    events = [[PostedCall(1, "alltoall_base", "a", BOTH, sent_bytes=sent[rank]), Wait(1)] for rank in BOTH]
    assert replay(events, _cluster()).step_s == pytest.approx(3)


def test_a_device_waits_for_a_host_that_launches_more_slowly() -> None:
    cluster = _cluster(1, efficiency={"layer_host_s": 36.0})  # a second a launch
    replayed = replay([[_product(0.25), _product(0.25), Sync(), _product(2), _product(0.25)]], cluster)
    # Launched at 1 and 2; the host waits for 2.25 and launches at 3.25 and 4.25, the last runs after 5.25.
    assert replayed.step_s == pytest.approx(5.5)
    assert replayed.by_kind_s[0][HOST] == pytest.approx(2.75)


def test_a_call_that_its_peer_never_posts_is_named() -> None:
    with pytest.raises(PlanError, match="rank 0 waits for ever at its event 1 of 2"):
        replay([[_gather(1, 1), Wait(1)], [_product(1)]], _cluster())


def test_a_cluster_of_another_size_is_refused() -> None:
    with pytest.raises(PlanError, match="the record has 2 ranks, the cluster 3"):
        replay([[], []], _cluster(3))


def _record(cluster: str) -> RecordedStep:
    events = (_product(1), _gather(1, 2), _product(1), Wait(1), Sync(), _product(1))
    return RecordedStep(name="job", model="model", cluster=cluster, events=(events, events))


def test_a_record_is_read_as_it_was_written() -> None:
    record = _record("a100-80-40")
    content = record.to_dict()
    assert RecordedStep.from_dict(json.loads(json.dumps(content))) == record
    assert len(content["operations"]) == 1 and len(content["calls"]) == 1


def test_a_file_that_is_no_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text(json.dumps(_record("x").to_dict() | {"ranks": [[7]]}))
    with pytest.raises(PlanError, match=r"the record is not one of .*Record again"):
        read_recorded_step(path)


def test_the_trace_has_every_operation_and_message_of_every_rank() -> None:
    trace = trace_of_record(_record("x"), _cluster())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    of_rank_0 = [(event["name"], event["ts"], event["dur"]) for event in spans if event["pid"] == 0]
    assert of_rank_0 == [
        ("mm", 0, pytest.approx(1e6)),
        ("mm", pytest.approx(1e6), pytest.approx(1e6)),
        ("_allgather_base", pytest.approx(1e6), pytest.approx(2e6)),
        ("wait", pytest.approx(2e6), pytest.approx(1e6)),
        ("mm", pytest.approx(3e6), pytest.approx(1e6)),
    ]
    assert trace["otherData"]["step_s"] == pytest.approx(4)


def test_the_command_writes_the_trace_of_recorded_code(tmp_path: Path) -> None:
    step, cluster, out = (tmp_path / name for name in ("step.json", "cluster.json", "trace.json"))
    node = {"name": "n", "device": "A100-SXM-80GB", "count": 2}
    cluster.write_text(json.dumps({"nodes": [node]}))
    step.write_text(json.dumps(_record(str(cluster)).to_dict()))
    words = ["trace", "--from-code", str(step), "--out", str(out), "--json"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert json.loads(result.stdout)["events"] == len(json.loads(out.read_text())["traceEvents"])
