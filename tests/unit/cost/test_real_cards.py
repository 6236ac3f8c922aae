"""Predictions against public measurements (`benchmarks.real_cards`), and the parts that these made necessary."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from random import Random

import pytest

from benchmarks.real_cards.__main__ import main
from benchmarks.real_cards.compare import compare
from benchmarks.real_cards.fit import PARTS, fit
from benchmarks.real_cards.points import COLUMNS, MEASUREMENTS, read_rows
from ds_hetero.cluster.attention_rates import with_attention
from ds_hetero.cluster.catalogue import CATALOGUE
from ds_hetero.cluster.file_values import cluster_to_dict
from ds_hetero.cluster.files import cluster_from_dict
from ds_hetero.cluster.remarks import confidence
from ds_hetero.cluster.step_errors import UNMEASURED_ERROR
from ds_hetero.cost import Workload, make_cost_model
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.errors import ClusterError, PlanError
from ds_hetero.models import load_model
from ds_hetero.models.trained_weights import Training, adapter_parameters, adapter_widths, read_training
from ds_hetero.planner import plan
from ds_hetero.planner.memory import advise, best_schedule, longest_sequence, stacks
from ds_hetero.values.baselines import ulysses

LLAMA = load_model("llama-3.1-8b")


def one(card="A100-SXM-80GB", **work):
    cluster = cluster_from_dict({"nodes": [{"name": "n", "device": card, "count": 1}]})
    cost = make_cost_model("calibrated", cluster, LLAMA, Workload(**{"seq_len": 4096, "zero_stage": 0, **work}))
    return cost.predict(ulysses(1, LLAMA.num_heads, LLAMA.num_kv_heads))


def test_targets_are_met_on_all_points_of_the_repository(capsys):
    code = main(["--json"])
    outcome = json.loads(capsys.readouterr().out)
    assert code == 0 and not outcome["missed"]
    assert outcome["errors"]["time"]["points"] >= 200
    assert outcome["inside_range"] >= 0.8


def test_another_file_of_the_same_columns_is_judged(tmp_path, capsys):
    with MEASUREMENTS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    some = [row for row in rows if row["kind"] == "attention"][:3]
    step = next(row for row in rows if row["kind"] == "time")
    spoilt = [{"gpu": "H900"}, {"seq_len": ""}, {"heads": "many"}, {"tokens_per_s_per_gpu": "0"}, {"layers": ""}]
    path = tmp_path / "points.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(some[0]))
        writer.writeheader()
        writer.writerows([*some, *({**step, **cells} for cells in spoilt)])
    main(["--measurements", str(path), "--json"])
    outcome = json.loads(capsys.readouterr().out)
    errors = outcome["errors"]
    assert sum(outcome["refused"].values()) == len(spoilt) and set(errors) == {"attention"}
    assert errors["attention"]["points"] == 3 and set(errors["attention"]) == {"points", "median", "p90", "bias"}


def test_a_file_that_is_torn_anywhere_is_judged_where_it_can_be_and_the_rest_is_counted():
    """Unknown cards, kernels and kinds, empty and unreadable cells, columns that lack: nothing ends the command."""
    with MEASUREMENTS.open(encoding="utf-8", newline="") as file:
        rows = read_rows(file)
    random, torn = Random(7), []
    for row in random.sample(rows, 60):
        columns = random.sample(COLUMNS, 3)
        torn.append(row | {column: random.choice(("", "-", "0", "-1", "1e30", "nan", "x" * 50)) for column in columns})
    done, refused = compare(torn)
    assert len({each.row["id"] for each in done} | {each.row["id"] for each in refused}) == len({r["id"] for r in torn})
    assert all(each.predicted > 0 and each.measured > 0 for each in done) and all(each.reason for each in refused)
    assert read_rows(["id,kind,gpu", "1,time,RTX-9999", "2", ""])[0]["peft"] == "full"
    assert compare(read_rows(["id,kind,gpu", "1,attention,RTX-9999", "2"]))[0] == []


def test_constants_of_half_of_the_attention_points_hold_for_the_other_half():
    with MEASUREMENTS.open(encoding="utf-8", newline="") as file:
        rows = [row for row in read_rows(file) if row["kind"] == "attention"]
    halves = ([row for row in rows if PARTS[name](row)] for name in ("one half", "the other half"))
    own, other = halves
    errors = sorted(abs(each.error) for each in compare(other, fit(own))[0])
    assert errors[len(errors) // 2] < 0.06


def test_hopper_is_planned_with_the_kernel_that_an_installation_has_not_with_its_fastest():
    entry = CATALOGUE["H100-SXM-80GB"]
    assert entry.device.attention_kernel == "flash_attn_2"
    faster = with_attention(entry.device, "flash_attn_3", entry.attention)
    assert faster.efficiency.attention_forward > 1.7 * entry.device.efficiency.attention_forward
    with pytest.raises(ClusterError, match="flash_attn_2, torch, triton"):
        with_attention(entry.device, "flash_attn_4", entry.attention)


def test_every_rate_has_a_source():
    for entry in CATALOGUE.values():
        assert all(rate.source for rate in entry.attention.values())


@pytest.mark.parametrize(("width", "share"), [(128, 1.0), (256, 1.0), (64, 0.86), (96, 0.94), (80, 0.94 * 80 / 96)])
def test_narrow_heads_reach_less(width, share):
    device = CATALOGUE["A100-SXM-80GB"].device
    full = device.efficiency.attention_forward
    assert device.attention_share("forward", width) == pytest.approx(share * full, rel=0.01)


def test_a_card_without_measurements_says_so_and_has_a_wider_range():
    known, unknown = CATALOGUE["A100-SXM-80GB"].device, CATALOGUE["RTX-4070"].device
    assert unknown.error == UNMEASURED_ERROR > 2 * known.error
    assert "no measurement of this card: RTX-4070" in confidence([known, unknown])
    few = CATALOGUE["RTX-3090"].device
    assert known.error < few.error < unknown.error
    assert confidence([few]).endswith("few measurements of this card: RTX-3090 (10 steps)")
    found = one()
    least, most = found.range_s
    assert least < found.iteration_s < most and most / found.iteration_s == pytest.approx(1 + known.error)


def test_a_card_of_three_numbers_keeps_a_reserve():
    numbers = {"peak_tflops": 100, "memory_gib": 12, "memory_bandwidth_gb_per_s": 900}
    link = {"bandwidth_gb_per_s": 10}
    nodes = [{"name": "n", "device": "mine", "count": 1, "link": link}]
    (device,) = cluster_from_dict({"nodes": nodes, "devices": {"mine": numbers}}).devices
    assert device.reserved_bytes == 1.5 * 2**30


def test_offloading_the_optimizer_takes_time_in_every_prediction():
    onto_host = one(zero_stage=1, offload_optimizer=True)
    assert onto_host.iteration_s > one(zero_stage=1).iteration_s + LLAMA.num_parameters * 28 / 20e9


def test_offloads_end_where_the_memory_of_the_machine_does():
    """8.03e9 parameters at 12 bytes of state and 2 of gradients are 104.7 GiB; 68 % of 160 GiB are 108.8."""
    nodes = [{"name": "n", "device": "A100-SXM-80GB", "count": 4}]

    def on_host(**node):
        cluster = cluster_from_dict({"nodes": [{**nodes[0], **node}]})
        work = Workload(seq_len=4096, offload_optimizer=True)
        return make_cost_model("calibrated", cluster, LLAMA, work)

    schedule = ulysses(4, LLAMA.num_heads, LLAMA.num_kv_heads)
    unknown, enough, few = (on_host(**node).predict(schedule) for node in ({}, gib(160), gib(150)))
    assert unknown.host_bytes == (pytest.approx(14 * LLAMA.num_parameters, rel=1e-6),)
    assert unknown.feasible and enough.feasible and not few.feasible
    assert "of whose 150.0 GiB 68 % are free" in few.reason
    assert longest_sequence(on_host(**gib(160))) > 4096 and longest_sequence(on_host(**gib(150))) == 0
    assert cluster_from_dict(cluster_to_dict(on_host(**gib(150)).cluster)).nodes[0].host_memory_bytes == 150 * 2**30


def test_offloads_free_nothing_of_a_card_whose_memory_is_the_machines():
    """12 bytes of state and 2 of gradients a parameter stay on a GB10, and leave the 4090 beside it."""
    nodes = [{"name": "spark", "device": "GB10", "count": 1}, {"name": "home", "device": "RTX-4090", "count": 1}]
    cluster = cluster_from_dict({"nodes": nodes, "network": {"bandwidth_gb_per_s": 25}})
    schedule = ulysses(2, LLAMA.num_heads, LLAMA.num_kv_heads)

    def cost_of(seq_len=8192, **work):
        return make_cost_model("calibrated", cluster, LLAMA, Workload(seq_len=seq_len, **work))

    def at(*args, **work):
        return cost_of(*args, **work).predict(schedule)

    plain, optimizer = at(), at(offload_optimizer=True)
    half = LLAMA.num_parameters / 2
    stays, goes = (stacks(cost_of(offload_optimizer=off), schedule)[0].optimizer_state for off in (False, True))
    assert goes - stays == pytest.approx(2 * half, rel=1e-6)
    assert optimizer.memory_bytes[0] > plain.memory_bytes[0]
    assert plain.memory_bytes[1] - optimizer.memory_bytes[1] > 11 * half
    assert optimizer.host_bytes == (0, pytest.approx(14 * half, rel=1e-6))
    held, moved = at(2**17), at(2**17, offload_activations=True)
    assert moved.memory_bytes[0] >= held.memory_bytes[0] and moved.memory_bytes[1] < held.memory_bytes[1]
    assert cluster_from_dict(cluster_to_dict(cluster)).devices[0].shares_host_memory


@pytest.mark.parametrize("cost_model", ["calibrated", "published"])
def test_full_training_of_32b_fits_on_two_sparks_with_no_offload(cost_model):
    node = {"name": "spark", "device": "GB10", "count": 1, "repeat": 2, "host_memory_gib": 1000}
    cluster = cluster_from_dict({"nodes": [node], "network": {"bandwidth_gb_per_s": 25}})
    model, offloaded = load_model("qwen3-32b"), Workload(seq_len=8192, tiled_mlp=True, offload_optimizer=True)
    with pytest.raises(PlanError, match="offloads free none of it, the memory of GB10 is the machine's") as refusal:
        plan(cluster, model, offloaded, cost_model=cost_model)
    assert "optimizer offload" not in str(refusal.value)
    cost = make_cost_model(cost_model, cluster, model, replace(offloaded, offload_optimizer=False))
    advice = advise(best_schedule(cost), "plan")
    assert advice and not any("offload" in each.name for each in advice)


def test_stages_of_pipelines_keep_offloaded_checkpoints_where_the_memory_is_the_machines():
    costs = [
        CalibratedStageCosts(
            cluster_from_dict({"nodes": [{"name": "n", "device": card, "count": 1}]}),
            LLAMA,
            Workload(seq_len=8192, offload_activations=offloaded),
        )
        for card in ("GB10", "RTX-4090")
        for offloaded in (False, True)
    ]
    kept = [each.stage(0, 1, "one", 1, 1).memory.peak_bytes(8, True, False, 4) for each in costs]
    assert kept[0] == kept[1] and kept[3] < kept[2]


def gib(memory):
    return {"host_memory_gib": memory}


def test_short_sequences_take_the_hosts_time_and_no_less():
    short, shorter = one(seq_len=64, adapter_rank=16), one(seq_len=32, adapter_rank=16)
    assert short.block_s == shorter.block_s
    assert "host" in short.bottleneck.text


# --- LoRA and QLoRA


@pytest.mark.parametrize(
    ("text", "training"),
    [("full", Training()), ("lora", Training(16)), ("lora:64", Training(64)), ("QLoRA:8", Training(8, "nf4"))],
)
def test_what_is_trained_is_read(text, training):
    assert read_training(text) == training


@pytest.mark.parametrize("text", ["full:8", "lora:0", "lora:x", "dora", ""])
def test_what_is_no_way_to_train_is_refused(text):
    with pytest.raises(PlanError, match="--train"):
        read_training(text)


def test_adapters_stand_beside_all_products():
    """Llama 3.1 8B: q, o 4096 x 4096; k, v 4096 x 1024; gate, up 4096 x 14336; down 14336 x 4096."""
    into = 3 * 4096 + 4096 + 2 * 4096 + 14336
    out = 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096
    assert adapter_widths(LLAMA) == (into, out)
    assert (
        LLAMA.num_layers * adapter_parameters(LLAMA, 16) == 32 * 16 * (into + out) == 41_943_040
    )  # peft says the same


def test_lora_saves_state_and_a_third_of_the_products():
    full, lora = one(activation_checkpointing=False), one(activation_checkpointing=False, adapter_rank=16)
    saved = full.memory_bytes[0] - lora.memory_bytes[0]
    assert saved > 11.5 * LLAMA.num_parameters  # 12 of optimizer state, less the adapters'
    assert 0.6 < lora.iteration_s / full.iteration_s < 0.95


def test_qlora_holds_weights_in_four_bits_and_pays_with_their_restoration():
    lora, qlora = one(adapter_rank=16), one(adapter_rank=16, quantization="nf4")
    in_layers = LLAMA.num_layers * LLAMA.layer_parameters
    assert lora.memory_bytes[0] - qlora.memory_bytes[0] == pytest.approx(in_layers * (2 - 0.516), rel=0.01)
    assert qlora.iteration_s > lora.iteration_s
    with pytest.raises(PlanError, match="adapter_rank"):
        Workload(seq_len=8, quantization="nf4")
