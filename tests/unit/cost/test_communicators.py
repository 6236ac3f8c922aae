"""Memory of NCCL's communicators: by hand, against what others saw, and where it counts."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from ds_hetero.cluster.files import cluster_from_dict
from ds_hetero.cluster.notation import read_notation
from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.units import GB, GIB
from ds_hetero.cost.stages.hexiscale import make_stage_costs
from ds_hetero.cost.stages.stage import StageOption
from ds_hetero.cost.terms.communicators import (
    LOCAL_CONNECTION_BYTES,
    REMOTE_MESSAGE_BYTES,
    TABLE_BYTES,
    Channels,
    Communicators,
    bytes_beyond_reserve,
    stage_communicator_bytes,
)
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.cost.workload import Workload
from ds_hetero.models import load_model
from ds_hetero.planner.pipelines.explain import memory_text, nothing_fits

MIB = 2**20


def cluster_of(gpus: str, network: str | None = None) -> Cluster:
    return cluster_from_dict(read_notation(gpus, network).content)


def test_a_first_all_to_all_of_eight_h100_takes_what_was_seen() -> None:
    """NVIDIA/nccl#1685: 1.06 GB beside PyTorch's memory before, 4.34 GB after; 32 channels a peer, 10 + 2 MiB each."""
    inside = Channels.inside(cluster_of("8xH100-SXM-80GB").nodes[0])
    assert (inside.collective, inside.per_peer, inside.num_message_channels) == (24, 32, 32)
    assert LOCAL_CONNECTION_BYTES == 10 * MIB + 2 * MIB
    messages, tables = inside.message_bytes(7), TABLE_BYTES * inside.num_message_channels
    assert messages == 7 * 32 * 12 * MIB
    assert 0.9 * (4.34 - 1.06) * GB < messages + tables < (4.34 - 1.06) * GB


@pytest.mark.parametrize(
    ("gpus", "collective", "per_peer"),
    [("8xA100-SXM-80GB", 24, 32), ("8xV100-SXM-32GB", 12, 16), ("2xL40S", 2, 2), ("8xB200-SXM-180GB", 24, 32)],
)
def test_channels_of_a_node_follow_its_links(gpus: str, collective: int, per_peer: int) -> None:
    inside = Channels.inside(cluster_of(gpus).nodes[0])
    assert (inside.collective, inside.per_peer) == (collective, per_peer)


def test_channels_between_nodes_follow_their_ports() -> None:
    """Of 8 ports rings print 16 channels (NVIDIA/nccl#1453); of one port 4, all of whose ends one rank may have."""
    cluster = cluster_of("8xH100 | 8xH100", "50")
    one = Channels.between(cluster)
    assert (one.collective, one.per_peer, one.connection_bytes) == (4, 4, 20 * MIB)
    ported = replace(cluster, nodes=tuple(replace(node, nic_bytes_per_s=8 * 50 * GB) for node in cluster.nodes))
    eight = Channels.between(ported)
    assert (eight.collective, eight.connection_bytes) == (16, 13 * MIB)


def test_bytes_of_schedules_by_hand() -> None:
    """Four H100 of one node: all ranks have four communicators for collectives, whatever the groups."""
    cluster = cluster_of("4xH100-SXM-80GB")
    communicators = Communicators.of(cluster, Workload(seq_len=4096))
    collective = TABLE_BYTES * 32 + 2 * 24 * LOCAL_CONNECTION_BYTES
    of_peer, reserve = 32 * LOCAL_CONNECTION_BYTES, 1.5 * GIB / 3
    of_two = TABLE_BYTES * 32 + 24 * LOCAL_CONNECTION_BYTES

    def bytes_of(*groups: list[int]) -> list[float]:
        return communicators.bytes_beyond_reserve_D(Grouping(cluster, groups)).tolist()

    assert bytes_of([0, 1, 2, 3]) == [4 * collective + 3 * of_peer - reserve] * 4
    assert bytes_of([0], [1], [2], [3]) == [4 * collective + 2 * of_peer - reserve] * 4
    assert bytes_of([0, 1], [2, 3]) == [4 * collective + of_two + of_peer + of_peer - reserve] * 4
    # Rank 2 has the messages of all ranks of the other group; they share its one head with it.
    uneven = bytes_of([0, 1], [2], [3])
    # Groups of 2 and 1 ranks have unlike tokens, and an odd ring has three colours: two more communicators are made.
    of_colours = 2 * TABLE_BYTES * 32
    assert uneven[2] == 4 * collective + (2 + 1) * of_peer + of_colours - reserve
    assert uneven[0] == 4 * collective + of_two + of_peer + (1 + 1) * of_peer + of_colours - reserve


def test_groups_of_several_nodes_share_one_buffer_for_messages_of_the_network() -> None:
    cluster = cluster_of("2xA100-SXM-80GB | 2xA100-SXM-80GB", "25")
    communicators, channels = Communicators.of(cluster, Workload(seq_len=4096)), Channels.between(cluster)
    together = communicators.bytes_beyond_reserve_D(Grouping(cluster, [range(4)]))
    exchanged = REMOTE_MESSAGE_BYTES * channels.num_message_channels + channels.per_peer * LOCAL_CONNECTION_BYTES
    # WORLD, messages, DeepSpeed's, sequence parallelism and the far group.
    far = REMOTE_MESSAGE_BYTES * channels.num_message_channels
    assert together.tolist() == [5 * channels.collective_bytes(4) + far + exchanged - GIB / 2] * 4


def test_zero_within_nodes_has_communicators_of_its_own() -> None:
    cluster = cluster_of("2xA100-SXM-80GB | 2xA100-SXM-80GB", "25")
    plain, within = (
        Communicators.of(cluster, Workload(seq_len=4096, zero_stage=3, zero_within=flag)) for flag in (False, True)
    )
    job, node = Channels.between(cluster), Channels.inside(cluster.nodes[0])
    more = job.collective_bytes(4) + job.message_bytes(0) + node.collective_bytes(2)
    assert (within.fixed_bytes_D - plain.fixed_bytes_D).tolist() == [more] * 4


def test_cpus_geforce_and_lone_devices_need_none() -> None:
    cpus = cluster_from_dict({"nodes": [{"name": "host", "device": "CPU", "count": 8}]})
    for cluster in (cpus, cluster_of("H100-SXM-80GB"), cluster_of("2x4090 | 2x3090", "1.25")):
        communicators = Communicators.of(cluster, Workload(seq_len=4096))
        assert not communicators.bytes_beyond_reserve_D(Grouping(cluster, [range(cluster.num_ranks)])).any()
    assert bytes_beyond_reserve(cpus.devices[0], 10 * GIB) == 0
    assert bytes_beyond_reserve(cluster_of("H100-SXM-80GB").devices[0], GIB) == pytest.approx(GIB / 2)


def test_stages_count_what_they_share_with_their_neighbours() -> None:
    """One rank of a node of two: job, two boundaries of both directions, one set of holders."""
    cluster = cluster_of("2xL40S | 2xL40S", "25")
    node, job = cluster.nodes[0], Channels.between(cluster)
    inside = Channels.inside(node)
    boundary = 2 * inside.collective_bytes(2) + inside.message_bytes(1)
    of_job = 4 * job.collective_bytes(4)
    for neighbours in (0, 1, 2):
        of_ends = stage_communicator_bytes(cluster, node, local_ranks=1, ranks=1, neighbours=neighbours, holders=1)
        assert of_ends == of_job + neighbours * boundary
    synced = stage_communicator_bytes(cluster, node, local_ranks=1, ranks=1, neighbours=2, holders=2) - (
        of_job + 2 * boundary
    )
    assert synced == job.collective_bytes(2) + job.message_bytes(0)
    alone = cluster_of("2xL40S")
    whole = stage_communicator_bytes(alone, alone.nodes[0], local_ranks=2, ranks=2, neighbours=0, holders=1)
    assert whole == (4 + 2) * inside.collective_bytes(2) + inside.message_bytes(1)


def test_a_stage_has_the_communicators_of_the_neighbours_that_it_has() -> None:
    """Four A100 on a node, one a stage: both ends of a pipeline have one neighbour, whoever is alone has none."""
    cluster = cluster_of("4xA100-SXM-80GB")
    inside = Channels.inside(cluster.nodes[0])
    boundary = 2 * inside.collective_bytes(2) + inside.message_bytes(1)
    option = _stage(cluster)
    of_ends = {ends: option.memory.communicator_bytes(*ends) for ends in product((False, True), repeat=2)}
    standing = 4 * inside.collective_bytes(4) - GIB / 2
    assert of_ends == {
        (False, False): standing + 2 * boundary,
        (True, False): standing + boundary,
        (False, True): standing + boundary,
        (True, True): standing,
    }
    # They are part of the memory that is needed, whatever of a device is left for both.
    assert option.capacity_bytes == cluster.devices[0].usable_bytes
    cpus = _stage(cluster_from_dict({"nodes": [{"name": "host", "device": "CPU", "count": 4}]}))
    for (first, last), communicators in of_ends.items():
        tensors = cpus.memory_bytes(2, first, last, 1)
        assert option.memory_bytes(2, first, last, 1) == pytest.approx(tensors + communicators)


def test_a_pipeline_of_two_ranks_has_one_neighbour_even_as_a_middle_stage() -> None:
    """The search asks for middle stages of clusters that have no third one."""
    memory = _stage(cluster_of("2xA100-SXM-80GB")).memory
    assert memory.communicator_bytes(False, False) == memory.communicator_bytes(True, False)


def _stage(cluster: Cluster) -> StageOption:
    option = make_stage_costs("calibrated", cluster, load_model("llama-3.2-1b"), Workload(seq_len=4096)).stage(
        0, 1, "one", 1, 1
    )
    assert option is not None
    return option


def test_texts_of_what_fits_name_the_part_of_communicators() -> None:
    text = memory_text(_stage(cluster_of("4xA100-SXM-80GB")), 20 * GIB, first=True, last=False)
    assert re.fullmatch(r"20\.0 of \d+\.\d GiB a device \(NCCL's communicators \d\.\d\)", text), text
    cpus = cluster_from_dict({"nodes": [{"name": "host", "device": "CPU", "count": 4}]})
    assert "NCCL" not in memory_text(_stage(cpus), 20 * GIB, first=True, last=False)


def test_what_is_missing_holds_the_communicators_that_are_named() -> None:
    """They are a part of what a stage needs beyond its device, not beside it."""
    cluster = cluster_of("4xA100-SXM-40GB")
    costs = make_stage_costs("calibrated", cluster, load_model("llama-3.1-70b"), Workload(seq_len=8192))
    text = nothing_fits([costs], None)
    found = re.search(
        r"stage (\d), .* exceeds its memory by (\d+\.\d) GiB; stage \1 counts (\d+\.\d) GiB of NCCL's", text
    )
    assert found is not None, text
    option = costs.stage(0, 1, "one", 1, 1)
    assert option is not None
    communicators = option.memory.communicator_bytes(True, False)
    without = option.memory_bytes(1, True, False, 1) - communicators - option.capacity_bytes
    assert float(found[2]) == pytest.approx((without + communicators) / GIB, abs=0.06)
    assert float(found[3]) == pytest.approx(communicators / GIB, abs=0.06)


def test_more_groups_and_ranks_never_need_less_than_one_rank_alone() -> None:
    cluster = cluster_of("8xH100-SXM-80GB | 8xA100-SXM-80GB", "25")
    communicators = Communicators.of(cluster, Workload(seq_len=4096))
    least = communicators.fixed_bytes_D - communicators.covered_bytes_D
    rng = np.random.default_rng(0)
    for _ in range(50):
        order = rng.permutation(16)
        cuts = np.sort(rng.choice(np.arange(1, 16), size=rng.integers(0, 8), replace=False))
        needed = communicators.bytes_beyond_reserve_D(Grouping(cluster, np.split(order, cuts)))
        assert (needed >= least).all() and np.isfinite(needed).all()
