"""``"batch"``: batches of unequal sizes on every rank, for modules of a script's own and for language models.

Losses by module:

    mean            mean over samples of the model's own
    class weights   cross entropy weighted by class: a mean over the weights of the samples
    positives       a sum over positives, over their number
    ignored         cross entropy without a class that does not count
    multi task      samples of two tasks, each with a head of its own
    running mean    less a running mean over the batch of training
    mixed           samples are mixed in training
    text            a language model
    text, own loss  a language model whose loss the script computes from logits, declared by "loss"
    text, annealed  a mean over tokens, and from the second step on a mean over samples as well
    penalty         mean over samples of the model's own, and a penalty on weights; is not drawn, see
                    tests/integration/loops/test_accumulated_means.py
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.integration.combinations import loaders, optimizers
from tests.integration.combinations.compare import Tolerance, Trained, snapshot, whole_parameters
from tests.integration.combinations.optimizers import Optimizing
from tests.integration.tiny import SMALL_BUCKETS, VOCAB, llama

MODULES = (
    "mean",
    "mean",
    "class weights",
    "positives",
    "ignored",
    "multi task",
    "running mean",
    "mixed",
    "text",
    "text",
    "text, own loss",
    "text, annealed",
)
# Means over something else than samples or tokens: averaged over the micro-batches of a step, as one process does.
BY_MICRO_BATCH = ("class weights", "positives", "ignored")
_CLASSES, _WIDTH = 4, 8


@dataclass(frozen=True)
class UnequalJob:
    """A job in which ranks take batches of unequal sizes.

    Args:
        world_size: number of ranks.
        batch: samples of each rank's micro-batch.
        stage: of ZeRO.
        module: of `MODULES`.
        optimizing: how gradients become steps.
        order: "sequential", "shuffled", "own sampler" or "stream".
        rows: samples of an epoch.
        accumulated: micro-batches of a step.
        steps: of the optimizer.
        first_alike: the samples of the first batch are of one class, so that it does not show what the loss is.
        weights: of "zero_partition"; empty for equal ones.
        evaluated: forwards in eval() after the second step.
    """

    kind: ClassVar[str] = "unequal"

    world_size: int
    batch: tuple[int, ...]
    stage: int
    module: str
    optimizing: Optimizing
    order: str
    rows: int
    accumulated: int
    steps: int
    first_alike: bool
    weights: tuple[int, ...]
    evaluated: bool

    @property
    def tolerance(self) -> Tolerance:
        """Of its optimizer."""
        return self.optimizing.tolerance

    def describe(self) -> str:
        """For people."""
        parts = [
            f'"batch": {list(self.batch)}, ZeRO {self.stage}, {self.module}',
            self.optimizing.describe(),
            f"{self.rows} rows ({self.order})" + (", the first of one class" if self.first_alike else ""),
            f"{self.steps} steps of {self.accumulated} micro-batches",
            f"zero_partition {self.weights}" if self.weights else "",
            "evaluation" if self.evaluated else "",
        ]
        return "; ".join(filter(None, parts))

    def alone(self) -> Trained:
        """On one process, whose micro-batches are those of all ranks, one after another."""
        model = _model(self)
        start = snapshot(model)
        optimizer = optimizers.make(self.optimizing, model)
        schedule = optimizers.schedule_of_one_process(self.optimizing, optimizer)
        reader = loaders.endless(_loader(self, sum(self.batch) * self.accumulated))
        told, norms, evaluated = [], [], []
        for step, (_, batch) in enumerate(islice(reader, self.steps)):
            loss = self._loss_of_step(model, batch, step)
            loss.backward()
            told.append((loss.item(), 1.0))
            norms.append(optimizers.step_alone(optimizer, schedule, model, self.optimizing.clip))
            if step == 1 and self.evaluated:
                model.eval()
                with torch.no_grad():
                    evaluated.append(_loss(self, model, _evaluated(self), step).item())
                model.train()
        numbers = {"evaluation": evaluated}
        return Trained(told if self._losses_are_known else [], norms, snapshot(model), start, numbers)

    def _loss_of_step(self, model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
        """Of all samples of a step, by the rules of docs/unequal-losses.md, "Accumulation".

        A mean over samples or tokens, which the first batch shows, is one over those of the step; any other is averaged
        over the micro-batches.
        """
        parts = _micro_batches(batch, sum(self.batch))
        if self.module in BY_MICRO_BATCH:
            return torch.stack([_loss(self, model, part, step) for part in parts]).mean()
        if self.module == "text, annealed" and step:  # the first batch shows that it is a mean over tokens
            terms = torch.stack([_mean_over_samples(_outputs(model, part)) for part in parts])
            return _outputs(model, batch).loss + terms.mean()
        return _loss(self, model, batch, step)

    @property
    def _losses_are_known(self) -> bool:
        """Whether ranks' losses weighed by what they say make up the whole."""
        return self.module in ("mean", "text", "text, own loss")

    def on_ranks(self, rank: int) -> Trained:
        """On ranks."""
        import deepspeed

        import ds_hetero

        handle = ds_hetero.register()
        model = _model(self)
        made: dict[str, Any] = {"model_parameters": optimizers.trained(model)}
        inner = None
        if not self.optimizing.is_of_configuration:
            inner = optimizers.make(self.optimizing, model)
            made = {"optimizer": inner, "lr_scheduler": optimizers.schedule_of_engine(self.optimizing, inner)}
        elif self.optimizing.schedule == "callable":
            made["lr_scheduler"] = optimizers.schedule_of_engine(self.optimizing, None)
        engine, *_ = deepspeed.initialize(model=model, config=self._configuration(), **made)
        schedule = None if inner is None else optimizers.schedule_of_script(self.optimizing, inner)
        loader = handle.for_engine(engine).dataloader(_loader(self, 3))
        told, norms, evaluated = [], [], []
        reader = loaders.endless(loader)
        for step in range(self.steps):
            total = weight = 0.0
            for _, batch in islice(reader, self.accumulated):
                loss = _loss(self, engine, batch, step)
                engine.backward(loss)
                engine.step()
                # One that fills a step up is a copy of the batch before, and counts nothing.
                is_filler = not handle.registry.find(model).batches.order.latest.counts.sample_mean
                own = 0.0 if is_filler else _weight(self, batch)
                if own:  # a mean over nothing is NaN
                    total, weight = total + own * float(loss.detach()), weight + own
            told.append((total / weight if weight else 0.0, weight))
            if schedule is not None:
                schedule.step()
            norms.append(float(engine.get_global_grad_norm() or 0.0))
            if step == 1 and self.evaluated:
                engine.eval()
                with torch.no_grad():
                    evaluated.append(_loss(self, engine, _evaluated(self), step).item())
                engine.train()
        assert engine.global_steps == self.steps
        came_to = Trained(
            told if self._losses_are_known else [],
            norms if self.stage else [],
            whole_parameters(model, self.stage),
            {},
            {"evaluation": evaluated},
        )
        engine.destroy()
        return came_to

    def _configuration(self) -> dict[str, Any]:
        section: dict[str, Any] = {"batch": list(self.batch)}
        if self.module == "text, own loss":
            section["loss"] = "token_mean"
        if self.weights:
            section["zero_partition"] = list(self.weights)
        return {
            "gradient_accumulation_steps": self.accumulated,
            "zero_optimization": {"stage": self.stage, **SMALL_BUCKETS},
            "zero_allow_untested_optimizer": True,
            **optimizers.configuration(self.optimizing),
            "heterogeneity": section,
        }


def draw(rng: random.Random) -> UnequalJob:
    """Any of them."""
    world_size = rng.choice([2, 2, 3])
    batch = tuple(rng.randint(1, 3) for _ in range(world_size))
    if len({*batch}) == 1:
        batch = (batch[0] + 1, *batch[1:])
    module = rng.choice(MODULES)
    # On ZeRO-3 ranks that call other heads wait for each other: docs/limits.md, Known defects.
    stage = rng.randrange(3 if module == "multi task" else 4)
    recipes = optimizers.STATELESS if module == "multi task" else optimizers.IN_FP32
    accumulated = rng.choice([1, 1, 2])
    whole = rng.random() < 0.6
    job = UnequalJob(
        world_size=world_size,
        batch=batch,
        stage=stage,
        module=module,
        optimizing=optimizers.draw(rng, recipes),
        order=rng.choice(["sequential", "shuffled", "own sampler", "stream"]),
        rows=sum(batch) * 2 * rng.choice([1, 2])
        + (0 if whole else rng.randint(1, sum(batch) - 1)),  # a short last batch
        accumulated=accumulated,
        steps=rng.choice([3, 4]),
        first_alike=rng.random() < 0.5,
        weights=tuple(rng.randint(1, 3) for _ in range(world_size)) if stage and rng.random() < 0.15 else (),
        evaluated=rng.random() < 0.3,
    )
    stage = optimizers.stage_for(job.optimizing, job.stage)
    return replace(job, stage=stage, weights=job.weights if stage else ())


class Rows(nn.Module):
    """Rows of numbers to classes or values; the loss is made in the forward."""

    def __init__(self, module: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.module = module
        self.first, self.last = nn.Linear(_WIDTH, 16), nn.Linear(16, _CLASSES)
        self.other = nn.Linear(16, _CLASSES) if module == "multi task" else None
        self.register_buffer("running", torch.zeros(16))

    def forward(self, x: Tensor, y: Tensor, tasks: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.module == "running mean":
            if self.training and torch.is_grad_enabled():
                self.running.lerp_(hidden.detach().mean(0), 0.5)
            hidden = hidden - self.running
        if self.module == "mixed" and self.training:
            hidden = 0.7 * hidden + 0.3 * hidden.roll(1, 0)
        hidden = torch.tanh(hidden)
        outputs = self.last(hidden)
        if self.other is not None:
            return self._by_tasks(hidden, y, tasks)
        if self.module == "class weights":
            return nn.functional.cross_entropy(outputs, y, weight=torch.tensor([1.0, 10.0, 1.0, 3.0]))
        if self.module == "positives":
            bits = (y[:, None] + 1) // 2 ** torch.arange(_CLASSES) % 2
            by_class = nn.functional.binary_cross_entropy_with_logits(outputs, bits.float(), reduction="sum")
            return by_class / bits.sum()
        if self.module == "penalty":
            return nn.functional.cross_entropy(outputs, y) + 0.1 * self.last.weight.square().sum()
        if self.module == "ignored":
            return nn.functional.cross_entropy(outputs, y, ignore_index=_CLASSES - 1)
        return nn.functional.cross_entropy(outputs, y)

    def _by_tasks(self, hidden: Tensor, y: Tensor, tasks: Tensor) -> Tensor:
        """A head that no sample of the batch is for is not called."""
        total = hidden.new_zeros(())
        for task, head in enumerate((self.last, self.other)):
            if (tasks == task).any():
                chosen = tasks == task
                total = total + nn.functional.cross_entropy(head(hidden[chosen]), y[chosen], reduction="sum")
        return total / len(y)


def _model(job: UnequalJob) -> Any:
    if job.module.startswith("text"):
        return llama(num_hidden_layers=1).train()
    return Rows(job.module).train()


def _samples(job: UnequalJob) -> list[dict[str, Tensor]]:
    """Rows with their numbers."""
    generator = torch.Generator().manual_seed(13)
    made = []
    for number in range(job.rows):
        is_first = job.first_alike and number < sum(job.batch)
        if job.module.startswith("text"):
            ids = torch.randint(8, VOCAB, (21,), generator=generator)
            labels = ids.clone()
            labels[: 3 if is_first else (5 * number) % 17] = -100
            made.append({"input_ids": ids, "labels": labels})
            continue
        x, tasks = torch.randn(_WIDTH, generator=generator), torch.tensor(number % 2)
        y = torch.tensor(0 if is_first else (number * 7 + number // 3) % _CLASSES)
        made.append({"x": x, "y": y, "tasks": tasks})
    for number, row in enumerate(made):
        row["number"] = torch.tensor(number)
    return made


def _loader(job: UnequalJob, batch_size: int) -> Any:
    rows: Any = _samples(job)
    options: dict[str, Any] = {"batch_size": batch_size, "collate_fn": loaders.collate_any}
    if job.order == "stream":
        return DataLoader(loaders.Stream(rows), **options)
    if job.order == "shuffled":
        return DataLoader(rows, shuffle=True, generator=torch.Generator().manual_seed(4), **options)
    sampler = loaders.OwnSampler(job.rows) if job.order == "own sampler" else None
    return DataLoader(rows, sampler=sampler, **options)


def _evaluated(job: UnequalJob) -> dict[str, Tensor]:
    return loaders.collate_any(_samples(job)[:4])


def _loss(job: UnequalJob, model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    batch = {name: entry for name, entry in batch.items() if name != "number"}
    if not job.module.startswith("text"):
        loss: Tensor = model(**batch)
        return loss
    if job.module == "text, own loss":
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    outputs = model(**batch)
    if job.module == "text, annealed" and step:
        return outputs.loss + _mean_over_samples(outputs)
    return outputs.loss


def _outputs(model: Any, batch: dict[str, Tensor]) -> Any:
    return model(**{name: entry for name, entry in batch.items() if name != "number"})


def _mean_over_samples(outputs: Any) -> Tensor:
    """The term that "text, annealed" adds."""
    term: Tensor = outputs.logits.mean(1).square().sum(-1).mean()
    return term


def _micro_batches(batch: dict[str, Tensor], rows: int) -> list[dict[str, Tensor]]:
    """A batch in parts of so many rows, the last perhaps shorter."""
    count = len(batch["number"])
    return [{name: entry[start : start + rows] for name, entry in batch.items()} for start in range(0, count, rows)]


def _weight(job: UnequalJob, batch: dict[str, Tensor]) -> float:
    """Of a rank's loss in that of all ranks; none of a filler, which it gets where there is nothing left for it."""
    if not len(batch["number"]):
        return 0.0
    if job.module.startswith("text"):
        return float(batch["labels"][:, 1:].ne(-100).sum())
    return float(len(batch["number"]))
