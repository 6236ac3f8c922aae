"""Section "ring": the cost of splitting on one device, in the engine's own ring, and its merges and copies."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from benchmarks.first_gpu.attention_blocks import RIGHT, Block, computed, errors, expected
from benchmarks.first_gpu.local_ring import LocalRing
from benchmarks.first_gpu.parts import Context, Part, Row, Section
from benchmarks.measure.device_timing import first_call_s, median_s
from ds_hetero.batch.head_table import Member
from ds_hetero.runtime.attention.head_exchange import Exchange, gather_sequence, scatter_sequence
from ds_hetero.runtime.attention.kernels import AttentionKernel, select
from ds_hetero.runtime.attention.kernels.merge import merge_by_operators_, merge_in_one_kernel_

_REPEATS = 3  # of passes of a whole ring, by the host's clock


def time_rings(context: Context) -> None:
    """Time rings of several sizes and one undivided call, forward and backward.

    Check results on a short sequence first.
    """
    kernel = select(context.device, context.dtype, context.choose(128, 32), None, None)
    sizes = context.choose((2, 4, 8), (2, 3))
    _check(context, kernel, sizes)
    for tokens in context.choose((65_536, 32_768), (96,)):
        block = Block(tokens, tokens, True, context.choose(128, 32), context.choose(16, 2), context.choose(16, 2))
        tensors = block.tensors(context.device, context.dtype)
        undivided_s = _clocked(context, lambda: computed(kernel, block, tensors))  # noqa: B023
        for size in sizes:
            local = LocalRing(kernel, size, tensors)
            row: Row = {"ring": size, "tokens": tokens, "kernel": kernel.name, "undivided_s": undivided_s}
            row["forward_s"] = _clocked(context, local.forward)
            row["both_s"] = _clocked(context, local.forward_and_backward)
            row["of_undivided"] = row["both_s"] / undivided_s
            context.report(row)


def _check(context: Context, kernel: AttentionKernel, sizes: tuple[int, ...]) -> None:
    """Check the results of rings on a short sequence."""
    tokens = context.choose(1000, 50)
    block = Block(tokens, tokens, True, context.choose(128, 32), 4, 2)
    tensors = block.tensors(context.device, context.dtype)
    expected_tensors = expected(block, tensors)
    for size in sizes:
        local = LocalRing(kernel, size, tensors)
        ring_tensors = [local.whole(parts) for parts in zip(*local.forward_and_backward(), strict=True)]
        row: Row = {"ring": size, "tokens": tokens, "kernel": kernel.name, **errors(ring_tensors, expected_tensors)}
        row["right"] = max(row[name] for name in ("out", "dq", "dk", "dv")) <= RIGHT
        context.report(row)


def _clocked(context: Context, call: Callable[[], object]) -> float:
    """Return the median of some calls by the host's clock; events cannot separate the launches of a ring's threads."""
    call()
    return median(first_call_s(context.device, call) for _ in range(context.choose(_REPEATS, 1)))


def time_merges(context: Context) -> None:
    """Time the package's two merges: by operators, and in one kernel that passes over its tensors once."""
    heads, head_dim = context.choose((16, 128), (2, 16))
    for tokens in context.choose((8192, 32_768), (70,)):
        parts = _merged_tensors(context, tokens, heads, head_dim)
        row: Row = {"tokens": tokens, "heads": heads, "head_dim": head_dim}
        results = []
        for merge in (merge_by_operators_, merge_in_one_kernel_):
            out, lse, part, lse_part = (x.clone() for x in parts)
            merge(out, lse, part, lse_part)
            results.append((out, lse))
        row["difference"] = max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))
        out, lse, part, lse_part = parts
        moved_bytes = 2 * out.numel() * 4 + part.numel() * part.element_size()  # out twice, the part once
        for name, merge in (("operators", merge_by_operators_), ("kernel", merge_in_one_kernel_)):
            seconds = median_s(context.device, lambda: merge(out, lse, part, lse_part))  # noqa: B023
            row |= {f"{name}_ms": 1e3 * seconds, f"{name}_gb_per_s": moved_bytes / seconds / 1e9}
        row["kernel_of_operators"] = row["operators_ms"] / row["kernel_ms"]
        context.report(row)


def _merged_tensors(context: Context, tokens: int, heads: int, head_dim: int) -> tuple[Tensor, ...]:
    """Return out and lse in the ring's token-major layout, and a kernel's part of them."""
    generator = torch.Generator(context.device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=context.device, generator=generator)

    out = drawn(tokens, 1, heads, head_dim).permute(1, 2, 0, 3)
    part = drawn(1, tokens, heads, head_dim).to(context.dtype).transpose(1, 2)
    return out, drawn(1, heads, tokens), part, drawn(1, heads, tokens)


def time_packing(context: Context) -> None:
    """Time the copies around an all-to-all, the same eight bytes at a time, and the copy that kernels do not need."""
    ranks, tokens, dtype = 4, context.choose(16_384, 32), torch.bfloat16
    for heads, kv_heads, head_dim in context.choose(((16, 16, 128), (32, 8, 128), (32, 8, 64)), ((8, 4, 16),)):
        tensors = Block(tokens, tokens, True, head_dim, heads, kv_heads).tensors(context.device, dtype)[:3]
        exchange = _exchange(ranks, tokens, heads, kv_heads)
        wide = tuple(x.view(torch.int64) for x in tensors)
        flat = torch.empty(sum(x.numel() for x in tensors), device=context.device, dtype=dtype)
        other = torch.empty_like(flat)
        copy_s = median_s(context.device, lambda: other.copy_(flat))  # noqa: B023
        row: Row = {"tokens": tokens, "heads": f"{heads}:{kv_heads}", "head_dim": head_dim}
        row["copy_gb_per_s"] = 2 * flat.numel() * flat.element_size() / copy_s / 1e9
        gathered = gather_sequence(*tensors, exchange)
        gathered_wide = gather_sequence(*wide, exchange)
        row["same"] = all(torch.equal(a, b.view(dtype)) for a, b in zip(gathered, gathered_wide, strict=True))
        for name, given, there in (("package", tensors, gathered), ("int64", wide, gathered_wide)):
            gather_s = median_s(context.device, lambda: gather_sequence(*given, exchange))  # noqa: B023
            scatter_s = median_s(context.device, lambda: scatter_sequence(*there, exchange))  # noqa: B023
            # Keys, values and queries are packed and sent, gradients packed, sent and unpacked. A wire would take the
            # place of the copy that sends.
            row |= {f"{name}_gather_of_copy": 2 * copy_s / gather_s, f"{name}_scatter_of_copy": 3 * copy_s / scatter_s}
        strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in gathered]
        row["contiguous_ms"] = 1e3 * median_s(context.device, lambda: [x.contiguous() for x in strided])  # noqa: B023
        row["package_of_int64"] = row["package_gather_of_copy"] / row["int64_gather_of_copy"]
        context.report(row)


def _exchange(ranks: int, tokens: int, heads: int, kv_heads: int) -> Exchange:
    """Return an all-to-all of equal shares whose network is a copy."""
    per_q, per_kv = heads // ranks, kv_heads // ranks
    members = tuple(
        Member(tokens, (per_q * rank, per_q * (rank + 1)), (per_kv * rank, per_kv * (rank + 1)))
        for rank in range(ranks)
    )
    return Exchange(members, 0, heads, kv_heads, None)


SECTION = Section(
    name="ring",
    budget_s=40,
    decides="whether merges are fused, and what packing reads at a time",
    parts=(
        Part(
            name="merges",
            run=time_merges,
            limit_s=20,
            rehearsed_limit_s=40,
            rehearsed_env={"TRITON_INTERPRET": "1"},
            rehearsed_fresh=True,
        ),
        Part(name="packing", run=time_packing, limit_s=15),
        Part(name="rings", run=time_rings, limit_s=40),
    ),
)
