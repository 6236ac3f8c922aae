"""The handle that `ds_hetero.register` returns: all calls that a training script makes to ds_hetero."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ds_hetero.engine.adapters import ResultsOfTokens
from ds_hetero.engine.elastic_loader import ElasticLoader
from ds_hetero.engine.forward_mode import Wanted, sharding
from ds_hetero.engine.model_calls import ModelCalls, calls_of, labels_that_count
from ds_hetero.engine.registry import Registry
from ds_hetero.engine.sharded_calls import call_sharded
from ds_hetero.engine.trained.model import TrainedModel
from ds_hetero.errors import BatchError, ConfigError
from ds_hetero.job.replanning import ScheduleChange
from ds_hetero.runtime.data.shards import IGNORE_INDEX, Batch
from ds_hetero.runtime.loss import count_items, ratio
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Schedule
from ds_hetero.values.section import SECTION


class Handle:
    """Calls of a training script to ds_hetero, from `ds_hetero.register`.

    Scripts with the HF Trainer or accelerate need at most `undo`. In a custom loop:

        handle = ds_hetero.register()
        engine, *_ = deepspeed.initialize(model=model, config=ds_config)
        for batch in handle.dataloader(dataloader):
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()

    If a process has several engines, `for_engine` returns the handle of one of them.

    Args:
        registry: the models that frameworks have prepared; not for users.
        model: the model of this handle's engine; None if the process has one engine only.
    """

    def __init__(self, registry: Registry, model: nn.Module | None = None) -> None:
        self.registry = registry
        self._model = model

    def for_engine(self, engine: Any) -> Handle:
        """Return a handle whose calls are for one engine.

        Args:
            engine: an engine from `deepspeed.initialize`, with a "heterogeneity" section or without.

        Raises:
            ConfigError: the engine was built before `ds_hetero.register`, or the handle was undone.
        """
        model = engine.module
        if not self.registry.has_prepared(model):
            raise ConfigError(
                "handle.for_engine was given an engine that ds_hetero does not know: it was built before "
                "ds_hetero.register(), or the handle was undone. Register first, then build the engine."
            )
        return Handle(self.registry, model)

    def undo(self) -> None:
        """Undo all changes in the frameworks and in the models, and close the replicas' process groups.

        Call it on every rank. Engines of ZeRO-3 with unequal weights cannot be used afterwards.
        """
        self.registry.undo()

    @property
    def replica(self) -> Replica:
        """This rank's replica. Raises `ConfigError`: no model with a section has been prepared yet."""
        return self._trained.replica

    @property
    def plan(self) -> Plan:
        """The plan of the job, for all ranks. Raises `ConfigError`: see `replica`."""
        model = self.registry.latest_model if self._model is None else self._model
        stage = None if model is None else self.registry.find_stage(model)
        return self.replica.plan if stage is None else stage.plan

    @property
    def schedule(self) -> Schedule:
        """The schedule of this rank's replica. Raises `ConfigError`: see `replica`."""
        return self.replica.schedule

    @property
    def schedule_changes(self) -> tuple[ScheduleChange, ...]:
        """Changes that ``"replan"`` has made to schedules since `deepspeed.initialize`; the same on every rank."""
        monitor = self._trained.monitor
        changes = () if monitor is None or monitor.replanning is None else monitor.replanning.changes
        return tuple(change for change in changes if isinstance(change, ScheduleChange))

    def _choose(self, call: str) -> ModelCalls:
        """Return loader and losses of the model that a call is for.

        Args:
            call: name of the method that was called, for the error.

        Raises:
            ConfigError: there is no prepared model, or several with different replicas or modes.
        """
        if self._model is not None:
            return calls_of(self.registry, self._model)
        in_training = self.registry.in_training
        if len({(trained.replica, trained.takes_shards) for trained in in_training}) > 1:
            raise ConfigError(
                f"handle.{call} does not know which engine it is for: {len(in_training)} engines with a "
                f'"{SECTION}" section exist, under different schedules or with some in eval(). Call '
                f"handle.for_engine(engine).{call}, or engine.destroy() on engines that are not used any more."
            )
        latest = self.registry.latest_model
        return calls_of(self.registry, self._trained.module if latest is None else latest)

    @property
    def _trained(self) -> TrainedModel:
        """The model of this handle's engine, or the latest one. Raises `ConfigError`: there is none with a section."""
        trained = self.registry.latest if self._model is None else self.registry.find_on_replica(self._model)
        if trained is None:
            raise ConfigError(
                f'no model has been prepared with a "{SECTION}" section yet. Call deepspeed.initialize or '
                "accelerator.prepare first, with a ds_config.json that has one."
            )
        return trained

    def dataloader(
        self,
        dataloader: Iterable[Any],
        *,
        device: torch.device | str | None = None,
        batches: Literal["same", "own"] | None = None,
    ) -> Iterable[Any]:
        """Wrap a loader of whole batches, so that it yields the batches or shards that this rank's model takes.

        If the model was prepared without a "heterogeneity" section, batches are only moved to its device. See
        `ds_hetero.runtime.data.loader.ShardedLoader`.

        Args:
            dataloader: yields mappings with ``input_ids`` and ``labels``; for a module that is not split, whatever it
                takes.
            device: device of the yielded batches; the model's if left out.
            batches: ``"same"`` if the loaders of a replica's ranks yield the same batches, ``"own"`` if each rank's
                loader yields different ones; found out by comparison if left out.
        """
        calls = self._choose("dataloader")
        return calls.dataloader(dataloader, calls.device if device is None else torch.device(device), batches)

    def elastic(self, loader: object, extra: Mapping[str, object] | None = None) -> ElasticLoader:
        """Restore an elastic job after ranks died or joined, and save its state from now on; see docs/elastic.md.

        Call it on every rank, once, between ``deepspeed.initialize`` and the first step. If the job is not elastic, or
        has no "heterogeneity" section, the returned loader only counts epochs.

        Args:
            loader: the loader of the job, from `dataloader`.
            extra: further objects of the script whose state is to be saved, by name; they need ``state_dict`` and
                ``load_state_dict``. States are saved when the loop requests the next batch.

        Returns:
            A loader of the same batches. After a restart its first epoch begins at the next sample.

        Raises:
            ConfigError: the loader or an object cannot be saved.
            CheckpointError: the saved state is that of another model, or of another global batch.
        """
        model = self.registry.latest_model if self._model is None else self._model
        if model is None or not self.registry.has_prepared(model):
            model = self._trained.module
        job = self.registry.elastic_of(model)  # None without a section: elastic jobs refuse such engines
        wrapped = ElasticLoader(loader, (lambda: None) if job is None else job.end_batch)
        if job is not None:
            if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
                raise ConfigError(
                    f"handle.elastic needs a loader that can be resumed, and a {type(loader).__name__} cannot. Give it "
                    "the loader that handle.dataloader returns."
                )
            accelerate_objects = self.registry.adapters.processes.objects_of_script()
            wrapped.resumed_step = job.resume({"loader": wrapped, **accelerate_objects, **(extra or {})})
        return wrapped

    def loss(self, outputs: Any, batch: Batch, num_items: Tensor | float | None = None) -> Tensor:
        """Return the loss of the whole batch, equal on all ranks of the replica, for the engine's backward.

        Without ``num_items`` this is the ``outputs.loss`` that ``engine(**batch)`` returns.

        Args:
            outputs: outputs of the model for ``batch``, unchanged. They have either the ``loss`` of a model that was
                given ``labels``, a mean over this shard's labels, or the ``logits`` of a module of the script.
            batch: the shard, from `dataloader`.
            num_items: number of labels of all micro-batches of the optimizer step, from `count_items`: all tokens of
                the step then have the same weight; call ``engine.backward(loss, scale_wrt_gas=False)``. If it is left
                out, all micro-batches have the same weight; but if replicas take different batches, all tokens have,
                by the number that the loader counts.

        Collectives: one all_reduce of two numbers; none for ``outputs.loss``.
        """
        if isinstance(outputs, tuple):
            raise BatchError(
                "handle.loss takes outputs whose parts have names, got a tuple. Leave out return_dict=False, or use "
                "the first part of the tuple, the loss of the batch."
            )
        return self._choose("loss").loss(outputs, batch, num_items)

    def mean(
        self, values: Tensor, batch: Batch, where: Tensor | None = None, num_items: Tensor | float | None = None
    ) -> Tensor:
        """Return the mean of a quantity over all tokens of the whole batch, as a term to add to `loss`.

        A mean over the tokens of each rank would give tokens of small shards a larger weight. In a loop, or in
        ``compute_loss`` of a Trainer with ``handle = ds_hetero.register()``:

            loss = loss + 1e-4 * handle.mean(outputs.logits.logsumexp(-1).square(), batch)

        Args:
            values: the quantity for every token of the shard, [B, s]; further dimensions are averaged. Or a scalar that
                is the same on all ranks, such as a penalty on parameters, which is returned with a scaled gradient.
            batch: the shard, from `dataloader`.
            where: [B, s], true for the tokens that count; left out, tokens whose labels count.
            num_items: as for `loss`; needed if replicas take different batches. In a Trainer's ``compute_loss``, its
                ``num_items_in_batch``.

        Returns:
            A scalar, equal on all ranks of the replica; see `token_mean`.
        """
        return self._choose("mean").mean(values, batch, where, num_items)

    def ratio(self, total: Tensor, count: Tensor | float) -> Tensor:
        """Return a loss term that is a sum over samples divided by a count, if ranks take different batches.

            loss = handle.ratio(losses_of_boxes.sum(), num_boxes) + classes   # one process divides by all boxes

        Args:
            total: a scalar, the sum over this rank's samples.
            count: the count over this rank's samples, such as boxes; counts of ranks add up. Do not clamp it to 1 if it
                is zero: the term is zero then.

        Returns:
            A scalar, ``total / count``, as a term of a loss; the engine's backward weighs it by the ranks' counts.
        """
        return ratio(total, count)

    def sharded_call(
        self, model: Any, *, hidden_state: bool = False, logits: bool = False, **batch: Any
    ) -> ResultsOfTokens | Any:
        """Call a model with a whole batch: each rank computes its shard, and gets the results of all tokens.

        This is for losses of whole sequences: preferences, rewards, distillation.

            log_probs = handle.sharded_call(engine, input_ids=ids, labels=labels).log_probs  # [B, L]

        Every rank of a replica then computes the same loss from the same results, and gives it to the engine's
        ``backward``. A model with a section also runs sharded in ``eval()`` and without gradients, as reference models
        do.

        Args:
            model: an engine, or a model that an engine trains. A reference model needs an engine, too.
            hidden_state: whether to return ``hidden_state`` [B, L, D] of the last layer.
            logits: whether to return ``logits`` [B, L, V]: every rank needs as much memory for them as one process.
            batch: arguments of the model: whole batches, the same on all ranks of a replica, on the model's device.

        Returns:
            `ResultsOfTokens`; for a model whose head pools over the sequence, the model's outputs.

        Caller: every rank of the replica; at the first call while training, every rank of the world.
        """
        wanted = Wanted(own_outputs=False, logits=logits, hidden_state=hidden_state)
        return call_sharded(self.registry, model, batch, wanted)

    def count_items(self, batches: Iterable[Batch]) -> Tensor:
        """Return the number of labels that count in all micro-batches of an optimizer step, over all ranks.

        Args:
            batches: this rank's micro-batches of the step.

        Collectives: one all_reduce.
        """
        labels = [labels_that_count(batch) for batch in batches]
        trained = self.registry.in_training if self._model is None else [self.registry.find(self._model)]
        # Empty for an engine with pipelines, or without a section.
        unlike = [entry.batches for entry in trained if entry is not None and entry.batches is not None]
        is_filler = any(batches.only_fills_up for batches in unlike)
        counted = 0 if is_filler else sum(part.ne(IGNORE_INDEX).sum() for part in labels)
        return count_items(counted, labels[0].device)

    @contextlib.contextmanager
    def gathered_experts(self, *, frozen: bool = True) -> Iterator[None]:
        """Inside the context, let rank 0's model have all experts in its ``state_dict`` and ``save_pretrained``.

        Without ``"experts"`` in the section it does nothing. engine.save_checkpoint needs no context.

        Args:
            frozen: False to leave experts out that are not trained, as to save adapters alone: then rank 0's memory
                needs no room for them.

        Caller: every rank. Collectives: see `ds_hetero.runtime.experts.parts.ExpertParts.gathered`.
        """
        experts = self._trained.experts
        with contextlib.nullcontext() if experts is None else experts.gathered(frozen=frozen):
            yield

    @contextlib.contextmanager
    def sharded(self) -> Iterator[None]:
        """Inside the context, let forwards take shards even in evaluation mode, as for a prefill over all ranks."""
        with sharding(True):
            yield

    @contextlib.contextmanager
    def unsharded(self) -> Iterator[None]:
        """Inside the context, let forwards take whole batches even in training mode."""
        with sharding(False):
            yield
