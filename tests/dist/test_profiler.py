"""The profiler on live gloo ranks. Budget: 25 s."""

from __future__ import annotations

import json
import logging

import pytest

from ds_hetero.cluster import cluster_from_dict
from tests.support import run_ranks


def test_live_ranks_are_measured_once_and_cached(tmp_path):
    results = run_ranks(_measure_twice, 2, tmp_path)
    assert results[0] == results[1]
    content, fresh, again, fresh_again = results[0]
    assert fresh and not fresh_again and again == content
    cluster = cluster_from_dict(content)
    assert cluster.num_ranks == 2 and len(cluster.nodes) == 1
    device = cluster.devices[0]
    assert 1e8 < device.peak_flops_per_s < 1e14 and device.efficiency.attention_forward > 0
    assert 1e6 < cluster.link(0, 1).bytes_per_s < 1e12
    profile = content["profile"]
    assert len(profile["samples"]) == 2
    assert {"layer forward", "attention backward"} <= {term.split(", ")[-1] for term in profile["fit_errors"]}
    assert [path.name for path in tmp_path.iterdir()] == [f"{profile['fingerprint']}.json"]


def _measure_twice(rank, folder):
    from ds_hetero.profiler.cache import measure_cached

    first = measure_cached(folder=folder, window_s=0.001, show_progress=False)
    return *first, *measure_cached(folder=folder, window_s=0.001, show_progress=False)


@pytest.mark.parametrize("damage", ["{", "[]", '{"profile": {"version": 1, "fingerprint": "other"}}', "\x80"])
def test_a_damaged_cache_is_not_trusted(tmp_path, caplog, damage, monkeypatch):
    from ds_hetero.profiler import cache

    measured = {"nodes": [{"name": "a", "device": "CPU"}], "profile": {"version": 1}}
    monkeypatch.setattr(cache, "measure", lambda **_: measured)
    monkeypatch.delenv("RANK", raising=False)
    cache.measure_cached(folder=tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage.encode("latin1"))
    with caplog.at_level(logging.WARNING):
        content, fresh = cache.measure_cached(folder=tmp_path)
    assert fresh and content == measured
    assert "ignoring the damaged profile" in caplog.text and "measuring anew" in caplog.text
    assert json.loads(path.read_text()) == measured


def test_one_process_is_measured_without_a_launcher(monkeypatch, tmp_path):
    from ds_hetero.profiler.measure import measure

    monkeypatch.delenv("RANK", raising=False)
    content = measure(window_s=0.002, show_progress=False)
    assert cluster_from_dict(content).num_ranks == 1
    assert json.loads(json.dumps(content)) == content


def test_a_rank_that_cannot_be_measured_is_named_on_every_rank():
    told = run_ranks(_measure_with_a_broken_rank, 2)
    assert told[0] == told[1]
    assert "rank 1: attention: RuntimeError: out of order" in told[0] and "give a cluster file" in told[0]


def _measure_with_a_broken_rank(rank):
    from ds_hetero.errors import ClusterError
    from ds_hetero.profiler.device_probes import SdpaProbe
    from ds_hetero.profiler.measure import measure

    class Broken(SdpaProbe):
        def forward(self, q, k, v, causal):
            raise RuntimeError("out of order")

    probe = Broken() if rank == 1 else SdpaProbe()
    with pytest.raises(ClusterError) as caught:
        measure(attention=probe, window_s=0.001, show_progress=False)
    return str(caught.value)
