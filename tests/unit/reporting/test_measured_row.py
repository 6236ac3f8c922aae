"""A run becomes a row that the judge of public measurements reads, and nothing that a row cannot say becomes one."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

from benchmarks.real_cards.compare import compare
from benchmarks.real_cards.points import COLUMNS as COLUMNS_OF_THE_TABLE
from benchmarks.real_cards.points import read_rows
from ds_hetero.cluster.catalogue import FRAGMENTATION
from ds_hetero.reporting.described_plan import DescribedPlan
from ds_hetero.reporting.measured_row import COLUMNS
from ds_hetero.reporting.run_file import write_run
from ds_hetero.selftest.lines import Line
from ds_hetero.selftest.report import Report
from ds_hetero.values.baselines import ulysses
from ds_hetero.values.plans import Plan
from tests.reported import command, described, plan_file, run_of

FOUR_ALIKE = {"nodes": [{"name": "node", "device": "A100-SXM-80GB", "count": 4}], "network": {"bandwidth_gb_per_s": 25}}


def uniform_run(capsys, folder, *options):
    """A run of Ulysses on four A100 that took 10 % longer than predicted, with 7 GiB at its peak."""
    plan = described(plan_file(capsys, folder, *options, cluster=FOUR_ALIKE))
    heads = plan.scenario.model.num_heads, plan.scenario.model.num_kv_heads
    plan = replace(plan, plan=Plan.of_replicas((ulysses(4, *heads),)))
    return run_of(plan, folder / "run.json")


@pytest.mark.parametrize("options", [(), ("--micro-batches", 4, "--zero-stage", 1, "--no-checkpointing")])
def test_the_judge_reads_the_row_and_finds_the_error_of_the_run(capsys, tmp_path, options):
    run = uniform_run(capsys, tmp_path, *options)
    code, printed, err = command(capsys, "measured", tmp_path / "run.json", "--attention", "flash_attn_2", "--header")
    assert code == 0, err
    (row,) = read_rows(io.StringIO(printed))
    done, refused = compare([row])
    assert not refused
    errors = {each.kind: each for each in done}
    assert errors["time"].error == pytest.approx(1 / 1.1 - 1, abs=1e-3)  # rates of a row have two decimals
    assert errors["memory"].measured == pytest.approx(7 * 2**30, rel=1e-3) or errors["memory"].measured == 7
    assert row["gpu"] == "A100-SXM-80GB" and row["sp"] == "4" and f"{run.steps} steps" in row["notes"]


def test_columns_are_those_of_the_table_and_json_has_them_by_name(capsys, tmp_path):
    assert COLUMNS == COLUMNS_OF_THE_TABLE
    uniform_run(capsys, tmp_path)
    code, printed, err = command(capsys, "measured", tmp_path / "run.json", "--json")
    assert code == 0, err
    assert tuple(json.loads(printed)) == COLUMNS


def test_what_a_row_cannot_say_is_refused_by_name(capsys, tmp_path):
    plan = described(plan_file(capsys, tmp_path))
    run_of(plan, tmp_path / "run.json")
    code, _, err = command(capsys, "measured", tmp_path / "run.json")
    assert code == 2 and "one kind of card, and the run had RTX-3090, RTX-4090" in " ".join(err.split())
    run = uniform_run(capsys, tmp_path)
    write_run(replace(run, scenario=None), tmp_path / "run.json")
    code, _, err = command(capsys, "measured", tmp_path / "run.json")
    assert code == 2 and "does not have the cards" in err


@pytest.mark.parametrize(
    ("planned", "options", "name"),
    [
        ("adamw", (), "AdamW"),
        ("adamw-8bit", (), "AdamW8bit"),
        ("lion", ("--optimizer", "lion"), "Lion"),
        ("sgd", ("--optimizer", "sgd"), "SGD"),
        ("adafactor", ("--optimizer", "adafactor"), "Adafactor"),
    ],
)
def test_the_optimizer_is_named_and_the_judge_counts_its_bytes(capsys, tmp_path, planned, options, name):
    run = uniform_run(capsys, tmp_path, "--optimizer", planned)
    code, printed, err = command(capsys, "measured", tmp_path / "run.json", "--header", *options)
    assert code == 0, err
    (row,) = read_rows(io.StringIO(printed))
    assert row["optimizer"] == name
    done, _ = compare([row])
    counted = next(each.predicted for each in done if each.kind == "memory")
    own = plan_memory_gib(run)
    assert counted == pytest.approx(own, rel=1e-6)


def plan_memory_gib(run):
    """Peak of a rank as the run's own scenario has it, with what lies between tensors, in the unit of a row."""
    described_run = DescribedPlan(plan=run.plan, scenario=run.scenario)
    peak = max(described_run.cost_of(0).predict(described_run.schedule_of(0)).memory_bytes)
    return (1 + FRAGMENTATION) * peak / 2**30


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"optimizer_bytes": 8}, "as lion, muon, sgd have"),
        ({"optimizer_bytes": 4}, "as adamw-bf16, adafactor have"),
        ({"optimizer_bytes": 12 * 0.01}, "0.12 bytes of optimizer state per parameter, so it trained only some"),
    ],
)
def test_an_optimizer_that_bytes_do_not_tell_is_asked_for(capsys, tmp_path, changes, reason):
    run = uniform_run(capsys, tmp_path)
    scenario = replace(run.scenario, workload=replace(run.scenario.workload, **changes))
    write_run(replace(run, scenario=scenario), tmp_path / "run.json")
    code, _, err = command(capsys, "measured", tmp_path / "run.json")
    assert code == 2 and reason in " ".join(err.split())


def selftest_report(*rates, device="NVIDIA A100-SXM4-80GB"):
    rank = {"device": device, "memory_gib": 79.3, "native_types": ["float32", "float16", "bfloat16"], "torch": "2.13.0"}
    lines = [Line("products", "info", "as measured", rate, (number,)) for number, rate in enumerate(rates)]
    return Report(ranks=[rank] * len(rates), nodes=(tuple(range(len(rates))),), lines=lines).to_dict()


def test_a_self_test_makes_a_row_of_products_that_the_judge_reads(capsys, tmp_path):
    (tmp_path / "selftest.json").write_text(json.dumps(selftest_report(250e12, 262.5e12, 240e12)))
    code, printed, err = command(capsys, "measured", tmp_path / "selftest.json", "--header")
    assert code == 0, err
    (row,) = read_rows(io.StringIO(printed))
    assert (row["kind"], row["gpu"], row["value"], row["unit"]) == ("matmul", "A100-SXM-80GB", "250.0", "TFLOPS")
    (done,), refused = compare([row])
    assert not refused and abs(done.error) < 0.15


@pytest.mark.parametrize(
    ("report", "options", "reason"),
    [
        (selftest_report(), (), "measured no matmuls"),
        (
            selftest_report(1e12, device="CPU (x86_64)"),
            (),
            "describes a card of the catalogue, and the self-test ran on",
        ),
        (selftest_report(1e12) | {"ranks": [{}]}, (), "is damaged"),
        (selftest_report(1e12), ("--attention", "torch"), "a self-test has neither"),
    ],
)
def test_a_self_test_that_is_no_row_is_refused_by_name(capsys, tmp_path, report, options, reason):
    (tmp_path / "selftest.json").write_text(json.dumps(report))
    code, _, err = command(capsys, "measured", tmp_path / "selftest.json", *options)
    assert code == 2 and reason in " ".join(err.split())
