"""A job with a planted fault: a custom training loop, on ranks and on one process.

`run_on_ranks` trains it on gloo ranks with ds_hetero. `run_alone` is the reference, plain torch on one process, in
which `Job.is_culprit` is always false. A fault overrides one method of the loop.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.integration.tiny import SMALL_BUCKETS, UNEVEN_2, VOCAB, llama, mean_over_group, parameters

STEPS = 6
LENGTH = 37
IGNORED = -100
STEPS_TAKEN = "planted: steps taken"  # printed, for ranks that end without an exception


@dataclass
class Trace:
    """Results of one rank, or of one process."""

    steps: int = 0  # that were taken
    error: str = ""
    message: str = ""
    is_ours: bool = True  # the error is one of ds_hetero's
    warnings: list[tuple[int, str]] = field(default_factory=list)  # (step, text)
    losses: list[float] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)  # parameters after the last step
    start: dict[str, Any] = field(default_factory=dict)


class Job:
    """A job without a fault: a Llama with the engine's loss. A subclass overrides one method to plant a fault."""

    name: ClassVar[str] = ""
    what: ClassVar[str] = ""
    begins: ClassVar[int | None] = 3  # step, from 0; None where nothing is wrong
    says: ClassVar[str] = ""  # regular expression that a right message matches
    world: ClassVar[int] = 2
    stage: ClassVar[int] = 1
    schedule: ClassVar[Any] = UNEVEN_2  # None where models run whole
    section: ClassVar[Mapping[str, Any]] = {}
    keys: ClassVar[Mapping[str, Any]] = {}
    accumulation: ClassVar[int] = 1
    lr: ClassVar[float] = 0.1
    is_random: ClassVar[bool] = False  # ranks draw other numbers than one process: only refusals are looked at
    is_apart: ClassVar[bool] = False  # leaves state of a framework behind: has ranks of its own

    def __init__(self, rank: int, *, alone: bool) -> None:
        self.rank, self.alone, self.step = rank, alone, 0
        self.memory: dict[str, Any] = {}
        self.model: Any = None
        self.engine: Any = None
        self.handle: Any = None
        self.optimizer: Any = None

    @property
    def is_culprit(self) -> bool:
        """Whether this rank makes the mistake, and the step at which it begins is reached."""
        return not self.alone and self.rank == 1 and self.has_begun

    @property
    def is_beginning(self) -> bool:
        """Whether this rank makes the mistake, and this is the step at which it begins."""
        return self.is_culprit and self.step == self.begins

    @property
    def has_begun(self) -> bool:
        """Whether the step at which the mistake begins is reached."""
        return self.begins is not None and self.step >= self.begins

    # --- what a fault overrides ---------------------------------------------------------------------

    def make_model(self) -> Any:
        return llama()

    def make_optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=self.lr)

    def batches(self) -> list[dict[str, Tensor]]:
        return whole_batches(STEPS * self.accumulation)

    def loader(self) -> Iterable[Any]:
        """Return this rank's loader."""
        shards: Iterable[Any] = self.handle.dataloader(self.batches(), batches="same")
        return shards

    def ready(self) -> None:
        """Act when the engine has been built."""

    def change(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch that the script gives to its forward."""
        return batch

    def forward(self, batch: dict[str, Any]) -> Any:
        return self.engine(**batch)

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Tensor:
        loss: Tensor = outputs.loss
        return loss

    def before_step(self) -> None:
        """Act when the gradients are complete."""

    def after_step(self) -> None:
        """Act after the optimizer's step."""

    # --- what scripts compute -----------------------------------------------------------------------

    def local_mean(self, outputs: Any, batch: dict[str, Any], **options: Any) -> Tensor:
        return cross_entropy(outputs.logits, batch["shift_labels"], **options)

    def recipe(self, outputs: Any, batch: dict[str, Any]) -> Tensor:
        """Return the loss that accelerate and transformers document."""
        local = self.local_mean(outputs, batch)
        return local if self.alone else mean_over_group(local, batch["shift_labels"], self.handle.replica.sp_group)

    def mean(self, values: Tensor, batch: dict[str, Any]) -> Tensor:
        """Return the mean of values over the tokens that have labels, on all ranks."""
        if not self.alone:
            mean: Tensor = self.handle.mean(values, batch)
            return mean
        counts = batch["shift_labels"].ne(IGNORED)
        return (values * counts).sum() / counts.sum()

    # --- training -----------------------------------------------------------------------------------

    def train(self, *, checks: bool = True) -> Trace:
        """Train to the end, or to the first error."""
        trace = Trace()
        handler = _Warnings(self, trace)
        logging.getLogger("ds_hetero").addHandler(handler)
        try:
            self._train(trace, checks)
        except Exception as error:
            from ds_hetero.errors import HeteroError, PeerError

            trace.error, trace.message = type(error).__name__, " ".join(str(error).split())
            trace.is_ours = isinstance(error, (HeteroError, PeerError))
        finally:
            logging.getLogger("ds_hetero").removeHandler(handler)
            if self.handle is not None:
                self.handle.undo()
        return trace

    def _train(self, trace: Trace, checks: bool) -> None:
        """Build the engine and train all steps."""
        if self.alone:
            self._build_alone()
            batches: Iterable[Any] = [_as_one_process(batch) for batch in self.batches()]
        else:
            self._build(checks)
            batches = self.loader()
        trace.start = self._parameters()
        self.ready()
        loss_of_step = 0.0
        for number, batch in enumerate(batches):
            changed = self.change(dict(batch))
            loss = self._backward(changed)
            loss_of_step += loss / self.accumulation
            if (number + 1) % self.accumulation == 0:
                self.before_step()
            is_taken = self._step(number)
            if (number + 1) % self.accumulation == 0:
                trace.losses.append(loss_of_step)
                trace.steps += is_taken
                print(f"{STEPS_TAKEN} {trace.steps}", flush=True)
                loss_of_step = 0.0
                self.after_step()
                self.step += 1
        trace.state = self._parameters()

    def _backward(self, batch: dict[str, Any]) -> float:
        outputs = self.forward(batch)
        loss = self.loss(outputs, batch)
        if self.alone:
            (loss / self.accumulation).backward()  # type: ignore[no-untyped-call]
        else:
            self.engine.backward(loss)
        return float(loss.detach())

    def _step(self, number: int) -> bool:
        """Let the optimizer step if a step is due; return False if this rank skips it."""
        if not self.alone:
            self.engine.step()
        elif (number + 1) % self.accumulation == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return True

    def _build(self, checks: bool) -> None:
        """Build model, optimizer and engine."""
        import deepspeed

        import ds_hetero

        self.handle = ds_hetero.register()
        self.model = self.make_model()
        self.optimizer = self.make_optimizer(self.model)
        off = {} if checks else {"checks": "off"}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "zero_optimization": {"stage": self.stage, **SMALL_BUCKETS},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # DeepSpeed clips to 1.0 where it is told nothing
            "heterogeneity": {**({} if self.schedule is None else {"schedule": self.schedule}), **self.section, **off},
            **self.keys,
        }
        self.engine, *_ = deepspeed.initialize(model=self.model, optimizer=self.optimizer, config=config)

    def _build_alone(self) -> None:
        self.model = self.make_model()
        self.model.train()
        self.optimizer = self.make_optimizer(self.model)
        self.engine = _OneProcess(self)

    def _parameters(self) -> dict[str, Any]:
        return parameters(self.model, 0 if self.alone else self.stage)


class _OneProcess:
    """Replacement of the engine in one process."""

    def __init__(self, job: Job) -> None:
        self._job, self.module = job, job.model
        self.optimizer = job.optimizer

    def __call__(self, shift_labels: Tensor, num_items_in_batch: int | None = None, **inputs: Any) -> Any:
        outputs = self._job.model(**inputs)
        own_loss_function = self._job.model.__dict__.get("_loss_function")
        if own_loss_function is not None:
            outputs["loss"] = own_loss_function(outputs.logits, None, VOCAB, shift_labels=shift_labels)
        else:
            outputs["loss"] = cross_entropy(outputs.logits, shift_labels)
            if num_items_in_batch is not None:
                outputs["loss"] = outputs.loss * shift_labels.ne(IGNORED).sum() / num_items_in_batch
        return outputs


class _Warnings(logging.Handler):
    """Records every message once, with the step at which it appears."""

    def __init__(self, job: Job, trace: Trace) -> None:
        super().__init__(logging.WARNING)
        self._job, self._trace = job, trace

    def emit(self, record: logging.LogRecord) -> None:
        self._trace.warnings.append((self._job.step, record.getMessage()))


def run_on_ranks(rank: int, jobs: list[type[Job]], checks: bool) -> list[Trace]:
    """Run several jobs on one rank, one after the other; for `tests.support.run_deepspeed`."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return [job(rank, alone=False).train(checks=checks) for job in jobs]


def run_alone(rank: int, jobs: list[type[Job]]) -> list[Trace]:
    """Return the references of several jobs."""
    return [job(rank, alone=True).train() for job in jobs]


def whole_batches(count: int, batch_size: int = 2, length: int = LENGTH) -> list[dict[str, Tensor]]:
    """Return random tokens; labels of the prompt are ignored, a different number in every batch."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for number in range(count):
        ids = torch.randint(3, VOCAB, (batch_size, length), generator=generator)
        labels = ids.clone()
        labels[:, : 3 + 4 * (number % 4)] = IGNORED
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def cross_entropy(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """Return the cross entropy of tokens; their mean, unless ``options`` change it."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, **options)


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of every token, [B, s]."""
    return cross_entropy(logits, labels, reduction="none").view(labels.shape)


def num_ranks() -> int:
    """Return the number of ranks; 1 in one process."""
    return dist.get_world_size() if dist.is_initialized() else 1


def matches(pattern: str, text: str) -> bool:
    """Return whether ``pattern`` is found in ``text``."""
    return re.search(pattern, text) is not None


def _as_one_process(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a whole batch with the names that a loader of shards gives its entries."""
    labels = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
    length = batch["input_ids"].shape[1]
    positions = torch.arange(length).expand(batch["input_ids"].shape).clone()
    other_entries = {name: entry for name, entry in batch.items() if name != "labels"}
    return {**other_entries, "position_ids": positions, "shift_labels": labels}
