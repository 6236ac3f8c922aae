"""The call of a sharded model: what happens before its ``forward``, and to what it returns.

PEFT and others call ``model.forward`` itself, past the hooks of the module, so an attribute of the model takes its
place, as TRL does. A model whose head pools over the sequence computes its head from whole results of its decoder:
there a sharded call is entered and left where the decoder is.

``outputs.loss`` of a forward on a shard.

A loader moves the labels of the whole sequence and cuts them, so that a batch has ``shift_labels`` and no ``labels``,
and the model alone returns no loss. `add_loss` gives its outputs the one that `Handle.loss` would make of them: that
of the whole batch, equal on all ranks, with a gradient of the scale that the engine averages.

A shard is never taken for a whole sequence: every call of a transformers model looks for one in its arguments.

Shards come from our loader, which marks them and remembers the latest (`note_shard`). A model that was never
switched to our attention would compute on one as if it were a whole sequence, without an error; a switched one does, if
its forward goes another way than through our hooks. Both are refused. Costs a look at the arguments per call of a
`PreTrainedModel`, which is once or twice per forward. A call inside compiled code is not looked at.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ds_hetero.engine.arguments import refusals
from ds_hetero.engine.evaluation import cannot_be_split
from ds_hetero.engine.forward_mode import (
    ON_REQUEST,
    ShardedForward,
    Wanted,
    expecting_sharded_forward,
    sharding_is_set,
    wanted_results,
)
from ds_hetero.engine.patching import Function, Patches
from ds_hetero.errors import BatchError, ModelError
from ds_hetero.frameworks.transformers.attention import NAME
from ds_hetero.frameworks.transformers.model.class_loss import ClassLossCall
from ds_hetero.frameworks.transformers.model.evaluation_call import EvaluationCall
from ds_hetero.frameworks.transformers.model.model_checks import router_loss_problem
from ds_hetero.frameworks.transformers.model.own_loss import loss_by_own_function
from ds_hetero.frameworks.transformers.model.recurrent_layers import KEYWORD
from ds_hetero.frameworks.transformers.model.sharded_call import Called, ShardedCall
from ds_hetero.frameworks.transformers.model.tiles import Tiles
from ds_hetero.runtime.attention.local_batch import LocalBatch
from ds_hetero.runtime.data.shard_info import is_part, is_placeholder, shard_info
from ds_hetero.runtime.data.shards import IGNORE_INDEX, Batch, Entries, forget_shards, is_shard
from ds_hetero.runtime.documents import BOUNDARIES, expect_one_set_of_boundaries
from ds_hetero.runtime.loss import (
    cross_entropy_sum,
    has_loss_of_batch,
    loss_of_replica,
    mark_loss_of_batch,
    sequence_parallel_loss,
)
from ds_hetero.runtime.model_switches import autocast_dtype, what_is_trained
from ds_hetero.runtime.step_checks import TokenWeights
from ds_hetero.runtime.step_clock import IDLE


def local_batch(kwargs: Entries, dtype: torch.dtype, parameters: Iterable[nn.Parameter]) -> LocalBatch:
    """This rank's part of a batch, from the arguments of a forward; a placeholder holds no token.

    Args:
        dtype: in which attention will run.
        parameters: of the model, trained and frozen.
    """
    positions, mask = kwargs["position_ids"], kwargs.get("attention_mask")
    tokens = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
    info = shard_info(positions)
    expect_one_set_of_boundaries(kwargs)
    if is_placeholder(positions):
        tokens, positions = tokens[:, :0], positions[:, :0]
        mask = None if mask is None else mask[:, :0]
    return LocalBatch(
        batch_size=tokens.shape[0],
        tokens=tokens.shape[1],
        dtype=dtype,
        position_ids=positions,
        attention_mask=mask,
        cu_seqlens=kwargs.get(BOUNDARIES),
        placement=None if info is None else info.placement,
        autocast=autocast_dtype(positions.device.type),
        trained=what_is_trained(parameters),
    )


def expect_arguments(model: Called, arguments: Batch, *, in_call: bool) -> None:
    """Refuse arguments with which shards would compute something else. Raises `BatchError`: names them.

    Args:
        in_call: whether they are those of a sharded call, which takes whole batches.
    """
    given = {name: value for name, value in arguments.items() if name != KEYWORD and value is not None}
    if not model.is_split and not is_shard(*given.values()):
        return  # it runs whole, see `ShardedModel`
    lines = refusals(given, has_towers=model.cuts_inputs, in_call=in_call, is_split=model.is_split)
    if given.get("output_router_logits") and (problem := router_loss_problem(model.pretrained)):
        lines.append(f'"output_router_logits": True: {problem}.')
    if "labels" in given and "position_ids" in given and not in_call:
        if "num_items_in_batch" in given:
            lines.append('"num_items_in_batch": beside labels the loss would be of a part of them; leave labels out.')
        if "shift_labels" not in given and model.moves_labels:
            lines.append('"labels": the model would move those of a shard once more; give it shift_labels instead.')
    if lines:
        raise BatchError(
            f"{type(model.pretrained).__name__} was given what it does not take on parts of sequences:\n"
            + "\n".join(lines)
        )


def expect_whole(model: str, *tensors: Any) -> None:
    """Refuse a shard where ``model``, by its class, takes whole batches."""
    if is_shard(*tensors):
        raise BatchError(
            f"{model} takes whole batches here (in eval(), in handle.unsharded(), or with a cache of keys and values), "
            "and was given a shard from handle.dataloader. Run the forward in `with handle.sharded():`, on every rank, "
            "for the outputs of the shard; or in `with handle.unsharded():` or eval() on whole batches, from the "
            "loader that handle.dataloader wraps."
        )


WHOLE_BATCHES = (
    "Give such a module whole batches, from the loader that handle.dataloader wraps, by handle.sharded_call(engine, "
    '**batch), which cuts what the language model inside is given; or train it with "sequence_parallel_size": 1.'
)


def is_around(model: Called) -> bool:
    """Whether what is trained is a module of the script's around the model: no adapters, which change nothing there."""
    outermost: object = model.pretrained
    return model.model is not outermost and not hasattr(model.model, "peft_config")


def expect_arguments_of_shards(model: Called) -> None:
    """Refuse shards for a module around a language model whose forward does not take what batches of shards have."""
    outer = model.model
    parameters = inspect.signature(outer.forward).parameters.values()
    if not is_around(model) or any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return
    names = {parameter.name for parameter in parameters}
    if missing := [name for name in ("position_ids", "shift_labels") if name not in names]:
        raise BatchError(
            f"{type(outer).__name__}.forward takes no {' and no '.join(missing)}, which batches of handle.dataloader "
            f"have, and which {type(model.pretrained).__name__} inside needs of a shard. Let it take **kwargs and pass "
            "them on. A module that puts tokens of its own, such as features, before those of a batch cannot take "
            f"shards. {WHOLE_BATCHES}"
        )


def expect_shard_shapes(kwargs: Batch) -> None:
    """Refuse arguments that are none of a shard: no ``position_ids``, or a mask that is not [B, s]."""
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if positions is None and is_shard(kwargs.get("input_ids"), kwargs.get("inputs_embeds")):
        raise BatchError(
            "the model was given the tokens of a shard without its position_ids. Give it the batch from the loader "
            "as it is, model(**batch). A loop that puts the model's inputs together itself needs whole batches: call "
            "the model by handle.sharded_call."
        )
    if positions is None:
        raise BatchError(
            "a forward on shards needs position_ids, the place of every token in the whole sequence. Take batches from "
            "ds_hetero's loader (handle.dataloader), which makes them; for whole batches, see handle.unsharded()."
        )
    if positions.dim() != 2:
        raise BatchError(
            f"position_ids must be [B, s], as they come from handle.dataloader, got shape {tuple(positions.shape)}."
        )
    embeddings = kwargs.get("inputs_embeds")
    if isinstance(embeddings, Tensor) and embeddings.shape[1] != positions.shape[1]:
        raise BatchError(
            f"the decoder was given embeddings of {embeddings.shape[1]} tokens and position_ids of "
            f"{positions.shape[1]}: something puts tokens of its own, such as features or prompts, among those of a "
            f"shard, whose places in the sequence are then not those of the batch. {WHOLE_BATCHES}"
        )
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        kind = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise BatchError(
            f"attention_mask must be a padding mask [B, s], got {kind}. "
            "Mark packed documents by position_ids that restart."
        )


def install(patches: Patches) -> None:
    """Let every call of a `PreTrainedModel` look for shards."""
    patches.add(PreTrainedModel, "__call__", _call)
    patches.on_undo(forget_shards)


def _call(model: PreTrainedModel, *args: object, **kwargs: object) -> object:
    if torch.compiler.is_compiling():
        return nn.Module.__call__(model, *args, **kwargs)
    arguments = (*args, *kwargs.values())
    if model.config._attn_implementation == NAME:
        if not any(isinstance(argument, Tensor) and is_part(argument) for argument in arguments):
            return nn.Module.__call__(model, *args, **kwargs)
        with expecting_sharded_forward(type(model).__name__):
            return nn.Module.__call__(model, *args, **kwargs)
    if is_shard(*arguments):
        raise BatchError(
            f"this {type(model).__name__} is not trained by ds_hetero, and was given a batch of handle.dataloader, of "
            "which this rank holds a part only. Give it whole batches, from the loader that handle.dataloader wraps: a "
            "reference model runs on those, on every rank."
        )
    return nn.Module.__call__(model, *args, **kwargs)


_OWN_OUTPUTS = Wanted(own_outputs=True, logits=True)


class Entrance:
    """Stands in the place of a model's ``forward``; `close` puts that back.

    Args:
        model: whose ``pretrained`` is the outermost transformers model.
        at_decoder: sharded calls are entered and left where the decoder is.
    """

    tiles: Tiles | None = None  # computes the loss of a shard tile by tile; None for logits of all its tokens

    def __init__(self, model: Called, at_decoder: bool) -> None:
        self._model, self._at_decoder = model, at_decoder
        self._pretrained = model.pretrained
        self._former = vars(self._pretrained).get("forward")  # that of TRL, for one
        self._names = list(inspect.signature(type(self._pretrained).forward).parameters)[1:]
        self._latest: ShardedForward | None = None
        self._made: Any = None  # by the decoder, where the loss is tiled
        self._call: ShardedCall | None = None
        self._pretrained.forward = MethodType(self._standing_in(), self._pretrained)

    def close(self) -> None:
        """Put back the ``forward`` that the model had."""
        del self._pretrained.forward
        if self._former is not None:
            self._pretrained.forward = self._former

    @property
    def is_in_call(self) -> bool:
        """Whether a sharded call is running."""
        return self._call is not None

    def enter_decoder(self, arguments: Entries) -> Entries:
        """Arguments for the decoder, of the caller's ``arguments``. Raises `BatchError`: see `ShardedCall`."""
        if not self._at_decoder:
            return arguments
        self._call = None
        wanted = self._wanted_of(arguments)
        if wanted is None:
            return arguments
        self._call = ShardedCall(self._model, arguments, _OWN_OUTPUTS)
        return {**self._call.inputs, **({"use_cache": False} if "use_cache" in arguments else {})}

    def run_decoder(self, forward: ShardedForward) -> None:
        """The decoder runs ``forward`` in the call of the model that is running."""
        self._latest = forward
        if self.tiles is not None:
            self.tiles.begin(forward.batch.placement.rank_tokens)

    def leave_decoder(self, outputs: Any) -> Any:
        """Results for the caller of the decoder; None for ``outputs`` themselves, or where it has failed."""
        if self.tiles is not None and self._latest is not None:
            self._made = outputs
            self.tiles.end()
        if self._call is None or outputs is None:
            self._call = None if self._at_decoder else self._call
            return None
        if not self._at_decoder:
            self._call.note_hidden_state(outputs[0])
            return None
        call, self._call = self._call, None
        return call.put_together(outputs)

    def _standing_in(self) -> Any:
        former = self._former
        plain = type(self._pretrained).forward if former is None else getattr(former, "__func__", None)

        def run(pretrained: Any, *args: object, **kwargs: object) -> Any:
            if not self._model.takes_shifted_labels:
                kwargs.pop("shift_labels", None)
            return former(*args, **kwargs) if plain is None else plain(pretrained, *args, **kwargs)  # type: ignore[misc]

        @functools.wraps(type(self._pretrained).forward)
        def forward(pretrained: Any, *args: object, **kwargs: object) -> Any:
            wanted = self._begin(args, kwargs)
            is_tuple = kwargs.get("return_dict") is False
            if is_tuple:
                kwargs["return_dict"] = True
            if wanted is not None:
                output = self._run_call(functools.partial(run, pretrained), args, kwargs, wanted)
            else:
                tiles = self._tiles_of(kwargs)
                checked = self._checked_call(kwargs, tiles)
                if checked is not None:
                    output = checked.take_loss(run(pretrained, *args, **checked.arguments))
                else:
                    output = run(pretrained, *args, **(kwargs if tiles is None else tiles.without_logits(kwargs)))
                self._end(kwargs, output, functools.partial(run, pretrained) if tiles is not None else None)
                if checked is not None:
                    checked.compare(output)
            return output.to_tuple() if is_tuple and isinstance(output, ModelOutput) else output

        return forward

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self, args: tuple[object, ...], kwargs: Entries) -> Wanted | None:
        """Results that the call returns, if it is a sharded call. Raises `BatchError`: see `expect_arguments`."""
        self._latest = None
        if self._call is not None:
            return None
        wanted = self._wanted_of({**dict(zip(self._names, args, strict=False)), **kwargs})
        has_cache = kwargs.get("past_key_values") is not None and sharding_is_set() is not True
        if wanted is not None or (self._model.takes_shards and not has_cache):
            arguments = {**dict(zip(self._names, args, strict=False)), **kwargs}
            expect_arguments(self._model, arguments, in_call=wanted is not None)
        return None if self._at_decoder else wanted

    def _tiles_of(self, kwargs: Batch) -> Tiles | None:
        """Tiles that compute the loss of this call, where the loss is made here. Raises `ModelError`: it cannot be."""
        is_ours = kwargs.get("shift_labels") is not None and kwargs.get("labels") is None
        return self.tiles if is_ours and self._call is None and self._model.takes_shards else None

    def _checked_call(self, kwargs: Batch, tiles: Tiles | None) -> ClassLossCall | None:
        """The call with labels, where the loss is made here and the forward of the script's class may make another."""
        model = self._model
        check = model.class_loss
        is_ours = isinstance(kwargs.get("shift_labels"), Tensor) and kwargs.get("labels") is None
        if check is None or not is_ours or self._call is not None or not model.takes_shards or model.own_loss:
            return None
        if not torch.is_grad_enabled():
            return None
        if tiles is not None:
            check.note_unseen()
            return None
        return ClassLossCall(model, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_call(self, run: Function, args: tuple[object, ...], kwargs: Entries, wanted: Wanted) -> Any:
        arguments = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if wanted.on_request:
            with self._model.unrecorded(keeps_tiles=True):
                return self._run_evaluation(run, arguments, wanted)
        self._call = call = ShardedCall(self._model, arguments, wanted)
        outputs = self._outputs_of(run, call.inputs)
        return call.put_together(outputs)

    def _run_evaluation(self, run: Function, arguments: Entries, wanted: Wanted) -> Any:
        """A forward of an evaluation, which leaves out logits where tiles make the loss."""
        self._call = call = EvaluationCall(self._model, arguments, wanted)
        tiles = self.tiles if call.may_be_tiled else None
        outputs = self._outputs_of(run, call.inputs if tiles is None else tiles.without_logits(call.inputs))
        made, self._made = self._made, None
        if tiles is not None:
            shard = call.arguments_of_tiles
            call.note_tiles(
                functools.partial(tiles.loss_sum, run, made, shard), functools.partial(tiles.logits, run, made, shard)
            )
        return call.put_together(outputs)

    def _outputs_of(self, run: Function, inputs: Entries) -> Any:
        """What the model returns for the shard of the call that has begun."""
        without_cache = {"use_cache": False} if "use_cache" in self._names else {}
        try:
            return run(**{**inputs, **without_cache})
        finally:
            self._call = self._latest = None

    def _wanted_of(self, arguments: Batch) -> Wanted | None:
        """Results of a call, if it is a sharded call: no part of a generation, which keeps keys and values."""
        if arguments.get("past_key_values") is not None:
            return None
        wanted = wanted_results()
        if wanted is None and self._model.evaluates_shards:
            wanted = ON_REQUEST
        is_of_evaluation = wanted is not None and wanted.on_request
        return None if is_of_evaluation and cannot_be_split(self._model, arguments) else wanted

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, kwargs: Entries, output: Any, run: Function | None) -> None:
        """The call is over; ``run`` is the model's own forward where the loss is tiled."""
        forward, self._latest = self._latest, None
        made, self._made = self._made, None
        if forward is None:
            return
        loss_sum: Callable[[], Any] | None = None
        if self.tiles is not None and run is not None:
            loss_sum = functools.partial(self.tiles.loss_sum, run, made, kwargs)
        if self._model.own_loss:
            add_own_loss(self._model, output, kwargs, forward)
        else:
            add_loss(output, kwargs, forward, self._model.router_term(output), loss_sum)
        info = shard_info(kwargs.get("position_ids"))
        if self._model.as_loaded is not None and info is not None and torch.is_grad_enabled():
            self._model.as_loaded.note_forward(kwargs, info)
        if self._model.token_weights is not None and torch.is_grad_enabled():
            note_logits(self._model.token_weights, output, kwargs, self._model.own_loss)


def note_logits(weights: TokenWeights, outputs: Any, batch: Batch, own_loss: str) -> None:
    """Let a check see the gradient of the logits that a forward on a shard has made, if it has made some."""
    info = shard_info(batch.get("position_ids"))
    labels = batch.get("shift_labels")
    if labels is None and info is not None:
        labels = info.labels
    logits = outputs.get("logits") if isinstance(outputs, ModelOutput) else None
    if not isinstance(labels, Tensor) or not isinstance(logits, Tensor) or logits.dim() != 3:
        return
    if logits.shape[:2] == labels.shape:
        # A number of items that the script gives divides the loss; it is then no mean over the batch's labels.
        is_mean = batch.get("num_items_in_batch") is None
        is_plain = has_loss_of_batch(outputs) and not own_loss and is_mean
        expected = outputs.get("loss") if is_plain else None
        weights.note_forward(logits, labels, expected, None if info is None else info.num_items)


def add_own_loss(model: Called, outputs: Any, batch: Batch, forward: ShardedForward) -> None:
    """Set ``outputs.loss`` as `add_loss` does, by the model's own ``loss_function``.

    Caller: every rank of the replica, once per forward on a shard.
    Collectives: those of `loss_by_own_function`; where the model adds a loss of its routers, one all_reduce.

    Raises:
        BatchError: replicas take different batches, whose losses are weighed by labels.
        ModelError: see `loss_by_own_function`; or logits are computed tile by tile.
    """
    labels, replica = batch.get("shift_labels"), forward.replica
    if labels is None or not isinstance(outputs, ModelOutput):
        return
    name = type(model.pretrained).__name__
    if batch.get("labels") is not None or outputs.get("loss") is not None:
        raise BatchError(
            f"{name} was given labels and shift_labels, and computes {model.own_loss} of this rank's tokens alone, "
            "which need not be a mean over tokens. Leave labels out: engine(**batch).loss is "
            f"{model.own_loss} of the whole batch."
        )
    logits = outputs.get("logits")
    if not isinstance(logits, Tensor) or logits.shape[:2] != labels.shape:
        raise ModelError(
            f"{name} has a loss function of its own, {model.own_loss}, which takes the logits of all tokens, and none "
            'were made. Leave "tile_tokens" out.'
        )
    if replica.batch_split is not None:
        raise BatchError(
            f"replicas take different batches ({replica.batch_split}), whose losses are weighed by their labels, and "
            f"{name} has a loss function of its own, {model.own_loss}, that need not be a mean over "
            "labels. Give all replicas the same micro_batch_size and micro_batches."
        )
    with forward.clock.phase(IDLE, "loss"):
        placement, num_items = forward.batch.placement, batch.get("num_items_in_batch")
        moves = model.moves_labels
        own = loss_by_own_function(model.pretrained, logits, labels, placement, replica, moves, num_items)
        loss = loss_of_replica(own, replica)
        term = model.router_term(outputs)
        if isinstance(term, Tensor):
            num_tokens = labels.ne(IGNORE_INDEX).sum()
            loss = loss + sequence_parallel_loss(num_tokens * term, num_tokens, replica)
    outputs["loss"] = loss
    OrderedDict.move_to_end(outputs, "loss", last=False)  # outputs[0], as in one process
    mark_loss_of_batch(outputs)


def add_loss(
    outputs: Any,
    batch: Batch,
    forward: ShardedForward,
    router_term: Tensor | float = 0.0,
    loss_sum: Callable[[], Tensor] | None = None,
) -> None:
    """Set ``outputs.loss`` where the model was given ``shift_labels`` and no ``labels``.

    Args:
        outputs: of the model, with ``logits`` [B, s, V] and without a loss; others are left as they are.
        router_term: what the model adds to the mean loss of its tokens for its routers.
        loss_sum: makes this rank's token losses added up, where ``outputs`` have no logits.

    Caller: every rank of the replica, once per forward on a shard.
    Collectives: one all_reduce of two numbers.

    Where replicas take different batches, and ``position_ids`` are not those that the loader made, there is none.

    Raises:
        BatchError: the batch says what to divide by, and replicas take different ones.
    """
    labels = batch.get("shift_labels")
    if labels is None or batch.get("labels") is not None or not isinstance(outputs, ModelOutput):
        return
    logits = outputs.get("logits")
    if not isinstance(logits, Tensor) or outputs.get("loss") is not None:
        return
    if loss_sum is None and logits.shape[:2] != labels.shape:
        return
    replica, num_items, divisor = forward.replica, None, 1
    num_labels = batch.get("num_items_in_batch")
    if replica.batch_split is not None:
        if num_labels is not None:
            raise BatchError(
                f"num_items_in_batch: replicas take different batches ({replica.batch_split}), whose loss is divided "
                "by the labels of the whole optimizer step already; leave it out."
            )
        info = shard_info(batch.get("position_ids"))
        if info is None or info.num_items is None:
            return
        num_items, divisor = info.num_items, replica.batch_split.micro_steps
    with forward.clock.phase(IDLE, "loss"):
        num_tokens = labels.ne(IGNORE_INDEX).sum()
        of_tokens = cross_entropy_sum(logits, labels) if loss_sum is None else loss_sum()
        of_routers = num_tokens * router_term
        if num_labels is None:
            loss = sequence_parallel_loss(of_tokens + of_routers, num_tokens, replica, num_items, divisor)
        else:
            loss = sequence_parallel_loss(of_tokens, num_tokens, replica, num_labels=num_labels)
            if isinstance(router_term, Tensor):
                loss = loss + sequence_parallel_loss(of_routers, num_tokens, replica)
    outputs["loss"] = loss
    OrderedDict.move_to_end(outputs, "loss", last=False)  # outputs[0], as in one process
    mark_loss_of_batch(outputs)
