"""What the loop of a compiled Triton kernel does: the width of its tensor-core instructions, and the bytes it spills.

A kernel of `ds_hetero.runtime.attention.kernels.triton_kernels` has a loop over visible blocks, which runs hundreds of
times, and one over blocks that are masked, which runs once or twice. The assembler counts spills of the whole kernel;
here they are counted in the machine code of each loop, which Triton's disassembler prints with lines of the source.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

# PTX of Hopper names rows, columns and depth: wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16
_WGMMA = re.compile(r"\bwgmma\.mma_async\S*\.m64n(\d+)k")
# PTX of Ampere, Ada and consumer Blackwell: mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
_MMA = re.compile(r"\bmma\.sync\S*\.m\d+n(\d+)k")
# On data-centre Blackwell the columns are those of the accumulator, in Triton's own code before PTX:
# ttng.tc_gen5_mma ... !ttg.memdesc<64x128xf32, #tmem, ...>
_TCGEN05 = re.compile(r"\bttng\.tc_gen5_mma\b.*?memdesc<\d+x(\d+)xf32")
_TCGEN05_COLUMNS = 256  # of one instruction, at most: PTX ISA, table of shapes of tcgen05.mma

_LABEL = re.compile(r"\s*(\.L_\w+):")
_BRANCH = re.compile(r"\bBRA\b.*`\((\.L_\w+)\)")
_SOURCE_LINE = re.compile(r'//## File "[^"]*", line (\d+)')
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/")
# STL and LDL move a register, or with a suffix two or four, to and from memory of one thread.
_SPILL = re.compile(r"\b(?:STL|LDL)(?:\.[A-Z]\w*)*(?:\.(64|128))?\s")
_REGISTER_BITS = 32


class Loops(NamedTuple):
    """Bytes that a thread spills in one pass of each loop.

    Attributes:
        visible: of the loop over blocks without a mask; the largest, if there are several.
        masked: of the loop over masked blocks; 0 if there is none.
    """

    visible: int
    masked: int


def instruction_columns(asm: dict[str, Any]) -> list[int]:
    """Return the columns of all kinds of tensor-core instructions in a kernel, ascending; empty if it has none.

    Args:
        asm: of Triton's compiled kernel.
    """
    of_ptx = {int(columns) for pattern in (_WGMMA, _MMA) for columns in pattern.findall(asm["ptx"])}
    of_accumulators = {min(int(columns), _TCGEN05_COLUMNS) for columns in _TCGEN05.findall(asm["ttgir"])}
    return sorted(of_ptx | of_accumulators)


def spills_of_loops(cubin: bytes, mask_lines: range) -> Loops:
    """Return the bytes that innermost loops spill.

    Args:
        cubin: machine code with lines of the source.
        mask_lines: lines of the source that only masked loops contain.
    """
    visible, masked = 0, 0
    for loop in _innermost_loops(_disassembled(cubin)):
        source_lines = {int(found[1]) for line in loop if (found := _SOURCE_LINE.search(line))}
        spilled = sum(_spilled_bytes(line) for line in loop)
        if source_lines.isdisjoint(mask_lines):
            visible = max(visible, spilled)
        else:
            masked = max(masked, spilled)
    return Loops(visible, masked)


def _disassembled(cubin: bytes) -> list[str]:
    """Return the lines of Triton's disassembler, with labels and lines of the source."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "--print-code", "--print-line-info", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def _innermost_loops(lines: list[str]) -> Iterator[list[str]]:
    """Yield the lines of every loop that contains no other: from a label to the last branch back to it.

    On data-centre Blackwell, code that waits for a barrier lies behind the kernel's end and branches back into the loop
    that waits. That is no loop inside it: it ends outside.
    """
    label_at: dict[str, int] = {}
    end_of: dict[int, int] = {}
    for number, line in enumerate(lines):
        if label := _LABEL.match(line):
            label_at[label[1]] = number
        elif (branch := _BRANCH.search(line)) and branch[1] in label_at:
            end_of[label_at[branch[1]]] = number
    for start, end in end_of.items():
        if not any(start < other and other_end <= end for other, other_end in end_of.items()):
            yield lines[start : end + 1]


def _spilled_bytes(line: str) -> int:
    """Return the bytes that one instruction spills or reads back."""
    spill = _SPILL.search(line) if _INSTRUCTION.search(line) else None
    return int(spill[1] or _REGISTER_BITS) // 8 if spill else 0
