"""Reading compiled kernels: columns of tensor-core instructions, and spills by loop."""

from __future__ import annotations

import pytest

from benchmarks import kernel_loops
from benchmarks.kernel_loops import Loops, instruction_columns, spills_of_loops

# Addresses and operands as the disassembler writes them. The mask is in line 71. The loop over visible blocks waits for
# a barrier whose code lies behind the end of the kernel and comes back, as on data-centre Blackwell.
DISASSEMBLY = """
        /*0000*/                   STL.64 [R1+0x8], R4 ;
.L_x_9:
        //## File "/a/triton_kernels.py", line 240
        /*0010*/                   LDL.64 R4, [R1+0x8] ;
.L_x_1:
        //## File "/a/triton_kernels.py", line 250
        /*0020*/                   HGMMA.64x32x16.F32.BF16 R104, gdesc[UR44], RZ ;
        /*0030*/                   LDL.LU R4, [R1] ;
.L_x_6:
        /*0040*/              @!P0 BRA `(.L_x_5) ;
        /*0050*/               @P6 BRA `(.L_x_1) ;
.L_x_2:
        //## File "/a/triton_kernels.py", line 71
        /*0060*/                   STL.128 [R1+0x10], R8 ;
        /*0070*/                   LDL R4, [R1+0x10] ;
        /*0080*/               @P6 BRA `(.L_x_2) ;
        /*0090*/               @P5 BRA `(.L_x_9) ;
        /*00a0*/                   EXIT ;
.L_x_5:
        /*00b0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;
        /*00c0*/              @!P0 BRA `(.L_x_5) ;
        /*00d0*/                   BRA `(.L_x_6) ;
"""


@pytest.mark.parametrize(
    ("mask_lines", "expected"),
    [
        (range(70, 74), Loops(visible=4, masked=20)),
        (range(80, 84), Loops(visible=20, masked=0)),
    ],
)
def test_spills_are_counted_in_innermost_loops(
    monkeypatch: pytest.MonkeyPatch, mask_lines: range, expected: Loops
) -> None:
    monkeypatch.setattr(kernel_loops, "_disassembled", lambda cubin: DISASSEMBLY.splitlines())
    assert spills_of_loops(b"", mask_lines) == expected


@pytest.mark.parametrize(
    ("ptx", "ttgir", "columns"),
    [
        ("wgmma.mma_async.sync.aligned.m64n128k16.f32 x; wgmma.mma_async.sync.aligned.m64n32k16.f32 x;", "", [32, 128]),
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 x;", "", [8]),
        (
            "tcgen05.mma.cta_group::1.kind::f16 x;",
            "ttng.tc_gen5_mma %a, %b : !ttg.memdesc<64x128xbf16, #s>, !ttg.memdesc<128x512xbf16>, "
            "!ttg.memdesc<64x512xf32, #t>",
            [256],
        ),
        ("fma.rn.f32 x;", "", []),
    ],
)
def test_columns_of_instructions(ptx: str, ttgir: str, columns: list[int]) -> None:
    assert instruction_columns({"ptx": ptx, "ttgir": ttgir}) == columns
