"""A run becomes a row that the judge of public measurements reads, and nothing that a row cannot say becomes one."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

from benchmarks.real_cards.compare import compare
from benchmarks.real_cards.points import COLUMNS as COLUMNS_OF_THE_TABLE
from benchmarks.real_cards.points import read_rows
from ds_hetero.reporting.measured_row import COLUMNS
from ds_hetero.reporting.run_file import write_run
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
    assert code == 2 and "one kind of card, the run had RTX-3090, RTX-4090" in " ".join(err.split())
    run = uniform_run(capsys, tmp_path)
    write_run(replace(run, scenario=None), tmp_path / "run.json")
    code, _, err = command(capsys, "measured", tmp_path / "run.json")
    assert code == 2 and "does not say its cards" in err
