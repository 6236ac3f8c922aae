"""Switch a transformers model to this engine's attention: decide which forwards take a shard, and hook the decoder."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_hetero.engine.arguments import cache_of
from ds_hetero.engine.forward_mode import ShardedForward, change_mode, forward_mode, sharding_is_set, wanted_results
from ds_hetero.engine.trained.batch_placement import BatchPlacement
from ds_hetero.engine.trained.sequence_losses import SequenceLosses
from ds_hetero.engine.trained.shard_evaluation import ShardEvaluation
from ds_hetero.engine.trained.split_model import BatchChecks
from ds_hetero.errors import ModelError
from ds_hetero.frameworks.transformers.attention import NAME
from ds_hetero.frameworks.transformers.former_attention import remember_implementation, restore_implementation
from ds_hetero.frameworks.transformers.model.checkpointed_layers import keep_attention
from ds_hetero.frameworks.transformers.model.embeddings import position_counter, with_positions
from ds_hetero.frameworks.transformers.model.forward_wrapper import ForwardWrapper
from ds_hetero.frameworks.transformers.model.model_checks import (
    POOLS,
    check_attention,
    decoder_of,
    embeddings_of,
    pools,
    pretrained_of,
    whole_evaluation_reason,
)
from ds_hetero.frameworks.transformers.model.model_loss import TransformersLoss
from ds_hetero.frameworks.transformers.model.neftune import expect_no_noise, scale_noise
from ds_hetero.frameworks.transformers.model.recurrent_layers import (
    KEYWORD,
    expect_wrappers_called,
    has_recurrent_functions,
    wrap_functions,
)
from ds_hetero.frameworks.transformers.model.rotary_length import RopeLength
from ds_hetero.frameworks.transformers.model.router_losses import (
    mark_router_logits,
    wrap_router_loss,
)
from ds_hetero.frameworks.transformers.model.shard_arguments import expect_no_shard, expect_shard_shapes, local_batch
from ds_hetero.frameworks.transformers.model.tiles import Tiles
from ds_hetero.frameworks.transformers.model.towers import DecoderSharder, Window, has_towers, outer_model_of
from ds_hetero.frameworks.transformers.protocols import ModelConfig
from ds_hetero.runtime.attention.batch_layout import BatchLayout, agree_on_batch
from ds_hetero.runtime.data.recent_shards import is_shard
from ds_hetero.runtime.data.shard_info import is_placeholder, shard_info
from ds_hetero.runtime.data.shards import PACKING, Entries
from ds_hetero.runtime.devices import default_device
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_checks import (
    ComparisonPace,
)
from ds_hetero.runtime.step_clock import IDLE, StepClock
from ds_hetero.values.section import RingGradients


class ShardedModel:
    """One model that is switched to this engine's attention; `restore` switches it back.

        state of the model                                           a forward takes
        ``model.training``                                           this rank's shard of a batch
        neither ``train()`` nor ``eval()`` was called yet            this rank's shard: ``from_pretrained`` sets
                                                                     evaluation mode, and many loops train in it
        evaluation mode, or a cache of keys and values (generate)    whole batches

    Args:
        model: a PreTrainedModel, or a PEFT model or other module around one.
        kernel: one of `ds_hetero.values.section.KERNEL_NAMES`; None for the best on the device.

    Attributes:
        losses: state and checks of the losses in a step.
        model_loss: the loss that the model computes itself.
        placement: how batches are placed.
        evaluation: how the model is evaluated.
        pace: decides when a piece of a batch is compared again.
        keeps_attention: whether the recomputation of checkpointed layers takes the attention of their first run.
        ring_gradients: type in which partial dK/dV travel between the groups of a ring.
        compare_again: repeats the last comparison that passed; None before the first one.
        num_comparisons: comparisons of pieces of batches so far; the same on every rank.
        logged_warnings: texts that the self-check has logged, each of which is logged only once.
    """

    checks: BatchChecks  # comparisons with one process; set by the adapter, for a model that is to be trained

    def __init__(self, model: nn.Module, replica: Replica, kernel: str | None) -> None:
        self.model, self.replica, self.kernel = model, replica, kernel
        self.pretrained = pretrained_of(model)
        self.clock = StepClock(default_device())  # times the phases of this model's steps
        self.losses = SequenceLosses(self, type(model).__name__)
        self.pace = ComparisonPace("first_batch")
        self.keeps_attention = False
        self.ring_gradients: RingGradients = "fp32"
        self.compare_again: Callable[[], None] | None = None
        # A list of its own: during a self-check, other tensors are in the modules.
        self._model_parameters = list(self.pretrained.parameters())
        self._checked_features: set[str] = set()  # of batches that passed under the present schedule
        self.num_comparisons = 0
        self.logged_warnings: set[str] = set()
        self._observers: Sequence[Callable[[BatchLayout], None]] = ()
        self._earlier_replicas: list[Replica] = []  # the replica with its earlier schedules, latest first
        self._forward: ShardedForward | None = None  # the sharded forward that is running
        self._end_forward: Callable[[], None] = lambda: None
        self._end_whole_forward: Callable[[], None] = lambda: None
        self._restore_noise: Callable[[], None] = lambda: None
        self._end_keeping: Callable[[], None] = lambda: None
        self.is_restored = False  # True after `restore`
        self._decoder = decoder_of(self.pretrained)
        self._embeddings = embeddings_of(self.pretrained)
        self._decoder_sharder = DecoderSharder(self.pretrained) if has_towers(self.pretrained) else None
        self.placement = BatchPlacement(type(self.pretrained).__name__ if self.cuts_inputs else "")
        self.evaluation = ShardEvaluation(lambda: whole_evaluation_reason(self.pretrained), self._is_in_evaluation)
        self._count_positions = position_counter(self._decoder) if self._decoder_sharder is None else None
        self._parameters = list(inspect.signature(type(self._decoder).forward).parameters)[1:]
        self._configs = self._switch_attention()
        self.pretrained.set_attn_implementation = self._set_implementation
        layers = (module for module in self.model.modules() if hasattr(module, "adapter_layer_names"))
        self._adapted_layer: Any = next(layers, None)
        self._has_recurrent_functions = has_recurrent_functions(self.model)
        self._unwrap_functions = wrap_functions(self.model)
        self.model_loss = TransformersLoss(self.pretrained, has_towers=self.cuts_inputs)
        self._unwrap_router_loss = wrap_router_loss(self.pretrained)
        self._rope_length = RopeLength(self._decoder)
        self._mode_was_set = False
        self._decoder.train = MethodType(self._train, self._decoder)  # type: ignore[method-assign]
        cuts_at_decoder = self.pools or self._decoder is self.model
        self._forward_wrapper = ForwardWrapper(self, cuts_at_decoder)
        self._hooks = list(self._register_hooks())

    def _register_hooks(self) -> Iterator[RemovableHandle]:
        """Register hooks on the decoder, and on the module that runs towers before it."""
        yield self._decoder.register_forward_pre_hook(self._before_decoder, with_kwargs=True)
        yield self._decoder.register_forward_hook(self._after_decoder, always_call=True)
        if self._decoder_sharder is not None:
            outer = outer_model_of(self.pretrained)
            yield outer.register_forward_pre_hook(self._before_outer_model, with_kwargs=True)
            yield outer.register_forward_hook(self._after_outer_model, always_call=True)

    def _switch_attention(self) -> list[ModelConfig]:
        """Switch the decoder to this engine's attention; towers keep theirs. Return the switched configurations."""
        check_attention(self.model)  # if sequences are not split, no other check has seen the model
        switched: Any = self.pretrained if self._decoder_sharder is None else self._decoder
        configs: list[ModelConfig] = [module.config for module in switched.modules() if hasattr(module, "config")]
        if self._decoder_sharder is not None:  # the outer model may make masks before the decoder
            outer = outer_model_of(self.pretrained)
            configs += [self.pretrained.config, outer.config]  # type: ignore[list-item]
        configs = list({id(config): config for config in configs}.values())  # each once
        for config in configs:
            remember_implementation(config, self)
        switched.set_attn_implementation(NAME)
        for config in configs:  # also those of copied layers (PEFT's layer_replication), which transformers leaves out
            config._attn_implementation_internal = NAME
        return configs

    def _set_implementation(self, *args: Any, **kwargs: Any) -> None:
        """Replace ``set_attn_implementation``: the new implementation is for whole batches only, not for shards."""
        model_class: Any = type(self.pretrained)
        for config in self._configs:
            restore_implementation(config)
        try:
            model_class.set_attn_implementation(self.pretrained, *args, **kwargs)
        finally:
            for config in self._configs:
                remember_implementation(config, self)
                config._attn_implementation_internal = NAME

    def tile(self, tokens: int) -> None:
        """Compute MLPs and losses in tiles of ``tokens`` tokens from now on. Raises `ModelError`: see `Tiles`."""
        if self._forward_wrapper.tiles is not None:
            self._forward_wrapper.tiles.close()
        self._forward_wrapper.tiles = Tiles(self.pretrained, self._decoder, tokens)

    def restore(self) -> None:
        """Restore the model's former attention implementation, and remove all hooks."""
        self.is_restored = True
        for hook in self._hooks:
            hook.remove()
        if self._forward_wrapper.tiles is not None:
            self._forward_wrapper.tiles.close()
        self._forward_wrapper.close()
        self._unwrap_functions()
        self._unwrap_router_loss()
        self._rope_length.restore()
        del self._decoder.train
        del self.pretrained.set_attn_implementation
        for config in self._configs:
            restore_implementation(config)

    def __deepcopy__(self, memo: dict[int, object]) -> ShardedModel:
        """Return the same object, so that the hooks of a copied model keep working with the same replica."""
        return self

    @property
    def takes_shards(self) -> bool:
        """True if a forward without a cache would now take a shard."""
        return self._takes_shards(self._decoder)

    @property
    def is_split(self) -> bool:
        """True if sequences are split; else every replica is one rank, and any batch can run whole."""
        return any(schedule.sp_size > 1 for schedule in self.replica.plan.schedules)

    @functools.cached_property
    def pools(self) -> bool:
        """True if the head pools over the sequence, so that only sharded calls can split it."""
        return pools(self.pretrained)

    def expect_tokenwise(self) -> None:
        """Refuse a shard if the head pools over the sequence. Raises `ModelError`."""
        if self.pools:
            raise ModelError(POOLS.format(type(self.pretrained).__name__))

    @property
    def decoder(self) -> nn.Module:
        """Module that turns this rank's tokens into hidden states."""
        return self._decoder

    @property
    def cuts_inputs(self) -> bool:
        """True if forwards take whole sequences, and only the decoder's arguments are sharded, see `towers`."""
        return self._decoder_sharder is not None

    def complete(self, batch: Any) -> Any:
        """Add position ids to a whole batch if the model computes them from the whole sequence, see `embeddings`."""
        return with_positions(self._count_positions, batch)

    @contextlib.contextmanager
    def computing_window(self, window: Window) -> Iterator[None]:
        """Inside the context, let the text decoder of a model with towers compute only ``window`` of a whole batch."""
        assert self._decoder_sharder is not None
        self._decoder_sharder.window = window
        try:
            yield
        finally:
            self._decoder_sharder.window = None

    def names_taken(self, module: nn.Module) -> frozenset[str]:
        """Return the names of entries of a batch that ``module`` can use.

        These are the parameters of any forward inside it, and the names of packing entries. A training loop removes
        other entries before the forward, although ``**kwargs`` would pass them on.
        """
        forwards = {type(inner).forward for inner in module.modules()}
        names = {"shift_labels", *PACKING}
        for forward in forwards:
            names.update(inspect.signature(forward).parameters)
        return frozenset(names)

    def change_replica(self, replica: Replica) -> None:
        """Use ``replica``, which has another schedule of the same ranks, for later batches.

        Shards that were made under an earlier schedule are still computed under that one.

        Caller: every rank of the replica, between the same two steps.
        """
        former_replicas = (self.replica, *self._earlier_replicas)
        self._earlier_replicas = [former for former in former_replicas if former.schedule != replica.schedule]
        self.replica = replica
        self._checked_features.clear()
        self.num_comparisons = 0
        self.pace.restart()
        self.compare_again = None
        if self.losses.graphs is not None:
            self.losses.graphs.restart()

    @property
    def trains_now(self) -> bool:
        """True if a forward would now run in training mode and with gradients."""
        return self._decoder.training and torch.is_grad_enabled()

    @property
    def active_adapters(self) -> str:
        """Names of the PEFT adapters that a forward would now use, the same in all layers; empty if none."""
        layer = self._adapted_layer
        return "" if layer is None or layer.disable_adapters else ", ".join(layer.active_adapters)

    def needs_check(self, features: frozenset[str]) -> bool:
        """Return True if a batch has to be checked before it is trained on, see `self_check`.

        The answer is the same on every rank of the world, also if replicas have different sizes.

        Args:
            features: of the batch, see `features_of`.
        """
        every = self.pace.every
        is_due = every == "always" or (every != "off" and (self.pace.is_due or self.shows_new(features)))
        return is_due and self.is_split

    def shows_new(self, features: frozenset[str]) -> bool:
        """Return True if a batch has features that no batch checked under the present schedule had."""
        return not features <= self._checked_features

    def note_checked(self, features: frozenset[str]) -> None:
        """Record that the model passed the self-check under the present schedule, on a batch with these features."""
        self._checked_features |= features
        self.num_comparisons += 1

    @contextlib.contextmanager
    def unrecorded(self, *, keeps_tiles: bool = False) -> Iterator[None]:
        """Run forwards inside without recording them: no batch, no positions, no time on the clock, no checks.

        Args:
            keeps_tiles: True to compute in tiles, as outside; False to compute without tiles.
        """
        former = self.clock, self._observers, self.placement.as_loaded
        tiles = self._forward_wrapper.tiles
        if not keeps_tiles:
            self._forward_wrapper.tiles = None
        self.clock, self._observers = StepClock(default_device()), ()
        self.placement.as_loaded = None
        try:
            with self.losses.unrecorded():
                yield
        finally:
            self.clock, self._observers, self.placement.as_loaded = former
            self._forward_wrapper.tiles = tiles

    def record_batches(self, observers: Sequence[Callable[[BatchLayout], None]]) -> None:
        """Call ``observers`` with the layout of every later batch, except of dummy batches that fill a step up."""
        self._observers = observers

    def _is_in_evaluation(self) -> bool:
        """Return True if ``eval()`` was called on the decoder, and no ``train()`` since."""
        return self._mode_was_set and not self._decoder.training

    def _takes_shards(self, decoder: nn.Module) -> bool:
        """Return True if forwards take shards: as handle.sharded() or handle.unsharded() says, else by the mode."""
        override = sharding_is_set()
        if override is not None:
            return override
        return decoder.training or not self._mode_was_set

    def _train(self, decoder: nn.Module, mode: bool = True) -> nn.Module:
        """Replace ``decoder.train``: set the mode, and remember that the script called ``train()`` or ``eval()``."""
        self._mode_was_set = True
        return type(decoder).train(decoder, mode)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_decoder(self, decoder: nn.Module, args: tuple[object, ...], kwargs: Entries) -> Any:
        """Pre-hook of the decoder: begin a forward, and return its arguments, all of them by name."""
        kwargs = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        kwargs = self._forward_wrapper.begin_decoder(kwargs)
        if self._runs_whole(decoder, kwargs):
            return (), self._begin_whole_forward(kwargs)
        return (), self._begin_sharded_forward(kwargs)

    def _runs_whole(self, decoder: nn.Module, kwargs: Entries) -> bool:
        """Return True if a forward of the decoder runs on whole sequences, by the rules of `ShardedModel`."""
        if self._forward_wrapper.is_in_call:
            return False
        is_forced = sharding_is_set() is True
        is_in_outer_model = self._decoder_sharder is not None and self._decoder_sharder.is_in_forward
        has_cache = cache_of(kwargs) is not None and not (is_forced or is_in_outer_model)
        is_loaders_batch = shard_info(kwargs.get("position_ids")) is not None or is_shard(*_inputs_of(kwargs))
        is_scripts_batch = not self.is_split and not is_loaders_batch
        return not self._takes_shards(decoder) or has_cache or is_scripts_batch

    def _begin_whole_forward(self, kwargs: Entries) -> Entries:
        """Begin a forward on whole sequences, and return its arguments. Raises `BatchError`: it was given a shard."""
        expect_no_shard(type(self.pretrained).__name__, *_inputs_of(kwargs))
        self._end_whole_forward = change_mode(is_whole=True)
        sharder = self._decoder_sharder
        if sharder is not None and sharder.window is not None:
            return sharder.cut_to_window(kwargs, sharder.window)
        return kwargs

    def _begin_sharded_forward(self, kwargs: Entries) -> Entries:
        """Begin a forward on a shard: agree on the batch, and return the arguments of the decoder.

        Raises:
            BatchError: the arguments are not those of a shard.
            ModelError: an argument cannot be sharded, or the head pools over the sequence.
        """
        model_positions: Tensor | None = None  # [axes, B, s] or [B, s], computed by an outer model
        if self._decoder_sharder is not None:
            kwargs, model_positions = self._decoder_sharder.shard(kwargs, self.replica.rank)
        expect_shard_shapes(kwargs)
        if not self._forward_wrapper.is_in_call:
            self.expect_tokenwise()
        forward = self._agree_on_forward(kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in PACKING}
        is_forced = sharding_is_set() is True
        keeps_cache = cache_of(kwargs) is not None or (is_forced and kwargs.get("use_cache"))
        if "use_cache" in self._parameters and not keeps_cache:
            kwargs["use_cache"] = False  # training has no use for a cache; handle.sharded() makes one on request
        if forward.is_placeholder:
            kwargs["position_ids"] = torch.zeros_like(kwargs["position_ids"])
        num_tokens = kwargs["position_ids"].shape[1]
        if model_positions is not None:
            kwargs["position_ids"] = model_positions
        self._rope_length.begin(kwargs["position_ids"], forward.replica)
        if self._has_recurrent_functions:
            kwargs[KEYWORD] = forward
        self._forward, self._end_forward = forward, change_mode(forward=forward)
        if self.keeps_attention and torch.is_grad_enabled():
            self._end_keeping = keep_attention(self._decoder)
        self._forward_wrapper.note_decoder_forward(forward)
        if self.placement.asked_for_documents:
            expect_no_noise(self._embeddings)
        if self._decoder_sharder is None:
            self._restore_noise = scale_noise(self._embeddings, num_tokens, forward.batch.placement.length)
        return kwargs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_outer_model(self, outer: nn.Module, args: tuple[object, ...], kwargs: Entries) -> Any:
        """Pre-hook of the outer model of towers: begin a forward on a batch of the loader, or refuse a shard.

        Raises:
            ModelError: in a sharded call.
            BatchError: see `DecoderSharder.begin_forward` and `expect_no_shard`.
        """
        assert self._decoder_sharder is not None
        if self._forward_wrapper.is_in_call or wanted_results() is not None:
            raise ModelError(
                f"{type(self.pretrained).__name__} puts images or sounds before its text decoder, and sharded calls "
                "cannot cut those. Train it with batches of handle.dataloader, or call it inside handle.unsharded()."
            )
        is_generating = cache_of(kwargs) is not None and sharding_is_set() is not True
        if self._takes_shards(self._decoder) and not is_generating:
            return (), self._decoder_sharder.begin_forward(args, kwargs)
        expect_no_shard(type(self.pretrained).__name__, *args, *kwargs.values())
        return args, kwargs

    def _after_outer_model(self, outer: nn.Module, args: object, output: object) -> None:
        """Hook of the outer model of towers: end its forward, also one that failed."""
        assert self._decoder_sharder is not None
        self._decoder_sharder.end_forward()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_decoder(self, decoder: nn.Module, args: object, output: object) -> object:
        """Hook of the decoder: end its forward, also one that failed, and return its outputs if they are replaced.

        Args:
            output: of the decoder; None if it has failed.
        """
        if self._forward is not None:
            forward, self._forward = self._forward, None
            self._end_forward()
            self._end_keeping()
            self._end_keeping = lambda: None
            self._rope_length.end()
            if self.model_loss.has_router_term:
                mark_router_logits(output, forward)
            self._restore_noise()
            if self._has_recurrent_functions and output is not None:
                expect_wrappers_called(decoder, forward)
        self._end_whole_forward()
        self._end_whole_forward = lambda: None
        return self._forward_wrapper.end_decoder(output)

    def _agree_on_forward(self, kwargs: Entries) -> ShardedForward:
        """Agree on the batch with the other ranks of the replica, and record it.

        Caller: every rank of the replica.
        Collectives: those of `agree_on_batch`.
        """
        positions: Tensor = kwargs["position_ids"]
        info = shard_info(positions)
        with self.clock.phase(IDLE, "agree_on_batch"):
            earlier = [replica.schedule for replica in self._earlier_replicas]
            local = local_batch(kwargs, self.pretrained.dtype, self._model_parameters)
            batch = agree_on_batch(self.replica, local, earlier, self.placement.recent)
        placement = batch.placement
        if torch.is_grad_enabled():  # a forward without gradients is not one of training
            self.losses.latest_positions = positions
            if info is None or not info.is_filler:
                for observe in self._observers:
                    observe(batch)
        replicas = (self.replica, *self._earlier_replicas)
        replica = next(replica for replica in replicas if replica.schedule == placement.schedule)
        if torch.is_grad_enabled():
            self.clock.count_batch(batch.batch_size, placement.tokens(replica.rank), placement.length)
        # A comparison with one process looks for faults, and a rounding that the job asks for is none.
        ring_gradients = "fp32" if forward_mode().is_compared else self.ring_gradients
        return ShardedForward(batch, replica, self.kernel, is_placeholder(positions), self.clock, ring_gradients)


def _inputs_of(kwargs: Entries) -> tuple[Any, Any, Any]:
    """Return the arguments of a decoder that the loader marks in a shard, each None if it is absent."""
    return kwargs.get("position_ids"), kwargs.get("input_ids"), kwargs.get("inputs_embeds")
