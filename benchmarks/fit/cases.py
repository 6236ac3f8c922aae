"""Ten pairs of a model and a schedule, as different as two cores allow, and ten that train adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.fit.training import Case

_DEEP = (("hidden_size", 256), ("intermediate_size", 704), ("num_hidden_layers", 10), ("num_key_value_heads", 2))
_WIDE = (("hidden_size", 768), ("intermediate_size", 2048), ("num_hidden_layers", 3), ("num_key_value_heads", 8))


def _schedule(*groups: tuple[list[float], list[int]], num_kv_heads: int = 4, layout: str = "zigzag") -> dict[str, Any]:
    """Return a schedule of groups (token weights, heads); ranks are numbered in their order."""
    out: dict[str, Any] = {"version": 1, "num_heads": 8, "num_kv_heads": num_kv_heads, "layout": layout, "groups": []}
    first = 0
    for tokens, heads in groups:
        out["groups"].append({"ranks": list(range(first, first + len(tokens))), "tokens": tokens, "heads": heads})
        first += len(tokens)
    return out


_RING, _UNEVEN_RING = _schedule(([1], [8]), ([1], [8])), _schedule(([3], [8]), ([1], [8]))
_UNEVEN_ULYSSES = _schedule(([3, 1], [6, 2]), layout="contiguous")

_WHOLE = (
    Case(name="ring, ZeRO 1", schedule=_RING, seq_len=2048, zero_stage=1),
    Case(name="Ulysses 3:1, heads 6:2, ZeRO 0", schedule=_UNEVEN_ULYSSES, seq_len=2048, zero_stage=0),
    Case(name="ring 3:1, ZeRO 2", schedule=_UNEVEN_RING, seq_len=2048, zero_stage=2),
    Case(name="Ulysses 3:1, heads 6:2, ZeRO 3", schedule=_UNEVEN_ULYSSES, seq_len=2048, zero_stage=3),
    Case(
        name="ring 2:1, ZeRO 3, checkpointing",
        schedule=_schedule(([2], [8]), ([1], [8])),
        seq_len=3072,
        zero_stage=3,
        checkpointing=True,
    ),
    Case(
        name="Ulysses, ZeRO 1, checkpointing, bf16",
        schedule=_schedule(([1, 1], [4, 4]), layout="contiguous"),
        seq_len=3072,
        zero_stage=1,
        checkpointing=True,
        bf16=True,
    ),
    Case(
        name="ring 3:1, ZeRO 2 by weights 3:1, bf16",
        schedule=_UNEVEN_RING,
        seq_len=2048,
        zero_stage=2,
        zero_weights=(3.0, 1.0),
        bf16=True,
    ),
    Case(
        name="group of 2 and 1 in a ring, wide, ZeRO 3, bf16",
        schedule=_schedule(([2, 1], [5, 3]), ([1], [8]), num_kv_heads=8),
        seq_len=2048,
        zero_stage=3,
        bf16=True,
        model=_WIDE,
    ),
    Case(
        name="ring 3:1, two sequences, ZeRO 1, checkpointing",
        schedule=_UNEVEN_RING,
        seq_len=2048,
        zero_stage=1,
        checkpointing=True,
        micro_batch=2,
    ),
    Case(
        name="two groups of 2 in a ring, deep, ZeRO 2",
        schedule=_schedule(([2, 1], [4, 4]), ([2, 1], [6, 2]), num_kv_heads=2),
        seq_len=2048,
        zero_stage=2,
        model=_DEEP,
    ),
)
_ADAPTER_RANKS = (8, 16, 8, 16, 8, 32, 16, 8, 16, 8)  # of the pairs in their order; every other one is quantized

CASES = (
    *_WHOLE,
    *(
        replace(case, name=f"{case.name}, {'QLoRA' if i % 2 else 'LoRA'}", adapter_rank=rank, quantized=i % 2 == 1)
        for i, (case, rank) in enumerate(zip(_WHOLE, _ADAPTER_RANKS, strict=True))
    ),
)
