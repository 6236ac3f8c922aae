"""Judge the rows of a run, finding by finding, in the order of the last page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.first_gpu.findings import Judgement, Measured, finding, finding_of_rows
from benchmarks.first_gpu.parts import Row

_MIN_OF_BEST = 0.95  # a default stands where it has this much of the best: repeated medians differ by a few per cent
_NOTHING = Judgement(None)
_LATE_S = 5.0  # for the other ranks to end: docs/dead-ranks.md says 0.3 to 1, and a loaded machine may be late


def _all(rows: Sequence[Row], key: str) -> bool | None:
    """Return whether ``key`` is true in all rows that have it; None if no row has it."""
    values = [bool(row[key]) for row in rows if key in row]
    return all(values) if values else None


def _listed(texts: Iterable[object]) -> str:
    return "; ".join(map(str, texts))


_STUCK = ("timed out", "failed")
_BEGINS, _MET = "begins", "all ranks have met"  # what ranks report once they have a process group


def _began(measured: Measured, section: str, part: str, step: str = _BEGINS) -> bool:
    """Return whether the ranks of a part have reached the step that it tries.

    A part that ends before has measured nothing.
    """
    return any(row.get("step") == step for row in measured.rows(section, part))


@finding("B1 first messages", "every pair that will send is connected before a step, all ranks in one order")
def _connected_first(measured: Measured) -> Judgement:
    """Confirm the default if a step without connections stands still, and one with them is right."""
    before = measured.outcome("two_ranks", "pipeline as before")
    step, after = _pipeline(measured, "pipeline")
    if step is None or (step and not _began(measured, "two_ranks", "pipeline as before")):
        return Judgement(None, after)
    return Judgement(step and before in _STUCK, f"as before the review: {before}; as it is: {after}")


@finding("B2 tied embeddings", "no bucket waits inside a hook: a tied pipeline ends its first step")
def _tied(measured: Measured) -> Judgement:
    return Judgement(*_pipeline(measured, "tied pipeline"))


def _pipeline(measured: Measured, part: str) -> tuple[bool | None, str]:
    """Return whether a pipeline of two stages has trained a step right, and the reason."""
    outcome, rows = measured.outcome("two_ranks", part), measured.rows("two_ranks", part)
    ended = [row for row in rows if "right" in row]
    if outcome in _STUCK and _began(measured, "two_ranks", part):
        return False, outcome
    if not ended:
        return None, ""
    difference = max(row["weight_difference"] for row in ended)
    return _all(ended, "right"), f"{outcome}, largest difference of a weight {difference:.1e}"


@finding_of_rows(
    "B3 posted receives",
    "a gradient is asked for when nothing of this rank is missing for it",
    section="two_ranks",
    part="posted receive",
    key="blocks",
)
def _late_receives(rows: Sequence[Row]) -> Judgement:
    (row,) = rows
    figure = (
        f"giving memory back waited {row['waited_s']:.1f} s for a receive whose message came after {row['late_s']} s"
    )
    return Judgement(row["blocks"], figure)


@finding("B4 first use of a group", "every group is used once by all its ranks when it is made")
def _used_by_all(measured: Measured) -> Judgement:
    some = measured.outcome("more_ranks", "used by some first")
    all_ = measured.outcome("more_ranks", "used by all first")
    # The first alone proves nothing: it begins before NCCL has made anything.
    if not all(_began(measured, "more_ranks", part) for part in ("used by some first", "used by all first")):
        return _NOTHING
    return Judgement(all_ == "done" and some in _STUCK, f"used by some ranks first: {some}; by all: {all_}")


@finding("B5 names of backends", "the backend of the device's own tensors decides, whatever name was given")
def _backends(measured: Measured) -> Judgement:
    rows = measured.rows("environment", "backend names")
    return Judgement(_all(rows, "right"), _listed(f"{row['given']}: sees {row['package_sees']}" for row in rows))


@finding("B6 a lost rank", "the others end within seconds and name it, long before torch's watchdog")
def _lost_rank(measured: Measured) -> Judgement:
    """Judge how fast ranks end after one is killed."""
    entry = measured.entry("two_ranks", "lost rank")
    ended_s = entry.get("ended_s", {})
    if not ended_s or not _began(measured, "two_ranks", "lost rank", _MET):
        return _NOTHING
    if set(ended_s) != {"0", "1"}:
        return Judgement(False, f"rank 0 still waited when its part was ended, after {entry['seconds']} s")
    last_words = f"{entry.get('why', '')} {entry.get('outputs', {})}"
    late_s = ended_s["0"] - ended_s["1"]
    is_named = "rank 1 gone" in last_words
    return Judgement(is_named and late_s <= _LATE_S, f"ended {late_s:.1f} s later, names it: {is_named}")


_NO_GROUP = "making the process group"  # the call of the self-test before its first check


@finding("B7 self-test", "passes on ranks that work, over the paths that train")
def _selftest(measured: Measured) -> Judgement:
    """Judge the self-test; a part that was ended between checks that pass had too little time, and judges nothing."""
    texts, verdicts = [], []
    for section, ranks in (("two_ranks", 2), ("more_ranks", 3)):
        rows = measured.rows(section, "self-test")
        outcome = measured.outcome(section, "self-test")
        failed = list(dict.fromkeys(row["name"] for row in rows if row["status"] == "fail"))
        if not rows or _NO_GROUP in failed:
            continue
        if failed or outcome != "timed out":
            verdicts.append(not failed and outcome == "done")
        passed = sum(row["status"] == "pass" for row in rows)
        texts.append(f"{ranks} ranks: {outcome}, {passed} passed, failed: {_listed(failed) or 'none'}")
    return Judgement(all(verdicts) if verdicts else None, _listed(texts))


@finding_of_rows(
    "B8 fp16 and architectures",
    "a GPU without code in this torch is refused; bf16 where hardware has it",
    section="environment",
    part="software and device",
    key="in_arch_list",
)
def _architectures(rows: Sequence[Row]) -> Judgement:
    row = rows[0]
    figure = f"sm_{row['capability']} of {row['arch_list']}, native bf16: {row['native_bf16']}"
    return Judgement(row["in_arch_list"], figure)


@finding("kernel choice", "flash_attn, else torch's flash operator; no kernel of cuDNN")
def _kernel_choice(measured: Measured) -> Judgement:
    """Judge the default kernel by the rates of all kernels."""
    ratios = [row["cudnn_of_chosen"] for row in measured.rows("cudnn", "rates", "cudnn_of_chosen")]
    checks = measured.rows("cudnn", "results")
    wrong = [f"{row['case']} ({row['way']})" for row in checks if row.get("right") is False]
    if not ratios:
        return Judgement(None, f"cuDNN's results wrong in: {_listed(wrong)}" if wrong else "")
    text = f"cuDNN has {min(ratios):.2f} to {max(ratios):.2f} of the chosen kernel's rate over {len(ratios)} cases"
    text += f"; wrong in {len(wrong)} of {len(checks)} checks" + (f": {_listed(wrong)}" if wrong else "")
    return Judgement(max(ratios) < 1 / _MIN_OF_BEST, text)


@finding("Triton table", "block sizes with which no loop spills registers")
def _triton_table(measured: Measured) -> Judgement:
    """Judge the block sizes of the Triton kernels."""
    rows_by_kernel: dict[tuple[str, int], list[Row]] = {}
    for row in measured.rows("triton", "block sizes", "tflops"):
        of_kernel = rows_by_kernel.setdefault((row["kernel"], row["head_dim"]), [])
        if row["mask"] == "full":
            of_kernel.append(row)
    figures, holds = [], True
    for (kernel, head_dim), rows in rows_by_kernel.items():
        default = next((row for row in rows if row["default"]), None)
        if default is None:
            continue
        best = max(rows, key=lambda row: row["tflops"])
        holds = holds and default["tflops"] >= _MIN_OF_BEST * best["tflops"]
        figures.append(f"{kernel}, D {head_dim}: {default['tflops']:.3g}, best {best['tflops']:.3g} ({best['config']})")
    return Judgement(holds, f"TFLOP/s of today's and of the best: {_listed(figures)}") if figures else _NOTHING


_RING_COST = 1.08  # of an undivided call: the target of a ring of 8 at 64K tokens (`benchmarks.gpu`)
_HIDDEN = 0.9  # of messages, from which on they count as hidden; chosen


@finding("merge", "one kernel merges a block into out and lse, if it works on the GPU")
def _merge(measured: Measured) -> Judgement:
    """Judge the merge in one kernel by that of operators."""
    rows = measured.rows("ring", "merges", "kernel_of_operators")
    if not rows:
        return _NOTHING
    rates = _listed(
        f"{row['tokens']:,} tokens: {row['kernel_ms']:.3g} ms, operators {row['operators_ms']:.3g} ms" for row in rows
    )
    rings = measured.rows("ring", "rings", "of_undivided")
    costs = _listed(f"ring of {row['ring']} at {row['tokens']:,}: {row['of_undivided']:.3f}" for row in rings)
    holds = min(row["kernel_of_operators"] for row in rows) >= _MIN_OF_BEST
    if rings:
        holds = holds or max(row["of_undivided"] for row in rings) <= _RING_COST
    return Judgement(holds, f"{rates}; time of an undivided call: {costs or 'not measured'}")


@finding_of_rows(
    "packing",
    "heads are copied 16 bytes at a time",
    section="ring",
    part="packing",
    key="package_of_int64",
)
def _packing(rows: Sequence[Row]) -> Judgement:
    figure = _listed(
        f"{row['heads']} heads of {row['head_dim']}: {row['package_gather_of_copy']:.2f} of a copy's rate, "
        f"{row['int64_gather_of_copy']:.2f} by int64, {row['contiguous_ms']:.3g} ms saved by reading views"
        for row in rows
    )
    return Judgement(min(row["package_of_int64"] for row in rows) >= _MIN_OF_BEST, figure)


@finding_of_rows(
    "overlap",
    "groups of usual priority, no SMs left free: messages run beside attention",
    section="overlap",
    part="messages beside attention",
    key="hidden_share",
)
def _overlap(rows: Sequence[Row]) -> Judgement:
    plain = [row for row in rows if row["priority"] == "default" and not row["sm_margin"]]
    if not plain:
        return _NOTHING
    figure = _listed(
        f"{row['kernel']}, {row['megabytes']} MiB, {row['priority']}, margin {row['sm_margin']}: "
        f"{row['hidden_share']:.2f} hidden"
        for row in rows
    )
    return Judgement(min(row["hidden_share"] for row in plain) >= _HIDDEN, figure)


@finding("memory of communicators", "a communicator takes no more of a card than the cost model counts")
def _communicators(measured: Measured) -> Judgement:
    """Judge the memory that the cost model counts for communicators."""
    rows = measured.rows("two_ranks", "memory of groups")
    mib_by_group: dict[int, float] = {}
    for row in rows:
        if row.get("group"):  # 0: before the first group
            mib_by_group[row["group"]] = mib_by_group.get(row["group"], 0.0) + row["mib_per_rank"]
    counted = [row["counted_mib"] for row in rows if row.get("counted_mib")]
    if not mib_by_group or not counted:
        return _NOTHING
    largest_mib = max(mib_by_group.values())
    figure = f"{largest_mib:.0f} MiB for the largest of three on two ranks, counted {counted[0]:.0f}"
    return Judgement(largest_mib <= counted[0], figure)


@finding("unequal collectives", "gathers and reduces of unequal parts cost what equal ones do")
def _unequal(measured: Measured) -> Judgement:
    texts, worst = [], 0.0
    for section, ranks in (("two_ranks", 2), ("more_ranks", 3)):
        rows = measured.rows(section, "unequal collectives")
        for row in rows:
            if "unequal" in row["how"]:
                worst = max(worst, row["of_one_call"])
                text = f"{row['collective']} of {row['mebibytes']} MiB, {ranks} ranks, {row['how']}: "
                texts.append(f"{text}{row['of_one_call']:.2f} of one call's time")
    return Judgement(worst <= 1 / _MIN_OF_BEST, _listed(texts)) if texts else _NOTHING


_JOBS = ("1B at 32K", "1B at 128K", "8B with adapters at 64K")
_PREDICTED = 0.1  # error of a step that counts as predicted; on an H200 4 to 7 % at 32K and more, see docs/measured.md


@finding("steps' predictions", "seconds of a step by the calibrated cost model at the catalogue's rates")
def _predictions(measured: Measured) -> Judgement:
    """Judge the predicted times of whole steps."""
    rows = [row for job in _JOBS for row in measured.rows("steps", job)]
    rows = [row for row in rows if row.get("way") == "torch" and row.get("step_s") and row["predicted_s"]]
    figure = _listed(
        f"{row['job']}: {row['step_s']:.3g} s, predicted {row['predicted_s']:.3g} "
        f"({row['predicted_s'] / row['step_s'] - 1:+.0%})"
        for row in rows
    )
    holds = all(abs(row["predicted_s"] / row["step_s"] - 1) <= _PREDICTED for row in rows)
    return Judgement(holds if rows else None, figure)


@finding("recomputed attention", "a layer that is recomputed runs its attention, and its messages, again")
def _recomputed(measured: Measured) -> Judgement:
    texts, gains = [], []
    for job in _JOBS:
        step_s = {row["way"]: row["step_s"] for row in measured.rows("steps", job) if "step_s" in row}
        for way in ("cudnn", "cudnn, attention kept"):
            if "torch" in step_s and way in step_s:
                share = step_s[way] / step_s["torch"]
                gains += [share] if "kept" in way else []
                texts.append(f"{job}, {way}: {share:.2f} of torch's time")
    return Judgement(min(gains) >= _MIN_OF_BEST if gains else None, _listed(texts))


FINDINGS = (
    _connected_first,
    _tied,
    _late_receives,
    _used_by_all,
    _backends,
    _lost_rank,
    _selftest,
    _architectures,
    _kernel_choice,
    _triton_table,
    _merge,
    _packing,
    _overlap,
    _communicators,
    _unequal,
    _predictions,
    _recomputed,
)
"""In the order of the last page."""
