"""The Hugging Face Trainer against itself on one process: samplers, accumulation, losses, evaluation, resume."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.proof.chance import random_schedule
from tests.integration.combinations import loaders, losses, modules
from tests.integration.combinations.compare import RTOL_8BIT, Tolerance, Trained, snapshot, whole_parameters
from tests.integration.combinations.losses import Loss
from tests.integration.combinations.modules import Module
from tests.integration.tiny import ds_config
from tests.integration.trainer.test_trainer import logged, make_trainer

ORDERS = ("sequential", "random", "group_by_length", "own sampler", "stream", "distributed over all ranks")
# What the Trainer computes the loss by; "compute_loss" pops the labels and takes the logits, as in its documentation.
LOSSES = ("model", "model", "smoothing", "function", "loss_function", "term", "compute_loss")
_OF_WHOLE_BATCHES = ("smoothing", "function", "compute_loss")  # which all ranks of a replica have to hold
TAKES_ITEMS = ("yes", "yes", "accepts_loss_kwargs = False", "no **kwargs")
MODULES = ("", "", "", "zero mixer", "skipped experts", "rare parameters", "frozen layer", "gate", "buffer that counts")
# adagrad and rmsprop come with a denominator of 1e-10 and 1e-8: steps by the sign of the gradient.
_SIGN = Tolerance(series=3e-3, ignored=5e-3)
OPTIMIZERS = {
    "adamw_torch": (1e-2, Tolerance()),
    "sgd": (0.1, Tolerance()),
    "adagrad": (1e-2, _SIGN),
    "rmsprop": (1e-3, _SIGN),
    "adamw_bnb_8bit": (1e-2, Tolerance(RTOL_8BIT, series=1e-2)),
}
_STEPS, _SAVED = 4, 2


@dataclass(frozen=True)
class TrainerJob:
    """A job of the Trainer.

    Args:
        world_size: number of ranks.
        replicas: so many share the ranks equally; as many as ranks where `batch` is given.
        schedule: of a replica, and the one after a resume.
        batch: samples of every rank, of "batch"; empty where sequences are split.
        rows: samples, of one length or of several.
        varies: their lengths do, and so do their labels.
        per_device: samples of a micro-batch of a replica; their mean with `batch`.
        stage: of ZeRO.
        accumulated: micro-batches of a step.
        order: of `ORDERS`.
        loss: of `LOSSES`.
        takes_items: of `TAKES_ITEMS`: whether the model's forward takes num_items_in_batch.
        module: what is trained.
        optimizer: of `OPTIMIZERS`.
        rates: of lr_scheduler_type.
        decay: of weights, which makes two groups.
        clip: the largest norm.
        workers: processes that read.
        drop_last: a short last batch is left out.
        evaluated: every two steps, with the accuracy of the next token.
        evaluation: of the section, or "".
        resumed: another Trainer goes on from a checkpoint after the second step.
    """

    kind: ClassVar[str] = "trainer"

    world_size: int
    replicas: int
    schedule: tuple[dict[str, Any], dict[str, Any]]
    batch: tuple[int, ...]
    rows: int
    varies: bool
    per_device: int
    stage: int
    accumulated: int
    order: str
    loss: str
    takes_items: str
    module: Module
    optimizer: str
    rates: str
    decay: float
    clip: float
    workers: int
    drop_last: bool
    evaluated: bool
    evaluation: str
    resumed: bool

    @property
    def tolerance(self) -> Tolerance:
        """Of its optimizer."""
        return OPTIMIZERS[self.optimizer][1]

    def describe(self) -> str:
        """For people."""
        shares = f'"batch": {list(self.batch)}' if self.batch else f"{self.replicas} replicas"
        parts = [
            f"Trainer on {self.world_size} ranks, {shares}, ZeRO {self.stage}",
            self.module.describe(),
            f"takes items: {self.takes_items}",
            f"loss by {self.loss}",
            f"{self.optimizer}, {self.rates}, decay {self.decay}, clip {self.clip}",
            f"{self.rows} rows{' of unlike lengths' if self.varies else ''} {self.order}, {self.per_device} per device",
            f"accumulates {self.accumulated}",
            f"{self.workers} workers" if self.workers else "",
            "drop_last" if self.drop_last else "",
            f"evaluation {self.evaluation}" if self.evaluated else "",
            "" if self.batch else f"schedule {self.schedule[0]}",
            f"resumed under {self.schedule[1]}" if self.resumed else "",
        ]
        return "; ".join(filter(None, parts))

    def alone(self) -> Trained:
        """The Trainer on one process."""
        return self._train(None)

    def on_ranks(self, rank: int) -> Trained:
        """The Trainer on ranks."""
        import ds_hetero

        ds_hetero.register()
        return self._train(rank)

    def _train(self, rank: int | None) -> Trained:
        start: dict[str, Any] = {}
        for number, schedule in enumerate(self.schedule[: 1 + self.resumed]):
            model = _model(self)
            start = start or (snapshot(model) if rank is None else {})
            trainer = _trainer(self, rank, model, schedule)
            checkpoint = f"out/checkpoint-{_SAVED}" if number else None
            trainer.train(resume_from_checkpoint=checkpoint)
        stage = self.stage if rank is not None else 0
        numbers = _series(trainer, has_norms=self.stage > 0)
        if self.batch and self.varies:  # which counts padding, of which the ranks have less
            del numbers["num_input_tokens_seen"]
        parameters = whole_parameters(trainer.model, stage)
        return Trained([], [], parameters, start, numbers)


def draw(rng: random.Random) -> TrainerJob:
    """Any of them."""
    world_size, replicas = rng.choice([(2, 1), (2, 1), (3, 1), (4, 2), (2, 2)])
    batch: tuple[int, ...] = ()
    per_device = rng.choice([1, 2])
    if replicas == world_size:
        batch, per_device = (3, 1), 2
    takes_items = rng.choice(TAKES_ITEMS)
    # Rows of unlike lengths are padded by replica, and not as on one process.
    order = rng.choice(ORDERS if replicas == 1 else ORDERS[:4] if batch else ("sequential", "random", "own sampler"))
    loss = rng.choice(LOSSES)
    while order == "distributed over all ranks" and loss in _OF_WHOLE_BATCHES:
        loss = rng.choice(LOSSES)
    accumulated = rng.choice([1, 2, 2])
    varies = order == "group_by_length" or ((replicas == 1 or bool(batch)) and rng.random() < 0.6)
    changes = [change for change in MODULES if not batch or change in ("", "frozen layer", "gate")]
    change, size = rng.choice(changes), world_size // replicas
    schedules = [random_schedule(rng, size, 4, 2).to_dict() for _ in range(2)]
    return TrainerJob(
        world_size=world_size,
        replicas=replicas,
        schedule=(schedules[0], schedules[1]),
        batch=batch,
        rows=rng.randint(4, 9) * (per_device if replicas == 1 else per_device * replicas),
        varies=varies,
        per_device=per_device,
        stage=modules.draw_stage(rng, change),
        accumulated=accumulated,
        order=order,
        loss=loss,
        takes_items=takes_items,
        module=Module(change, rng.random() < 0.15, False, rng.random() < 0.15, 1),
        optimizer=rng.choices(list(OPTIMIZERS), [4, 3, 1, 1, 0.5])[0],
        rates=rng.choice(["linear", "cosine", "constant", "constant_with_warmup"]),
        decay=rng.choice([0.0, 0.1]),
        clip=rng.choice([0.0, 1.0, 0.5]),
        workers=1 if rng.random() < 0.1 else 0,
        drop_last=rng.random() < 0.25,
        evaluated=rng.random() < 0.4,
        evaluation="" if batch else rng.choice(["", "", "sharded", "whole"]),
        resumed=rng.random() < 0.3,
    )


def _model(job: TrainerJob) -> Any:
    model = modules.make(job.module)
    model.config.use_cache = False
    if job.loss == "loss_function":
        losses.prepare(Loss("weighted by labels", "loss_function", False, "", 1.0), model)
    if job.takes_items.startswith("accepts"):
        model.accepts_loss_kwargs = False
    if job.takes_items.startswith("no"):
        _hide_items(model)
    return model


def _hide_items(model: Any) -> None:
    """Give the model a forward without ``**kwargs``, as older remote code has."""
    kind, stock = type(model), type(model).forward

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
    ) -> Any:
        more = {} if shift_labels is None else {"shift_labels": shift_labels}
        return stock(self, input_ids, attention_mask, position_ids, labels=labels, use_cache=False, **more)

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})


def _rows_to_evaluate(job: TrainerJob) -> list[dict[str, Tensor]]:
    """Five rows, the last batch short; where ranks evaluate batches of their own, rows that make these alike."""
    if job.batch or job.replicas > 1 or job.evaluation == "whole":
        return _samples(replace(job, varies=False), 2 * job.per_device * job.world_size)
    return _samples(job, 5)


def _samples(job: TrainerJob, count: int) -> list[dict[str, Tensor]]:
    """Rows whose labels are unlike in number where they vary."""
    generator = torch.Generator().manual_seed(17)
    made = []
    for number in range(count):
        length = 20 + (7 * number) % 15 if job.varies else 24
        ids = torch.randint(8, 64, (length,), generator=generator)
        ids[(3 + 5 * number) % length] = modules.RARE_TOKEN
        labels = ids.clone()
        if job.varies:
            labels[: 3 if number % 2 else length - 5] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def _trainer(job: TrainerJob, rank: int | None, model: Any, schedule: dict[str, Any]) -> Any:
    per_device = job.per_device
    if rank is None:
        per_device *= job.replicas
    rate, _ = OPTIMIZERS[job.optimizer]
    rows: Any = _samples(job, job.rows)
    options: dict[str, Any] = {
        "num_train_epochs": 3,
        "max_steps": _STEPS,
        "per_device_train_batch_size": per_device,
        "per_device_eval_batch_size": per_device,
        "gradient_accumulation_steps": job.accumulated,
        "learning_rate": rate,
        "optim": job.optimizer,
        "lr_scheduler_type": job.rates,
        "warmup_steps": 2 if job.rates == "constant_with_warmup" else 0,
        "weight_decay": job.decay,
        "max_grad_norm": job.clip,
        "dataloader_num_workers": job.workers,
        "dataloader_drop_last": job.drop_last,
        "label_smoothing_factor": 0.1 if job.loss == "smoothing" else 0.0,
        "seed": 3,
    }
    if job.order in ("sequential", "random", "group_by_length"):
        options["train_sampling_strategy"] = job.order
    if job.evaluated:
        options |= {"eval_strategy": "steps", "eval_steps": 2}
    if job.resumed:
        options |= {"save_strategy": "steps", "save_steps": _SAVED}
    trainer = make_trainer(
        None if rank is None else _configuration(job, schedule),
        0 if job.batch else job.world_size // job.replicas,
        _kind(job, rank),
        model=model,
        dataset=loaders.Stream(rows) if job.order == "stream" else rows,
        data_collator=loaders.collate,
        more={"eval_dataset": _rows_to_evaluate(job), "compute_metrics": _accuracy},
        **options,
    )
    if job.loss == "function":
        trainer.compute_loss_func = _focal
    return trainer


def _configuration(job: TrainerJob, schedule: dict[str, Any]) -> dict[str, Any]:
    config = ds_config(
        job.stage,
        schedule,
        train_micro_batch_size_per_gpu=job.per_device,
        gradient_accumulation_steps=job.accumulated,
        gradient_clipping=job.clip,
    )
    if job.batch:
        config["heterogeneity"] = {"batch": list(job.batch)}
    if job.evaluation:
        config["heterogeneity"]["evaluation"] = job.evaluation
    return config


def _kind(job: TrainerJob, rank: int | None) -> type:
    """The Trainer as a script derives from it."""
    from transformers import Trainer

    import ds_hetero

    class OfScript(Trainer):
        """With what a script puts in the place of its methods."""

    if job.loss == "term":

        def compute_loss(
            self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            loss, outputs = Trainer.compute_loss(self, model, inputs, True, num_items_in_batch)
            values = outputs.logits.logsumexp(-1).square()
            if model.training and rank is not None:
                handle = ds_hetero.register()
                loss = loss + 0.01 * handle.mean(values, inputs, num_items=num_items_in_batch)
            elif model.training:
                counted = nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100).ne(-100)
                divisor = counted.sum() if num_items_in_batch is None else num_items_in_batch
                loss = loss + 0.01 * values[counted].sum() / divisor
            return (loss, outputs) if return_outputs else loss

        OfScript.compute_loss = compute_loss  # type: ignore[method-assign]
    if job.loss == "compute_loss":

        def of_logits(
            self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            logits = outputs.logits[:, :-1].flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
            return (loss, outputs) if return_outputs else loss

        OfScript.compute_loss = of_logits  # type: ignore[method-assign]
    if job.order == "own sampler":

        def sampler(self: Any, train_dataset: Any = None) -> Any:
            return loaders.OwnSampler(job.rows)

        OfScript._get_train_sampler = sampler  # type: ignore[method-assign]
    if job.order == "distributed over all ranks":

        def get_train_dataloader(self: Any) -> Any:
            rows = self.train_dataset
            if rank is None:
                return DataLoader(rows, batch_sampler=_in_turn(job), collate_fn=loaders.collate)
            own = DistributedSampler(rows, job.world_size, rank, shuffle=False)
            options = {"collate_fn": loaders.collate, "drop_last": job.drop_last}
            return DataLoader(rows, job.per_device, sampler=own, **options)

        OfScript.get_train_dataloader = get_train_dataloader  # type: ignore[method-assign]
    return OfScript


def _in_turn(job: TrainerJob) -> list[list[int]]:
    """Batches of all ranks' distributed samplers, used in turn."""
    rows = range(job.rows)
    indices = [list(DistributedSampler(rows, job.world_size, r, shuffle=False)) for r in range(job.world_size)]  # type: ignore[arg-type]
    batches = []
    for start in range(0, len(indices[0]), job.per_device):
        for of_rank in indices:
            batch = of_rank[start : start + job.per_device]
            if len(batch) == job.per_device or not job.drop_last:
                batches.append(batch)
    return batches


def _focal(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    labels = labels[:, 1:]
    log_p = outputs.logits[:, :-1].log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    by_token = -log_p * (1 - log_p.exp()).square()
    count = labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch
    return by_token[labels.ne(-100)].sum() / count


def _series(trainer: Any, *, has_norms: bool) -> dict[str, list[float]]:
    """Logged numbers by name; DeepSpeed keeps no norms without ZeRO."""
    series: dict[str, list[float]] = defaultdict(list)
    for entry in [*logged(trainer), *_evaluations(trainer)]:
        for name, value in entry.items():
            if name != "grad_norm" or has_norms:
                series[name].append(float(value))
    return dict(series)


def _evaluations(trainer: Any) -> Iterator[dict[str, float]]:
    for entry in trainer.state.log_history:
        if "eval_loss" in entry:
            yield {name: entry[name] for name in ("eval_loss", "eval_accuracy", "eval_counted")}


def _accuracy(predicted: Any) -> dict[str, float]:
    """Of the next token, and how many labels counted."""
    logits, labels = predicted.predictions, predicted.label_ids
    if isinstance(logits, tuple):
        logits = logits[0]
    counts = labels[:, 1:] != -100
    hits = (logits[:, :-1].argmax(-1) == labels[:, 1:]) & counts
    return {"accuracy": 1 + float(hits.sum()), "counted": float(counts.sum())}
