"""Loops with accelerate: loaders that it prepares, accumulation, schedulers, evaluation with gathered rows, resume."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader

from benchmarks.proof.chance import random_schedule
from tests.integration.combinations import loaders, losses, modules, optimizers
from tests.integration.combinations.compare import Tolerance, Trained, snapshot, whole_parameters
from tests.integration.combinations.loaders import Loading
from tests.integration.combinations.losses import Loss
from tests.integration.combinations.modules import Module
from tests.integration.combinations.optimizers import Optimizing
from tests.integration.tiny import ds_config

KINDS = ("sequential", "shuffled", "own sampler", "by length", "weighted", "stream")
_RECIPES = tuple(name for name in optimizers.IN_FP32 if optimizers.RECIPES[name].module == "torch.optim")
_LOSSES = (
    Loss("plain", "model", False, "", 1.0),
    Loss("plain", "handle", False, "", 1.0),
    Loss("plain", "recipe", False, "", 1.0),
    Loss("weighted", "recipe", False, "", 1.0),
    Loss("plain", "local_mean", False, "", 1.0),
    Loss("plain", "handle", False, "annealed", 1.0),
    Loss("smoothed", "loss_function", False, "", 1.0),
)
_CHANGES = ("", "", "", "skipped experts", "rare parameters", "frozen layer", "gate", "buffer that counts")


@dataclass(frozen=True)
class AccelerateJob:
    """A loop with accelerate.

    Args:
        world_size: number of ranks.
        replicas: so many share the ranks equally.
        schedule: of the first replica.
        stage: of ZeRO.
        module: what is trained.
        loss: what is backpropagated.
        optimizing: how gradients become steps; "schedule" is a LambdaLR that accelerate prepares.
        loading: what is read.
        accumulated: micro-batches of a step.
        epochs: of training.
        evaluated: after each epoch, with gather_for_metrics over a loader whose last batch is short.
        evaluation: of the section, or "".
        has_parallelism: the Accelerator is given a ParallelismConfig.
    """

    kind: ClassVar[str] = "accelerate"

    world_size: int
    replicas: int
    schedule: dict[str, Any]
    stage: int
    module: Module
    loss: Loss
    optimizing: Optimizing
    loading: Loading
    accumulated: int
    epochs: int
    evaluated: bool
    evaluation: str
    has_parallelism: bool

    @property
    def tolerance(self) -> Tolerance:
        """Of its optimizer."""
        return self.optimizing.tolerance

    def describe(self) -> str:
        """For people."""
        parts = [
            f"accelerate on {self.world_size} ranks, {self.replicas} replicas, ZeRO {self.stage}",
            "ParallelismConfig" if self.has_parallelism else "",
            self.module.describe(),
            self.loss.describe(),
            self.optimizing.describe(),
            self.loading.describe(),
            f"{self.epochs} epochs, steps of {self.accumulated} micro-batches",
            f"evaluation {self.evaluation}" if self.evaluated else "",
            f"schedule {self.schedule}",
        ]
        return "; ".join(filter(None, parts))

    def alone(self) -> Trained:
        """On one process, whose batches are those of all replicas."""
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        return self._train(Accelerator(gradient_accumulation_steps=self.accumulated, cpu=True), None)

    def on_ranks(self, rank: int) -> Trained:
        """On ranks."""
        from accelerate import Accelerator, ParallelismConfig
        from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig

        import ds_hetero

        handle = ds_hetero.register()
        size = self.world_size // self.replicas
        config = ds_config(
            self.stage,
            self.schedule,
            train_micro_batch_size_per_gpu=self.loading.batch,
            gradient_accumulation_steps=self.accumulated,
            gradient_clipping=self.optimizing.clip,
        )
        config["heterogeneity"] |= self.loss.section
        if self.evaluation:
            config["heterogeneity"]["evaluation"] = self.evaluation
        options: dict[str, Any] = {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config)}
        if self.has_parallelism:
            options["parallelism_config"] = ParallelismConfig(
                sp_backend="deepspeed",
                sp_size=size,
                dp_shard_size=self.replicas,
                sp_handler=DeepSpeedSequenceParallelConfig(
                    sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
                ),
            )
        else:
            config["sequence_parallel_size"] = size
        return self._train(Accelerator(gradient_accumulation_steps=self.accumulated, **options), handle)

    def _train(self, accelerator: Any, handle: Any) -> Trained:
        """The script; ``handle`` is None on one process."""
        from accelerate.utils import set_seed

        is_split = handle is not None
        model = modules.make(self.module)
        losses.prepare(self.loss, model)
        start = {} if is_split else snapshot(model)
        optimizer = optimizers.make(self.optimizing, model)
        loader = _loader(self, 1 if is_split else self.replicas)
        # accelerate means the steps of one process: with several it advances as many at a time.
        per_step = 1 if is_split else self.replicas
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step * per_step))
        evaluation: Any = DataLoader(_rows_to_evaluate(self), 2 if is_split else 2 * self.replicas)
        set_seed(0)
        model, optimizer, loader, evaluation, scheduler = accelerator.prepare(
            model, optimizer, loader, evaluation, scheduler
        )
        told, norms, rates, gathered = [], [], [], []
        for epoch in range(self.epochs):
            model.train()
            for step, batch in enumerate(loader):
                with accelerator.accumulate(model):
                    loss, value = self._loss(model, handle, batch, epoch + step)
                    accelerator.backward(loss)
                    told.append(value)
                    if accelerator.sync_gradients and self.optimizing.clip:
                        norm = accelerator.clip_grad_norm_(model.parameters(), self.optimizing.clip)
                        norms.append(float(norm or 0.0) if not is_split else float(model.get_global_grad_norm() or 0.0))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    rates.append(scheduler.get_last_lr()[0])
            if self.evaluated:
                gathered += self._evaluate(accelerator, model, evaluation)
        inner = accelerator.unwrap_model(model)
        numbers = {"rate": rates, "evaluation": gathered, "buffers": modules.numbers_of(inner)}
        parameters = whole_parameters(inner, self.stage if is_split else 0)
        if self.replicas > 1:
            told = []  # each replica sees its own
        return Trained(told, norms if self.stage else [], parameters, start, numbers)

    def _loss(self, model: Any, handle: Any, batch: dict[str, Any], step: int) -> Any:
        if handle is None:
            loss = losses.whole(self.loss, model, batch, step, 0)
            return loss, (loss.item(), 1.0)
        return losses.of_rank(self.loss, model, handle, batch, step, None)

    def _evaluate(self, accelerator: Any, model: Any, evaluation: Any) -> list[float]:
        """Losses by row, and their numbers, gathered; sorted, since replicas read in turn."""
        model.eval()
        found = []
        for batch in evaluation:
            numbers = batch.pop("number")
            with torch.no_grad():
                each = [model(input_ids=row[None], labels=row[None]).loss for row in batch["input_ids"]]
            rows = accelerator.gather_for_metrics(torch.stack([numbers.float(), torch.stack(each).float()], 1))
            found += [tuple(row) for row in rows.tolist()]
        return [value for row in sorted(found) for value in row]


def draw(rng: random.Random) -> AccelerateJob:
    """Any of them."""
    world_size, replicas = rng.choice([(2, 1), (2, 1), (3, 1), (4, 2)])
    # One process divides by the weights of all replicas' labels, and replicas are averaged whatever these are.
    loss = rng.choice([loss for loss in _LOSSES if replicas == 1 or loss.form != "weighted"])
    optimizing = optimizers.draw(rng, _RECIPES)
    change = rng.choice(_CHANGES)
    loading = loaders.draw(rng, world_size, replicas, KINDS)
    return AccelerateJob(
        world_size=world_size,
        replicas=replicas,
        schedule=random_schedule(rng, world_size // replicas, 4, 2).to_dict(),
        stage=optimizers.stage_for(optimizing, modules.draw_stage(rng, change)),
        module=Module(change, rng.random() < 0.15, rng.random() < 0.1, False, 1),
        loss=loss,
        optimizing=Optimizing(optimizing.recipe, optimizing.groups, "", optimizing.clip),
        loading=loading,
        accumulated=rng.choice([1, 1, 2]),
        epochs=rng.choice([1, 2]),
        evaluated=rng.random() < 0.4,
        evaluation=rng.choice(["", "sharded"]),
        has_parallelism=rng.random() < 0.6,
    )


def _loader(job: AccelerateJob, replicas: int) -> Any:
    """Of the script: accelerate deals batches out to replicas; on one process they are as many times as large."""
    if job.replicas == 1:
        return loaders.make(job.loading)
    rows: Any = loaders.samples(job.loading)
    return DataLoader(rows, job.loading.batch * replicas, collate_fn=loaders.collate)


def _rows_to_evaluate(job: AccelerateJob) -> list[dict[str, torch.Tensor]]:
    rows = loaders.samples(job.loading)
    length = min(len(row["input_ids"]) for row in rows)
    count = 5 if job.replicas == 1 else 4 * job.replicas
    return [{"input_ids": rows[i % len(rows)]["input_ids"][:length], "number": torch.tensor(i)} for i in range(count)]
