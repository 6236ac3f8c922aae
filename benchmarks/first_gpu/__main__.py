"""Measure on a rented GPU, in ten minutes, whether it confirms our defaults; sections have budgets and are rehearsed.

    python -m benchmarks.first_gpu                      # one GPU of any kind; first_gpu.json and first_gpu.md
    python -m benchmarks.first_gpu --rehearse           # the same sections on CPUs and tensors without numbers
    python -m benchmarks.first_gpu --sections ring,overlap --budget 120

    environment  versions, backends, MPS; begins to compile Triton kernels
    cudnn        torch's cuDNN operator against its flash operator and fp32: results, rates, first calls
    triton       block sizes of the Triton kernels, each kernel by itself
    ring         the engine's ring on one GPU with copies for messages; merges and packing
    overlap      messages beside attention
    two_ranks    pipelines, attention, ZeRO-3, memory of communicators, unequal collectives, a rank that dies
    more_ranks   three ranks: the self-test, sub-rings, a group that only some of its ranks use first
    steps        whole steps: kernels, and attention that is kept over recomputation

Every part runs in processes of its own, with its own limit, and each reported row is saved at once. If a part hangs,
raises or needs a newer torch, this is recorded and the next part runs. Version checks are disabled: how a release that
the package refuses behaves is part of the result. The exit code is 1 if a part failed or timed out that should not.

The last page says for every finding of the review whether the run confirms today's default. In a rehearsal all figures
are marked as rehearsed, and confirm nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.first_gpu.crew import Settings
from benchmarks.first_gpu.parts import Section
from benchmarks.first_gpu.record import Record, parts_of
from benchmarks.first_gpu.runner import Runner
from benchmarks.measure.results import FOLDER

BUDGET_S = 600.0


def main(arguments: Sequence[str] | None = None, sections: Sequence[Section] | None = None) -> int:
    """Run the command; ``sections`` replaces the usual sections."""
    options = _parser().parse_args(arguments)
    os.environ["DS_ACCELERATOR"] = "cpu" if options.rehearse else "cuda"  # else DeepSpeed asks CUDA when imported
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # so that is_available(), which imports call, asks no CUDA either
    if options.rehearse:
        os.environ["OMP_NUM_THREADS"] = "1"
    elif not _has_gpu():
        print("no CUDA device: python -m benchmarks.first_gpu --rehearse runs the same sections on CPUs")
        return 0
    chosen = [_of_run(section, options.rehearse) for section in _chosen(options.sections, sections)]
    command = " ".join(["python -m benchmarks.first_gpu", *(sys.argv[1:] if arguments is None else arguments)])
    output = options.output or FOLDER / ("first_gpu_rehearsed.json" if options.rehearse else "first_gpu.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="first_gpu_") as folder:
        os.environ.setdefault("TRITON_CACHE_DIR", f"{folder}/triton")
        record = Record(command, chosen, output, options.rehearse)
        Runner(chosen, record, Path(folder), Settings(rehearsal=options.rehearse), options.budget).run()
    print(record.page.read_text())
    print(f"written: {output} and {record.page}")
    return 1 if bad_parts(record, chosen) else 0


def bad_parts(record: Record, sections: Sequence[Section]) -> list[str]:
    """Return the parts that did not end as they should."""
    bad = []
    for section, part in parts_of(sections):
        entry = record.entry(section, part)
        outcome = entry["outcome"]
        ended_early = outcome in ("failed", "timed out") and not entry["rows"]
        if outcome not in part.outcomes or ended_early:
            bad.append(f"{section.name}: {part.name}: {outcome}")
    return bad


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on CPUs, with the smallest sizes")
    parser.add_argument("--sections", default="", help="names, separated by commas; all if left out")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of the whole run")
    parser.add_argument("--output", type=Path, help="the JSON file; the page lies beside it")
    return parser


def _has_gpu() -> bool:
    """Return whether a GPU's device file exists; a call of CUDA would keep forked processes from using it."""
    files = ("/dev/nvidia0", "/dev/dxg", "/dev/kfd")  # NVIDIA's, that of WSL, AMD's
    return any(Path("/proc/driver/nvidia/gpus").glob("*")) or any(Path(file).exists() for file in files)


def _chosen(names: str, sections: Sequence[Section] | None) -> list[Section]:
    """Return the requested sections in the order in which they run. Raises `SystemExit`: a name is unknown."""
    if sections is None:
        from benchmarks.first_gpu.plan import SECTIONS

        sections = SECTIONS
    requested = [name for name in names.split(",") if name]
    section_names = [section.name for section in sections]
    if unknown := [name for name in requested if name not in section_names]:
        raise SystemExit(f"no section {', '.join(unknown)}; there are {', '.join(section_names)}")
    return [section for section in sections if not requested or section.name in requested]


def _of_run(section: Section, rehearsal: bool) -> Section:
    return replace(section, parts=tuple(part.of_run(rehearsal) for part in section.parts))


if __name__ == "__main__":
    sys.exit(main())
