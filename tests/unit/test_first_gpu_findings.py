"""The last page of the first GPU run: what rows of a run on a GPU say of each default."""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks.first_gpu.findings import CONFIRMS, CONTRADICTS, NOT_MEASURED, REHEARSED, Measured, judged
from benchmarks.first_gpu.groups_memory import counted_mib
from benchmarks.first_gpu.judgements import FINDINGS
from benchmarks.first_gpu.page import as_page
from benchmarks.first_gpu.plan import SECTIONS
from benchmarks.first_gpu.record import parts_of
from benchmarks.first_gpu.shared_card import refusal

Entry = dict[str, Any]


def _entry(section: str, part: str, *rows: Entry, outcome: str = "done", **more: Any) -> Entry:
    return {"section": section, "part": part, "ranks": 1, "outcome": outcome, "rows": list(rows), **more}


def _result(*entries: Entry, rehearsal: bool = False) -> dict[str, Any]:
    return {
        "command": "planted",
        "started": "2026-11-28T00:00:00+0000",
        "seconds": 1.0,
        "rehearsal": rehearsal,
        "parts": list(entries),
    }


def _verdict(name: str, *entries: Entry) -> tuple[str, str]:
    by_name = {each["name"]: each for each in judged(Measured(_result(*entries)), FINDINGS)}
    return by_name[name]["verdict"], by_name[name]["figure"]


BEGINS = {"step": "begins"}
RIGHT = {"right": True, "weight_difference": 1e-7}
PIPELINE = _entry("two_ranks", "pipeline", BEGINS, RIGHT)
STEP = {"job": "1B", "way": "torch", "step_s": 2.0, "predicted_s": 1.9}
KEPT = STEP | {"way": "cudnn, attention kept"}


def _posted(waited_s: float) -> Entry:
    row = {"blocks": waited_s > 2.0, "waited_s": waited_s, "late_s": 4.0}
    return _entry("two_ranks", "posted receive", row)


def _backend(seen: str) -> Entry:
    row = {"right": seen == "nccl", "given": None, "package_sees": seen}
    return _entry("environment", "backend names", row)


def _rate(ratio: float) -> Entry:
    return _entry("cudnn", "rates", {"case": "causal", "cudnn_of_chosen": ratio})


def _timed(default: float, other: float) -> Entry:
    row = {"kernel": "dkv", "head_dim": 128, "mask": "full"}
    rows = [row | {"default": True, "tflops": default, "config": "today's"}]
    rows += [row | {"default": False, "tflops": other, "config": "other"}]
    return _entry("triton", "block sizes", *rows)


def _hidden(share: float) -> Entry:
    row = {"kernel": "torch", "megabytes": 64, "priority": "default", "sm_margin": 0, "hidden_share": share}
    return _entry("overlap", "messages beside attention", row)


def _lost(rank_0_s: float, why: str) -> Entry:
    ended_s = {"0": rank_0_s, "1": 1.0}
    return _entry("two_ranks", "lost rank", {"step": "all ranks have met"}, outcome="failed", ended_s=ended_s, why=why)


def _groups(mib: float) -> Entry:
    rows = [{"group": 1, "step": step, "mib_per_rank": mib / 2} for step in ("made", "first all_reduce")]
    return _entry("two_ranks", "memory of groups", {"counted_mib": counted_mib("NVIDIA A10")}, *rows)


def _merges(ratio: float) -> Entry:
    row = {"tokens": 8192, "kernel_ms": 1.0, "operators_ms": ratio, "kernel_of_operators": ratio}
    return _entry("ring", "merges", row)


def _packing(ratio: float) -> Entry:
    rates = {"package_gather_of_copy": 0.5, "int64_gather_of_copy": 0.5 / ratio, "package_of_int64": ratio}
    return _entry("ring", "packing", {"heads": "16:16", "head_dim": 128, "contiguous_ms": 1.0, **rates})


def _unequal(ratio: float) -> Entry:
    row = {"collective": "gather", "how": "list of unequal parts", "mebibytes": 256, "of_one_call": ratio}
    return _entry("two_ranks", "unequal collectives", row)


def _first_use(some: str) -> tuple[Entry, Entry]:
    by_some = _entry("more_ranks", "used by some first", BEGINS, outcome=some)
    return by_some, _entry("more_ranks", "used by all first", BEGINS)


def _selftest(status: str) -> Entry:
    return _entry("two_ranks", "self-test", {"name": "ring", "status": status})


CASES = [
    ("B1 first messages", [PIPELINE, _entry("two_ranks", "pipeline as before", BEGINS, outcome="timed out")], True),
    ("B1 first messages", [PIPELINE, _entry("two_ranks", "pipeline as before", BEGINS, RIGHT)], False),
    ("B1 first messages", [_entry("two_ranks", "pipeline", BEGINS, outcome="timed out")], False),
    ("B2 tied embeddings", [_entry("two_ranks", "tied pipeline", RIGHT)], True),
    ("B2 tied embeddings", [_entry("two_ranks", "tied pipeline", BEGINS, outcome="timed out")], False),
    (
        "B3 posted receives",
        [_entry("two_ranks", "posted receive", {"blocks": True, "waited_s": 4.0, "late_s": 4})],
        True,
    ),
    (
        "B3 posted receives",
        [_entry("two_ranks", "posted receive", {"blocks": False, "waited_s": 0.0, "late_s": 4})],
        False,
    ),
    ("B4 first use of a group", _first_use("timed out"), True),
    ("B4 first use of a group", _first_use("done"), False),
    (
        "B5 names of backends",
        [_entry("environment", "backend names", {"right": True, "given": None, "package_sees": "nccl"})],
        True,
    ),
    (
        "B5 names of backends",
        [_entry("environment", "backend names", {"right": False, "given": None, "package_sees": "gloo"})],
        False,
    ),
    ("B6 a lost rank", [_lost(2.0, "PeerError: rank 1 gone")], True),
    ("B6 a lost rank", [_lost(2.0, "connection reset")], False),
    ("B6 a lost rank", [_lost(20.0, "PeerError: rank 1 gone")], False),
    ("B7 self-test", [_selftest("pass")], True),
    ("B7 self-test", [_selftest("fail")], False),
    ("kernel choice", [_rate(0.9)], True),
    ("kernel choice", [_rate(1.6)], False),
    ("Triton table", [_timed(200.0, 201.0)], True),
    ("Triton table", [_timed(111.0, 250.0)], False),
    ("merge", [_merges(1.0)], True),
    ("merge", [_merges(0.5)], False),
    ("packing", [_packing(1.0)], True),
    ("packing", [_packing(0.5)], False),
    ("overlap", [_hidden(0.98)], True),
    ("overlap", [_hidden(0.1)], False),
    ("memory of communicators", [_groups(50.0)], True),
    ("memory of communicators", [_groups(70.0)], False),
    ("unequal collectives", [_unequal(1.0)], True),
    ("unequal collectives", [_unequal(1.5)], False),
    ("steps' predictions", [_entry("steps", "1B at 32K", STEP)], True),
    ("steps' predictions", [_entry("steps", "1B at 32K", STEP | {"predicted_s": 1.0})], False),
    ("recomputed attention", [_entry("steps", "1B at 32K", STEP, STEP | {"way": "cudnn, attention kept"})], True),
    (
        "recomputed attention",
        [_entry("steps", "1B at 32K", STEP, STEP | {"way": "cudnn, attention kept", "step_s": 1.5})],
        False,
    ),
]


@pytest.mark.parametrize(("name", "entries", "holds"), CASES, ids=[f"{name}-{holds}" for name, _, holds in CASES])
def test_figures_confirm_or_contradict_a_default(name: str, entries: list[Entry], holds: bool) -> None:
    verdict, figure = _verdict(name, *entries)
    assert verdict == (CONFIRMS if holds else CONTRADICTS)
    assert figure


def test_architectures_are_judged_by_what_torch_was_built_for() -> None:
    row = {"capability": 90, "arch_list": ["sm_90"], "native_bf16": True}
    for in_list, wanted in ((True, CONFIRMS), (False, CONTRADICTS)):
        entry = _entry("environment", "software and device", row | {"in_arch_list": in_list})
        assert _verdict("B8 fp16 and architectures", entry)[0] == wanted


def test_memory_of_communicators_is_compared_with_what_the_cost_model_counts() -> None:
    # 2 channels: tables of 3 * 2 MiB each, 12 MiB each for the ring, 12 MiB each for messages
    assert counted_mib("NVIDIA A10") == 2 * (6 + 12 + 12)
    assert counted_mib("NVIDIA Unheard-of") is None
    assert counted_mib("NVIDIA GeForce RTX 4090") is None  # buffers are the host's
    unknown = _entry("two_ranks", "memory of groups", {"counted_mib": None}, {"group": 1, "mib_per_rank": 50.0})
    assert _verdict("memory of communicators", unknown)[0] == NOT_MEASURED


def test_what_was_not_measured_is_called_so() -> None:
    findings = judged(Measured(_result()), FINDINGS)
    assert {each["verdict"] for each in findings} == {NOT_MEASURED}
    assert {each["name"] for each in findings} >= {name for name, _, _ in CASES}


def test_ranks_that_never_had_a_process_group_have_measured_nothing() -> None:
    """As every part of several ranks ends where NCCL refuses two of them on one card."""
    parts = ("pipeline", "tied pipeline", "pipeline as before", "lost rank", "self-test")
    why = "rank 0: DistBackendError: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device"
    ended = {"outcome": "failed", "ended_s": {"0": 1.0, "1": 1.0}, "why": why, "seconds": 1.0}
    entries = [_entry("two_ranks", part, **ended) for part in parts]
    entries += [_entry("more_ranks", part, **ended) for part in ("used by all first", "self-test")]
    entries.append(_entry("more_ranks", "used by some first", BEGINS, **ended))  # its first call makes what is refused
    assert {each["verdict"] for each in judged(Measured(_result(*entries)), FINDINGS)} == {NOT_MEASURED}
    assert _verdict("B1 first messages", PIPELINE, *entries[2:])[0] == NOT_MEASURED


@pytest.mark.parametrize(
    ("library", "version", "cuda", "said"),
    [
        ("NCCL", "2.28.9", "13.0", "NCCL 2.28.9 refuses .* pip install -U nvidia-nccl-cu13"),
        ("NCCL", "2.9.1", "12.8", "pip install -U nvidia-nccl-cu12"),
        ("RCCL", "2.27.7", None, "RCCL 2.27.7 refuses .* a ROCm with RCCL 2.30"),
        ("NCCL", "2.30.0", "13.0", None),
        ("NCCL", "2.32.3", "13.0", None),
        ("NCCL", "3.1.1", "13.0", None),
    ],
)
def test_an_nccl_that_refuses_ranks_on_one_card_names_what_to_install(
    library: str, version: str, cuda: str | None, said: str | None
) -> None:
    found = refusal(library, version, cuda)
    assert found == "" if said is None else re.search(said, found), found


def test_only_parts_that_communicate_need_ranks_to_share_the_card() -> None:
    several = {part.name for _, part in parts_of(SECTIONS) if part.ranks > 1 and not part.communicates}
    assert several <= {"compile Triton kernels"}  # of one rank on a machine of few cores
    for _, part in parts_of(SECTIONS):
        assert "left out" in part.outcomes, part.name


def test_a_self_test_that_had_too_little_time_is_not_measured_unless_a_line_has_failed() -> None:
    passes, fails = {"name": "ring", "status": "pass"}, {"name": "killed rank", "status": "fail"}
    ended = {"outcome": "timed out"}
    verdict, figure = _verdict("B7 self-test", _entry("two_ranks", "self-test", passes, **ended))
    assert (verdict, figure) == (NOT_MEASURED, "2 ranks: timed out, 1 passed, failed: none")
    assert _verdict("B7 self-test", _entry("two_ranks", "self-test", passes, fails, **ended))[0] == CONTRADICTS
    both = [_entry("two_ranks", "self-test", passes), _entry("more_ranks", "self-test", passes, **ended)]
    assert _verdict("B7 self-test", *both)[0] == CONFIRMS
    no_group = {"name": "making the process group", "status": "fail"}
    assert _verdict("B7 self-test", _entry("two_ranks", "self-test", passes, no_group, outcome="failed"))[0] == (
        NOT_MEASURED
    )


def test_a_rehearsal_confirms_nothing() -> None:
    entries = [entry for _, of_case, _ in CASES for entry in of_case]
    verdicts = {each["verdict"] for each in judged(Measured(_result(*entries, rehearsal=True)), FINDINGS)}
    assert verdicts <= {REHEARSED, NOT_MEASURED}


def test_the_page_has_every_finding_and_every_part() -> None:
    result = _result(_rate(1.6))
    result["findings"] = judged(Measured(result), FINDINGS)
    page = as_page(result)
    assert all(f"| {finding.name} |" in page for finding in FINDINGS)
    assert "| cudnn | rates | 1 | done |" in page
    assert "cuDNN has 1.60 to 1.60 of the chosen kernel's rate" in page
