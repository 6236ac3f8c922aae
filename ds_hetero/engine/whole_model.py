"""A module that is not split over the sequence: every replica is one rank, which runs it on its own batches."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _BatchNorm

from ds_hetero.common.announce import announce
from ds_hetero.errors import BatchError, ConfigError, ModelError, StepError
from ds_hetero.runtime.changed_buffers import ChangedBuffers
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.batch_trial import BatchTrial
from ds_hetero.runtime.data.loss_units import (
    Batch,
    UnitCounts,
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
from ds_hetero.runtime.data.sample_probe import names_of_nodes, newest_node, probe_samples, raise_if_mixed
from ds_hetero.runtime.data.sampling import ReplicaSampler, ReplicaStream
from ds_hetero.runtime.devices import default_device
from ds_hetero.runtime.peers.calls import REMEDY
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_clock import StepClock
from ds_hetero.values.placement import Placer
from ds_hetero.values.plans import Plan
from ds_hetero.values.section import SECTION, HeterogeneitySection

_ARGUMENTS = "*"  # by position, among those by name
_MOST_EXPLAINED = 65_536  # elements of an entry of a batch whose total may be what a sum is divided by


class WholeModel:
    """A module that is not split, for an engine's hooks; the counterpart of `ShardedModel`.

    Args:
        replica: this rank's replica, of one rank.

    Attributes:
        loss_convention: unit of a mean, see `ds_hetero.runtime.data.loss_units`, where it was declared, or where
            micro-batches are accumulated and the first batch shows it.
        is_declared: it was declared.
        probe_pace: when samples are probed again.
        divisors: what sums in the loss are divided by, see `ds_hetero.runtime.data.loss_weights`.
        output_nodes: nodes of the graph that made the outputs of the latest forwards of training.
        times_ranks: nodes of the latest loss that multiply by the number of ranks, which one process does not do.
        after_probe_run: lets the engine forget a forward, and a backward, of a probe; set by it.
    """

    kernel: str | None = None
    latest_positions: None = None  # None, since no batch is cut
    token_weights: None = None  # None, since no loss is of a part of a batch
    token_factors: None = None
    local_weights: None = None
    graphs: None = None  # their operations are compared with those before at every micro-batch
    as_loaded: None = None  # likewise
    places_documents = takes_shards = waits_in_forward = False

    def __init__(self, model: nn.Module, replica: Replica) -> None:
        assert replica.sp_size == 1, replica
        self.model, self.replica = model, replica
        self.loss_convention: str | None = None
        self._batch: MicroBatchWeights | None = None  # that the next loss is of
        self.changes_batches = False
        self._readers: list[weakref.ref[ReplicaSampler | ReplicaStream]] = []
        self._steps_done = self._num_backwards = 0
        self._following: list[MicroBatchWeights] = []  # of the same optimizer step
        self._has_loss = self._has_run = False  # of that batch; in the engine's present step
        self._is_checked = self._is_probed = self._is_probing = self.is_declared = False
        self.divisors: dict[str, DivisorKind] = {}
        self.output_nodes: set[Node] = set()
        self.times_ranks: list[Node] = []
        self.after_probe_run: Callable[[], None] = lambda: None
        self._inputs: tuple[tuple[Batch, ...], dict[str, Batch]] = (), {}  # of the latest forward of training
        self._known_nodes: set[str] = set()  # kinds of nodes in the graphs of losses so far
        self._known_sizes: set[int] = set()  # numbers of nodes of these graphs
        self.probe_pace = ProbePace("by_cost")
        self._has_said = False
        self._first_node = 0  # number of the first node of the graph of the latest forward of training
        self._buffers = ChangedBuffers(model.named_buffers)  # since the micro-batch before
        self.clock = StepClock(default_device())  # times the phases of this model's steps
        self._record: object = None
        self._trial: BatchTrial | None = None
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
        """Set `loss_convention`. Raises `ConfigError` on every rank: not for whole models, or batches are equal."""
        name, split = type(self.model).__name__, self.replica.batch_split
        if convention not in (None, "replica_mean", *UnitCounts._fields):
            raise ConfigError(
                f'"{SECTION}.loss" is "{convention}", which counts the tokens of a batch, but '
                f"{name} is not split: its loss is that of the batch already. Leave the key out."
            )
        if split is None and convention in UnitCounts._fields:
            raise ConfigError(
                f'"{SECTION}.loss": "{convention}" weighs the losses of replicas that take different batches, but the '
                "schedule says no micro_batch_size and micro_batches. Leave the key out."
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
        _expect_no_router_loss(self.model, batch)
        with _gathering(self.model), in_evaluation(self.model):
            expect_documents_apart(compute, batch, type(self.model).__name__)
        self._is_probed = True
        self._probe(run or compute, batch, num_rows({**batch, _ARGUMENTS: ()}, batch.get(_ARGUMENTS, ())))

    def _probe(self, run: Callable[[Batch], object], batch: Batch, rows: int) -> None:
        """See `probe_samples`. Raises `ModelError` on every rank: samples see each other."""
        self._is_probing = True
        try:
            with self.probe_pace.timing(), _gathering(self.model):
                found = on_all_ranks(lambda: probe_samples(run, batch, rows, self.model, self.after_probe_run))
        finally:
            self._is_probing = False
        name = type(self.model).__name__
        self.divisors |= raise_if_mixed(found, name)
        if any(one.is_open for one in found) and not self._has_said and torch.distributed.get_rank() == 0:
            announce(
                f"whether samples see each other in the loss that {name} returns could not be tried "
                "(what it is divided by does not show): its outputs and "
                "buffers are compared, and the operations of its loss are read"
            )
        self._has_said = True

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
        with _gathering(self.model), in_evaluation(self.model):
            probes = on_all_ranks(lambda: probe(compute, batch, rows))
        if all(one.has_loss for one in probes):
            with contextlib.suppress(ConfigError):  # no mean over any of the units; its graph says what it is
                self.loss_convention = unit_of_probes(probes, type(self.model).__name__)

    def note_nodes(self, loss: Tensor) -> bool:
        """Note the kinds of operations that made a loss; return whether there are new ones since the first batch.

        The graph is walked where it has another number of nodes than those before: 2,500 nodes, a model of 32 layers,
        take some milliseconds.
        """
        num_nodes = newest_node(loss) - self._first_node
        if num_nodes in self._known_sizes:
            return False
        self._known_sizes.add(num_nodes)
        names = names_of_nodes(loss)
        is_first, is_new = not self._known_nodes, not names <= self._known_nodes
        self._known_nodes |= names
        return is_new and not is_first

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
        """Totals of the buffers that have changed since this was asked last."""
        return self._buffers.look()

    def explain_divisors(self) -> dict[str, tuple[float, float]]:
        """Total and number of non-zeros of each small entry of the latest forward's arguments."""
        args, kwargs = self._inputs
        entries = dict(kwargs) | {str(i): part for i, part in enumerate(args)}
        return {
            f"{name}[{i}]": (float(part.double().sum()), float(part.ne(0).sum()))
            for name, entry in entries.items()
            for i, part in enumerate(tensors_in(entry))
            if part.numel() <= _MOST_EXPLAINED and not part.is_complex()
        }

    @property
    def rows(self) -> int:
        """Samples of the micro-batch, by its tensors."""
        args, kwargs = self._inputs
        return num_rows(kwargs, args)

    def expect_section(self, section: HeterogeneitySection) -> None:
        """Refuse what changes or computes parts of sequences: tiles, other schedules. Raises `ConfigError`."""
        name = type(self.model).__name__
        if section.tile_tokens is not None:
            raise ConfigError(
                f'"tile_tokens": {section.tile_tokens} tiles models of transformers that are split over a sequence, '
                f"and {name} is not. Leave the key out."
            )
        if section.evaluation == "sharded":
            raise ConfigError(
                f'"{SECTION}.evaluation": "sharded" splits the sequences of an evaluation over ranks, but {name} runs '
                "whole on every rank. Leave the key out."
            )
        self.changes_batches = section.changes_batches
        if section.replan.enabled and section.batch is None:
            raise ConfigError(
                f'"replan": {{"enabled": true}} moves tokens between the ranks of a replica, but {name} runs whole on '
                'every rank. "replan": {"report_only": true} names slow ranks; give each as many samples as it is fast '
                'by "batch": [6, 2].'
            )

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
        """The next loss will be of this micro-batch; None: of one that is not known."""
        self._batch, self._has_loss = batch, False
        self._following = []

    def give_step(self, batches: list[MicroBatchWeights]) -> None:
        """The next losses will be of these micro-batches, one after another."""
        self._batch, self._has_loss = (batches[0] if batches else None), False
        self._following = batches[1:]

    @property
    def latest_batch(self) -> MicroBatchWeights:
        """The micro-batch that the next loss is of."""
        assert self._batch is not None
        return self._batch

    @property
    def only_fills_up(self) -> bool:
        """Whether the micro-batch that was given last has no sample of its own, and fills an optimizer step up."""
        return self._batch is not None and not any(self._batch.counts)

    def micro_step(self, steps_done: int) -> int:
        """Return the backwards since the latest optimizer step, of which the engine has done ``steps_done``."""
        if steps_done != self._steps_done:
            self._steps_done, self._num_backwards = steps_done, 0
        return self._num_backwards

    def end_batch(self) -> None:
        """The backward of a loss has been run."""
        self._num_backwards += 1
        self.output_nodes, self._inputs = set(), ((), {})
        self.times_ranks.clear()
        if self._following:
            self._batch = self._following.pop(0)
            self._has_loss = False

    def expect_used(self) -> None:
        """Refuse to go on while the micro-batch that was given last had no loss. Raises `StepError`: it had none."""
        if self._batch is not None and not self._has_loss:
            raise StepError(f"a batch was left out: the next one was taken before engine.backward(loss). {REMEDY}")

    def batch_at(self, micro_step: int) -> MicroBatchWeights:
        """Return the micro-batch that a loss is of. Raises `BatchError`: it is not known, or of another micro-step."""
        if self._batch is None:
            raise BatchError(
                f"{type(self.model).__name__} takes different batches on the ranks, and how many samples this one has "
                "is not known. Take batches from handle.dataloader(loader), or from a loader that was given to "
                "accelerator.prepare together with the model, and run one backward after another."
            )
        if self._batch.index != micro_step:
            raise StepError(
                f"this loss is of micro-batch {self._batch.index} of an optimizer step, but the engine is at "
                f"{micro_step}: a loop ended, or batches were taken ahead, amid an optimizer step. {REMEDY}"
            )
        self._has_loss = True
        return self._batch

    def note_scaled_loss(self) -> None:
        """A loss of the scale that the engine's average needs went into a backward."""
        self._has_run = False

    def end_step(self) -> bool:
        """Return whether the module ran with gradients and no loss came by; forget it."""
        has_run, self._has_run = self._has_run, False
        return has_run

    def try_batches(self) -> None:
        """Let `room` try what fits from now on, with forwards that need no other rank."""
        self._trial = BatchTrial(self.model)

    def room(self, plan: Plan) -> list[int]:
        """By rank, how many samples of this plan fit its memory; on every rank. Collectives: one `on_all_ranks`."""
        wanted, now = (
            split.micro_batch_sizes[self.replica.replica_id]
            for split in (plan.batch_split, self.replica.batch_split)
            if split is not None
        )
        trial = self._trial
        return on_all_ranks(lambda: wanted if trial is None or wanted <= now else trial.most(wanted, now))

    def change_replica(self, replica: Replica) -> None:
        """Go on with other batches, from the next undrawn step on; on every rank. Collectives: one `on_all_ranks`."""
        self.replica = replica
        readers = [reader for weak in self._readers if (reader := weak()) is not None]
        newest = on_all_ranks(lambda: max((reader.newest_step for reader in readers), default=-1))
        for reader in readers if replica.batch_split is not None else ():
            assert replica.batch_split is not None
            reader.change(replica.batch_split, max(newest) + 1)

    def note_reader(self, reader: ReplicaSampler | ReplicaStream | None) -> None:
        """Let a reader of samples follow the ranks' batches. Raises `BatchError`: they change, and it cannot."""
        split = self.replica.batch_split
        if self.changes_batches and not isinstance(reader, ReplicaSampler):
            raise BatchError(
                "batches that follow the speeds of the ranks are cut by a sampler over a dataset with a length; this "
                f"loader is of {'a stream' if reader is not None else 'batches of its own'}. Give a DataLoader over a "
                f'dataset with a length, or the batch of every rank: "{SECTION}": {{"batch": [6, 2]}}.'
            )
        if reader is None or any(weak() is reader for weak in self._readers):
            return
        self._readers.append(weakref.ref(reader))
        if split is not None and reader.split != split:
            reader.change(split, reader.newest_step + 1)

    def __deepcopy__(self, memo: dict[int, object]) -> WholeModel:
        """Hooks of a copied model go on working; the replica is the same."""
        return self

    @property
    def _is_of_training(self) -> bool:
        """Whether a forward is one of training on unlike batches."""
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
            self._first_node = newest_node(torch.ones(1, requires_grad=True) * 1)
        self._inputs = args, kwargs
        if not self._is_checked:
            _expect_no_statistics(model)
            self._is_checked = True
        if not self._buffers.is_watching:
            self.changed_buffers()

    def _after(self, model: nn.Module, args: object, outputs: object) -> None:
        """Keep the ends of the graph of a forward of training until its backward."""
        if self._is_of_training:
            loss = loss_in(outputs)
            tensors = [*tensors_in(outputs), *([] if loss is None else [loss])]
            self.output_nodes |= {one.grad_fn for one in tensors if one.grad_fn is not None}


@contextlib.contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Run a model inside without gradients and without dropout, and put back the modes of its parts."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    for module in training:
        module.training = packs_in_evaluation(module)
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def _gathering(model: nn.Module) -> Iterator[None]:
    """Run a model past its engine's forward inside: on ZeRO-3 modules get the parameters that they take from others.

    DeepSpeed's ``ZeROOrderedDict`` gathers these where ``DeepSpeedEngine._forward_prologue`` has said that a forward
    runs.
    """
    name = "_in_forward"
    told = [one._parameters for one in model.modules() if getattr(one._parameters, name, True) is False]
    for parameters in told:
        setattr(parameters, name, True)
    try:
        yield
    finally:
        for parameters in told:
            setattr(parameters, name, False)


def packs_in_evaluation(module: nn.Module) -> bool:
    """Whether a layer would put its weights into a form for inference, for good, as those of 4 bits do on CPUs."""
    return hasattr(module, "support_avx512bf16_for_cpu")


def _expect_no_router_loss(model: nn.Module, batch: Batch) -> None:
    """Refuse experts' load-balancing loss, a product of two means over a rank's tokens. Raises `ConfigError`."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    weight = getattr(text, "router_aux_loss_coef", 0)
    if weight and (getattr(text, "output_router_logits", False) or batch.get("output_router_logits")):
        raise ConfigError(
            f"the ranks take different batches, and {type(model).__name__} adds a loss of its routers "
            f"(router_aux_loss_coef={weight}), which is no mean over samples or tokens: one process would compute "
            "another on the global batch. Set router_aux_loss_coef to 0 (in TRL: SFTConfig(router_aux_loss_coef=0.0), "
            "since TRL sets output_router_logits by itself), or share sequences by a schedule in place of "
            f'"{SECTION}.batch".'
        )


def _expect_no_statistics(model: nn.Module) -> None:
    """Refuse layers that mix samples of a micro-batch. Raises `ModelError`: batch normalization in training."""
    names = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]
    if names:
        raise ModelError(
            f"{names[0]} of {type(model).__name__} is {type(model.get_submodule(names[0])).__name__}: it normalizes by "
            "the micro-batch of its rank, and the ranks take different ones. Use nn.GroupNorm, freeze it by eval(), or "
            "give all replicas the same batches."
        )
