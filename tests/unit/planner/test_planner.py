"""The search: what must hold for every plan, over random clusters; its parts against slower ways to the same end."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.measure.random_clusters import random_case
from ds_hetero.cluster import cluster_from_dict, load_cluster
from ds_hetero.cluster.notation import read_notation
from ds_hetero.cost import Grouping, Workload, make_cost_model
from ds_hetero.cost.calibrated import CalibratedCostModel
from ds_hetero.errors import PlanError
from ds_hetero.models import load_model
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner import make_problem, plan, strategy
from ds_hetero.planner.results.schedule import compared
from ds_hetero.planner.search.budget import EvaluationBudget
from ds_hetero.planner.search.canonical import schedule_of
from ds_hetero.planner.search.covers import best_levels, cover, minimal_covers
from ds_hetero.planner.search.memory_fit import fit_memory, fit_rows
from ds_hetero.planner.search.problem import Assignment
from ds_hetero.planner.search.search import search
from ds_hetero.planner.search.shares import apportion, cap_shares, triangle_fill, two_speed_fill, whole_shares

MODEL = ModelSpec(
    name="small",
    num_layers=8,
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    mlp_size=8192,
    vocab_size=32_000,
    gated_mlp=True,
)
KINDS = {
    "big": {"peak_tflops": 400, "memory_gib": 80, "memory_bandwidth_gb_per_s": 2000},
    "mid": {"peak_tflops": 250, "memory_gib": 40, "memory_bandwidth_gb_per_s": 2000},
    "slow": {"peak_tflops": 100, "memory_gib": 40, "memory_bandwidth_gb_per_s": 2000},
}


@st.composite
def cluster_files(draw, most_ranks=8):
    """Up to four nodes of mixed devices, all of one memory bandwidth, over links of very different speed."""
    nodes, left = [], draw(st.integers(2, most_ranks))
    while left:
        size = draw(st.integers(1, min(left, 4)))
        devices = [draw(st.sampled_from(sorted(KINDS))) for _ in range(size)]
        link = {"bandwidth_gb_per_s": draw(st.sampled_from([25, 100, 400])), "latency_us": 5}
        nodes.append({"name": f"n{len(nodes)}", "devices": devices, "link": link})
        left -= size
    network = {"bandwidth_gb_per_s": draw(st.sampled_from([1, 10, 50])), "latency_us": 20}
    return {"nodes": nodes, "network": network, "devices": KINDS}


seq_lens = st.sampled_from([8192, 32_768, 131_072])
cost_models = st.sampled_from(["published", "calibrated"])


def make_plan(data, seq_len, cost_model):
    return plan(cluster_from_dict(data), MODEL, seq_len, cost_model=cost_model)


def work_of(found, seq_len):
    """Tokens and attention work (heads times tokens of the group) of every rank."""
    tokens = found.schedule.tokens(seq_len)
    attention = {}
    for group in found.schedule.groups:
        length = sum(tokens[rank] for rank in group.ranks)
        attention |= {rank: heads * length for rank, heads in zip(group.ranks, group.heads, strict=True)}
    return tokens, attention


# --- properties of every plan ---------------------------------------------------------------------------


@settings(max_examples=20)
@given(cluster_files(), seq_lens, cost_models, st.randoms(use_true_random=False))
def test_every_plan_is_whole_fits_beats_every_baseline_and_is_relabelled_with_its_ranks(data, seq_len, cost_model, rng):
    """Nodes listed in another order, and devices inside them: every device keeps its work, up to equal ones."""
    moved = {
        **data,
        "nodes": [{**node, "devices": rng.sample(node["devices"], len(node["devices"]))} for node in data["nodes"]],
    }
    rng.shuffle(moved["nodes"])
    results = []
    for each in (data, moved):
        found = make_plan(each, seq_len, cost_model)
        cluster = cluster_from_dict(each)
        assert_sound(found, cluster, seq_len, cost_model)
        tokens, attention = work_of(found, seq_len)
        places = [(cluster.nodes[cluster.node_of_rank[rank]].name, cluster.devices[rank].name) for rank in tokens]
        results.append((found.prediction.block_s, sorted((p, tokens[r], attention[r]) for r, p in enumerate(places))))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-9)
    assert results[0][1] == results[1][1]


def assert_sound(found, cluster, seq_len, cost_model):
    """All tokens and heads, once; within memory; predicted as said, and no slower than any baseline."""
    schedule = found.schedule
    assert schedule.ranks == tuple(range(cluster.num_ranks))
    assert sum(schedule.tokens(seq_len).values()) == seq_len
    assert all(sum(group.heads) == MODEL.num_heads for group in schedule.groups)
    cost = make_cost_model(cost_model, cluster, MODEL, Workload(seq_len=seq_len))
    prediction = cost.predict(schedule)
    assert (np.array(prediction.memory_bytes) <= cost.capacity_bytes_D).all()
    assert prediction == found.prediction
    for baseline in found.baselines.values():
        assert baseline is None or prediction.iteration_s <= baseline.iteration_s * (1 + 1e-6)
    assert prediction.block_s >= prediction.bound_s * (1 - 1e-9)
    assert {each.reason for each in found.rejected} - {""} or not found.rejected


@settings(max_examples=3)
@given(cluster_files(), seq_lens, cost_models)
def test_the_same_input_gives_the_same_plan(data, seq_len, cost_model):
    first, second = (make_plan(data, seq_len, cost_model) for _ in range(2))
    assert first.schedule == second.schedule
    assert first.prediction == second.prediction


@settings(max_examples=15)
@given(cluster_files(), seq_lens, cost_models)
def test_the_faster_of_two_equal_devices_never_gets_less_of_both(data, seq_len, cost_model):
    data = {**data, "devices": {name: {**KINDS[name], "memory_gib": 80} for name in KINDS}}
    cluster = cluster_from_dict(data)
    tokens, attention = work_of(make_plan(data, seq_len, cost_model), seq_len)
    for a, b in itertools.permutations(range(cluster.num_ranks), 2):
        if (
            cluster.node_of_rank[a] == cluster.node_of_rank[b]
            and cluster.peak_flops_per_s[a] > cluster.peak_flops_per_s[b]
        ):
            assert tokens[a] >= tokens[b] or attention[a] >= attention[b], (tokens, attention)


@settings(max_examples=12)
@given(
    cluster_files(), seq_lens, cost_models, st.sampled_from(["network", "inside", "memory"]), st.sampled_from([1.2, 3])
)
def test_more_bandwidth_or_memory_never_slows_the_plan(data, seq_len, cost_model, what, factor):
    """By more than 1 %: a search is not an optimum."""

    def wider(link):
        return {**link, "bandwidth_gb_per_s": link["bandwidth_gb_per_s"] * factor}

    better = dict(data)
    if what == "network":
        better["network"] = wider(data["network"])
    elif what == "inside":
        better["nodes"] = [{**node, "link": wider(node["link"])} for node in data["nodes"]]
    else:
        better["devices"] = {name: {**kind, "memory_gib": kind["memory_gib"] * factor} for name, kind in KINDS.items()}
    before, after = make_plan(data, seq_len, cost_model), make_plan(better, seq_len, cost_model)
    assert after.prediction.block_s <= before.prediction.block_s * 1.01


@pytest.mark.parametrize(
    "nodes, network",
    [
        ((("mid big", 100), ("big slow mid", 100), ("slow big", 400), ("big", 25)), 1),
        ((("slow slow", 100), ("slow mid mid big", 25), ("big", 100)), 1),
        ((("mid slow", 25), ("slow", 25), ("slow big slow", 25), ("big", 100)), 10),
    ],
)
def test_few_ranks_are_searched_widely(nodes, network):
    """Slow links leave many sets of working ranks to try: ten times the budget does not find anything better."""
    listed = [
        {"name": f"n{i}", "devices": names.split(), "link": {"bandwidth_gb_per_s": inside, "latency_us": 5}}
        for i, (names, inside) in enumerate(nodes)
    ]
    links = {"bandwidth_gb_per_s": network, "latency_us": 20}
    cluster = cluster_from_dict({"nodes": listed, "network": links, "devices": KINDS})
    problem, _ = make_problem(make_cost_model("published", cluster, MODEL, Workload(seq_len=8192)))
    more = EvaluationBudget.for_ranks(cluster.num_ranks)
    more.left_s *= 10
    assert search(problem)[0].time_s <= search(problem, more)[0].time_s * 1.01


def test_devices_behind_slow_links_stay_idle_and_are_named():
    data = {
        "nodes": [
            {"name": "strong", "device": "big", "count": 4, "link": {"bandwidth_gb_per_s": 200}},
            {"name": "far", "device": "slow", "count": 1, "link": {"bandwidth_gb_per_s": 10}},
        ],
        "network": {"bandwidth_gb_per_s": 0.05, "latency_us": 100},
        "devices": KINDS,
    }
    found = plan(cluster_from_dict(data), MODEL, Workload(seq_len=8192, zero_stage=0), cost_model="published")
    assert found.idle_ranks == (4,)
    assert "idle" in found.name


def test_a_thousand_ranks_with_coarse_units_do_not_need_a_table_of_triples():
    """Moves of single units between any two ranks were once listed for any number of ranks: 64 GiB for 2,048."""
    data = {
        "nodes": [
            {"name": kind, "device": kind, "count": 8, "repeat": 32, "link": {"bandwidth_gb_per_s": 300}}
            for kind in ("big", "slow")
        ],
        "network": {"bandwidth_gb_per_s": 25, "latency_us": 10},
        "devices": KINDS,
    }
    found = plan(cluster_from_dict(data), MODEL, 512 * 256, token_unit=64)
    assert sum(found.schedule.tokens(512 * 256).values()) == 512 * 256
    assert found.gain >= 1


@pytest.mark.parametrize(("seq_len", "others"), [(4096, 0), (4100, 1)])
def test_a_baseline_is_not_chosen_if_its_tokens_are_no_multiples_of_the_unit(seq_len, others):
    """Equal shares of three equal ranks would be 1,366 tokens; what fills no unit goes to one rank."""
    data = {
        "nodes": [{"name": "n", "device": "big", "count": 3, "link": {"bandwidth_gb_per_s": 300}}],
        "devices": KINDS,
    }
    tokens = plan(cluster_from_dict(data), MODEL, seq_len, token_unit=128).schedule.tokens(seq_len).values()
    assert sum(tokens) == seq_len and sum(count % 128 > 0 for count in tokens) == others


# --- what the planner refuses and says --------------------------------------------------------------------


def test_what_does_not_fit_is_told_by_how_much_and_what_would_help():
    with pytest.raises(PlanError) as caught:
        workload = Workload(seq_len=65_536, zero_stage=1, activation_checkpointing=False)
        plan(load_cluster("hexiseq-setting-1"), load_model("gpt-70b"), workload)
    message = str(caught.value)
    assert "gpt-70b with 65536 tokens fits on 8 devices" in message
    assert "GiB too much" in message
    assert "rank " in message
    assert "ZeRO stage 3" in message
    assert "activation checkpointing" in message


def test_the_longest_sequence_that_fits_is_a_remedy_that_works():
    cluster, model = load_cluster("hexiseq-setting-1"), load_model("gpt-7b")
    with pytest.raises(PlanError, match=r"sequences of up to about (\d+) tokens") as caught:
        plan(cluster, model, 16_777_216)
    longest = int(str(caught.value).split("up to about ")[1].split()[0])
    assert plan(cluster, model, longest).prediction.feasible


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 7}, "8 ranks cannot share a sequence of 7 tokens"),
        ({"seq_len": 0}, "seq_len must be a whole number >= 1, got 0"),
        ({"micro_batch": -1}, "micro_batch must be a whole number >= 1, got -1"),
        ({"zero_stage": 4}, "zero_stage must be 0, 1, 2 or 3, got 4"),
        ({"zero_weights": (1.0,)}, "zero_weights has 1 entries, the cluster 8 ranks"),
    ],
)
def test_impossible_workloads_are_refused_by_name(changes, message):
    with pytest.raises(PlanError, match=message):
        workload = replace(Workload(seq_len=65_536), **changes)
        plan(load_cluster("hexiseq-setting-1"), load_model("gpt-7b"), workload)


@pytest.mark.parametrize(
    ("gpus", "network"),
    [("4090,3090x2", None), ("5090,4090,3090,3080,4080,a6000,a5000,3060", None), ("3090x2 | 5090", "10GbE")],
)
def test_the_last_bits_of_a_time_do_not_decide(monkeypatch, gpus, network):
    """They differ by machine: the planner in a browser chose another of two equal orders than the command line."""
    cluster, work = cluster_from_dict(read_notation(gpus, network).content), Workload(seq_len=32_768)
    found = [plan(cluster, MODEL, work)]
    for seed in range(3):
        noise = np.random.default_rng(seed)
        with monkeypatch.context() as patch:
            for name in ("block_s_many", "block_s_below"):
                patch.setattr(CalibratedCostModel, name, _trembling(getattr(CalibratedCostModel, name), noise))
            found.append(plan(cluster, MODEL, work))
    assert len({planned.plan for planned in found}) == 1
    assert len({tuple(each.name for each in planned.rejected) for planned in found}) == 1


def _trembling(times, noise):
    def with_noise(*arguments):
        exact = times(*arguments)
        return exact * (1 + 2e-15 * noise.uniform(-1, 1, exact.shape))

    return with_noise


@pytest.mark.parametrize("seq_len", [4096, 8192, 16_384])
def test_the_strategy_plan_is_the_schedule_of_the_planner(seq_len):
    """Where the search's best in fractions of tokens is not its best in whole ones, or a baseline is as fast."""
    link, network = ({"bandwidth_gb_per_s": rate, "latency_us": 10} for rate in (50, 10))
    nodes = [{"name": name, "device": name, "count": 2, "link": link} for name in ("A100-SXM-80GB", "L40S")]
    cluster, model = cluster_from_dict({"nodes": nodes, "network": network}), load_model("llama-3.2-1b")
    workload = Workload(seq_len=seq_len)
    cost = make_cost_model("calibrated", cluster, model, workload)
    assert strategy("plan", cost) == plan(cluster, model, workload).schedule


def test_a_plan_explains_itself():
    found = plan(load_cluster("hexiseq-setting-3"), load_model("gpt-13b"), 65_536)
    assert set(found.baselines) == {"ulysses", "ring", "usp"}
    assert found.baselines["ulysses"] is None
    assert "num_heads=40 is not a multiple of 16 ranks" in found.baseline_reasons["ulysses"]
    assert found.gain > 1.2
    assert 0.7 < found.of_bound <= 1
    assert "rank" in found.prediction.bottleneck.text
    assert any("% slower" in each.reason for each in found.rejected)
    assert found.to_dict()["baselines"]["ulysses"] is None


def test_a_device_behind_a_slow_link_does_not_make_the_plan_slower_than_the_one_without_it():
    """It was slower by 20 %: stage I spent its budget for idle ranks on sets that came first."""
    devices = {
        f"gpu{i}": {"peak_tflops": peak, "memory_gib": gib, "memory_bandwidth_gb_per_s": rate}
        for i, peak, gib, rate in (
            *((0, 115, 40, 3230), (2, 153, 80, 1780), (3, 92.7, 192, 1910)),
            *((5, 170, 192, 1150), (6, 554, 40, 3020), (7, 173, 40, 954)),
        )
    }
    near = [f"gpu{i}" for i in (3, 5, 6, 5, 7, 0, 5, 7, 5)]
    nodes = [
        {"name": "near", "devices": near, "link": {"bandwidth_gb_per_s": 49.1, "latency_us": 9.5}},
        {"name": "far", "devices": ["gpu2"], "link": {"bandwidth_gb_per_s": 17.8}},
    ]
    network = {"bandwidth_gb_per_s": 1.11, "latency_us": 10.1}
    cluster = cluster_from_dict({"nodes": nodes, "network": network, "devices": devices})
    model = replace(MODEL, num_layers=16, hidden_size=1280, num_heads=2, num_kv_heads=2, head_dim=640, mlp_size=5120)
    work = Workload(seq_len=1_000_000, zero_stage=0)
    with_it = plan(cluster, model, work).prediction.iteration_s
    assert with_it <= 1.05 * plan(cluster.without([9]), model, work).prediction.iteration_s


def test_equal_cards_have_no_rejected_plan_that_is_the_chosen_one_and_none_twice():
    found = plan(load_cluster(read_notation("8xA100").content), load_model("llama-3.1-8b"), 65_536)
    lines = [(each.name, each.reason) for each in found.rejected]
    assert found.name not in dict(lines) and len(set(lines)) == len(lines)
    assert not any(reason.startswith("0.0 %") for _, reason in lines)


@pytest.mark.parametrize(
    ("times", "text"), [(1.0, "as fast"), (1.5, "50.0 % slower"), (3.629, "takes 3.6 times as long")]
)
def test_what_takes_twice_as_long_is_said_in_times(times, text):
    prediction = plan(load_cluster("workstation-4090-3090"), load_model("llama-3.2-1b"), 8_192).prediction
    other = replace(prediction, iteration_s=times * prediction.iteration_s)
    assert compared("a", other, prediction).reason.startswith(text)


# --- parts --------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=4), st.integers(1, 9))
def test_apportion_is_the_best_of_all_splits(speeds, total):
    shares = apportion(tuple(speeds), total)
    best = min(
        max(share / speed for share, speed in zip(split, speeds, strict=True))
        for split in itertools.product(range(total + 1), repeat=len(speeds))
        if sum(split) == total
    )
    assert sum(shares) == total
    assert max(share / speed for share, speed in zip(shares, speeds, strict=True)) == pytest.approx(best)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=6))
def test_two_speed_fill_solves_its_linear_program(speeds):
    from scipy.optimize import linprog

    token, attention = (np.array(column) for column in zip(*speeds, strict=True))
    num = len(speeds)
    share = two_speed_fill(token, attention)
    bounds = [[*row, -token[k], 0] for k, row in enumerate(np.eye(num))]
    bounds += [[*row, 0, -attention[k]] for k, row in enumerate(np.eye(num))]
    solved = linprog([0] * num + [1, 1], A_ub=bounds, b_ub=[0] * (2 * num), A_eq=[[1] * num + [0, 0]], b_eq=[1])
    assert (share / token).max() + (share / attention).max() == pytest.approx(solved.fun, rel=1e-6)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=6))
def test_triangle_fill_makes_contiguous_causal_groups_finish_together(speeds):
    share = triangle_fill(np.array(speeds))
    before = np.cumsum(share) - share
    finish = share * (before + share / 2) / np.array(speeds)
    assert share.sum() == pytest.approx(1)
    np.testing.assert_allclose(finish, finish[0], rtol=1e-6)


def test_capped_shares_keep_their_groups_and_their_caps():
    group_of, speed = np.array([0, 0, 1, 1]), np.array([1.0, 3.0, 1.0, 1.0])
    share = cap_shares(np.array([0.6, 0.4]), group_of, speed, np.array([1.0, 0.3, 1.0, 1.0]))
    np.testing.assert_allclose(share, [0.3, 0.3, 0.2, 0.2])
    assert cap_shares(np.array([0.6, 0.4]), group_of, speed, np.full(4, 0.2)) is None


@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=8).filter(lambda s: sum(s) > 0.1),
    st.integers(1, 500),
    st.integers(1, 7),
)
def test_whole_shares_add_up_in_whole_units(share, total, unit):
    tokens = whole_shares(np.array(share), total, unit)
    assert tokens.sum() == total
    assert (tokens >= 0).all()
    assert sum(each % unit != 0 for each in tokens) <= 1


def test_as_many_classes_as_devices_have_covers():
    """numpy's arrays have 64 dimensions at most, one was made for each class: 65 unlike devices ended in its error."""
    heads = np.repeat([3, 2, 1], [100, 900, 1000])
    covers = minimal_covers(heads, np.ones_like(heads), 8)
    assert len(covers)
    assert ((covers == 0) | (covers == 1)).all()
    assert (covers @ heads >= 8).all()


def test_covers_waste_little():
    """4 H100 at 3, 8 A100 at 1 and 8 heads: the level at which an H100 takes 3 and an A100 1 covers heads twice."""
    heads, count = np.array([3, 1]), np.array([4, 8])
    groups, left = cover(minimal_covers(heads, count, 8), heads, count, 8, thrift=0.0)
    assert len(groups) == 2
    assert sum(int(group @ [3, 1]) for group in groups) + int(left @ [3, 1]) == 20
    tau, groups, left = next(best_levels(np.array([3.0, 1.0]), np.array([4, 8]), 8, keep=1))
    # 20 units of speed for 8 heads at least: a group in 8 / 20 of the time of one head on the slow device at best.
    assert tau / len(groups) >= 8 / 20 - 1e-9
    assert all((group @ np.floor(tau * np.array([3, 1]) + 1e-9)) >= 8 for group in groups)


def test_memory_is_made_to_fit_by_moving_tokens():
    """Two equal devices of unequal memory in one group: the tokens that one cannot hold go to the other."""
    data = {
        "nodes": [{"name": "n", "devices": ["a", "b"], "link": {"bandwidth_gb_per_s": 100}}],
        "devices": {
            "a": {"peak_tflops": 100, "memory_gib": 28, "memory_bandwidth_gb_per_s": 1000},
            "b": {"peak_tflops": 100, "memory_gib": 96, "memory_bandwidth_gb_per_s": 1000},
        },
    }
    cost = make_cost_model("calibrated", cluster_from_dict(data), MODEL, Workload(seq_len=524_288))
    grouping, heads = Grouping(cost.cluster, [[0, 1]]), np.array([8, 8])
    even = np.array([262_144.0, 262_144.0])
    assert (cost.memory_bytes(grouping, even, heads) > cost.capacity_bytes_D).tolist() == [True, False]
    tokens = fit_memory(cost, grouping, even, heads)
    assert tokens is not None
    need = cost.memory_bytes(grouping, tokens, heads)
    assert (need <= cost.capacity_bytes_D).all()
    assert need[0] > 0.98 * cost.capacity_bytes_D[0]  # and no more than has to
    assert tokens.sum() == pytest.approx(524_288)
    uneven = np.array([400_000.0, 124_288.0])
    fitting, none = np.array([100_000.0, 424_288.0]), np.array([524_288.0, 0.0])  # a rank without tokens gets none
    rows = np.stack([none, even, fitting, uneven])
    fitted = fit_rows(cost, grouping, rows, np.stack([heads] * 4))
    assert fitted[0] is None and fitted[1].tolist() == tokens.tolist() and fitted[2].tolist() == fitting.tolist()
    assert fitted[3].tolist() == fit_memory(cost, grouping, uneven, heads).tolist()


def test_places_join_nodes_that_see_the_network_alike():
    rng = random.Random(0)
    for _ in range(30):
        num = rng.randint(2, 7)
        nodes = [{"name": f"n{i}", "device": "big", "link": {"bandwidth_gb_per_s": 100 + i}} for i in range(num)]
        links = [
            {"between": [f"n{a}", f"n{b}"], "bandwidth_gb_per_s": 5}
            for a, b in itertools.combinations(range(num), 2)
            if rng.random() < 0.3
        ]
        cluster = cluster_from_dict(
            {"nodes": nodes, "links": links, "network": {"bandwidth_gb_per_s": 1}, "devices": KINDS}
        )
        place, table = cluster.place, cluster.link_class
        for a, b in itertools.combinations(range(num), 2):
            others = [c for c in range(num) if c not in (a, b)]
            assert (place[a] == place[b]) == all(table[a, c] == table[b, c] for c in others)


def test_problems_of_relabelled_clusters_are_equal():
    data = {
        "nodes": [
            {"name": "x", "devices": ["slow", "big"], "link": {"bandwidth_gb_per_s": 100}},
            {"name": "y", "devices": ["big", "mid"], "link": {"bandwidth_gb_per_s": 25}},
        ],
        "network": {"bandwidth_gb_per_s": 1},
        "devices": KINDS,
    }
    moved = {**data, "nodes": [{**node, "devices": node["devices"][::-1]} for node in data["nodes"][::-1]]}
    work = Workload(seq_len=8192, zero_weights=(1.0, 2.0, 3.0, 4.0))
    problem, rank_of = make_problem(make_cost_model("calibrated", cluster_from_dict(data), MODEL, work))
    again, rank_again = make_problem(
        make_cost_model("calibrated", cluster_from_dict(moved), MODEL, replace(work, zero_weights=(4.0, 3.0, 2.0, 1.0)))
    )
    in_any_order = {"zero_order": None, "zero_cluster": None}  # ranks keep their places in ZeRO's rings
    assert replace(problem.cost.workload, **in_any_order) == replace(again.cost.workload, **in_any_order)
    np.testing.assert_array_equal(problem.speed, again.speed)
    np.testing.assert_array_equal(rank_of, 3 - rank_again)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_problem_has_memory_and_times_of_the_job_s_own_ranks(stage):
    """Canonical ranks are in another order; ZeRO's rings and owners are not."""
    rng = random.Random(stage)
    for _ in range(20):
        case = random_case(rng, rng.randint(3, 5), "calibrated")
        cost = make_cost_model("calibrated", case.cluster, case.model, replace(case.workload, zero_stage=stage))
        problem, rank_of = make_problem(cost)
        groups = [np.array([i]) for i in range(len(rank_of))]
        tokens, heads = (
            np.full(len(rank_of), problem.seq_len / len(rank_of)),
            np.full(len(rank_of), cost.model.num_heads),
        )
        schedule = schedule_of(problem, Assignment(0.0, tuple(groups), tokens, heads), rank_of)
        _, tokens_D, _ = cost.arrays(schedule)
        found = cost.predict(schedule)
        need = problem.cost.memory_bytes(problem.grouping(groups), tokens_D[rank_of].astype(float), heads)
        np.testing.assert_allclose(need, np.array(found.memory_bytes)[rank_of], rtol=1e-6)
        assert problem.cost.floor_s == cost.floor_s
        assert problem.cost.outside_blocks_s(tokens_D[rank_of]) == pytest.approx(cost.outside_blocks_s(tokens_D))
