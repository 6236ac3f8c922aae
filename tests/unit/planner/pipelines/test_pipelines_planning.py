"""Plans of pipelines: what fits, what is never worse, what files bring back, and what happens when ranks are lost."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.measure import exact_pipelines as exact
from benchmarks.measure.exact_pipelines import solve_pipelines_exact
from ds_hetero.cli import main
from ds_hetero.cluster.files import cluster_from_dict, load_cluster
from ds_hetero.cost.objective import Objective
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.models import load_model
from ds_hetero.planner.pipeline_search.balance_bound import balance_bound_s
from ds_hetero.planner.pipeline_search.block_ranks import idle_devices
from ds_hetero.planner.pipeline_search.blocks import block_of
from ds_hetero.planner.pipeline_search.evaluate import Evaluator
from ds_hetero.planner.pipeline_search.given_layers import GivenLayers
from ds_hetero.planner.pipeline_search.search import Search, default_effort_s
from ds_hetero.planner.pipeline_search.stage_sizes_by_kind import _EqualStages, plans_with_sizes_by_kind
from ds_hetero.planner.pipeline_search.stage_sizes_by_kind import _period_s as period_of
from ds_hetero.planner.pipelines import baselines, planning
from ds_hetero.planner.pipelines.baselines import best_published, best_sequence
from ds_hetero.planner.pipelines.given import judge_plan
from ds_hetero.planner.pipelines.planning import plan_pipelines, recomputing_or_not
from ds_hetero.planner.pipelines.replan import replan
from ds_hetero.planner.published.hexiscale import plan_hexiscale
from ds_hetero.planner.published.tangram import plan_tangram
from ds_hetero.planner.published.tangram.planner import TANGRAM
from ds_hetero.values.plans import read_plan
from tests.unit.cost.test_cost_stage import parameters_of

MODEL = load_model("llama-2-7b")
WORK = Workload(seq_len=4096)
CASE = load_cluster("hexiscale-case-study")


def random_cluster(rng, most=6):
    nodes = []
    while not nodes or rng.random() < 0.7:
        device = rng.choice(["A800-SXM-80GB", "RTX-4090", "RTX-3090"])
        nodes.append({"name": f"n{len(nodes)}", "device": device, "count": rng.choice([1, 2, 3, 4])})
        if len(nodes) == most:
            break
    network = {"bandwidth_gb_per_s": rng.choice([0.7, 3, 10]), "latency_us": 10}
    return cluster_from_dict({"nodes": nodes, "network": network})


def owned_parameters(plan, model, stage, rank):
    """Parameters whose optimizer state a rank owns: its weight among those who hold the same elements."""
    weights = dict(plan.zero.owner_weights) or dict.fromkeys(plan.ranks, 1.0)
    owned = 0.0
    for layer in range(*stage.layers):
        holders = []
        for pipeline in plan.pipelines:
            other = next(each for each in pipeline.stages if each.layers[0] <= layer < each.layers[1])
            holders += [ranks[0] for ranks in other.token_holders]
        share = weights[rank] / sum(weights[holder] for holder in holders)
        owned += parameters_of(model, layer, layer + 1) * share
    return owned / len(stage.holders_with(rank))


def assert_sound(found, cluster, model, samples):
    """Layers once, ranks once, samples exact, and memory by a sum of its own."""
    plan, costs = found.plan, found.costs
    assert sum(p.micro_batch_size * p.micro_batches for p in plan.pipelines) == samples
    assert set(plan.ranks) | set(found.idle_ranks) == set(range(cluster.num_ranks))
    if found.finished is None:
        return
    work = costs.workload
    for pipeline in plan.pipelines:
        for j, stage in enumerate(pipeline.stages):
            parameters = parameters_of(model, *stage.layers)
            for rank in stage.ranks:
                device, schedule, sharers = cluster.devices[rank], stage.schedule_of(rank), stage.holders_with(rank)
                states = parameters / len(sharers) * (2 + 4) + 12 * owned_parameters(plan, model, stage, rank)
                if work.activation_checkpointing:
                    tokens = pipeline.micro_batch_size * costs.seq_len
                    if schedule is not None:  # a tensor group shares the tokens of a layer's input
                        tokens = pipeline.micro_batch_size * schedule.tokens(costs.seq_len)[rank] / len(sharers)
                    states += (
                        pipeline.in_flight(j) * (stage.layers[1] - stage.layers[0]) * tokens * model.hidden_size * 2
                    )
                assert states < device.memory_bytes - device.reserved_bytes
                assert plan.predicted["memory_bytes"][str(rank)] >= states * 0.99
                assert plan.predicted["memory_bytes"][str(rank)] <= device.memory_bytes - device.reserved_bytes


def test_plans_are_sound_and_never_worse_than_their_rivals():
    rng = random.Random(0)
    planned = 0
    for _ in range(8):
        cluster, samples = random_cluster(rng), rng.choice([8, 12, 30])
        try:
            found = plan_pipelines(cluster, MODEL, WORK, samples, effort_s=0.1)
        except PlanError as error:
            assert "fits" in str(error)
            continue
        planned += 1
        assert_sound(found, cluster, MODEL, samples)
        for baseline in found.baselines.values():
            assert baseline.value is None or found.value <= baseline.value * (1 + 1e-9)
        assert found.step_s >= balance_bound_s(found.costs, samples) or found.finished is None
    assert planned >= 3


def test_plans_of_few_devices_are_never_slower_than_other_searches_and_near_the_optimum():
    rng, compared = random.Random(5), 0
    while compared < 4:
        cluster, samples = random_cluster(rng, most=2), rng.choice([8, 16, 32])
        if cluster.num_ranks > 6:
            continue
        costs = CalibratedStageCosts(cluster, MODEL, WORK)
        goal = costs.time_objective()
        optimum = solve_pipelines_exact(Evaluator(costs, samples, goal))
        if optimum is None:
            continue
        compared += 1
        result = Search(Evaluator(costs, samples, goal), (1, 2), effort_s=0.5).run()
        assert result.closed_form_value <= optimum.value * 1.01
        ours = plan_pipelines(cluster, MODEL, WORK, samples, costs=costs, micro_batch_sizes=(1, 2), effort_s=0.1)
        hexiscale, tangram = plan_hexiscale(costs, goal, samples), plan_tangram(costs, goal, samples)
        assert ours.step_s <= (np.inf if hexiscale is None else hexiscale.step_s) * (1 + 1e-9)
        assert ours.step_s <= (np.inf if tangram is None else tangram.candidate.step_s) * (1 + 1e-9)


def test_the_exact_reference_leaves_out_only_what_is_slower(monkeypatch):
    rng, compared = random.Random(11), 0
    while compared < 2:
        cluster = random_cluster(rng, most=2)
        costs = CalibratedStageCosts(cluster, MODEL, WORK)
        evaluate = Evaluator(costs, 16, costs.time_objective())
        if cluster.num_ranks > 4:
            continue
        optimum = solve_pipelines_exact(evaluate)
        with monkeypatch.context() as without_bounds:
            without_bounds.setattr(exact, "batch_bound_s", lambda *_: 0.0)
            everything = solve_pipelines_exact(evaluate)
        assert (optimum is None) == (everything is None)
        if optimum is not None:
            compared += 1
            assert optimum.value == everything.value
            assert solve_pipelines_exact(evaluate, below=optimum.value) is None
            assert solve_pipelines_exact(evaluate, below=optimum.value * (1 + 1e-9)).value == optimum.value


def test_sequence_parallelism_that_cannot_win_is_not_searched(monkeypatch):
    goal = Objective("time", 1.0, (0.0,) * 3, (0.0,) * 3)
    everything = best_sequence(CASE, MODEL, WORK, 16, (1, 2), goal)
    with monkeypatch.context() as without_search:
        without_search.setattr(baselines, "searched_candidates", None)
        uniform = best_sequence(CASE, MODEL, WORK, 16, (1, 2), goal, best_value=1e-3)
    assert uniform.step_s >= everything.step_s > 1e-3


def test_the_same_inputs_give_the_same_plan():
    plans = [plan_pipelines(CASE, MODEL, WORK, 24, effort_s=0.1).plan for _ in range(2)]
    assert plans[0] == plans[1]


def test_a_plan_file_is_predicted_as_it_was_planned():
    found = plan_pipelines(CASE, load_model("llama-2-13b"), WORK, 24, effort_s=0.2)
    again = read_plan(json.loads(json.dumps(found.plan.to_dict())))
    assert again == found.plan
    goal = found.costs.time_objective()
    assert judge_plan(found.costs, again, goal).step_s == pytest.approx(found.step_s)


def test_names_of_nodes_do_not_matter():
    data = [("A800-SXM-80GB", 2), ("RTX-4090", 2), ("RTX-3090", 2)]
    network = {"bandwidth_gb_per_s": 3, "latency_us": 10}
    steps = []
    for order in ([0, 1, 2], [2, 0, 1]):
        nodes = [{"name": f"x{i}", "device": data[i][0], "count": data[i][1]} for i in order]
        cluster = cluster_from_dict({"nodes": nodes, "network": network})
        steps.append(plan_pipelines(cluster, MODEL, WORK, 16, effort_s=0.2).step_s)
    assert steps[0] == pytest.approx(steps[1], rel=0.02)


def test_money_leaves_dear_devices_out():
    nodes = [{"name": "a", "device": "A800-SXM-80GB", "count": 4}, {"name": "b", "device": "RTX-3090", "count": 4}]
    network = {"bandwidth_gb_per_s": 10, "latency_us": 10}
    prices = {"A800-SXM-80GB": {"price_per_hour": 1.0}, "RTX-3090": {"price_per_hour": 50.0}}
    cluster = cluster_from_dict({"nodes": nodes, "network": network, "devices": prices})
    search = {"effort_s": 0.1, "from_published": False}
    cheap = plan_pipelines(cluster, MODEL, WORK, 16, objective="cost", **search)
    assert set(cheap.plan.ranks) <= {0, 1, 2, 3}
    fast = plan_pipelines(cluster, MODEL, WORK, 16, **search)
    assert fast.step_s <= cheap.step_s * (1 + 1e-9)
    limited = plan_pipelines(cluster, MODEL, WORK, 16, objective="cost", at_most_s=fast.step_s * 1.01, **search)
    assert limited.step_s <= fast.step_s * 1.01


def make_costs(cluster):
    return [CalibratedStageCosts(cluster, MODEL, WORK)]


@pytest.fixture(scope="module")
def small_plan():
    """A plan of eight samples for the case study, hardly searched for."""
    return plan_pipelines(CASE, MODEL, WORK, 8, costs=make_costs(CASE)[0], effort_s=0.02).plan


@pytest.fixture(scope="module")
def small_plan_of_13b():
    """The same of the larger model."""
    model = load_model("llama-2-13b")
    costs = CalibratedStageCosts(CASE, model, WORK)
    return plan_pipelines(CASE, model, WORK, 8, costs=costs, effort_s=0.02).plan


def test_any_single_device_may_be_lost():
    cluster = load_cluster("hexiscale-setting-2")
    costs = make_costs(cluster)[0]
    plan = plan_pipelines(cluster, MODEL, WORK, 64, costs=costs, effort_s=0.3).plan
    for rank in range(0, cluster.num_ranks, 5):
        found = replan(plan, cluster, make_costs, lost=[rank], effort_s=0.05)
        assert sum(p.micro_batch_size * p.micro_batches for p in found.plan.pipelines) == 64
        assert rank not in found.rank_before
        assert max(found.plan.ranks) < cluster.num_ranks - 1
        assert found.finished.step_s <= found.first_s * 1.05


def test_nothing_lost_moves_nothing_and_new_nodes_are_used():
    costs = make_costs(CASE)[0]
    plan = plan_pipelines(CASE, MODEL, WORK, 24, costs=costs, effort_s=0.3).plan
    same = replan(plan, CASE, make_costs, effort_s=0.02)
    assert same.finished.step_s <= plan.predicted["step_s"] * 1.001
    more = replan(plan, CASE, make_costs, added=CASE, effort_s=0.5)
    assert more.finished.step_s < 0.8 * plan.predicted["step_s"]
    assert more.rank_before[:8] == tuple(range(8))
    assert more.rank_before[8:] == (None,) * 8
    assert sum(more.moved_bytes.values()) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [({"lost": [99]}, r"lost ranks \[99\] do not exist"), ({"lost": range(8)}, "all 8 ranks are lost")],
)
def test_losses_that_cannot_be_are_refused(change, message, small_plan):
    with pytest.raises(PlanError, match=message):
        replan(small_plan, CASE, make_costs, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch": 0}, "global_batch must be a whole number"),
        ({"micro_batch_sizes": (4,), "global_batch": 6}, "do not make up a global batch of 6"),
        ({"objective": "cost"}, r"price_per_hour.*A800"),
        ({"objective": "speed"}, "'speed' is unknown"),
        ({"model": load_model("llama-3.1-405b")}, r"room for \d+ of 126 layers.*What would fit"),
        ({"at_most_s": 1e-3}, "at most 0.001 s"),
    ],
)
def test_what_cannot_be_planned_says_why(change, message):
    arguments = {"cluster": CASE, "model": MODEL, "workload": WORK, "global_batch": 8, "effort_s": 0.05, **change}
    with pytest.raises(PlanError, match=message):
        plan_pipelines(**arguments)


def over_slow_network(*nodes):
    entries = [dict(zip(("name", "device", "count", "repeat"), node, strict=True)) for node in nodes]
    return cluster_from_dict({"nodes": entries, "network": {"bandwidth_gb_per_s": 0.75, "latency_us": 10}})


def test_nodes_that_differ_in_their_names_alone_are_of_one_kind():
    apart = over_slow_network(*((name, "RTX-4090", 4, 1) for name in "abcd"))
    together = over_slow_network(("a", "RTX-4090", 4, 4))
    costs = [CalibratedStageCosts(cluster, MODEL, WORK) for cluster in (apart, together)]
    assert [len(each.pools.kinds) for each in costs] == [1, 1]
    hops = [
        [each.hop_s(int(each.cluster.link_class[node, other]), *(block_of(p, 1) for p in each.pools.pools[:2]), 1)
         for node, other in ((0, 0), (3, 3), (0, 3))]
        for each in costs
    ]  # fmt: skip
    assert hops[0] == hops[1]
    assert hops[0][0] == hops[0][1] < hops[0][2]
    plans = [plan_pipelines(each, MODEL, WORK, 24, effort_s=0.1) for each in (apart, together)]
    assert plans[0].step_s == plans[1].step_s


@pytest.mark.parametrize("devices", [(), (("RTX-3090", 4, 3), ("A800-SXM-80GB", 8, 2))])
def test_pipelines_with_stage_sizes_by_kind_use_every_device_once(devices):
    cluster = over_slow_network(("fast", "RTX-4090", 8, 3), *((name, name, *rest) for name, *rest in devices))
    costs = CalibratedStageCosts(cluster, MODEL, WORK)
    found = list(plans_with_sizes_by_kind(costs, 64, 1))
    assert {len(shapes) for shapes in found} >= {1, 2, 3, 4}
    for shapes in found:
        assert not any(idle_devices(costs.pools, [shape.blocks for shape in shapes]))
        assert all(len(shape.blocks) <= MODEL.num_layers for shape in shapes)
    evaluate = Evaluator(costs, 64, costs.time_objective())
    fitting = [plan for plan in map(evaluate, found) if plan is not None]
    assert fitting
    if not devices:
        assert all(len({block.kind for shape in plan.shapes for block in shape.blocks}) == 1 for plan in fitting)


@given(
    st.lists(st.tuples(st.floats(0.1, 2.0), st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=5),
    st.integers(1, 30),
)
def test_the_least_period_of_stages_fills_them_as_far_as_they_have_room(kinds, layers):
    """A bisection of the period, at which stages hold ``min(room, period / layer_s)`` layers each."""
    stages = [_EqualStages(layer_s * room, number / layer_s, number * room) for layer_s, number, room in kinds]
    period_s = period_of(stages, layers)
    if sum(number * room for _, number, room in kinds) < layers:
        assert period_s == np.inf
        return
    low, high = 0.0, max(layer_s * room for layer_s, _, room in kinds)
    for _ in range(200):
        middle = (low + high) / 2
        held = sum(number * min(room, middle / layer_s) for layer_s, number, room in kinds)
        low, high = (low, middle) if held >= layers * (1 - 1e-12) else (middle, high)
    assert period_s == pytest.approx(high, rel=1e-9)


@pytest.mark.slow
def test_plans_of_240_unlike_devices_are_not_slower_than_published_ones():
    costs = CalibratedStageCosts(load_cluster("hexiscale-240"), load_model("llama-30b"), WORK)
    goal, sizes = costs.time_objective(), (1,)
    ours = Search(Evaluator(costs, 480, goal), sizes, effort_s=default_effort_s(240)).run().best
    assert ours.step_s <= plan_hexiscale(costs, goal, 480, sizes).step_s
    assert ours.step_s <= plan_tangram(costs, goal, 480, sizes).candidate.step_s


@pytest.mark.slow
def test_a_plan_of_192_devices_is_not_slower_than_that_of_another_planner():
    nodes = [
        {"name": "h100", "device": "H100-SXM-80GB", "count": 8, "repeat": 8},
        {"name": "a100", "device": "A100-SXM-80GB", "count": 8, "repeat": 16},
    ]
    cluster = cluster_from_dict({"nodes": nodes, "network": {"bandwidth_gb_per_s": 16, "latency_us": 10}})
    model = load_model("llama-3.1-70b")
    ours = plan_pipelines(cluster, model, WORK, 192, micro_batch_sizes=(1, 2), effort_s=0.3)
    tangram = best_published(TANGRAM, recomputing_or_not(cluster, model, WORK), ours.objective, 192, (1, 2))
    assert ours.value <= tangram.value * (1 + 1e-9)


def test_the_last_word_of_tangrams_compositions_may_be_bounded():
    costs = CalibratedStageCosts(CASE, load_model("llama-2-13b"), WORK)
    goal = costs.time_objective()
    whole = plan_tangram(costs, goal, 24).candidate
    some = plan_tangram(costs, goal, 24, effort_s=0.0).candidate
    assert whole.value <= some.value < np.inf
    layers = GivenLayers.of(costs, goal, whole.placed)
    assert layers.least_value <= whole.value
    assert layers.evaluate(costs, goal).value == whole.value


def test_an_interrupt_while_other_planners_search_still_ends_with_a_plan(monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "published_starts", stop)
    firsts = []
    found = plan_pipelines(CASE, MODEL, WORK, 24, progress=lambda plan, share: firsts.append((plan, share)))
    assert found.interrupted
    assert firsts[0][1] == 0
    assert found.step_s <= firsts[0][0].step_s * 1.05


def test_an_interrupted_search_returns_its_best(monkeypatch):
    calls = []

    def stop(best, share):
        calls.append((best.step_s, share))
        if len(calls) == 3:
            raise KeyboardInterrupt

    found = plan_pipelines(CASE, MODEL, WORK, 24, progress=stop, effort_s=1.0)
    assert found.interrupted
    assert found.step_s <= min(step_s for step_s, _ in calls) * 1.05
    assert np.all(np.diff([share for _, share in calls]) >= 0)


def test_an_interrupt_at_any_time_ends_with_a_plan_or_the_interrupt(monkeypatch):
    evaluations = []
    evaluate = Evaluator.__call__

    def counted(self, shapes, *args, **kwargs):
        evaluations.append(shapes)
        if len(evaluations) == stop_at:
            raise KeyboardInterrupt
        return evaluate(self, shapes, *args, **kwargs)

    monkeypatch.setattr(Evaluator, "__call__", counted)
    stop_at = None
    whole = plan_pipelines(CASE, MODEL, WORK, 24, effort_s=0.1)
    assert not whole.interrupted
    total = len(evaluations)
    # Every part of the search is stopped once: the last ones try tensor groups, after all others have found plans.
    for stop_at in [1, *range(total // 12, total, total // 12), total]:
        evaluations.clear()
        found = plan_pipelines(CASE, MODEL, WORK, 24, effort_s=0.1)
        assert found.interrupted, stop_at
        assert found.step_s >= whole.step_s * (1 - 1e-9)


def test_an_interrupt_without_a_plan_is_raised(monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Evaluator, "__call__", stop)
    with pytest.raises(KeyboardInterrupt):
        plan_pipelines(CASE, MODEL, WORK, 24, effort_s=0.1)


def run(arguments):
    """The exit code of a command."""
    try:
        return main(arguments)
    except SystemExit as end:
        return end.code or 0


OPTIONS = ["--cluster", "hexiscale-case-study", "--model", "llama-2-13b", "--seq-len", "4096"]


def test_the_command_line_plans_predicts_draws_and_plans_again(tmp_path, capsys):
    path, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    assert run(["plan", *OPTIONS, "--parallel", "full", "--global-batch", "24", "--out", str(path), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    written = json.loads(path.read_text())
    assert written.pop("scenario")  # what it was made for
    assert planned["plan"] == written
    assert planned["reasons"]
    assert set(planned["baselines"]) == {"grid", "sequence"}
    assert run(["simulate", *OPTIONS, "--plan", str(path), "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)["predicted"]
    assert predicted["step_s"] == pytest.approx(planned["predicted"]["step_s"])
    assert run(["simulate", *OPTIONS, "--plan", str(path)]) == 0
    assert "set by" in capsys.readouterr().out
    assert run(["show", *OPTIONS, "--plan", str(path), "--out", str(picture)]) == 0
    assert "<svg" in picture.read_text()
    capsys.readouterr()
    assert run(["replan", *OPTIONS, "--plan", str(path), "--lost", "7", "5", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["rank_before"] == [0, 1, 2, 3, 4, 6]
    assert read_plan(again["plan"]).ranks[-1] <= 5


def test_the_command_line_plans_under_the_published_model(capsys):
    assert (
        run(["plan", *OPTIONS, "--parallel", "full", "--global-batch", "24", "--cost-model", "hexiscale", "--json"])
        == 0
    )
    planned = json.loads(capsys.readouterr().out)
    assert planned["predicted"]["cost_model"] == "hexiscale"
    assert planned["predicted"]["step_s"] < 16.5


@pytest.mark.slow
def test_the_command_line_compares_planners(capsys):
    assert run(["compare", *OPTIONS, "--parallel", "full", "--global-batch", "24", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    names = [row["name"].partition(",")[0] for row in rows]
    assert names[:3] == ["ours", "uniform grid", "sequence parallelism"]
    assert names[3:5] == ["HexiScale", "Tangram"]
    assert names[5].startswith("bound")
    steps = [row["step_s"] for row in rows[:5] if row["step_s"] is not None]
    assert rows[5]["step_s"] <= min(steps) == steps[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", *OPTIONS, "--parallel", "full"], "--global-batch"),
        (["plan", *OPTIONS, "--parallel", "odd"], "'odd' is unknown"),
        (["plan", *OPTIONS, "--parallel", "full", "--global-batch", "8", "--objective", "cost"], "price_per_hour"),
        (["simulate", *OPTIONS, "--plan", "nowhere.json"], "nowhere.json"),
        (["plan", *OPTIONS, "--parallel", "full", "--global-batch", "8", "--cost-model", "x"], "calibrated, hexiscale"),
        (["plan", *OPTIONS, "--parallel", "full", "--global-batch", "0"], "global_batch must be a whole number"),
        (["compare", *OPTIONS, "--parallel", "full", "--global-batch", "-3"], "global_batch must be a whole number"),
        (
            ["plan", *OPTIONS[:3], "llama-3.1-405b", *OPTIONS[4:], "--parallel", "full", "--global-batch", "8"],
            "of 126 layers",
        ),
    ],
)
def test_bad_input_is_one_message(arguments, message, capsys):
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["replan", *OPTIONS, "--lost", "99"], "lost ranks [99] do not exist; the cluster has ranks 0 to 7"),
        (["replan", *OPTIONS, "--lost", "5", "99"], "lost ranks [99] do not exist; the cluster has ranks 0 to 7"),
        (["replan", *OPTIONS, "7"], "--lost 7"),
        (["simulate", *OPTIONS[2:], "--cluster", "hexiscale-setting-1"], "of 9.9 GiB a device"),
        (["replan", *OPTIONS, "--lost-node", "nowhere"], "the nodes of the cluster are a800, 4090, 3090"),
        (["replan", *OPTIONS, *(option for rank in range(8) for option in ("--lost", str(rank)))], "nothing is left"),
        (["replan", *OPTIONS], "say what has changed"),
        (["replan", *OPTIONS, "--added", "nowhere.yaml"], "nowhere.yaml"),
        (["simulate", *OPTIONS[:3], "llama-2-7b", *OPTIONS[4:]], "num_layers=40, but llama-2-7b has 32"),
        (["replan", *OPTIONS[:3], "llama-2-7b", *OPTIONS[4:], "--lost", "7"], "num_layers=40, but llama-2-7b has 32"),
        (["simulate", *OPTIONS[2:], "--cluster", "workstation-4090-3090"], "the cluster has ranks 0 to 1"),
        (["replan", *OPTIONS[2:], "--cluster", "workstation-4090-3090", "--lost", "0"], "the cluster has ranks 0 to 1"),
    ],
)
def test_plans_that_do_not_belong_and_losses_that_cannot_be_are_one_message(
    command, message, small_plan_of_13b, tmp_path, capsys
):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(small_plan_of_13b.to_dict()))
    assert run([*command, "--plan", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_a_plan_of_another_model_or_cluster_is_refused(small_plan, tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(small_plan.to_dict()))
    assert run(["simulate", *OPTIONS, "--plan", str(path)]) == 2
    assert "num_layers=32, but llama-2-13b has 40" in capsys.readouterr().err
    small = replace(CASE, nodes=CASE.nodes[:1])
    with pytest.raises(PlanError, match="ranks 0 to 2"):
        judge_plan(make_costs(small)[0], small_plan, Objective.of("time", [], 1))
