"""Result of `ds_hetero.register`: the engine of this process as the user sees it, and how to undo it."""

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
from ds_hetero.engine.registry import PreparedModel, Registry
from ds_hetero.engine.sharded_calls import call_sharded
from ds_hetero.engine.whole_model import WholeModel
from ds_hetero.errors import BatchError, ConfigError
from ds_hetero.job.replanning import ScheduleChange
from ds_hetero.runtime.data.shards import IGNORE_INDEX, Batch
from ds_hetero.runtime.loss import count_items, ratio
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Schedule
from ds_hetero.values.section import SECTION


class Handle:
    """The engine of this process, from `ds_hetero.register`.

    Under the HF Trainer and accelerate nothing but `undo` is of interest. In a loop of one's own:

        handle = ds_hetero.register()
        engine, *_ = deepspeed.initialize(model=model, config=ds_config)
        for batch in handle.dataloader(dataloader):
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()

    With several engines in one process, `for_engine` says which one a call is about.

    Args:
        registry: what the frameworks have prepared; not for users.
        model: of the one engine that this handle is about; None for whichever there is.
    """

    def __init__(self, registry: Registry, model: nn.Module | None = None) -> None:
        self.registry = registry
        self._model = model

    def for_engine(self, engine: Any) -> Handle:
        """Return the same handle for one engine. Raises `ConfigError`: not built since `register`, or undone.

        Args:
            engine: from `deepspeed.initialize`, with a "heterogeneity" section or without.
        """
        model = engine.module
        if not self.registry.has_prepared(model):
            raise ConfigError(
                "handle.for_engine was given an engine that ds_hetero does not know: it was built before "
                "ds_hetero.register(), or the handle was undone."
            )
        return Handle(self.registry, model)

    def undo(self) -> None:
        """Put back everything that was replaced, in the frameworks and in the models, and close the replicas' groups.

        Call it on every rank. Engines of ZeRO-3 with unequal weights cannot be used afterwards.
        """
        self.registry.undo()

    @property
    def replica(self) -> Replica:
        """This rank's place in its replica. Raises `ConfigError`: no model with a section has been prepared yet."""
        return self._prepared.model.replica

    @property
    def plan(self) -> Plan:
        """The plan of all ranks of the job; see `replica`."""
        model = self.registry.latest_model if self._model is None else self._model
        stages = None if model is None else self.registry.find_pipelined(model)
        return self.replica.plan if stages is None else stages.plan

    @property
    def schedule(self) -> Schedule:
        """The schedule of this rank's replica; see `replica`."""
        return self.replica.schedule

    @property
    def schedule_changes(self) -> tuple[ScheduleChange, ...]:
        """Changes of any replica's schedule since `deepspeed.initialize`, with ``"replan"``; the same on every rank."""
        monitor = self._prepared.monitor
        changes = () if monitor is None or monitor.replanning is None else monitor.replanning.changes
        return tuple(change for change in changes if isinstance(change, ScheduleChange))

    def _choose(self, call: str) -> ModelCalls:
        """Loader and losses for the model of ``call``. Raises `ConfigError`: there is none, or several unlike ones."""
        if self._model is not None:
            return calls_of(self.registry, self._model)
        in_training = [prepared.model for prepared in self.registry.in_training]
        if len({(model.replica, model.takes_shards) for model in in_training}) > 1:
            raise ConfigError(
                f"handle.{call} does not know which engine it is for: {len(in_training)} engines with a "
                f'"{SECTION}" section exist, under different schedules or with some in eval(). Call '
                f"handle.for_engine(engine).{call}, or engine.destroy() on those that are done."
            )
        latest = self.registry.latest_model
        return calls_of(self.registry, self._prepared.model.model if latest is None else latest)

    @property
    def _prepared(self) -> PreparedModel:
        prepared = self.registry.latest if self._model is None else self.registry.find(self._model)
        if prepared is None:
            raise ConfigError(
                f'no model has been prepared with a "{SECTION}" section yet. Call deepspeed.initialize or '
                "accelerator.prepare first, with a ds_config.json that has one."
            )
        return prepared

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
            dataloader: yields mappings with ``input_ids`` and ``labels``; what a module takes, where it is not split.
            device: where batches shall be; left out, where the model is.
            batches: ``"same"`` if all ranks of a replica are given the same batches, ``"own"`` if each has its own.
        """
        calls = self._choose("dataloader")
        return calls.dataloader(dataloader, calls.device if device is None else torch.device(device), batches)

    def elastic(self, loader: object, extra: Mapping[str, object] | None = None) -> ElasticLoader:
        """Go on where the job was before ranks died or joined, and keep its state from here on; see docs/elastic.md.

        Call it on every rank, once, between ``deepspeed.initialize`` and the first step. In a job that is not elastic
        it only counts epochs.

        Args:
            extra: further state of the script, by name: objects with ``state_dict`` and ``load_state_dict``. It is
                saved when the loop asks for the next batch.

        Returns:
            A loader of the same batches, whose first epoch begins at the next sample.

        Raises:
            ConfigError: something cannot be kept.
            CheckpointError: the memory holds a state of another model, or of another global batch.
        """
        model = self.registry.latest_model if self._model is None else self._model
        if model is None or not self.registry.is_pipelined(model):
            model = self._prepared.model.model
        job = self.registry.elastic_of(model)
        wrapped = ElasticLoader(loader, (lambda: None) if job is None else job.end_batch)
        if job is not None:
            if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
                raise ConfigError(
                    f"handle.elastic needs a loader that can be resumed, and a {type(loader).__name__} cannot: give it "
                    "what handle.dataloader returns."
                )
            of_accelerate = self.registry.adapters.processes.objects_of_script()
            wrapped.resumed_step = job.resume({"loader": wrapped, **of_accelerate, **(extra or {})})
        return wrapped

    def loss(self, outputs: Any, batch: Batch, num_items: Tensor | float | None = None) -> Tensor:
        """Return the loss of the whole batch, equal on all ranks of the replica; call the engine's backward on it.

        Without ``num_items`` it is ``outputs.loss`` of ``engine(**batch)``.

        Args:
            outputs: of the model for ``batch``, as they are; of a model that was given ``labels`` too, with ``loss``,
                the mean over this shard's labels; of a module of the script's own, with ``logits``.
            num_items: from `count_items`, to weigh tokens alike over all micro-batches of an optimizer step; then call
                ``engine.backward(loss, scale_wrt_gas=False)``. Left out, micro-batches are weighed alike; where the
                replicas take different batches, tokens are, with the count that the loader makes.

        Collectives: one all_reduce of two numbers; none for ``outputs.loss``.
        """
        if isinstance(outputs, tuple):
            raise BatchError(
                "handle.loss takes outputs whose parts have names, got a tuple. Leave out return_dict=False, or take "
                "the loss of the batch, which comes first in it."
            )
        return self._choose("loss").loss(outputs, batch, num_items)

    def mean(
        self, values: Tensor, batch: Batch, where: Tensor | None = None, num_items: Tensor | float | None = None
    ) -> Tensor:
        """Return the mean of a quantity of the script's own over the whole batch, as a term to add to `loss`.

        A rank's own mean would weigh tokens by how few it holds. In a loop, or in ``compute_loss`` of a Trainer with
        ``handle = ds_hetero.register()``:

            loss = loss + 1e-4 * handle.mean(outputs.logits.logsumexp(-1).square(), batch)

        Args:
            values: [B, s] by token of the shard; further dimensions are averaged. Or a scalar that is the same on all
                ranks, such as a penalty on parameters, which is its own mean.
            where: [B, s], true for the tokens that count; left out, those whose labels count.
            num_items: as for `loss`, and needed where the replicas take different batches; in a Trainer's
                ``compute_loss``, its ``num_items_in_batch``.

        Returns:
            A scalar, equal on all ranks of the replica, for `loss` to be added to; see `token_mean`.
        """
        return self._choose("mean").mean(values, batch, where, num_items)

    def ratio(self, total: Tensor, count: Tensor | float) -> Tensor:
        """Return a loss term that is a sum divided by a number of the script's, where ranks take different batches.

            loss = handle.ratio(losses_of_boxes.sum(), num_boxes) + classes   # one process divides by all boxes

        Args:
            total: scalar, a sum over this rank's samples.
            count: what it is divided by, of this rank's samples; it adds up over ranks. Zero where there is nothing,
                and not one, as a clamp would make it: the ratio is zero then.

        Returns:
            A scalar, ``total / count``, to add others to; the engine's backward weighs it by its counts.
        """
        return ratio(total, count)

    def sharded_call(
        self, model: Any, *, hidden_state: bool = False, logits: bool = False, **batch: Any
    ) -> ResultsOfTokens | Any:
        """Call a model with a whole batch, which is cut where the model is entered.

        For losses of whole sequences: preferences, rewards, distillation. Each rank computes its shard, uneven as
        everywhere, and gets the results of all tokens:

            log_probs = handle.sharded_call(engine, input_ids=ids, labels=labels).log_probs  # [B, L]

        What follows is computed on every rank, from the same numbers, to one loss per replica; give it to the engine's
        ``backward``. A model with a section runs sharded in ``eval()`` and without gradients too, as reference models
        do.

        Args:
            model: an engine, or a model that one trains; a reference model is an engine of its own.
            hidden_state: return ``hidden_state`` [B, L, D] of the last layer, too.
            logits: return ``logits`` [B, L, V], too: as much memory on every rank as one process needs for them.
            batch: what the model takes, whole and the same on all ranks of a replica, on the model's device.

        Returns:
            `ResultsOfTokens`; of a model whose head pools over the sequence, its own outputs.

        Caller: every rank of the replica; at the first call while training, every rank of the world.
        """
        wanted = Wanted(own_outputs=False, logits=logits, hidden_state=hidden_state)
        return call_sharded(self.registry, model, batch, wanted)

    def count_items(self, batches: Iterable[Batch]) -> Tensor:
        """Labels that count in the micro-batches of one optimizer step, over all ranks; one all_reduce."""
        labels = [labels_that_count(batch) for batch in batches]
        prepared = self.registry.in_training if self._model is None else [self.registry.find(self._model)]
        models = [one.model for one in prepared if one is not None]  # none for an engine of pipelines, or of no section
        is_filler = any(isinstance(one, WholeModel) and one.only_fills_up for one in models)
        counted = 0 if is_filler else sum(part.ne(IGNORE_INDEX).sum() for part in labels)
        return count_items(counted, labels[0].device)

    @contextlib.contextmanager
    def sharded(self) -> Iterator[None]:
        """Let forwards inside take shards although the model is in evaluation, as for prefill over all ranks."""
        with sharding(True):
            yield

    @contextlib.contextmanager
    def unsharded(self) -> Iterator[None]:
        """Let forwards inside take whole batches although the model is training."""
        with sharding(False):
            yield
