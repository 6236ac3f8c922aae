"""What a stage takes, against the cost model of a single device, and what its gradients send, against the chunks."""

import inspect
from dataclasses import replace
from itertools import groupby

import pytest

from ds_hetero.cluster.files import load_cluster
from ds_hetero.cost.calibrated import CalibratedCostModel
from ds_hetero.cost.objective import TOO_LONG, Objective
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.cost.stages.stage import DeviceBlock, PlacedPipeline, PoolPart, Pools
from ds_hetero.cost.stages.stage_memory import DeviceParameters
from ds_hetero.cost.terms.rates import AchievedRates
from ds_hetero.cost.terms.trained import layer_weight_bytes, weight_bytes
from ds_hetero.cost.workload import BUCKET_BYTES, Buffers, Workload
from ds_hetero.errors import PlanError
from ds_hetero.gradient_sync import AsymmetricGradientSync
from ds_hetero.models import load_model
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.models.trained_weights import adapter_parameters
from ds_hetero.sharding.gradient_chunks import chunks_of, gathered_elements, reduced_elements
from ds_hetero.sharding.parameter_layouts import Cut, ParameterLayout
from ds_hetero.values.baselines import ulysses
from ds_hetero.values.plans import INNER
from ds_hetero.values.plans.section_keys import SECTION_KEYS

MODEL = load_model("llama-3.1-8b")
CLUSTER = load_cluster("hexiscale-setting-2")
WORK = Workload(seq_len=4096, zero_stage=0)


def parameters_of(model: ModelSpec, start: int, stop: int) -> int:
    """Weights of decoder layers ``[start, stop)`` and of the ends that come with them, a tied embedding once."""
    has_head = stop == model.num_layers
    tables = (start == 0) + has_head
    tables = min(tables, 1) if model.tied_embeddings else tables
    table = model.vocab_size * model.hidden_size
    return (stop - start) * model.layer_parameters + tables * table + has_head * model.hidden_size


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": False},
        {"adapter_rank": 16},
        {"adapter_rank": 16, "trains_embedding": True},
        {"adapter_rank": 16, "quantization": "nf4"},
        {"fused_kernels": True, "tiled_logits": True},
    ],
    ids=lambda changes: " ".join(changes) or "plain",
)
@pytest.mark.parametrize("checkpointing", [True, False, "selective"])
def test_one_device_takes_what_its_own_cost_model_says(checkpointing, changes):
    recomputation = {
        "activation_checkpointing": checkpointing is True,
        "selective_checkpointing": checkpointing == "selective",
    }
    work = replace(WORK, micro_batch=2, **recomputation, **changes)
    costs = CalibratedStageCosts(CLUSTER, MODEL, work)
    for kind, pool in enumerate(costs.pools.largest):
        option = costs.stage(kind, 1, "one", 2, 1)
        alone = CalibratedCostModel(CLUSTER.subset(pool.ranks[:1]), MODEL, work)
        flat = alone.arrays(ulysses(1, MODEL.num_heads, MODEL.num_kv_heads))
        assert option.layer_s == pytest.approx(alone.block_s(*flat), 1e-9)
        assert option.last_s == pytest.approx(alone.outside_blocks_s(flat[1])["loss_s"], 1e-9)
        kept = alone.memory_phases(*flat)["loss"].activations[0] / MODEL.num_layers
        assert option.memory.saved_bytes == pytest.approx(kept, 1e-9)


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_a_stage_of_adapters_holds_frozen_weights_and_the_states_of_adapters_alone(quantization):
    """Weights of the whole model as without pipelines; gradients in fp32 and optimizer state of adapters alone."""
    work = replace(WORK, adapter_rank=16, quantization=quantization)
    memory = CalibratedStageCosts(CLUSTER, MODEL, work).stage(3, 1, "one", 1, 1).memory
    adapters = adapter_parameters(MODEL, 16)
    assert memory.layer_bytes == layer_weight_bytes(MODEL, work) + (4 + 12) * adapters
    step = memory.phases(MODEL.num_layers, True, True, 1)["last, mlp"]
    final_norm_bytes = 2 * MODEL.hidden_size
    assert step.weights == weight_bytes(MODEL, work) - final_norm_bytes
    assert step.gradients == 4 * MODEL.num_layers * adapters
    assert step.optimizer_state == 12 * MODEL.num_layers * adapters
    assert step.bucket == min(BUCKET_BYTES, 2 * MODEL.num_layers * adapters)


def test_stages_that_share_sequences_count_adapters_as_their_schedule_does():
    """Two devices of one pool: the time of their layer is that of a job without pipelines on these two."""
    work = replace(WORK, adapter_rank=16, quantization="nf4", zero_stage=1)
    costs = CalibratedStageCosts(CLUSTER, MODEL, work)
    option = costs.stage(3, 2, "sequence", 1, 1)
    part = PoolPart(3, costs.pools.largest[3].node, 2)
    shared = CalibratedCostModel(CLUSTER.subset(costs.pools.largest[3].ranks[:2]), MODEL, work)
    assert option.layer_s == pytest.approx(
        shared.block_s(*shared.arrays(costs.schedule(DeviceBlock.of_parts([part]), 1))), 1e-9
    )


def test_tensor_stages_share_adapters_and_never_quantized_weights():
    """Each of q, k, v, o, gate, up and down has one of its adapter's matrices whole on both devices."""
    work = replace(WORK, adapter_rank=16)
    one, two = (CalibratedStageCosts(CLUSTER, MODEL, work).stage(3, size, "tensor", 1, 1).memory for size in (1, 2))
    whole = 16 * 7 * MODEL.hidden_size
    assert two.of_layer.trained == whole + (one.of_layer.trained - whole) / 2
    assert two.of_layer.owned == one.of_layer.owned / 2
    packed = CalibratedStageCosts(CLUSTER, MODEL, replace(work, quantization="nf4"))
    assert packed.stage(3, 2, "tensor", 1, 1) is None


def test_gradients_of_adapters_alone_travel_between_pipelines():
    """Two pipelines of one stage: what is reduced has the size of the adapters, not of the model."""
    sync_s = {}
    for rank in (0, 16):
        costs = CalibratedStageCosts(CLUSTER, MODEL, replace(WORK, adapter_rank=rank))
        pool = costs.pools.largest[3]
        block = DeviceBlock(3, pool.node, 1, "one")
        sync_s[rank] = costs.sync_times([PlacedPipeline((block,), (MODEL.num_layers,), 1, 1)] * 2).reduce_s
    adapters = MODEL.num_layers * adapter_parameters(MODEL, 16)
    assert sync_s[16] / sync_s[0] == pytest.approx(adapters / parameters_of(MODEL, 0, MODEL.num_layers), rel=0.01)


def test_the_loss_of_stages_is_never_that_of_ligers_kernels():
    """Stages sum the cross entropy of logits themselves: without tiles the logits of all tokens exist."""
    work = replace(WORK, tiled_logits=False)
    plain, fused = (
        CalibratedStageCosts(CLUSTER, MODEL, replace(work, fused_kernels=is_fused)) for is_fused in (False, True)
    )
    for size, inner in ((1, "one"), (2, "tensor"), (2, "sequence")):
        lean, usual = (costs.stage(3, size, inner, 1, 1) for costs in (fused, plain))
        assert (lean.memory.logits, lean.last_s) == (usual.memory.logits, usual.last_s)
        assert lean.memory.layer.mlp_saved_bytes < usual.memory.layer.mlp_saved_bytes


def test_tensor_parallelism_divides_work_and_adds_all_reduces():
    costs = CalibratedStageCosts(CLUSTER, MODEL, WORK)
    options = [costs.stage(3, size, "tensor", 1, 1) for size in (1, 2, 4)]
    assert options[0].layer_s > options[1].layer_s > options[2].layer_s
    assert options[0].layer_s < 2 * options[1].layer_s
    assert options[0].memory.layer_bytes == pytest.approx(4 * options[2].memory.layer_bytes)
    assert costs.stage(3, 3, "tensor", 1, 1) is None  # 32 heads


def test_tensor_stages_cut_embedding_head_and_logits_and_add_all_reduces():
    costs = CalibratedStageCosts(CLUSTER, MODEL, WORK)
    one, two = (costs.stage(3, size, inner, 1, 1) for size, inner in ((1, "one"), (2, "tensor")))
    table = MODEL.vocab_size * MODEL.hidden_size
    assert one.memory.of_end == DeviceParameters(weight_bytes=2 * table, trained=table, owned=table)
    assert two.memory.of_end == DeviceParameters(weight_bytes=table, trained=table / 2, owned=table / 2)
    assert two.memory.logits == one.memory.logits / 2
    link = CLUSTER.nodes[3].link

    def all_reduced_s(num_bytes):
        return 2 * (link.latency_s + num_bytes / 2 / (link.bytes_per_s * link.p2p_efficiency))

    activations = 4096 * MODEL.hidden_size * 2
    assert one.first_s == 0
    assert two.first_s == pytest.approx(all_reduced_s(activations))
    reduced_s = all_reduced_s(activations) + all_reduced_s(4 * 4096) + all_reduced_s(8 * 4096)
    assert one.last_s > two.last_s > one.last_s / 2 + reduced_s


def test_layers_that_are_computed_again_add_up_once_less_and_end_before_the_last_product():
    """Counted in the real code by tests/integration/pipelines/test_pipelines.py."""
    again, once = (
        CalibratedStageCosts(CLUSTER, MODEL, replace(WORK, activation_checkpointing=recomputes)).stage(
            3, 2, "tensor", 1, 1
        )
        for recomputes in (True, False)
    )
    link = CLUSTER.nodes[3].link
    sent_s = 4096 * MODEL.hidden_size / (link.bytes_per_s * link.p2p_efficiency)
    reduced_s = 2 * (link.latency_s + sent_s)
    rates = AchievedRates.of(CLUSTER, causal=True, head_dim=MODEL.head_dim)
    last_s = 2 * 4096 * MODEL.mlp_size * MODEL.hidden_size / 2 * rates.s_per_flop[CLUSTER.num_ranks - 1]
    assert again.forward_s == once.forward_s
    assert again.backward_s - once.backward_s == pytest.approx(once.forward_s - reduced_s - last_s)


@pytest.mark.parametrize("inner", INNER)
def test_tiles_count_in_every_kind_of_stage_that_computes_them(inner):
    """The logits of llama-3.1-8b at 32,768 tokens and their gradient take 16 GiB, and 1 GiB in tiles of 1,024."""
    assert not SECTION_KEYS["tile_tokens"].refused and inner not in SECTION_KEYS["tile_tokens"].idle
    work, size = replace(WORK, seq_len=32768), 1 if inner == "one" else 2
    whole, tiled = (
        CalibratedStageCosts(CLUSTER, MODEL, each).stage(3, size, inner, 1, 1)
        for each in (
            replace(work, tiled_logits=False),
            replace(work, tiled_logits=True, tiled_mlp=True, tile_tokens=1024),
        )
    )
    held = 32768 // (size if inner == "sequence" else 1)
    words = MODEL.vocab_size // (size if inner == "tensor" else 1)
    gradients = 2 * held * MODEL.hidden_size // (size if inner == "tensor" else 1)  # of the tiles
    assert whole.memory.logits - tiled.memory.logits == (held - 1024) * words * 4 - gradients
    assert tiled.memory_bytes(1, True, True, 1) < whole.memory_bytes(1, True, True, 1)
    assert tiled.backward_s > whole.backward_s  # MLPs and logits are computed again
    assert tiled.last_s > whole.last_s


@pytest.mark.parametrize(
    ("size", "inner", "in_layer", "beside"),
    [(1, "one", 0, [0, 2, 2, 4]), (2, "tensor", 4, [4, 4, 6, 6]), (2, "sequence", 2, [0, 2, 2, 4])],
)
def test_hosts_of_a_stage_take_time_for_messages_with_neighbours_and_for_all_reduces(size, inner, in_layer, beside):
    """In and out for each neighbour; two all-reduces in each pass of a layer, or one hop of a ring.

    Ranks that cut a layer also gather what each neighbour sends; they reduce once for the embedding, and for the head
    its input's gradient and twice numbers of the loss.
    """

    def at(overhead_s):
        def slowed(device):
            return replace(device, efficiency=replace(device.efficiency, message_overhead_s=overhead_s))

        nodes = tuple(replace(node, devices=tuple(map(slowed, node.devices))) for node in CLUSTER.nodes)
        return CalibratedStageCosts(replace(CLUSTER, nodes=nodes), MODEL, replace(WORK, activation_checkpointing=False))

    slow, fast = at(1.0), at(0.0)
    options = [costs.stage(3, size, inner, 1, 1) for costs in (slow, fast)]
    assert options[0].layer_s - options[1].layer_s == pytest.approx(in_layer, abs=1e-3)
    more = [options[0].extra_s(*ends) - options[1].extra_s(*ends) for ends in ((1, 1), (1, 0), (0, 1), (0, 0))]
    assert more == pytest.approx(beside, abs=1e-9)


def test_sequence_parallelism_keeps_parameters_and_divides_activations():
    costs = CalibratedStageCosts(CLUSTER, MODEL, WORK)
    one, four = costs.stage(3, 1, "one", 1, 1), costs.stage(3, 4, "sequence", 1, 1)
    assert four.memory.saved_bytes == pytest.approx(one.memory.saved_bytes / 4)
    assert four.memory.layer_bytes < one.memory.layer_bytes  # four ranks own the optimizer state
    assert four.memory.layer_bytes > one.memory.layer_bytes / 4
    assert one.layer_s / 4 < four.layer_s < one.layer_s


def test_hops_are_bound_by_the_busiest_port():
    costs = CalibratedStageCosts(CLUSTER, MODEL, WORK)
    network, volume = CLUSTER.link_class[2, 3], 4096 * MODEL.hidden_size * 2
    rate = CLUSTER.network.bytes_per_s

    def seconds(source, target):
        ends = DeviceBlock(2, 2, *source), DeviceBlock(3, 3, *target)
        return (costs.hop_s(int(network), *ends, 1) - CLUSTER.network.latency_s) * rate / volume

    assert seconds((1, "one"), (1, "one")) == pytest.approx(1)
    assert seconds((1, "one"), (2, "tensor")) == pytest.approx(1)  # half to each of two receivers, which gather
    assert seconds((2, "tensor"), (2, "tensor")) == pytest.approx(1 / 2)
    assert seconds((4, "tensor"), (2, "tensor")) == pytest.approx(1 / 2)
    assert seconds((2, "sequence"), (1, "one")) == pytest.approx(1)
    assert seconds((4, "sequence"), (4, "sequence")) == pytest.approx(1 / 4)


def test_gradients_take_what_the_chunks_send():
    """One matrix in two pipelines that cut it over 2 and 1 ranks on three nodes: the busiest port by its chunks."""
    model = replace(MODEL, num_layers=1)
    costs = CalibratedStageCosts(CLUSTER, model, WORK)
    blocks = DeviceBlock(2, 2, 2, "tensor"), DeviceBlock(3, 3, 1, "one"), DeviceBlock(1, 1, 1, "one")
    pipelines = [PlacedPipeline((block,), (1,), 1, 1) for block in blocks]
    width = 96 * 2**20
    layout = ParameterLayout(
        (width,), (Cut.along(0, (0, 1), (width // 2,) * 2), Cut.whole((width,), 2), Cut.whole((width,), 3))
    )
    chunks = chunks_of("weight", layout)
    sent = [reduced_elements(chunks, rank) + gathered_elements(chunks, rank) for rank in range(4)]
    parameters = parameters_of(model, 0, 1)
    busiest_s = max(sent) / width * parameters * 2 / CLUSTER.network.bytes_per_s
    assert 2 * costs.sync_times(pipelines).reduce_s == pytest.approx(busiest_s, rel=0.01)
    assert costs.sync_times(pipelines[:1]).reduce_s == 0


@pytest.mark.parametrize(("copies", "element_bytes", "added", "copied"), [(1, 4, 0, 8), (1, 2, 6, 6), (3, 2, 34, 18)])
def test_a_rank_reads_and_writes_what_the_synchronizer_does(copies, element_bytes, added, copied):
    """By parameter that a rank holds: to add up, and to copy what it owns; beside packing and unpacking 2 e each.

    Three copies in fp16: zeros 4, each of three gradients 2 + 8; then values 4 + 2, and 2 * 2 for each of three.
    """
    model, device = replace(MODEL, num_layers=1), CLUSTER.devices[0]
    work = replace(WORK, element_bytes=element_bytes, optimizer_bytes=12)
    pipelines = [PlacedPipeline((DeviceBlock(0, 0, 1, "one"),), (1,), 1, 1)] * copies
    costs = CalibratedStageCosts(CLUSTER, model, work)
    sync, held = costs.sync_times(pipelines), parameters_of(model, 0, 1)
    s_per_byte = 1 / (device.memory_bytes_per_s * device.efficiency.memory)
    back_s = (copied / copies + 2 * element_bytes) * held * s_per_byte
    own_s = (2 * element_bytes + added / copies + (2 * 12 + 2 * 4) / copies) * held * s_per_byte
    assert sync.exposed_s == pytest.approx(own_s + max(back_s, sync.reduce_s), rel=1e-3)


def test_the_bucket_that_a_plan_counts_is_the_synchronizers():
    default = inspect.signature(AsymmetricGradientSync.__init__).parameters["bucket_bytes"].default
    assert default == BUCKET_BYTES
    option = CalibratedStageCosts(CLUSTER, MODEL, WORK).stage(0, 1, "one", 1, 1)
    assert option.memory.phases(1, False, False, 1)["last, mlp"].bucket == BUCKET_BYTES


@pytest.mark.parametrize(("elements", "bucket"), [(500_000_000, BUCKET_BYTES), (10**6, 2 * 10**6), (0, 0)])
def test_reduce_bucket_size_is_the_bucket_of_pipelines(elements, bucket):
    """bf16 takes two bytes an element; DeepSpeed's default stands for the synchronizer's own bucket."""
    work = replace(WORK, buffers=Buffers(reduce_bucket=elements))
    option = CalibratedStageCosts(CLUSTER, MODEL, work).stage(0, 1, "one", 1, 1)
    assert option.memory.phases(1, False, False, 1)["last, mlp"].bucket == bucket


def test_devices_are_pooled_by_node_and_kind():
    pools = Pools(load_cluster("workstation-4090-3090"))
    assert sum(len(pool.ranks) for pool in pools.pools) == pools.cluster.num_ranks
    assert [name for name, _ in groupby(pools.kinds[pool.kind].device.name for pool in pools.pools)]
    whole = Pools(CLUSTER)
    assert [len(pool.ranks) for pool in whole.pools] == [8, 8, 8, 8]
    assert len(whole.kinds) == 4


def test_objectives_need_what_they_are_computed_from():
    devices = [kind.device for kind in Pools(CLUSTER).kinds]
    assert Objective.of("time", devices, 100).value(3.0, 0.0, 0.0) == 3
    with pytest.raises(PlanError, match=r"price_per_hour.*RTX-3080Ti"):
        Objective.of("cost", devices, 100)
    priced = [replace(device, price_per_hour=3.6) for device in devices]
    cost = Objective.of("cost", priced, 100)
    assert cost.value(50.0, 2 * cost.per_s[0], 0.0) == pytest.approx(50 * 2 * 3.6 / 3600 / 100)
    energy = Objective.of("energy", devices, 100)
    joules = 10 * 0.25 * 350 + 4 * 0.75 * 350  # a 3090 for 10 s, of which it computes 4
    assert energy.value(10, energy.per_s[1], 4 * energy.per_busy_s[1]) == pytest.approx(joules / 100)
    assert Objective.of("time", devices, 100, at_most_s=2).value(3.0, 0.0, 0.0) >= TOO_LONG


def test_a_subset_keeps_devices_and_links():
    subset = CLUSTER.subset([9, 25, 1])
    assert [device.name for device in subset.devices] == ["RTX-3080Ti", "RTX-3090", "A800-SXM-80GB"]
    assert [node.name for node in subset.nodes] == [CLUSTER.nodes[i].name for i in (0, 1, 3)]
