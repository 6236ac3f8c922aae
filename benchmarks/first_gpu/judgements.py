"""How the rows of a run are read, finding by finding, in the order of the last page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.first_gpu.findings import Judgement, Measured, finding
from benchmarks.first_gpu.parts import Row

_WORTH = 0.95  # a default stands where it has this much of the best: repeated medians differ by a few per cent
_NOTHING = Judgement(None)


def _all(rows: Sequence[Row], key: str) -> bool | None:
    """Whether ``key`` holds in all rows that have it; None where none has."""
    values = [bool(row[key]) for row in rows if key in row]
    return all(values) if values else None


def _listed(texts: Iterable[object]) -> str:
    return "; ".join(map(str, texts))


@finding("B5 names of backends", "the backend of the device's own tensors decides, whatever name was given")
def _backends(measured: Measured) -> Judgement:
    rows = measured.rows("environment", "backend names")
    return Judgement(_all(rows, "right"), _listed(f"{row['given']}: sees {row['package_sees']}" for row in rows))


@finding("B8 fp16 and architectures", "a GPU without code in this torch is refused; bf16 where hardware has it")
def _architectures(measured: Measured) -> Judgement:
    rows = [row for row in measured.rows("environment", "software and device") if "in_arch_list" in row]
    if not rows:
        return _NOTHING
    row = rows[0]
    figure = f"sm_{row['capability']} of {row['arch_list']}, native bf16: {row['native_bf16']}"
    return Judgement(row["in_arch_list"], figure)


@finding("kernel choice", "flash_attn, else torch's flash operator; no kernel of cuDNN")
def _kernel_choice(measured: Measured) -> Judgement:
    ratios = [row["cudnn_of_chosen"] for row in measured.rows("cudnn", "rates") if "cudnn_of_chosen" in row]
    checks = measured.rows("cudnn", "results")
    wrong = [f"{row['case']} ({row['way']})" for row in checks if row.get("right") is False]
    if not ratios:
        return Judgement(None, f"cuDNN's results wrong in: {_listed(wrong)}" if wrong else "")
    text = f"cuDNN has {min(ratios):.2f} to {max(ratios):.2f} of the chosen kernel's rate over {len(ratios)} cases"
    text += f"; wrong in {len(wrong)} of {len(checks)} checks" + (f": {_listed(wrong)}" if wrong else "")
    return Judgement(max(ratios) < 1 / _WORTH, text)


@finding("Triton table", "block sizes with which no kernel spills registers anywhere")
def _triton_table(measured: Measured) -> Judgement:
    timed = [row for row in measured.rows("triton", "block sizes") if "tflops" in row]
    figures, holds = [], True
    for kernel, head_dim in dict.fromkeys((row["kernel"], row["head_dim"]) for row in timed):
        of_kernel = [
            row for row in timed if (row["kernel"], row["head_dim"], row["mask"]) == (kernel, head_dim, "full")
        ]
        default = next((row for row in of_kernel if row["default"]), None)
        if default is None:
            continue
        best = max(of_kernel, key=lambda row: row["tflops"])
        holds = holds and default["tflops"] >= _WORTH * best["tflops"]
        figures.append(f"{kernel}, D {head_dim}: {default['tflops']:.3g}, best {best['tflops']:.3g} ({best['config']})")
    return Judgement(holds, f"TFLOP/s of today's and of the best: {_listed(figures)}") if figures else _NOTHING


FINDINGS = (_backends, _architectures, _kernel_choice, _triton_table)
"""In the order of the last page."""
