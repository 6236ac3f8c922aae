"""Timings to numbers: known numbers are found again, and a profile becomes a cluster file."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ds_hetero.cluster import cluster_from_dict
from ds_hetero.cluster.names import catalogue_name
from ds_hetero.errors import ClusterError
from ds_hetero.profiler.cluster_file import RankFacts, cluster_content, fingerprint, nodes_of
from ds_hetero.profiler.fit import (
    AttentionSample,
    LayerSample,
    TransferSample,
    fit_efficiency,
    fit_transfer,
)
from ds_hetero.profiler.pair_rounds import rounds_between, rounds_inside

PEAK, MEMORY = 1e12, 100e9


def layer(tokens, width, *, rate=0.6, memory=0.5, half_tokens=40.0, overhead_s=1e-4):
    flops, moved = 2.0 * tokens * 12 * width**2, 100.0 * tokens * width
    forward_s = flops / (PEAK * rate) * (1 + half_tokens / tokens) + moved / (MEMORY * memory) + overhead_s
    return LayerSample(tokens, flops, moved, forward_s, 2 * forward_s)


def attention(rows, keys, *, causal=False, half_rows=500.0, half_keys=90.0, edge=64.0, overhead_s=2e-5):
    pairs = (rows + half_rows) * (keys + half_keys) * (0.5 if causal else 1) + rows * edge * causal
    forward_s, backward_s = 4 * 64 * pairs / (PEAK * 0.4), 10 * 64 * pairs / (PEAK * 0.3)
    return AttentionSample(rows, keys, causal, 64, forward_s + overhead_s, backward_s + overhead_s)


LAYERS = [layer(tokens, width) for width in (256, 1024) for tokens in (64, 256, 1024, 4096)]
BLOCKS = [attention(rows, keys) for rows in (256, 1024, 8192) for keys in (256, 1024, 4096)]
BLOCKS += [attention(tokens * 4, tokens, causal=True) for tokens in (512, 2048)]


def test_known_numbers_are_found_again():
    found, errors = fit_efficiency(PEAK, MEMORY, LAYERS, BLOCKS)
    assert found.matmul == pytest.approx(0.6, rel=1e-3)
    assert found.memory == pytest.approx(0.5, rel=1e-3)
    assert found.matmul_half_tokens == pytest.approx(40, rel=1e-2)
    assert found.kernel_overhead_s == pytest.approx(1e-4, rel=1e-2)
    assert found.attention_forward == pytest.approx(0.4, rel=0.02)
    assert found.attention_backward == pytest.approx(0.3, rel=0.02)
    assert found.attention_half_rows == pytest.approx(500, rel=0.15)
    assert found.attention_half_kv == pytest.approx(90, rel=0.15)
    assert found.attention_edge_keys == pytest.approx(64, rel=0.1)
    assert max(error.largest for error in errors.values()) < 0.02


def test_errors_say_how_well_the_numbers_describe_the_timings():
    rng = np.random.default_rng(0)
    noisy = [s._replace(forward_s=s.forward_s * rng.uniform(0.8, 1.2)) for s in LAYERS]
    _, errors = fit_efficiency(PEAK, MEMORY, noisy, BLOCKS)
    assert 0.02 < errors["layer forward"].median < 0.2
    assert errors["layer backward"].median < errors["layer forward"].median
    assert errors["attention forward"].median < 0.01


def test_no_coefficient_is_negative():
    # Times that fall with size have no sensible line: the fit keeps a bandwidth and says how bad it is.
    found = fit_transfer([TransferSample(1e3, 1.0), TransferSample(1e6, 0.5), TransferSample(1e9, 0.1)])
    assert found.latency_s >= 0 and found.bytes_per_s > 0 and found.error.largest > 0.5
    exact = fit_transfer([TransferSample(n, 1e-4 + n / 2e9) for n in (1e3, 1e5, 1e7)])
    assert exact.latency_s == pytest.approx(1e-4) and exact.bytes_per_s == pytest.approx(2e9)


def test_rounds_pair_every_two_nodes_once():
    nodes = [[0, 1], [2, 3], [4, 5, 6, 7], [8], [9, 10]]
    rounds = rounds_between(nodes)
    met = [pair for name, pairs in rounds.items() if "at once" not in name for pair in pairs]
    leaders = [node[0] for node in nodes]
    assert sorted(map(sorted, met)) == [[a, b] for i, a in enumerate(leaders) for b in leaders[i + 1 :]]
    for pairs in rounds.values():
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))
    assert rounds_between([[0, 1, 2]]) == {}
    assert rounds_inside(nodes) == {
        "inside": ((0, 1), (2, 3), (4, 5), (9, 10)),
        "inside, all at once": ((4, 5), (6, 7)),
    }


@pytest.mark.parametrize(
    ("driver", "gib", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 80, "H100-SXM-80GB"),
        ("NVIDIA H100 PCIe", 80, "H100-PCIe-80GB"),
        ("NVIDIA H100 NVL", 94, "H100-NVL-94GB"),
        ("NVIDIA A100-SXM4-40GB", 40, "A100-SXM-40GB"),
        ("NVIDIA A100 80GB PCIe", 80, "A100-PCIe-80GB"),
        ("NVIDIA A800-SXM4-80GB", 80, "A800-SXM-80GB"),
        ("NVIDIA H200", 141, "H200-SXM-141GB"),
        ("NVIDIA L40S", 45, "L40S"),
        ("NVIDIA L4", 23, "L4"),
        ("NVIDIA A10", 23, "A10"),
        ("Tesla V100-SXM2-16GB", 16, "V100-SXM-16GB"),
        ("Tesla T4", 15, "T4"),
        ("NVIDIA GeForce RTX 4090", 24, "RTX-4090"),
        ("NVIDIA GeForce RTX 3080 Ti", 12, "RTX-3080Ti"),
        ("AMD Instinct MI300X", 192, "MI300X"),
        ("NVIDIA GeForce GTX 1080", 8, "GTX-1080"),
        ("NVIDIA GeForce GTX 980", 4, None),
    ],
)
def test_names_of_drivers_become_names_of_the_catalogue(driver, gib, name):
    assert catalogue_name(driver, int(gib * 2**30)) == name


def facts(node, device="CPU"):
    measured = {"torch": "2", "dtype": "float32", "attention": "sdpa"}
    return RankFacts(node=node, host=node, device=device, memory_bytes=2**30, **measured)


def timed(slower=1.0, **links):
    """One rank's samples; links by round as (seconds of latency, bytes per second)."""
    return {
        "peak_flops_per_s": PEAK / slower,
        "memory_bytes_per_s": MEMORY,
        "layers": [s._replace(forward_s=s.forward_s * slower, backward_s=s.backward_s * slower) for s in LAYERS],
        "attention": [s._replace(forward_s=s.forward_s * slower, backward_s=s.backward_s * slower) for s in BLOCKS],
        "links": {name: [TransferSample(n, line[0] + n / line[1]) for n in (1e4, 1e6)] for name, line in links.items()},
    }


def test_a_profile_becomes_a_cluster_file():
    ranks = [facts("a"), facts("a"), facts("b"), facts("b")]
    inside, between, crowd = (
        {"inside": (1e-5, 4e9)},
        {"between 0": (2e-5, 1e9)},
        {"between, all at once": (2e-5, 0.5e9)},
    )
    early = {"between, all at once": (2e-5, 0.8e9)}  # done before its neighbour, which then has the NIC alone
    samples = [
        timed(**inside, **between, **early),
        timed(1.02, **inside, **crowd),
        timed(2.0, **inside, **between, **early),
        timed(2.0, **inside, **crowd),
    ]
    for rank, sample in enumerate(samples):
        node = ranks[rank].node
        # Two ranks send 1 and 2 units to one another, at half of the link's rate.
        # Of all, ranks send 1, 2, 3 and 1 units; 4 x 2 of them pass a NIC.
        sample["links"][f"all-to-all inside {node}"] = [
            ([n, 2 * n], TransferSample(n, 3e-5 + 2 * n / 2e9)) for n in (1e4, 1e6)
        ]
        sample["message_overhead_s"] = (1e-4, 3e-4, 4e-4, 4e-4)[rank]
        sample["links"]["all-to-all of all"] = [
            ([n, 2 * n, 3 * n, n], TransferSample(n, 4e-5 + 2 * 4 * n / 0.8e9)) for n in (1e4, 1e6)
        ]
    content = cluster_content(ranks, samples)
    cluster = cluster_from_dict(content)
    assert [device.name for device in cluster.devices] == ["CPU", "CPU", "CPU#2", "CPU#2"]
    rate = [device.peak_flops_per_s * device.efficiency.matmul for device in cluster.devices]
    assert rate[0] / rate[2] == pytest.approx(2, rel=0.02)
    host_s = [device.efficiency.message_overhead_s for device in cluster.devices]
    assert host_s == pytest.approx([2e-4, 2e-4, 4e-4, 4e-4])
    assert cluster.link(0, 1).bytes_per_s == pytest.approx(4e9)
    assert cluster.link(0, 1).all_to_all_efficiency == pytest.approx(0.5)
    assert cluster.link(0, 1).all_to_all_latency_s == pytest.approx(3e-5)
    assert cluster.link(1, 2).bytes_per_s == pytest.approx(1e9) and cluster.link(1, 2).latency_s == pytest.approx(2e-5)
    assert cluster.nic_bytes_per_s.tolist() == pytest.approx([1e9, 1e9])
    assert cluster.link(1, 2).all_to_all_efficiency == pytest.approx(0.8)
    assert content["profile"]["fingerprint"] == fingerprint(ranks)
    assert {"CPU, layer forward", "CPU#2, attention backward", "inside a", "network"} <= set(
        content["profile"]["fit_errors"]
    )


def test_equal_cards_with_unlike_kernels_are_devices_of_their_own():
    ranks = [replace(facts("a"), attention=kernel) for kernel in ("torch", "triton", "torch")]
    samples = [timed(inside=(1e-5, 4e9)) for _ in ranks]
    slow = samples[1]["attention"]
    samples[1]["attention"] = [s._replace(forward_s=s.forward_s * 2, backward_s=s.backward_s * 2) for s in slow]
    for sample in samples:
        sample["links"]["all-to-all inside a"] = [
            ([n, n, n], TransferSample(n, 3e-5 + 2 * n / 2e9)) for n in (1e4, 1e6)
        ]
    content = cluster_content(ranks, samples)
    assert "torch, triton of torch 2" in content["description"]
    devices = cluster_from_dict(content).devices
    assert [device.name for device in devices] == ["CPU", "CPU#2", "CPU"]
    rates = [device.peak_flops_per_s * device.efficiency.attention_forward for device in devices]
    assert rates[0] / rates[1] == pytest.approx(2, rel=0.02) and rates[2] == rates[0]


def test_links_that_differ_become_overrides():
    ranks = [facts("a"), facts("b"), facts("c")]
    rounds = rounds_between([[0], [1], [2]])
    rates = {frozenset((0, 1)): 1e9, frozenset((0, 2)): 1e9, frozenset((1, 2)): 3e9}
    samples = []
    for rank in range(3):
        links = {n: (0.0, rates[frozenset(pairs[0])]) for n, pairs in rounds.items() if pairs and rank in pairs[0]}
        samples.append(timed(**links))
        samples[-1]["links"]["all-to-all of all"] = [([n, n, n], TransferSample(n, 2 * n / 1e9)) for n in (1e4, 1e6)]
    cluster = cluster_from_dict(cluster_content(ranks, samples))
    assert cluster.node_bytes_per_s[1, 2] == pytest.approx(3e9)
    assert cluster.node_bytes_per_s[0].tolist()[1:] == pytest.approx([1e9, 1e9])


def test_ranks_of_a_node_must_be_neighbours():
    with pytest.raises(ClusterError, match=r"ranks \[0, 2\] share the host a"):
        nodes_of([facts("a"), facts("b"), facts("a")])
