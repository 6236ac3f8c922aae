"""Tabulate which attention operator runs on which card, for four kinds of batches, and what is planned for it.

    python -m benchmarks.kernel_gates           # prints the tables of docs/kernels.md
    python -m benchmarks.kernel_gates --write   # puts them there

The choice is made by the package itself, which is told that it has each card: its compute capability, the versions of
cuDNN and flash-attn. The blocks of each kind of batch are those that a rank's attention hands to its kernel.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ds_hetero.batch.tiles import CAUSAL, FULL
from ds_hetero.cluster.catalogue import CATALOGUE
from ds_hetero.runtime.attention import ring as ring_module
from ds_hetero.runtime.attention.batch_layout import batch_layout
from ds_hetero.runtime.attention.kernels import (
    AttentionKernel,
    Blocks,
    PackedBlocks,
    SavedForward,
    Scores,
    flash_attn,
    rates_of,
    select,
    torch_native,
)
from ds_hetero.runtime.attention.kernels.cudnn import LEAST_CUDNN, block_refusal
from ds_hetero.runtime.attention.kernels.plain import plain_forward
from ds_hetero.runtime.attention.lane_passes import RingContext
from ds_hetero.runtime.attention.ring import ring_forward
from ds_hetero.runtime.ring_groups import RingGroups
from ds_hetero.values.baselines import ulysses
from ds_hetero.values.placement import Rows, stream_placement

PAGE = Path(__file__).parent.parent / "docs" / "kernels.md"
CARDS = {  # compute capability, by the catalogue's name
    "P100-PCIe-16GB": (6, 0),
    "V100-SXM-32GB": (7, 0),
    "T4": (7, 5),
    "A100-SXM-80GB": (8, 0),
    "RTX-3090": (8, 6),
    "L40S": (8, 9),
    "RTX-4090": (8, 9),
    "H100-SXM-80GB": (9, 0),
    "H200-SXM-141GB": (9, 0),
    "B200-SXM-180GB": (10, 0),
    "RTX-5090": (12, 0),
    "RTX-PRO-6000": (12, 0),
}
BATCHES = ("causal", "window", "packed documents", "padded rows")
HEAD_DIM = 128
SETTINGS = {  # what is installed, and the section's "attention"
    "torch alone": ((), None),
    "with flash-attn (version 3 on Hopper)": (("flash_attn",), None),
    '`"attention": "cudnn"`': ((), "cudnn"),
}
_CUDA = torch.device("cuda")


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel_gates", description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the tables into docs/kernels.md")
    options = parser.parse_args(words)
    if options.write:
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n".join(f"<!-- {name} -->\n{table(name)}" for name in SETTINGS))


def with_tables(page: str) -> str:
    """Return the page with the table of every setting between its two marks."""
    for name in SETTINGS:
        begin, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, found, rest = page.partition(begin)
        if not found:
            raise SystemExit(f"docs/kernels.md has no mark {begin.strip()}.")
        page = f"{before}{begin}\n{table(name)}\n{end}{rest.partition(end)[2]}"
    return page


def table(setting: str) -> str:
    """Return the table of a setting: cards with the same cells share a row."""
    packages, requested = SETTINGS[setting]
    rows: dict[tuple[str, ...], list[str]] = {}
    for card in CARDS:
        name = re.sub("-(SXM|PCIe).*", "", card)  # all variants of a card have its compute capability
        rows.setdefault(row(card, packages, requested), []).append(name)
    heads = ("card", *BATCHES, "planned with the rates of")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    lines += [f"| {', '.join(cards)} | {' | '.join(cells)} |" for cells, cards in rows.items()]
    return "\n".join(lines) + "\n"


def row(card: str, packages: Sequence[str], requested: str | None) -> tuple[str, ...]:
    """Return the operators that run on a card, by kind of batch, and the kernel whose rates a plan has to count."""
    dtype = torch.bfloat16 if CARDS[card] >= (8, 0) else torch.float16
    with having(CARDS[card], packages):
        block = (_CUDA, dtype, HEAD_DIM, None)
        try:
            kernel = select(*block, requested)
        except ValueError:
            return (*("refused",) * len(BATCHES), "")
        names = [_operators(kernel, dtype, kind) for kind in BATCHES]
        rates = rates_of(kernel, *block)
    usual = CATALOGUE[card].device.attention_kernel
    return (*names, rates if _equal_rates(card, rates, usual) else f"{rates}: name it, the catalogue has {usual}")


def _equal_rates(card: str, name: str, usual: str) -> bool:
    """Whether a plan with the catalogue's usual kernel counts the rates of ``name``."""
    rates = CATALOGUE[card].attention
    return rates[name][:3] == rates[usual][:3]


@contextmanager
def having(capability: tuple[int, int], packages: Sequence[str]) -> Iterator[None]:
    """Let the package believe that this machine has a GPU of this capability, and these packages."""
    has_flash_attn = "flash_attn" in packages
    installed = SimpleNamespace()
    changes: list[tuple[Any, str, Any]] = [
        (torch.cuda, "get_device_capability", lambda device=None: capability),
        (torch.backends.cuda, "is_flash_attention_available", lambda: True),
        (torch.backends.cudnn, "version", lambda: LEAST_CUDNN),
        (flash_attn, "_version_2", lambda: installed if has_flash_attn else "not installed"),
        (flash_attn, "_version_3", lambda device: installed if has_flash_attn and capability == (9, 0) else None),
    ]
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _operators(kernel: AttentionKernel, dtype: torch.dtype, kind: str) -> str:
    """Return the operators that compute the blocks of one kind of batch, joined by "and"."""
    operators = [_operator(kernel, dtype, blocks) for blocks in _blocks(kind, kernel, dtype)]
    return " and ".join(dict.fromkeys(operators))


def _operator(kernel: AttentionKernel, dtype: torch.dtype, blocks: Blocks) -> str:
    """Return the operator that computes such blocks."""
    if kernel.name == "flash_attn":
        return f"flash-attn {3 if flash_attn._version_3(_CUDA) is not None else 2}"
    if kernel.name == "triton":
        return "Triton"
    if kernel.name == "cudnn":
        q = torch.empty(1, 1, 64, HEAD_DIM, dtype=dtype)
        return "cuDNN" if block_refusal(q, q, Scores(1.0), blocks) is None else "torch's flash"
    operators = torch_native._operators(_CUDA, dtype, HEAD_DIM, None)
    if operators is torch_native._FLASH:
        return "torch's flash"
    if operators is not torch_native._EFFICIENT:
        return "plain operations"
    bands = blocks.bands if isinstance(blocks, PackedBlocks) else (blocks,)
    in_tiles = "" if all(band in (FULL, CAUSAL) for band in bands) else ", by tiles"
    return f"memory-efficient{in_tiles}"


class _Recording:
    """A kernel on the CPU that packs as another one does, and notes the blocks that it computes."""

    def __init__(self, kernel: AttentionKernel, dtype: torch.dtype) -> None:
        self.name, self.blocks = kernel.name, list[Blocks]()
        on_card = torch.empty(1, 1, 1, HEAD_DIM, dtype=dtype)
        with mock.patch.object(torch.Tensor, "device", _CUDA):
            self._packs = kernel.packs(on_card, Scores(1.0))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """Note the blocks; what is computed does not matter."""
        self.blocks.append(blocks)
        return plain_forward(q, k, v, scores, FULL)

    def backward(self, dout: Tensor, saved: SavedForward, scores: Scores, blocks: Blocks) -> Any:
        """Never called."""
        raise NotImplementedError

    def packs(self, q: Tensor, scores: Scores) -> bool:
        """Return what the other kernel answers."""
        return self._packs


def _blocks(kind: str, kernel: AttentionKernel, dtype: torch.dtype) -> list[Blocks]:
    """Return the blocks that a rank's attention hands to a kernel for one kind of batch of 64 tokens."""
    rows: tuple[Rows, ...] = (Rows(0, 1, ((0, 64),)),)
    if kind == "packed documents":
        rows = (Rows(0, 1, ((0, 40), (40, 64))),)
    elif kind == "padded rows":
        rows = (Rows(0, 1, ((0, 40),)), Rows(1, 2, ((0, 64),)))
    placement = stream_placement(ulysses(1, 1, 1), 64, rows)
    rings = batch_layout(placement, placement.rows).rings(0, causal=True, window=16 if kind == "window" else None)
    recording = _Recording(kernel, dtype)
    context = RingContext(rings, RingGroups(None), recording, Scores(1.0))  # type: ignore[arg-type]
    q, k, v = torch.zeros(3, rows[-1].stop, 1, 64, HEAD_DIM)
    with mock.patch.object(
        ring_module, "Channel", lambda groups: SimpleNamespace(keeps_order=True, post=_post_nothing)
    ):
        ring_forward(q, k, v, context)
    return recording.blocks


def _post_nothing(receives: object, sends: object) -> dict[int, Any]:
    return {}


if __name__ == "__main__":
    main()
