"""Random combinations of model, schedule, ZeRO stage, batch and adapter, each trained a step against one process.

    python -m tests.integration.combinations --seed 7               # a hundred of them
    python -m tests.integration.combinations --seed 7 --only 42     # one of them again, with all that its ranks print

Of every eight about one is a random plan of pipelines, which `test_pipelines` draws and trains.

A combination is exact, or refused by name on all ranks alike; whatever else becomes of it is printed with its
description. One process runs every document by itself, so that nothing of packing or padding is left in what is
compared with.
"""

from __future__ import annotations

import argparse
import copy
import random
import traceback
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.proof.chance import random_schedule
from tests.integration.architectures import VOCAB
from tests.integration.pipelines.test_pipelines import random_plan, random_plans_train_as_one_process
from tests.integration.sweep import Outcome, make_model
from tests.integration.tiny import BY_DOCUMENTS, ds_config
from tests.support import run_deepspeed, start_server

_NAMES = """
apertus cohere2 deepseek_v3 falcon_h1 gemma2 gemma3_text gemma4_text gpt2 gpt_oss granite lfm2_moe llama mixtral olmo2
bamba phi3 qwen2 qwen3 qwen3_moe qwen3_5_text qwen3_next smollm3
"""
_FAMILIES = _NAMES.split()
_HEADS = {"deepseek_v3": (4, 4), "gpt2": (4, 4)}  # the others have 4 over 2
_ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "DoRA": {"use_dora": True},
    "rank-stabilized LoRA": {"use_rslora": True},
    "LoRA and whole norms": {"modules_to_save": ["norm"]},
}
_LR = 1e3  # so that a parameter after the step is its gradient, and not the rounding of what it was
_AT_ONCE = 8  # in one start of ranks
_TOLERANCE = 1e-4  # relative; sums of fp32 in another order


@dataclass(frozen=True)
class Combination:
    """What is trained, and how.

    Args:
        family: the model's type.
        world_size: number of ranks.
        schedule: of one replica.
        stage: of ZeRO.
        lengths: of the documents of each row, its padding not among them.
        padded: ``"left"`` or ``"right"`` where rows are shorter than the longest; ``""`` for none.
        packing: ``"position_ids"`` or ``"cu_seq_lens"`` where rows hold several documents; ``""`` for one each.
        by_documents: batches are placed by their documents.
        recomputed: activations are: ``"reentrant"``, ``"not reentrant"``, or ``""`` for none.
        adapter: of `_ADAPTERS`, or ``""``.
    """

    family: str
    world_size: int
    schedule: dict[str, Any]
    stage: int
    lengths: tuple[tuple[int, ...], ...]
    padded: str
    packing: str
    by_documents: bool
    recomputed: str
    adapter: str


def combination(seed: int, number: int) -> Combination:
    """One of all combinations; the same one on every machine."""
    rng = random.Random(f"{seed} {number}")
    family, world_size = rng.choice(_FAMILIES), rng.choice([2, 2, 3, 4])
    kind = rng.choice(["plain", "left", "right", "position_ids", "position_ids", "cu_seq_lens"])
    packing = kind if kind in ("position_ids", "cu_seq_lens") else ""
    padded = kind if kind in ("left", "right") else ""
    length = rng.randint(24, 70)
    num_rows = 1 if packing == "cu_seq_lens" else rng.choice([1, 2, 3])
    rows = []
    for row in range(num_rows):
        own_length = rng.randint(3, length) if padded and row else length
        cuts = sorted(rng.sample(range(1, own_length), rng.randint(1, 3))) if packing else []
        rows.append(tuple(stop - start for start, stop in pairwise([0, *cuts, own_length])))
    return Combination(
        family=family,
        world_size=world_size,
        schedule=random_schedule(rng, world_size, *_HEADS.get(family, (4, 2))).to_dict(),
        stage=rng.randrange(4),
        lengths=tuple(rows),
        padded=padded,
        packing=packing,
        by_documents=rng.random() < (0.5 if packing else 0.15),
        recomputed=rng.choice(["", "", "reentrant", "not reentrant"]),
        adapter=rng.choice(["", "", "", *_ADAPTERS]),
    )


def pipelines_of(seed: int, number: int) -> tuple[int, int] | None:
    """World size, and the seed of a plan of pipelines, where this combination is one."""
    rng = random.Random(f"pipelines {seed} {number}")
    return (rng.choice([2, 3, 4]), rng.randrange(2**31)) if rng.random() < 1 / 8 else None


def described(seed: int, number: int) -> dict[str, Any]:
    """What is trained, and how, for people."""
    if (pipelines := pipelines_of(seed, number)) is None:
        return asdict(combination(seed, number))
    world_size, plan_seed = pipelines
    return {"seed of the plan": plan_seed, "plan": random_plan(random.Random(plan_seed), world_size)}


def outcomes_of(numbers: list[int], seed: int, *, shown: bool = False) -> dict[int, Outcome]:
    """What becomes of these combinations; a kind on which ranks differ is obscure.

    Args:
        numbers: of the combinations.
        seed: of them all.
        shown: print each as it ends.
    """
    outcomes: dict[int, Outcome] = {}
    by_size: dict[int, list[int]] = defaultdict(list)
    for number in numbers:
        if (pipelines := pipelines_of(seed, number)) is None:
            by_size[combination(seed, number).world_size].append(number)
            continue
        outcomes[number] = _run_pipelines(*pipelines)
        if shown:
            print(f"{number}: {outcomes[number].kind}", flush=True)
    for size, members in by_size.items():
        for start in range(0, len(members), _AT_ONCE):
            some = members[start : start + _AT_ONCE]
            outcomes |= _run(some, seed, size)
            for number in some if len(some) > 1 else ():
                if outcomes[number].kind == "obscure":  # by itself, for one before it may have left the ranks apart
                    outcomes |= _run([number], seed, size)
            if shown:
                print(*(f"{number}: {outcomes[number].kind}" for number in some), sep="\n", flush=True)
    return outcomes


def _run(numbers: list[int], seed: int, world_size: int) -> dict[int, Outcome]:
    drawn = [combination(seed, number) for number in numbers]
    try:
        by_rank = run_deepspeed(_outcomes, world_size, drawn, timeout_s=120 + 60 * len(drawn))
    except AssertionError as error:
        return dict.fromkeys(numbers, Outcome("obscure", str(error)))
    outcomes = {}
    for number, of_ranks in zip(numbers, zip(*by_rank, strict=True), strict=True):
        alike = len({outcome.kind for outcome in of_ranks}) == 1
        outcomes[number] = of_ranks[0] if alike else Outcome("obscure", f"ranks differ: {of_ranks}")
    return outcomes


def _run_pipelines(world_size: int, plan_seed: int) -> Outcome:
    try:
        by_rank = run_deepspeed(random_plans_train_as_one_process, world_size, world_size, [plan_seed], timeout_s=240)
    except AssertionError as error:
        return Outcome("obscure", str(error))
    worst = max(of_rank[plan_seed] for of_rank in by_rank)
    return Outcome("exact") if worst < 1e-12 else Outcome("wrong", f"a loss, norm or parameter is off by {worst:.1e}")


def _outcomes(rank: int, combinations: list[Combination]) -> list[Outcome]:
    import logging

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return [_outcome(drawn) for drawn in combinations]


def _outcome(drawn: Combination) -> Outcome:
    from ds_hetero.errors import HeteroError, PeerError

    model = _model(drawn)
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    loss, expected = _step_alone(copy.deepcopy(model), drawn)
    try:
        ours, trained = _step(model, drawn)
    except PeerError:
        return Outcome("obscure", traceback.format_exc()[-4000:])
    except HeteroError as error:
        return Outcome("refused", " ".join(str(error).split()))
    except Exception:
        return Outcome("obscure", traceback.format_exc()[-4000:])
    largest = max(float((expected[name] - start[name]).norm()) for name in start)
    error, worst = abs(ours - loss) / abs(loss), "the loss"
    for name, own in trained.items():
        step = (expected[name] - start[name]).norm()
        off = float((own - expected[name]).norm() / (step + 1e-3 * largest))
        error, worst = max((error, worst), (off, name))
    return Outcome("exact") if error < _TOLERANCE else Outcome("wrong", f"{worst} is off by {error:.1e}")


def _model(drawn: Combination) -> Any:
    model = make_model("causal", drawn.family, torch.device("cpu")).float()
    if drawn.adapter:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(2)
        more = _ADAPTERS[drawn.adapter]
        settings = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, **more)
        model = get_peft_model(model, settings)
    return model.train()


def _batch(drawn: Combination) -> dict[str, Any]:
    """The whole batch as a collator makes it; no token predicts the first one of a document."""
    generator = torch.Generator().manual_seed(1)
    length = max(map(sum, drawn.lengths))
    ids = torch.randint(6, VOCAB - 8, (len(drawn.lengths), length), generator=generator)
    labels, positions = torch.full_like(ids, -100), torch.arange(length).repeat(len(drawn.lengths), 1)
    for row, start, stop in _documents(drawn):
        labels[row, start + 1 : stop] = ids[row, start + 1 : stop]
        if drawn.packing:
            positions[row, start:stop] = torch.arange(stop - start)
    batch: dict[str, Any] = {"input_ids": ids, "labels": labels}
    if drawn.padded:
        batch["attention_mask"] = torch.zeros_like(ids)
        for row, start, stop in _documents(drawn):
            batch["attention_mask"][row, start:stop] = 1
    if drawn.packing:
        batch["position_ids"] = positions
    if drawn.packing == "cu_seq_lens":
        bounds = torch.tensor([0, *accumulate(drawn.lengths[0])], dtype=torch.int32)
        longest = max(drawn.lengths[0])
        batch |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    return batch


def _documents(drawn: Combination) -> list[tuple[int, int, int]]:
    """Row, start and stop of each."""
    length = max(map(sum, drawn.lengths))
    documents = []
    for row, lengths in enumerate(drawn.lengths):
        begin = length - sum(lengths) if drawn.padded == "left" else 0
        documents += [(row, begin + a, begin + b) for a, b in pairwise(accumulate(lengths, initial=0))]
    return documents


def _step_alone(model: Any, drawn: Combination) -> tuple[float, dict[str, Tensor]]:
    """Loss and trained parameters after a step of one process, which runs one document after the other."""
    batch = _batch(drawn)
    num_labels = batch["labels"].ne(-100).sum()
    total = torch.zeros(())
    for row, start, stop in _documents(drawn):
        if stop - start < 2:  # no label, but routers and states of others do not depend on it either
            continue
        positions = torch.arange(stop - start) if drawn.packing else torch.arange(start, stop)
        ids = batch["input_ids"][row : row + 1, start:stop]
        logits = model(input_ids=ids, position_ids=positions[None], use_cache=False).logits[0, :-1].float()
        total = total + nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / num_labels
    total.backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    torch.optim.SGD(trained.values(), lr=_LR).step()
    return total.item(), {name: parameter.detach() for name, parameter in trained.items()}


def _step(model: Any, drawn: Combination) -> tuple[float, dict[str, Tensor]]:
    """The same of this job's engine."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    import ds_hetero

    handle = ds_hetero.register()
    if drawn.recomputed:
        options = {"use_reentrant": drawn.recomputed == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        if drawn.adapter:
            model.enable_input_require_grads()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    placement = {**BY_DOCUMENTS, "remap": "always" if drawn.stage % 2 else "never"}
    config = ds_config(
        drawn.stage,
        drawn.schedule,
        **({"placement": placement} if drawn.by_documents else {}),
        train_micro_batch_size_per_gpu=len(drawn.lengths),
        gradient_clipping=0.0,
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(trained.values(), lr=_LR), config=config)
    try:
        (shard,) = handle.for_engine(engine).dataloader([_batch(drawn)], batches="same")
        loss = engine(**shard).loss
        engine.backward(loss)
        engine.step()
        read = safe_get_full_fp32_param if drawn.stage else (lambda parameter: parameter)
        return loss.item(), {name: read(parameter).detach().clone() for name, parameter in trained.items()}
    finally:
        engine.destroy()
        handle.registry.find(model).model.restore()


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--only", type=int, help="the number of one combination")
    arguments = parser.parse_args()
    start_server(["tests.integration.combinations"], deepspeed=True)
    from tests.integration.combinations import outcomes_of  # by a name that ranks can import

    numbers = list(range(arguments.count)) if arguments.only is None else [arguments.only]
    outcomes = outcomes_of(numbers, arguments.seed, shown=True)
    counts = Counter(outcome.kind for outcome in outcomes.values())
    for number, outcome in outcomes.items():
        if outcome.kind in ("wrong", "obscure") or arguments.only is not None:
            print(f"\n--seed {arguments.seed} --only {number}: {outcome.kind}: {outcome.why}")
            print(
                *(f"    {name}: {value}" for name, value in asdict(combination(arguments.seed, number)).items()),
                sep="\n",
            )
    refusals = Counter(outcome.why[:300] for outcome in outcomes.values() if outcome.kind == "refused")
    print(*(f"refused {count} times: {why}" for why, count in refusals.most_common()), sep="\n")
    print(f"seed {arguments.seed}, {len(numbers)} combinations: {dict(counts)}")


if __name__ == "__main__":
    _main()
