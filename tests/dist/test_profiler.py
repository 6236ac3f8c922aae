"""The profiler on live gloo ranks. Budget: 25 s."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from math import inf

import pytest
import torch

from ds_hetero.cluster import cluster_from_dict
from tests.support import run_ranks

pytestmark = pytest.mark.alone  # it waits in real time for what other work on the cores would delay


def test_live_ranks_are_measured_once_and_cached(tmp_path):
    results = run_ranks(_measure_twice, 2, tmp_path)
    assert results[0] == results[1]
    content, fresh, again, fresh_again = results[0]
    assert fresh and not fresh_again and again == content
    cluster = cluster_from_dict(content)
    assert cluster.num_ranks == 2 and len(cluster.nodes) == 1
    device = cluster.devices[0]
    assert 1e8 < device.peak_flops_per_s < 1e14 and device.efficiency.attention_forward > 0
    assert 1e-6 < device.efficiency.message_overhead_s < 1.0
    assert 1e6 < cluster.link(0, 1).bytes_per_s < 1e12
    assert [tokens for tokens, _ in device.attention_s] == [256, 512, 1024]
    profile = content["profile"]
    assert len(profile["samples"]) == 2
    assert {"layer forward", "attention backward"} <= {term.split(", ")[-1] for term in profile["fit_errors"]}
    assert [path.name for path in tmp_path.iterdir()] == [f"{profile['fingerprint']}.json"]
    assert len(profile["samples"][1]["repeats"]) == 5  # parts of a profile
    assert profile["machine"]["spread"] >= 0 and 0 <= profile["machine"]["others_share"] <= 1
    assert datetime.now(timezone.utc) - datetime.fromisoformat(profile["measured_at"]) < timedelta(minutes=5)


def _measure_twice(rank, folder):
    from ds_hetero.profiler import machine
    from ds_hetero.profiler.cache import measure_cached

    machine.MAX_OTHERS = machine.MAX_SPREAD = inf  # tests run beside others
    first = measure_cached(folder=folder, window_s=0.001, show_progress=False)
    return *first, *measure_cached(folder=folder, window_s=0.001, show_progress=False)


@pytest.mark.slow
def test_a_profile_of_a_busy_machine_is_used_and_not_kept(tmp_path):
    for content, is_new, text in run_ranks(_measure_beside_a_busy_process, 2, tmp_path):
        assert is_new and cluster_from_dict(content).num_ranks == 2
        assert "on a busy machine: other processes kept" in text and "not kept" in text
    assert not list(tmp_path.iterdir())


def _measure_beside_a_busy_process(rank, folder):
    from ds_hetero.profiler import machine
    from ds_hetero.profiler.cache import describe_age, measure_cached

    machine.MAX_OTHERS = 0.5 / os.cpu_count()  # one process on a machine of many cores is not much
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        content, is_new = measure_cached(folder=folder, window_s=0.03, show_progress=False)
        return content, is_new, describe_age(content, is_new)
    finally:
        busy.kill()
        busy.wait()


def test_ranks_are_measured_as_they_will_train(tmp_path):
    """Another head size or soft cap is another profile."""
    run_ranks(_measure_models, 2, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def _measure_models(rank, folder):
    from ds_hetero.profiler import machine
    from ds_hetero.profiler.cache import measure_cached
    from ds_hetero.profiler.kernel_probe import kernel_probe

    machine.MAX_OTHERS = machine.MAX_SPREAD = inf
    for head_dim, softcap in ((96, 30.0), (96, None)):
        probe = kernel_probe(torch.float32, None, head_dim, softcap)
        content, is_new = measure_cached(attention=probe, folder=folder, window_s=0.001, show_progress=False)
        profile = content["profile"]
        assert is_new
        assert {sample[3] for sample in profile["samples"][rank]["attention"]} == {head_dim}
        assert (profile["ranks"][rank]["head_dim"], profile["ranks"][rank]["softcap"]) == (head_dim, softcap)


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
