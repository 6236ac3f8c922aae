"""The long run's judgements: what counts as growth, and as a sample lost or trained on twice."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.long_run import compare, soak, soak_ranks
from benchmarks.long_run.course import NODES, SEGMENTS, SPEEDS, STRIKES, section, step_of
from benchmarks.long_run.job import Job
from benchmarks.long_run.readings import read_own_process
from benchmarks.long_run.records import Records
from benchmarks.long_run.slopes import FEWEST_READINGS, slope_of
from benchmarks.long_run.start import own_node, parser_of_rank
from ds_hetero.values.section import read_section
from tests.support import ROOT

STEPS = range(100, 20_001, 100)


def test_noise_does_not_grow_and_a_leak_that_noise_hides_does():
    for seed in range(20):
        draw = random.Random(seed)
        noise = [1e8 + draw.gauss(0, 1e5) for _ in STEPS]
        assert not slope_of(STEPS, noise, num_series=60).grows
        leak = [value + 100 * step for value, step in zip(noise, STEPS, strict=True)]  # 100 bytes a step: 2 MB in all
        slope = slope_of(STEPS, leak, num_series=60)
        assert slope.grows
        assert slope.low < 1e5 < slope.high


def test_growth_of_the_warm_up_and_constants_do_not_count():
    warm_up = [min(step, 4000) for step in STEPS]
    assert slope_of(STEPS, warm_up).per_1000_steps == 0
    assert not slope_of(STEPS, [7] * len(STEPS)).grows
    fills = [min(step, 10_000) for step in STEPS]
    assert slope_of(STEPS, fills).grows
    assert not slope_of(STEPS, fills, warm_up=10_000).grows
    one_file_more = [7 + (step > 12_000) for step in STEPS]
    assert slope_of(STEPS, one_file_more).grows


def _steps(checksums, **others):
    return [
        {"event": "step", "step": step, "checksum": checksum, "tokens": 10, "lr": 0.1, "loss": 2.0, **others}
        for step, checksum in enumerate(checksums, 1)
    ]


def test_a_sample_is_counted_by_the_steps_that_remain():
    alone = _steps([1, 2, 3, 4])
    repeated = [*_steps([1, 2, 9]), *_steps([1, 2, 3, 4])[2:]]  # step 3 was thrown away, and done again
    samples = compare.compare_samples(repeated, alone, 4)
    assert samples["samples_lost"] == samples["samples_doubled"] == samples["rows_other_than_alone"] == 0
    skipped = compare.compare_samples(_steps([1, 3, 3, 4]), alone, 4)
    assert (skipped["samples_lost"], skipped["samples_doubled"], skipped["rows_other_than_alone"]) == (1, 1, 1)
    assert compare.compare_samples(_steps([1, 2]), alone, 4)["steps_missing"] == 2


def test_events_tell_the_steps_lost_and_the_seconds():
    def at(time, event, **details):
        return {"event": event, "time": time, **details}

    records = [
        at(0, "step", step=1, loss=1.0),
        at(1, "step", step=2, loss=1.0),
        at(2, "step", step=3, loss=1.0),
        *(at(time, event, world_size=2) for time, event in ((5, "spawn"), (6, "init"), (7, "built"))),
        at(8, "ready", world_size=2, step=1),
        at(9, "step", step=2, loss=1.0 + 1e-6),
        at(9.5, "strike", kind="worker", node="n1", began=2.5, step=3, ranks=2),
    ]
    (event,) = compare.describe_events(records)
    assert (event["lost_steps"], event["seconds"], event["phases"]["connect"]) == (2, 6.5, 1)
    assert compare.repeated_differences(records) == {"steps": 1, "largest": pytest.approx(1e-6)}


def test_half_a_line_of_a_killed_process_is_not_read_and_is_cut_off(tmp_path):
    records = Records(tmp_path / "records.jsonl")
    records.add("step", step=1)
    with records.path.open("a") as file:
        file.write('{"event": "st')
    assert [record["step"] for record in records.read()] == [1]
    records.drop_half_line()
    records.add("step", step=2)
    assert [record["step"] for record in records.read()] == [1, 2]


@pytest.mark.parametrize("steps", [90, 3000])
def test_the_course_is_valid_for_all_nodes_and_for_those_that_are_left(steps):
    job = Job(steps=steps, rows=steps // 2)
    moments = [step_of(job, at) for at in (*(strike.at for strike in STRIKES), *(at for at, _ in SPEEDS[1:]))]
    assert len(set(moments)) == len(moments)
    for segment in SEGMENTS:
        for nodes in (NODES, NODES[:2] + NODES[3:]):
            assert read_section(section(job, segment, nodes, 0, 4)).replan.enabled


def test_the_ranks_of_the_soak_have_a_valid_section_and_know_their_node(monkeypatch, tmp_path):
    arguments = ["--events", "events.jsonl", "--folder", str(tmp_path), "--local_rank", "0"]
    options = parser_of_rank().parse_args(arguments)
    assert options.events == Path("events.jsonl")
    assert read_section(soak_ranks.configuration_of(options.folder)["heterogeneity"]).replan.enabled
    monkeypatch.setenv("DS_HETERO_ELASTIC_AGENT", "node-7-0")
    assert own_node() == "node-7"


def test_a_soak_that_is_stopped_is_judged_by_the_readings_so_far(tmp_path):
    records, output = Records(tmp_path / "events.jsonl"), tmp_path / "result.json"
    records.add("ready", rank=0)
    for step in range(1, FEWEST_READINGS):
        records.add("reading", step=step, rank=0, node="n0", seconds=0.1, changes=0, threads=7)
    assert soak.judge(tmp_path, output, {}) is None
    records.add("reading", step=FEWEST_READINGS, rank=0, node="n0", seconds=0.1, changes=0, threads=7)
    result = soak.judge(tmp_path, output, {"command": "soak"})
    assert json.loads(output.read_text()) == result
    assert (result["steps"], result["growing"]) == (FEWEST_READINGS, [])
    assert set(result["series"]) == {"seconds a step", "rank 0 threads"}


def test_a_second_sigterm_does_not_interrupt_the_end_of_a_benchmark():
    code = """
import os, signal
from benchmarks.elastic.nodes import exit_at_sigterm
exit_at_sigterm()
try:
    os.kill(os.getpid(), signal.SIGTERM)
finally:
    os.kill(os.getpid(), signal.SIGTERM)
    print("ended")
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (1, "ended\n"), run.stderr


def test_a_reading_tells_memory_that_libraries_and_python_have_in_use():
    before = read_own_process()
    held = bytearray(10**7), [str(number) for number in range(10_000)]
    after = read_own_process()
    assert 10**7 <= after["heap_bytes"] - before["heap_bytes"] < 1.5e7
    assert 10_000 <= after["python_blocks"] - before["python_blocks"] < 12_000
    assert after["resident_bytes"] - before["resident_bytes"] > 0.9e7
    del held


def test_shares_and_the_next_schedule_are_told_of_a_change_of_speed_and_are_empty_where_the_job_has_ended():
    rows = [
        {
            "event": "step",
            "step": step,
            "tokens": 4,
            "tokens_by_node": {"n0": 3, "n1": 1} if step < 20 else {"n0": 2, "n1": 2},
            "changes": 1 + (step >= 32) if step < 36 else 0,  # the job was resumed at step 36
        }
        for step in range(40)
    ]
    early, late, last = compare.adaptations(rows, [20, 33, 100], window=2)
    shares = {"before": {"n0": 0.75, "n1": 0.25}, "after": {"n0": 0.5, "n1": 0.5}}
    assert early == {"step": 20, **shares, "replanned_after": 12}
    assert late["replanned_after"] is None
    assert last == {"step": 100, "before": {}, "after": {}, "replanned_after": None}
