"""One GPU, one call, under ten minutes: kernels, the price of splitting, packing, and whether results are right.

    python -m benchmarks.gpu [--json] [--budget-s 480] [--output FILE]

    kernels      forward and backward of every kernel that works here, against the fastest undivided attention call on
                 the machine (torch's scaled_dot_product_attention, flash-attn where it is installed), bf16, causal
    ring         all blocks of a zigzag ring of K groups, one after the other, against one undivided call: what
                 splitting and merging cost, without any communication
    packing      the copies around an all-to-all, against a plain copy of as many bytes
    correctness  output and gradients of every kernel, and of the ring, against plain float32 operations

Cases that do not fit into memory or into the time are named with the reason. Without a GPU it says so and exits with
0. Targets: the kernel that is chosen by itself >= 0.97x of the fastest call; a ring of 8 at 64K tokens costs <= 8 %;
Triton >= 0.75x. Exit code 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.measure.device_timing import median_s
from benchmarks.measure.machine import describe_machine
from benchmarks.measure.results import FOLDER, header, write
from ds_hetero.batch.head_table import Member
from ds_hetero.batch.visible_blocks import visible_blocks
from ds_hetero.runtime.attention.head_exchange import Exchange, gather_sequence, scatter_sequence
from ds_hetero.runtime.attention.kernels import (
    AttentionKernel,
    Band,
    SavedForward,
    Scores,
    available,
    merge_,
    select,
)
from ds_hetero.values.baselines import ring

CAUSAL = Band(None, 0)
RIGHT = 0.02  # largest error over the largest value, in bf16
_RESULT = FOLDER / "gpu.json"


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured cases.

    Args:
        tokens: sequence lengths of the kernels' cases. heads: (query heads, KV heads). head_dims: head sizes.
        ring_tokens: sequence lengths of the ring's cases. ring_sizes: numbers of groups.
        packing_tokens: tokens of one rank. packing_ranks: ranks of the group.
        checked_tokens: sequence length of the correctness cases.
    """

    tokens: tuple[int, ...] = (8192, 32768, 65536, 131072)
    heads: tuple[tuple[int, int], ...] = ((16, 16), (16, 4))
    head_dims: tuple[int, ...] = (64, 128)
    ring_tokens: tuple[int, ...] = (65536,)
    ring_sizes: tuple[int, ...] = (2, 4, 8)
    packing_tokens: int = 16384
    packing_ranks: int = 4
    checked_tokens: int = 1000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if all results are right, or if there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    parser.add_argument("--budget-s", type=float, default=480.0, help="begin no further case after so many seconds")
    parser.add_argument("--output", type=Path, default=_RESULT, help="the result file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        text = "no CUDA device: nothing to measure"
        print(json.dumps({"skipped": text}) if options.json else text)
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    begin = time.perf_counter()
    tables = measure(device, torch.bfloat16, Sizes(), begin + options.budget_s)
    result = {
        **header(" ".join(["python -m benchmarks.gpu", *(sys.argv[1:] if arguments is None else arguments)])),
        "machine": describe_machine() | {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda},
        "seconds": round(time.perf_counter() - begin, 1),
        "tables": tables,
    }
    write(result, options.output)
    if options.json:
        print(json.dumps(result))
    else:
        _show(result, Console(width=None if sys.stdout.isatty() else 130))
    return 0 if all(row["right"] for row in tables["correctness"]) else 1


def measure(device: torch.device, dtype: torch.dtype, sizes: Sizes, give_up: float) -> dict[str, list[dict[str, Any]]]:
    """Return all tables as rows. No case begins after ``give_up``, a time of `time.perf_counter`."""
    tables: dict[str, list[dict[str, Any]]] = {"correctness": [], "kernels": [], "ring": [], "packing": []}
    for heads, head_dim in product(sizes.heads, sizes.head_dims):
        tables["correctness"] += _check(device, dtype, heads, head_dim, sizes)
    tables["packing"] += [_packing(device, dtype, heads, head_dim, sizes) for heads, head_dim in _shapes(sizes)]
    cases = [(_ring_case, n, *shape) for n in sizes.ring_tokens for shape in _shapes(sizes)]
    cases += [(_kernel_case, n, *shape) for n in sizes.tokens for shape in _shapes(sizes)]
    cases.sort(key=lambda case: case[1])  # short ones first, so that what the time does not allow is the longest
    for measure_case, tokens, heads, head_dim in cases:
        name = {"tokens": tokens, "heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim}
        table = tables["ring" if measure_case is _ring_case else "kernels"]
        if time.perf_counter() > give_up:
            table.append(name | {"what": "left out: no time left"})
            continue
        try:
            table += [name | row for row in measure_case(device, dtype, tokens, heads, head_dim, sizes)]
        except torch.OutOfMemoryError:
            table.append(name | {"what": "left out: not enough memory"})
    return tables


def _shapes(sizes: Sizes) -> list[tuple[tuple[int, int], int]]:
    """Return ((query heads, KV heads), head size) of every measured shape."""
    return list(product(sizes.heads, sizes.head_dims))


def _tensors(
    device: torch.device, dtype: torch.dtype, tokens: int, heads: tuple[int, int], head_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v, dout in a model's layout: [B, H, S, D] views of [B, S, H, D]."""
    generator = torch.Generator(device).manual_seed(0)
    counts = (heads[0], heads[1], heads[1], heads[0])
    q, k, v, dout = (
        torch.randn(1, tokens, count, head_dim, device=device, dtype=dtype, generator=generator).transpose(1, 2)
        for count in counts
    )
    return q, k, v, dout


# --- undivided calls --------------------------------------------------------------------------------


def _single_calls(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return attention in one call, by name of the library; those that are not installed or do not run are left out."""
    calls: dict[str, Callable[[], Tensor]] = {
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    }
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return calls
    if q.device.type == "cuda":
        calls["flash-attn"] = lambda: flash_attn_func(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True
        )
    return calls


def _single_rows(
    device: torch.device, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> tuple[list[dict[str, Any]], float, float]:
    """Time the undivided calls; return their rows, and the fastest forward and forward with backward."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    rows = []
    for name, call in _single_calls(*leaves).items():
        grad = dout if name == "sdpa" else dout.transpose(1, 2)

        def both(call: Callable[[], Tensor] = call, grad: Tensor = grad) -> None:
            torch.autograd.grad(call(), leaves, grad)

        with torch.no_grad():
            forward_s = median_s(device, call)
        rows.append({"what": f"one call of {name}", "forward_s": forward_s, "both_s": median_s(device, both)})
    return rows, min(row["forward_s"] for row in rows), min(row["both_s"] for row in rows)


def _compared(row: dict[str, Any], flops: float, forward_s: float, both_s: float) -> dict[str, Any]:
    """Return a row with its rate, and its speed relative to the fastest undivided call; above 1 it is faster."""
    return row | {
        "tflops": 3.5 * flops / row["both_s"] / 1e12,
        "forward_of_best": forward_s / row["forward_s"],
        "both_of_best": both_s / row["both_s"],
    }


def _forward_flops(tokens: int, heads: int, head_dim: int) -> float:
    """Return the FLOPs of causal attention: two matmuls, half of whose results are visible."""
    return 2.0 * tokens * tokens * heads * head_dim


# --- kernels ----------------------------------------------------------------------------------------


def _kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> dict[str, AttentionKernel]:
    """Return the kernels that work here, by name."""
    names = [name for name, reason in available(device, dtype, head_dim).items() if reason is None]
    return {name: select(device, dtype, head_dim, None, name) for name in names}


def _kernel_case(
    device: torch.device, dtype: torch.dtype, tokens: int, heads: tuple[int, int], head_dim: int, sizes: Sizes
) -> list[dict[str, Any]]:
    """Time the undivided calls and every kernel on one shape."""
    q, k, v, dout = _tensors(device, dtype, tokens, heads, head_dim)
    rows, forward_s, both_s = _single_rows(device, q, k, v, dout)
    kernel_name = select(device, dtype, head_dim, None, None).name
    scores = Scores(head_dim**-0.5)
    for name, kernel in _kernels(device, dtype, head_dim).items():

        def forward(kernel: AttentionKernel = kernel) -> tuple[Tensor, Tensor]:
            return kernel.forward(q, k, v, scores, CAUSAL)

        def both(kernel: AttentionKernel = kernel) -> None:
            out, lse = kernel.forward(q, k, v, scores, CAUSAL)
            kernel.backward(dout, SavedForward(q, k, v, out, lse), scores, CAUSAL)

        what = f"kernel {name}" + (" (chosen)" if name == kernel_name else "")
        rows.append({"what": what, "forward_s": median_s(device, forward), "both_s": median_s(device, both)})
    flops = _forward_flops(tokens, heads[0], head_dim)
    return [_compared(row, flops, forward_s, both_s) for row in rows]


# --- a ring on one device ---------------------------------------------------------------------------


class _LocalRing:
    """The computations of all ranks of a zigzag ring, on one device."""

    def __init__(self, kernel: AttentionKernel, size: int, tensors: Sequence[Tensor]) -> None:
        self._kernel, self._scores = kernel, Scores(tensors[0].shape[-1] ** -0.5)
        heads, tokens = tensors[0].shape[1], tensors[0].shape[2]
        self._chunks = ring(size, heads, tensors[1].shape[1]).chunks(tokens)
        self._shards = [
            tuple(torch.cat([x[:, :, slice(*c)] for c in chunks], dim=2) for x in tensors) for chunks in self._chunks
        ]
        # Step t works on the keys of the group t places back, its own first.
        self._blocks = [
            [
                (source, visible_blocks(local_chunk, self._chunks[source], [(0, tokens)], causal=True, window=None))
                for source in ((place - step) % size for step in range(size))
            ]
            for place, local_chunk in enumerate(self._chunks)
        ]

    def forward(self) -> list[tuple[Tensor, Tensor]]:
        """Return (out, lse) of every group, in float32."""
        results = []
        for (q, *_), by_source in zip(self._shards, self._blocks, strict=True):
            out = torch.zeros_like(q, dtype=torch.float32)
            lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
            for source, blocks in by_source:
                _, k, v, _ = self._shards[source]
                for block in blocks:
                    rows, columns = slice(*block.q), slice(*block.k)
                    part = self._kernel.forward(
                        q[:, :, rows], k[:, :, columns], v[:, :, columns], self._scores, Band(block.lo, block.hi)
                    )
                    merge_(out[:, :, rows], lse[:, :, rows], *part)
            results.append((out, lse))
        return results

    def forward_and_backward(self) -> tuple[list[tuple[Tensor, Tensor]], list[list[Tensor]]]:
        """Return (out, lse) of every group and [dq, dk, dv] of every group, in float32."""
        results = self.forward()
        grads = [[torch.zeros_like(x, dtype=torch.float32) for x in shard[:3]] for shard in self._shards]
        for place, by_source in enumerate(self._blocks):
            q, _, _, dout = self._shards[place]
            out, lse = results[place]
            out = out.to(q.dtype)
            for source, blocks in by_source:
                _, k, v, _ = self._shards[source]
                for block in blocks:
                    rows, columns = ((slice(None), slice(None), slice(*part)) for part in (block.q, block.k))
                    dq, dk, dv = self._kernel.backward(
                        dout[rows],
                        SavedForward(q[rows], k[columns], v[columns], out[rows], lse[rows]),
                        self._scores,
                        Band(block.lo, block.hi),
                    )
                    grads[place][0][rows] += dq
                    grads[source][1][columns] += dk
                    grads[source][2][columns] += dv
        return results, grads

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Put tensors of all groups, [B, H, s, D] each, back in order of position."""
        out = torch.cat(list(parts), dim=2)
        positions = [p for chunks in self._chunks for start, stop in chunks for p in range(start, stop)]
        order = torch.tensor(positions, device=out.device)
        return torch.empty_like(out).index_copy_(2, order, out)


def _ring_case(
    device: torch.device, dtype: torch.dtype, tokens: int, heads: tuple[int, int], head_dim: int, sizes: Sizes
) -> list[dict[str, Any]]:
    """Time rings of every size on one shape, and an undivided call."""
    tensors = _tensors(device, dtype, tokens, heads, head_dim)
    _, forward_s, both_s = _single_rows(device, *tensors)
    kernel = select(device, dtype, head_dim, None, None)
    rows = []
    for size in sizes.ring_sizes:
        local = _LocalRing(kernel, size, tensors)
        times = {"forward_s": median_s(device, local.forward), "both_s": median_s(device, local.forward_and_backward)}
        rows.append({"what": f"ring of {size}, kernel {kernel.name}", **times})
    flops = _forward_flops(tokens, heads[0], head_dim)
    return [_compared(row, flops, forward_s, both_s) for row in rows]


# --- packing ----------------------------------------------------------------------------------------


def _packing(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int], head_dim: int, sizes: Sizes
) -> dict[str, Any]:
    """Time both directions of an all-to-all whose network is a copy, and as many plain copies.

    Keys, values and queries are packed and sent; gradients are packed, sent and unpacked.
    """
    count, tokens = sizes.packing_ranks, sizes.packing_tokens
    per_q, per_kv = heads[0] // count, heads[1] // count
    members = tuple(
        Member(tokens, (per_q * rank, per_q * (rank + 1)), (per_kv * rank, per_kv * (rank + 1)))
        for rank in range(count)
    )
    exchange = Exchange(members, 0, heads[0], heads[1], None)
    q, k, v, _ = _tensors(device, dtype, tokens, heads, head_dim)
    gathered = gather_sequence(q, k, v, exchange)
    flat = torch.empty(q.numel() + 2 * k.numel(), device=device, dtype=dtype)
    other = torch.empty_like(flat)
    copy_s = median_s(device, lambda: other.copy_(flat))
    moved_bytes = 2 * flat.numel() * flat.element_size()
    there_s = median_s(device, lambda: gather_sequence(q, k, v, exchange))
    back_s = median_s(device, lambda: scatter_sequence(*gathered, exchange))
    return {
        "tokens": tokens,
        "heads": heads[0],
        "kv_heads": heads[1],
        "head_dim": head_dim,
        "copy_gb_per_s": moved_bytes / copy_s / 1e9,
        "gather_of_copy": 2 * copy_s / there_s,
        "scatter_of_copy": 3 * copy_s / back_s,
    }


# --- correctness ------------------------------------------------------------------------------------


def _check(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int], head_dim: int, sizes: Sizes
) -> list[dict[str, Any]]:
    """Check every kernel, and the ring of each size, on a length that is no multiple of a tile."""
    tensors = _tensors(device, dtype, sizes.checked_tokens, heads, head_dim)
    expected = _reference(*tensors)
    outputs_by_name: dict[str, tuple[Tensor, ...]] = {}
    q, k, v, dout = tensors
    scores = Scores(head_dim**-0.5)
    for name, kernel in _kernels(device, dtype, head_dim).items():
        out, lse = kernel.forward(q, k, v, scores, CAUSAL)
        outputs_by_name[f"kernel {name}"] = (
            out,
            *kernel.backward(dout, SavedForward(q, k, v, out, lse), scores, CAUSAL),
        )
    kernel = select(device, dtype, head_dim, None, None)
    for size in sizes.ring_sizes:
        local = _LocalRing(kernel, size, tensors)
        results, grads = local.forward_and_backward()
        whole = [local.whole([out for out, _ in results]), *(local.whole(parts) for parts in zip(*grads, strict=True))]
        outputs_by_name[f"ring of {size}, kernel {kernel.name}"] = tuple(whole)
    rows = []
    for what, tensors_found in outputs_by_name.items():
        errors = {
            name: float((x.float() - y).abs().max() / y.abs().max())
            for name, x, y in zip(("out", "dq", "dk", "dv"), tensors_found, expected, strict=True)
        }
        labels = {"what": what, "heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim}
        rows.append(labels | errors | {"right": max(errors.values()) <= RIGHT})
    return rows


def _reference(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """Compute output and gradients by plain operations in float32."""
    leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
    wide_q, wide_k, wide_v = leaves
    shared = q.shape[1] // k.shape[1]
    scores = wide_q @ wide_k.repeat_interleave(shared, 1).transpose(2, 3) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ wide_v.repeat_interleave(shared, 1)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout.float()))


# --- for people -------------------------------------------------------------------------------------


def _show(result: dict[str, Any], console: Console) -> None:
    """Print a table for each list of rows."""
    console.print(f"{result['machine']['gpu']}, torch {result['machine']['torch']}; {result['seconds']:.0f} s in all")
    for name, rows in result["tables"].items():
        columns = list(dict.fromkeys(key for row in rows for key in row))
        table = Table(*columns, title=name)
        for row in rows:
            values = (row.get(column, "") for column in columns)
            table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values))
        console.print(table)


if __name__ == "__main__":
    sys.exit(main())
