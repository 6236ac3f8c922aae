"""Compile the Triton kernels for GPUs that this machine lacks: registers, spills, shared memory, tensor cores.

    python -m benchmarks.kernels [--quick] [--json] [--only sm_90] [--processes 2] [--output FILE]

Triton contains an assembler for every architecture, so that a machine without a GPU can compile its kernels. Each
kernel of `ds_hetero.runtime.attention.kernels` is compiled with the block sizes that the launcher would
choose, for every architecture and head size: for one block, for one without edges, and for many. float32, the other
16-bit type, soft caps, and the other candidates of `triton_blocks` are compiled for some of these.

    registers    of a thread, at most 255, and at most 65,536 / threads
    loop spills  bytes that a thread stores to and loads from memory in one pass of the loop over visible blocks
    edge spills  the same of the loop over masked blocks, which runs once or twice
    spills       the same of the whole kernel
    columns      of the narrowest tensor-core instruction; 8 before Hopper and on sm_120, where no other exists
    shared       bytes of shared memory of a program, and the most that the GPU gives one

A build takes about three CPU seconds. Every result is saved at once, unless with --quick: a run that was stopped
continues, if the kernels, the block sizes and Triton are the same.

--quick compiles three head sizes in bfloat16 (float16 before Ampere), many blocks. The exit code is 1 if a kernel that
is launched does not compile, spills in its loop, needs more shared memory than the GPU has, or has narrower tensor-core
instructions than it should. Without tensor cores 128 bytes may spill: the launcher prefers torch's operator there.
Nothing is timed.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.kernel_loops import instruction_columns, spills_of_loops
from benchmarks.measure.results import FOLDER, header, progress, write
from benchmarks.measure.workers import in_order
from ds_hetero.runtime.attention.kernels.triton_blocks import (
    DELTA,
    MERGE,
    BlockSizes,
    candidates,
    padded_head_dim,
    runs_on_tensor_cores,
)

RESULT = FOLDER / "kernels.json"
# Largest shared memory of one program, KiB, by compute capability: CUDA C++ programming guide, table of technical
# specifications per compute capability.
SHARED_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
KERNELS = ("forward", "delta", "dq", "dkv", "merge")
_WITHOUT_MATMULS = {"delta": DELTA, "merge": MERGE}
HEAD_DIMS, _SOME_HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256), (64, 128, 256)
CANDIDATE_HEAD_DIMS = (64, 128, 256)
_AMPERE = 80
_SMALL_SPILL = 128  # bytes of a thread, allowed where products run on ordinary cores and torch's operator is preferred
# Columns that tensor-core instructions should have on Hopper and data-centre Blackwell, where an instruction
# multiplies 64 rows or more; fewer where the head has fewer numbers.
_WIDE_GENERATIONS = (9, 10)
_LEAST_COLUMNS = {"forward": 64, "dq": 64, "dkv": 32}
# On Hopper sums are in registers, and dQ of larger heads fills them: wider blocks spill in the loop.
_HOPPER, _LARGEST_WIDE_HEAD = 90, 128
_LEAST_COLUMNS_OF_LARGE_HEADS = {**_LEAST_COLUMNS, "dq": 32}
_FLOATS = ("score_scale", "cap_scale", "scale")
_ACCUMULATED = ("LSE", "DELTA", "DQ", "DK", "DV", "MERGED", "LSE_PART")


@dataclass(frozen=True)
class Build:
    """One kernel with the settings of a launch; a row of the table."""

    capability: int
    kernel: str
    head_dim: int
    dtype: str  # Triton's name: fp16, bf16, fp32
    many: bool = True
    softcap: bool = False
    edges: bool = True
    candidate: int = 0  # place in the table of block sizes; the first is launched

    def blocks(self) -> BlockSizes:
        """Block sizes with which it is compiled."""
        if self.kernel in _WITHOUT_MATMULS:
            return _WITHOUT_MATMULS[self.kernel]
        of_kernels = candidates(padded_head_dim(self.head_dim), self.capability, self.dtype != "fp32")
        return getattr(of_kernels, self.kernel)[self.candidate]

    @property
    def least_columns(self) -> int:
        """Columns that its tensor-core instructions should have at least; 0 for any number."""
        if not self.has_tensor_cores or self.capability // 10 not in _WIDE_GENERATIONS:
            return 0
        fills_registers = self.capability == _HOPPER and self.head_dim > _LARGEST_WIDE_HEAD
        least = _LEAST_COLUMNS_OF_LARGE_HEADS if fills_registers else _LEAST_COLUMNS
        return min(least.get(self.kernel, 0), padded_head_dim(self.head_dim))

    @property
    def has_tensor_cores(self) -> bool:
        """Whether Triton computes these matmuls on tensor cores of this architecture."""
        return runs_on_tensor_cores(self.capability, self.dtype != "fp32")


@dataclass(frozen=True)
class Resources:
    """Resources of one build, as the assembler reports them and the machine code has them; in bytes.

    Attributes:
        columns: of all kinds of tensor-core instructions; empty if matmuls run on ordinary cores.
    """

    registers: int
    spill_bytes: int
    loop_spill_bytes: int
    edge_spill_bytes: int
    shared_bytes: int
    columns: list[int]

    def faults(self, build: Build) -> list[str]:
        """Return the reasons why a GPU would run it badly, or not at all."""
        limit = SHARED_KIB[build.capability] * 1024
        reasons = []
        if build.has_tensor_cores and self.loop_spill_bytes:
            reasons.append(f"spills {self.loop_spill_bytes} bytes in its loop")
        if not build.has_tensor_cores and self.spill_bytes > _SMALL_SPILL:
            reasons.append(f"spills {self.spill_bytes} bytes")
        if self.shared_bytes > limit:
            reasons.append(f"{self.shared_bytes} bytes of shared memory of {limit}")
        if build.kernel in _WITHOUT_MATMULS:
            return reasons
        if build.has_tensor_cores and not self.columns:
            reasons.append("no tensor cores")
        elif self.columns and self.columns[0] < build.least_columns:
            reasons.append(f"tensor-core instructions of {self.columns[0]} columns, not {build.least_columns}")
        return reasons


def builds(quick: bool = False) -> list[Build]:
    """Return all builds: every architecture, kernel and head size that `triton_refusal` accepts.

    One 16-bit type stands for both, except at one head size. Settings with little influence are compiled at three head
    sizes, as are candidates.
    """
    all_builds = []
    for capability in SHARED_KIB:
        half, other = ("fp16", None) if capability < _AMPERE else ("bf16", "fp16")
        largest = 128 if capability < _AMPERE else 256
        some = [dim for dim in _SOME_HEAD_DIMS if dim <= largest]
        dims = some if quick else [dim for dim in HEAD_DIMS if dim <= largest]
        products = [kernel for kernel in KERNELS if kernel not in _WITHOUT_MATMULS]
        all_builds += [Build(capability, *rest) for rest in product(_WITHOUT_MATMULS, some, [half])]
        all_builds += [Build(capability, *rest) for rest in product(products, dims, [half])]
        # Gemma 2 has soft caps with heads of 256 and 128.
        capped_dims = [dim for dim in (128, 256) if dim <= largest]
        all_builds += [Build(capability, *rest, softcap=True) for rest in product(products, capped_dims, [half])]
        if not quick:
            for edges in (True, False):
                all_builds += [Build(capability, *rest, False, edges=edges) for rest in product(products, some, [half])]
            all_builds += [Build(capability, *rest) for rest in product(products, some, ["fp32"])]
            all_builds += [Build(capability, kernel, 128, other) for kernel in products if other]
            all_builds += _other_candidates(capability, half)
    return all_builds


def _other_candidates(capability: int, dtype: str) -> list[Build]:
    """Return builds of the candidates that are not launched, for one block with edges."""
    other_builds = []
    for head_dim in CANDIDATE_HEAD_DIMS if capability >= _AMPERE else CANDIDATE_HEAD_DIMS[:2]:
        for kernel, sizes in candidates(head_dim, capability, sixteen_bit=True)._asdict().items():
            for place in range(1, len(sizes)):
                other_builds.append(Build(capability, kernel, head_dim, dtype, many=False, candidate=place))
    return other_builds


def compile_build(build: Build) -> Resources:
    """Compile one build; return its resources.

    Raises:
        Exception: any error of Triton or its assembler.
    """
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as compile_with_triton

    blocks = build.blocks()
    options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages, "enable_fp_fusion": True}
    log = StringIO()
    with tempfile.TemporaryDirectory() as cache, knobs.cache.scope(), knobs.nvidia.scope(), redirect_stdout(log):
        knobs.cache.dir, knobs.nvidia.dump_ptxas_log = cache, True
        target = GPUTarget("cuda", build.capability, 32)
        compiled = compile_with_triton(_source(build, blocks), target=target, options=options)
    assembler_text = log.getvalue()
    spills = [int(number) for number in re.findall(r"(\d+) bytes spill (?:stores|loads)", assembler_text)]
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", assembler_text)]
    if not spills or not registers:
        raise RuntimeError(f"the assembler said nothing of registers and spills: {assembler_text[:300]!r}")
    loops = spills_of_loops(compiled.asm["cubin"], _lines_of_masks())
    columns = instruction_columns(compiled.asm)
    return Resources(max(registers), sum(spills), loops.visible, loops.masked, compiled.metadata.shared, columns)


def _lines_of_masks() -> range:
    """Return the lines of the kernels' source that only loops over masked blocks contain."""
    from ds_hetero.runtime.attention.kernels import triton_kernels

    lines, first = inspect.getsourcelines(triton_kernels._visible.fn)
    return range(first, first + len(lines))


def _source(build: Build, blocks: BlockSizes) -> Any:
    """Return the kernel with the types and constants of a launch; addresses and strides are multiples of 16."""
    from triton.compiler import ASTSource

    from ds_hetero.runtime.attention.kernels import triton_kernels, triton_merge

    module = triton_merge if build.kernel == "merge" else triton_kernels
    kernel = getattr(module, f"{build.kernel}_kernel")
    constants: dict[str, int | bool] = {
        "HEAD_DIM": build.head_dim,
        "BLOCK_Q": blocks.queries,
        "BLOCK_K": blocks.keys,
        "BLOCK_D": padded_head_dim(build.head_dim),
        "SOFTCAP": build.softcap,
        "MANY": build.many,
        "EDGES": build.edges,
        "APART": blocks.sums_apart,
    }
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}

    def type_of(argument: str) -> str:
        if argument in constants:
            return "constexpr"
        if argument == "TABLE":
            return "*i32" if build.many else f"*{build.dtype}"
        if argument.isupper():
            return "*fp32" if argument in _ACCUMULATED else f"*{build.dtype}"
        return "fp32" if argument in _FLOATS else "i32"

    names = list(kernel.arg_names)
    return ASTSource(
        kernel,
        {name: type_of(name) for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(names)
            if name not in constants and (name.isupper() or name.startswith("stride"))
        },
    )


def _row(build: Build) -> dict[str, Any]:
    """Compile one build; return it and its resources as plain data."""
    row: dict[str, Any] = asdict(build) | {"blocks": list(build.blocks())}
    try:
        resources = compile_build(build)
    except Exception as error:  # Triton raises what it likes; the table names it and goes on
        return row | {"faults": [f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"]}
    return row | asdict(resources) | {"faults": resources.faults(build)}


def run(
    made: Sequence[Build], processes: int, keep: Callable[[list[dict[str, Any]]], None], rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Compile all builds that ``rows`` lack, in parallel; return all rows in the order of ``made``.

    Args:
        keep: called with all rows so far after every build.
        rows: of an earlier run.
    """
    os.environ.pop("TRITON_INTERPRET", None)
    by_build = {build: row for build in made for row in rows if _is_of(row, build)}
    missing = [build for build in made if build not in by_build]
    made_rows = in_order(_row, missing, processes, start_method="spawn", one_task_each=False)
    with progress(Console(stderr=True)) as report:
        for build, row in zip(missing, made_rows, strict=True):
            by_build[build] = row
            report(
                len(by_build) / len(made), f"sm_{row['capability']} {row['kernel']} {row['head_dim']} {row['dtype']}"
            )
            keep(list(by_build.values()))
    return [by_build[build] for build in made]


def _is_of(row: dict[str, Any], build: Build) -> bool:
    """Return True if a row of an earlier run is of this build, with the block sizes of today."""
    return all(row.get(name) == value for name, value in asdict(build).items()) and row["blocks"] == list(
        build.blocks()
    )


def compiled_by() -> dict[str, str]:
    """Return the facts that results depend on besides the build: Triton's version and the sources of the kernels."""
    import triton

    from ds_hetero.runtime.attention.kernels import triton_kernels, triton_merge

    def digest(module: ModuleType) -> str:
        return hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()[:16]

    return {"triton": triton.__version__, "kernels": digest(triton_kernels), "merge": digest(triton_merge)}


def _kept(file: Path) -> list[dict[str, Any]]:
    """Return the rows of an earlier run whose kernels are those of today."""
    if not file.exists():
        return []
    earlier, today = json.loads(file.read_text()), compiled_by()
    same = {name for name, value in today.items() if earlier.get("compiled_by", {}).get(name) == value}
    if "triton" not in same:
        return []
    return [row for row in earlier["builds"] if ("merge" if row["kernel"] == "merge" else "kernels") in same]


_FIGURES = ("registers", "loop_spill_bytes", "edge_spill_bytes", "spill_bytes", "shared_bytes")


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each architecture and kernel as launched: the largest figures over head sizes, types and shapes.

    Columns of instructions are the fewest, by padded head size.
    """
    summary_rows = []
    for capability, kernel in product(SHARED_KIB, KERNELS):
        launched = [row for row in rows if row["candidate"] == 0]
        of_kernel = [row for row in launched if (row["capability"], row["kernel"]) == (capability, kernel)]
        built = [row for row in of_kernel if "registers" in row]
        if not of_kernel:
            continue
        largest = {name: max((row[name] for row in built), default=0) for name in _FIGURES}
        summary_rows.append(
            {
                "architecture": f"sm_{capability}",
                "kernel": kernel,
                "builds": len(of_kernel),
                **largest,
                "shared_limit": SHARED_KIB[capability] * 1024,
                "columns": _fewest_columns(built),
                "faults": sum(bool(row["faults"]) for row in of_kernel),
            }
        )
    return summary_rows


def _fewest_columns(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return the columns of the narrowest tensor-core instruction by padded head size."""
    columns: dict[str, int] = {}
    for row in sorted(rows, key=lambda row: int(row["head_dim"])):
        if row["columns"]:
            head_dim = str(padded_head_dim(row["head_dim"]))
            columns[head_dim] = min(columns.get(head_dim, row["columns"][0]), row["columns"][0])
    return columns


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three head sizes in one data type")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    parser.add_argument("--only", default="", help="one architecture, such as sm_90; results of others are kept")
    parser.add_argument("--processes", type=int, default=2, help="builds at a time")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    selected_builds = [build for build in builds(args.quick) if args.only in f"sm_{build.capability}"]
    command = " ".join(["python -m benchmarks.kernels", *sys.argv[1:]])

    def described(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {**header(command), "compiled_by": compiled_by(), "summary": summary(rows), "builds": rows}

    if args.quick:
        result = described(run(selected_builds, args.processes, lambda rows: None, []))
    else:
        kept = _kept(args.output)
        others = [row for row in kept if args.only not in f"sm_{row['capability']}"]  # of other architectures
        rows = run(selected_builds, args.processes, lambda rows: write(described(others + rows), args.output), kept)
        write(described(others + rows), args.output)
        result = described(rows)
    if args.json:
        print(json.dumps(result))
    else:
        _show(result)
    return 1 if any(row["faults"] for row in result["summary"]) else 0


def _show(result: dict[str, Any]) -> None:
    """Print the summary, the candidates, and the faults of what is launched."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table(
        "architecture",
        "kernel",
        "builds",
        "registers",
        *_SPILLS,
        "shared, KiB (limit)",
        "columns by head size",
        "faults",
    )
    for row in result["summary"]:
        shared = f"{row['shared_bytes'] / 1024:.0f} ({row['shared_limit'] // 1024})"
        columns = ", ".join(f"{head_dim}: {number}" for head_dim, number in row["columns"].items())
        spills = (row["loop_spill_bytes"], row["edge_spill_bytes"], row["spill_bytes"])
        cells = (row["builds"], row["registers"], *spills, shared, columns, row["faults"])
        table.add_row(row["architecture"], row["kernel"], *map(str, cells))
    console.print(table)
    if any(row["candidate"] for row in result["builds"]):
        console.print(_candidates_table(result["builds"]))
    for row in result["builds"]:
        if row["faults"] and not row["candidate"]:
            build = f"sm_{row['capability']} {row['kernel']} head size {row['head_dim']} {row['dtype']}"
            blocks = "many blocks" if row["many"] else "one block"
            edges = "" if row["edges"] else " without edges"
            soft_cap = ", soft cap" if row["softcap"] else ""
            print(f"{build}, {blocks}{edges}{soft_cap}, sizes {tuple(row['blocks'])}: {'; '.join(row['faults'])}")


_SPILLS = ("spilled bytes: loop", "edges", "all")


def _candidates_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table of all candidates for one block with edges; those that are launched come first."""
    table = Table(
        "architecture",
        "kernel",
        "head size",
        "queries, keys, warps, stages, sums apart",
        "registers",
        *_SPILLS,
        "shared, KiB",
        "columns",
    )
    of_tables = [
        row
        for row in rows
        if row["head_dim"] in CANDIDATE_HEAD_DIMS and not row["many"] and row["edges"] and row["dtype"] != "fp32"
    ]
    for row in sorted(of_tables, key=lambda row: (row["capability"], row["kernel"], row["head_dim"], row["candidate"])):
        cells = [f"sm_{row['capability']}", row["kernel"], row["head_dim"], ", ".join(map(str, row["blocks"]))]
        if "registers" in row:
            cells += [row["registers"], row["loop_spill_bytes"], row["edge_spill_bytes"], row["spill_bytes"]]
            cells += [round(row["shared_bytes"] / 1024), min(row["columns"], default=0)]
        table.add_row(*map(str, cells))
    return table


if __name__ == "__main__":
    sys.exit(main())
