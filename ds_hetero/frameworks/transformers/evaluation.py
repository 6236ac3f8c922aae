"""Evaluate with the Hugging Face Trainer over shards, for sequences that fit only when they are sharded.

All ranks of a replica read the same whole rows, and each forward is an evaluation call, which is sharded at the model
(`ds_hetero.frameworks.transformers.model.evaluation_call`). So the Trainer, its subclasses and the user's functions see
the batches, outputs and metrics of one process. To them, P replicas are P processes that read b rows each. Three things
differ in transformers between P processes and one process with P * b rows, and are corrected here:

    loss of a step         mean over the labels of all replicas, on every rank; transformers: of each process
    repeated rows          accelerate fills the last batch up with earlier rows; their labels are set to -100
    loss of last batch     transformers repeats it by the rows of a full batch and cuts it to the real rows, which is
                           right because its values are equal on all ranks
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Trainer

from ds_hetero.engine.evaluation import check_evaluated
from ds_hetero.engine.forward_mode import Wanted, evaluating, sharding_is_set, wanted_results
from ds_hetero.engine.patching import Function
from ds_hetero.engine.registry import Registry
from ds_hetero.engine.whole_model import WholeModel
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.transformers.model.model_checks import pretrained_of, why_evaluated_whole
from ds_hetero.runtime.data.shards import IGNORE_INDEX, Entries

logger = logging.getLogger(__name__)

_LIBRARIES = ("transformers", "trl")  # whose ``compute_loss`` needs only logits that it requests


def is_sharded(registry: Registry, trainer: Trainer) -> bool:
    """Return True if a Trainer trains with this engine's sequence parallelism."""
    return registry.adapters.processes.asks_for_engine(trainer.accelerator) and trainer.get_sp_size() > 1


def loss_from_logits(trainer: Trainer) -> bool:
    """Return True if the Trainer computes the loss from logits and labels of whole sequences."""
    by_stock = trainer.label_smoother is not None or trainer.compute_loss_func is not None
    return by_stock or _computes_from_labels(type(trainer).compute_loss)


def _computes_from_labels(compute_loss: Function) -> bool:
    """Return True if a script's ``compute_loss`` takes ``labels`` from the batch and does not call stock's.

    transformers' documentation shows such a function; it expects whole batches and all logits. It is recognized by its
    compiled code: "labels" is one of its constants, and ``super().compute_loss`` would be one of its names.
    """
    code = getattr(inspect.unwrap(compute_loss), "__code__", None)
    if code is None or compute_loss.__module__.partition(".")[0] in (*_LIBRARIES, "ds_hetero"):
        return False
    return "labels" in code.co_consts and "compute_loss" not in code.co_names


def accepts_loss_kwargs(trainer: Trainer) -> bool:
    """Return True if the Trainer would count the labels of a step in one process, by the rule of its ``__init__``."""
    model = pretrained_of(trainer.model)
    accepts: bool | None = getattr(model, "accepts_loss_kwargs", None)
    if accepts is not None:
        return accepts
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def evaluates_shards(registry: Registry, trainer: Trainer) -> bool:
    """Return True if ``evaluate`` and ``predict`` of a Trainer run over shards. Call it on every rank.

    Trainer                                                  over shards
    not sharded, pipelined, or needs whole sequences         no
    inside handle.sharded() or handle.unsharded()            as these say
    computes its loss from logits                            yes: in training, its model takes no batches of one rank
    else                                                     "evaluation" of the section, or the model's default
    """
    if not is_sharded(registry, trainer) or registry.is_pipelined(trainer.model):
        return False
    if registry.adapters.trainers.needs_whole_sequences(trainer):
        return False
    is_set = sharding_is_set()
    if is_set is not None:
        return is_set
    if loss_from_logits(trainer):
        return True
    prepared = registry.find(trainer.model)
    if prepared is not None:
        return not isinstance(prepared.model, WholeModel) and prepared.model.evaluation == "sharded"
    request = registry.request_of(trainer.accelerator.state.deepspeed_plugin.deepspeed_config)
    assert request.section is not None
    if request.is_of_pipelines:
        return False
    return (request.section.evaluation or _default_of(trainer)) == "sharded"


def _default_of(trainer: Trainer) -> str:
    """Return the value of "evaluation" for a section that has none."""
    return "whole" if why_evaluated_whole(pretrained_of(trainer.model)) else "sharded"


def run_evaluation_loop(
    registry: Registry,
    stock: Function,
    trainer: Trainer,
    dataloader: Any,
    description: str,
    prediction_loss_only: bool | None = None,
    *args: object,
    **kwargs: object,
) -> object:
    """Replace ``Trainer.evaluation_loop``, which ``evaluate`` and ``predict`` call."""
    loop = functools.partial(stock, trainer, dataloader, description, prediction_loss_only, *args, **kwargs)
    if registry.is_pipelined(trainer.model):
        loss_only = trainer.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        if not loss_only:
            raise ConfigError(
                f"{description} needs logits, which stay on the last stages of pipelines. Set prediction_loss_only="
                "True in the training arguments for the loss alone."
            )
        trainer.gather_function = functools.partial(_cut_to_rows, trainer)
        return loop()
    if not evaluates_shards(registry, trainer):
        if is_sharded(registry, trainer) and sharding_is_set() is None:
            _say_why_whole(registry, trainer)
        return loop()
    num_replicas = dist.get_world_size() // trainer.get_sp_size()
    if num_replicas > 1 and not trainer.accelerator.even_batches:
        raise ConfigError(
            f'"even_batches": false of accelerator_config leaves {num_replicas} replicas with unequally many batches, '
            "and they evaluate together. Set it to true: rows that fill the last batch up count nothing."
        )
    with _StepsOverShards(registry, trainer, dataloader, num_replicas).in_place():
        return loop()


def _cut_to_rows(trainer: Trainer, values: Any, *_: object, **__: object) -> Any:
    """Replace ``gather_for_metrics`` if all ranks evaluate the same batch: cut values to the rows of the last batch.

    The Trainer repeats a loss by the rows of a full batch, and expects this function to cut off what is too much.
    """
    state = trainer.accelerator.gradient_state
    is_cut = state.end_of_dataloader and state.remainder > 0 and isinstance(values, Tensor) and values.dim()
    return values[: state.remainder] if is_cut else values


_told: set[str] = set()


def _tell_once(text: str) -> None:
    if text not in _told:
        _told.add(text)
        if dist.get_rank() == 0:
            logger.warning("%s", text)


def _say_why_whole(registry: Registry, trainer: Trainer) -> None:
    split = registry.find_split(trainer.model)
    if split is not None and split.why_evaluated_whole:
        _tell_once(f"evaluation runs on whole sequences, in batches of each rank: {split.why_evaluated_whole}")


class _StepsOverShards:
    """The steps of one evaluation loop of a Trainer.

    Args:
        dataloader: prepared by accelerate, which divides rows among replicas.
    """

    def __init__(self, registry: Registry, trainer: Any, dataloader: Any, num_replicas: int) -> None:
        self._registry, self._trainer, self._dataloader = registry, trainer, dataloader
        self._num_replicas = num_replicas
        self._replica = dist.get_rank() // trainer.get_sp_size()
        self._stock: Callable[..., Any] = trainer.prediction_step  # maybe of a subclass
        self._count_items: Callable[..., Any] = trainer._get_num_items_in_batch
        self._preprocess: Callable[..., Any] | None = trainer.preprocess_logits_for_metrics
        self._divides_by_all_labels = False  # the loss of the step: by those of all replicas, times the replicas
        self._made_sequences = False  # logits of the step have been preprocessed

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Run the steps of the Trainer here inside."""
        trainer = self._trainer
        replaced = {
            "prediction_step": self._predict,
            "_get_num_items_in_batch": self._note_items,
            "model_accepts_loss_kwargs": accepts_loss_kwargs(trainer),  # False where ranks share sequences
        }
        if self._preprocess is not None:
            replaced["preprocess_logits_for_metrics"] = self._preprocess_rest
        before = {name: vars(trainer)[name] for name in replaced if name in vars(trainer)}
        is_gathering = wanted_results() is not None  # inside of a training by sharded calls
        gathering = self._registry.adapters.processes.gathering_over_replicas(trainer.accelerator)
        vars(trainer).update(replaced)
        try:
            with contextlib.nullcontext() if is_gathering else gathering:
                yield
        finally:
            for name in replaced:
                del vars(trainer)[name]
            vars(trainer).update(before)

    def _predict(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Replace ``prediction_step``: run stock's as an evaluation call, and average the loss over replicas."""
        trainer = self._trainer
        split = self._registry.find_split(trainer.model)
        assert split is not None
        check_evaluated(split, inputs)
        inputs = self._without_repeated(inputs)
        adapters = self._registry.adapters
        wanted = Wanted(
            own_outputs=True,
            on_request=True,
            logits=not prediction_loss_only,
            shorter_outputs=adapters.trainers.shorter_outputs,
            of_sequence=self._of_sequence(inputs) if self._may_preprocess else None,
            num_replicas=self._num_replicas,
        )
        num_labels = self._num_labels(inputs, moved=split.moves_labels)
        self._divides_by_all_labels = self._made_sequences = False
        with evaluating(wanted), adapters.processes.one_process_per_replica():
            loss, logits, labels = self._stock(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        if loss is not None:
            loss = self._mean_over_replicas(loss, None if self._divides_by_all_labels else num_labels)
        return loss, logits, labels

    def _note_items(self, *args: Any, **kwargs: Any) -> Any:
        """Extend ``_get_num_items_in_batch``: note if ``prediction_step`` divides by the labels of all replicas."""
        items = self._count_items(*args, **kwargs)
        self._divides_by_all_labels = items is not None
        return items

    @property
    def _may_preprocess(self) -> bool:
        """True if only ``preprocess_logits_for_metrics`` reads the logits of a step."""
        by_library = type(self._trainer).compute_loss.__module__.partition(".")[0] in _LIBRARIES
        return self._preprocess is not None and by_library and not loss_from_logits(self._trainer)

    def _of_sequence(self, inputs: Any) -> Callable[[Tensor, int], Any]:
        """Return a function that applies ``preprocess_logits_for_metrics`` to the gathered logits of one sequence."""
        names = self._trainer.label_names
        labels = tuple(inputs.get(name) for name in names)

        def of_sequence(logits: Tensor, row: int) -> Any:
            assert self._preprocess is not None
            self._made_sequences = True
            of_row = tuple(None if of_batch is None else of_batch[row : row + 1] for of_batch in labels)
            return self._preprocess(logits, of_row[0] if len(of_row) == 1 else of_row)

        return of_sequence

    def _preprocess_rest(self, logits: Any, labels: Any) -> Any:
        """Replace ``preprocess_logits_for_metrics``, unless it was already applied to each sequence."""
        assert self._preprocess is not None
        return logits if self._made_sequences else self._preprocess(logits, labels)

    def _num_labels(self, inputs: Any, moved: bool) -> Tensor | None:
        labels = inputs.get("labels")
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return None
        return (labels[..., 1:] if moved else labels).ne(IGNORE_INDEX).sum()

    def _mean_over_replicas(self, loss: Tensor, weight: Tensor | None) -> Tensor:
        """Return the mean of the replicas' losses. ``weight``: this replica's labels; None for equal weights."""
        if self._num_replicas == 1:
            return loss
        weight = torch.ones((), device=loss.device) if weight is None else weight.to(loss.device)
        total = torch.stack([loss.double().masked_fill(weight == 0, 0.0) * weight, weight.double()])
        dist.all_reduce(total)  # of all ranks, which are equally many in every replica
        return (total[0] / total[1].clamp(min=1)).to(loss.dtype)

    def _without_repeated(self, inputs: Any) -> Any:
        """Return inputs in which the labels of repeated rows, which fill the last batch up, are -100."""
        state = self._trainer.accelerator.gradient_state
        if self._num_replicas == 1 or not state.end_of_dataloader or state.remainder == 0:
            return inputs
        size = getattr(self._dataloader, "total_batch_size", 0) // self._num_replicas
        if state.remainder < 0 or not size:
            _tell_once(
                "the data of this evaluation has no length: which rows accelerate repeats to fill the last batch of "
                f"{self._num_replicas} replicas up is not known, and eval_loss and predictions count them. Give a "
                "dataset with a length, or as many rows as fill all batches."
            )
            return inputs
        real = min(max(state.remainder - self._replica * size, 0), size)
        if real == size:
            return inputs
        return {
            name: self._masked(entry, real, size, inputs) if name in self._trainer.label_names else entry
            for name, entry in inputs.items()
        }

    def _masked(self, labels: Any, real: int, size: int, inputs: Entries) -> Any:
        """Return labels in which only the first ``real`` of ``size`` samples count; the others are -100."""
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return labels
        masked = labels.clone()
        if not real or len(labels) == size:
            masked[real:] = IGNORE_INDEX
            return masked
        positions: Any = inputs.get("position_ids")
        is_one_row = len(labels) == 1 and isinstance(positions, Tensor)
        starts = (positions[0] == 0).nonzero()[:, 0].tolist() if is_one_row else []
        if len(starts) == size:  # a document is a sample
            masked[:, starts[real] :] = IGNORE_INDEX
        else:
            _tell_once(
                f"the last batch of this evaluation repeats samples, since {self._num_replicas} replicas read "
                f"{size} each at a time, and the collator leaves no sign of which tokens are theirs: eval_loss counts "
                "them twice. Set per_device_eval_batch_size=1, or give as many samples as fill all batches."
            )
        return masked
