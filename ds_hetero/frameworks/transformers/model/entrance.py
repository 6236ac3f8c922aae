"""The call of a sharded model: what happens before its ``forward``, and to what it returns.

PEFT and others call ``model.forward`` itself, past the hooks of the module, so an attribute of the model takes its
place, as TRL does. A model whose head pools over the sequence computes its head from whole results of its decoder:
there a sharded call is entered and left where the decoder is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from ds_hetero.engine.evaluation import cannot_be_split
from ds_hetero.engine.forward_mode import ON_REQUEST, ShardedForward, Wanted, sharding_is_set, wanted_results
from ds_hetero.engine.patching import Function
from ds_hetero.frameworks.transformers.model.class_loss import ClassLossCall
from ds_hetero.frameworks.transformers.model.evaluation_call import EvaluationCall
from ds_hetero.frameworks.transformers.model.output_loss import add_loss, add_own_loss, note_logits
from ds_hetero.frameworks.transformers.model.shard_arguments import expect_arguments
from ds_hetero.frameworks.transformers.model.sharded_call import Called, ShardedCall
from ds_hetero.frameworks.transformers.model.tiles import Tiles
from ds_hetero.runtime.data.shard_info import shard_info
from ds_hetero.runtime.data.shards import Batch, Entries

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
