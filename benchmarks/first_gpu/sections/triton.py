"""Section "triton": block sizes of the package's Triton kernels, each kernel by itself."""

from __future__ import annotations

import torch

from benchmarks.first_gpu.attention_blocks import Block
from benchmarks.first_gpu.parts import Context, Part, Row, Section
from benchmarks.first_gpu.triton_builds import (
    BANDS,
    Config,
    default_launch,
    launching,
    run_config,
    tensors_of,
)
from benchmarks.first_gpu.triton_table import configs, is_default
from benchmarks.measure.device_timing import first_call_s, median_s
from ds_hetero.runtime.attention.kernels.triton_blocks import BlockSizes, Launch

_TOKENS = 16_384  # a multiple of all block sizes
# Products in each kernel: QK^T and PV; QK^T, dO V^T and dS K; QK^T, dO V^T, P^T dO and dS^T Q.
_PRODUCTS = {"forward": 2, "dq": 3, "dkv": 4}
_RTOL = 1e-2  # largest difference of a kernel's results without masks over the largest value: sums in another order


def measure(context: Context) -> None:
    """Check kernels without masks, then report all rates."""
    compare(context)
    time(context)


def time(context: Context) -> None:
    """Report the rate of every kernel with every choice of block sizes; all matmuls of the kernel count."""
    if context.rehearsal:
        small = BlockSizes(16, 16, 1, 1)
        todo, tokens, heads = [Config("forward", 16, small), Config("dkv", 16, small, masked=True)], 16, 1
    else:
        todo, tokens, heads = configs(context.capability), _TOKENS, 16
    dtype = context.choose(context.half, torch.float32)
    for config in todo:
        tensors = tensors_of(config, tokens, context.device, dtype, heads)
        for name, band in BANDS.items():
            if config.masked and name == "causal":  # the package masks there, too
                continue
            row: Row = {
                "config": config.text,
                "mask": name,
                "default": context.choose(is_default(config, context.capability), not config.masked),
            }
            launch = context.choose(
                default_launch(config.head_dim, context.capability), Launch(*(BlockSizes(16, 16, 1, 1),) * 3)
            )
            with launching(config, launch) as kernel:
                try:
                    call = lambda: run_config(kernel, config, tensors, band)  # noqa: E731, B023
                    row["first_call_s"] = first_call_s(context.device, call)
                    seconds = median_s(
                        context.device, call, repeats=context.choose(5, 1), warm_ups=context.choose(2, 0)
                    )
                except Exception as error:  # Triton's errors have no common class
                    row["refused"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
                else:
                    block = Block(tokens, tokens, name == "causal", config.head_dim, heads)
                    products = _PRODUCTS[config.kernel] * block.flops(backward=False) / 2
                    row |= {"ms": 1e3 * seconds, "kernel": config.kernel, "head_dim": config.head_dim}
                    row["tflops"] = products / seconds / 1e12
            context.report(row)


def compare(context: Context) -> None:
    """Compare kernels with and without the loop that masks, on a full block of whole tiles."""
    tokens, head_dim, heads = context.choose((4096, 128, 16), (32, 16, 1))
    dtype = context.choose(context.half, torch.float32)
    for kernel in ("forward", "dq", "dkv"):
        small = BlockSizes(16, 16, 1, 1)
        launch = context.choose(default_launch(head_dim, context.capability), Launch(small, small, small))
        results = []
        for masked in (True, False):
            config = Config(kernel, head_dim, getattr(launch, kernel), masked)
            tensors = tensors_of(config, tokens, context.device, dtype, heads)
            with launching(config, launch) as of_config:
                results.append(run_config(of_config, config, tensors, BANDS["full"]))
        index = {"forward": 0, "dq": 0, "dkv": 1}[kernel]
        with_masks, without = (result[index].float() for result in results)
        error = float((with_masks - without).abs().max() / with_masks.abs().max())
        context.report({"kernel": kernel, "difference": error, "same": error <= _RTOL})


SECTION = Section(
    name="triton",
    budget_s=90,
    decides="the table of block sizes, and whether blocks without an edge get kernels of their own",
    parts=(
        Part(
            name="block sizes",
            run=measure,
            limit_s=90,
            rehearsed_env={"TRITON_INTERPRET": "1"},
            rehearsed_fresh=True,
        ),
    ),
)
