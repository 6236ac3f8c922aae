"""Evaluate with the Hugging Face Trainer over shards, for sequences that fit only when they are sharded.

All ranks of a replica read the same whole rows, and each forward is an evaluation call, which is sharded at the model
(`ds_hetero.frameworks.transformers.model.evaluation_call`). So the Trainer, its subclasses and the user's functions get
the batches, outputs and metrics of one process. To them, P replicas are P processes that read b rows each. In
transformers, P processes differ from one process with P * b rows in three things:

    loss of a step            transformers takes the mean over the labels of each process; here it is the mean over the
                              labels of all replicas, on every rank
    repeated rows             accelerate fills the last batch up with earlier rows; here their labels are set to -100
    loss of the last batch    transformers repeats it by the rows of a full batch and cuts it to the real rows, which is
                              right here, because the loss is equal on all ranks
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
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.transformers.model.model_checks import pretrained_of, whole_evaluation_reason
from ds_hetero.runtime.data.shards import IGNORE_INDEX, Entries

logger = logging.getLogger(__name__)

# Packages whose ``compute_loss`` reads logits only if the Trainer requests them.
_LIBRARIES = ("transformers", "trl")


def is_sharded(registry: Registry, trainer: Trainer) -> bool:
    """Return True if a Trainer trains with this engine's sequence parallelism."""
    return registry.adapters.processes.asks_for_engine(trainer.accelerator) and trainer.get_sp_size() > 1


def takes_loss_from_logits(trainer: Trainer) -> bool:
    """Return True if the Trainer computes the loss from logits and labels of whole sequences."""
    stock_uses_logits = trainer.label_smoother is not None or trainer.compute_loss_func is not None
    return stock_uses_logits or _computes_from_labels(type(trainer).compute_loss)


def _computes_from_labels(compute_loss: Function) -> bool:
    """Return True if a script's ``compute_loss`` reads ``labels`` of the batch and does not call the Trainer's.

    transformers' documentation shows such a function; it expects whole batches and all logits. It is recognized by its
    compiled code: "labels" is one of its constants, and ``super().compute_loss`` would be one of its names.
    """
    code = getattr(inspect.unwrap(compute_loss), "__code__", None)
    if code is None or compute_loss.__module__.partition(".")[0] in (*_LIBRARIES, "ds_hetero"):
        return False
    return "labels" in code.co_consts and "compute_loss" not in code.co_names


_TAKES_ITEMS = "_ds_hetero_takes_items"  # attribute of a Trainer; those of TRL may be unhashable, so it is no key


def offer_loss_kwargs(trainer: Trainer) -> None:
    """Set ``model_accepts_loss_kwargs`` as ``Trainer.__init__`` does in one process; call it at the end of that.

    With sequence parallelism, stock sets it to False, because it then computes the loss itself. Constructors of
    subclasses read or change it afterwards: Axolotl's changes True to False.
    """
    model = pretrained_of(trainer.model)
    accepts: bool | None = getattr(model, "accepts_loss_kwargs", None)
    if accepts is None:
        kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
        accepts = inspect.Parameter.VAR_KEYWORD in kinds
    trainer.model_accepts_loss_kwargs = accepts


def accepts_loss_kwargs(trainer: Trainer) -> bool:
    """Return True if, in one process, the Trainer would give the model the number of labels of a step.

    The first call, when the Trainer begins to train or evaluate, takes the answer from ``model_accepts_loss_kwargs``,
    and sets that to False, as stock wants it with sequence parallelism.
    """
    if _TAKES_ITEMS not in vars(trainer):
        setattr(trainer, _TAKES_ITEMS, bool(trainer.model_accepts_loss_kwargs))
        trainer.model_accepts_loss_kwargs = False
    takes_items: bool = vars(trainer)[_TAKES_ITEMS]
    return takes_items


def evaluates_shards(registry: Registry, trainer: Trainer) -> bool:
    """Return True if ``evaluate`` and ``predict`` of a Trainer run over shards. Call it on every rank.

    Trainer                                                  over shards
    not sharded, pipelined, or needs whole sequences         no
    inside handle.sharded() or handle.unsharded()            yes in sharded(), no in unsharded()
    computes its loss from logits                            yes: in training, its model takes no batches of one rank
    any other                                                "evaluation" of the section, or the model's default
    """
    if not is_sharded(registry, trainer) or registry.is_pipelined(trainer.model):
        return False
    if registry.adapters.trainers.needs_whole_sequences(trainer):
        return False
    forced_by_handle = sharding_is_set()  # True in handle.sharded(), False in handle.unsharded(), else None
    if forced_by_handle is not None:
        return forced_by_handle
    if takes_loss_from_logits(trainer):
        return True
    trained = registry.find(trainer.model)
    if trained is not None:
        return trained.sequences is not None and trained.sequences.evaluation.kind == "sharded"
    request = registry.request_of(trainer.accelerator.state.deepspeed_plugin.deepspeed_config)
    assert request.section is not None
    if request.is_of_pipelines:
        return False
    return (request.section.evaluation or _default_evaluation(trainer)) == "sharded"


def _default_evaluation(trainer: Trainer) -> str:
    """Return how a Trainer's model is evaluated if the section has no "evaluation": "whole" or "sharded"."""
    return "whole" if whole_evaluation_reason(pretrained_of(trainer.model)) else "sharded"


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
    """Replace ``Trainer.evaluation_loop``, which ``evaluate`` and ``predict`` call: run it over shards if possible.

    Caller: every rank of the world.

    Raises:
        ConfigError: the loop needs logits of pipelines, or replicas would have unequally many batches.
    """
    loop = functools.partial(stock, trainer, dataloader, description, prediction_loss_only, *args, **kwargs)
    if registry.is_pipelined(trainer.model):
        loss_only = trainer.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        if not loss_only:
            raise ConfigError(
                f"{description} needs logits, which stay on the last stages of pipelines. To compute the loss alone, "
                "set prediction_loss_only=True in the training arguments."
            )
        trainer.gather_function = functools.partial(_cut_to_rows, trainer)
        return loop()
    if not evaluates_shards(registry, trainer):
        if is_sharded(registry, trainer) and sharding_is_set() is None:
            _log_why_whole(registry, trainer)
        return loop()
    num_replicas = dist.get_world_size() // trainer.get_sp_size()
    if num_replicas > 1 and not trainer.accelerator.even_batches:
        raise ConfigError(
            f'"even_batches": false of accelerator_config leaves {num_replicas} replicas with unequally many batches, '
            "but they evaluate each batch together. Set it to true: rows that fill the last batch up count nothing."
        )
    with _StepsOverShards(registry, trainer, dataloader, num_replicas).replacing_stock():
        return loop()


def _cut_to_rows(trainer: Trainer, values: Any, *_: object, **__: object) -> Any:
    """Replace ``gather_for_metrics`` if all ranks evaluate the same batch: cut values to the rows of the last batch.

    The Trainer repeats a loss by the rows of a full batch, and expects this function to cut off the excess values.
    """
    state = trainer.accelerator.gradient_state
    is_cut = state.end_of_dataloader and state.remainder > 0 and isinstance(values, Tensor) and values.dim()
    return values[: state.remainder] if is_cut else values


_logged: set[str] = set()


def _warn_once(text: str) -> None:
    """Log a warning on rank 0, unless the same text was logged before."""
    if text not in _logged:
        _logged.add(text)
        if dist.get_rank() == 0:
            logger.warning("%s", text)


def _log_why_whole(registry: Registry, trainer: Trainer) -> None:
    """Log once why the evaluation of a sharded model runs on whole sequences."""
    split = registry.find_split(trainer.model)
    if split is not None and split.evaluation.whole_reason:
        _warn_once(f"evaluation runs on whole sequences, in batches of each rank: {split.evaluation.whole_reason}")


class _StepsOverShards:
    """Runs the steps of one evaluation loop of a Trainer over shards.

    Args:
        dataloader: prepared by accelerate, which divides rows among replicas.
    """

    def __init__(self, registry: Registry, trainer: Any, dataloader: Any, num_replicas: int) -> None:
        self._registry, self._trainer, self._dataloader = registry, trainer, dataloader
        self._num_replicas = num_replicas
        self._replica = dist.get_rank() // trainer.get_sp_size()
        self._stock_step: Callable[..., Any] = trainer.prediction_step  # of the Trainer or of its subclass
        self._count_items: Callable[..., Any] = trainer._get_num_items_in_batch
        self._preprocess: Callable[..., Any] | None = trainer.preprocess_logits_for_metrics
        # State of the present step:
        self._divides_by_all_labels = False  # True if its loss was divided by the labels of all replicas
        self._has_preprocessed = False  # True if its logits were preprocessed, one sequence after the other

    @contextlib.contextmanager
    def replacing_stock(self) -> Iterator[None]:
        """Inside the context, replace the methods of the Trainer by those of this class."""
        trainer = self._trainer
        replaced = {
            "prediction_step": self._predict,
            "_get_num_items_in_batch": self._note_items,
            # Trainer.__init__ sets it to False for sequence parallelism.
            "model_accepts_loss_kwargs": accepts_loss_kwargs(trainer),
        }
        if self._preprocess is not None:
            replaced["preprocess_logits_for_metrics"] = self._preprocess_rest
        former = {name: vars(trainer)[name] for name in replaced if name in vars(trainer)}
        is_gathering = wanted_results() is not None  # inside `calls_sharded`
        gathering = self._registry.adapters.processes.gathering_over_replicas(trainer.accelerator)
        vars(trainer).update(replaced)
        try:
            with contextlib.nullcontext() if is_gathering else gathering:
                yield
        finally:
            for name in replaced:
                del vars(trainer)[name]
            vars(trainer).update(former)

    def _predict(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Replace ``prediction_step``: run stock's as an evaluation call, and average the loss over replicas."""
        trainer = self._trainer
        split = self._registry.find_split(trainer.model)
        assert split is not None
        check_evaluated(split, inputs)
        inputs = self._ignore_repeated_rows(inputs)
        adapters = self._registry.adapters
        wanted = Wanted(
            own_outputs=True,
            on_request=True,
            logits=not prediction_loss_only,
            shorter_outputs=adapters.trainers.shorter_outputs,
            of_sequence=self._preprocess_function(inputs) if self._may_preprocess else None,
            num_replicas=self._num_replicas,
        )
        num_labels = self._num_labels(inputs, are_shifted=split.model_loss.moves_labels)
        self._divides_by_all_labels = self._has_preprocessed = False
        with evaluating(wanted), adapters.processes.one_process_per_replica():
            loss, logits, labels = self._stock_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        if loss is not None:
            loss = self._mean_over_replicas(loss, None if self._divides_by_all_labels else num_labels)
        return loss, logits, labels

    def _note_items(self, *args: Any, **kwargs: Any) -> Any:
        """Extend ``_get_num_items_in_batch``: note that the loss of this step is divided by the labels of all replicas.

        The Trainer then multiplies it by the number of processes, which are replicas here.
        """
        items = self._count_items(*args, **kwargs)
        self._divides_by_all_labels = items is not None
        return items

    @property
    def _may_preprocess(self) -> bool:
        """True if nothing but ``preprocess_logits_for_metrics`` reads the logits of a step."""
        is_of_library = type(self._trainer).compute_loss.__module__.partition(".")[0] in _LIBRARIES
        return self._preprocess is not None and is_of_library and not takes_loss_from_logits(self._trainer)

    def _preprocess_function(self, inputs: Any) -> Callable[[Tensor, int], Any]:
        """Return a function that applies ``preprocess_logits_for_metrics`` to the gathered logits of one sequence."""
        names = self._trainer.label_names
        labels = tuple(inputs.get(name) for name in names)

        def preprocess(logits: Tensor, row: int) -> Any:
            assert self._preprocess is not None
            self._has_preprocessed = True
            labels_of_row = tuple(None if entry is None else entry[row : row + 1] for entry in labels)
            return self._preprocess(logits, labels_of_row[0] if len(labels_of_row) == 1 else labels_of_row)

        return preprocess

    def _preprocess_rest(self, logits: Any, labels: Any) -> Any:
        """Replace ``preprocess_logits_for_metrics``: call it, unless it was already applied to each sequence."""
        assert self._preprocess is not None
        return logits if self._has_preprocessed else self._preprocess(logits, labels)

    def _num_labels(self, inputs: Any, are_shifted: bool) -> Tensor | None:
        """Return the number of labels that count in the loss; None if the batch has no token labels.

        Args:
            are_shifted: True if the model shifts labels, so that the first label of a row does not count.
        """
        labels = inputs.get("labels")
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return None
        return (labels[..., 1:] if are_shifted else labels).ne(IGNORE_INDEX).sum()

    def _mean_over_replicas(self, loss: Tensor, weight: Tensor | None) -> Tensor:
        """Return the mean of the replicas' losses, weighed by their labels.

        Args:
            weight: number of this replica's labels; None to weigh replicas equally.

        Caller: every rank of the world.
        Collectives: one all_reduce of two numbers; none with one replica.
        """
        if self._num_replicas == 1:
            return loss
        weight = torch.ones((), device=loss.device) if weight is None else weight.to(loss.device)
        total = torch.stack([loss.double().masked_fill(weight == 0, 0.0) * weight, weight.double()])
        dist.all_reduce(total)  # every replica has the same number of ranks, so each counts alike
        return (total[0] / total[1].clamp(min=1)).to(loss.dtype)

    def _ignore_repeated_rows(self, inputs: Any) -> Any:
        """Return the inputs with label -100 in those rows that accelerate repeats to fill the last batch.

        Example: 10 rows, 2 replicas that read 3 rows at a time. The last batch of 6 has 4 real rows: 3 of replica 0 and
        1 of replica 1, whose other 2 rows are repeated.
        """
        state = self._trainer.accelerator.gradient_state
        if self._num_replicas == 1 or not state.end_of_dataloader or state.remainder == 0:
            return inputs
        num_rows = getattr(self._dataloader, "total_batch_size", 0) // self._num_replicas
        if state.remainder < 0 or not num_rows:
            _warn_once(
                "the data set of this evaluation has no length, so ds_hetero cannot know which rows accelerate repeats "
                f"to fill the last batch of {self._num_replicas} replicas up: eval_loss and predictions count them. "
                "Give a data set with a length, or as many rows as fill all batches."
            )
            return inputs
        num_real = min(max(state.remainder - self._replica * num_rows, 0), num_rows)
        if num_real == num_rows:
            return inputs
        masked: dict[str, Any] = {}
        for name, entry in inputs.items():
            is_label = name in self._trainer.label_names
            masked[name] = self._ignore_after(entry, num_real, num_rows, inputs) if is_label else entry
        return masked

    def _ignore_after(self, labels: Any, num_real: int, num_rows: int, inputs: Entries) -> Any:
        """Return labels that are -100 after the first ``num_real`` of ``num_rows`` samples.

        If a collator has packed the samples into one row, a sample begins where ``position_ids`` restart at 0. If the
        number of restarts is not ``num_rows``, the labels are returned unchanged, with a warning.
        """
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return labels
        masked = labels.clone()
        if not num_real or len(labels) == num_rows:
            masked[num_real:] = IGNORE_INDEX
            return masked
        positions: Any = inputs.get("position_ids")
        is_one_row = len(labels) == 1 and isinstance(positions, Tensor)
        starts = (positions[0] == 0).nonzero()[:, 0].tolist() if is_one_row else []
        if len(starts) == num_rows:  # a document is a sample
            masked[:, starts[num_real] :] = IGNORE_INDEX
        else:
            _warn_once(
                f"the last batch of this evaluation repeats samples, since {self._num_replicas} replicas read "
                f"{num_rows} each at a time, but the collator does not mark the tokens of a sample. So eval_loss "
                "counts these samples twice. Set per_device_eval_batch_size=1, or give as many samples as fill all "
                "batches."
            )
        return masked
