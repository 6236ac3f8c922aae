"""The call of a sharded model: what happens before its ``forward``, and to what it returns.

PEFT and others call ``model.forward`` itself, past the hooks of the module, so an attribute of the model takes its
place, as TRL does. A model whose head pools over the sequence computes its head from whole results of its decoder:
there a sharded call is entered and left where the decoder is.

A forward takes one of four ways. `ShardedModel` calls `run_decoder` and `leave_decoder` from hooks of the decoder:

    of a shard              _begin, run_decoder, leave_decoder, _end: the loss is added to the model's outputs
    a sharded call          _begin, _run_call: a ShardedCall cuts the batch and puts the results of all ranks together
    one at the decoder      enter_decoder cuts the batch, leave_decoder puts results together; the head sees whole ones
    anything else           _begin, _end, neither of which finds anything to do
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
        model: the split model; its ``pretrained`` is the outermost transformers model.
        at_decoder: sharded calls are entered and left where the decoder is.
    """

    tiles: Tiles | None = None  # computes the loss of a shard tile by tile; None for logits of all its tokens

    def __init__(self, model: Called, at_decoder: bool) -> None:
        self._model, self._at_decoder = model, at_decoder
        self._pretrained = model.pretrained
        self._former = vars(self._pretrained).get("forward")  # that of TRL, for one
        self._names = list(inspect.signature(type(self._pretrained).forward).parameters)[1:]
        self._call: ShardedCall | None = None  # the sharded call that is running
        # Of the forward that is running, until its end takes them:
        self._latest: ShardedForward | None = None  # what the decoder runs
        self._made: Any = None  # what the decoder returned, where the loss is tiled
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
        """Return the arguments for the decoder: a shard of the caller's where a sharded call is entered here.

        Raises:
            BatchError: see `ShardedCall`.
        """
        if not self._at_decoder:
            return arguments
        self._call = None
        wanted = self._wanted_of(arguments)
        if wanted is None:
            return arguments
        self._call = ShardedCall(self._model, arguments, _OWN_OUTPUTS)
        inputs = dict(self._call.inputs)
        if "use_cache" in arguments:
            inputs["use_cache"] = False  # keys and values of a shard are no cache of the sequence
        return inputs

    def run_decoder(self, forward: ShardedForward) -> None:
        """Note that the decoder now runs ``forward``, within the model's forward that is running."""
        self._latest = forward
        if self.tiles is not None:
            self.tiles.begin(forward.batch.placement.rank_tokens)

    def leave_decoder(self, outputs: Any) -> Any:
        """Return what the caller of the decoder gets in the place of ``outputs``; None for ``outputs`` themselves.

        Args:
            outputs: of the decoder; None where it has failed.
        """
        if self.tiles is not None and self._latest is not None:
            self._made = outputs
            self.tiles.end()
        call = self._call
        if self._at_decoder:
            self._call = None
            return None if call is None or outputs is None else call.put_together(outputs)
        if call is not None and outputs is not None:
            call.note_hidden_state(outputs[0])
        return None

    def _standing_in(self) -> Any:
        """Return the function that is called as the model's ``forward``."""
        former = self._former
        # A method is called with the model that it is called of: a copy of the model has a copy of this attribute.
        plain = type(self._pretrained).forward if former is None else getattr(former, "__func__", None)

        def run(pretrained: Any, *args: object, **kwargs: object) -> Any:
            if not self._model.takes_shifted_labels:
                kwargs.pop("shift_labels", None)
            return former(*args, **kwargs) if plain is None else plain(pretrained, *args, **kwargs)  # type: ignore[misc]

        @functools.wraps(type(self._pretrained).forward)
        def forward(pretrained: Any, *args: object, **kwargs: object) -> Any:
            wanted = self._begin(args, kwargs)
            # Outputs are read by name here; a caller that asked for a tuple gets one in the end.
            is_tuple = kwargs.get("return_dict") is False
            if is_tuple:
                kwargs["return_dict"] = True
            own = functools.partial(run, pretrained)
            if wanted is not None:
                output = self._run_call(own, args, kwargs, wanted)
            else:
                output = self._run_shard(own, args, kwargs)
            return output.to_tuple() if is_tuple and isinstance(output, ModelOutput) else output

        return forward

    def _run_shard(self, run: Function, args: tuple[object, ...], kwargs: Entries) -> Any:
        """Run a forward that is no sharded call, and add the loss to its outputs where that is made here.

        Args:
            run: the model's own forward.
        """
        tiles = self._tiles_of(kwargs)
        if tiles is not None:
            if self._may_have_other_loss(kwargs) and self._model.class_loss is not None:
                self._model.class_loss.note_unseen()  # tiles leave out the logits that a class makes its loss of
            output = run(*args, **tiles.without_logits(kwargs))
            self._end(kwargs, output, run)
            return output
        checked = self._checked_call(kwargs)
        if checked is not None:
            output = checked.take_loss(run(*args, **checked.arguments))
            self._end(kwargs, output, None)
            checked.compare(output)
            return output
        output = run(*args, **kwargs)
        self._end(kwargs, output, None)
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self, args: tuple[object, ...], kwargs: Entries) -> Wanted | None:
        """Return the results that a sharded call is to return; None for any other forward.

        Raises:
            BatchError: the arguments cannot be those of a shard, or of a sharded call; see `expect_arguments`.
        """
        self._latest = None
        if self._call is not None:  # a part of the sharded call that is running
            return None
        arguments = self._by_name(args, kwargs)
        wanted = self._wanted_of(arguments)
        has_cache = kwargs.get("past_key_values") is not None and sharding_is_set() is not True
        if wanted is not None or (self._model.takes_shards and not has_cache):
            expect_arguments(self._model, arguments, in_call=wanted is not None)
        return None if self._at_decoder else wanted

    def _by_name(self, args: tuple[object, ...], kwargs: Entries) -> Entries:
        """Return all arguments of a forward by their names."""
        return {**dict(zip(self._names, args, strict=False)), **kwargs}

    def _tiles_of(self, kwargs: Batch) -> Tiles | None:
        """Return the tiles that compute the loss of this forward, if it is made here and tile by tile."""
        is_ours = kwargs.get("shift_labels") is not None and kwargs.get("labels") is None
        return self.tiles if is_ours and self._call is None and self._model.takes_shards else None

    def _checked_call(self, kwargs: Batch) -> ClassLossCall | None:
        """Return the call with labels that shows whether the script's class makes another loss than is made here."""
        return ClassLossCall(self._model, kwargs) if self._may_have_other_loss(kwargs) else None

    def _may_have_other_loss(self, kwargs: Batch) -> bool:
        """Whether the loss of a training forward is made here, and the script's class may compute another one."""
        model = self._model
        is_ours = isinstance(kwargs.get("shift_labels"), Tensor) and kwargs.get("labels") is None
        if model.class_loss is None or not is_ours or model.own_loss:
            return False
        return self._call is None and model.takes_shards and torch.is_grad_enabled()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_call(self, run: Function, args: tuple[object, ...], kwargs: Entries, wanted: Wanted) -> Any:
        """Run a sharded call: this rank's shard of the whole batch, then what all ranks' results make together."""
        arguments = self._by_name(args, kwargs)
        if wanted.on_request:
            with self._model.unrecorded(keeps_tiles=True):
                return self._run_evaluation(run, arguments, wanted)
        self._call = call = ShardedCall(self._model, arguments, wanted)
        outputs = self._outputs_of(run, call.inputs)
        return call.put_together(outputs)

    def _run_evaluation(self, run: Function, arguments: Entries, wanted: Wanted) -> Any:
        """Run a forward of an evaluation, which leaves out logits where tiles make the loss."""
        self._call = call = EvaluationCall(self._model, arguments, wanted)
        tiles = self.tiles if call.may_be_tiled else None
        inputs = call.inputs if tiles is None else tiles.without_logits(call.inputs)
        outputs = self._outputs_of(run, inputs)
        made, self._made = self._made, None
        if tiles is not None:
            shard = call.arguments_of_tiles
            loss_sum = functools.partial(tiles.loss_sum, run, made, shard)
            logits = functools.partial(tiles.logits, run, made, shard)
            call.note_tiles(loss_sum, logits)
        return call.put_together(outputs)

    def _outputs_of(self, run: Function, inputs: Entries) -> Any:
        """Run the model on the shard of the call that has begun."""
        without_cache = {"use_cache": False} if "use_cache" in self._names else {}
        try:
            return run(**{**inputs, **without_cache})
        finally:
            self._call = self._latest = None

    def _wanted_of(self, arguments: Batch) -> Wanted | None:
        """Return the results that are requested of a forward, if it is a sharded call; else None."""
        if arguments.get("past_key_values") is not None:  # a step of a generation
            return None
        wanted = wanted_results()
        if wanted is None and self._model.evaluates_shards:
            wanted = ON_REQUEST
        is_of_evaluation = wanted is not None and wanted.on_request
        return None if is_of_evaluation and cannot_be_split(self._model, arguments) else wanted

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, kwargs: Entries, output: Any, run: Function | None) -> None:
        """End a forward: add the loss to ``output`` if the decoder ran on a shard, and let the step's checks look.

        Args:
            run: the model's own forward where the loss is tiled; else None.
        """
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
        if not torch.is_grad_enabled():
            return
        info = shard_info(kwargs.get("position_ids"))
        if self._model.as_loaded is not None and info is not None:
            self._model.as_loaded.note_forward(kwargs, info)
        if self._model.token_weights is not None:
            note_logits(self._model.token_weights, output, kwargs, self._model.own_loss)
