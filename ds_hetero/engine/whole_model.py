"""A module that is not split over the sequence: every replica is one rank, which runs it on its own batches."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ds_hetero.common.announce import announce
from ds_hetero.engine.loss_operations import LossOperations
from ds_hetero.engine.micro_batch_order import MicroBatchOrder
from ds_hetero.engine.outside_runs import gathering_in_forward, in_evaluation
from ds_hetero.engine.whole_model_checks import (
    expect_convention,
    expect_no_router_loss,
    expect_no_statistics,
    expect_section_of_whole_model,
)
from ds_hetero.errors import BatchError, ConfigError
from ds_hetero.runtime.changed_buffers import ChangedBuffers
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.batch_trial import BatchTrial
from ds_hetero.runtime.data.loss_units import (
    Batch,
    expect_documents_apart,
    loss_in,
    num_rows,
    probe,
    tensors_in,
    unit_of_probes,
)
from ds_hetero.runtime.data.loss_weights import DivisorKind
from ds_hetero.runtime.data.probe_pace import ProbePace
from ds_hetero.runtime.data.sample_loader import MicroBatchWeights
from ds_hetero.runtime.data.sample_probe import probe_samples, raise_if_mixed
from ds_hetero.runtime.data.sampling import ReplicaSampler, ReplicaStream
from ds_hetero.runtime.devices import default_device
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_clock import StepClock
from ds_hetero.values.placement import Placer
from ds_hetero.values.plans import Plan
from ds_hetero.values.section import SECTION, HeterogeneitySection

_ARGUMENTS = "*"  # key of the arguments by position, among those by name
# Elements of an entry of a batch whose total may be what a sum is divided by: labels and masks, not pictures. Chosen,
# never measured.
_MOST_EXPLAINED = 65_536


class WholeModel:
    """A module that is not split, for an engine's hooks; the counterpart of `ShardedModel`.

    Args:
        replica: this rank's replica, of one rank.

    Attributes:
        batches: which micro-batch the next loss is of, where replicas take different ones.
        loss_convention: the unit that the loss is a mean over, see `ds_hetero.runtime.data.loss_units`: declared in the
            section, or shown by the first batch where micro-batches are accumulated; else None.
        is_declared: the section declares the unit.
        probe_pace: when samples are probed again.
        divisors: what sums in the loss are divided by, see `ds_hetero.runtime.data.loss_weights`.
        output_nodes: nodes of the graph that made the outputs of the latest forwards of training.
        times_ranks: nodes of the latest loss that multiply by the number of ranks, which one process does not do.
        after_probe_run: lets the engine forget a forward and a backward that a probe ran; set by the engine.
    """

    # Constants for code that handles split models as well: no batch is cut here, and no loss is of a part of one.

    kernel: str | None = None
    latest_positions: None = None
    token_weights: None = None
    token_factors: None = None
    local_weights: None = None
    graphs: None = None  # their operations are compared with those before at every micro-batch
    as_loaded: None = None
    places_documents = takes_shards = waits_in_forward = False

    def __init__(self, model: nn.Module, replica: Replica) -> None:
        assert replica.sp_size == 1, replica
        self.model, self.replica = model, replica
        self.clock = StepClock(default_device())  # times the phases of this model's steps
        self.batches = MicroBatchOrder(type(model).__name__)
        self.changes_batches = False
        self._readers: list[weakref.ref[ReplicaSampler | ReplicaStream]] = []
        self._trial: BatchTrial | None = None
        self._record: object = None

        # The loss: its unit, and what it is divided by.
        self.loss_convention: str | None = None
        self.is_declared = False
        self.divisors: dict[str, DivisorKind] = {}
        self._operations = LossOperations()
        self._buffers = ChangedBuffers(model.named_buffers)  # since the micro-batch before

        # Probes of samples.
        self.probe_pace = ProbePace("by_cost")
        self.after_probe_run: Callable[[], None] = lambda: None
        self._is_probed = False
        self._is_probing = False
        self._has_announced_open = False  # that a probe could not decide

        # The latest forwards of training, until their backward.
        self.output_nodes: set[Node] = set()
        self.times_ranks: list[Node] = []
        self._inputs: tuple[tuple[Batch, ...], dict[str, Batch]] = (), {}
        self._has_run = False  # in the engine's present step, and no loss has been scaled
        self._is_checked = False
        before = model.register_forward_pre_hook(self._before, with_kwargs=True)
        self._hooks = before, model.register_forward_hook(self._after)

    @property
    def times_forward(self) -> bool:
        """Whether a forward is one of training."""
        return self.model.training

    def keep_alive(self, record: object) -> None:
        """Keep ``record`` alive as long as the model, whose hook holds this object."""
        self._record = record

    def restore(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def record_batches(self, observers: Sequence[Callable[..., None]]) -> None:
        """Batches are not known here."""

    def verify(self, when: int | str) -> None:
        """Set when samples are probed again, see `ds_hetero.values.section.ChecksSection.compare_every`."""
        self.probe_pace = ProbePace(when)

    def declare_loss(self, convention: str | None) -> None:
        """Set the section's loss convention. Raises `ConfigError` on every rank, see `expect_convention`."""
        expect_convention(
            type(self.model).__name__, convention, takes_unlike_batches=self.replica.batch_split is not None
        )
        self.loss_convention = None if convention == "replica_mean" else convention
        self.is_declared = self.loss_convention is not None

    @property
    def takes_unlike_batches(self) -> bool:
        """Whether replicas take different batches, so that losses are weighed."""
        return self.replica.batch_split is not None

    @property
    def needs_probe(self) -> bool:
        """Whether a forward is the first of training on unlike batches; the same on every rank."""
        return self.takes_unlike_batches and not self._is_probed and self.model.training and torch.is_grad_enabled()

    def expect_samples_apart(
        self, compute: Callable[[Batch], Tensor | None], batch: Batch, run: Callable[[Batch], object] | None = None
    ) -> None:
        """Refuse a loss or a model by which a sample counts otherwise beside others, before a first batch; once.

        Args:
            compute: the loss of such a batch; None where there is none.
            batch: of this rank.
            run: the outputs, with the loss, of such a batch; left out, the loss.

        Caller: every rank of the world.
        Collectives: see `expect_documents_apart`; one `on_all_ranks`, and those of six forwards.

        Raises:
            ConfigError: the model adds a loss of its routers; on every rank.
            ModelError: documents of a packed row, or samples of a batch, see each other; on every rank.
        """
        expect_no_router_loss(self.model, batch)
        with gathering_in_forward(self.model), in_evaluation(self.model):
            expect_documents_apart(compute, batch, type(self.model).__name__)
        self._is_probed = True
        self._probe(run or compute, batch, num_rows({**batch, _ARGUMENTS: ()}, batch.get(_ARGUMENTS, ())))

    def _probe(self, run: Callable[[Batch], object], batch: Batch, rows: int) -> None:
        """See `probe_samples`. Raises `ModelError` on every rank: samples see each other."""
        self._is_probing = True
        try:
            with self.probe_pace.timing(), gathering_in_forward(self.model):
                results_of_ranks = on_all_ranks(
                    lambda: probe_samples(run, batch, rows, self.model, self.after_probe_run)
                )
        finally:
            self._is_probing = False
        name = type(self.model).__name__
        self.divisors |= raise_if_mixed(results_of_ranks, name)
        is_open = any(result.is_open for result in results_of_ranks)
        if is_open and not self._has_announced_open and torch.distributed.get_rank() == 0:
            announce(
                f"whether samples see each other in the loss that {name} returns could not be tried "
                "(what it is divided by does not show): its outputs and "
                "buffers are compared, and the operations of its loss are read"
            )
        self._has_announced_open = True

    def find_unit(self, args: tuple[Batch, ...], kwargs: dict[str, Batch]) -> None:
        """Look at the arguments of a first forward; find `loss_convention` where micro-batches are accumulated.

        Caller: every rank of the world.
        Collectives: those of up to twelve forwards, and four `on_all_ranks`.

        Raises:
            ConfigError: see `expect_samples_apart`; on every rank.
            ModelError: see `expect_samples_apart`; on every rank.
        """
        rows = num_rows(kwargs, args)

        def compute(batch: Batch) -> Tensor | None:
            return loss_in(self._run(batch))

        batch = {**kwargs, _ARGUMENTS: args}
        self.expect_samples_apart(compute, batch, self._run)
        split = self.replica.batch_split
        if self.loss_convention is not None or split is None or split.micro_steps == 1:
            return
        with gathering_in_forward(self.model), in_evaluation(self.model):
            probes = on_all_ranks(lambda: probe(compute, batch, rows))
        if all(result.has_loss for result in probes):
            with contextlib.suppress(ConfigError):  # no mean over any of the units; its graph says what it is
                self.loss_convention = unit_of_probes(probes, type(self.model).__name__)

    def note_nodes(self, loss: Tensor) -> bool:
        """Note the operations of a loss; return whether there are new ones since the first batch."""
        return self._operations.note(loss)

    def probe_again(self) -> None:
        """Probe with the latest forward's arguments. Raises `ModelError` on every rank: samples see each other now.

        Caller: every rank of the world.
        Collectives: one `on_all_ranks`, and those of a probe's forwards and backwards.
        """
        args, kwargs = self._inputs
        self._probe(self._run, {**kwargs, _ARGUMENTS: args}, num_rows(kwargs, args))

    def _run(self, batch: Batch) -> object:
        given = dict(batch)
        return self.model(*given.pop(_ARGUMENTS), **given)

    def changed_buffers(self) -> dict[str, float]:
        """Return totals of the buffers that have changed since this was asked last."""
        return self._buffers.look()

    def explain_divisors(self) -> dict[str, tuple[float, float]]:
        """Return total and number of non-zeros of each small entry of the latest forward's arguments."""
        args, kwargs = self._inputs
        entries = dict(kwargs)
        for place, argument in enumerate(args):
            entries[str(place)] = argument
        totals = {}
        for name, entry in entries.items():
            for place, part in enumerate(tensors_in(entry)):
                if part.numel() <= _MOST_EXPLAINED and not part.is_complex():
                    totals[f"{name}[{place}]"] = float(part.double().sum()), float(part.ne(0).sum())
        return totals

    @property
    def rows(self) -> int:
        """Samples of the micro-batch, by its tensors."""
        args, kwargs = self._inputs
        return num_rows(kwargs, args)

    def expect_section(self, section: HeterogeneitySection) -> None:
        """Take over what the section says of batches. Raises `ConfigError`, see `expect_section_of_whole_model`."""
        expect_section_of_whole_model(type(self.model).__name__, section)
        self.changes_batches = section.changes_batches

    def place_documents(self, placer: Placer | None, *, asked_for: bool = True) -> None:
        """Refuse documents, which only a split batch has placed. Raises `ConfigError` on every rank."""
        if placer is not None:
            raise ConfigError(
                f'"{SECTION}.placement": "documents" places the tokens of split batches, but '
                f"{type(self.model).__name__} runs whole on every rank. Leave the key out."
            )

    @property
    def training(self) -> bool:
        """Whether batches are trained on; see `ds_hetero.runtime.data.sample_loader.Trainee`."""
        return self.model.training

    def give(self, batch: MicroBatchWeights | None) -> None:
        """Note that the next loss will be of this micro-batch; None: of an unknown one."""
        self.batches.give(batch)

    @property
    def only_fills_up(self) -> bool:
        """Whether a micro-batch that is trained on has no sample of its own, and only fills a step up."""
        return self.training and self.batches.only_fills_up

    def expect_used(self) -> None:
        """Refuse to take another batch while the one before has had no backward. Raises `StepError`."""
        self.batches.expect_used()

    def end_backward(self) -> None:
        """Forget the graph of a loss whose backward has run, and go on to the next micro-batch."""
        self.batches.end_backward()
        self.output_nodes = set()
        self.times_ranks.clear()
        self._inputs = (), {}

    def note_scaled_loss(self) -> None:
        """Note that a loss with the scale that the engine's average needs goes into a backward."""
        self._has_run = False

    def end_step(self) -> bool:
        """Clear the state of a step; return True if the module ran with gradients, but no loss was scaled."""
        has_run = self._has_run
        self._has_run = False
        return has_run

    def try_batches(self) -> None:
        """Let `room` try what fits from now on, with forwards that need no other rank."""
        self._trial = BatchTrial(self.model)

    def room(self, plan: Plan) -> list[int]:
        """Return by rank how many samples of a plan's micro-batch fit its memory.

        Caller: every rank of the world.
        Collectives: one `on_all_ranks`.
        """
        assert plan.batch_split is not None and self.replica.batch_split is not None
        wanted = plan.batch_split.micro_batch_sizes[self.replica.replica_id]
        now = self.replica.batch_split.micro_batch_sizes[self.replica.replica_id]

        def samples_that_fit() -> int:
            if self._trial is None or wanted <= now:  # what runs now fits
                return wanted
            return self._trial.most(wanted, now)

        return on_all_ranks(samples_that_fit)

    def change_replica(self, replica: Replica) -> None:
        """Go on with other batches from the next optimizer step on of which no rank has drawn a batch.

        Caller: every rank of the world.
        Collectives: one `on_all_ranks`.
        """
        self.replica = replica
        readers = self._living_readers()
        newest = on_all_ranks(lambda: max((reader.newest_step for reader in readers), default=-1))
        if replica.batch_split is None:
            return
        for reader in readers:
            reader.change(replica.batch_split, max(newest) + 1)

    def _living_readers(self) -> list[ReplicaSampler | ReplicaStream]:
        """Return the readers that a loader still holds."""
        readers = [reference() for reference in self._readers]
        return [reader for reader in readers if reader is not None]

    def note_reader(self, reader: ReplicaSampler | ReplicaStream | None) -> None:
        """Let a reader of samples follow the ranks' batches.

        Raises:
            BatchError: the batches change with the speeds of the ranks, which only a `ReplicaSampler` can follow.
        """
        split = self.replica.batch_split
        if self.changes_batches and not isinstance(reader, ReplicaSampler):
            raise BatchError(
                "batches that follow the speeds of the ranks are cut by a sampler over a dataset with a length; this "
                f"loader is of {'a stream' if reader is not None else 'batches of its own'}. Give a DataLoader over a "
                f'dataset with a length, or the batch of every rank: "{SECTION}": {{"batch": [6, 2]}}.'
            )
        if reader is None or any(known is reader for known in self._living_readers()):
            return
        self._readers.append(weakref.ref(reader))
        if split is not None and reader.split != split:
            reader.change(split, reader.newest_step + 1)

    def __deepcopy__(self, memo: dict[int, object]) -> WholeModel:
        """Hooks of a copied model go on working; the replica is the same."""
        return self

    @property
    def _is_of_training(self) -> bool:
        """Whether a forward is one of training on unlike batches, and neither a probe nor a trial of memory."""
        is_tried = self._is_probing or (self._trial is not None and self._trial.is_running)
        return self.takes_unlike_batches and self.model.training and torch.is_grad_enabled() and not is_tried

    def _before(self, model: nn.Module, args: tuple[Batch, ...], kwargs: dict[str, Batch]) -> None:
        """Look at a forward of training; the module is run as it is."""
        if not self._is_of_training:
            return
        self._has_run = True
        if self._trial is not None:
            self._trial.note(args, kwargs)
        if not self._inputs[1] and not self._inputs[0]:  # the first forward since a backward
            self._operations.begin_graph()
        self._inputs = args, kwargs
        if not self._is_checked:
            expect_no_statistics(model)
            self._is_checked = True
        if not self._buffers.is_watching:
            self.changed_buffers()

    def _after(self, model: nn.Module, args: object, outputs: object) -> None:
        """Keep the ends of the graph of a forward of training until its backward."""
        if self._is_of_training:
            tensors = [*tensors_in(outputs)]
            loss = loss_in(outputs)
            if loss is not None:
                tensors.append(loss)
            self.output_nodes |= {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
