"""A running job changes its schedule when a rank becomes slow, goes on with the same loss, and else lets it be.

Slow ranks are emulated: attention and MLP really compute, and then the rank sleeps until a device of the given rate
would be done with that work. Sleeping needs no core, so the ratio of the ranks' speeds is the same on a busy machine.

Budget: 60 s.
"""

from __future__ import annotations

import csv
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.tiny import assert_same_parameters, batches, ds_config, llama, parameters, train_on_one_process
from tests.support import run_deepspeed

pytestmark = [
    pytest.mark.alone,
    pytest.mark.measured,
]  # it waits in real time for what other work on the cores would delay

LENGTH, STEPS, MORE_STEPS, SLOW_FROM = 96, 27, 2, 6
PAIRS_PER_S, TOKENS_PER_S = 0.7e6, 0.4e4  # of a rank of speed 1, in one layer
EVEN = {
    "version": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "groups": [{"ranks": [0], "tokens": [1], "heads": [4]}, {"ranks": [1], "tokens": [1], "heads": [4]}],
}
TWO_CPUS = {
    "nodes": [{"name": "host", "device": "CPU", "count": 2, "link": {"bandwidth_gb_per_s": 2, "latency_us": 50}}],
    "network": {"bandwidth_gb_per_s": 2, "latency_us": 50},
}
REPLAN = {"enabled": True, "interval_steps": 5, "min_gain": 0.1}
SHARES = ("attention", "model", "all_to_all", "ring_wait", "idle", "rest")


class EmulatedDevice:
    """Makes a rank's attention and MLP take as long as on a device of ``speed``, which may change."""

    def __init__(self, model: Any, cv: float, seed: int) -> None:
        from ds_hetero.runtime.attention.kernels import torch_native

        self.speed, self._cv, self._random = 1.0, cv, random.Random(seed)
        for name, factor in (("forward", 1.0), ("backward", 2.5)):
            stock = getattr(torch_native.TorchKernel, name)
            setattr(torch_native.TorchKernel, name, self._sleeping_in_kernel(stock, factor))
        for layer in model.model.layers:
            layer.mlp.forward = self._sleeping_in_layer(layer.mlp.forward)

    def _sleeping_in_kernel(self, stock: Any, factor: float) -> Any:
        def kernel(kernel: Any, *args: Any) -> Any:
            started = time.perf_counter()
            out = stock(kernel, *args)
            q, k = (args[1].q, args[1].k) if factor > 1 else (args[0], args[1])  # (dout, saved, ...) or (q, k, v, ...)
            band = args[-1]
            pairs = q.shape[0] * q.shape[1] * band.pairs(q.shape[2], k.shape[2])
            self._sleep_until(started, factor * pairs / PAIRS_PER_S)
            return out

        return kernel

    def _sleeping_in_layer(self, stock: Any) -> Any:
        def forward(x: torch.Tensor) -> torch.Tensor:
            started = time.perf_counter()
            out = stock(x)
            self._sleep_until(started, x.shape[0] * x.shape[1] / TOKENS_PER_S)
            return out

        return forward

    def _sleep_until(self, started: float, seconds: float) -> None:
        noise = np.exp(self._random.gauss(0, self._cv))
        if (left := started + seconds / self.speed * noise - time.perf_counter()) > 0:
            time.sleep(left)


def _train(
    rank: int,
    config: dict[str, Any],
    whole: list[dict[str, torch.Tensor]],
    slow: int | None = None,
    prefetch: bool = False,
    cv: float = 0.0,
    load: str | None = None,
    save: str | None = None,
) -> dict[str, Any]:
    """Train; rank ``slow`` works at 40 % from `SLOW_FROM` on."""
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model = llama()
    device = EmulatedDevice(model, cv, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if load:
        engine.load_checkpoint(load)
    replica, gas = handle.replica, engine.gradient_accumulation_steps()
    shards = handle.dataloader(whole[replica.replica_id :: replica.num_replicas], batches="same")
    losses, tokens = [], []
    for number, batch in enumerate(list(shards) if prefetch else shards):
        if rank == slow and number == SLOW_FROM * gas:
            device.speed = 0.4
        loss = handle.loss(engine(**batch), batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        tokens.append(batch["input_ids"].shape[1])
        if number == SLOW_FROM:  # an evaluation between two steps changes nothing
            engine.eval()
            with torch.no_grad():
                engine(**whole[0])
            engine.train()
    if save:
        engine.save_checkpoint(save)
    found = {"losses": losses, "tokens": tokens, "parameters": parameters(model, config["zero_optimization"]["stage"])}
    engine.destroy()
    changes = [(change.step, change.replica, change.gain) for change in handle.schedule_changes]
    return {**found, "changes": changes, "schedule": handle.schedule}


def _replanning(config: dict[str, Any], **replan: Any) -> dict[str, Any]:
    config["heterogeneity"]["replan"] = {**REPLAN, **replan}
    return config


@pytest.mark.parametrize("prefetch", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rank_that_becomes_slow_gets_less_to_do(tmp_path: Path, prefetch: bool) -> None:
    """Within 20 steps at 90 % of the best there is; shards from before the change are trained on too."""
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    whole = batches(STEPS + MORE_STEPS, length=LENGTH)
    checkpoint = str(tmp_path / "checkpoint")
    config = _replanning(ds_config(1, EVEN, **monitor))
    first, second = run_deepspeed(_train, 2, config, whole[:STEPS], 1, prefetch, 0.0, None, checkpoint)
    expected, _ = train_on_one_process(twin := llama(), [[batch] for batch in whole[:STEPS]])
    for found in (first, second):
        np.testing.assert_allclose(found["losses"], expected, rtol=1e-5)
        assert_same_parameters(found["parameters"], parameters(twin))
    assert first["changes"] == second["changes"] and len(first["changes"]) == 1
    changed_at, _, gain = first["changes"][0]
    assert SLOW_FROM < changed_at < SLOW_FROM + 20
    assert gain > 0.15
    tokens = second["schedule"].tokens(LENGTH)
    optimum, reached = LENGTH / 1.4, max(tokens[0], tokens[1] / 0.4)
    assert reached <= optimum / 0.9
    assert set(second["tokens"][:changed_at]) == {LENGTH // 2}
    assert set(second["tokens"][changed_at:]) == {LENGTH // 2 if prefetch else tokens[1]}
    _check_monitor(tmp_path / "job")
    if not prefetch:
        expected, _ = train_on_one_process(llama(), [[batch] for batch in whole])
        for config, share in ((ds_config(1, EVEN), LENGTH // 2), (_replanning(ds_config(1, EVEN)), tokens[1])):
            _, again = run_deepspeed(_train, 2, config, whole[STEPS:], None, False, 0.0, checkpoint)
            np.testing.assert_allclose(again["losses"], expected[STEPS:], rtol=1e-4)
            assert again["tokens"] == [share] * MORE_STEPS


def _check_monitor(folder: Path) -> None:
    def column(name: str) -> list[float]:
        with open(folder / f"Heterogeneity_{name}.csv") as file:
            return [float(row[1]) for row in list(csv.reader(file))[1:]]

    changes = column("schedule_changes")
    assert (changes[0], changes[-1]) == (0, 1)
    for rank in (0, 1):
        shares = [column(f"rank{rank}_{name}_share") for name in SHARES]
        np.testing.assert_allclose(np.sum(shares, axis=0), 1)
        assert min(column(f"rank{rank}_attention_share")) > 0.2
    assert min(column("tokens_per_s")) > 0
    assert max(column("rank0_ring_wait_share")) > 0.1  # for the slow one
    assert max(column("imbalance")) > 1.2


def test_noise_changes_no_schedule() -> None:
    """Every piece of work takes 10 % more or less by chance, and a gain of 2 % would be enough."""
    config = _replanning(ds_config(2, EVEN), interval_steps=3, min_gain=0.02)
    whole = batches(20, batch_size=1, length=LENGTH)
    config["train_micro_batch_size_per_gpu"] = 1
    for found in run_deepspeed(_train, 2, config, whole, None, False, 0.1):
        assert found["changes"] == []


@pytest.mark.slow
def test_the_planner_searches_for_the_replica_that_needs_it() -> None:
    """Two replicas with two micro-batches a step, on a described cluster; rank 3 becomes slow."""
    steps = 22
    config = ds_config(2, "plan", gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=1)
    config["sequence_parallel_size"] = 2
    config["heterogeneity"] |= {"cluster": TWO_CPUS, "seq_len": LENGTH}
    whole = batches(4 * steps, batch_size=1, length=LENGTH)
    found = run_deepspeed(_train, 4, _replanning(config), whole, 3)
    grouped = [whole[i : i + 4] for i in range(0, len(whole), 4)]
    _, _ = train_on_one_process(twin := llama(), grouped)
    for rank, each in enumerate(found):
        assert_same_parameters(each["parameters"], parameters(twin))
        assert [replica for _, replica, _ in each["changes"]] == [1]
        if rank < 2:
            assert set(each["tokens"]) == {LENGTH // 2}
    tokens = found[3]["schedule"].tokens(LENGTH)
    assert max(tokens[2], tokens[3] / 0.4) <= LENGTH / 1.4 / 0.85
