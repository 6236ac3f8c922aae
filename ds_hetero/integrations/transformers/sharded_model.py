"""transformers, the model's side: an attention and a mask function of our own, and one model that is switched to them.

transformers calls the mask function once per forward and hands what it returns to every layer, unread. While a
sharded forward runs, ours returns a `ShardedMask`: the layout of the batch and the replica. So every layer knows what
to do, also when activation checkpointing runs it again in the backward, where nothing else of the forward is left. At
any other time (evaluation, generate) both functions pass the call on to the implementation that the model had before.

Nothing that transformers registers is overwritten, and other models in the process are not touched.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_hetero.errors import BatchError, ModelError
from ds_hetero.integrations.patching import Patches
from ds_hetero.integrations.transformers.model_checks import decoder_of, pretrained_of
from ds_hetero.profiler.measure import default_device
from ds_hetero.runtime.attention.attention import AttentionSpec, attention
from ds_hetero.runtime.attention.batch_layout import BatchLayout, Shard, agree_on_batch
from ds_hetero.runtime.attention.kernels import select
from ds_hetero.runtime.data.shard_info import shard_info
from ds_hetero.runtime.data.shards import PACKING
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_clock import IDLE, StepClock

__all__ = ["NAME", "PRIVATE_NAMES", "WORKS", "ShardedMask", "ShardedModel", "install", "sharding"]

NAME = "ds_hetero"  # of our attention implementation

WORKS = ">=5.20,<6"
PRIVATE_NAMES = (
    "transformers:AttentionInterface._global_mapping",
    "transformers:AttentionMaskInterface._global_mapping",
    "transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS",
    "transformers.masking_utils:causal_mask_function",
    "transformers.masking_utils:bidirectional_mask_function",
    "transformers.masking_utils:and_masks",
    "transformers.masking_utils:sliding_window_overlay",
    "transformers.masking_utils:packed_sequence_mask_function",
)

_PREDICT_IN_PLACE = ("ForMaskedLM", "ForTokenClassification")

# Parts that a mask function may be made of; packing is told from the positions of the whole sequence instead.
_MASKS = {name.partition(":")[2] for name in PRIVATE_NAMES if name.startswith("transformers.masking_utils:")}
_MASKS.add("remap_positions_for_packed_sequence")  # since transformers 5.21

_CU_SEQLENS = PACKING[0]


@dataclass(frozen=True, eq=False)
class _Forward:
    """One sharded forward of one model.

    Args:
        batch: the layout that all ranks agreed on.
        replica: this rank's replica, with the schedule for which the batch was cut.
        kernel: the implementation asked for in the configuration, if any.
        placeholder: this rank holds no token of the batch; its one column stands for none.
        clock: of the model.
    """

    batch: BatchLayout
    replica: Replica
    kernel: str | None
    placeholder: bool
    clock: StepClock


@dataclass(frozen=True, eq=False)
class ShardedMask:
    """What a layer is given in place of a mask."""

    forward: _Forward
    causal: bool
    window: int | None


_select = functools.lru_cache(select)

_forward: ContextVar[_Forward | None] = ContextVar("_forward", default=None)
_sharding: ContextVar[bool | None] = ContextVar("_sharding", default=None)
_cores: dict[int, tuple[Any, str]] = {}  # id of a switched config -> the config, the implementation it had


@contextlib.contextmanager
def sharding(on: bool) -> Iterator[None]:
    """Have forwards inside take shards, or whole batches, whatever ``model.training`` says."""
    token = _sharding.set(on)
    try:
        yield
    finally:
        _sharding.reset(token)


def install(patches: Patches) -> None:
    """Register the two functions with transformers."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    patches.on_undo(lambda: AttentionInterface._global_mapping.pop(NAME))
    patches.on_undo(lambda: AttentionMaskInterface._global_mapping.pop(NAME))


class ShardedModel:
    """One model, switched to our attention; `restore` switches it back.

    A forward takes this rank's shard of a batch while ``model.training``, and until ``train()`` or ``eval()`` is first
    called, since ``from_pretrained`` leaves models in evaluation and many loops train them so. In evaluation, and with
    a cache of keys and values (generate), it takes whole batches.

    Args:
        model: a PreTrainedModel, or a PEFT model or other module around one.
        replica: this rank's replica.
        kernel: ``"torch"``, ``"flash_attn"``, ``"triton"``; None for the best on the device.
    """

    def __init__(self, model: nn.Module, replica: Replica, kernel: str | None) -> None:
        self.model, self.replica, self.kernel = model, replica, kernel
        self._earlier: list[Replica] = []  # with the schedules before this one, latest first
        self.pretrained = pretrained_of(model)
        self.clock = StepClock(default_device())
        self._decoder = decoder_of(self.pretrained)
        self._parameters = list(inspect.signature(type(self._decoder).forward).parameters)[1:]
        self._token: Any = None
        self.on_batch: Callable[[BatchLayout], None] = lambda batch: None  # called when a sharded forward begins
        self.convention: str | None = None  # of losses that the training script computes itself
        self.scaled = False  # a loss of the right scale was made of a forward since the engine's last step
        self.positions: Tensor | None = None  # of the batch of the latest one that a backward may follow
        self._configs = {id(m.config): m.config for m in self.pretrained.modules() if hasattr(m, "config")}
        for key, config in self._configs.items():
            _cores[key] = (config, config._attn_implementation)
        self.pretrained.set_attn_implementation(NAME)
        self._mode_was_set = False
        self._decoder.train = MethodType(self._train, self._decoder)
        self._hooks = [
            self._decoder.register_forward_pre_hook(self._before, with_kwargs=True),
            self._decoder.register_forward_hook(self._after, always_call=True),
        ]

    @property
    def takes_shards(self) -> bool:
        """Whether a forward without a cache would now take a shard."""
        return self._takes_shards(self._decoder)

    def _takes_shards(self, decoder: nn.Module) -> bool:
        override = _sharding.get()
        return decoder.training or not self._mode_was_set if override is None else override

    @property
    def moves_labels(self) -> bool:
        """Whether a token predicts the label of the next one, as in language models, and not its own."""
        return not type(self.pretrained).__name__.endswith(_PREDICT_IN_PLACE)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModel:
        """Hooks of a copied model go on working; the replica is the same."""
        return self

    def change_replica(self, replica: Replica) -> None:
        """Go on under another schedule of the same ranks; shards that were cut before are still computed under theirs.

        Caller: every rank of the replica, between the same two steps.
        """
        kept = [known for known in (self.replica, *self._earlier) if known.schedule != replica.schedule]
        self.replica, self._earlier = replica, kept

    def restore(self) -> None:
        """Give the model the implementation it had, and forget it."""
        for hook in self._hooks:
            hook.remove()
        del self._decoder.train
        for key, config in self._configs.items():
            config._attn_implementation_internal = _cores.pop(key)[1]

    def _train(self, decoder: nn.Module, mode: bool = True) -> nn.Module:
        """In place of ``decoder.train``: takes note that the mode was set."""
        self._mode_was_set = True
        return type(decoder).train(decoder, mode)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        forced = _sharding.get() is True
        if not self._takes_shards(decoder) or (kwargs.get("past_key_values") is not None and not forced):
            return (), kwargs
        tokens: Any = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
        positions: Any = kwargs.get("position_ids")
        mask: Any = kwargs.get("attention_mask")
        _check_shapes(positions, mask)
        cu_seqlens = kwargs.get(_CU_SEQLENS)
        kwargs = {name: value for name, value in kwargs.items() if name not in PACKING}
        if "use_cache" in self._parameters and not forced:
            kwargs["use_cache"] = False
        given, info = positions, shard_info(positions)
        placeholder = positions.shape[1] == 1 and bool(positions[0, 0] < 0)
        if placeholder:
            kwargs["position_ids"] = torch.zeros_like(positions)
            tokens, positions = tokens[:, :0], positions[:, :0]
            mask = None if mask is None else mask[:, :0]
        shard = Shard(
            batch_size=tokens.shape[0],
            tokens=tokens.shape[1],
            dtype=self.pretrained.dtype,
            position_ids=positions,
            attention_mask=mask,
            cu_seqlens=cu_seqlens,
            placement=None if info is None else info.placement,
        )
        with self.clock.phase(IDLE, "agree_on_batch"):
            batch = agree_on_batch(self.replica, shard, [replica.schedule for replica in self._earlier])
        if torch.is_grad_enabled():
            self.positions = given
        if info is None or not info.is_filler:
            self.on_batch(batch)
        replica = next(known for known in (self.replica, *self._earlier) if known.schedule == batch.placement.schedule)
        self.clock.holds_batch(batch.batch_size, batch.placement.tokens(replica.rank), batch.placement.length)
        self._token = _forward.set(_Forward(batch, replica, self.kernel, placeholder, self.clock))
        return (), kwargs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(self, decoder: nn.Module, args: Any, output: Any) -> None:
        if self._token is not None:
            _forward.reset(self._token)
            self._token = None


def _check_shapes(positions: Any, mask: Any) -> None:
    if positions is None:
        raise BatchError(
            "a forward on shards needs position_ids, the place of every token in the whole sequence. Take batches from "
            "ds_hetero's loader (handle.dataloader), which makes them; for whole batches, see handle.unsharded()."
        )
    if positions.dim() != 2:
        raise BatchError(f"position_ids must be [B, s], got shape {tuple(positions.shape)}.")
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        kind = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise BatchError(
            f"attention_mask must be a padding mask [B, s], got {kind}. "
            "Mark packed documents by position_ids that restart."
        )


# --- the functions that transformers calls ------------------------------------------------------------


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _mask(
    *args: Any, mask_function: Any = masking_utils.causal_mask_function, config: Any = None, **kwargs: Any
) -> Any:
    forward = _forward.get()
    if forward is not None:
        return ShardedMask(forward, *_read_mask_function(mask_function))
    core = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[_core_of(config)]
    with _implementation(config):
        return core(*args, mask_function=mask_function, config=config, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    if isinstance(attention_mask, ShardedMask):
        return _sharded_attention(module, query, key, value, attention_mask, *args, **kwargs), None
    if _forward.get() is not None:
        raise ModelError(
            f"{type(module).__name__} gives attention a mask of its own ({type(attention_mask).__name__}) in place of "
            "the one that transformers made, so ds_hetero cannot split it over the sequence."
        )
    config = module.config
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    with _implementation(config):
        core = ALL_ATTENTION_FUNCTIONS.get_interface(_core_of(config), eager)
        result: tuple[Tensor, Tensor | None] = core(module, query, key, value, attention_mask, *args, **kwargs)
        return result


def _sharded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: ShardedMask,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool | None = None,
    **_: Any,
) -> Tensor:
    """Of query [B, H, s, D], key [B, G, s, D] and value [B, G, s, Dv], Dv <= D: [B, s, H, Dv]."""
    forward, layer = mask.forward, type(module).__name__
    _refuse(bool(dropout), layer, f"dropout={dropout} inside attention; set the model's attention dropout to 0")
    _refuse(position_bias is not None, layer, "a position_bias")
    _refuse(bool(output_attentions), layer, "output_attentions=True; attention weights are never held")
    _refuse(
        sliding_window is not None and sliding_window != mask.window,
        layer,
        f"sliding_window={sliding_window} with a mask whose window is {mask.window}",
    )
    value_dim = value.shape[-1]
    _refuse(value_dim > query.shape[-1], layer, f"value heads of {value_dim}, query heads of {query.shape[-1]}")
    if value_dim < query.shape[-1]:
        value = nn.functional.pad(value, (0, query.shape[-1] - value_dim))
    if forward.placeholder:
        query, key, value = query[:, :, :0], key[:, :, :0], value[:, :, :0]
    spec = AttentionSpec(
        kernel=_select(query.device, query.dtype, query.shape[-1], softcap, forward.kernel),
        causal=mask.causal,
        window=mask.window,
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
    )
    out = attention(query, key, value, forward.replica, forward.batch, spec, forward.clock)
    if forward.placeholder:
        out = nn.functional.pad(out, (0, 0, 0, 0, 0, 1))
    return out[..., :value_dim]


def _refuse(found: bool, layer: str, what: str) -> None:
    if found:
        raise ModelError(f"{layer} asks for {what}, which cannot be split over the sequence.")


# --- masks and implementations ------------------------------------------------------------------------


def _read_mask_function(mask_function: Any) -> tuple[bool, int | None]:
    """Whether it is causal, and its sliding window, from the parts that transformers composed it of.

    Raises:
        ModelError: it has other parts: chunks, blocks, or functions of the model's own.
    """
    parts: dict[str, Any] = {}
    todo = [mask_function]
    while todo:
        part = todo.pop()
        own = part.__module__ == masking_utils.__name__
        parts[part.__qualname__.partition(".")[0] if own else f"{part.__module__}.{part.__qualname__}"] = part
        for cell in part.__closure__ or ():
            contents = cell.cell_contents
            todo += [
                f for f in (contents if isinstance(contents, tuple) else (contents,)) if isinstance(f, FunctionType)
            ]
    if unknown := sorted(set(parts) - _MASKS):
        raise ModelError(
            f"a mask made of {', '.join(unknown)} cannot be split over the sequence; causal, bidirectional and causal "
            "sliding-window masks can, with padding or packed documents."
        )
    window = parts.get("sliding_window_overlay")
    return (
        "causal_mask_function" in parts,
        None if window is None else inspect.getclosurevars(window).nonlocals["sliding_window"],
    )


def _core_of(config: Any) -> str:
    """The implementation that ``config`` had; eager, which is always exact, for a copy of a switched config."""
    return _cores.get(id(config), (None, "eager"))[1] or "eager"


@contextlib.contextmanager
def _implementation(config: Any) -> Iterator[None]:
    """For a call of the core: kernels ask the config which of them was meant."""
    ours = config._attn_implementation
    config._attn_implementation_internal = _core_of(config)
    try:
        yield
    finally:
        config._attn_implementation_internal = ours
