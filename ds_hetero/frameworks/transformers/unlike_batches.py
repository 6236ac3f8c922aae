"""``"batch"`` under the Trainer: ranks take different batches of whole samples, and the loss is that of the global one.

To the Trainer, nothing but the training loader differs from equal batches: evaluation, learning rates and logs are its
own. Its loss is brought to the scale of the engine's average where it is made, in ``Trainer.compute_loss``.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Trainer

from ds_hetero.engine.ds_config import says_batches
from ds_hetero.engine.registry import Registry
from ds_hetero.engine.unlike_losses import UnlikeLosses
from ds_hetero.engine.whole_model import WholeModel
from ds_hetero.errors import BatchError, ConfigError
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.loss_units import Batch, UnitCounts, labels_of, num_rows
from ds_hetero.runtime.data.sample_loader import MicroBatchWeights
from ds_hetero.runtime.data.sampling import reader_inside
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.values.section import SECTION

_MULTIPLYING = frozenset({"SFTTrainer"})  # of TRL, which multiply by the ranks past `Trainer.compute_loss`
Compute = Callable[[object, Batch, Tensor | None], tuple[Tensor, object]]


class Filler(dict[str, object]):
    """A batch that fills an optimizer step up on a rank which has fewer: it counts nothing."""


def takes_unlike_batches(registry: Registry, trainer: Trainer) -> bool:
    """Whether a Trainer trains with this engine, and its section says the batch of every rank."""
    return registry.adapters.processes.asks_for_engine(trainer.accelerator) and says_batches(
        trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    )


def complete_configuration(trainer: Trainer) -> None:
    """Write the Trainer's batch sizes into the configuration, where that leaves them out."""
    ds_config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    arguments = trainer.args
    for name, value in (
        ("train_micro_batch_size_per_gpu", arguments.per_device_train_batch_size),
        ("gradient_accumulation_steps", arguments.gradient_accumulation_steps),
    ):
        if ds_config.get(name) in (None, "auto") or name == "gradient_accumulation_steps":
            ds_config[name] = value


def expect_plain_samples(trainer: Trainer, *, of_sequences: bool) -> None:
    """Refuse what deals, pairs or divides samples itself, before the loop. Raises `ConfigError`: what to do.

    Args:
        of_sequences: a trainer of TRL whose loss is of whole sequences.
    """
    if trainer.args.train_sampling_strategy == "batch_rebalance":
        raise ConfigError(
            f'train_sampling_strategy="batch_rebalance" deals samples out to ranks, and so does "{SECTION}.batch". '
            'Use "random" or "group_by_length".'
        )
    if hasattr(trainer, "num_generations"):
        raise ConfigError(
            f"{type(trainer).__name__} compares completions of one prompt, which unequal batches would tear apart. "
            f'Leave "{SECTION}.batch" out: equal batches, or sequence parallelism, train it.'
        )
    if of_sequences:  # KTO's came out twice as large with two accumulated batches
        raise ConfigError(
            f"{type(trainer).__name__} pairs and divides the samples of a batch by its own rules, and is not known to "
            f'train on unequal batches as on one process. Leave "{SECTION}.batch" out: equal batches, or sequence '
            "parallelism, train it."
        )


class UnlikeSteps:
    """Batches and losses of one training.

    Attributes:
        is_scaling: the loss that ``Trainer.compute_loss`` returns is a part of one that is scaled by its caller.
        computes_loss_itself: the Trainer's class has a ``compute_loss`` of its own.
    """

    def __init__(self, trainer: Trainer, model: WholeModel) -> None:
        self._trainer, self._model = trainer, model
        self._has_read, self._latest = False, None  # a batch, which fills up the steps that have too few
        self._losses = UnlikeLosses(model)
        self.is_scaling = False
        self.computes_loss_itself = type(trainer).compute_loss is not Trainer.compute_loss

    @contextlib.contextmanager
    def scaling_own_loss(self) -> Iterator[None]:
        """Scale inside what the ``compute_loss`` of the Trainer's class returns, whatever that calls."""
        trainer, own = self._trainer, self._trainer.compute_loss

        def compute_loss(model: object, inputs: Batch, num_items_in_batch: Tensor | None = None) -> Tensor:
            def compute(called: object, batch: Batch, num_items: Tensor | None) -> tuple[Tensor, object]:
                loss = own(called, {**batch}, num_items_in_batch=num_items)
                if num_items is not None and any(kind.__name__ in _MULTIPLYING for kind in type(trainer).__mro__):
                    self.note_multiplied(loss)
                return loss, None

            return self.loss(compute, model, inputs, num_items_in_batch)[0]

        trainer.compute_loss, self.is_scaling = compute_loss, True
        try:
            yield
        finally:
            del trainer.compute_loss
            self.is_scaling = False

    def take(
        self, batches: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Tensor | None]:
        """This rank's micro-batches of an optimizer step, filled up, and the labels of all ranks that count in it.

        Caller: every rank of the world.
        Collectives: one `on_all_ranks`.

        Raises:
            BatchError: on every rank: they draw different samples, or the first step is too short.
        """
        taken: list[Batch] = []

        def read() -> tuple[list[UnitCounts], int]:
            reader = reader_inside(self._trainer.callback_handler.train_dataloader)
            self._model.note_reader(reader)
            taken.extend(islice(batches, num_batches))
            return [
                UnitCounts.of(one, num_rows(one)) for one in taken
            ], 0 if reader is None else reader.oldest_checksum()

        with waiting_for_peers("reading the next batch"):
            of_ranks = on_all_ranks(read)
        if not any(counts for counts, _ in of_ranks):
            return [], None
        if len({checksum for counts, checksum in of_ranks if counts}) > 1:
            raise BatchError("the ranks do not draw the same samples. Seed shuffling alike on all ranks.")
        total = UnitCounts.total(count for counts, _ in of_ranks for count in counts)
        idle = [rank for rank, (counts, _) in enumerate(of_ranks) if not counts]
        if idle and not self._has_read:
            raise BatchError(
                f"the first step has {total.sample_mean} samples, too few for ranks {idle} to get one. Give the "
                "Trainer more samples, or smaller batches."
            )
        self._has_read = True
        micro_batches = max(len(counts) for counts, _ in of_ranks)
        own = of_ranks[dist.get_rank()][0]
        self._latest = taken[-1] if taken else self._latest
        fillers = [Filler(self._latest or {}) for _ in range(num_batches - len(taken))]
        counts = [*own, *[UnitCounts(0)] * len(fillers)]
        self._model.batches.give_step(
            [
                MicroBatchWeights(index=i, counts=one, counts_of_step=total, micro_batches=micro_batches)
                for i, one in enumerate(counts)
            ]
        )
        return [*taken, *fillers], self._num_items(taken or [self._latest], total, device)

    def _num_items(self, batches: Sequence[Batch], total: UnitCounts, device: torch.device) -> Tensor | None:
        """Divisor of the Trainer for a loss, by its own rule; None where it does not."""
        trainer, (labels, moved) = self._trainer, labels_of(batches[0])
        takes_items = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        if labels is None or not takes_items or self._model.loss_convention in UnitCounts._fields:
            return None
        of_tokens = total.token_mean if moved or getattr(trainer, "_loss_shifts_labels", True) else total.label_mean
        return torch.tensor(of_tokens if labels.dim() > 1 else total.sample_mean, device=device)

    def loss(
        self, compute: Compute, engine: object, inputs: Batch, num_items: Tensor | None, *, multiplies: bool = False
    ) -> tuple[Tensor, object]:
        """Loss and outputs of a micro-batch; the loss is a part of that of the global batch, times the ranks.

        Args:
            compute: ``Trainer.compute_loss`` of a model, a batch and a number of items.
            multiplies: ``compute`` is the Trainer's own, which multiplies by the ranks a loss that is divided by items.

        Caller: every rank of the world.
        """
        model = self._model
        if model.needs_probe:
            with self._noting_nothing():
                model.expect_samples_apart(lambda batch: compute(model.model, batch, None)[0], inputs)
        model.times_ranks.clear()
        loss, outputs = compute(engine, inputs, num_items)
        if multiplies and num_items is not None:
            self.note_multiplied(loss)
        items = None if num_items is None else float(num_items)
        loss = self._losses.weigh_for_trainer(loss, model.batches.latest, items)
        if not self._takes_means_for_parts(inputs):
            loss = loss / model.batches.latest.micro_batches
        return loss, outputs

    def note_multiplied(self, loss: Tensor) -> None:
        """Note a loss that ``Trainer.compute_loss`` has multiplied by the ranks, which one process does not."""
        arguments = self._trainer.args
        takes_items = self._trainer.model_accepts_loss_kwargs or self._trainer.compute_loss_func
        node = loss.grad_fn
        if arguments.average_tokens_across_devices and takes_items and node is not None and "Mul" in node.name():
            self._model.times_ranks.append(node)

    def _takes_means_for_parts(self, inputs: Batch) -> bool:
        """Whether one process adds up the means of a step's micro-batches.

        It does where it gives the model how many labels the step has, and the model's loss is a mean nevertheless.
        """
        says = getattr(type(self._trainer), "loss_is_scaled_for_ga", None)
        if says is not None:
            return bool(says)
        takes_items = "labels" in inputs and self._trainer.model_accepts_loss_kwargs
        return takes_items or self._trainer.compute_loss_func is not None

    @contextlib.contextmanager
    def _noting_nothing(self) -> Iterator[None]:
        """TRL notes every loss that it computes; not those inside."""
        metrics = copy.deepcopy(getattr(self._trainer, "_metrics", None))
        yield
        if metrics is not None:
            self._trainer._metrics = metrics


def unlike_steps(registry: Registry, trainer: Trainer) -> UnlikeSteps | None:
    """Batches and losses of a training whose ranks take different ones; None for any other."""
    prepared = registry.find(trainer.model)
    if prepared is None or not isinstance(prepared.model, WholeModel) or not prepared.model.takes_unlike_batches:
        return None
    if not isinstance(prepared.steps, UnlikeSteps):
        prepared.steps = UnlikeSteps(trainer, prepared.model)
    return prepared.steps
