"""Section "overlap": messages beside attention on one GPU, which sends them to itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.first_gpu.attention_blocks import Block
from benchmarks.first_gpu.cudnn_kernel import CudnnKernel
from benchmarks.first_gpu.parts import Context, Part, Row, Section
from benchmarks.measure.device_timing import median_s
from ds_hetero.runtime.attention.kernels import AttentionKernel, available, select

_MARGINS = (0, 4, 8, 16)  # SMs that an attention kernel leaves to others, where it can (MagiAttention uses 4 to 8)


def measure(context: Context) -> None:
    """Time attention alone, messages alone, and both; report the share of the shorter one that the longer one hides."""
    context.join()
    tokens = context.choose(16_384, 64)
    block = Block(tokens, tokens, False, context.choose(128, 32), context.choose(16, 2), context.choose(16, 2))
    groups = {"default": None, "high priority": _high_priority_group(context)}
    for megabytes in context.choose((64, 256), (1,)):
        sent = torch.ones(megabytes * 2**20, dtype=torch.uint8, device=context.device)
        for priority, group in groups.items():
            post = partial(_post_to_itself, context, group, sent, torch.empty_like(sent))
            for kernel_name, kernel, margin in _kernels(context):
                row: Row = {"kernel": kernel_name, "megabytes": megabytes, "priority": priority, "sm_margin": margin}
                try:
                    with _leaving(margin):
                        row |= _times(context, kernel, block, post)
                except (RuntimeError, ValueError) as error:
                    row["refused_here"] = str(error).strip().splitlines()[0][:200]
                context.report(row)


def _kernels(context: Context) -> Iterator[tuple[str, AttentionKernel, int]]:
    """Yield every kernel that runs here, with the margins that it supports."""
    for name, reason in available(context.device, context.dtype, 128).items():
        if reason is None:
            yield name, select(context.device, context.dtype, 128, None, name), 0
    if context.device.type == "cuda":
        yield "cudnn", CudnnKernel(), 0
    with _flash_attention("FA3") as why_not:
        if why_not is None:
            for margin in _MARGINS:
                yield "torch with FA3", select(context.device, context.dtype, 128, None, "torch"), margin
        else:
            context.report({"kernel": "torch with FA3", "left_out": why_not})


@contextmanager
def _flash_attention(name: str) -> Iterator[str | None]:
    """Let another flash-attention replace torch's own operator: torch 2.13 or newer, and its package.

    Yields:
        Why it cannot; None if it does.
    """
    import torch.nn.attention as attention

    activate = getattr(attention, "activate_flash_attention_impl", None)
    if activate is None:
        yield "this release of torch takes no other flash-attention"
        return
    try:
        activate(name)
    except Exception as error:  # of the package, of torch, or of the loader of a library
        yield f"{type(error).__name__}: {str(error).strip().splitlines()[0][:150]}"
        return
    try:
        yield None
    finally:
        attention.restore_flash_attention_impl()


@contextmanager
def _leaving(margin: int) -> Iterator[None]:
    """Let kernels that ask torch leave ``margin`` SMs free."""
    set_carveout = getattr(torch._C, "_set_sm_carveout_experimental", None)
    if not margin or set_carveout is None:
        yield
        return
    set_carveout(margin)
    try:
        yield
    finally:
        set_carveout(None)


def _high_priority_group(context: Context) -> Any:
    """Return a second group whose kernels are launched on a stream of high priority; gloo has none."""
    if context.device.type != "cuda":
        return dist.new_group([0])
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    return dist.new_group([0], pg_options=options)


def _post_to_itself(context: Context, group: Any, sent: Tensor, received: Tensor) -> Callable[[], object]:
    """Post a message from this rank to itself; return the works to wait for."""
    if context.device.type != "cuda":  # gloo sends nothing to itself: a thread copies
        copying = threading.Thread(target=received.copy_, args=(sent,))
        copying.start()
        return copying.join
    operations = [dist.P2POp(dist.irecv, received, 0, group), dist.P2POp(dist.isend, sent, 0, group)]
    works = dist.batch_isend_irecv(operations)
    return lambda: [work.wait() for work in works]


def _times(context: Context, kernel: AttentionKernel, block: Block, post: Callable[[], Callable[[], object]]) -> Row:
    """Return the seconds of attention, of messages and of both."""
    q, k, v, _ = block.tensors(context.device, context.dtype)

    def attend() -> None:
        kernel.forward(q, k, v, block.scores, block.band)

    def both() -> None:
        wait = post()
        attend()
        wait()

    attention_s = median_s(context.device, attend)
    messages_s = median_s(context.device, lambda: post()())
    both_s = median_s(context.device, both)
    hidden = (attention_s + messages_s - both_s) / min(attention_s, messages_s)
    times = {"attention_ms": attention_s, "messages_ms": messages_s, "both_ms": both_s}
    return {name: 1e3 * seconds for name, seconds in times.items()} | {"hidden_share": hidden}


SECTION = Section(
    name="overlap",
    budget_s=40,
    decides="the priority of the groups that the ring sends on, and whether kernels leave SMs free",
    parts=(Part(name="messages beside attention", run=measure, limit_s=45),),
)
