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
from ds_hetero.engine.whole_model import WholeModel, in_evaluation
from ds_hetero.errors import BatchError, ConfigError
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.loss_units import Batch, Probe, UnitCounts, labels_of, num_rows, probe, unit_of_probes
from ds_hetero.runtime.data.sample_loader import MicroBatchWeights
from ds_hetero.runtime.data.sampling import reader_inside
from ds_hetero.runtime.loss import scaled_loss
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.values.section import SECTION

_MEANS = frozenset({"SFTTrainer"})  # of TRL, whose loss is a sum over tokens, divided by the Trainer's items
Compute = Callable[[Batch, Tensor | None], tuple[Tensor, object]]


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
        computes_loss_itself: the Trainer's class makes its loss past ``Trainer.compute_loss``, and its unit is declared
            or found.
    """

    def __init__(self, trainer: Trainer, model: WholeModel) -> None:
        self._trainer, self._model = trainer, model
        self._has_read, self._latest = False, None  # a batch, which fills up the steps that have too few
        self._adds_up, self._micro_batches = False, 1  # means of the micro-batches of a step, as one process does
        self.is_scaling = False
        is_own = type(trainer).compute_loss is not Trainer.compute_loss
        is_mean = model.loss_convention is not None or any(kind.__name__ in _MEANS for kind in type(trainer).__mro__)
        self.computes_loss_itself = is_own and is_mean

    @contextlib.contextmanager
    def scaling_own_loss(self) -> Iterator[None]:
        """Scale inside what the ``compute_loss`` of the Trainer's class returns, whatever that calls."""
        trainer, own = self._trainer, self._trainer.compute_loss

        def compute_loss(model: object, inputs: Batch, num_items_in_batch: Tensor | None = None) -> Tensor:
            def compute(batch: Batch, num_items: Tensor | None) -> tuple[Tensor, object]:
                return own(model, {**batch}, num_items_in_batch=num_items), None

            return self.loss(compute, inputs, num_items_in_batch)[0]

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
        self._micro_batches = num_batches

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
        own = of_ranks[dist.get_rank()][0]
        self._latest = taken[-1] if taken else self._latest
        fillers = [Filler(self._latest or {}) for _ in range(num_batches - len(taken))]
        counts = [*own, *[UnitCounts(0)] * len(fillers)]
        self._model.give_step(
            [MicroBatchWeights(index=i, counts=one, counts_of_step=total) for i, one in enumerate(counts)]
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

    def loss(self, compute: Compute, inputs: Batch, num_items: Tensor | None) -> tuple[Tensor, object]:
        """Loss and outputs of a micro-batch; the loss is a part of that of the global batch, times the ranks.

        Args:
            compute: ``Trainer.compute_loss`` of a batch and a number of items.

        Caller: every rank of the world.
        """
        model = self._model
        if model.needs_probe:
            with self._noting_nothing():
                model.expect_samples_apart(lambda batch: compute(batch, None)[0], inputs)
        if model.loss_convention is None:
            self._find_unit(compute, inputs, num_items)
        unit, weights = model.loss_convention, model.latest_batch
        is_filler = not any(weights.counts)
        if unit == "items":
            loss, outputs = compute(inputs, num_items)
            return scaled_loss(loss, 0.0 if is_filler else 1.0), outputs
        assert unit is not None
        loss, outputs = compute(inputs, None)
        own, of_step = getattr(weights.counts, unit), getattr(weights.counts_of_step, unit)
        times = self._micro_batches if self._adds_up else 1
        return scaled_loss(loss, times * own * dist.get_world_size() / max(of_step, 1)), outputs

    def _find_unit(self, compute: Compute, inputs: Batch, num_items: Tensor | None) -> None:
        """Find by what losses are to be weighed: by the items that the Trainer counts, or by the units of a mean."""
        name = type(self._model.model).__name__
        for divisor in (num_items, None) if num_items is not None else (None,):
            probes = self._probe(compute, inputs, divisor)
            try:
                self._model.loss_convention = unit = unit_of_probes(probes, name)
                self._adds_up = unit != "items" and self._takes_means_for_parts(inputs)
                return
            except ConfigError:
                if divisor is None:
                    raise

    def _takes_means_for_parts(self, inputs: Batch) -> bool:
        """Whether one process adds up the means of a step's micro-batches.

        It does where it gives the model how many labels the step has, and the model's loss is a mean nevertheless.
        """
        says = getattr(type(self._trainer), "loss_is_scaled_for_ga", None)
        if says is not None:
            return bool(says)
        takes_items = "labels" in inputs and self._trainer.model_accepts_loss_kwargs
        return takes_items or self._trainer.compute_loss_func is not None

    def _probe(self, compute: Compute, inputs: Batch, num_items: Tensor | None) -> list[Probe]:
        def loss_of(batch: Batch) -> Tensor:
            return compute(batch, num_items)[0]

        with self._noting_nothing(), in_evaluation(self._model.model):
            return on_all_ranks(lambda: probe(loss_of, inputs, num_rows(inputs), by_items=num_items is not None))

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
