"""Whether a training fits: stacks against cards, the longest sequence, advice, and other clusters."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from ds_hetero.cli import main
from ds_hetero.cluster import cluster_from_dict
from ds_hetero.cluster.notation import read_notation
from ds_hetero.cost import Workload, make_cost_model
from ds_hetero.cost.terms.model_states import state_bytes, static_bytes
from ds_hetero.cost.workload import Buffers
from ds_hetero.errors import ClusterError, PlanError
from ds_hetero.models import load_model
from ds_hetero.planner.memory import advise, best_schedule, longest_sequence, read_what_if, stacks
from ds_hetero.planner.planning import plan

GIB = 2**30
_AS_A_JOB = Workload(seq_len=1, zero_stage=2, activation_checkpointing=False)  # without a word of buffers


def cost_of(gpus="5090,3090x2", model="llama-3.2-1b", network=None, **workload):
    cluster = cluster_from_dict(read_notation(gpus, network).content)
    training = {"seq_len": 32768, "buffers": Buffers(), **workload}
    return make_cost_model("calibrated", cluster, load_model(model), Workload(**training))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_stack_is_what_the_cost_model_says_by_part(stage):
    cost = cost_of(zero_stage=stage, zero_weights=(2.0, 1.0, 1.0))
    fitted = best_schedule(cost, "ring")
    for stack, needed, capacity in zip(
        stacks(cost, fitted.schedule), fitted.prediction.memory_bytes, cost.capacity_bytes_D, strict=True
    ):
        assert stack.total - stack.reserve == pytest.approx(needed, rel=1e-9)
        assert stack.card - stack.reserve == capacity
        assert stack.free == pytest.approx(capacity - needed, abs=1)
    states = state_bytes(cost.model, cost.workload, cost.cluster)
    assert np.allclose(sum(states.values()), static_bytes(cost.model, cost.workload, cost.cluster), rtol=1e-12)


def test_one_rank_by_hand():
    """ZeRO 0 in bf16, the last layer of the backward: 2 bytes of weights, 12 of optimizer state and 2 of gradients per
    parameter; of those, what is more than the activations that have gone."""
    cost = cost_of("H100", zero_stage=0, seq_len=4096)
    (stack,) = stacks(cost, best_schedule(cost).schedule)
    model = cost.model
    count, given = model.num_parameters, 4096 * 2 * model.hidden_size
    kept = model.num_layers * given
    assert (stack.weights, stack.optimizer_state, stack.gradients) == (2 * count, 12 * count, 2 * count - kept + given)
    # A layer's backward: norms, the gated MLP; q, k, v, output, log-sum-exp; gradients of the MLP and of one matrix.
    norms, wide = 2 * 8 * model.hidden_size, 2 * 4 * model.mlp_size
    attention = 2 * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads) + 4 * model.num_heads
    made = 2 * (2 * model.mlp_size + model.hidden_size)
    matrix = 2 * model.hidden_size * model.mlp_size
    assert (stack.activations, stack.logits) == (kept + 4096 * (norms + wide + attention + made) + matrix, 0)
    assert stack.card == 80 * GIB
    assert stack.reserve == pytest.approx(80 * GIB - 78.5 * GIB / 1.06)  # 1.5 GiB, and 6 % between tensors


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeeds_buffers_are_counted_by_stage(stage):
    """In bf16 the bucket takes 10^9 bytes, which ZeRO-3 holds at the loss too."""
    cost = cost_of("3090x2", zero_stage=stage, tiled_logits=False)
    moments = cost.memory_phases(*cost.arrays(best_schedule(cost, "ring").schedule))
    assert moments["mlp"].bucket == (10**9 if stage else 0)
    assert moments["loss"].bucket == (10**9 if stage == 3 else 0)


@pytest.mark.parametrize(
    ("model", "at_loss"),
    [
        ("llama-3.2-1b", 2 * 1_235_814_400),  # beyond 10^9 parameters only the embedding would be left
        ("llama-3.1-8b", 2 * 10**9),
        ("llama-3.1-70b", 2 * 128_256 * 8192),  # the head, which is larger
    ],
)
def test_zero_3_gathers_ahead_to_its_limit(model, at_loss):
    cost = cost_of("H100x2", model, zero_stage=3)
    moments = cost.memory_phases(*cost.arrays(best_schedule(cost, "ring").schedule))
    assert moments["loss"].gathered == at_loss
    assert moments["forward"].gathered - moments["mlp"].gathered == 2 * 5 * 10**7  # a buffer with what has arrived


def test_a_tiled_loss_holds_the_heads_gradient_of_the_tiles_before_and_makes_another():
    cost = cost_of("H100", zero_stage=1, seq_len=8192)
    moments = cost.memory_phases(*cost.arrays(best_schedule(cost).schedule))
    head, tokens = 2 * cost.model.vocab_size * cost.model.hidden_size, 1024
    final_norm = 8192 * cost.model.hidden_size * (4 + 2 + 2 + 2)  # fp32, normalized, output, gradients of the tiles
    assert (moments["loss"].gradients, moments["head"].gradients) == (head, 2 * head)
    assert moments["loss"].logits == tokens * cost.model.vocab_size * (2 + 2 + 4) + final_norm
    assert moments["head"].logits == tokens * cost.model.vocab_size * 2 + final_norm


def test_gradients_of_earlier_micro_batches_stay_beside_the_activations():
    def gradients(**workload):
        cost = cost_of("3090x2", zero_stage=1, activation_checkpointing=False, **workload)
        return [stack.gradients for stack in stacks(cost, best_schedule(cost, "ring").schedule)]

    model = load_model("llama-3.2-1b")
    head = 2 * model.vocab_size * model.hidden_size  # of the tiles of the loss before the last
    assert gradients() == [head, head]
    assert gradients(micro_batches=2) == [2 * model.num_parameters + head] * 2


def test_a_rank_that_owns_the_last_elements_holds_zero_2s_gradients_beside_all_activations():
    cost = cost_of("3090x2", zero_stage=2, activation_checkpointing=False, seq_len=8192)
    first, last = stacks(cost, best_schedule(cost, "ring").schedule)
    half = cost.model.num_parameters  # 2 bytes of each of its half
    assert last.gradients == half
    assert first.gradients == 2 * cost.model.vocab_size * cost.model.hidden_size  # the head's: it peaks at the loss
    later = cost_of("3090x2", zero_stage=2, activation_checkpointing=False, seq_len=8192, zero_weights=(3.0, 1.0))
    assert [each.gradients for each in stacks(later, best_schedule(later, "ring").schedule)][1] == half / 2


def test_the_mlps_backward_and_the_rings_buffers_are_not_there_at_once():
    cost = cost_of("3090x2", zero_stage=1, seq_len=65536)
    parts = cost.memory_parts(*cost.arrays(best_schedule(cost, "ring").schedule))
    assert parts.layer.min() > 0
    assert parts.ring_buffers.max() == parts.exchange_buffers.max() == 0


def test_fit_counts_what_the_planner_counts():
    fitted = best_schedule(cost_of(zero_stage=2, activation_checkpointing=False, seq_len=4096), "ring")
    cost = fitted.cost
    planned = make_cost_model("calibrated", cost.cluster, cost.model, replace(_AS_A_JOB, seq_len=4096))
    assert planned.predict(fitted.schedule).memory_bytes == fitted.prediction.memory_bytes


@pytest.mark.parametrize(
    ("gpus", "workload"),
    [("5090,3090x2", {}), ("3090", {"zero_stage": 1}), ("4090,3060", {"tiled_logits": False}), ("8xA100", {})],
)
def test_the_longest_sequence_fits_and_a_longer_one_does_not(gpus, workload):
    cost = cost_of(gpus, **workload)
    longest = longest_sequence(cost)

    def planned(seq_len):
        return plan(cost.cluster, cost.model, replace(cost.workload, seq_len=seq_len))

    if longest == 0:
        with pytest.raises(PlanError):
            planned(cost.cluster.num_ranks)
        return
    assert planned(longest).prediction.feasible
    with pytest.raises(PlanError):
        planned(int(longest * 1.02) + 256)


def test_the_longest_sequence_of_a_strategy_is_its_own():
    assert longest_sequence(cost_of("80gb a100, a100 sxm 40gb"), "ring") < longest_sequence(
        cost_of("a100,a100 sxm 40gb")
    )


def test_of_what_does_not_fit_the_schedule_is_shown_that_wants_the_least_larger_cards():
    cost = cost_of(model="llama-3.1-8b")
    fitted, even = best_schedule(cost), best_schedule(cost, "ring")
    assert not fitted.fits and "too much" in fitted.prediction.reason

    def times(prediction):
        return max(np.divide(prediction.memory_bytes, cost.capacity_bytes_D))

    assert 1 < times(fitted.prediction) < times(even.prediction)


def test_a_model_that_is_far_too_large_has_a_stack_all_the_same(capsys):
    code, printed = _run(capsys, "--gpus", "3060", "--model", "llama-3.1-405b", "--seq-len", 1024, "--json")
    report = json.loads(printed.out)
    assert code == 1 and not report["fits"] and report["longest_sequence"] == 0
    assert report["ranks"][0]["total"] > 100 * report["ranks"][0]["card"]
    assert not any(each["fits"] for each in report["advice"])


def test_advice_is_tried_alone_first_and_the_cheapest_comes_first():
    cost = cost_of(tiled_logits=False, model="llama-3.2-3b")
    advice = advise(best_schedule(cost), "plan")
    fitting = [each for each in advice if each.fits]
    assert fitting and all(len(each.changes) == 1 for each in fitting)
    assert fitting[-1].name == "QLoRA"  # which trains other weights, so it comes last whatever it takes
    times = [each.after.iteration_s for each in fitting if not each.changes[0].trains_less]
    assert times == sorted(times) and advice[: len(fitting)] == tuple(fitting)
    for each in fitting:
        assert plan(cost.cluster, cost.model, each.after.cost.workload).prediction.feasible
        assert each.missing_bytes <= 0


def test_changes_are_put_together_where_none_is_enough_and_none_of_them_is_needless():
    cost = cost_of("3090x2", "llama-3.2-3b", zero_stage=1, activation_checkpointing=False, tiled_logits=False)
    advice = advise(best_schedule(cost), "plan")
    together = advice[0]
    assert together.fits and len(together.changes) > 1 and "optimizer offload" in together.name
    assert not any(each.fits for each in advice[1:])
    assert [change.name for change in together.changes if change.name.startswith("ZeRO stage")][1:] == []


def test_offloading_the_optimizer_costs_transfers_and_the_hosts_adam():
    """Gradients and parameters of 2 bytes over PCIe 4 x 16; Adam reads and writes 28 bytes a parameter at 20 GB/s."""
    cost = cost_of("3090", "llama-3.2-3b", zero_stage=2, seq_len=4096)
    (offload,) = (each for each in advise(best_schedule(cost), "plan") if each.name == "optimizer offload")
    count = cost.model.num_parameters
    step_s = offload.after.prediction.parts_s["optimizer_s"]
    assert step_s == pytest.approx(count * 4 / 32e9 + count * 28 / 20e9)


def test_a_uniform_schedule_is_advised_to_be_planned_and_weights_follow_memory():
    cost = cost_of("a100, a100 sxm 40gb", "llama-3.2-3b", seq_len=131072, zero_stage=2)
    advice = {each.name: each for each in advise(best_schedule(cost, "ring"), "ring")}
    assert "planned tokens and heads" in advice
    weights = advice["weights by memory"].after.cost.workload.zero_weights
    assert weights is None or weights[0] > weights[1]


def test_offloading_activations_costs_two_copies_of_every_layers_input():
    """2 bytes of 3,072 numbers per token and layer, over PCIe 4 x 16; all but one layer's leave the card."""
    cost = cost_of("3090", "llama-3.2-3b", zero_stage=2, seq_len=65536)
    (offload,) = (each for each in advise(best_schedule(cost), "plan") if each.name == "activation offload")
    of_layer = 65536 * 2 * cost.model.hidden_size
    before, after = best_schedule(cost), offload.after
    added_s = offload.after.iteration_s - before.prediction.iteration_s
    assert added_s == pytest.approx(2 * cost.model.num_layers * of_layer / 32e9, rel=1e-6)
    parts = [each.cost.memory_phases(*each.cost.arrays(each.schedule))["loss"] for each in (before, after)]
    saved = float((parts[0].activations - parts[1].activations)[0])
    assert saved == (cost.model.num_layers - 1) * of_layer


@pytest.mark.parametrize(
    ("what", "ranks", "gb_per_s"),
    [("add=3060", 5, 25), ("remove=0", 3, 25), ("network=80Gbit/s", 4, 10), ("add=2xA40", 6, 25)],
)
def test_what_if(what, ranks, gb_per_s):
    cluster = cluster_from_dict(read_notation("2x5090 | 2x3090", "25").content)
    changed = read_what_if(what, cluster)
    assert changed.num_ranks == ranks and changed.network.bytes_per_s == gb_per_s * 1e9
    if what == "add=3060":
        assert changed.devices[-1].name == "RTX-3060-12GB" and len(changed.nodes) == 2
    if what == "remove=0":
        assert [device.name for device in changed.devices] == ["RTX-5090", "RTX-3090", "RTX-3090"]


@pytest.mark.parametrize(
    ("gpus", "network", "what", "changed"),
    [
        ("2x4090 | 2x3090", "1.25", "network=10", ("2x4090 | 2x3090", "10")),
        ("2x4090 | 2x3090", "10", "network=1.25", ("2x4090 | 2x3090", "1.25")),
        ("4090 | 3090", "1.25", "network=80Gbit/s", ("4090 | 3090", "10")),
        ("2x4090 | 3090", "1.25", "add=3090", ("2x4090 | 2x3090", "1.25")),
        ("2x4090 | 2x3090", "1.25", "add=3090", ("2x4090 | 3x3090", "1.25")),
        ("2x4090 | 2x3090", "1.25", "remove=0", ("4090 | 2x3090", "1.25")),
        ("2x4090 | 3x3090", "1.25", "remove=4", ("2x4090 | 2x3090", "1.25")),
        ("5090,3090x2", None, "add=3090", ("5090,3090,3090,3090", None)),
        ("5090,3090x2", None, "remove=0", ("3090x2", None)),
    ],
)
def test_a_what_if_predicts_what_the_same_cluster_described_directly_predicts(gpus, network, what, changed):
    asked = read_what_if(what, cluster_from_dict(read_notation(gpus, network).content))
    described = cluster_from_dict(read_notation(*changed).content)
    times = []
    for cluster in (asked, described):
        cost = make_cost_model("calibrated", cluster, load_model("llama-3.2-1b"), Workload(seq_len=8192))
        times.append(best_schedule(cost).prediction.iteration_s)
    assert times[0] == pytest.approx(times[1], rel=1e-9)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("more=3090", "--what-if is add=CARDS, remove=RANK or network=GB/s"),
        ("add", "--what-if is add=CARDS"),
        ("add=2070", "nearest names"),
        ("add=3090|3090", "adds cards to the last node"),
        ("remove=3", "got '3'. Give a rank from 0 to 2"),
        ("remove=-1", "Give a rank from 0 to 2"),
        ("network=10", "the cluster has one"),
    ],
)
def test_a_change_that_is_none_is_refused(what, message):
    with pytest.raises(ClusterError, match=message):
        read_what_if(what, cluster_from_dict(read_notation("5090,3090x2").content))


def _run(capsys, *arguments):
    try:
        code = main(["fit", *map(str, arguments)])
    except SystemExit as end:
        code = end.code
    return code, capsys.readouterr()


def test_the_command_ends_with_0_where_it_fits_1_where_not_and_2_on_bad_input(capsys):
    job = ("--gpus", "5090,3090", "--model", "llama-3.2-1b", "--tiled-loss")
    code, printed = _run(capsys, *job, "--seq-len", 8192, "--json", "--what-if", "add=3090", "--what-if", "remove=1")
    report = json.loads(printed.out)
    assert code == 0 and report["fits"] and not report["advice"]
    assert [stack["rank"] for stack in report["ranks"]] == [0, 1]
    assert all(stack["free"] > 0 for stack in report["ranks"])
    more, fewer = report["what_if"]
    assert more["longest_sequence"] > report["longest_sequence"] > fewer["longest_sequence"]
    code, printed = _run(capsys, *job, "--seq-len", report["longest_sequence"] * 2)
    assert code == 1 and "does not fit" in printed.out and "What would make it fit" in printed.out
    code, printed = _run(capsys, *job, "--seq-len", 8192, "--what-if", "add=2070")
    assert code == 2 and not printed.out and "nearest names" in printed.err


def test_what_if_shows_other_clusters_after_todays_remedy_or_says_why_they_do_not_fit(capsys):
    job = ("--gpus", "5090,3090x2", "--model", "llama-3.2-3b", "--seq-len", "64K")
    code, printed = _run(capsys, *job, "--what-if", "add=3090", "--what-if", "remove=1")
    rows = [" ".join(line.split()) for line in printed.out.splitlines()]
    assert code == 1 and "│ today │ with optimizer offload │ 74,752 │" in " ".join(rows)
    assert any(row.startswith("│ add=3090 │ with optimizer offload │") for row in rows)
    assert "│ remove=1 │ no │ - │ - │ - │" in rows
    assert any(row.startswith("remove=1 does not fit: with optimizer offload, rank ") for row in rows)
    assert not printed.err  # the progress bar is for a terminal


@pytest.mark.slow
def test_a_million_tokens_take_tiles_offload_and_uneven_shares(capsys):
    """The commands of docs/before-you-buy.md that end with an error."""
    job = ("--gpus", "4xA100-80GB | 4xL40S", "--network", 25, "--model", "llama-3.1-8b", "--seq-len", 1048576)
    code, printed = _run(capsys, *job, "--json")
    advice = json.loads(printed.out)["advice"][0]
    assert code == 1 and advice["fits"]
    assert advice["changes"] == ["activation offload", "tiled loss"]
    assert advice["iteration_s"] / 60 == pytest.approx(15.9, abs=0.06)
