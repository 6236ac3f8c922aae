"""Wrap the ``forward`` of a sharded model: cut whole batches before it, and add the loss to its outputs.

An attribute ``model.forward`` replaces the method of the class, as TRL does it, because PEFT and others call
``model.forward`` directly, past the module's hooks.

`ShardedModel` calls `begin_decoder`, `note_decoder_forward` and `end_decoder` from hooks of the decoder. So a forward
takes one of four ways:

    forward of a shard       _begin, note_decoder_forward, end_decoder, _end: the loss is added to the model's outputs
    sharded call             _begin, _run_call: a ShardedCall cuts the batch, and gathers the results of all ranks
    call cut at the decoder  begin_decoder cuts the batch, end_decoder gathers hidden states, so the head runs on whole
                             sequences
    any other forward        _begin and _end, which change nothing

A call is cut at the decoder if the head pools over the sequence: such a head needs the hidden states of whole
sequences.
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

from ds_hetero.engine.arguments import cache_of
from ds_hetero.engine.evaluation import cannot_be_split
from ds_hetero.engine.forward_mode import ON_REQUEST, ShardedForward, Wanted, sharding_is_set, wanted_results
from ds_hetero.engine.patching import Function
from ds_hetero.frameworks.transformers.model.class_loss import ClassLossCall
from ds_hetero.frameworks.transformers.model.evaluation_call import EvaluationCall
from ds_hetero.frameworks.transformers.model.output_loss import add_loss, add_own_loss, note_logits
from ds_hetero.frameworks.transformers.model.shard_arguments import expect_arguments
from ds_hetero.frameworks.transformers.model.sharded_call import ShardedCall, SplitTransformer
from ds_hetero.frameworks.transformers.model.tiles import Tiles
from ds_hetero.runtime.data.shard_info import shard_info
from ds_hetero.runtime.data.shards import Batch, Entries

_OWN_OUTPUTS = Wanted(own_outputs=True, logits=True)


class ForwardWrapper:
    """Replaces a model's ``forward``; `close` restores it.

    Args:
        model: the split model; its ``pretrained`` is the outermost transformers model.
        cuts_at_decoder: True if sharded calls are cut at the decoder, False if at the model.

    Attributes:
        tiles: computes the loss of a shard in tiles of tokens; None to compute logits of all its tokens.
    """

    tiles: Tiles | None = None

    def __init__(self, model: SplitTransformer, cuts_at_decoder: bool) -> None:
        self._model, self._cuts_at_decoder = model, cuts_at_decoder
        self._pretrained = model.pretrained
        self._former_forward = vars(self._pretrained).get("forward")  # an attribute that TRL may have set
        self._parameters = list(inspect.signature(type(self._pretrained).forward).parameters)[1:]
        # State of the forward that is running:
        self._call: ShardedCall | None = None  # None in a forward other than a sharded call
        self._decoder_forward: ShardedForward | None = None  # None until the decoder has begun it
        self._decoder_output: Any = None  # kept only if the loss is tiled
        self._pretrained.forward = MethodType(self._make_forward(), self._pretrained)

    def close(self) -> None:
        """Restore the ``forward`` that the model had."""
        del self._pretrained.forward
        if self._former_forward is not None:
            self._pretrained.forward = self._former_forward

    @property
    def is_in_call(self) -> bool:
        """True while the model runs a forward of a sharded call."""
        return self._call is not None

    def begin_decoder(self, arguments: Entries) -> Entries:
        """Return the arguments for the decoder; they are cut to this rank's shard in a call that is cut at the decoder.

        Raises:
            BatchError: see `ShardedCall`.
        """
        if not self._cuts_at_decoder:
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

    def note_decoder_forward(self, forward: ShardedForward) -> None:
        """Remember the `ShardedForward` that the decoder is running in the present forward of the model."""
        self._decoder_forward = forward
        if self.tiles is not None:
            self.tiles.begin(forward.batch.placement.rank_tokens)

    def end_decoder(self, outputs: Any) -> Any:
        """Return the outputs that the caller of the decoder gets instead of ``outputs``; None to keep ``outputs``.

        Args:
            outputs: the decoder's outputs; None if the decoder has failed.
        """
        if self.tiles is not None and self._decoder_forward is not None:
            self._decoder_output = outputs
            self.tiles.end()
        call = self._call
        if self._cuts_at_decoder:
            self._call = None
            return None if call is None or outputs is None else call.put_together(outputs)
        if call is not None and outputs is not None:
            call.note_hidden_state(outputs[0])
        return None

    def _make_forward(self) -> Any:
        """Return the function that replaces the model's ``forward``."""
        former = self._former_forward
        # A copy of the model has a copy of this attribute, which must run the forward of the copy. So the former
        # forward is called as a function of the model. None if it is not a method: then it is called without the model.
        function = type(self._pretrained).forward if former is None else getattr(former, "__func__", None)

        def run_former(pretrained: Any, *args: object, **kwargs: object) -> Any:
            if not self._model.model_loss.takes_shifted_labels:
                kwargs.pop("shift_labels", None)
            if function is None:
                return former(*args, **kwargs)  # type: ignore[misc]
            return function(pretrained, *args, **kwargs)

        @functools.wraps(type(self._pretrained).forward)
        def forward(pretrained: Any, *args: object, **kwargs: object) -> Any:
            wanted = self._begin(args, kwargs)
            # Outputs are read by name here; a caller that asked for a tuple gets one in the end.
            is_tuple = kwargs.get("return_dict") is False
            if is_tuple:
                kwargs["return_dict"] = True
            run = functools.partial(run_former, pretrained)
            if wanted is not None:
                output = self._run_call(run, args, kwargs, wanted)
            else:
                output = self._run_other(run, args, kwargs)
            return output.to_tuple() if is_tuple and isinstance(output, ModelOutput) else output

        return forward

    def _run_other(self, run: Function, args: tuple[object, ...], kwargs: Entries) -> Any:
        """Run a forward that is not a sharded call; if its batch is a shard, add ``outputs.loss``.

        Args:
            run: the model's former forward.
        """
        tiles = self._tiles_of(kwargs)
        if tiles is not None:
            if self._may_have_other_loss(kwargs) and self._model.losses.class_loss is not None:
                # A loss that the class computes from logits cannot be compared: tiles compute no logits of all tokens.
                self._model.losses.class_loss.note_forward_without_logits()
            output = run(*args, **tiles.arguments_without_logits(kwargs))
            self._end(kwargs, output, run)
            return output
        if self._may_have_other_loss(kwargs):
            loss_call = ClassLossCall(self._model, kwargs)
            output = loss_call.take_loss(run(*args, **loss_call.arguments))
            self._end(kwargs, output, None)
            loss_call.compare(output)
            return output
        output = run(*args, **kwargs)
        self._end(kwargs, output, None)
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self, args: tuple[object, ...], kwargs: Entries) -> Wanted | None:
        """Return the results that a sharded call of the model has to return; None for any other forward.

        Raises:
            BatchError: the arguments cannot be those of a shard, or of a sharded call; see `expect_arguments`.
        """
        self._decoder_forward = None
        if self._call is not None:  # a forward inside the sharded call that is running
            return None
        arguments = self._arguments_by_name(args, kwargs)
        wanted = self._wanted_of(arguments)
        has_cache = cache_of(kwargs) is not None and sharding_is_set() is not True
        if wanted is not None or (self._model.takes_shards and not has_cache):
            expect_arguments(self._model, arguments, in_call=wanted is not None)
        return None if self._cuts_at_decoder else wanted

    def _arguments_by_name(self, args: tuple[object, ...], kwargs: Entries) -> Entries:
        """Return all arguments of a forward by their names."""
        return {**dict(zip(self._parameters, args, strict=False)), **kwargs}

    def _tiles_of(self, kwargs: Batch) -> Tiles | None:
        """Return the tiles if this engine computes the loss of this forward in tiles; else None."""
        computes_loss = kwargs.get("shift_labels") is not None and kwargs.get("labels") is None
        return self.tiles if computes_loss and self._call is None and self._model.takes_shards else None

    def _may_have_other_loss(self, kwargs: Batch) -> bool:
        """Return True if this engine computes a training loss in place of one that the script's class may compute.

        `ClassLossCall` then compares the two losses.
        """
        model = self._model
        computes_loss = isinstance(kwargs.get("shift_labels"), Tensor) and kwargs.get("labels") is None
        if model.losses.class_loss is None or not computes_loss or model.model_loss.custom_function:
            return False
        return self._call is None and model.takes_shards and torch.is_grad_enabled()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_call(self, run: Function, args: tuple[object, ...], kwargs: Entries, wanted: Wanted) -> Any:
        """Run a sharded call: run the model on this rank's shard of the batch, and gather the results of all ranks."""
        arguments = self._arguments_by_name(args, kwargs)
        if wanted.on_request:
            with self._model.unrecorded(keeps_tiles=True):
                return self._run_evaluation(run, arguments, wanted)
        self._call = call = ShardedCall(self._model, arguments, wanted)
        outputs = self._outputs_of(run, call.inputs)
        return call.put_together(outputs)

    def _run_evaluation(self, run: Function, arguments: Entries, wanted: Wanted) -> Any:
        """Run a forward of an evaluation; without logits if tiles compute the loss."""
        self._call = call = EvaluationCall(self._model, arguments, wanted)
        tiles = self.tiles if call.may_be_tiled else None
        inputs = call.inputs if tiles is None else tiles.arguments_without_logits(call.inputs)
        outputs = self._outputs_of(run, inputs)
        decoder_output, self._decoder_output = self._decoder_output, None
        if tiles is not None:
            shard = call.arguments_of_tiles
            loss_sum = functools.partial(tiles.loss_sum, run, decoder_output, shard)
            logits = functools.partial(tiles.logits, run, decoder_output, shard)
            call.note_tiles(loss_sum, logits)
        return call.put_together(outputs)

    def _outputs_of(self, run: Function, inputs: Entries) -> Any:
        """Return the model's outputs for ``inputs``, the shard of the present sharded call; then end the call."""
        without_cache = {"use_cache": False} if "use_cache" in self._parameters else {}
        try:
            return run(**{**inputs, **without_cache})
        finally:
            self._call = self._decoder_forward = None

    def _wanted_of(self, arguments: Batch) -> Wanted | None:
        """Return the results that the caller requests if this forward is a sharded call; else None."""
        if cache_of(arguments) is not None:  # a step of a generation
            return None
        wanted = wanted_results()
        if wanted is None and self._model.evaluation.takes_forwards:
            wanted = ON_REQUEST
        is_of_evaluation = wanted is not None and wanted.on_request
        return None if is_of_evaluation and cannot_be_split(self._model, arguments) else wanted

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, kwargs: Entries, output: Any, run: Function | None) -> None:
        """End a forward. If its batch was a shard, set ``output.loss``, and give batch and logits to the step's checks.

        Args:
            run: the model's former forward if the loss is computed in tiles; else None.
        """
        forward, self._decoder_forward = self._decoder_forward, None
        decoder_output, self._decoder_output = self._decoder_output, None
        if forward is None:
            return
        loss_sum: Callable[[], Any] | None = None
        if self.tiles is not None and run is not None:
            loss_sum = functools.partial(self.tiles.loss_sum, run, decoder_output, kwargs)
        if self._model.model_loss.custom_function:
            add_own_loss(self._model, output, kwargs, forward)
        else:
            add_loss(output, kwargs, forward, self._model.model_loss.router_term(output), loss_sum)
        if not torch.is_grad_enabled():
            return
        info = shard_info(kwargs.get("position_ids"))
        if self._model.placement.as_loaded is not None and info is not None:
            self._model.placement.as_loaded.note_forward(kwargs, info)
        if self._model.losses.token_weights is not None:
            note_logits(self._model.losses.token_weights, output, kwargs, self._model.model_loss.custom_function)
