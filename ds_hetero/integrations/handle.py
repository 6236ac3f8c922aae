"""What `ds_hetero.register` returns: the engine of this process, and how to undo it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hetero import __version__
from ds_hetero.config import SECTION
from ds_hetero.errors import BatchError, ConfigError
from ds_hetero.integrations.deepspeed.facts import read_training_facts, section_of
from ds_hetero.integrations.loader import ModelLoader, WholeLoader
from ds_hetero.integrations.patching import Patches
from ds_hetero.integrations.transformers import sharded_model
from ds_hetero.integrations.transformers.facts import read_model_facts
from ds_hetero.job.facts import JobFacts
from ds_hetero.job.monitor import Change, EventWriter, Watch
from ds_hetero.job.prediction_check import Outlook
from ds_hetero.job.report import announce, plan_text
from ds_hetero.job.start import JobStart, MeasuredClusters, World, agree_on_facts, start_job
from ds_hetero.plan import Plan
from ds_hetero.runtime.data.shard_info import shard_info
from ds_hetero.runtime.data.shards import IGNORE_INDEX
from ds_hetero.runtime.loss import count_items, cross_entropy_sum, sequence_parallel_loss
from ds_hetero.runtime.replica import ProcessGroups, Replica, make_replica
from ds_hetero.runtime.step_clock import IDLE
from ds_hetero.schedule import Schedule

__all__ = ["Handle"]


class Handle:
    """The engine of this process, from `ds_hetero.register`.

    Under the HF Trainer and accelerate nothing but `undo` is of interest. In a loop of one's own:

        handle = ds_hetero.register()
        engine, *_ = deepspeed.initialize(model=model, config=ds_config)
        for batch in handle.dataloader(dataloader):
            loss = handle.loss(engine(**batch), batch)
            engine.backward(loss)
            engine.step()

    Args:
        ds_config: the configuration given to `register`, if any.
    """

    def __init__(self, ds_config: Mapping[str, Any] | None) -> None:
        self.ds_config = ds_config
        self.patches = Patches()
        self._models: list[sharded_model.ShardedModel] = []
        self._whole_model: nn.Module | None = None  # prepared last, without a section
        self._replicas: dict[Plan, Replica] = {}
        self._groups = ProcessGroups()
        self._watches: dict[sharded_model.ShardedModel, Watch] = {}
        self._agreements: dict[sharded_model.ShardedModel, JobStart] = {}
        self._outlooks: dict[sharded_model.ShardedModel, Outlook] = {}
        self._clusters = MeasuredClusters()

    def undo(self) -> None:
        """Put back everything that was replaced, in the frameworks and in the models.

        Engines of ZeRO-3 with unequal weights cannot be used afterwards.
        """
        for model in self._models:
            self.outlook(model).conclude()
            if model in self._watches:
                self._watches[model].conclude()
            model.restore()
        self._models.clear()
        self._agreements.clear()
        self._outlooks.clear()
        self._watches.clear()
        self.patches.undo()

    # --- what is running ---------------------------------------------------------------------------

    @property
    def replica(self) -> Replica:
        """This rank's place in its replica.

        Raises:
            ConfigError: no model has been prepared with a "heterogeneity" section yet.
        """
        return self._model.replica

    @property
    def schedule(self) -> Schedule:
        """The schedule of this rank's replica; see `replica`."""
        return self.replica.schedule

    @property
    def schedule_changes(self) -> tuple[Change, ...]:
        """Changes of any replica's schedule since `deepspeed.initialize`, with ``"replan"``; the same on every rank."""
        return tuple(self._watches[self._model].changes) if self._model in self._watches else ()

    @property
    def _model(self) -> sharded_model.ShardedModel:
        if not self._models:
            raise ConfigError(
                f'no model has been prepared with a "{SECTION}" section yet. Call deepspeed.initialize or '
                "accelerator.prepare first, with a ds_config.json that has one."
            )
        return self._models[-1]

    # --- a loop of one's own -----------------------------------------------------------------------

    def dataloader(
        self,
        dataloader: Iterable[Any],
        *,
        device: torch.device | str | None = None,
        batches: Literal["same", "own"] | None = None,
    ) -> Iterable[Any]:
        """Wrap a loader of whole batches; see `ds_hetero.runtime.data.loader.ShardedLoader`.

        For a model that was prepared without a "heterogeneity" section, batches are only moved to its device.

        Args:
            dataloader: yields mappings with ``input_ids`` and ``labels``.
            device: where batches shall be; left out, where the model is.
            batches: ``"same"`` if all ranks of a replica are given the same batches, ``"own"`` if each has its own.
        """
        whole = self._whole_model if not self._models else None
        model = self._model.model if whole is None else whole
        where = next(model.parameters()).device if device is None else torch.device(device)
        if whole is not None:
            return WholeLoader(dataloader, where)
        return ModelLoader(dataloader, self._model, where, batches)

    def loss(self, outputs: Any, batch: Mapping[str, Any], num_items: Tensor | float | None = None) -> Tensor:
        """The loss of the whole batch, equal on all ranks of the replica; call the engine's backward on it.

        Args:
            outputs: of the model for ``batch``: with ``loss``, the mean over this shard's labels, or with ``logits``.
            batch: from `dataloader`.
            num_items: from `count_items`, to weigh tokens alike over all micro-batches of an optimizer step; then call
                ``engine.backward(loss, scale_wrt_gas=False)``. Left out, micro-batches are weighed alike; where the
                replicas take different batches, tokens are, with the count that the loader makes.

        Collectives: one all_reduce of two numbers.
        """
        labels = _labels_that_count(batch)
        num_tokens = labels.ne(IGNORE_INDEX).sum()
        mean = getattr(outputs, "loss", None)
        if not self._models and self._whole_model is not None:
            whole: Tensor = outputs.loss
            return whole if num_items is None else whole * num_tokens * dist.get_world_size() / num_items
        loss_sum = cross_entropy_sum(outputs.logits, labels) if mean is None else mean * num_tokens
        self._model.note_scaled_loss()
        divisor = 1
        if num_items is None and self.replica.batch_split is not None:
            num_items, divisor = _items_of_step(batch), self.replica.batch_split.micro_steps
        with self._model.clock.phase(IDLE, "loss"):
            return sequence_parallel_loss(loss_sum, num_tokens, self.replica, num_items, divisor)

    def count_items(self, batches: Iterable[Mapping[str, Any]]) -> Tensor:
        """Labels that count in the micro-batches of one optimizer step, over all ranks; one all_reduce."""
        labels = [_labels_that_count(batch) for batch in batches]
        return count_items(sum(part.ne(IGNORE_INDEX).sum() for part in labels), labels[0].device)

    @contextlib.contextmanager
    def sharded(self) -> Iterator[None]:
        """Have forwards inside take shards although the model is in evaluation, as for prefill over all ranks."""
        with sharded_model.sharding(True):
            yield

    @contextlib.contextmanager
    def unsharded(self) -> Iterator[None]:
        """Have forwards inside take whole batches although the model is training."""
        with sharded_model.sharding(False):
            yield

    # --- for the integrations ----------------------------------------------------------------------

    def prepared_whole(self, model: nn.Module) -> None:
        """Take note of a model without a section: a loop written with this handle is to run all the same."""
        self._whole_model = model

    def find(self, model: nn.Module) -> sharded_model.ShardedModel | None:
        """The conversion of ``model``, if it was converted."""
        return next((known for known in self._models if known.model is model), None)

    def model_of_group(self, ranks: Sequence[int]) -> sharded_model.ShardedModel | None:
        """The latest converted model whose replica consists of ``ranks``."""
        return next((known for known in reversed(self._models) if known.replica.ranks == tuple(sorted(ranks))), None)

    @contextlib.contextmanager
    def using(self, ds_config: Mapping[str, Any]) -> Iterator[None]:
        """Have registrations inside follow ``ds_config``."""
        before, self.ds_config = self.ds_config, ds_config
        try:
            yield
        finally:
            self.ds_config = before

    def convert(
        self, model: nn.Module, ds_config: Mapping[str, Any], sp_sizes: Mapping[str, int | None]
    ) -> sharded_model.ShardedModel:
        """Agree on the schedules with all ranks and switch ``model`` to this rank's replica; again, if it was before.

        Caller: every rank of the world.
        """
        known = self.find(model)
        before = None if known is None else self._agreements[known]
        world = World.current()
        facts = agree_on_facts(world, lambda: _read_facts(model, ds_config, sp_sizes))
        start = start_job(world, facts, self._clusters, before)
        replica = self._replica_of(start.plan)
        outlook: Outlook | None = None if known is None else self._outlooks[known]
        if known is None or known.replica is not replica or known.kernel != start.section.attention:
            if known is not None:
                known.restore()
                self._models.remove(known)
                del self._agreements[known], self._outlooks[known]
            known = sharded_model.ShardedModel(model, replica, start.section.attention)
            self._models.append(known)
        if before is None or start.plan is not before.plan or outlook is None:
            outlook = Outlook(start.forecasts, start.no_forecast_reason)
            known.record_batches(outlook.saw)
            known.declare_loss(start.section.loss)
            if world.rank == 0:
                announce(f"on, {plan_text(start.plan, start.section)}")
            outlook.introduce()
        self._agreements[known], self._outlooks[known] = start, outlook
        return known

    def agreement_on(self, model: sharded_model.ShardedModel) -> JobStart:
        """What the ranks have agreed on for a converted model."""
        return self._agreements[model]

    def _replica_of(self, plan: Plan) -> Replica:
        """This rank's replica under ``plan``, made when it is first asked for; every rank of the world."""
        if plan not in self._replicas:
            self._replicas[plan] = make_replica(plan, self._groups)
        return self._replicas[plan]

    def watch(self, model: sharded_model.ShardedModel, steps_per_print: float | None, writer: EventWriter) -> Watch:
        """Make what takes the times of an engine's steps, and changes the schedule if the section says so.

        Args:
            model: what the engine trains.
            steps_per_print: of the engine's configuration.
            writer: the engine's monitors.

        Caller: every rank of the world, when the engine has been built.
        """

        def change(plan: Plan) -> None:
            model.change_replica(self._replica_of(plan))
            self._agreements[model] = replace(self._agreements[model], plan=plan)

        self._watches[model] = Watch(steps_per_print, model.clock, self._agreements[model], change, writer)
        return self._watches[model]

    def outlook(self, model: sharded_model.ShardedModel) -> Outlook:
        """What was predicted for a converted model, and what its steps take; empty on ranks other than 0."""
        return self._outlooks[model]


def _read_facts(model: nn.Module, ds_config: Mapping[str, Any], sp_sizes: Mapping[str, int | None]) -> JobFacts:
    """What this rank knows of the job; raises what is wrong with it."""
    section = section_of(ds_config)
    assert section is not None
    return JobFacts(
        section=section,
        model=read_model_facts(model),
        training=read_training_facts(ds_config),
        sp_sizes=dict(sp_sizes),
        versions={name: version(name) for name in ("torch", "deepspeed", "transformers")} | {"ds_hetero": __version__},
    )


def _labels_that_count(batch: Mapping[str, Any]) -> Tensor:
    """What the loss is taken over: labels that a loader moved to their predecessors, or that the model will move."""
    labels: Tensor = batch["shift_labels"] if "shift_labels" in batch else batch["labels"][:, 1:]
    return labels


def _items_of_step(batch: Mapping[str, Any]) -> int:
    info = shard_info(batch["position_ids"])
    if info is None or info.num_items is None:
        raise BatchError(
            "replicas that take different batches are weighed by their tokens, but how many the optimizer step has is "
            "not known of this batch. Give handle.loss the batch from handle.dataloader as it is, not a copy, or "
            "num_items from handle.count_items."
        )
    return info.num_items
