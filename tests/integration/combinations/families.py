"""Architectures of transformers: padding, packing, documents, recomputation, adapters, under any schedule and stage.

One process runs every document by itself, so that nothing of packing or padding is left in what is compared with.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import nn

from benchmarks.proof.chance import random_schedule
from tests.integration.architectures import VOCAB
from tests.integration.combinations.compare import ROUNDING_FP64, Tolerance, Trained, snapshot, whole_parameters
from tests.integration.combinations.optimizers import trained
from tests.integration.sweep import double_casts, make_model
from tests.integration.tiny import BY_DOCUMENTS, ds_config

_NAMES = """
apertus cohere2 deepseek_v3 falcon_h1 gemma2 gemma3_text gemma4_text gpt2 gpt_oss granite lfm2_moe llama mixtral olmo2
bamba phi3 qwen2 qwen3 qwen3_moe qwen3_5_text qwen3_next smollm3
"""
FAMILIES = tuple(_NAMES.split())
_HEADS = {"deepseek_v3": (4, 4), "gpt2": (4, 4)}  # the others have 4 over 2
_ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "DoRA": {"use_dora": True},
    "rank-stabilized LoRA": {"use_rslora": True},
    "LoRA and whole norms": {"modules_to_save": ["norm"]},
}
# PEFT refuses DoRA of experts whose weights are one parameter.
_EXPERTS = ("deepseek_v3", "gpt_oss", "lfm2_moe", "mixtral", "qwen3_moe", "qwen3_next")
_MAMBA = ("bamba", "falcon_h1")  # PEFT refuses to adapt their out_proj
# So small that a step of a sum of adapters, which multiply each other, does not multiply what rounding leaves.
_LR, _LR_OF_ADAPTERS = 0.1, 0.02
_STEPS = 3
# Families that are trained in fp64, since they multiply what rounding leaves. After three steps in fp32 one process is
# off from itself in fp64 by 1.2e-2 of the change of an adapter of gemma4_text (draw 683 of seed 11), and by 4.8e-2 of a
# rank-stabilized one (856). In fp64 ranks are off from one process by 5e-12 and 6.3e-10 there.
_IN_FP64 = ("gemma4_text",)
_FP64 = Tolerance(relative=1e-8, series=1e-8, rounding=ROUNDING_FP64)


@dataclass(frozen=True)
class FamilyJob:
    """A model of transformers and its batches.

    Args:
        world_size: number of ranks.
        family: the model's type.
        schedule: of one replica.
        stage: of ZeRO.
        lengths: of the documents of each row, its padding not among them.
        padded: ``"left"`` or ``"right"`` where rows are shorter than the longest; ``""`` for none.
        packing: ``"position_ids"`` or ``"cu_seq_lens"`` where rows hold several documents; ``""`` for one each.
        by_documents: batches are placed by their documents.
        recomputed: activations are: ``"reentrant"``, ``"not reentrant"``, or ``""`` for none.
        adapter: of `_ADAPTERS`, or ``""``.
    """

    kind: ClassVar[str] = "family"

    world_size: int
    family: str
    schedule: dict[str, Any]
    stage: int
    lengths: tuple[tuple[int, ...], ...]
    padded: str
    packing: str
    by_documents: bool
    recomputed: str
    adapter: str

    @property
    def tolerance(self) -> Tolerance:
        """Of its family."""
        return _FP64 if self.family in _IN_FP64 else Tolerance()

    def describe(self) -> str:
        """For people."""
        parts = [
            f"{self.family} on {self.world_size} ranks, ZeRO {self.stage}, rows of documents {self.lengths}",
            f"padded on the {self.padded}" if self.padded else "",
            f"packed by {self.packing}" if self.packing else "",
            "placed by documents" if self.by_documents else "",
            f"recomputed ({self.recomputed})" if self.recomputed else "",
            self.adapter,
            f"schedule {self.schedule}",
        ]
        return ", ".join(filter(None, parts))

    def alone(self) -> Trained:
        """Steps of one process, which runs one document after the other."""
        with _precision(self):
            return self._train_alone()

    def on_ranks(self, rank: int) -> Trained:
        """The same of an engine."""
        with _precision(self):
            return self._train_on_ranks()

    def _train_alone(self) -> Trained:
        model = _model(self)
        start = snapshot(model)
        optimizer = _sgd(self, model)
        losses, norms = [], []
        for step in range(_STEPS):
            batch = _batch(self, step)
            num_labels = batch["labels"].ne(-100).sum()
            total = torch.zeros(())
            for row, begin, stop in _documents(self):
                if stop - begin < 2:  # no label, but routers and states of others do not depend on it either
                    continue
                positions = torch.arange(stop - begin) if self.packing else torch.arange(begin, stop)
                ids = batch["input_ids"][row : row + 1, begin:stop]
                logits = model(input_ids=ids, position_ids=positions[None], use_cache=False).logits[0, :-1].float()
                total = total + nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / num_labels
            total.backward()
            losses.append((total.item(), 1.0))
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), torch.inf)))
            optimizer.step()
            optimizer.zero_grad()
        return Trained(losses, norms, snapshot(model), start)

    def _train_on_ranks(self) -> Trained:
        import deepspeed

        import ds_hetero

        handle = ds_hetero.register()
        model = _model(self)
        if self.recomputed:
            options = {"use_reentrant": self.recomputed == "reentrant"}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            if self.adapter:
                model.enable_input_require_grads()
        placement = {**BY_DOCUMENTS, "remap": "always" if self.stage % 2 else "never"}
        config = ds_config(
            self.stage,
            self.schedule,
            **({"placement": placement} if self.by_documents else {}),
            train_micro_batch_size_per_gpu=len(self.lengths),
            gradient_clipping=0.0,
        )
        if self.family in _IN_FP64:  # the self-check allows for rounding of fp32, which is no other type in there
            config["heterogeneity"]["checks"] = {"compare_every": "off"}
        engine, *_ = deepspeed.initialize(model=model, optimizer=_sgd(self, model), config=config)
        losses, norms = [], []
        batches = [_batch(self, step) for step in range(_STEPS)]
        for shard in handle.for_engine(engine).dataloader(batches, batches="same"):
            loss = engine(**shard).loss
            engine.backward(loss)
            engine.step()
            losses.append((loss.item(), 1.0))
            norms.append(float(engine.get_global_grad_norm() or 0.0))
        came_to = Trained(losses, norms if self.stage else [], whole_parameters(model, self.stage))
        engine.destroy()
        return came_to


def draw(rng: random.Random) -> FamilyJob:
    """Any of them."""
    family, world_size = rng.choice(FAMILIES), rng.choice([2, 2, 3, 4])
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
    job = FamilyJob(
        world_size=world_size,
        family=family,
        schedule=random_schedule(rng, world_size, *_HEADS.get(family, (4, 2))).to_dict(),
        stage=rng.randrange(4),
        lengths=tuple(rows),
        padded=padded,
        packing=packing,
        by_documents=rng.random() < (0.5 if packing else 0.15),
        recomputed=rng.choice(["", "", "reentrant", "not reentrant"]),
        adapter=rng.choice(["", "", "", *_ADAPTERS]),
    )
    return replace(job, adapter="LoRA") if job.adapter == "DoRA" and family in _EXPERTS else job


def _precision(job: FamilyJob) -> contextlib.AbstractContextManager[None]:
    """Make casts to fp32 casts to fp64, for families that are trained in it."""
    return double_casts() if job.family in _IN_FP64 else contextlib.nullcontext()


def _sgd(job: FamilyJob, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained(model), lr=_LR_OF_ADAPTERS if job.adapter else _LR)


def _model(job: FamilyJob) -> Any:
    model = make_model("causal", job.family, torch.device("cpu"))
    model = model.double() if job.family in _IN_FP64 else model.float()
    if job.adapter:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(2)
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if job.family in _MAMBA else "all-linear"
        settings = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **_ADAPTERS[job.adapter])
        model = get_peft_model(model, settings)
    return model.train()


def _batch(job: FamilyJob, step: int) -> dict[str, Any]:
    """The whole batch as a collator makes it; no token predicts the first one of a document."""
    generator = torch.Generator().manual_seed(1 + step)
    length = max(map(sum, job.lengths))
    ids = torch.randint(6, VOCAB - 8, (len(job.lengths), length), generator=generator)
    labels, positions = torch.full_like(ids, -100), torch.arange(length).repeat(len(job.lengths), 1)
    for row, start, stop in _documents(job):
        labels[row, start + 1 : stop] = ids[row, start + 1 : stop]
        if job.packing:
            positions[row, start:stop] = torch.arange(stop - start)
    batch: dict[str, Any] = {"input_ids": ids, "labels": labels}
    if job.padded:
        batch["attention_mask"] = torch.zeros_like(ids)
        for row, start, stop in _documents(job):
            batch["attention_mask"][row, start:stop] = 1
    if job.packing:
        batch["position_ids"] = positions
    if job.packing == "cu_seq_lens":
        bounds = torch.tensor([0, *accumulate(job.lengths[0])], dtype=torch.int32)
        longest = max(job.lengths[0])
        batch |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    return batch


def _documents(job: FamilyJob) -> list[tuple[int, int, int]]:
    """Row, start and stop of each."""
    length = max(map(sum, job.lengths))
    documents = []
    for row, lengths in enumerate(job.lengths):
        begin = length - sum(lengths) if job.padded == "left" else 0
        documents += [(row, begin + a, begin + b) for a, b in pairwise(accumulate(lengths, initial=0))]
    return documents
