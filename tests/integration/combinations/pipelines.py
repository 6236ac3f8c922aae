"""Pipelines of unequal stages, tensor-parallel ones and those that share sequences among them, in fp64."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tests.integration.combinations import losses, modules, optimizers
from tests.integration.combinations.compare import ROUNDING_FP64, RTOL_FP64, Tolerance, Trained, snapshot
from tests.integration.combinations.losses import Loss
from tests.integration.combinations.optimizers import Optimizing
from tests.integration.pipelines.test_pipelines import HEADS, LAYERS, batches, random_plan
from tests.integration.tiny import checkpoint_activations, compute_in, llama

# What the script adds or changes; those of `modules` that a pipeline could be cut through.
CHANGES = ("", "", "", "", "frozen embedding", "frozen layer", "gate", "scaled output", "buffer that counts")
LOSSES = ("model", "model", "model", "weighted", "smoothed", "scaled", "added term")
_RECIPES = tuple(name for name, recipe in optimizers.RECIPES.items() if recipe.module == "torch.optim")


@dataclass(frozen=True)
class PipelineJob:
    """A job of pipelines.

    Args:
        world_size: number of ranks.
        plan: stages by pipeline.
        resumed: plan of the engine that goes on from a checkpoint after the second step; None for no resume.
        stage: of ZeRO.
        tied: embedding and head are one parameter.
        packed: rows hold several documents.
        lora: adapters are trained alone.
        recomputed: activations are computed again in the backward.
        change: of `CHANGES`.
        loss: of `LOSSES`: the model's, a loss_function of the script's, a loss that is scaled before backward, one to
            which a term is added.
        optimizing: how gradients become steps.
        steps: of the optimizer.
        evaluated: after the second step.
    """

    kind: ClassVar[str] = "pipelines"

    world_size: int
    plan: dict[str, Any]
    resumed: dict[str, Any] | None
    stage: int
    tied: bool
    packed: bool
    lora: bool
    recomputed: bool
    change: str
    loss: str
    optimizing: Optimizing
    steps: int
    evaluated: bool

    @property
    def tolerance(self) -> Tolerance:
        """Of fp64."""
        return replace(self.optimizing.tolerance, relative=RTOL_FP64, series=RTOL_FP64, rounding=ROUNDING_FP64)

    def describe(self) -> str:
        """For people."""
        flags = {"tied": self.tied, "packed": self.packed, "LoRA": self.lora, "recomputed": self.recomputed}
        parts = [
            f"pipelines on {self.world_size} ranks, ZeRO {self.stage}",
            *(name for name, is_on in flags.items() if is_on),
            self.change,
            f"loss: {self.loss}",
            self.optimizing.describe(),
            f"{self.steps} steps",
            "evaluation" if self.evaluated else "",
            f"plan {self.plan['pipelines']}",
            f"resumed under {self.resumed['pipelines']}" if self.resumed else "",
        ]
        return "; ".join(filter(None, parts))

    def alone(self) -> Trained:
        """On one process."""
        compute_in(torch.float64)
        model = _model(self)
        start = snapshot(model)
        optimizer = optimizers.make(self.optimizing, model)
        schedule = optimizers.schedule_of_one_process(self.optimizing, optimizer)
        told, norms, evaluated = [], [], []
        for step, batch in enumerate(batches(self.plan, self.steps, self.packed)):
            loss = _loss_alone(self, model, batch)
            _scaled(self, loss).backward()
            told.append((loss.item(), 1.0))
            norms.append(optimizers.step_alone(optimizer, schedule, model, self.optimizing.clip))
            if step == 1 and self.evaluated:
                model.eval()
                with torch.no_grad():
                    evaluated.append(_loss_alone(self, model, batch).item())
                model.train()
        return Trained(told, norms, snapshot(model), start, {"evaluation": evaluated})

    def on_ranks(self, rank: int) -> Trained:
        """On ranks."""
        import ds_hetero

        compute_in(torch.float64)
        handle = ds_hetero.register()
        told, norms, evaluated = [], [], []
        model, engine, schedule = self._begin(self.plan)
        steps = batches(self.plan, self.steps, self.packed)
        reader = iter(handle.for_engine(engine).dataloader(steps))
        for step in range(self.steps):
            batch = next(reader)
            loss = engine(**batch).loss
            engine.backward(_scaled(self, loss))
            engine.step()
            if schedule is not None:
                schedule.step()
            told.append((loss.item(), 1.0))
            norms.append(float(engine.get_global_grad_norm()))
            if step == 1 and self.evaluated:
                engine.eval()
                with torch.no_grad():
                    evaluated.append(engine(**batch).loss.item())
                engine.train()
            if step == 1 and self.resumed is not None:
                state = None if schedule is None else schedule.state_dict()
                engine.save_checkpoint("saved", "amid", client_state={"schedule": state})
                engine.destroy()
                model, engine, schedule = self._begin(self.resumed)
                _, state = engine.load_checkpoint("saved", "amid")
                if schedule is not None:
                    schedule.load_state_dict(state["schedule"])
                reader = iter(handle.for_engine(engine).dataloader(steps[2:]))
        parameters = _held(self, model)
        engine.destroy()
        return Trained(told, norms, parameters, {}, {"evaluation": evaluated})

    def _begin(self, plan: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Model, engine, and the schedule that the script steps."""
        import deepspeed

        model = _model(self)
        inner = optimizers.make(self.optimizing, model)
        config = {
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
            **optimizers.configuration(self.optimizing),
            "heterogeneity": {"schedule": plan},
        }
        schedule = optimizers.schedule_of_engine(self.optimizing, inner)
        engine, *_ = deepspeed.initialize(model=model, optimizer=inner, lr_scheduler=schedule, config=config)
        return model, engine, optimizers.schedule_of_script(self.optimizing, inner)


def draw(rng: random.Random) -> PipelineJob:
    """Any of them."""
    world_size = rng.choice([2, 3, 3, 4])
    plan = random_plan(rng, world_size)
    resumed = _of_as_many_samples(plan, random_plan(rng, world_size)) if rng.random() < 0.25 else None
    return PipelineJob(
        world_size=world_size,
        plan=plan,
        resumed=resumed,
        stage=rng.randrange(3),
        tied=rng.random() < 0.3,
        packed=rng.random() < 0.4,
        lora=rng.random() < 0.2,
        recomputed=rng.random() < 0.2,
        change=rng.choice(CHANGES),
        loss=rng.choice(LOSSES),
        optimizing=optimizers.draw(rng, _RECIPES),
        steps=3,
        evaluated=rng.random() < 0.3,
    )


def _of_as_many_samples(plan: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
    """The other plan with batches of one sample, of which its last pipeline takes what is left; None if too few."""
    samples = sum(p["micro_batch_size"] * p["micro_batches"] for p in plan["pipelines"])
    *first, last = other["pipelines"]
    if samples <= len(first):
        return None
    sizes = [1] * len(first) + [samples - len(first)]
    pipelines = [p | {"micro_batch_size": 1, "micro_batches": n} for p, n in zip([*first, last], sizes, strict=True)]
    return other | {"pipelines": pipelines}


def _model(job: PipelineJob) -> Any:
    model = llama(num_hidden_layers=LAYERS, num_key_value_heads=HEADS, tie_word_embeddings=job.tied).double()
    torch.manual_seed(5)
    modules.change(model, job.change)
    if job.loss in ("weighted", "smoothed"):
        form = "weighted by labels" if job.loss == "weighted" else "smoothed"
        losses.prepare(Loss(form, "loss_function", False, "", 1.0), model)
    if job.lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    if job.recomputed:
        checkpoint_activations(model, reentrant=False)
    return model.double().train()


def _loss_alone(job: PipelineJob, model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(**{name: entry for name, entry in batch.items() if name != "labels"}, use_cache=False).logits
    labels = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    form = {"weighted": "weighted by labels", "smoothed": "smoothed"}.get(job.loss, "plain")
    return losses.mean_of(form, logits, labels)


def _scaled(job: PipelineJob, loss: Tensor) -> Tensor:
    """What the script gives to backward."""
    if job.loss == "scaled":
        return loss * 0.5
    if job.loss == "added term":
        return loss + 1e-2 * loss.square()
    return loss


def _held(job: PipelineJob, model: Any) -> dict[str, Any]:
    """Trained parameters of this rank's stages, whole, under the names that one process has for them."""
    held = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            if job.tied:  # a last stage without the embedding has it as its head
                name = name.replace("lm_head", "model.embed_tokens")
            full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            held[name] = full.detach().cpu().numpy().copy()
    return held
