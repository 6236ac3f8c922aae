"""Cluster files: people's units in, SI units out, and one clear message for everything that is wrong."""

from __future__ import annotations

import itertools
import json
import time
from math import inf

import pytest

from ds_hetero.cluster import CATALOGUE, cluster_from_dict, cluster_names, cluster_to_dict, load_cluster
from ds_hetero.errors import ClusterError, ModelError
from ds_hetero.models import load_model
from tests.work import lines_run

CONTRACT = """
nodes:
  - {name: h100, device: H100-SXM-80GB, count: 8, link: {bandwidth_gb_per_s: 450, latency_us: 5}}
  - {name: a100, device: A100-SXM-80GB, count: 8, link: {bandwidth_gb_per_s: 300, latency_us: 5}}
network: {bandwidth_gb_per_s: 25, latency_us: 10}
links:   [{between: [h100, a100], bandwidth_gb_per_s: 12.5, latency_us: 20}]      # optional overrides
devices: {my-gpu: {peak_tflops: 120, memory_gib: 24, memory_bandwidth_gb_per_s: 900}}
"""


def small(**changes):
    data = {
        "nodes": [
            {"name": "a", "device": "L40S", "count": 2, "link": {"bandwidth_gb_per_s": 32}},
            {"name": "b", "device": "T4"},
        ],
        "network": {"bandwidth_gb_per_s": 1},
    }
    return data | changes


def test_a_cluster_file_is_read_in_si_units(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(CONTRACT)
    cluster = load_cluster(path)
    assert cluster.num_ranks == 16
    assert cluster.node_of_rank.tolist() == [0] * 8 + [1] * 8
    assert cluster.devices[0].peak_flops_per_s == 989.5e12 and cluster.devices[0].memory_bytes == 80 * 2**30
    assert cluster.link(0, 7).bytes_per_s == 450e9 and cluster.link(0, 7).latency_s == pytest.approx(5e-6)
    assert cluster.link(8, 15).bytes_per_s == 300e9
    assert cluster.link(0, 8) == cluster.link(15, 3) and cluster.link(0, 8).bytes_per_s == 12.5e9
    assert cluster.link(0, 8).latency_s == pytest.approx(20e-6)


def test_yaml_json_and_inline_are_the_same(tmp_path):
    data = small()
    (tmp_path / "c.json").write_text(json.dumps(data))
    (tmp_path / "c.yaml").write_text(json.dumps(data))  # JSON is YAML
    assert load_cluster(tmp_path / "c.json") == load_cluster(tmp_path / "c.yaml") == load_cluster(data)


def test_repeated_nodes_mixed_nodes_and_shared_ports():
    cluster = cluster_from_dict(
        {
            "nodes": [
                {
                    "name": "a",
                    "device": "RTX-4090",
                    "count": 2,
                    "repeat": 2,
                    "nics": {"count": 2, "bandwidth_gb_per_s": 3},
                },
                {"name": "m", "devices": ["T4", "RTX-3090"], "link": {"bandwidth_gb_per_s": 8, "total_gb_per_s": 12}},
            ],
            "network": {"bandwidth_gb_per_s": 1.25, "latency_us": 0},
            "links": [
                {"between": ["a", "a"], "bandwidth_gb_per_s": 5},
                {"between": ["a-1", "m"], "bandwidth_gb_per_s": 2},
            ],
        }
    )
    assert [node.name for node in cluster.nodes] == ["a-0", "a-1", "m"]
    assert [device.name for device in cluster.devices] == ["RTX-4090"] * 4 + ["T4", "RTX-3090"]
    assert cluster.nic_bytes_per_s.tolist() == [6e9, 6e9, 2e9]  # of m one port, as fast as its best link
    assert cluster.switch_bytes_per_s.tolist() == [float("inf"), float("inf"), 12e9]
    assert cluster.node_bytes_per_s.tolist() == [[16e9, 5e9, 1.25e9], [5e9, 16e9, 2e9], [1.25e9, 2e9, 8e9]]
    assert len(cluster.link_classes) == 5
    assert cluster.rank_name(4) == "rank 4 (T4 on m)"


@pytest.mark.parametrize(
    ("of_network", "of_node", "shared"),
    [
        ({}, {}, 1e9),
        ({"nics": 3}, {}, 3e9),
        ({"nics": "per_rank"}, {}, inf),
        ({"nics": 3}, {"nics": 2}, 2e9),
        ({"nics": "per_rank"}, {"nics": 1}, 1e9),
        ({}, {"nics": 8}, inf),
    ],
)
def test_ports_of_a_node_are_one_unless_the_file_says_more(of_network, of_node, shared):
    node = {"device": "L40S", "count": 4, **of_node}
    data = {
        "nodes": [{"name": "a", **node}, {"name": "b", "device": "L40S"}],
        "network": {"bandwidth_gb_per_s": 1, **of_network},
    }
    assert cluster_from_dict(data).nic_bytes_per_s.tolist() == [shared, inf]  # one card needs no more than a port


def test_measured_values_override_the_catalogue():
    cluster = cluster_from_dict(
        small(devices={"L40S": {"peak_tflops": 181, "efficiency": {"matmul": 0.9, "attention_half_rows": 0}}})
    )
    device, known = cluster.devices[0], CATALOGUE["L40S"].device
    assert device.peak_flops_per_s == 181e12 and device.memory_bytes == known.memory_bytes
    assert device.efficiency.matmul == 0.9 and device.efficiency.attention_half_rows == 0
    assert device.efficiency.attention_forward == known.efficiency.attention_forward


@pytest.mark.parametrize("name", ["lab", "hexiscale-setting-3"])
def test_a_cluster_survives_its_file(name):
    cluster = load_cluster(name)
    again = load_cluster(json.loads(json.dumps(cluster_to_dict(cluster))))
    assert again.devices == cluster.devices
    assert again.node_bytes_per_s.tolist() == cluster.node_bytes_per_s.tolist()
    assert again.node_p2p_s_per_byte == pytest.approx(cluster.node_p2p_s_per_byte)
    assert again.nic_bytes_per_s.tolist() == cluster.nic_bytes_per_s.tolist()


def test_cluster_files_of_the_papers_have_their_devices_and_links():
    kinds = {name: {} for name in cluster_names()}
    for name in cluster_names():
        for device in load_cluster(name).devices:
            kinds[name][device.name] = kinds[name].get(device.name, 0) + 1
    h100, a100, a800, l40s = "H100-SXM-80GB", "A100-SXM-80GB", "A800-SXM-80GB", "L40S"
    ti, r3090, r4090 = "RTX-3080Ti", "RTX-3090", "RTX-4090"
    assert kinds["hexiseq-setting-1"] == {h100: 4, a100: 4}
    assert kinds["hexiseq-setting-2"] == {h100: 4, a100: 8}
    assert kinds["hexiseq-setting-3"] == {h100: 8, a100: 8}
    assert kinds["hexiseq-simulation-1"] == {h100: 8, a100: 8, a800: 16}
    assert kinds["hexiseq-simulation-2"] == {h100: 16, a100: 16, a800: 16, l40s: 16}
    assert kinds["hexiseq-simulation-3"] == {h100: 16, a100: 16, a800: 48, l40s: 48}
    assert kinds["hexiseq-simulation-4"] == {h100: 48, a100: 8}
    assert kinds["hexiseq-simulation-4-homogeneous"] == {a100: 152}
    assert kinds["hexiseq-simulation-5"] == {h100: 52, a100: 4, a800: 8}
    assert kinds["hexiseq-simulation-5-homogeneous"] == {a100: 168}
    assert kinds["hexiscale-setting-1"] == {ti: 8, r3090: 8, r4090: 24}
    assert kinds["hexiscale-setting-2"] == {ti: 8, r3090: 8, r4090: 8, a800: 8}
    assert kinds["hexiscale-setting-3"] == {r3090: 16, r4090: 32, a800: 8}
    assert kinds["hexiscale-case-study"] == {a800: 3, r4090: 3, r3090: 2}
    assert kinds["zeppelin-a"] == {a800: 16} and kinds["zeppelin-b"] == {"H800-SXM-80GB": 16}
    assert kinds["zeppelin-c"] == {"H200-SXM-141GB": 16}
    assert {"lab", "cloud"} <= set(kinds)


def test_catalogue_has_what_people_own_with_sources():
    names = set(CATALOGUE)
    assert {"H100-SXM-80GB", "A100-SXM-80GB", "A800-SXM-80GB", "L40S", "RTX-4090", "RTX-3090", "RTX-3080Ti"} <= names
    parts = ["B300", "B200", "H200", "H100-NVL", "H100-PCIe", "A100-SXM-40", "H800", "L40", "L4", "A10", "V100", "T4"]
    assert [part for part in parts if not any(name.startswith(part) for name in names)] == []
    assert {"MI300X", "CPU"} <= names
    assert all(entry.device.source for entry in CATALOGUE.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": []}, "nodes must be a list with at least one node"),
        (
            {"nodes": [{"name": "a", "device": "H100-SMX-80GB"}]},
            r"nodes\[0\] \(a\): device 'H100-SMX-80GB' is not known \(did you mean \"H100-SXM-80GB\"\?\)\. ",
        ),
        (
            {"nodes": [{"name": "a", "device": "T4", "cuont": 2}]},
            r"nodes\[0\]: unknown key 'cuont' \(did you mean \"count\"\?\)\. ",
        ),
        ({"nodes": [{"device": "T4"}]}, r"nodes\[0\]: missing name"),
        (
            {"nodes": [{"name": "a", "device": "T4", "count": 0}]},
            r"nodes\[0\] \(a\).count must be a whole number >= 1, got 0",
        ),
        ({"nodes": [{"name": "a", "device": "T4", "devices": ["T4"]}]}, "either device and count, or devices"),
        ({"nodes": [{"name": "a", "device": "T4"}, {"name": "a", "device": "T4"}]}, "2 nodes are named 'a'"),
        ({"network": {"bandwidth_gb_per_s": 0}}, r"network.bandwidth_gb_per_s must be greater than 0, got 0"),
        ({"network": {"bandwidth_gb_per_s": 1, "latency_us": -1}}, r"network.latency_us must be at least 0, got -1"),
        (
            {"network": {"bandwidth_gb_per_s": "25 GB/s"}},
            "must be a number without a unit, got '25 GB/s'; the unit is in the key",
        ),
        (
            {"network": {"bandwidth_gb_per_s": float("inf")}},
            "network.bandwidth_gb_per_s is inf; numbers must be finite",
        ),
        ({"network": {"bandwidth_gbit_per_s": 100}}, r"gbit_per_s: this file has one unit per quantity"),
        ({"network": {"bandwidth_gb_per_s": 1, "latency_ms": 1}}, "Give latency_us, in microseconds"),
        ({"network": {}}, "network: missing bandwidth_gb_per_s"),
        (
            {"devices": {"x": {"peak_tflops": 1, "memory_gb": 2}}},
            "devices.x.memory_gb: this file has one unit per quantity. Give memory_gib",
        ),
        ({"devices": {"x": {"peak_tflops": 1}}}, "devices.x: missing memory_bandwidth_gb_per_s, memory_gib"),
        (
            {"devices": {"T4": {"efficiency": {"matmull": 1}}}},
            r"devices.T4.efficiency: unknown key 'matmull' \(did you mean \"matmul\"\?\)",
        ),
        (
            {"links": [{"between": ["a", "c"], "bandwidth_gb_per_s": 1}]},
            r"links\[0\].between: there is no node 'c'. The nodes are a, b",
        ),
        (
            {
                "nodes": [{"name": name, "device": "T4", "repeat": 2} for name in ("racks", "more", "z")],
                "links": [{"between": ["racks", "c"], "bandwidth_gb_per_s": 1}],
            },
            "The nodes are racks, racks-0, racks-1, more, more-0, more-1, z, z-0, z-1",
        ),
        ({"links": [{"between": ["a", "a"], "bandwidth_gb_per_s": 1}]}, "names 'a' twice, which is one node"),
        ({"links": [{"between": ["a"], "bandwidth_gb_per_s": 1}]}, "must name two nodes"),
        (
            {
                "links": [
                    {"between": ["a", "b"], "bandwidth_gb_per_s": 1},
                    {"between": ["b", "a"], "bandwidth_gb_per_s": 100, "latency_us": 3},
                ]
            },
            r"links\[1\] joins 'a' and 'b', which links\[0\] joins already, with other values: bandwidth_gb_per_s 1 "
            "and 100, latency_us unset and 3. .* differ by direction are not supported",
        ),
        ({"nets": {}}, "cluster: unknown key 'nets'"),
    ],
)
def test_a_mistake_in_a_cluster_file_is_named_by_its_key(changes, message):
    with pytest.raises(ClusterError, match=message):
        cluster_from_dict(small(**changes))


def test_several_nodes_need_a_network():
    data = small()
    del data["network"]
    with pytest.raises(ClusterError, match="network is missing, but there are 2 nodes"):
        cluster_from_dict(data)


def test_files_that_are_missing_or_no_mapping_are_refused_by_name(tmp_path):
    with pytest.raises(ClusterError, match='did you mean "hexiseq-setting-1"'):
        load_cluster("hexiseq-seting-1")
    (tmp_path / "c.yaml").write_text("nodes: [")
    with pytest.raises(ClusterError, match=r"c\.yaml' is not YAML"):
        load_cluster(tmp_path / "c.yaml")
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(ClusterError, match=r"c\.json' is not JSON"):
        load_cluster(tmp_path / "c.json")
    (tmp_path / "list.yaml").write_text("[1, 2]")
    with pytest.raises(ClusterError, match="cluster must be a mapping"):
        load_cluster(tmp_path / "list.yaml")


def test_a_part_keeps_the_devices_links_and_shares_of_its_ranks():
    link = {"bandwidth_gb_per_s": 10, "latency_us": 1}
    node = {"device": "A100-SXM-80GB", "count": 4, "link": {**link, "total_gb_per_s": 40}}
    whole = cluster_from_dict(
        {
            "nodes": [
                {**node, "name": "a", "nics": {"bandwidth_gb_per_s": 8}},
                {"name": "b", "device": "L40S", "count": 2, "link": link},
                {"name": "c", "device": "V100-SXM-32GB", "count": 2, "link": link},
            ],
            "network": link,
            "links": [
                {"between": ["a", "b"], "bandwidth_gb_per_s": 5, "latency_us": 9},
                {"between": ["b", "c"], "bandwidth_gb_per_s": 3, "latency_us": 9},
            ],
        }
    )
    assert whole.part(0, 8) == whole
    part = whole.part(3, 7)
    assert part.devices == whole.devices[3:7]
    assert [node.name for node in part.nodes] == ["a", "b", "c"]
    assert part.nodes[0].nic_bytes_per_s == 2e9 and part.nodes[0].switch_bytes_per_s == 10e9
    for a in range(4):
        for b in range(4):
            assert part.link(a, b) == whole.link(3 + a, 3 + b)
    assert whole.part(4, 8).links == (((0, 1), whole.links[1][1]),)


LINK = {"bandwidth_gb_per_s": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": {"T4": {"memory_gib": 10**400}}}, "devices.T4.memory_gib is a int of thousands|fit into 64 bits"),
        ({"devices": {"T4": {"memory_gib": 1e300}}}, "devices.T4.memory_gib must be between"),
        ({"devices": {"T4": {"peak_tflops": 1e308}}}, "devices.T4.peak_tflops must be between"),
        ({"devices": {"T4": {"memory_gib": 4, "reserved_gib": 24}}}, "T4.reserved_gib is 24, but memory_gib is 4"),
        ({"devices": {"T4": {"efficiency": {"matmul": 50}}}}, "efficiency.matmul must be between 1e-06 and 1, got 50"),
        ({"devices": {"T4": {"efficiency": {"memory": 1.01}}}}, "efficiency.memory must be between"),
        ({"network": {**LINK, "p2p_efficiency": 1000}}, "network.p2p_efficiency must be between"),
        ({"network": {"bandwidth_gb_per_s": 1e300}}, "network.bandwidth_gb_per_s must be between"),
        ({"network": {"bandwidth_gb_per_s": 1e-300}}, "network.bandwidth_gb_per_s must be between"),
        ({"network": {**LINK, "latency_us": 1e300}}, "network.latency_us must be between"),
        ({"nodes": [{"name": "a", "device": "T4", "count": 10**30}]}, "count is 1000.*64 bits"),
        ({"nodes": [{"name": "a", "device": "T4", "count": 2**31}]}, "count must be a whole number <= 1,000,000"),
        ({"nodes": [{"name": "a", "device": "T4", "count": 10**5, "repeat": 11}]}, "more than 1,000,000 devices"),
        ({"nodes": [{"name": f"{i}", "device": "T4", "count": 10**6} for i in "ab"]}, "more than 1,000,000 devices"),
        ({"nodes": [{"name": "a", "device": 7}]}, "device 7 is not known"),
        ({"nodes": [{"name": 7, "device": "T4"}]}, "name must be a word"),
        ({"devices": {7: {"peak_tflops": 1}}}, "the key 7 must be text"),
        ({"nodes": "T4" * 10**6}, "nodes must be a list"),
    ],
)
def test_what_no_cluster_can_be_is_refused_by_its_key(changes, message):
    with pytest.raises(ClusterError, match=message) as raised:
        cluster_from_dict(small(**changes))
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: [" * 100_000, "nested more than 64 deep"),
        ("description: 2020-99-99\nnodes: []\n", "nodes must be a list with at least one node"),
        ("nodes: [{name: a, device: T4, count: 2, count: 8}]", "'count' is given twice"),
        ("nodes: [{name: a, device: T4, count: " + "9" * 5_000 + "}]", "is not YAML: Exceeds the limit"),
        ("x: !!bool maybe", "is not YAML"),
    ],
)
def test_yaml_that_used_to_end_in_a_traceback_is_refused(text, message, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ClusterError, match=message):
        load_cluster(path)


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "\ud800"])
def test_names_that_no_file_can_have_are_unknown_clusters_and_models(name):
    with pytest.raises(ClusterError, match="neither a readable file nor a known name"):
        load_cluster(name)
    with pytest.raises(ModelError, match="nor a preset"):
        load_model(name)


def test_an_alias_bomb_is_refused_at_once(tmp_path):
    lines = ["x0: &x0 [0, 0, 0, 0, 0, 0, 0, 0, 0]"]
    lines += [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]" for i in range(1, 9)]
    path = tmp_path / "bomb.yaml"
    path.write_text("description:\n  " + "\n  ".join(lines) + "\nnodes: {a: *x8}\n")

    def load():
        with pytest.raises(ClusterError, match="more than 2,000,000 values"):
            load_cluster(path)

    assert lines_run(load) < 500_000


def test_twenty_thousand_nodes_are_read_at_once():
    nodes = [{"name": "a", "device": "T4", "repeat": 20_000}]
    links = [{"between": [f"a-{i}", f"a-{i + 1}"], "bandwidth_gb_per_s": 2} for i in range(1_000)]
    clusters = []
    assert lines_run(lambda: clusters.append(cluster_from_dict(small(nodes=nodes, links=links)))) < 50 * 20_000
    (cluster,) = clusters
    assert len(cluster.nodes) == 20_000 and len(cluster.links) == 1_000
    with pytest.raises(ClusterError, match="more than 1,000,000 pairs"):
        cluster_from_dict(small(nodes=nodes, links=[{"between": ["a", "a"], "bandwidth_gb_per_s": 1}]))


def test_all_links_of_three_hundred_nodes_are_read_in_seconds() -> None:
    """Each of the 44,850 links went over all those before it: ten billion steps, for which nobody waited."""
    nodes = [{"name": f"n{i}", "device": "A100-SXM-80GB"} for i in range(300)]
    pairs = itertools.combinations([node["name"] for node in nodes], 2)
    links = [{"between": list(pair), "bandwidth_gb_per_s": 10.0, "latency_us": 10} for pair in pairs]
    began_s = time.process_time()
    cluster = cluster_from_dict({"nodes": nodes, "network": {"bandwidth_gb_per_s": 25}, "links": links})
    assert len(cluster.links) == 300 * 299 // 2
    assert time.process_time() - began_s < 20  # it takes one
