"""Random jobs whose experts are divided among ranks equal one process in fp64, also after a resume under other shares.

A job draws its model (experts of a token, shared experts, router losses, recomputation), its replicas and their
schedules, the shares of experts, ZeRO stage and owners, and accumulation. Casts to fp32 inside the modelling files and
DeepSpeed are casts to fp64 here, so what is left of rounding shows faults.

Budget: 40 s.
"""

from __future__ import annotations

import os
import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.integration.loops.test_experts import FAMILIES, one_process
from tests.integration.tiny import adam, checkpoint_activations, collate, ds_config, llama, mean_over_ranks, samples
from tests.support import run_deepspeed

MOST = 1e-11
HEADS = 4
STEPS = 4  # half of them before the resume
_EXPERTS_OF = {"mixtral": "num_local_experts", "deepseek": "n_routed_experts"}  # other families: num_experts
_SHARED = {
    "qwen2 moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    )
}


class Job(NamedTuple):
    """One random job."""

    family: str
    changes: dict[str, Any]
    schedule: dict[str, Any]
    experts: list[list[int]]  # of the job, and of the job that resumes it
    stage: int
    owners: list[int] | None
    steps_of: int  # micro-batches of a step
    global_batch: int | None  # samples of a step; None without replicas
    recomputes: bool
    clip: float


def parts(draw: random.Random, total: int, count: int) -> list[int]:
    """Whole numbers >= 0 that add up to ``total``."""
    cuts = sorted(draw.randint(0, total) for _ in range(count - 1))
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True)]


def random_schedule(draw: random.Random, ranks: list[int], kv_heads: int) -> dict[str, Any]:
    """One or two groups of ranks, some without tokens or without heads."""
    num_groups = draw.randint(1, min(2, len(ranks)))
    groups = []
    for members in (ranks[i::num_groups] for i in range(num_groups)):
        tokens = [draw.choice((0, 1, 1, 2, 3)) for _ in members]
        tokens[draw.randrange(len(members))] += 1
        groups.append({"ranks": members, "tokens": tokens, "heads": parts(draw, HEADS, len(members))})
    layout = draw.choice(("zigzag", "contiguous"))
    return {"version": 1, "num_heads": HEADS, "num_kv_heads": kv_heads, "layout": layout, "groups": groups}


def random_shares(draw: random.Random, replicas: list[list[int]]) -> list[int]:
    """Weights of all ranks, of which each replica has one above zero."""
    weights = [draw.choice((0, 1, 1, 2, 5)) for members in replicas for _ in members]
    for members in replicas:
        weights[draw.choice(members)] += 1
    return weights


def random_job(seed: int, world_size: int) -> Job:
    """Draw a job of ``world_size`` ranks."""
    draw = random.Random(seed)
    family = draw.choice([*FAMILIES, *_SHARED])
    num_experts = draw.randint(2 if family == "deepseek" else 1, 12)  # its router compares two
    top_k = draw.randint(1, min(8, num_experts))
    changes = {_EXPERTS_OF.get(family, "num_experts"): num_experts, "num_experts_per_tok": top_k}
    if family == "gpt-oss":
        changes = {"num_local_experts": num_experts, "num_experts_per_tok": top_k}
    replicas = [list(range(world_size))]
    if world_size > 1 and draw.random() < 0.5:
        first = draw.randint(1, world_size - 1)
        replicas = [list(range(first)), list(range(first, world_size))]
    if family in ("mixtral", "qwen3 moe", "qwen2 moe"):
        # Replicas with batches of their own have no loss of routers that one process would compute on all samples.
        has_loss = len(replicas) == 1 and draw.random() < 0.7
        changes |= {"output_router_logits": has_loss, "router_aux_loss_coef": 0.7 if has_loss else 0.0}
    kv_heads = 4 if family == "deepseek" else 2
    schedules = [random_schedule(draw, members, kv_heads) for members in replicas]
    schedule, global_batch, steps_of = schedules[0], None, draw.randint(1, 2)
    if len(replicas) > 1:
        batches = [{"micro_batch_size": draw.randint(1, 2), "micro_batches": draw.randint(1, 2)} for _ in replicas]
        entries = [{"schedule": of_replica, **batch} for of_replica, batch in zip(schedules, batches, strict=True)]
        schedule = {"version": 1, "replicas": entries}
        global_batch = sum(batch["micro_batch_size"] * batch["micro_batches"] for batch in batches)
        steps_of = max(batch["micro_batches"] for batch in batches)
    stage = draw.randint(0, 2)
    owners = None
    if stage and draw.random() < 0.4:
        owners = [draw.choice((0, 1, 2)) for _ in range(world_size)]
        owners[draw.randrange(world_size)] += 1
    return Job(
        family=family,
        changes=changes,
        schedule=schedule,
        experts=[random_shares(draw, replicas) for _ in range(2)],
        stage=stage,
        owners=owners,
        steps_of=steps_of,
        global_batch=global_batch,
        recomputes=draw.random() < 0.3,
        clip=draw.choice((0.0, 1.0)),
    )


def made_model(job: Job) -> Any:
    """The job's model in fp64, the same on every rank."""
    import transformers

    config_class, model_class, changes = {**FAMILIES, **_SHARED}[job.family]
    base = llama().config.to_dict()
    shared = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = {name: base[name] for name in (*shared, "vocab_size", "max_position_embeddings")}
    attention = "eager" if job.family == "gpt-oss" else "sdpa"
    config = getattr(transformers, config_class)(**{**sizes, **changes, **job.changes})
    torch.manual_seed(0)
    # grouped_mm takes no float64
    options = {"attn_implementation": attention, "experts_implementation": "eager"}
    model = getattr(transformers, model_class)._from_config(config, **options).double()
    if job.recomputes:
        checkpoint_activations(model, False)
    return model.train()


def rows_and_steps(job: Job) -> tuple[list[Any], list[list[Any]]]:
    """What the loader reads, and the batches of every step of one process."""
    if job.global_batch is None:
        rows = samples(2 * STEPS * job.steps_of)
        batches = [collate(rows[i : i + 2]) for i in range(0, len(rows), 2)]
        return batches, [batches[i : i + job.steps_of] for i in range(0, len(batches), job.steps_of)]
    rows = samples(STEPS * job.global_batch)
    return rows, [[collate(rows[i : i + job.global_batch])] for i in range(0, len(rows), job.global_batch)]


def error_of_job(handle: Any, job: Job, folder: str) -> float:
    """The largest relative difference of a loss, a norm or a parameter from one process, of any rank's."""
    import deepspeed

    rows, steps = rows_and_steps(job)
    expected = made_model(job)
    losses, norms = one_process(expected, steps, job.clip or 1e9)
    our_losses: list[float] = []
    our_norms: list[float] = []
    half = len(rows) // 2
    for resumes, experts in enumerate(job.experts):
        model = made_model(job)
        more = {} if job.global_batch else {"gradient_accumulation_steps": job.steps_of}
        config = ds_config(job.stage, job.schedule, gradient_clipping=job.clip, **more)
        if job.global_batch:
            del config["train_micro_batch_size_per_gpu"]
        config["heterogeneity"]["experts"] = experts
        if job.owners is not None:
            config["heterogeneity"]["zero_partition"] = job.owners
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
        own = handle.for_engine(engine)
        if resumes:
            engine.load_checkpoint(folder, tag="half")
        part = rows[half:] if resumes else rows[:half]
        loader = own.dataloader(DataLoader(part, batch_size=3) if job.global_batch else part, batches="same")
        for batch in loader:
            outputs = engine(**batch)
            loss = own.loss(outputs, batch) if job.global_batch else outputs.loss
            engine.backward(loss)
            our_losses.append(mean_over_ranks(loss))
            at_boundary = engine.is_gradient_accumulation_boundary()
            engine.step()
            if at_boundary and job.stage:  # DeepSpeed keeps no norm without ZeRO
                our_norms.append(float(engine.get_global_grad_norm()))
        if not resumes:
            engine.save_checkpoint(folder, tag="half")
        else:
            error = error_of_parameters(engine.module, expected)
        engine.destroy()
    means = torch.tensor(our_losses).view(-1, job.steps_of).mean(1)
    pairs = [*zip(means.tolist(), losses, strict=True), *zip(our_norms, norms if job.stage else [], strict=True)]
    return max([error, *(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)])


def error_of_parameters(model: nn.Module, expected: nn.Module) -> float:
    """The largest difference of a parameter that this rank has, relative to its norm."""
    experts = vars(model)["_ds_hetero_experts"]
    wanted = dict(expected.named_parameters())
    worst = 0.0
    for name, parameter in model.named_parameters():
        value = wanted[name].detach()
        norm = float(value.norm())
        if name in experts.parts:
            start, stop = experts.parts[name].experts.ranges[experts.rank]
            value = value[start:stop]
        worst = max(worst, float((parameter.detach() - value).norm()) / norm)
    return worst


def errors_of_jobs(rank: int, seeds: range, folder: str) -> dict[int, float]:
    """By seed."""
    import ds_hetero

    # torch.float is how DeepSpeed asks for a type.
    torch.float = torch.float32 = torch.float64  # type: ignore[misc]
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    torch.set_default_dtype(torch.float64)
    handle = ds_hetero.register()
    world_size = int(os.environ["WORLD_SIZE"])
    found = {}
    for seed in seeds:
        job = random_job(seed, world_size)
        try:
            found[seed] = error_of_job(handle, job, f"{folder}/{seed}")
        except Exception as error:
            raise AssertionError(f"seed {seed}: {job}") from error
    return found


SEEDS_OF_TEST = 5


@pytest.mark.slow
@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize("first_seed", range(0, 60, SEEDS_OF_TEST))
def test_random_jobs_equal_one_process(first_seed: int, tmp_path: Any) -> None:
    world_size = (3, 2, 4)[first_seed // SEEDS_OF_TEST % 3]
    seeds = range(first_seed, first_seed + SEEDS_OF_TEST)
    outcomes = run_deepspeed(errors_of_jobs, world_size, seeds, str(tmp_path), nccl_rules=True)
    assert max(error for of_rank in outcomes for error in of_rank.values()) < MOST, outcomes
