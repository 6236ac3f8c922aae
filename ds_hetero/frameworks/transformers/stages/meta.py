"""Models without weights, on torch's meta device, and the weights of one stage for them.

    model = ds_hetero.empty_model("meta-llama/Llama-3.1-8B")     # a folder: nothing is allocated
    engine, *_ = deepspeed.initialize(model=model, ...)                    # each rank reads its own stage

Parameters are read from the folder's safetensors; a rank of a tensor-parallel stage reads its shard only. A model that
was built on the meta device from a configuration gets the values that transformers draws for such modules, from a seed
that depends on the name of the parameter. These values are the same under every plan, but differ from those of a model
that was built on a real device.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ds_hetero.errors import ModelError
from ds_hetero.frameworks.transformers.model.model_checks import pretrained_of
from ds_hetero.frameworks.transformers.protocols import PretrainedModel
from ds_hetero.frameworks.transformers.stages.stored_weights import StoredWeights
from ds_hetero.gradient_sync.shards import held_box

# The functions of transformers.initialization skip a tensor that has this attribute.
_SKIPS_INIT = "_is_hf_initialized"
_FOLDER_OF: WeakKeyDictionary[nn.Module, Path] = WeakKeyDictionary()


class _Place(NamedTuple):
    """A parameter on the meta device: the module that owns it, and its names there and in the uncut model."""

    module: nn.Module
    attribute: str
    name: str  # in the uncut model; the first of its names if the parameter is tied


def empty_model(folder: str | Path, **options: object) -> nn.Module:
    """Build a folder's causal language model on the meta device. Raises `ModelError`: no folder or safetensors.

    Args:
        folder: with config.json and safetensors, as ``save_pretrained`` writes it.
        options: of `transformers.AutoModelForCausalLM.from_config`, such as ``attn_implementation`` and ``dtype``.
    """
    import transformers

    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ModelError(
            f"{folder} has no config.json. Download the model first, for example with "
            "huggingface_hub.snapshot_download, and give its folder."
        )
    StoredWeights(path)  # refuses a folder without readable safetensors now, not at deepspeed.initialize
    config = transformers.AutoConfig.from_pretrained(path)
    options.setdefault("dtype", getattr(config, "dtype", None) or torch.get_default_dtype())
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, **options)
    _FOLDER_OF[model] = path
    return model


def is_on_meta(model: nn.Module) -> bool:
    """Return True if a model was built without weights. Raises `ModelError`: only a part was, or it has adapters."""
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if not on_meta:
        return False
    if getattr(model, "peft_config", None):
        raise ModelError(
            "a model with adapters cannot be built on the meta device, because PEFT draws the adapters' first values. "
            "Load the base model with its weights, and add the adapters to it."
        )
    if len(on_meta) < sum(1 for _ in model.parameters()):
        raise ModelError(
            f"only a part of {type(model).__name__} is on the meta device, such as {on_meta[0]}. Build the whole "
            "model there, or none of it."
        )
    return True


def fill_buffers(model: nn.Module, device: torch.device) -> None:
    """Compute a model's meta buffers by transformers' ``_init_weights``.

    Each buffer is first filled with a marker, such as NaN: a marker that is left shows a buffer that ``_init_weights``
    does not compute.

    Raises:
        ModelError: transformers does not compute one of the buffers.
    """
    pretrained = pretrained_of(model)
    for name, module in list(model.named_modules()):
        meta_buffers = {key: buffer for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        if not meta_buffers:
            continue
        for key, buffer in meta_buffers.items():
            module._buffers[key] = torch.full_like(buffer, _marker(buffer.dtype), device=device)
        _initialize(pretrained, module)
        for key in meta_buffers:
            filled = module._buffers[key]
            assert filled is not None
            if filled.numel() and bool(_is_marker(filled).any()):
                raise ModelError(
                    f"{type(pretrained).__name__} cannot be built on the meta device: transformers does not compute "
                    f"its buffer {name}.{key} again. Build it on a real device."
                )


def fill_parameters(model: nn.Module, names: Mapping[str, str], device: torch.device) -> None:
    """Give a stage's parameters memory and values.

    Args:
        model: without the parts of other stages; already sharded if the stage is tensor-parallel.
        names: the first name of each parameter, by each of its names. The folder stores a tied parameter under the
            first name.

    Raises:
        ModelError: the folder lacks a parameter, or has it with another shape.
    """
    pretrained = pretrained_of(model)
    folder = _FOLDER_OF.get(model)
    stored = None if folder is None else StoredWeights(folder)
    if stored is None:
        _expect_one_draw(pretrained)
    filled: dict[int, nn.Parameter] = {}  # by id of the meta parameter: a tied one is filled once, and stays tied
    for place in list(_places(model, names)):
        meta = place.module._parameters[place.attribute]
        assert meta is not None
        if id(meta) not in filled:
            meta_shard = meta.to_local() if isinstance(meta, DTensor) else meta
            local = torch.empty_like(meta_shard, device=device)
            with torch.no_grad():
                if stored is not None:
                    values = _read(stored, place.name, meta)
                else:
                    values = _draw(pretrained, place, meta, device)[_slices(meta)]
                local.copy_(values)
            filled[id(meta)] = _like(meta, local)
        place.module._parameters[place.attribute] = filled[id(meta)]
    if stored is not None:
        stored.close()


def _places(model: nn.Module, names: Mapping[str, str]) -> Iterator[_Place]:
    """Yield the places of all parameters on the meta device; a tied parameter at each of its places."""
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                name = f"{prefix}.{attribute}" if prefix else attribute
                yield _Place(module, attribute, names[name])


def _read(stored: StoredWeights, name: str, parameter: Tensor) -> Tensor:
    if name not in stored:
        raise ModelError(
            f"the folder of the model has no {name}, which this rank needs: names in the folder differ from those of "
            "the model's parameters. Load the model with from_pretrained, and give deepspeed.initialize that one."
        )
    if stored.shape(name) != tuple(parameter.shape):
        raise ModelError(
            f"{name} is {list(stored.shape(name))} in the folder and {list(parameter.shape)} in the model."
        )
    return stored.read(name, _slices(parameter))


def _draw(pretrained: PretrainedModel, place: _Place, meta: Tensor, device: torch.device) -> Tensor:
    """Return the values that transformers draws for a full parameter, from a seed that depends on its name."""
    module = place.module
    full = nn.Parameter(torch.empty(tuple(meta.shape), dtype=meta.dtype, device=device), requires_grad=False)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        # By name, so that a parameter gets the same values on whichever rank and in whichever order it is drawn.
        torch.manual_seed(torch.initial_seed() ^ zlib.crc32(place.name.encode()))
        former = module._parameters[place.attribute]
        module._parameters[place.attribute] = full
        try:
            _initialize(pretrained, module, place.attribute)
        finally:
            module._parameters[place.attribute] = former
    return full


def _initialize(pretrained: PretrainedModel, module: nn.Module, attribute: str | None = None) -> None:
    """Let transformers initialize a module's buffers, and of its parameters only ``attribute``; None for none."""
    skipped = [p for name, p in module._parameters.items() if p is not None and name != attribute]
    for parameter in skipped:
        setattr(parameter, _SKIPS_INIT, True)
    pretrained._init_weights(module)
    for parameter in skipped:
        delattr(parameter, _SKIPS_INIT)


def _expect_one_draw(pretrained: PretrainedModel) -> None:
    """Refuse an embedding whose drawn values would differ from those of the head that it is tied to.

    ``_init_weights`` sets the row of the padding token to zero in an embedding, but not in a linear head.
    """
    table = pretrained.get_input_embeddings()
    is_tied = pretrained.config.to_dict().get("tie_word_embeddings")
    if is_tied and getattr(table, "padding_idx", None) is not None:
        raise ModelError(
            f"{type(pretrained).__name__} cannot be built on the meta device without weights: its embedding, "
            "which has zeros at pad_token_id, is tied to its head, which is drawn without them. Set "
            "pad_token_id to None, or give the folder of its weights."
        )


def _slices(parameter: Tensor) -> tuple[slice, ...]:
    """Return the part of a full parameter that this rank has, one slice per dimension."""
    return tuple(slice(start, stop) for start, stop in held_box(parameter))


def _like(meta: nn.Parameter, local: Tensor) -> nn.Parameter:
    """Return a parameter with this rank's values, sharded like the one on the meta device."""
    value = local
    if isinstance(meta, DTensor):
        value = DTensor.from_local(
            local, meta.device_mesh, meta.placements, run_check=False, shape=meta.shape, stride=meta.stride()
        )
    return nn.Parameter(value, requires_grad=meta.requires_grad)


def _marker(dtype: torch.dtype) -> float | int | bool:
    """Return a value that no computed buffer has; for bool there is none, see `_is_marker`."""
    if dtype.is_floating_point:
        return float("nan")
    if dtype is torch.bool:
        return False
    return torch.iinfo(dtype).min


def _is_marker(buffer: Tensor) -> Tensor:
    """Return where a buffer still has the marker. Of a bool buffer, one cannot tell: everywhere, so it is refused."""
    if buffer.dtype.is_floating_point:
        return buffer.isnan()
    if buffer.dtype is torch.bool:
        return torch.ones_like(buffer)
    return buffer.eq(_marker(buffer.dtype))
