"""ZeRO-3 whose shards lie inside unequal nodes trains as one process does; only gradients leave a node, once a step.

Checkpoints: `test_zero3_checkpoints`, layout "nodes". Budget: 60 s.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from ds_hetero.errors import ConfigError
from ds_hetero.sharding.zero_partition import cut_parameter
from tests.integration.tiny import assert_same_parameters, batches, llama, train_on_one_process
from tests.integration.zero.test_zero3 import optimizer_of, start, states, train
from tests.support import run_deepspeed

STEPS = 5
NODES = {3: [2, 1], 6: [2, 1, 3]}
WEIGHTS = {3: [3, 1, 2], 6: [3, 1, 2, 1, 4, 2]}
# Ranks, and what differs from the plain run.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "2 + 1": (3, {}),
    "2 + 1 + 3": (6, {}),
    "small buckets": (3, {"zero": {"reduce_bucket_size": 3000, "sub_group_size": 1500}}),
    "no reduce_scatter": (3, {"zero": {"reduce_scatter": False}}),
    "accumulation": (3, {"zero": {"stage3_param_persistence_threshold": 1100}, "gradient_accumulation_steps": 2}),
    "bf16": (3, {"bf16": {"enabled": True}}),
}


def start_in_nodes(world: int = 3, **more: Any) -> tuple[Any, Any]:
    section = {"zero_within": NODES[world], **more.pop("section", {})}
    return start(more.pop("weights", WEIGHTS[world]), section=section, **more)


def reference(world: int, micro_batches: int) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    """Losses, norms and parameters of one process, whose steps take the batches of all ranks."""
    model, size = llama(), world * micro_batches
    parts = batches(STEPS * size)
    steps = [parts[i : i + size] for i in range(0, len(parts), size)]
    losses, norms = train_on_one_process(model, steps, optimizer_of(model))
    return losses, norms, {name: p.detach().numpy() for name, p in model.named_parameters()}


_SLOW = ("2 + 1", "2 + 1 + 3", "no reduce_scatter")


@pytest.mark.parametrize(
    ("world", "more"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in _SLOW)) for name, case in CASES.items()],
)
def test_training_equals_that_of_one_process(world: int, more: dict[str, Any]) -> None:
    micro_batches = more.get("gradient_accumulation_steps", 1)
    losses, norms, expected = reference(world, micro_batches)
    results = run_deepspeed(_train, world, world, micro_batches, more, nccl_rules=True)
    tolerance = 2e-2 if "bf16" in more else 1e-5
    ours = np.mean([of_rank[0] for of_rank in results], axis=0)
    np.testing.assert_allclose(ours.reshape(-1, micro_batches).mean(axis=1), losses, rtol=tolerance)
    for _, our_norms, ours in results:
        np.testing.assert_allclose(our_norms[micro_batches - 1 :: micro_batches], norms, rtol=tolerance)
        assert_same_parameters({name: ours[name] for name in expected}, expected, rtol=tolerance)
        np.testing.assert_equal(ours, results[0][2])  # copies, with their optimizer states, have the same bits


def _train(rank: int, world: int, micro_batches: int, more: dict[str, Any]) -> tuple[Any, ...]:
    handle, engine = start_in_nodes(world, **more)
    losses, norms = train(handle, engine, batches(STEPS * world * micro_batches)[rank::world])
    weights = np.split(np.array(WEIGHTS[world]), np.cumsum(NODES[world])[:-1])
    shares = [(of_node, i) for of_node in weights for i in range(len(of_node))]
    for param in engine.module.parameters():
        of_node, i = shares[rank]
        assert param.ds_tensor.numel() == cut_parameter(param.ds_numel, of_node.tolist()).sizes[i]
    return losses, norms, states(engine)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_between_nodes_only_gradients_travel_and_once_a_step(micro_batches: int) -> None:
    by_rank = run_deepspeed(_count, 3, micro_batches)
    gradients = by_rank[0][1]
    first, second = by_rank[0][0] + by_rank[1][0], by_rank[2][0]
    assert gradients <= first <= 1.05 * gradients
    assert gradients <= second <= 1.05 * gradients


def _count(rank: int, micro_batches: int) -> tuple[float, int]:
    """Bytes that this rank sends to the other node in a step, and those of the gradients."""
    from benchmarks.proof.recording import recording

    model = llama(hidden_size=128, intermediate_size=384)
    handle, engine = start_in_nodes(model=model, gradient_accumulation_steps=micro_batches)
    train(handle, engine, batches(3 * micro_batches)[rank::3])
    with recording() as events:
        train(handle, engine, batches(3 * 2 * micro_batches)[rank::3])
    elsewhere = [2] if rank < 2 else [0, 1]
    sent = 0
    for call in events:
        if getattr(call, "size", 0) != 3:  # inside a node, or a wait
            continue
        if call.splits is not None:
            sent += 4 * sum(call.splits[0][peer] for peer in elsewhere)
        else:  # small ones, as if every rank sent all to all others
            tensors = [tensor for argument in call.shape if isinstance(argument, tuple) for tensor in argument]
            sent += sum(8 * numel for _, numel in tensors) * len(elsewhere)
    return sent / 2, 4 * sum(param.ds_numel for param in model.parameters())


def test_nodes_follow_from_local_ranks_and_weights_from_memory() -> None:
    parts = batches(STEPS)
    model = llama()
    losses, norms = train_on_one_process(model, [[part] for part in parts], optimizer_of(model))
    for our_losses, our_norms, shares in run_deepspeed(_split_sequences, 3, parts):
        np.testing.assert_allclose(our_losses, losses, rtol=1e-5)
        np.testing.assert_allclose(our_norms, norms, rtol=1e-5)
        assert shares[0] > 2 * shares[1] and shares[2] == 1


def _split_sequences(rank: int, parts: list[Any]) -> tuple[Any, ...]:
    os.environ["LOCAL_RANK"] = "010"[rank]
    devices = {
        name: {"peak_tflops": 1, "memory_gib": gib, "memory_bandwidth_gb_per_s": 20}
        for name, gib in (("large", 6), ("small", 2))
    }
    link = {"bandwidth_gb_per_s": 1, "latency_us": 20}
    nodes = [{"name": "two", "devices": ["large", "small"], "link": link}, {"name": "one", "devices": ["small"]}]
    cluster = {"nodes": [*nodes[:1], {**nodes[1], "link": link}], "network": link, "devices": devices}
    section = {"zero_within": "node", "zero_partition": "memory", "cluster": cluster, "seq_len": 64}
    handle, engine = start(None, "ulysses", section=section)
    losses, norms = [], []
    for shard in handle.dataloader(parts, batches="same"):
        loss = handle.loss(engine(**shard), shard)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
        norms.append(float(engine.get_global_grad_norm()))
    nodes_of = engine.optimizer.nodes.weights
    return losses, norms, [weight / sum(of_node) for of_node in nodes_of for weight in of_node]


def test_whole_parameters_and_gradients_are_read_and_written() -> None:
    model = llama()
    torch.stack([model(**part).loss for part in batches(3)]).mean().backward()
    expected = {name: param.grad.numpy() for name, param in model.named_parameters()}
    for first, both, values in run_deepspeed(_look_inside, 3):
        assert_same_parameters(first, expected)
        assert_same_parameters(both, {name: 2 * gradient for name, gradient in expected.items()})
        assert values == {7.0}


def _look_inside(rank: int) -> Any:
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    handle, engine = start_in_nodes()
    params = dict(engine.module.named_parameters())
    read = []
    for batch in handle.dataloader(batches(3)[rank::3], batches="own"):
        for _ in range(2):  # gradients that crossed before take what comes after
            engine.backward(handle.loss(engine(**batch), batch))
            read.append({name: safe_get_full_grad(param).numpy().copy() for name, param in params.items()})
    first = next(iter(params.values()))
    with deepspeed.zero.GatheredParameters([first], modifier_rank=2):
        if rank == 2:
            first.data.fill_(7)
    with deepspeed.zero.GatheredParameters([first]):
        values = set(first.data.reshape(-1).tolist())
    return *read, values


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"section": {"zero_within": [1, 1]}}, r"divides 3 ranks into nodes of \[1, 1\]"),
        ({"section": {"zero_within": "node"}}, r"divides 3 ranks into nodes of \[3\]"),
        ({"zero": {"stage": 2}}, "does not work with ZeRO stage 2"),
        ({"zero": {"offload_optimizer": {"device": "cpu"}}}, "does not work with offload_optimizer"),
        ({"zero": {"offload_param": {"device": "cpu"}}}, "does not work with offload_param"),
        ({"section": {"elastic": {}}}, 'does not work with "elastic"'),
        ({"weights": [1, 0, 1]}, "gives rank 1 a weight of 0"),
    ],
)
def test_what_does_not_work_is_refused_by_name_on_every_rank(more: dict[str, Any], message: str) -> None:
    run_deepspeed(_refused, 3, more, message)


def _refused(rank: int, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start_in_nodes(**more)
