"""Launches and waits of the host in a layer of experts that are divided among ranks, forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.fake_gpu.device import device, rank_of
from benchmarks.fake_gpu.recorder import Recorder
from benchmarks.fake_gpu.step import DTYPE, the_mode

RANK = 0
NUM_EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768  # of Qwen3-30B-A3B
TOKENS = 2048  # of the rank


def launches_of_experts(shares: Sequence[int]) -> dict[str, Any]:
    """Return launches of rank 0 in each pass of a layer, waits of the host by place, and mixtures of devices.

    Args:
        shares: weight of every rank, by which the experts are divided.
    """
    with rank_of(RANK, len(shares)):
        recorder = Recorder(the_mode())
        with the_mode(), recorder, _answering_counts(recorder, len(shares)):
            layer = _layer(shares)
            tokens_TH = torch.empty(TOKENS, HIDDEN, device=device(), dtype=DTYPE).requires_grad_()
            weights_Tk = torch.empty(TOKENS, TOP_K, device=device(), dtype=DTYPE).requires_grad_()
            dout_TH = torch.empty(TOKENS, HIDDEN, device=device(), dtype=DTYPE)
            ids_Tk = torch.empty(TOKENS, TOP_K, device=device(), dtype=torch.int64)
            recorder.give_numbers(ids_Tk, _ids())
            recorder.begin_step()
            out_TH = layer.run(tokens_TH, ids_Tk, weights_Tk)
            forward = len(recorder.record.operations)
            recorder.backward = True
            out_TH.backward(dout_TH)
    record = recorder.record
    return {
        "ranks": len(shares),
        "tokens": TOKENS,
        "forward": forward,
        "backward": len(record.operations) - forward,
        "operators": dict(Counter(operation.name for operation in record.operations).most_common()),
        "syncs": dict(Counter(f"{sync.phase}: {sync.name} {sync.place}" for sync in record.syncs)),
        "mixtures": record.mixtures,
    }


def _layer(shares: Sequence[int]) -> Any:
    """Return the layer of this rank, with transformers' module of the experts on the device."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from ds_hetero.frameworks.transformers.model.placed_experts import place_experts

    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=NUM_EXPERTS)
    config._experts_implementation_internal = "grouped_mm"
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with device():
            module = Qwen3MoeExperts(config)
    finally:
        torch.set_default_dtype(before)
    plan = SimpleNamespace(schedules=[SimpleNamespace(ranks=tuple(range(len(shares))))])
    replica: Any = SimpleNamespace(sp_rank=RANK, sp_group=dist.group.WORLD, plan=plan, replica_id=0)
    place_experts(nn.ModuleList([module]), shares, replica)
    return vars(module)["_ds_hetero_layer"]


def _ids() -> Tensor:
    """Return the experts of every token: each expert is chosen equally often."""
    return (torch.arange(TOKENS * TOP_K) % NUM_EXPERTS).view(TOKENS, TOP_K)


def _answering_counts(recorder: Recorder, num_ranks: int) -> Any:
    """Inside the context, let the other ranks' tokens choose experts like this rank's."""
    send = dist.all_to_all_single

    def answered(output: Tensor, sent: Tensor, receive: Any = None, splits: Any = None, **options: Any) -> Any:
        result = send(output, sent, receive, splits, **options)
        numbers = recorder.numbers(sent)
        if not sent.is_floating_point() and numbers is not None:
            recorder.give_numbers(output, torch.split(numbers, splits)[RANK].repeat(num_ranks))
        return result

    return mock.patch.object(dist, "all_to_all_single", answered)
