"""Compile the Triton kernels for GPUs that this machine lacks: registers, spills, shared memory, tensor cores.

    python -m benchmarks.kernels [--quick] [--json] [--only sm_90] [--processes 2] [--output FILE]

Triton contains an assembler for every architecture, so that a machine without a GPU can compile its kernels. Each
kernel of `ds_hetero.runtime.attention.kernels` is compiled with the block sizes that the launcher would
choose, for every architecture and head size, for one block and for many. float32, the other 16-bit type and soft caps
are compiled for some of these.

    registers    of a thread, at most 255, and at most 65,536 / threads
    spills       bytes that a thread stores to and loads from memory because it has too few registers
    shared       bytes of shared memory of a program, and the most that the GPU gives one
    tensor cores whether matmuls run on them

A build takes about four CPU seconds. Every result is saved at once: a run that was stopped continues, if the kernels,
the block sizes and Triton are the same.

--quick compiles three head sizes in bfloat16 (float16 before Ampere), many blocks. The exit code is 1 if a kernel does
not compile, spills, needs more shared memory than the GPU has, or does not use tensor cores where it should. Without
tensor cores 128 bytes may spill: the launcher prefers torch's operator there. Nothing is timed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
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

from benchmarks.measure.results import FOLDER, header, progress, write
from ds_hetero.runtime.attention.kernels.triton_native import (
    DELTA,
    MERGE,
    BlockSizes,
    block_sizes,
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
_AMPERE = 80
_SMALL_SPILL = 128  # bytes of a thread, allowed where products run on ordinary cores and torch's operator is preferred
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

    def blocks(self) -> BlockSizes:
        """Block sizes that the launcher chooses for it."""
        launch = block_sizes(padded_head_dim(self.head_dim), self.capability, self.dtype != "fp32")
        return _WITHOUT_MATMULS[self.kernel] if self.kernel in _WITHOUT_MATMULS else getattr(launch, self.kernel)

    @property
    def has_tensor_cores(self) -> bool:
        """Whether Triton computes these matmuls on tensor cores of this architecture."""
        return runs_on_tensor_cores(self.capability, self.dtype != "fp32")


@dataclass(frozen=True)
class Resources:
    """Resources of one build, as the assembler reports them; in bytes."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_cores: bool

    def faults(self, build: Build) -> list[str]:
        """Return the reasons why a GPU would run it badly, or not at all."""
        limit = SHARED_KIB[build.capability] * 1024
        reasons = []
        if self.spill_bytes > (0 if build.has_tensor_cores else _SMALL_SPILL):
            reasons.append(f"spills {self.spill_bytes} bytes")
        if self.shared_bytes > limit:
            reasons.append(f"{self.shared_bytes} bytes of shared memory of {limit}")
        if build.has_tensor_cores and build.kernel not in _WITHOUT_MATMULS and not self.tensor_cores:
            reasons.append("no tensor cores")
        return reasons


def builds(quick: bool = False) -> list[Build]:
    """Return all builds: every architecture, kernel and head size that `triton_refusal` accepts.

    One 16-bit type stands for both, except at one head size. Settings with little influence are compiled at three head
    sizes.
    """
    all_builds = []
    for capability in SHARED_KIB:
        half, other = ("fp16", None) if capability < _AMPERE else ("bf16", "fp16")
        largest = 128 if capability < _AMPERE else 256
        some = [dim for dim in _SOME_HEAD_DIMS if dim <= largest]
        dims = some if quick else [dim for dim in HEAD_DIMS if dim <= largest]
        products = [kernel for kernel in KERNELS if kernel not in _WITHOUT_MATMULS]
        all_builds += [Build(capability, *rest) for rest in product(_WITHOUT_MATMULS, dims, [half])]
        all_builds += [
            Build(capability, *rest) for rest in product(products, dims, [half], [True] if quick else [True, False])
        ]
        all_builds += [Build(capability, kernel, 128, half, softcap=True) for kernel in products]
        if not quick:
            all_builds += [Build(capability, *rest) for rest in product(products, some, ["fp32"])]
            all_builds += [Build(capability, kernel, 128, other) for kernel in products if other]
    return all_builds


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
    has_mma = re.search(r"\b(mma\.sync|wgmma|tcgen05\.mma)", compiled.asm["ptx"]) is not None
    return Resources(max(registers), sum(spills), compiled.metadata.shared, has_mma)


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
    pool = multiprocessing.get_context("spawn").Pool(processes)
    with progress(Console(stderr=True)) as report, pool:
        for build, row in zip(missing, pool.imap(_row, missing, chunksize=1), strict=True):
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


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each architecture and kernel: the largest figures over head sizes, data types and shapes."""
    summary_rows = []
    for capability, kernel in product(SHARED_KIB, KERNELS):
        rows_of_kernel = [row for row in rows if (row["capability"], row["kernel"]) == (capability, kernel)]
        built = [row for row in rows_of_kernel if "registers" in row]
        if rows_of_kernel:
            largest = {
                name: max((row[name] for row in built), default=0)
                for name in ("registers", "spill_bytes", "shared_bytes")
            }
            summary_rows.append(
                {
                    "architecture": f"sm_{capability}",
                    "kernel": kernel,
                    "builds": len(rows_of_kernel),
                    **largest,
                    "shared_limit": SHARED_KIB[capability] * 1024,
                    "tensor_cores": sum(row["tensor_cores"] for row in built),
                    "faults": sum(bool(row["faults"]) for row in rows_of_kernel),
                }
            )
    return summary_rows


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three head sizes in one data type")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    parser.add_argument("--only", default="", help="one architecture, such as sm_90")
    parser.add_argument("--processes", type=int, default=2, help="builds at a time")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    selected_builds = [build for build in builds(args.quick) if args.only in f"sm_{build.capability}"]
    command = " ".join(["python -m benchmarks.kernels", *sys.argv[1:]])

    def described(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {**header(command), "compiled_by": compiled_by(), "summary": summary(rows), "builds": rows}

    if args.quick or args.only:
        result = described(run(selected_builds, args.processes, lambda rows: None, []))
    else:
        rows = run(
            selected_builds, args.processes, lambda rows: write(described(rows), args.output), _kept(args.output)
        )
        result = described(rows)
        write(result, args.output)
    if args.json:
        print(json.dumps(result))
    else:
        _show(result)
    return 1 if any(row["faults"] for row in rows) else 0


def _show(result: dict[str, Any]) -> None:
    """Print the summary, a row for each architecture and kernel."""
    table = Table(
        "architecture",
        "kernel",
        "builds",
        "registers",
        "spilled bytes",
        "shared, KiB (limit)",
        "on tensor cores",
        "faults",
    )
    for row in result["summary"]:
        shared = f"{row['shared_bytes'] / 1024:.0f} ({row['shared_limit'] // 1024})"
        cells = (row["builds"], row["registers"], row["spill_bytes"], shared, row["tensor_cores"], row["faults"])
        table.add_row(row["architecture"], row["kernel"], *map(str, cells))
    Console(width=None if sys.stdout.isatty() else 130).print(table)
    for row in result["builds"]:
        if row["faults"]:
            build = f"sm_{row['capability']} {row['kernel']} head size {row['head_dim']} {row['dtype']}"
            shape = f"{'many blocks' if row['many'] else 'one block'}{', soft cap' if row['softcap'] else ''}"
            print(f"{build}, {shape}, blocks {tuple(row['blocks'])}: {'; '.join(row['faults'])}")


if __name__ == "__main__":
    sys.exit(main())
