"""The search over jobs: each kind alone gives the same job, nothing that the user set is changed, none is slower."""

from __future__ import annotations

import itertools
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from ds_hetero.cli.app import app
from ds_hetero.cli.planning.best_job import plan_file
from ds_hetero.cluster import Cluster, load_cluster
from ds_hetero.cluster.notation import read_notation
from ds_hetero.cost import Workload, make_cost_model
from ds_hetero.errors import MemoryPlanError, PlanError
from ds_hetero.models import load_model
from ds_hetero.planner.jobs.batch import PlannedBatch
from ds_hetero.planner.jobs.job import FoundJobs, Job, JobTask
from ds_hetero.planner.jobs.kinds import BATCH, KINDS, ONE, PIPELINES, SEQUENCE, Freedom
from ds_hetero.planner.jobs.rank_sets import job_rank_sets, single_ranks
from ds_hetero.planner.jobs.search import best_first, search_jobs
from ds_hetero.planner.jobs.sequence import MIN_GAIN
from ds_hetero.planner.jobs.settings import (
    keeping_attention,
    may_keep_attention,
    micro_batch_sizes,
    offloadings,
    recomputations,
    tilings,
    zero_settings,
)
from ds_hetero.planner.planning import plan
from ds_hetero.reporting.described_plan import DescribedPlan, read_described_plan
from ds_hetero.reporting.job_folder import ds_config, folder_contents, no_batch_size, trainer_arguments, visible_devices
from ds_hetero.reporting.scenario import PlanScenario
from ds_hetero.values.plans import read_plan
from ds_hetero.values.section import read_section

FREE = Freedom()


def rig(gpus: str, network: str | None = None) -> Cluster:
    return load_cluster(read_notation(gpus, network).content)


def task(gpus: str, network: str | None = None, *, batch: int = 1, freedom: Freedom = FREE, **settings: Any) -> JobTask:
    work = Workload(seq_len=settings.pop("seq_len", 4096), micro_batches=batch, **settings)
    return JobTask(
        cluster=rig(gpus, network), model=load_model("qwen3-0.6b"), workload=work, batch=batch, freedom=freedom
    )


CASES = {
    "one node": task("5090,3090", batch=4),
    "slow network": task("5090,3090 | 3060", "10GbE", batch=4),
    "one sequence": task("5090 | 3090", "10GbE", seq_len=16384),
}


@pytest.fixture(scope="module", params=CASES, ids=CASES.keys())
def found(request: pytest.FixtureRequest) -> tuple[JobTask, FoundJobs]:
    searched = CASES[request.param]
    return searched, search_jobs(searched)


def test_every_kind_alone_gives_the_job_that_stands_among_all(found: tuple[JobTask, FoundJobs]) -> None:
    searched, jobs = found
    assert [job.step_s for job in jobs.jobs] == sorted(job.step_s for job in jobs.jobs)
    assert {job.kind for job in jobs.jobs} | {refused.kind for refused in jobs.refused} == set(KINDS)
    for job in jobs.jobs:
        alone = search_jobs(replace(searched, freedom=Freedom(kinds=(job.kind,)))).best
        assert (alone.step_s, alone.workload, alone.left_out) == (job.step_s, job.workload, job.left_out)
        assert alone.planned.plan == job.planned.plan
    for refused in jobs.refused:
        with pytest.raises(PlanError):
            search_jobs(replace(searched, freedom=Freedom(kinds=(refused.kind,))))


def test_no_answer_is_slower_than_the_usual_plan(found: tuple[JobTask, FoundJobs]) -> None:
    searched, jobs = found
    usual = plan(searched.cluster, searched.model, searched.workload)
    assert jobs.best.step_s <= usual.step_s * (1 + MIN_GAIN)


RIGS_WITH_A_BURDEN = {
    # Sequence parallelism: all six ranks take twice as long as the four of one node.
    "slow network": replace(
        task("4x4090 | 2x3090", "10GbE", seq_len=32768, adapter_rank=16), model=load_model("llama-3.1-8b")
    ),
    # A batch for each GPU: the third device has so little memory that many settings of all three do not fit.
    "small device": task("5090,3090,3060", batch=4, seq_len=8192),
}


@pytest.mark.parametrize("rig_name", RIGS_WITH_A_BURDEN)
def test_no_smaller_set_of_ranks_alone_is_faster(rig_name: str) -> None:
    searched = RIGS_WITH_A_BURDEN[rig_name]
    for kind in (SEQUENCE, BATCH):
        of_kind = replace(searched, freedom=Freedom(kinds=(kind,)))
        if kind == BATCH and searched.batch == 1:
            continue
        best = search_jobs(of_kind).best
        for ranks in job_rank_sets(searched.cluster):
            others = set(range(searched.cluster.num_ranks)).difference(ranks)
            if others:
                alone = search_jobs(replace(of_kind, cluster=searched.cluster.without(others))).best
                assert best.step_s <= alone.step_s * (1 + MIN_GAIN), (kind, ranks, best.left_out)


def test_the_batch_and_what_is_trained_are_never_chosen(found: tuple[JobTask, FoundJobs]) -> None:
    searched, jobs = found
    for job in jobs.jobs:
        assert job.planned.tokens == searched.batch * searched.workload.seq_len
        for field in ("adapter_rank", "quantization", "optimizer_bytes", "gradient_bytes", "causal", "seq_len"):
            assert getattr(job.workload, field) == getattr(searched.workload, field)


def test_a_replica_takes_the_time_that_its_cost_model_predicts(found: tuple[JobTask, FoundJobs]) -> None:
    _, jobs = found
    for job in jobs.jobs:
        if job.kind in (SEQUENCE, ONE):
            (schedule,) = job.planned.plan.schedules
            prediction = make_cost_model("calibrated", job.cluster, load_model("qwen3-0.6b"), job.workload).predict(
                schedule
            )
            assert prediction.feasible and prediction.iteration_s == pytest.approx(job.step_s)


def _batch_job(searched: JobTask) -> Job:
    return search_jobs(replace(searched, freedom=replace(searched.freedom, kinds=(BATCH,)))).best


def test_samples_of_replicas_are_the_fastest() -> None:
    searched = task("5090,3090,3060", batch=12)
    job = _batch_job(searched)
    assert isinstance(job.planned, PlannedBatch)
    work = job.workload
    num, samples = len(job.planned.split.micro_batch_sizes), searched.batch // work.micro_batches
    costs: dict[tuple[int, int], float] = {}
    for replica, size in itertools.product(range(num), range(1, samples + 1)):
        alone = job.cluster.without(set(range(num)) - {replica})
        cost = make_cost_model("calibrated", alone, searched.model, replace(work, micro_batch=size))
        prediction = cost.predict(job.planned.schedules[replica].shifted(0))
        costs[replica, size] = prediction.iteration_s if prediction.feasible else float("inf")
    sizes = (each for each in itertools.product(range(1, samples + 1), repeat=num) if sum(each) == samples)
    least_s = min(max(costs[replica, size] for replica, size in enumerate(each)) for each in sizes)
    assert job.step_s == pytest.approx(least_s, rel=0.02)  # sizes are found by lines through two predictions


def test_a_plan_file_of_a_batch_is_predicted_as_the_search_does() -> None:
    searched = task("5090,3090 | 3060", "10GbE", batch=8)
    job = _batch_job(searched)
    assert isinstance(job.planned, PlannedBatch)
    scenario = PlanScenario(
        cost_model="calibrated",
        model=searched.model,
        workload=replace(job.workload, zero_cluster=None),
        clusters=(job.cluster,),
    )
    described = DescribedPlan(plan=job.planned.plan, scenario=scenario)
    times = [described.cost_of(i).predict(described.schedule_of(i)).iteration_s for i in range(described.num_replicas)]
    assert max(times) == pytest.approx(job.step_s)


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"zero_stage": 2}, {"zero_stage"}),
        ({"activation_checkpointing": True}, {"activation_checkpointing"}),
        ({"micro_batch": 2}, {"micro_batch"}),
        ({"tiled_logits": False}, {"tiled_logits"}),
        ({"zero_stage": 1, "offload_optimizer": True}, {"zero_stage", "offload_optimizer"}),
    ],
)
def test_what_an_option_names_is_kept(settings: dict[str, Any], fields: set[str]) -> None:
    freedom = Freedom(kinds=(SEQUENCE, BATCH, ONE), fixed=frozenset(fields))
    searched = task("5090,3090", batch=4, freedom=freedom, **settings)
    jobs = search_jobs(searched)
    for job in jobs.jobs:
        for field in fields - {"micro_batch"}:
            assert getattr(job.workload, field) == settings[field]
        if job.kind != BATCH and "micro_batch" in fields:
            assert (job.workload.micro_batch, job.workload.micro_batches) == (2, 2)


def test_attention_is_kept_over_recomputation_where_memory_allows_it() -> None:
    """Activations of 32K tokens do not fit, but their attention does: it takes most of the time of these layers."""
    searched = replace(task("3090x4", seq_len=32768, adapter_rank=16), model=load_model("llama-3.1-8b"))
    of_kind = replace(searched, freedom=Freedom(kinds=(SEQUENCE,)))
    without = replace(searched, freedom=Freedom(kinds=(SEQUENCE,), fixed=frozenset({"keep_attention"})))
    kept, computed_again = search_jobs(of_kind).best, search_jobs(without).best
    assert kept.workload.keeps_attention and kept.step_s < computed_again.step_s
    assert ds_config(kept, plan_file(kept))["heterogeneity"]["keep_attention"] is True
    for kind in (ONE, PIPELINES):
        try:
            alone = search_jobs(replace(searched, freedom=Freedom(kinds=(kind,)))).best
        except PlanError:
            continue
        assert not alone.workload.keep_attention


def test_no_search_rounds_gradients_of_a_ring_unless_it_is_asked_for() -> None:
    """A network on which a ring waits for its messages, so that rounded gradients would be faster."""
    of_kind = {"freedom": Freedom(kinds=(SEQUENCE,), fixed=frozenset({"zero_stage"})), "zero_stage": 1}
    exact, rounded = (
        search_jobs(task("2xH100 | 2xA100-80GB | 2xL40S", "25", seq_len=32768, ring_gradients=each, **of_kind)).best
        for each in ("fp32", "bf16")
    )
    assert exact.workload.ring_gradients == "fp32" and rounded.workload.ring_gradients == "bf16"
    assert rounded.step_s < exact.step_s
    sections = [ds_config(job, plan_file(job))["heterogeneity"] for job in (exact, rounded)]
    assert "ring_gradients" not in sections[0] and sections[1]["ring_gradients"] == "bf16"


def test_of_equally_fast_jobs_the_simplest_kind_comes_first() -> None:
    times = {PIPELINES: 1.0, SEQUENCE: 1.0005, BATCH: 1.0009, ONE: 1.002}
    jobs: list[Any] = [SimpleNamespace(kind=kind, step_s=step_s) for kind, step_s in times.items()]
    assert [job.kind for job in best_first(jobs)] == [SEQUENCE, BATCH, PIPELINES, ONE]


def test_adapters_on_cards_behind_a_slow_network_train_in_pipelines() -> None:
    """QLoRA of a 32B: stages send activations over the network, sequence parallelism all weights and more."""
    cluster, work = rig("3090x2,4070ti | 5090", "10GbE"), Workload(seq_len=8192, micro_batches=8)
    work = replace(work, adapter_rank=16, quantization="nf4")
    model = load_model("qwen2.5-32b")
    found = search_jobs(JobTask(cluster=cluster, model=model, workload=work, batch=8, freedom=FREE))
    assert found.best.kind == PIPELINES
    assert plan(cluster, model, work).step_s / found.best.step_s >= 2.5


def test_kinds_that_cannot_run_say_why() -> None:
    def reason(kind: str, searched: JobTask) -> str:
        jobs = search_jobs(searched)
        return next(refused.reason for refused in jobs.refused if refused.kind == kind)

    assert "cannot be shared as a batch" in reason(BATCH, task("5090,3090"))
    fixed = Freedom(fixed=frozenset({"zero_stage"}))
    assert "ZeRO 0 to 2" in reason(PIPELINES, task("5090,3090", freedom=fixed, zero_stage=3))
    assert "there is one GPU" in reason(SEQUENCE, task("5090"))


def test_a_model_that_fits_nowhere_is_refused_with_what_would_help() -> None:
    searched = replace(task("3060 | 3060", "10GbE"), model=load_model("llama-3.1-405b"))
    with pytest.raises(MemoryPlanError, match="What would fit or help"):
        search_jobs(searched)


def test_sets_of_ranks_leave_out_nodes_and_slow_or_small_devices() -> None:
    cluster = rig("5090,3090x2 | 4090,3060", "10GbE")
    sets = job_rank_sets(cluster)
    assert sets[0] == (0, 1, 2, 3, 4)
    assert {(0, 1, 2), (3, 4), (0, 3), (0, 1, 2, 3)} <= set(sets)
    assert all(len(ranks) > 1 for ranks in sets) and len(set(sets)) == len(sets)
    assert single_ranks(cluster) == [(0,), (1,), (3,), (4,)]
    assert len(job_rank_sets(rig(" | ".join(["8xH100"] * 16), "25"))) == 3  # all, all but one, and one of equal nodes


def test_settings_begin_with_the_simplest() -> None:
    cluster, work = rig("5090 | 3090", "10GbE"), Workload(seq_len=4096)
    stages = [(each.zero_stage, each.zero_within) for each in zero_settings(work, cluster, FREE)]
    assert stages == [(0, False), (1, False), (2, False), (3, False), (3, True)]
    assert [each.activation_checkpointing for each in recomputations(work, FREE)] == [False, True]
    (kept,) = keeping_attention(recomputations(work, FREE))
    assert kept.keeps_attention and may_keep_attention(work, FREE)
    assert not may_keep_attention(work, Freedom(fixed=frozenset({"keep_attention"})))
    tiled = replace(work, tiled_logits=False)
    assert [(each.tiled_logits, each.tiled_mlp) for each in tilings(tiled, FREE)] == [
        (False, False),
        (True, False),
        (True, True),
    ]
    assert len(offloadings(work, cluster, FREE)) == 3
    assert offloadings(work, rig("gb10"), FREE) == []
    assert micro_batch_sizes(work, 6, FREE) == [1, 2]


def _printed(*words: str) -> list[str]:
    result = CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


JOB = ("--model", "qwen3-0.6b", "--seq-len", "4K", "--micro-batches", "4")


@pytest.mark.parametrize(
    "cards",
    [
        ("--gpus", "5090,3090 | 3060", "--network", "10GbE", "--price", "5090=0.5,3090=0.2,3060=0.1"),
        ("--gpus", "5090,4090,3090,A6000,4070ti,3060,4080,A5000"),
    ],
)
def test_the_answer_has_25_lines_of_80_columns(cards: tuple[str, ...]) -> None:
    lines = _printed(*cards, *JOB)
    assert len(lines) <= 25 and max(map(len, lines)) <= 80
    assert lines[0].startswith("best job:   ") and lines[-1].startswith("more:")
    for kind in KINDS.values():
        assert any(kind in line for line in lines) or kind == KINDS[_best_kind(lines[0])]


def _best_kind(line: str) -> str:
    words = {
        "sequence parallelism": SEQUENCE,
        "a batch for": BATCH,
        "pipeline": PIPELINES,
        "replicas over": PIPELINES,  # of one stage each
        "one GPU": ONE,
    }
    return next(kind for text, kind in words.items() if text in line)


def test_explain_prints_every_job_with_its_settings() -> None:
    text = "\n".join(_printed("--gpus", "5090,3090", *JOB, "--explain"))
    assert "The best of each kind" in text and text.count("micro-batches ") >= 3


def test_json_has_the_best_job_and_all_others_with_their_plans() -> None:
    data = json.loads("\n".join(_printed("--gpus", "5090,3090", *JOB, "--json")))
    assert data["job"]["kind"] in KINDS and data["job"]["step_s"] > 0
    for other in data["alternatives"]:
        if other["step_s"] is not None:
            assert other["factor"] >= 1 and other["plan"] and other["reason"]
    assert data["scenario"]["workload"]["zero_stage"] == data["job"]["settings"]["zero_stage"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--parallel", "odd"], "'odd' is unknown; it is one of best, sequence, batch, pipelines, one, full"),
        (["--parallel", "batch", "--layout", "zigzag"], "leave --parallel batch out"),
        (["--global-batch", "4"], "Give one"),
        (["--parallel", "batch", "--micro-batches", "1"], "no such job can run"),
    ],
)
def test_combinations_that_no_search_takes_are_refused(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from ds_hetero.cli import main

    try:
        code = main(["plan", "--gpus", "5090,3090", *JOB, *options])
    except SystemExit as end:
        code = end.code
    assert code == 2 and says in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("kind", [SEQUENCE, BATCH, PIPELINES, ONE])
def test_out_writes_a_folder_that_starts(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    cards = ("--gpus", "5090,3060,3090 | 3090", "--network", "10GbE")
    tiles = () if kind == BATCH else ("--tiled-loss",)  # the key "batch" rules tiles out
    _printed(*cards, *JOB, "--parallel", kind, "--checkpointing", *tiles, "--out", str(folder))
    names = {path.name for path in folder.iterdir()}
    assert {"ds_config.json", "plan.json", "README.md", "torchrun.sh", "deepspeed.sh", "accelerate.sh"} <= names
    config = json.loads((folder / "ds_config.json").read_text())
    section = read_section(config["heterogeneity"])
    assert section is not None and bool(section.tile_tokens) == bool(tiles)
    plan_in_file = read_described_plan(folder / "plan.json")
    assert isinstance(plan_in_file, DescribedPlan)
    if kind in (SEQUENCE, PIPELINES):
        assert read_plan(config["heterogeneity"]["schedule"]) == plan_in_file.plan
    if kind == BATCH:
        assert config["sequence_parallel_size"] == 1 and sum(section.batch) * config["gradient_accumulation_steps"] == 4
    for script in folder.glob("*.sh"):
        subprocess.run(["bash", "-n", script], check=True)
    readme = (folder / "README.md").read_text()
    assert "ds_hetero.register()" in readme and "gradient_checkpointing_enable" in readme and "A step takes" in readme


def test_a_folder_names_the_devices_of_a_host_that_take_part(tmp_path: Path) -> None:
    searched = task("5090,3060,3090")
    job = search_jobs(replace(searched, freedom=Freedom(kinds=(ONE,)))).best
    assert visible_devices(job) == {0: [0]}
    files = folder_contents(job, plan_file(job), {}, [])
    assert "0) export CUDA_VISIBLE_DEVICES=0;;" in files["env.sh"] and files["plan.json"]


def test_a_folder_is_written_by_the_search_over_jobs_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ds_hetero.cli import main

    assert main(["plan", "--gpus", "5090,3090", *JOB, "--layout", "zigzag", "--out", str(tmp_path / "job")]) == 2
    assert "--out FOLDER is for the search over jobs" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [SEQUENCE, PIPELINES, BATCH])
def test_a_folder_names_the_batch_size_of_the_trainer(kind: str) -> None:
    job = search_jobs(task("5090,3090", batch=4, freedom=Freedom(kinds=(kind,)))).best
    arguments = trainer_arguments(job)
    assert arguments is not None
    samples = arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"]
    is_batch_of_rank = "batch" in ds_config(job, {})["heterogeneity"]
    assert samples * (job.cluster.num_ranks if is_batch_of_rank else 1) == 4


def test_samples_without_a_whole_mean_have_no_batch_size_of_the_trainer() -> None:
    assert "[4, 2, 2], have no whole mean" in no_batch_size([4, 2, 2]) and "a multiple of 3" in no_batch_size([4, 2, 2])
