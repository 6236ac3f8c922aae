"""The call of a sharded model: what happens before its ``forward``, and to what it returns.

PEFT and others call ``model.forward`` itself, past the hooks of the module, so an attribute of the model takes its
place, as TRL does. A model whose head pools over the sequence computes its head from whole results of its decoder:
there a sharded call is entered and left where the decoder is.

``outputs.loss`` of a forward on a shard.

A loader moves the labels of the whole sequence and cuts them, so that a batch has ``shift_labels`` and no ``labels``,
and the model alone returns no loss. `add_loss` gives its outputs the one that `Handle.loss` would make of them: that
of the whole batch, equal on all ranks, with a gradient of the scale that the engine averages.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from ds_hetero.engine.forward_mode import ShardedForward, Wanted, sharding_is_set, wanted_results
from ds_hetero.engine.patching import Function
from ds_hetero.errors import BatchError
from ds_hetero.frameworks.transformers.model.forward_inputs import Called, expect_arguments
from ds_hetero.frameworks.transformers.model.sharded_call import ShardedCall
from ds_hetero.frameworks.transformers.model.tiles import Tiles
from ds_hetero.runtime.data.shard_info import shard_info
from ds_hetero.runtime.data.shards import IGNORE_INDEX, Batch, Entries
from ds_hetero.runtime.loss import cross_entropy_sum, mark_loss_of_batch, sequence_parallel_loss
from ds_hetero.runtime.step_clock import IDLE

_OWN_OUTPUTS = Wanted(own_outputs=True, logits=True)


class Entrance:
    """Stands in the place of a model's ``forward``; `close` puts that back.

    Args:
        model: whose ``pretrained`` is the outermost transformers model.
        at_decoder: sharded calls are entered and left where the decoder is.

    Attributes:
        tiles: computes the loss of a shard tile by tile; None for logits of all its tokens.
    """

    tiles: Tiles | None = None

    def __init__(self, model: Called, at_decoder: bool) -> None:
        self._model, self._at_decoder = model, at_decoder
        self._pretrained = model.pretrained
        self._former = vars(self._pretrained).get("forward")  # that of TRL, for one
        self._names = list(inspect.signature(type(self._pretrained).forward).parameters)[1:]
        self._latest: ShardedForward | None = None
        self._made: Any = None  # by the decoder, where the loss is tiled
        self._call: ShardedCall | None = None
        self._pretrained.forward = MethodType(self._standing_in(), self._pretrained)  # type: ignore[method-assign]

    def close(self) -> None:
        """Put back the ``forward`` that the model had."""
        del self._pretrained.forward
        if self._former is not None:
            self._pretrained.forward = self._former  # type: ignore[method-assign]

    @property
    def is_in_call(self) -> bool:
        """Whether a sharded call is running."""
        return self._call is not None

    def enter_decoder(self, arguments: Entries) -> Entries:
        """Arguments for the decoder.

        Args:
            arguments: what it was called with, by name.

        Raises:
            BatchError: see `ShardedCall`.
        """
        if not self._at_decoder:
            return arguments
        self._call = None
        wanted = _wanted_of(arguments)
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
                output = run(pretrained, *args, **(kwargs if tiles is None else tiles.without_logits(kwargs)))
                self._end(kwargs, output, functools.partial(run, pretrained) if tiles is not None else None)
            return output.to_tuple() if is_tuple and isinstance(output, ModelOutput) else output

        return forward

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self, args: tuple[object, ...], kwargs: Entries) -> Wanted | None:
        """Results that the call returns, if it is a sharded call.

        Raises:
            BatchError: see `expect_arguments`.
        """
        self._latest = None
        if self._call is not None:
            return None
        wanted = _wanted_of(kwargs)
        has_cache = kwargs.get("past_key_values") is not None and sharding_is_set() is not True
        if wanted is not None or (self._model.takes_shards and not has_cache):
            arguments = {**dict(zip(self._names, args, strict=False)), **kwargs}
            expect_arguments(self._model, arguments, in_call=wanted is not None)
        return None if self._at_decoder else wanted

    def _tiles_of(self, kwargs: Batch) -> Tiles | None:
        """Tiles that compute the loss of this call, where the loss is made here."""
        is_ours = kwargs.get("shift_labels") is not None and kwargs.get("labels") is None
        return self.tiles if is_ours and self._call is None and self._model.takes_shards else None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_call(self, run: Function, args: tuple[object, ...], kwargs: Entries, wanted: Wanted) -> Any:
        arguments = {**dict(zip(self._names, args, strict=False)), **kwargs}
        self._call = call = ShardedCall(self._model, arguments, wanted)
        without_cache = {"use_cache": False} if "use_cache" in self._names else {}
        try:
            outputs = run(**{**call.inputs, **without_cache})
        finally:
            self._call = self._latest = None
        return call.put_together(outputs)

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
        add_loss(output, kwargs, forward, self._model.router_term(output), loss_sum)


def _wanted_of(arguments: Batch) -> Wanted | None:
    """Results that a call returns, if it is a sharded call: no part of a generation, which keeps keys and values."""
    return wanted_results() if arguments.get("past_key_values") is None else None


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
        batch: the arguments of the model.
        forward: the forward that made them.
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
