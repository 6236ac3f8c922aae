"""Section "cudnn": torch's cuDNN operator on the blocks of a ring, against plain float32 and the kernel of today."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from benchmarks.first_gpu.attention_blocks import RIGHT, Block, computed, computed_of_rows, errors, expected
from benchmarks.first_gpu.cudnn_kernel import CudnnKernel, without_cudnn
from benchmarks.first_gpu.parts import Context, Part, Row, Section
from benchmarks.measure.device_timing import first_call_s, median_s
from ds_hetero.runtime.attention.kernels import AttentionKernel, SavedForward, select

# Multiples of 128 and not, 64 more than one, and shares that a planner has given (5695, 2497, 11308 of 128K).
_LENGTHS = (2048, 2497, 5695, 8192, 8256, 11308, 32768)
_RECTANGLES = ((4096, 8192), (8192, 4096), (2497, 5695))
_LONGEST_CHECKED = 12_000  # plain operations take too long beyond


def kernel_of(context: Context, lays_out: bool = True) -> CudnnKernel:
    """Return cuDNN's operator as a kernel; in a rehearsal its replacement."""
    return CudnnKernel(without_cudnn() if context.rehearsal else None, lays_out)


def check(context: Context) -> None:
    """Report the error of every case, and the time of its first call, which builds a graph for its shape."""
    kernel = kernel_of(context)
    for block, ways in _cases(context):
        tensors = block.tensors(context.device, context.half)
        expected_tensors = expected(block, tensors)
        for way in ways:
            row: Row = {"case": block.text, "way": way}
            call = {"whole": computed, "two blocks": computed_of_rows, "strided": _strided}[way]
            try:
                row["first_call_s"] = first_call_s(context.device, lambda: call(kernel, block, tensors))  # noqa: B023
                row |= errors(call(kernel, block, tensors), expected_tensors)
            except (RuntimeError, ValueError) as error:
                row["refused"] = str(error).strip().splitlines()[0][:200]
            else:
                row["right"] = max(row[name] for name in ("out", "dq", "dk", "dv")) <= RIGHT
            context.report(row)


def _cases(context: Context) -> Iterator[tuple[Block, tuple[str, ...]]]:
    """Yield the blocks to check."""
    if context.rehearsal:
        small = {"head_dim": 64, "heads": 4, "kv_heads": 2}
        yield Block(40, 40, True, **small), ("whole",)
        yield Block(24, 50, False, **small), ("whole", "two blocks", "strided")
        yield Block(32, 32, False, **small, lse_shift=-120.0), ("two blocks",)
        return
    for queries, keys in _RECTANGLES:
        yield Block(queries, keys, False), ("whole", "two blocks", "strided")
    for length in (length for length in _LENGTHS if length <= _LONGEST_CHECKED):
        yield Block(length, length, True), ("whole",)
    for head_dim, kv_heads in ((64, 16), (128, 4), (64, 4)):
        yield Block(5695, 5695, True, head_dim, 16, kv_heads), ("whole",)
        yield Block(4096, 8192, False, head_dim, 16, kv_heads), ("two blocks",)
    for shift in (-120.0, 120.0):
        yield Block(8256, 4096, False, lse_shift=shift), ("whole", "two blocks")


def _strided(kernel: CudnnKernel, block: Block, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Run twice with other strides of out and dout, and the same of q, k and v: is a stale graph used?"""
    as_it_is = CudnnKernel(kernel._operators, lays_out=False)
    q, k, v, dout = tensors
    out, lse = as_it_is.forward(q, k, v, block.scores, block.band)
    as_it_is.backward(dout, SavedForward(q, k, v, out, lse), block.scores, block.band)
    wide = torch.empty(*out.shape[:2], out.shape[2] + 64, out.shape[3], dtype=out.dtype, device=out.device)
    other_out, other_dout = (wide.clone()[:, :, : out.shape[2]].copy_(x) for x in (out, dout))
    return out, *as_it_is.backward(other_dout, SavedForward(q, k, v, other_out, lse), block.scores, block.band)


def time(context: Context) -> None:
    """Report the rates of cuDNN and of the package's kernel, forward and backward separately."""
    chosen = select(context.device, context.half, 128, None, None)
    kernels: dict[str, AttentionKernel] = {"cudnn": kernel_of(context), chosen.name: chosen}
    for block in _timed(context):
        tensors = block.tensors(context.device, context.half)
        row: Row = {"case": block.text, "chosen": chosen.name}
        for name, kernel in kernels.items():
            try:
                forward_s, backward_s = _seconds(context, kernel, block, tensors)
            except (RuntimeError, ValueError) as error:
                row[f"{name}_refused"] = str(error).strip().splitlines()[0][:200]
                continue
            flops = block.flops(backward=False) + block.flops(backward=True)
            row |= {
                f"{name}_forward_tflops": block.flops(backward=False) / forward_s / 1e12,
                f"{name}_backward_tflops": block.flops(backward=True) / backward_s / 1e12,
                f"{name}_tflops": flops / (forward_s + backward_s) / 1e12,
            }
        if "cudnn_tflops" in row and f"{chosen.name}_tflops" in row:
            row["cudnn_of_chosen"] = row["cudnn_tflops"] / row[f"{chosen.name}_tflops"]
        context.report(row)


def _timed(context: Context) -> Iterator[Block]:
    if context.rehearsal:
        yield Block(32, 32, True, head_dim=64, heads=4, kv_heads=4)
        return
    for length, (head_dim, kv_heads) in product(_LENGTHS, ((128, 16), (128, 4), (64, 16))):
        if (kv_heads == 16 and head_dim == 128) or length in (8192, 32768):
            yield Block(length, length, True, head_dim, 16, kv_heads)
    for queries, keys in (*_RECTANGLES, (8192, 32768)):
        yield Block(queries, keys, False)


def _seconds(
    context: Context, kernel: AttentionKernel, block: Block, tensors: tuple[Tensor, ...]
) -> tuple[float, float]:
    """Return the seconds of forward and backward."""
    q, k, v, dout = tensors
    out, lse = kernel.forward(q, k, v, block.scores, block.band)
    saved = SavedForward(q, k, v, out, lse)
    forward_s = median_s(context.device, lambda: kernel.forward(q, k, v, block.scores, block.band))
    return forward_s, median_s(context.device, lambda: kernel.backward(dout, saved, block.scores, block.band))


SECTION = Section(
    name="cudnn",
    budget_s=80,
    decides="whether cuDNN becomes a kernel on sm_90 and sm_100, behind which gates, and the planner's token unit",
    parts=(
        Part(name="results", run=check, limit_s=45),
        Part(name="rates", run=time, limit_s=45),
    ),
)
