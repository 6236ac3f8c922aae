"""A GPU that does not exist: torch's Python device under fake tensors, with torch's fake process group.

Tensors of the device have a shape, a type and a storage of a size, but no numbers. The engine's modules run on it as on
CUDA; questions that go to CUDA itself are answered here, in one list (`_answers`). Tensors on the CPU are real.
"""

from __future__ import annotations

import datetime
import importlib
import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

DEVICE_TYPE = "fakegpu"
_OPERATORS = torch.library.Library("aten", "IMPL")  # that CUDA has as one kernel, and other devices as many


def device() -> torch.device:
    """Return the one device of a rank; the first call registers its type."""
    if torch._C._get_privateuse1_backend_name() != DEVICE_TYPE:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

        _setup_privateuseone_for_python_backend(DEVICE_TYPE)
        _OPERATORS.impl("silu_backward", lambda grad, x: torch.empty_like(x), "PrivateUse1")
        module = torch.get_device_module(DEVICE_TYPE)
        module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return torch.device(DEVICE_TYPE, 0)


def fake_mode() -> FakeTensorMode:
    """Return this process's only mode in which tensors of the device can be made; tensors of two modes do not mix."""
    device()
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    """Let this process be one rank of `fake_group`, on the device."""
    with fake_group(rank, world_size), _answers():
        yield


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """Let this process be one rank of a world whose other ranks take part in every message and do nothing else."""
    from ds_hetero.runtime import collectives, process_groups

    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)  # type: ignore[no-untyped-call]
    try:
        with ExitStack() as stack:
            watch = types.SimpleNamespace(group=dist.group.WORLD)  # of peers, who answer nothing
            stack.enter_context(mock.patch.object(collectives, "current_watch", lambda: watch))
            for module in (collectives, process_groups):
                patch = mock.patch.object(module, "timeout_of_job", lambda: datetime.timedelta(minutes=30))
                stack.enter_context(patch)
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _answers() -> Iterator[None]:
    """Answer the questions of the engine and torch to CUDA: which device, operators and kernels exist."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    from ds_hetero.runtime import collectives, process_groups
    from ds_hetero.runtime.attention import batch_layout, channel, local_batch
    from ds_hetero.runtime.attention.kernels import merge, torch_native

    where = device()
    exchanging = (collectives, process_groups, batch_layout, local_batch)
    changes = [
        (modeling_qwen3_next, "torch_chunk_gated_delta_rule", _delta_rule),
        (torch_native, "_operators", _operators),
        (merge, "chosen_merge", lambda *output: _merge),
        (torch.cuda, "current_device", lambda: 0),
        (nn.Module, "_apply", _apply_unless_same(nn.Module._apply)),
        (Tensor, "data_ptr", lambda tensor: 0),  # of an allocator that aligns what it hands out
        (dist, "batch_isend_irecv", post_each),
        (channel, "pairs_by_order", lambda group: True),
        *((module, "message_device", lambda *args: where) for module in exchanging),
    ]
    lifts_cpu_only = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) copies from the host, as on CUDA
    try:
        with ExitStack() as stack:
            for owner, name, value in changes:
                stack.enter_context(mock.patch.object(owner, name, value))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts_cpu_only)


def _operators(where: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> Any:
    """Return the operators that `ds_hetero.runtime.attention.kernels.torch_native` uses on Ampere and newer GPUs."""
    from ds_hetero.runtime.attention.kernels import torch_native

    if where.type == "cpu":
        return torch_native._CPU
    has_flash = softcap is None and dtype in (torch.float16, torch.bfloat16) and not head_dim % 8 and head_dim <= 256
    return torch_native._FLASH if has_flash else torch_native._PLAIN


@torch.library.custom_op("fake_gpu::merge_", mutates_args=("out", "lse"))
def _merge(out: Tensor, lse: Tensor, out_block: Tensor, lse_block: Tensor) -> None:
    """Stand for the kernel of `ds_hetero.runtime.attention.kernels.merge`."""
    raise NotImplementedError("on fake tensors alone")


_merge.register_fake(lambda out, lse, out_block, lse_block: None)

_CHUNK = 64  # tokens of a chunk of flash-linear-attention, which keeps a triangle of each


@torch.library.custom_op("fake_gpu::delta_rule", mutates_args=())
def _delta_rule_forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return an output like v [B, s, heads, width], and the state that the backward needs of every chunk."""
    raise NotImplementedError("on fake tensors alone")


@torch.library.custom_op("fake_gpu::delta_rule_backward", mutates_args=())
def _delta_rule_backward(dout: Tensor, of_chunks: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return the gradients of the inputs."""
    raise NotImplementedError("on fake tensors alone")


_delta_rule_forward.register_fake(lambda q, k, v, g, beta: (torch.empty_like(v), v.new_empty(*v.shape[:3], _CHUNK)))
_delta_rule_backward.register_fake(lambda dout, of_chunks, inputs: [torch.empty_like(x) for x in inputs])


class _DeltaRule(torch.autograd.Function):
    """The gated delta rule in one kernel per pass; flash-linear-attention's, which runs on CUDA, has several."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        out: Tensor
        out, of_chunks = _delta_rule_forward(*inputs)
        ctx.save_for_backward(of_chunks, *inputs)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        of_chunks, *inputs = ctx.saved_tensors
        return tuple(_delta_rule_backward(dout, of_chunks, list(inputs)))


def _delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **settings: Any
) -> tuple[Tensor, None]:
    out: Tensor = _DeltaRule.apply(query, key, value, g, beta)  # type: ignore[no-untyped-call]
    return out, None


def post_each(operations: Sequence[dist.P2POp]) -> list[Any]:
    """Post messages one by one; torch would ask which backend the device has."""
    peers = ("group_dst" if each.op is dist.isend else "group_src" for each in operations)
    return [
        each.op(each.tensor, group=each.group, tag=each.tag, **{peer: each.group_peer})
        for each, peer in zip(operations, peers, strict=True)
    ]


def _apply_unless_same(apply: Any) -> Any:
    """Skip ``module.to`` if everything is there already, which torch refuses for fake tensors."""

    def replaced(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
        tensors = [*module.parameters(), *module.buffers()]
        if all(function(tensor) is tensor for tensor in tensors):
            return module
        applied: nn.Module = apply(module, function, recurse)
        return applied

    return replaced
