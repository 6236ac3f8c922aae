"""Loops around deepspeed.initialize: losses, modules, optimizers and loaders of the script's.

Amid a loop there may be an evaluation, a save after which another engine goes on under another schedule, and a change
of schedule as re-planning makes it.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

import torch

from benchmarks.proof.chance import random_schedule
from tests.integration.combinations import loaders, losses, modules, optimizers
from tests.integration.combinations.compare import Tolerance, Trained, snapshot, whole_parameters
from tests.integration.combinations.loaders import Loading
from tests.integration.combinations.losses import Loss
from tests.integration.combinations.modules import Module
from tests.integration.combinations.optimizers import Optimizing
from tests.integration.tiny import SMALL_BUCKETS

_HEADS = (4, 2)
EVALUATIONS = ("", "", "whole", "sharded", "sharded call")


@dataclass(frozen=True)
class LoopJob:
    """A loop of a script's own.

    Args:
        world_size: number of ranks.
        replicas: so many share the ranks equally.
        schedule: of the first replica; the others' is the same.
        stage: of ZeRO.
        module: what is trained.
        loss: what is backpropagated.
        optimizing: how gradients become steps.
        loading: what is read.
        accumulated: micro-batches of a step.
        steps: of the optimizer.
        evaluation: of `EVALUATIONS`, after the second step.
        resumed: schedule of the engine that goes on from a checkpoint after the second step; None for no resume.
        replanned: schedule that re-planning changes to after the second step; None for no change.
        weights: of "zero_partition", by rank; empty for equal ones.
        persistent: ZeRO-3 keeps small parameters whole, as it does unless told otherwise.
    """

    kind: ClassVar[str] = "loop"

    world_size: int
    replicas: int
    schedule: dict[str, Any]
    stage: int
    module: Module
    loss: Loss
    optimizing: Optimizing
    loading: Loading
    accumulated: int
    steps: int
    evaluation: str
    resumed: dict[str, Any] | None
    replanned: dict[str, Any] | None
    weights: tuple[int, ...]
    persistent: bool

    @property
    def tolerance(self) -> Tolerance:
        """Of its optimizer."""
        return self.optimizing.tolerance

    def describe(self) -> str:
        """For people."""
        parts = [
            f"{self.world_size} ranks, ZeRO {self.stage}",
            f"{self.replicas} replicas" if self.replicas > 1 else "",
            self.module.describe(),
            self.loss.describe(),
            self.optimizing.describe(),
            self.loading.describe(),
            f"{self.steps} steps of {self.accumulated} micro-batches",
            f"evaluation ({self.evaluation})" if self.evaluation else "",
            f"zero_partition {self.weights}" if self.weights else "",
            "persistent" if self.persistent and self.stage == 3 else "",
            f"schedule {self.schedule}",
            f"resumed under {self.resumed}" if self.resumed else "",
            f"re-planned to {self.replanned}" if self.replanned else "",
        ]
        return "; ".join(filter(None, parts))

    def alone(self) -> Trained:
        """On one process."""
        model = modules.make(self.module)
        losses.prepare(self.loss, model)
        start = snapshot(model)
        optimizer = optimizers.make(self.optimizing, model)
        schedule = optimizers.schedule_of_one_process(self.optimizing, optimizer)
        reader = loaders.micro_batches(self.loading, self.world_size, self.replicas)
        told, norms, rates, evaluated = [], [], [], []
        for step in range(self.steps):
            micro_batches = list(islice(reader, self.accumulated))
            items = sum(int(b["labels"][:, 1:].ne(-100).sum()) for of_all in micro_batches for b in of_all)
            for of_all in micro_batches:
                each = [losses.whole(self.loss, model, batch, step, items) for batch in of_all]
                loss = torch.stack(each).mean()
                (loss if self.loss.how == "items" else loss / self.accumulated).backward()
                told.append((loss.item(), 1.0))
            norms.append(optimizers.step_alone(optimizer, schedule, model, self.optimizing.clip))
            rates += [group["lr"] for group in optimizer.param_groups]
            if step == 1 and self.evaluation:
                model.eval()
                with torch.no_grad():
                    evaluated += _told_alone(self, model)
                model.train()
        numbers = {"rate": rates, "evaluation": evaluated, "buffers": modules.numbers_of(model)}
        return Trained([] if self._ranks_tell_no_mean else told, norms, snapshot(model), start, numbers)

    @property
    def _ranks_tell_no_mean(self) -> bool:
        """Whether the values of ranks cannot be put together without knowing their replicas."""
        return losses.is_local(self.loss) and (self.replicas > 1 or self.loss.how == "first_right")

    def on_ranks(self, rank: int) -> Trained:
        """On ranks."""
        with contextlib.ExitStack() as stack:
            if self.replanned:
                stack.enter_context(_scripted_replanning(self.replanned))
            return _Run(self, rank).trained()

    def configuration(self, schedule: dict[str, Any]) -> dict[str, Any]:
        """ds_config.json."""
        section: dict[str, Any] = {"schedule": schedule, **self.loss.section}
        if self.evaluation == "sharded":
            section["evaluation"] = "sharded"
        if self.weights:
            section["zero_partition"] = list(self.weights)
        if self.replanned:
            section |= {
                "replan": {"enabled": True, "interval_steps": 1},
                "seq_len": self.loading.lengths[1],
                "cluster": _cluster(self.world_size),
            }
        zero: dict[str, Any] = {"stage": self.stage, **SMALL_BUCKETS}
        if self.stage == 3 and not self.persistent:
            zero["stage3_param_persistence_threshold"] = 0
        return {
            "train_micro_batch_size_per_gpu": self.loading.batch,
            "gradient_accumulation_steps": self.accumulated,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "sequence_parallel_size": self.world_size // self.replicas,
            **optimizers.configuration(self.optimizing),
            "heterogeneity": section,
        }


class _Run:
    """One rank's part of a job."""

    def __init__(self, job: LoopJob, rank: int) -> None:
        import ds_hetero

        self._job, self._rank = job, rank
        self._handle = ds_hetero.register()
        self._told: list[tuple[float, float]] = []
        self._norms: list[float] = []
        self._rates: list[float] = []
        self._evaluated: list[float] = []
        self._begin(job.schedule)

    def _begin(self, schedule: dict[str, Any]) -> None:
        """Make model, engine and loader anew."""
        import deepspeed

        job = self._job
        self._model = modules.make(job.module)
        losses.prepare(job.loss, self._model)
        made: dict[str, Any] = {"model_parameters": optimizers.trained(self._model)}
        inner = None
        if not job.optimizing.is_of_configuration:
            inner = optimizers.make(job.optimizing, self._model)
            made = {"optimizer": inner, "lr_scheduler": optimizers.schedule_of_engine(job.optimizing, inner)}
        elif job.optimizing.schedule == "callable":
            made["lr_scheduler"] = optimizers.schedule_of_engine(job.optimizing, None)
        self._engine, *_ = deepspeed.initialize(model=self._model, config=job.configuration(schedule), **made)
        self._calls = self._handle.for_engine(self._engine)
        self._schedule_of_script = None if inner is None else optimizers.schedule_of_script(job.optimizing, inner)
        if job.loading.kind == "distributed over all ranks":
            plain = loaders.make(job.loading, self._rank, job.world_size)
        else:
            size = job.world_size // job.replicas
            plain = loaders.make(job.loading, self._rank // size, job.replicas)
        self._loader = plain if job.loss.how == "sharded_call" else self._calls.dataloader(plain)

    def trained(self) -> Trained:
        """Train all steps."""
        job = self._job
        reader = loaders.endless(self._loader)
        for step in range(job.steps):
            epoch = self._step(reader, step)
            if step == 1 and job.evaluation:
                self._evaluate()
            if step == 1 and job.resumed is not None:
                reader = self._resume(epoch)
        numbers = {"rate": self._rates, "evaluation": self._evaluated, "buffers": modules.numbers_of(self._model)}
        told = [] if job._ranks_tell_no_mean else self._told
        norms = self._norms if job.stage else []  # DeepSpeed keeps none without ZeRO
        came_to = Trained(told, norms, whole_parameters(self._model, job.stage), {}, numbers)
        self._engine.destroy()
        return came_to

    def _step(self, reader: Iterator[tuple[int, Any]], step: int) -> int:
        """One step of the optimizer; return the epoch of its last batch."""
        job, engine = self._job, self._engine
        epoch = 0
        if job.loss.how == "items":
            drawn = list(islice(reader, job.accumulated))
            items = self._calls.count_items([batch for _, batch in drawn])
        else:
            drawn, items = islice(reader, job.accumulated), None
        for epoch, batch in drawn:  # noqa: B007
            loss, told = losses.of_rank(job.loss, engine, self._calls, batch, step, items)
            engine.backward(loss, **({} if items is None else {"scale_wrt_gas": False}))
            engine.step()
            self._told.append(told)
        assert engine.global_steps == step + 1
        if self._schedule_of_script is not None:
            self._schedule_of_script.step()
        self._norms.append(float(engine.get_global_grad_norm() or 0.0))
        self._rates += engine.get_lr()
        return epoch

    def _evaluate(self) -> None:
        self._engine.eval()
        batch = _evaluated(self._job)
        with torch.no_grad():
            if self._job.evaluation == "sharded call":
                outputs = self._calls.sharded_call(self._engine, **batch)
            else:
                outputs = self._engine(**batch)
            self._evaluated += _told(outputs, self._job.evaluation)
        self._engine.train()

    def _resume(self, epoch: int) -> Iterator[tuple[int, Any]]:
        """Save, and go on with another engine under another schedule."""
        loader_file = f"loader{self._rank}.pt"  # ranks that read batches of their own have states of their own
        torch.save(self._loader.state_dict(), loader_file)
        schedule = self._schedule_of_script
        state = {"epoch": epoch, "schedule": None if schedule is None else schedule.state_dict()}
        self._engine.save_checkpoint("saved", "amid", client_state=state)
        self._engine.destroy()
        self._begin(self._job.resumed or {})
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.fill_(0.5)  # all of it comes from the checkpoint
        _, state = self._engine.load_checkpoint("saved", "amid")
        if self._schedule_of_script is not None:
            self._schedule_of_script.load_state_dict(state["schedule"])
        self._loader.load_state_dict(torch.load(loader_file, weights_only=False))
        return loaders.endless(self._loader, state["epoch"])


def draw(rng: random.Random) -> LoopJob:
    """Any of them."""
    world_size, replicas = rng.choice([(2, 1), (2, 1), (3, 1), (4, 1), (4, 2)])
    size = world_size // replicas
    module, loss, optimizing = modules.draw(rng), losses.draw(rng), optimizers.draw(rng)
    while replicas > 1 and module.change in modules.COUNT_FORWARDS:  # one process runs those of all replicas
        module = modules.draw(rng)
    stage = modules.draw_stage(rng, module.change)
    # A penalty on parameters needs them whole, which on ZeRO-3 takes a context of DeepSpeed's.
    while (loss.how == "items" and replicas > 1) or (loss.term == "penalty" and stage == 3):
        loss = losses.draw(rng)
    if module.change in modules.WITHOUT_SOME_GRADIENTS:
        optimizing = optimizers.draw(rng, optimizers.STATELESS)
    kinds = [k for k in loaders.KINDS if loss.how != "sharded_call" or k != "distributed over all ranks"]
    schedule, resumed, replanned = (random_schedule(rng, size, *_HEADS).to_dict() for _ in range(3))
    middle = rng.choice(["", "", "", "resumed", "replanned"])
    if loss.how == "sharded_call":
        middle = ""
    job = LoopJob(
        world_size=world_size,
        replicas=replicas,
        schedule=schedule,
        stage=stage,
        module=module,
        loss=loss,
        optimizing=optimizing,
        loading=loaders.draw(rng, world_size, replicas, kinds),
        accumulated=rng.choice([1, 1, 1, 2]),
        steps=rng.choice([3, 4]),
        evaluation=rng.choice(EVALUATIONS),
        resumed=resumed if middle == "resumed" else None,
        replanned=replanned if middle == "replanned" else None,
        weights=tuple(rng.randint(1, 4) for _ in range(world_size)) if stage and rng.random() < 0.2 else (),
        persistent=rng.random() < 0.5,
    )
    stage = optimizers.stage_for(optimizing, job.stage)
    return replace(job, stage=stage, weights=job.weights if stage else ())


def _evaluated(job: LoopJob) -> dict[str, torch.Tensor]:
    """A batch that is evaluated; of one length, since rows of others are padded by models in their own ways."""
    rows = loaders.samples(job.loading)
    same = [row for row in rows if len(row["input_ids"]) == len(rows[0]["input_ids"])]
    return loaders.collate(same[:2])


def _told_alone(job: LoopJob, model: Any) -> list[float]:
    """What `_told` says of ranks; the loss of a sharded call is the mean log-probability, whatever the model's is."""
    batch = _evaluated(job)
    outputs = model(**batch, use_cache=False)
    if job.evaluation == "sharded call":
        return [losses.mean_of("plain", outputs.logits[:, :-1], batch["labels"][:, 1:]).item()]
    return _told(outputs, job.evaluation)


def _told(outputs: Any, evaluation: str) -> list[float]:
    """Loss, and the mean square of the logits, which a sharded call leaves out."""
    told = [outputs.loss.item()]
    return told if evaluation == "sharded call" else [*told, outputs.logits.double().square().mean().item()]


def _cluster(world_size: int) -> dict[str, Any]:
    link = {"bandwidth_gb_per_s": 2, "latency_us": 50}
    return {"nodes": [{"name": "host", "device": "CPU", "count": world_size, "link": link}], "network": link}


@contextlib.contextmanager
def _scripted_replanning(schedule: dict[str, Any]) -> Iterator[None]:
    """Let re-planning change to a schedule after the second step, whatever the speeds are."""
    from ds_hetero.engine import monitoring
    from ds_hetero.job import monitor
    from ds_hetero.job.replanning import ScheduleChange
    from ds_hetero.values.schedule import Schedule

    class Scripted:
        """In the place of `ScheduleSearch`."""

        def __init__(self, start: Any) -> None:
            self._is_done = False

        def propose(self, step: int, plan: Any, seen: Any) -> list[ScheduleChange]:
            if step < 2 or self._is_done:
                return []
            self._is_done = True
            return [ScheduleChange(step=step, replica=0, schedule=Schedule.from_dict(schedule), gain=0.5)]

        def predicted_gain(self, plan: Any, seen: Any) -> None:
            return None

    stock = monitoring.ScheduleSearch, monitor.WARM_UP_STEPS
    monitoring.ScheduleSearch, monitor.WARM_UP_STEPS = Scripted, 0  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        monitoring.ScheduleSearch, monitor.WARM_UP_STEPS = stock  # type: ignore[misc]
