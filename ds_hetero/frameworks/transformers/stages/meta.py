"""Build models without weights, on torch's meta device, and give a stage of them its weights later.

    model = ds_hetero.empty_model("meta-llama/Llama-3.1-8B")     # a local folder; no weights are allocated
    engine, *_ = deepspeed.initialize(model=model, ...)          # each rank reads the weights of its own stage

Parameters are read from the folder's safetensors; a rank of a tensor-parallel stage reads its shard only. Weights of 4
bits are quantized by the rank that holds them, one after the other. Adapters are the exception: every rank has them all
from the beginning, since they are small and PEFT draws their values at once. A model that
was built on the meta device from a configuration gets the values that transformers draws for such modules, from a seed
that depends on the name of the parameter. These values are the same under every plan, but differ from those of a model
that was built on a real device.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ds_hetero.errors import ModelError
from ds_hetero.frameworks.transformers.model.model_checks import pretrained_of
from ds_hetero.frameworks.transformers.protocols import PretrainedModel
from ds_hetero.frameworks.transformers.stages.meta_adapters import name_without_adapters, with_adapters
from ds_hetero.frameworks.transformers.stages.packed_weights import quantize, quantize_layers, restore
from ds_hetero.frameworks.transformers.stages.stored_weights import StoredWeights
from ds_hetero.gradient_sync.shards import local_box
from ds_hetero.runtime.packed_weights import is_packed

# The functions of transformers.initialization skip a tensor that has this attribute.
_SKIP_MARK = "_is_hf_initialized"
_NEEDS_WEIGHTS = (
    "the first values of {what} come from weights of the model, which no rank has yet{reason}. Use adapters that are "
    "drawn, such as LoRA with init_lora_weights=True and without DoRA, or load the model with from_pretrained, and add "
    "the adapters to it."
)
_folder_by_model: WeakKeyDictionary[nn.Module, Path] = WeakKeyDictionary()


class _Place(NamedTuple):
    """Where a parameter on the meta device is: module, attribute, and name in the uncut model."""

    module: nn.Module  # that has the parameter
    attribute: str  # name of the parameter in this module, such as "weight"
    name: str  # name of the parameter in the uncut model; the first of its names if the parameter is tied


def empty_model(
    folder: str | Path, *, adapters: Any = None, quantization_config: Any = None, **options: object
) -> nn.Module:
    """Return the causal language model of a folder, without weights, on the meta device.

    Args:
        folder: contains config.json and safetensors, as ``save_pretrained`` writes them. The weights may be in 4 bits
            already.
        adapters: a configuration of PEFT, such as ``LoraConfig``, or a folder of saved adapters; the result is then the
            model that ``get_peft_model`` returns. None for no adapters.
        quantization_config: ``BitsAndBytesConfig(load_in_4bit=True, ...)`` to hold the layers' weights in 4 bits.
        options: of `transformers.AutoModelForCausalLM.from_config`, such as ``attn_implementation`` and ``dtype``.

    Raises:
        ModelError: the folder has no config.json, or no readable safetensors; the quantization is not that of 4 bits;
            or adapters need weights for their first values, which no rank has yet.
    """
    import transformers

    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ModelError(
            f"{folder} has no config.json. Download the model first, for example with "
            "huggingface_hub.snapshot_download, and give the path of its folder."
        )
    stored = StoredWeights(path)  # refuses a folder without readable safetensors now, not at deepspeed.initialize
    config = transformers.AutoConfig.from_pretrained(path)
    options.setdefault("dtype", getattr(config, "dtype", None) or torch.get_default_dtype())
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, **options)
    stored_settings = getattr(config, "quantization_config", None)
    if stored_settings is not None or quantization_config is not None:
        settings = stored_settings if stored_settings is not None else quantization_config
        quantize_layers(model, settings, is_stored_packed=stored_settings is not None)
    if adapters is not None:
        try:
            model = with_adapters(model, adapters)
        except (NotImplementedError, RuntimeError) as error:  # torch's, of a computation with a meta tensor
            raise ModelError(_NEEDS_WEIGHTS.format(what="these adapters", reason=f" ({error})")) from error
        _expect_no_values_from_weights(model, stored)
    _folder_by_model[model] = path
    return model


def _expect_no_values_from_weights(model: nn.Module, stored: StoredWeights) -> None:
    """Refuse adapters whose first values PEFT computes from weights. Raises `ModelError` with the first of them."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta and name_without_adapters(name) not in stored and not _is_tied(model, parameter, stored):
            raise ModelError(_NEEDS_WEIGHTS.format(what=name, reason=""))


def _is_tied(model: nn.Module, parameter: nn.Parameter, stored: StoredWeights) -> bool:
    """Whether a parameter has another name, too, under which the folder has it."""
    names = (name for name, other in model.named_parameters(remove_duplicate=False) if other is parameter)
    return any(name_without_adapters(name) in stored for name in names)


def is_on_meta(model: nn.Module) -> bool:
    """Return True if a model was built on the meta device.

    Raises:
        ModelError: only a part of the model was built there, or adapters that `empty_model` has not added.
    """
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if not on_meta:
        return False
    if getattr(model, "peft_config", None):
        if model in _folder_by_model:
            return True
        raise ModelError(
            "adapters that were added to a model on the meta device have lost the values that PEFT drew. Let "
            "ds_hetero.empty_model add them: empty_model(folder, adapters=LoraConfig(...))."
        )
    if len(on_meta) < sum(1 for _ in model.parameters()):
        raise ModelError(
            f"only a part of {type(model).__name__} is on the meta device, such as {on_meta[0]}. Build the whole "
            "model there, or none of it."
        )
    return True


def fill_buffers(model: nn.Module, device: torch.device) -> None:
    """Compute a model's meta buffers by transformers' ``_init_weights``.

    Each buffer is first filled with a marker, such as NaN. If a marker remains, ``_init_weights`` does not compute this
    buffer.

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
            buffer_now = module._buffers[key]
            assert buffer_now is not None
            if buffer_now.numel() and bool(_is_marker(buffer_now).any()):
                raise ModelError(
                    f"{type(pretrained).__name__} cannot be built on the meta device: transformers does not compute "
                    f"its buffer {name}.{key} again. Build it on a real device."
                )


def fill_parameters(model: nn.Module, names: Mapping[str, str], device: torch.device) -> None:
    """Give the parameters of a stage memory and values.

    Args:
        model: without the parts of other stages; already sharded if the stage is tensor-parallel.
        names: maps each name of a parameter to the first of its names; a tied parameter has several names. The folder
            has the parameter under its first name.

    Raises:
        ModelError: the folder lacks a parameter, or has it with another shape.
    """
    pretrained = pretrained_of(model)
    folder = _folder_by_model.get(model)
    stored_weights = None if folder is None else StoredWeights(folder)
    if stored_weights is None:
        _expect_one_draw(pretrained)
    for parameter in model.parameters():
        if not parameter.is_meta and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(device)  # adapters, which have their values
    # By id of the meta parameter, so that a tied parameter is filled once, and stays tied.
    new_parameters: dict[int, nn.Parameter] = {}
    for place in list(_list_places(model, names)):
        meta = place.module._parameters[place.attribute]
        assert meta is not None
        if id(meta) not in new_parameters and is_packed(meta):
            new_parameters[id(meta)] = _read_packed(stored_weights, place.name, meta, device)
        elif id(meta) not in new_parameters:
            meta_shard = meta.to_local() if isinstance(meta, DTensor) else meta
            local = torch.empty_like(meta_shard, device=device)
            with torch.no_grad():
                if stored_weights is not None:
                    values = _read_values(stored_weights, place.name, meta)
                else:
                    values = _draw_values(pretrained, place, meta, device)[_slices(meta)]
                local.copy_(values)
            new_parameters[id(meta)] = _parameter_like(meta, local)
        place.module._parameters[place.attribute] = new_parameters[id(meta)]
    if stored_weights is not None:
        stored_weights.close()


def _list_places(model: nn.Module, names: Mapping[str, str]) -> Iterator[_Place]:
    """Yield the places of all parameters on the meta device; a tied parameter at each of its places."""
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                name = f"{prefix}.{attribute}" if prefix else attribute
                yield _Place(module, attribute, names[name])


def _read_packed(
    stored: StoredWeights | None, name: str, placeholder: nn.Parameter, device: torch.device
) -> nn.Parameter:
    """Read a weight, and quantize it, unless the folder has it in 4 bits. Raises `ModelError`: see `_read_values`."""
    assert stored is not None, "layers are quantized by empty_model alone, which has a folder"
    constants = stored.names_below(name_without_adapters(name))
    if not constants:
        values = _read_values(stored, name, placeholder)
        return quantize(placeholder, values.to(placeholder.dtype), device)
    weight, *_ = tensors = [stored.read(key, ()) for key in (name_without_adapters(name), *constants)]
    return restore(placeholder, weight, dict(zip(constants, tensors[1:], strict=True)), name, device)


def _read_values(stored: StoredWeights, name: str, parameter: Tensor) -> Tensor:
    """Read this rank's part of a parameter. Raises `ModelError`: the folder lacks it, or has another shape."""
    name = name_without_adapters(name)
    if name not in stored:
        raise ModelError(
            f"the folder of the model has no {name}, which this rank needs. Names in the folder differ from those of "
            "the model's parameters. Load the model with from_pretrained, and give deepspeed.initialize that model."
        )
    if stored.shape(name) != tuple(parameter.shape):
        raise ModelError(
            f"{name} has shape {list(stored.shape(name))} in the folder and {list(parameter.shape)} in the model. Give "
            "empty_model the folder of this model."
        )
    return stored.read(name, _slices(parameter))


def _draw_values(pretrained: PretrainedModel, place: _Place, meta: Tensor, device: torch.device) -> Tensor:
    """Return the values that transformers draws for a full parameter, from a seed that depends on its name."""
    module = place.module
    full = nn.Parameter(torch.empty(tuple(meta.shape), dtype=meta.dtype, device=device), requires_grad=False)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        # The seed depends on the name, so that a parameter gets the same values on any rank and in any order of draws.
        torch.manual_seed(torch.initial_seed() ^ zlib.crc32(place.name.encode()))
        former = module._parameters[place.attribute]
        module._parameters[place.attribute] = full
        try:
            _initialize(pretrained, module, place.attribute)
        finally:
            module._parameters[place.attribute] = former
    return full


def _initialize(pretrained: PretrainedModel, module: nn.Module, attribute: str | None = None) -> None:
    """Let transformers initialize a module's buffers, and one of its parameters.

    Args:
        attribute: name of the parameter; None to initialize none.
    """
    skipped: list[nn.Parameter] = []
    for name, parameter in module._parameters.items():
        if parameter is not None and name != attribute:
            skipped.append(parameter)
    for parameter in skipped:
        setattr(parameter, _SKIP_MARK, True)
    pretrained._init_weights(module)
    for parameter in skipped:
        delattr(parameter, _SKIP_MARK)


def _expect_one_draw(pretrained: PretrainedModel) -> None:
    """Refuse an embedding with a padding token that is tied to the head. Raises `ModelError`.

    ``_init_weights`` sets the row of the padding token to zero in an embedding, but not in a linear head, so the two
    would draw different values.
    """
    table = pretrained.get_input_embeddings()
    is_tied = pretrained.config.to_dict().get("tie_word_embeddings")
    if is_tied and getattr(table, "padding_idx", None) is not None:
        raise ModelError(
            f"{type(pretrained).__name__} cannot be built on the meta device without weights: its embedding, "
            "which gets zeros at pad_token_id, is tied to its head, which gets none. Set pad_token_id to None, or give "
            "the folder of its weights."
        )


def _slices(parameter: Tensor) -> tuple[slice, ...]:
    """Return which part of a full parameter this rank holds, as one slice per dimension."""
    return tuple(slice(start, stop) for start, stop in local_box(parameter))


def _parameter_like(meta: nn.Parameter, local: Tensor) -> nn.Parameter:
    """Return a parameter with this rank's values, sharded like the one on the meta device."""
    value = local
    if isinstance(meta, DTensor):
        value = DTensor.from_local(
            local, meta.device_mesh, meta.placements, run_check=False, shape=meta.shape, stride=meta.stride()
        )
    return nn.Parameter(value, requires_grad=meta.requires_grad)


def _marker(dtype: torch.dtype) -> float | int | bool:
    """Return a value that no computed buffer has. For bool there is no such value, see `_is_marker`."""
    if dtype.is_floating_point:
        return float("nan")
    if dtype is torch.bool:
        return False
    return torch.iinfo(dtype).min


def _is_marker(buffer: Tensor) -> Tensor:
    """Return True where a buffer still has the marker.

    In a bool buffer, a marker cannot be told from a value. It is True everywhere, so that such a buffer is refused.
    """
    if buffer.dtype.is_floating_point:
        return buffer.isnan()
    if buffer.dtype is torch.bool:
        return torch.ones_like(buffer)
    return buffer.eq(_marker(buffer.dtype))
