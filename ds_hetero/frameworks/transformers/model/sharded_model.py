"""One transformers model that is switched to our attention, and knows whether a forward takes a shard of a batch."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_hetero.engine.adapters import BatchChecks
from ds_hetero.engine.forward_mode import ShardedForward, change_mode, sharding_is_set, wanted_results
from ds_hetero.errors import ConfigError, ModelError
from ds_hetero.frameworks.transformers.attention import NAME
from ds_hetero.frameworks.transformers.former_attention import remember_implementation, restore_implementation
from ds_hetero.frameworks.transformers.model.class_loss import class_with_own_forward
from ds_hetero.frameworks.transformers.model.embeddings import position_counter, with_positions
from ds_hetero.frameworks.transformers.model.entrance import Entrance
from ds_hetero.frameworks.transformers.model.model_checks import (
    POOLS,
    check_attention,
    decoder_of,
    embeddings_of,
    pools,
    pretrained_of,
    why_evaluated_whole,
)
from ds_hetero.frameworks.transformers.model.neftune import expect_no_noise, scale_noise
from ds_hetero.frameworks.transformers.model.own_loss import own_loss_function
from ds_hetero.frameworks.transformers.model.recurrent_layers import KEYWORD, expect_doors_used, has_doors, open_doors
from ds_hetero.frameworks.transformers.model.rotary_length import RopeLength
from ds_hetero.frameworks.transformers.model.router_losses import (
    has_router_loss,
    mark_router_logits,
    open_router_loss,
    router_term,
)
from ds_hetero.frameworks.transformers.model.shard_arguments import expect_shard_shapes, expect_whole, local_batch
from ds_hetero.frameworks.transformers.model.tiles import Tiles
from ds_hetero.frameworks.transformers.model.towers import DecoderDoor, Window, front_of, has_towers
from ds_hetero.frameworks.transformers.protocols import ModelConfig
from ds_hetero.runtime.attention.batch_layout import BatchLayout, agree_on_batch
from ds_hetero.runtime.attention.shard_placement import KnownPlacement
from ds_hetero.runtime.data.loss_units import UnitCounts
from ds_hetero.runtime.data.shard_info import ShardInfo, is_placeholder, shard_info
from ds_hetero.runtime.data.shards import PACKING, Entries, is_shard
from ds_hetero.runtime.devices import default_device
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_checks import (
    AsLoaded,
    ClassLoss,
    ComparisonPace,
    GraphChanges,
    LocalWeights,
    TokenFactors,
    TokenWeights,
)
from ds_hetero.runtime.step_clock import IDLE, StepClock
from ds_hetero.values.placement import Placement, Placer, Rows, stream_placement
from ds_hetero.values.schedule import Schedule
from ds_hetero.values.section import SECTION

_PREDICT_IN_PLACE = ("ForMaskedLM", "ForTokenClassification")
# A loop may draw all micro-batches of an optimizer step before it runs them; chosen, more than steps have.
_KEPT_PLACEMENTS = 64


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
        loss_convention: of the losses that the training script computes itself, see `ds_hetero.runtime.loss`; None
            where the configuration does not name one.
        places_documents: True if batches are placed by their documents, not by their length.
        asked_for_documents: True if the section requests that, so that rows are joined and the loader reads ahead.
        token_weights: checks the loss of every step; None without checks.
        token_factors: checks the losses that the script computes; None without checks.
        local_weights: checks by what they multiply tokens; None without checks.
        pace: when a piece of a batch is compared again.
        graphs: whether losses are made of other operations than before; None without checks.
        compare_again: compares what was compared last, and passed; None before that.
        num_comparisons: comparisons of pieces of batches so far; the same on every rank.
        class_loss: checks the loss that the model's class computes itself; None for transformers' classes, and without
            checks.
        as_loaded: checks that forwards get batches as the loader made them; None without checks.
        latest_positions: the ``position_ids`` of the latest batch that a backward may follow; None right after a step.
    """

    checks: BatchChecks  # comparisons with one process, which `split_model` gives a model that is to be trained

    def __init__(self, model: nn.Module, replica: Replica, kernel: str | None) -> None:
        self.model, self.replica, self.kernel = model, replica, kernel
        self.pretrained = pretrained_of(model)
        self.clock = StepClock(default_device())  # times the phases of this model's steps
        self.loss_convention: str | None = None
        self.latest_positions: Tensor | None = None
        self.token_weights: TokenWeights | None = None
        self.token_factors: TokenFactors | None = None
        self.local_weights: LocalWeights | None = None
        self.pace = ComparisonPace("first_batch")
        self.graphs: GraphChanges | None = None
        self.compare_again: Callable[[], None] | None = None
        self.class_loss: ClassLoss | None = None
        self.as_loaded: AsLoaded | None = None
        # Asked at every forward what is trained; the self-check puts other parameters in their places for a while.
        self._switched = list(self.pretrained.parameters())
        self._checked: set[str] = set()  # features of batches
        self.num_comparisons = 0
        self.told: set[str] = set()  # what the self-check has said, and says once
        self._has_scaled_loss = False  # since the engine's last step
        self.places_documents = self.asked_for_documents = False
        self.placer: Placer = stream_placement  # of the moment
        self._recent: deque[KnownPlacement] = deque(maxlen=_KEPT_PLACEMENTS)  # latest first
        self._observers: Sequence[Callable[[BatchLayout], None]] = ()
        self._earlier: list[Replica] = []  # with the schedules before this one, latest first
        self._forward: ShardedForward | None = None  # that runs
        self._end_forward: Callable[[], None] = lambda: None
        self._end_whole_forward: Callable[[], None] = lambda: None
        self._restore_noise: Callable[[], None] = lambda: None
        self._kept_alive: object = None
        self.is_restored = False  # the model is not split any more
        self._evaluation: str | None = None
        self._decoder = decoder_of(self.pretrained)
        self._embeddings = embeddings_of(self.pretrained)
        self._door = DecoderDoor(self.pretrained) if has_towers(self.pretrained) else None
        self._count_positions = position_counter(self._decoder) if self._door is None else None
        self._parameters = list(inspect.signature(type(self._decoder).forward).parameters)[1:]
        self._configs = self._switch_attention()
        self.pretrained.set_attn_implementation = self._set_implementation
        layers = (module for module in self.model.modules() if hasattr(module, "adapter_layer_names"))
        self._adapted_layer: Any = next(layers, None)
        self._has_doors, self._close_doors = has_doors(self.model), open_doors(self.model)
        self._has_router_loss = has_router_loss(self.pretrained)
        self._close_router_loss = open_router_loss(self.pretrained)
        self._rope_length = RopeLength(self._decoder)
        self._mode_was_set = False
        self._decoder.train = MethodType(self._train, self._decoder)  # type: ignore[method-assign]
        self._entrance = Entrance(self, at_decoder=self.pools or self._decoder is self.model)
        self._hooks = list(self._register_hooks())

    def _register_hooks(self) -> Iterator[RemovableHandle]:
        """Register hooks on the decoder, and on the module that runs towers before it."""
        yield self._decoder.register_forward_pre_hook(self._before, with_kwargs=True)
        yield self._decoder.register_forward_hook(self._after, always_call=True)
        if self._door is not None:
            front = front_of(self.pretrained)
            yield front.register_forward_pre_hook(self._before_towers, with_kwargs=True)
            yield front.register_forward_hook(self._after_towers, always_call=True)

    def _switch_attention(self) -> list[ModelConfig]:
        """Switch the decoder to this engine's attention; towers keep theirs. Return the switched configurations."""
        check_attention(self.model)  # where nothing is split, no other check has seen the model
        part: Any = self.pretrained if self._door is None else self._decoder
        inside: list[ModelConfig] = [m.config for m in part.modules() if hasattr(m, "config")]
        outside: list[ModelConfig] = []
        if self._door is not None:  # what makes masks before the decoder comes to us, too
            outside = [self.pretrained.config, front_of(self.pretrained).config]  # type: ignore[list-item]
        configs = list({id(config): config for config in (*inside, *outside)}.values())
        for config in configs:
            remember_implementation(config, self)
        part.set_attn_implementation(NAME)
        for config in configs:  # those of layers that were copied, too, as PEFT's layer_replication does
            config._attn_implementation_internal = NAME
        return configs

    def _set_implementation(self, *args: Any, **kwargs: Any) -> None:
        """Replace ``set_attn_implementation``: the new implementation is for whole batches only, not for shards."""
        its_class: Any = type(self.pretrained)
        for config in self._configs:
            restore_implementation(config)
        try:
            its_class.set_attn_implementation(self.pretrained, *args, **kwargs)
        finally:
            for config in self._configs:
                remember_implementation(config, self)
                config._attn_implementation_internal = NAME

    def tile(self, tokens: int) -> None:
        """Compute MLPs and losses of shards in tiles of ``tokens`` tokens. Raises `ModelError`: see `Tiles`."""
        if self._entrance.tiles is not None:
            self._entrance.tiles.close()
        self._entrance.tiles = Tiles(self.pretrained, self._decoder, tokens)

    def keep_alive(self, record: object) -> None:
        """Keep ``record`` alive as long as the model, whose hooks hold this object."""
        self._kept_alive = record

    def restore(self) -> None:
        """Restore the model's former attention implementation, and remove all hooks."""
        self.is_restored = True
        for hook in self._hooks:
            hook.remove()
        if self._entrance.tiles is not None:
            self._entrance.tiles.close()
        self._entrance.close()
        self._close_doors()
        self._close_router_loss()
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
    def times_forward(self) -> bool:
        """True if a forward is now one of training."""
        return self.takes_shards

    @property
    def waits_in_forward(self) -> bool:
        """True if a forward would now wait for other ranks, in this replica or, if they differ in size, in any."""
        return self.takes_shards and self.is_split

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
        return self._door is not None

    def complete(self, batch: Any) -> Any:
        """Add position ids to a whole batch if the model computes them from the whole sequence, see `embeddings`."""
        return with_positions(self._count_positions, batch)

    @contextlib.contextmanager
    def looking_at(self, window: Window) -> Iterator[None]:
        """Let forwards of whole batches inside compute only a window of them. For models with towers."""
        assert self._door is not None
        self._door.window = window
        try:
            yield
        finally:
            self._door.window = None

    @property
    def moves_labels(self) -> bool:
        """True if a token predicts the label of the next one, as in language models; False if its own."""
        return not type(self.pretrained).__name__.endswith(_PREDICT_IN_PLACE)

    def names_taken(self, module: nn.Module) -> frozenset[str]:
        """Return the entries of a batch that ``module`` can use: parameters of any forward inside, and packing entries.

        A loop removes other entries before the forward, although ``**kwargs`` would pass them on.
        """
        forwards = {type(inner).forward for inner in module.modules()}
        names = {"shift_labels", *PACKING}
        for forward in forwards:
            names.update(inspect.signature(forward).parameters)
        return frozenset(names)

    @functools.cached_property
    def takes_shifted_labels(self) -> bool:
        """True if the model's forward takes ``shift_labels``, by name or in ``**kwargs``."""
        parameters = inspect.signature(type(self.pretrained).forward).parameters
        takes_any_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        return takes_any_keyword or "shift_labels" in parameters

    @functools.cached_property
    def shifts_labels_itself(self) -> bool:
        """True if the model's own loss shifts labels; this engine then computes the loss from its logits."""
        if self.moves_labels and not self.takes_shifted_labels:
            return True
        if not self.moves_labels or not self.cuts_inputs:
            return False
        try:
            return "loss_function" not in inspect.getsource(type(self.pretrained).forward)
        except (OSError, TypeError):  # made while the program runs
            return False

    @property
    def own_loss(self) -> str:
        """Name of the custom loss function that the script has set; empty for the cross entropy of tokens."""
        return own_loss_function(self.pretrained)

    @property
    def class_with_own_forward(self) -> str:
        """Name of the script's model class if its forward may compute a loss; empty for transformers' classes."""
        return class_with_own_forward(self.pretrained)

    def router_term(self, outputs: Any) -> Tensor | float:
        """Return the auxiliary loss that the model adds to the mean loss of its tokens; 0 if it adds none."""
        return router_term(self.pretrained, outputs) if self._has_router_loss else 0.0

    def change_replica(self, replica: Replica) -> None:
        """Switch to another schedule of the same ranks. Shards that exist already are computed under their schedule.

        Caller: every rank of the replica, between the same two steps.
        """
        former = (self.replica, *self._earlier)
        self._earlier = [earlier for earlier in former if earlier.schedule != replica.schedule]
        self.replica = replica
        self._checked.clear()
        self.num_comparisons = 0
        self.pace.restart()
        self.compare_again = None
        if self.graphs is not None:
            self.graphs.restart()

    def place_documents(self, placer: Placer | None, *, asked_for: bool = True) -> None:
        """Place batches by their documents from now on. Raises `ConfigError`: the model has towers.

        Args:
            placer: for the present schedule, equal on every rank of the replica; None to shard batches by length.
            asked_for: whether the section requests it; if not, batches stay as the loader returns them.
        """
        if placer is not None and self.cuts_inputs:
            raise ConfigError(
                f'"placement": "documents" is for batches of tokens alone, and {type(self.pretrained).__name__} puts '
                'images or sounds before its text decoder. Set "placement" to "stream".'
            )
        self.placer, self.places_documents = placer or stream_placement, placer is not None
        self.asked_for_documents = placer is not None and asked_for

    def place(self, schedule: Schedule, length: int, rows: tuple[Rows, ...] = ()) -> Placement:
        """Place one batch; see `ds_hetero.values.placement.Placer`."""
        return self.placer(schedule, length, rows)

    def note_shard(self, info: ShardInfo) -> None:
        """Remember the placement of a shard, for a forward that gets copies of its tensors, without `ShardInfo`."""
        if info.documents_from is not None:
            placement = KnownPlacement(
                placement=info.placement, documents_from=info.documents_from, position_runs=info.position_runs
            )
            self._recent.appendleft(placement)

    def verify(self, when: int | str) -> None:
        """Set when a piece of a batch is compared, see `ds_hetero.values.section.ChecksSection.compare_every`."""
        self.pace.every = when

    @property
    def trains_now(self) -> bool:
        """True if a forward would now be one of training, with gradients."""
        return self._decoder.training and torch.is_grad_enabled()

    @property
    def active_adapters(self) -> str:
        """Names of the PEFT adapters that a forward would now use; empty if none. All layers have the same."""
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
        return not features <= self._checked

    def note_checked(self, features: frozenset[str]) -> None:
        """The model passed under the present schedule, with a batch of these features."""
        self._checked |= features
        self.num_comparisons += 1

    @contextlib.contextmanager
    def unrecorded(self, *, keeps_tiles: bool = False) -> Iterator[None]:
        """Run forwards inside without a trace: no recorded batch, no positions, no time on the clock, no checks.

        Args:
            keeps_tiles: True to compute in tiles, as outside; False to compute without tiles.
        """
        kept = self.clock, self._observers, self.latest_positions
        checks = self.token_weights, self.token_factors, self.class_loss, self.as_loaded
        tiles, self._entrance.tiles = self._entrance.tiles, self._entrance.tiles if keeps_tiles else None
        self.clock, self._observers = StepClock(default_device()), ()
        self.token_weights = self.token_factors = self.class_loss = self.as_loaded = None
        try:
            yield
        finally:
            self.clock, self._observers, self.latest_positions = kept
            self.token_weights, self.token_factors, self.class_loss, self.as_loaded = checks
            self._entrance.tiles = tiles

    def record_batches(self, observers: Sequence[Callable[[BatchLayout], None]]) -> None:
        """Call ``observers`` with the layout of every later batch, except of dummy batches that fill a step up."""
        self._observers = observers

    def declare_evaluation(self, how: str | None) -> None:
        """Set how the model is evaluated. Raises `ConfigError` on every rank: it cannot be evaluated over shards.

        Args:
            how: ``"evaluation"`` of the section.
        """
        if how == "sharded" and (reason := self.why_evaluated_whole):
            raise ConfigError(f'"{SECTION}.evaluation": "sharded": {reason}')
        self._evaluation = how

    @property
    def evaluation(self) -> str:
        """How loops of frameworks evaluate the model: ``"sharded"`` or ``"whole"``."""
        return self._evaluation or ("whole" if self.why_evaluated_whole else "sharded")

    @property
    def why_evaluated_whole(self) -> str:
        """Why an evaluation cannot shard whole batches at the model, and what to do; empty if it can."""
        return why_evaluated_whole(self.pretrained)

    @property
    def evaluates_shards(self) -> bool:
        """True if a forward outside of handle.sharded() and handle.unsharded() is an evaluation over shards."""
        is_asked_for = self._evaluation == "sharded" and sharding_is_set() is None
        return is_asked_for and self._mode_was_set and not self._decoder.training

    def declare_loss(self, convention: str | None) -> None:
        """Set `loss_convention`. Raises `ConfigError` on every rank: it is one for modules that are not split."""
        if convention in UnitCounts._fields:
            raise ConfigError(
                f'"{SECTION}.loss": "{convention}" is for modules that are not split; the loss of '
                f"{type(self.model).__name__} is a mean over tokens. Leave the key out."
            )
        self.loss_convention = convention

    def note_scaled_loss(self) -> None:
        """Record that a loss was computed from the latest batch, with the scale that the engine's average expects."""
        self._has_scaled_loss = True

    def end_step(self) -> bool:
        """Clear per-step state; return True if batches were run but no loss was scaled."""
        is_unscaled = self.latest_positions is not None and not self._has_scaled_loss
        self.latest_positions, self._has_scaled_loss = None, False
        return is_unscaled

    def _takes_shards(self, decoder: nn.Module) -> bool:
        override = sharding_is_set()
        if override is not None:
            return override
        return decoder.training or not self._mode_was_set

    def _train(self, decoder: nn.Module, mode: bool = True) -> nn.Module:
        """Replace ``decoder.train``: remember that the mode was set."""
        self._mode_was_set = True
        return type(decoder).train(decoder, mode)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, decoder: nn.Module, args: tuple[object, ...], kwargs: Entries) -> Any:
        kwargs = self._entrance.enter_decoder({**dict(zip(self._parameters, args, strict=False)), **kwargs})
        is_forced, is_in_call = sharding_is_set() is True, self._entrance.is_in_call
        is_entered = self._door is not None and self._door.is_entered
        has_cache = kwargs.get("past_key_values") is not None and not (is_forced or is_entered)
        inputs = kwargs.get("position_ids"), kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        is_ours = shard_info(kwargs.get("position_ids")) is not None or is_shard(*inputs)
        is_own_batch = not self.is_split and not is_ours  # the script's, and whole
        if not is_in_call and (not self._takes_shards(decoder) or has_cache or is_own_batch):
            expect_whole(type(self.pretrained).__name__, *inputs)
            self._end_whole_forward = change_mode(is_whole=True)
            if self._door is not None and self._door.window is not None:
                kwargs = self._door.cut_to_window(kwargs, self._door.window)
            return (), kwargs
        made: Tensor | None = None
        if self._door is not None:
            kwargs, made = self._door.cut(kwargs, self.replica.rank)
        expect_shard_shapes(kwargs)
        if not is_in_call:
            self.expect_tokenwise()
        forward = self._agree_on_forward(kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in PACKING}
        keeps_cache = kwargs.get("past_key_values") is not None or (is_forced and kwargs.get("use_cache"))
        if "use_cache" in self._parameters and not keeps_cache:
            kwargs["use_cache"] = False  # made on request inside handle.sharded() only: training has no use for it
        if forward.is_placeholder:
            kwargs["position_ids"] = torch.zeros_like(kwargs["position_ids"])
        tokens = kwargs["position_ids"].shape[1]
        if made is not None:
            kwargs["position_ids"] = made
        self._rope_length.begin(kwargs["position_ids"], forward.replica)
        if self._has_doors:
            kwargs[KEYWORD] = forward
        self._forward, self._end_forward = forward, change_mode(forward=forward)
        self._entrance.run_decoder(forward)
        if self.asked_for_documents:
            expect_no_noise(self._embeddings)
        if self._door is None:
            self._restore_noise = scale_noise(self._embeddings, tokens, forward.batch.placement.length)
        return (), kwargs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_towers(self, front: nn.Module, args: tuple[object, ...], kwargs: Entries) -> Any:
        assert self._door is not None
        if self._entrance.is_in_call or wanted_results() is not None:
            raise ModelError(
                f"{type(self.pretrained).__name__} puts images or sounds before its text decoder, and sharded calls "
                "cannot cut those. Train it with batches of handle.dataloader, or call it inside handle.unsharded()."
            )
        is_generating = kwargs.get("past_key_values") is not None and sharding_is_set() is not True
        if self._takes_shards(self._decoder) and not is_generating:
            return (), self._door.enter(args, kwargs)
        expect_whole(type(self.pretrained).__name__, *args, *kwargs.values())
        return args, kwargs

    def _after_towers(self, front: nn.Module, args: object, output: object) -> None:
        assert self._door is not None
        self._door.leave()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(self, decoder: nn.Module, args: object, output: object) -> object:
        if self._forward is not None:
            forward, self._forward = self._forward, None
            self._end_forward()
            self._rope_length.end()
            if self._has_router_loss:
                mark_router_logits(output, forward)
            self._restore_noise()
            if self._has_doors and output is not None:
                expect_doors_used(decoder, forward)
        self._end_whole_forward()
        self._end_whole_forward = lambda: None
        return self._entrance.leave_decoder(output)

    def _agree_on_forward(self, kwargs: Entries) -> ShardedForward:
        """Agree on the batch with the other ranks, and record it."""
        positions: Tensor = kwargs["position_ids"]
        info = shard_info(positions)
        with self.clock.phase(IDLE, "agree_on_batch"):
            earlier = [replica.schedule for replica in self._earlier]
            local = local_batch(kwargs, self.pretrained.dtype, self._switched)
            batch = agree_on_batch(self.replica, local, earlier, self._recent)
        placement = batch.placement
        if torch.is_grad_enabled():  # a forward without gradients, amid a step or between two, is none of training
            self.latest_positions = positions
            if info is None or not info.is_filler:
                for observe in self._observers:
                    observe(batch)
        replica = next(known for known in (self.replica, *self._earlier) if known.schedule == placement.schedule)
        if torch.is_grad_enabled():
            self.clock.count_batch(batch.batch_size, placement.tokens(replica.rank), placement.length)
        return ShardedForward(batch, replica, self.kernel, is_placeholder(positions), self.clock)
