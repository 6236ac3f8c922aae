"""Pipelines of unequal stages behind an engine of DeepSpeed's train as one process does."""

import itertools
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.proof.chance import random_parts
from ds_hetero.errors import ModelError
from ds_hetero.frameworks.transformers.stages import check_stages, impossible_stage_kinds
from ds_hetero.gradient_sync.shards import local_tensor
from ds_hetero.values.plans import read_plan
from tests.integration.tiny import VOCAB, checkpoint_activations, compute_in, llama
from tests.support import run_deepspeed, run_ranks

LAYERS, HEADS, KV_HEADS = 4, 4, 2


def sequence_stage(ranks, layers, tokens, heads, layout="zigzag", kv_heads=KV_HEADS):
    schedule = {"version": 1, "num_heads": HEADS, "num_kv_heads": kv_heads, "layout": layout,
                "groups": [{"ranks": list(ranks), "tokens": list(tokens), "heads": list(heads)}]}  # fmt: skip
    return {"ranks": list(ranks), "layers": list(layers), "inner": "sequence", "schedule": schedule}


def grouped_stage(layers, size, groups, kv_heads=KV_HEADS, layout="zigzag"):
    """A stage of tensor groups of ``size`` ranks; of each all-to-all group its first ranks, tokens and heads."""
    groups = [{"ranks": ranks, "tokens": tokens, "heads": heads} for ranks, tokens, heads in groups]
    firsts = sorted(rank for group in groups for rank in group["ranks"])
    schedule = {"version": 1, "num_heads": HEADS, "num_kv_heads": kv_heads, "layout": layout, "groups": groups}
    ranks = [first + place for first in firsts for place in range(size)]
    return {"ranks": ranks, "layers": layers, "inner": "sequence", "tensor_size": size, "schedule": schedule}


def plan_of(*pipelines, kv_heads=KV_HEADS):
    model = {"num_layers": LAYERS, "num_heads": HEADS, "num_kv_heads": kv_heads}
    return {"version": 2, "model": model, "pipelines": list(pipelines)}


def pipeline(size, count, *stages):
    return {"micro_batch_size": size, "micro_batches": count, "stages": list(stages)}


PLANS = {
    "tensor stage and single stages": plan_of(
        pipeline(2, 3, {"ranks": [0, 1], "layers": [0, 3], "inner": "tensor"}, {"ranks": [2], "layers": [3, 4]}),
        pipeline(1, 2, {"ranks": [3], "layers": [0, 1]}, {"ranks": [4], "layers": [1, 4]}),
    ),
    "sequence stage and single stages": plan_of(
        pipeline(2, 3, sequence_stage([0, 1], [0, 3], [3, 1], [3, 1]), {"ranks": [2], "layers": [3, 4]}),
        pipeline(1, 2, {"ranks": [3], "layers": [0, 1]}, {"ranks": [4], "layers": [1, 4]}),
    ),
    "tensor to sequence to single": plan_of(
        pipeline(
            1, 4, {"ranks": [3, 4], "layers": [0, 1], "inner": "tensor"},
            sequence_stage([0, 1], [1, 3], [0, 1], [4, 0]), {"ranks": [2], "layers": [3, 4], "in_flight": 1},
        ),
    ),
    "tensor at both ends": plan_of(
        pipeline(
            2, 2, {"ranks": [0, 1], "layers": [0, 3], "inner": "tensor"},
            {"ranks": [3, 2], "layers": [3, 4], "inner": "tensor"},
        ),
        pipeline(1, 2, {"ranks": [4], "layers": [0, 4]}),
    ),
    "sequence at the end, an idle rank": plan_of(
        pipeline(2, 2, {"ranks": [0], "layers": [0, 2]}, sequence_stage([1, 2], [2, 4], [1, 2], [4, 0], "contiguous")),
        pipeline(1, 3, {"ranks": [4], "layers": [0, 4]}),
    ),
    "tensor groups and a single stage": plan_of(
        pipeline(2, 2, grouped_stage([0, 4], 2, [([0, 2], [3, 1], [2, 2])])),
        pipeline(1, 3, {"ranks": [4], "layers": [0, 4]}),
    ),
}  # fmt: skip


def batches(plan, steps, packed, padded=False):
    """Global batches; labels are missing here and there. Padded rows end, or begin, with up to a third of padding."""
    generator = torch.Generator().manual_seed(3)
    samples = sum(p["micro_batch_size"] * p["micro_batches"] for p in plan["pipelines"])
    made = []
    for step in range(steps):
        length = 24 + 5 * step
        ids = torch.randint(0, VOCAB, (samples, length), generator=generator)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
        batch = {"input_ids": ids, "labels": labels}
        if packed:
            cuts = [0, 7, 16, length]
            positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(cuts)])
            batch["position_ids"] = positions.expand(samples, length).contiguous()
            labels[:, cuts[1:-1]] = -100
        if padded:
            real = length - torch.randint(0, length // 3, (samples, 1), generator=generator)
            places = torch.arange(length).expand(samples, length)
            batch["attention_mask"] = (places < real if step % 2 else places >= length - real).long()
            labels.masked_fill_(batch["attention_mask"] == 0, -100)
        made.append(batch)
    return made


def train_alone(model, steps, optimizer, clip):
    losses, norms = [], []
    for batch in steps:
        logits = model(**{name: entry for name, entry in batch.items() if name != "labels"}, use_cache=False).logits
        shifted = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=-100)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.1)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trains_as_one_process(rank, plan, changes, packed=False, lora=False):
    import ds_hetero

    compute_in(torch.float64)
    return errors_against_one_process(ds_hetero.register(), plan, changes, packed, lora)


def random_plans_train_as_one_process(rank, world_size, seeds, dtype=torch.float64):
    import ds_hetero

    compute_in(dtype)
    optimizer = adamw if dtype is torch.float64 else sgd
    handle = ds_hetero.register()
    worst = {}
    for seed in seeds:
        rng = random.Random(seed)
        plan, changes = random_plan(rng, world_size), {"tie_word_embeddings": rng.random() < 0.4}
        lora = rng.random() < 0.3
        changes["num_key_value_heads"] = HEADS
        packed = rng.random() < 0.5
        worst[seed], _ = errors_against_one_process(
            handle, plan, changes, packed, lora, 5, dtype=dtype, make_optimizer=optimizer
        )
    return worst


def random_plan(rng, world_size):
    """Pipelines of one to four stages each on ranks drawn at random; some ranks may be idle."""
    num_ranks = world_size - rng.choice((0, 0, 1))
    shapes = [
        random_parts(rng, number, rng.randint(1, min(4, number)))
        for number in random_parts(rng, num_ranks, rng.randint(1, min(3, num_ranks)))
    ]
    places = [(i, j) for i, sizes in enumerate(shapes) for j in range(len(sizes))]
    rng.shuffle(places)  # stages hold consecutive ranks, in any order
    ends = list(itertools.accumulate(shapes[i][j] for i, j in places))
    ranks_of = {(i, j): list(range(end - shapes[i][j], end)) for (i, j), end in zip(places, ends, strict=True)}
    pipelines = []
    for i, sizes in enumerate(shapes):
        cuts = [0, *itertools.accumulate(random_parts(rng, LAYERS, len(sizes)))]
        stages = []
        for j, (size, layers) in enumerate(zip(sizes, itertools.pairwise(cuts), strict=True)):
            members = ranks_of[i, j]
            if size in (2, 4) and rng.random() < 0.6:
                stages.append({"ranks": members, "layers": list(layers), "inner": "tensor"})
            elif size > 1:
                tokens = [rng.choice((0, 1, 3)) if i else 1 for i in range(size)]
                heads = random_parts(rng, HEADS + size, size)
                layout = rng.choice(("zigzag", "contiguous"))
                stages.append(sequence_stage(members, layers, tokens, [h - 1 for h in heads], layout, HEADS))
            else:
                stages.append({"ranks": members, "layers": list(layers)})
        pipelines.append(pipeline(rng.randint(1, 2), rng.randint(1, 4), *stages))
    if all(len(p["stages"]) == 1 and p["stages"][0].get("inner") == "sequence" for p in pipelines):
        return random_plan(rng, world_size)  # a plan of replicas has an engine of its own
    return plan_of(*pipelines, kv_heads=HEADS)


def errors_against_one_process(
    handle,
    plan,
    changes,
    packed=False,
    lora=False,
    steps=3,
    model=None,
    dtype=torch.float64,
    make_optimizer=adamw,
    section=None,
    padded=False,
):
    """The largest difference of a loss, a norm or a parameter, and how many elements this rank holds."""
    import deepspeed

    whole = made_model(changes, lora).to(dtype)
    model = made_model(changes, lora).to(dtype) if model is None else model
    steps = batches(plan, steps, packed, padded)
    losses, norms = train_alone(whole, steps, make_optimizer(trained(whole)), 0.5)
    config = {"gradient_clipping": 0.5, "heterogeneity": {"schedule": plan, **(section or {})}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(trained(model)), config=config)
    worst = 0.0
    loader = handle.for_engine(engine).dataloader(steps)
    for batch, loss, norm in zip(loader, losses, norms, strict=True):
        ours = engine(**batch).loss
        engine.backward(ours)
        engine.step()
        worst = max(worst, abs(ours.item() - loss), abs(engine.get_global_grad_norm() - norm))
    assert engine.global_steps == len(steps)
    expected, held = dict(whole.named_parameters()), dict(model.named_parameters())
    for name, parameter in held.items():
        if name not in expected:  # a head that is tied to the embedding
            name = name.replace("lm_head", "model.embed_tokens")
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        worst = max(worst, (full - expected[name]).detach().abs().max().item())
    engine.eval()
    whole.eval()
    with torch.no_grad():
        batch = steps[0]
        shifted = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        logits = whole(**{name: e for name, e in batch.items() if name != "labels"}, use_cache=False).logits
        wanted = nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=-100)
        worst = max(worst, abs(engine(**batch).loss.item() - wanted.item()))
    engine.destroy()
    return worst, sum(local_tensor(parameter).numel() for parameter in held.values())


def made_model(changes, lora):
    model = llama(**{"num_hidden_layers": LAYERS, **changes}).double()
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
        model = model.double()
    return model.train()


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        pytest.param(name, tied, id=name + ", tied" * tied, marks=[pytest.mark.slow] * (tied == number % 2))
        for number, name in enumerate(PLANS)
        for tied in (False, True)
    ],
)
def test_unequal_stages_train_as_one_process(name, tied):
    """A prime number of words, which no degree divides, and a word without a gradient as an input."""
    changes = {"tie_word_embeddings": tied, "vocab_size": VOCAB + 3, "pad_token_id": VOCAB // 2 + 3}
    outcomes = run_deepspeed(trains_as_one_process, 5, PLANS[name], changes, tied)
    assert max(worst for worst, _ in outcomes) < 1e-12
    whole = sum(parameter.numel() for parameter in llama(num_hidden_layers=LAYERS, **changes).parameters())
    assert all(held < whole for _, held in outcomes[:4])


def sums_of_layers(rank, recomputes):
    """All-reduces of the forward and of the backward of all layers of a decoder."""
    from torch.distributed.device_mesh import DeviceMesh

    from ds_hetero.frameworks.transformers.stages.tensor_cut import TensorCut

    model = llama(num_hidden_layers=LAYERS).train()
    if recomputes:
        checkpoint_activations(model, reentrant=False)
    TensorCut(model, DeviceMesh("cpu", [0, 1]))
    sums, reduce = [], dist.all_reduce
    dist.all_reduce = lambda x, **options: (sums.append(x.shape), reduce(x, **options))[1]
    hidden = torch.ones(1, 5, 32, requires_grad=True)
    output = model.model(inputs_embeds=hidden, use_cache=False).last_hidden_state
    forward = len(sums)
    output.sum().backward()
    assert set(sums) == {hidden.shape}
    return forward, len(sums) - forward


@pytest.mark.parametrize(("recomputes", "backward"), [(False, 2), (True, 3)], ids=["", "computed again"])
def test_layers_add_up_as_often_as_plans_count(recomputes, backward):
    assert run_ranks(sums_of_layers, 2, recomputes) == [(2 * LAYERS, backward * LAYERS)] * 2


def centered(logits):
    return logits - logits.mean(-1, keepdim=True)


def without_a_word(logits):
    logits[..., 3] = -9.0
    return logits


def capped(logits):
    return logits.tanh() * 30


@pytest.mark.parametrize(("change", "refused"), [(centered, True), (without_a_word, True), (capped, False)])
def test_a_model_that_mixes_the_logits_of_words_is_not_cut_by_words(change, refused):
    model = llama(vocab_size=67)
    run = model.forward

    def forward(*args, **kwargs):
        outputs = run(*args, **kwargs)
        outputs.logits = change(outputs.logits)
        return outputs

    model.forward = forward
    reasons = impossible_stage_kinds(model)
    assert set(reasons) == ({"tensor"} if refused else set())
    reason = "depends on logits of other entries"
    assert reason in reasons.get("tensor", reason)


def test_words_that_are_too_few_for_a_degree_are_refused():
    model = llama(vocab_size=9, num_hidden_layers=LAYERS, num_key_value_heads=HEADS)
    plan = plan_of(pipeline(1, 1, {"ranks": [0, 1, 2, 3], "layers": [0, LAYERS], "inner": "tensor"}), kv_heads=HEADS)
    with pytest.raises(
        ModelError, match="has a vocabulary of 9 entries: tensor parallelism over 4 ranks leaves none to the last rank"
    ):
        check_stages(model, read_plan(plan))


@pytest.mark.parametrize(
    "name", ["tensor at both ends", pytest.param("sequence stage and single stages", marks=pytest.mark.slow)]
)
def test_adapters_are_trained_alone(name):
    """With tensor stages also under NCCL's rules."""
    rules = name.startswith("tensor")
    outcomes = run_deepspeed(trains_as_one_process, 5, PLANS[name], {}, True, True, nccl_rules=rules)
    assert max(worst for worst, _ in outcomes) < 1e-12


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize(
    ("options", "text"),
    [({"use_dora": True}, "use_dora"), ({"modules_to_save": ["norm"]}, "modules_to_save"), (None, "IA3")],
)
def test_adapters_that_are_more_than_lora_are_refused_in_tensor_stages(options, text):
    from peft import IA3Config, LoraConfig, get_peft_model

    made = IA3Config(target_modules=["q_proj"], feedforward_modules=[]) if options is None else LoraConfig(
        target_modules=["q_proj"], **options
    )  # fmt: skip
    reason = impossible_stage_kinds(get_peft_model(llama(), made))["tensor"]
    assert "not plain LoRA" in reason and text in reason


@pytest.mark.parametrize(
    ("world_size", "seeds"), [(3, range(4)), pytest.param(6, range(8, 11), marks=pytest.mark.slow)]
)
@pytest.mark.timeout(500)
def test_random_plans_train_as_one_process(world_size, seeds):
    outcomes = run_deepspeed(random_plans_train_as_one_process, world_size, world_size, seeds, timeout_s=400)
    assert max(error for worst in outcomes for error in worst.values()) < 1e-12, outcomes


@pytest.mark.sweep(keep=0)
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("world_size", "seeds"),
    [(2, range(16, 22)), (3, range(4, 8)), (4, range(22, 32)), (5, range(32, 42)), (6, range(11, 16))],
)
def test_more_random_plans_train_as_one_process(world_size, seeds):
    outcomes = run_deepspeed(random_plans_train_as_one_process, world_size, world_size, seeds, timeout_s=800)
    assert max(error for worst in outcomes for error in worst.values()) < 1e-12, outcomes


@pytest.mark.sweep(keep=1)
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("world_size", "seeds"),
    [(2, range(16, 22)), (3, range(8)), (4, range(22, 32)), (5, range(32, 42)), (6, range(8, 16))],
)
def test_random_plans_train_as_one_process_in_fp32(world_size, seeds):
    """42 plans; sums of fp32 in another order, five steps of SGD."""
    outcomes = run_deepspeed(
        random_plans_train_as_one_process, world_size, world_size, seeds, torch.float32, timeout_s=800
    )
    assert max(error for worst in outcomes for error in worst.values()) < 1e-5, outcomes


ALONE = plan_of(pipeline(8, 1, {"ranks": [0], "layers": [0, LAYERS]}))


def saved_under_a_plan_loads_under_the_next(rank, folder, order):
    """Whether every checkpoint of a chain of plans holds the same bits, and the loss of the step after each load."""
    import deepspeed

    import ds_hetero
    from ds_hetero.frameworks.deepspeed.pipeline.checkpoints import open_rank_files, whole_tensor

    compute_in(torch.float64)
    handle = ds_hetero.register()
    steps = batches(PLANS["tensor stage and single stages"], 3, False)
    saved, losses = [], []
    for number, name in enumerate(order):
        plan = of_eight_samples(ALONE if name == "alone" else PLANS[name])
        model = made_model({"tie_word_embeddings": True}, False)
        if number:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.5)  # all of it comes from the checkpoint
        config = {"gradient_clipping": 0.5, "heterogeneity": {"schedule": plan}}
        scheduler = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # noqa: E731
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=adamw(trained(model)), lr_scheduler=scheduler, config=config
        )
        if number:
            path, state = engine.load_checkpoint(folder)
            assert path.endswith(f"step{number - 1}") and state == {"epoch": 3}
            assert engine.global_steps == 2 and engine.get_lr() == [1e-2 / 4]
        else:
            train(handle.for_engine(engine), engine, steps[:2])
        engine.save_checkpoint(folder, tag=f"step{number}", client_state={"epoch": 3})
        if rank == 0:
            parts = [part["optimizer"]["owned"] for part in open_rank_files(Path(folder, f"step{number}"))]
            saved.append(consolidated(parts, whole_tensor))
        losses.append(train(handle.for_engine(engine), engine, steps[2:]))
        engine.destroy()
    return saved, losses


def of_eight_samples(plan):
    """The same plan with another number of micro-batches in its last pipeline."""
    *others, last = plan["pipelines"]
    rest = 8 - sum(p["micro_batch_size"] * p["micro_batches"] for p in others)
    return {**plan, "pipelines": [*others, {**last, "micro_batches": rest // last["micro_batch_size"]}]}


def consolidated(parts, whole_tensor):
    """Every parameter and its optimizer state, whole."""
    shapes = {name: piece["shape"] for part in parts for name, piece in part.items()}
    whole = {}
    for name, shape in shapes.items():
        pieces = [part[name] for part in parts if name in part]
        for key in ("value", "exp_avg", "exp_avg_sq"):
            values = [(piece["boxes"], piece["value"] if key == "value" else piece["state"][key]) for piece in pieces]
            whole[name, key] = whole_tensor(name, shape, values).numpy()
    return whole


def train(handle, engine, steps):
    losses = []
    for batch in handle.dataloader(steps):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_checkpoint_loads_under_every_other_plan(tmp_path):
    names = ["tensor stage and single stages", "alone", "sequence stage and single stages"]
    names += ["tensor to sequence to single", "sequence at the end, an idle rank", "tensor stage and single stages"]
    saved, losses = run_deepspeed(saved_under_a_plan_loads_under_the_next, 5, str(tmp_path), names, timeout_s=400)[0]
    for other in saved[1:]:
        assert saved[0].keys() == other.keys()
        assert all((saved[0][key] == other[key]).all() for key in other)
    assert all(loss == pytest.approx(losses[0], rel=1e-12) for loss in losses)
