"""Published planners by name: in the section, on the command line, in comparisons; refusals; a new one registered."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from ds_hetero.cli.app import app
from ds_hetero.cluster import cluster_from_dict, load_cluster
from ds_hetero.cost import Workload, make_cost_model
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.decision.resolve import expect_planners, needs_measuring, resolve
from ds_hetero.errors import ConfigError, PlanError
from ds_hetero.models import load_model
from ds_hetero.planner import plan, strategy
from ds_hetero.planner.documents import DocumentPlacer, UnitCosts, expect_places
from ds_hetero.planner.pipelines.planning import plan_pipelines
from ds_hetero.planner.published import registry
from ds_hetero.planner.published.hexiscale import planner as hexiscale
from ds_hetero.planner.published.interface import PublishedPlanner
from ds_hetero.planner.published.tangram import TangramVariant, plan_tangram
from ds_hetero.planner.published.tangram.uniform_parallelizer import UniformParallelizer
from ds_hetero.planner.results.candidates import Baselines
from ds_hetero.planner.results.pipelines import PlannedPipelines
from ds_hetero.values.baselines import ring
from ds_hetero.values.placement import Rows
from ds_hetero.values.section import read_section

SMALL = cluster_from_dict(
    {
        "nodes": [
            {"name": "a", "device": "A100-SXM-80GB", "count": 2},
            {"name": "b", "device": "RTX-4090", "count": 2},
        ],
        "network": {"bandwidth_gb_per_s": 10, "latency_us": 10},
    }
)
MODEL = load_model("llama-3.2-1b")
WORK = Workload(seq_len=16384)


def _costs():
    return CalibratedStageCosts(SMALL, MODEL, Workload(seq_len=4096))


@pytest.mark.parametrize("name", [planner.name for planner in registry.planners_of("schedule")])
def test_a_planner_of_schedules_takes_the_place_of_the_search(name):
    planned = plan(SMALL, MODEL, WORK, planner=name)
    cost = make_cost_model("calibrated", SMALL, MODEL, WORK)
    assert planned.planner == name
    assert planned.schedule == strategy(name, cost)
    assert planned.step_s >= plan(SMALL, MODEL, WORK).step_s * (1 - 1e-9)


def test_hexiseq_is_never_slower_than_the_baselines_among_its_candidates():
    cost = make_cost_model("calibrated", SMALL, MODEL, WORK)
    feasible = [each.prediction for each in Baselines.under(cost).candidates if each.prediction.feasible]
    chosen = cost.predict(strategy("hexiseq", cost))
    assert chosen.iteration_s <= min(each.iteration_s for each in feasible) * (1 + 1e-6)


@pytest.mark.parametrize("name", [planner.name for planner in registry.planners_of("pipelines")])
def test_a_planner_of_pipelines_takes_the_place_of_the_search(name):
    costs = _costs()
    planned = plan_pipelines(SMALL, MODEL, Workload(seq_len=4096), 8, costs=costs, planner=name)
    ours = plan_pipelines(SMALL, MODEL, Workload(seq_len=4096), 8, costs=costs, effort_s=0.5)
    assert isinstance(planned, PlannedPipelines)
    assert (planned.planner, ours.planner) == (name, None)
    assert planned.num_evaluated == 0
    assert planned.step_s >= ours.step_s * (1 - 1e-9)


def test_our_search_says_where_it_begins_at_other_plans_and_can_do_without():
    costs = _costs()
    with_starts = plan_pipelines(SMALL, MODEL, Workload(seq_len=4096), 8, costs=costs, effort_s=0.2)
    without = plan_pipelines(SMALL, MODEL, Workload(seq_len=4096), 8, costs=costs, effort_s=0.2, from_published=False)
    assert any("published planners" in reason for reason in with_starts.reasons)
    assert not any("published planners" in reason for reason in without.reasons)


def test_pipelines_have_a_number_of_groups_each(monkeypatch):
    seen = []
    original = hexiscale._choices

    def choices(*arguments):
        for shapes in original(*arguments):
            seen.append(tuple(len(shape.blocks) for shape in shapes))
            yield shapes

    monkeypatch.setattr(hexiscale, "_choices", choices)
    cluster = load_cluster("hexiscale-case-study")
    costs = CalibratedStageCosts(cluster, load_model("llama-2-7b"), Workload(seq_len=4096))
    hexiscale.plan_hexiscale(costs, costs.time_objective(), 8, (1,))
    assert any(len(set(stages)) > 1 for stages in seen)


def test_the_section_names_planners():
    section = read_section({"planner": "hexiseq"})
    assert needs_measuring(section)
    asked = []

    def search(name, cluster):
        asked.append(name)
        return ring(4, 32, 8)

    sizes = {"sequence_parallel_size": 4}
    resolve(section, heads=(32, 8), world_size=4, sp_sizes=sizes, cluster=SMALL, search=search)
    assert asked == ["hexiseq"]
    assert read_section({"placement": {"planner": "zeppelin"}}).placement.mode == "documents"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"planner": "hexisek"},
            "planner 'hexisek' is unknown; published planners are hexiseq (schedule), hexiscale (pipelines)",
        ),
        ({"planner": "tangram"}, 'planner tangram makes pipelines: --parallel full, or "parallel": "full"'),
        ({"planner": "hexiseq", "parallel": "full"}, "Here a planner of pipelines is needed: hexiscale, tangram"),
        ({"placement": {"planner": "hexiseq"}}, '"heterogeneity.placement.planner": planner hexiseq makes schedules'),
        ({"planner": "hexiseq", "schedule": "ring"}, "leaves nothing to plan"),
        ({"placement": {"planner": "zeppelin", "mode": "stream"}}, 'mode "stream" cuts every batch by its length'),
    ],
)
def test_planners_that_cannot_be_meant_are_refused_with_the_list(content, message):
    with pytest.raises(ConfigError) as error:
        expect_planners(read_section(content))
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["hexiseq", "lut", "formula", "hexiscale", "tangram"])
def test_a_planner_says_which_rule_of_its_paper_forbids_a_model(name):
    planner = next(each for each in registry.PLANNERS if each.name == name)
    with pytest.raises(PlanError, match=r"cannot plan this: .*(section|Eq\.)"):
        registry.expect_describable(planner, SMALL, load_model("bamba-9b"))
    registry.expect_describable(planner, SMALL, MODEL)


def test_zeppelin_places_documents_of_a_job_and_refuses_unequal_nodes_at_the_start():
    costs = UnitCosts(
        token_s=(1.0,) * 4,
        square_s=(1e-3,) * 4,
        most_tokens=(4000,) * 4,
        node=(0, 0, 1, 1),
        receive_s=(0.1,) * 2,
        cross_s=(0.1,) * 2,
    )
    documents = ((0, 3000), (3000, 3400), (3400, 4000))
    placement = DocumentPlacer(costs, planner="zeppelin")(ring(4, 4, 4), 4096, (Rows(0, 1, documents),))
    covered = sorted(at for rank in range(4) for start, stop in placement.intervals(rank) for at in range(start, stop))
    assert covered == list(range(4096))
    expect_places("zeppelin", costs)
    with pytest.raises(PlanError, match="Algorithm 1 has equally many devices P on every node"):
        expect_places("zeppelin", replace(costs, node=(0, 0, 0, 1)))


class Foreign(UniformParallelizer):
    """A parallelizer of somebody else, which changes one field of every answer."""

    def __init__(self, costs, change):
        super().__init__(costs, 8, (1,))
        self._change = change

    def plan(self, part, island):
        return [replace(plan, **self._change(plan)) for plan in super().plan(part, island)]


def test_a_foreign_parallelizer_plans_the_islands():
    """The same answers make the same plan; other times, by which it is composed, another one."""
    costs = _costs()
    same = Foreign(costs, lambda plan: {})
    slower = Foreign(
        costs, lambda plan: {name: sum(plan.layers) * getattr(plan, name) for name in ("period_s", "latency_s")}
    )
    ours, theirs, others = (
        plan_tangram(costs, costs.time_objective(), 8, (1,), variant=TangramVariant(parallelizer=each))
        for each in (None, same, slower)
    )
    assert theirs.calls == ours.calls > 0 and theirs.candidate.step_s == ours.candidate.step_s
    assert others.candidate.step_s != ours.candidate.step_s


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda plan: {"layers": (*plan.layers, 1)}, "sum to"),
        (lambda plan: {"data_parallel": 0}, "whole numbers >= 1"),
        (lambda plan: {"data_parallel": 8 * plan.data_parallel}, "blocks of devices of one node, there are"),
        (lambda plan: {"micro_batch_size": 3}, "does not divide the global batch of 8"),
        (lambda plan: {"period_s": float("nan")}, "period_s <= latency_s"),
        (lambda plan: {"memory_bytes": 1e15}, "the island's smallest device has"),
        (lambda plan: {"output_shape": (1, 2, 3)}, "the next island expects"),
        (lambda plan: {"expert_parallel": 2}, "for which this cost model counts 1: with divides_experts, devices"),
        (
            lambda plan: {"tensor_parallel": 2, "sequence_parallel": 2},
            "share its work in one way, one of tensor, sequence",
        ),
        (lambda plan: {"zero_stage": 3}, "zero_stage=3, the calibrated cost model counts stage 2 in pipelines"),
        (lambda plan: {"recomputation": not plan.recomputation}, "the other choice is planned separately"),
    ],
)
def test_an_invalid_partial_plan_is_refused_by_name(change, rule):
    costs = _costs()
    with pytest.raises(PlanError, match=r"parallelizer Foreign answered a slice of \d+ layers") as error:
        variant = TangramVariant(parallelizer=Foreign(costs, change))
        plan_tangram(costs, costs.time_objective(), 8, (1,), variant=variant)
    assert rule in str(error.value)


def test_a_planner_is_one_object_and_a_registration(monkeypatch, tmp_path):
    """A user's planner is chosen by name everywhere, beside the papers'."""
    mine = PublishedPlanner(
        name="mine",
        title="Mine",
        source="this test",
        schedule=lambda cost, table: ring(cost.cluster.num_ranks, cost.model.num_heads, cost.model.num_kv_heads),
        pipelines=lambda costs, goal, samples, sizes: hexiscale.plan_hexiscale(costs, goal, samples, sizes, rounds=2),
    )
    monkeypatch.setattr(registry, "PLANNERS", [*registry.PLANNERS, mine])
    expect_planners(read_section({"planner": "mine"}))
    cluster = tmp_path / "c.json"
    cluster.write_text(
        json.dumps(
            {
                "nodes": [{"name": "a", "device": "A100-SXM-80GB", "count": 2}, {"name": "b", "device": "RTX-4090"}],
                "network": {"bandwidth_gb_per_s": 10},
            }
        )
    )
    options = ["--cluster", str(cluster), "--model", "llama-3.2-1b", "--seq-len", "4096", "--json"]
    planned = CliRunner().invoke(app, ["plan", *options, "--planner", "mine"], catch_exceptions=False)
    assert json.loads(planned.stdout)["planner"] == "mine"
    compared = CliRunner().invoke(app, ["compare", *options], catch_exceptions=False)
    assert {"mine", "hexiseq", "lut", "formula"} <= set(json.loads(compared.stdout)["strategies"])
    full = ["--parallel", "full", "--global-batch", "4"]
    rows = CliRunner().invoke(app, ["compare", *options, *full], catch_exceptions=False)
    titles = [row["name"] for row in json.loads(rows.stdout)["rows"]]
    assert {"Mine", "HexiScale", "Tangram"} <= {title.partition(",")[0] for title in titles}
