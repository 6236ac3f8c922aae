"""Models without weights, on torch's meta device, and the weights of one stage for them.

    model = ds_hetero.empty_model("meta-llama/Llama-3.1-8B")     # a folder: nothing is allocated
    engine, *_ = deepspeed.initialize(model=model, ...)                    # every rank reads what it holds

Parameters are read from the folder's safetensors, of tensor-parallel stages the shard alone. A model that was built on
the meta device from a configuration gets the values that transformers draws for such modules, from a seed by the name
of the parameter: they are the same under every plan, though not those of a model that was built whole.

The weights of a folder of transformers, read tensor by tensor: a rank reads what it holds and no more.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ds_hetero.common.reading import read_file
from ds_hetero.errors import ModelError
from ds_hetero.frameworks.transformers.model.model_checks import pretrained_of
from ds_hetero.frameworks.transformers.protocols import PretrainedModel
from ds_hetero.gradient_sync.shards import held_box
from ds_hetero.runtime.data.shards import Entries

_FILLED = "_is_hf_initialized"  # what transformers' initialization leaves alone
_FOLDERS: WeakKeyDictionary[nn.Module, Path] = WeakKeyDictionary()


class _Place(NamedTuple):
    """Where a parameter is in a model."""

    module: nn.Module
    attribute: str
    name: str  # of the parameter in the whole model, the first one where it is tied


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
            f"{folder} is no folder with a config.json. Download the model first, such as with "
            "huggingface_hub.snapshot_download, and give its folder."
        )
    StoredWeights(path)
    config = transformers.AutoConfig.from_pretrained(path)
    options.setdefault("dtype", getattr(config, "dtype", None) or torch.get_default_dtype())
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, **options)
    _FOLDERS[model] = path
    return model


def is_on_meta(model: nn.Module) -> bool:
    """Whether a model was built without weights. Raises `ModelError`: a part of it was; or it has adapters."""
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if not on_meta:
        return False
    if getattr(model, "peft_config", None):
        raise ModelError(
            "a model with adapters cannot be built on the meta device, since their first values are PEFT's to draw. "
            "Load the base model whole, and add the adapters to it."
        )
    if len(on_meta) < sum(1 for _ in model.parameters()):
        raise ModelError(
            f"a part of {type(model).__name__} is on the meta device ({on_meta[0]}), another is not. Build the whole "
            "model there, or none of it."
        )
    return True


def fill_buffers(model: nn.Module, device: torch.device) -> None:
    """Compute a model's meta buffers as transformers does. Raises `ModelError`: transformers does not know one."""
    pretrained = pretrained_of(model)
    for name, module in list(model.named_modules()):
        empty = [key for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for key in empty:
            buffer = module._buffers[key]
            assert buffer is not None
            module._buffers[key] = torch.full_like(buffer, _nothing(buffer.dtype), device=device)
        if not empty:
            continue
        _init(pretrained, module)
        for key in empty:
            filled = module._buffers[key]
            assert filled is not None
            if filled.numel() and bool(_is_nothing(filled).any()):
                raise ModelError(
                    f"{type(pretrained).__name__} cannot be built on the meta device: transformers does not compute "
                    f"its buffer {name}.{key} again. Build it whole."
                )


def fill_parameters(model: nn.Module, names: Mapping[str, str], device: torch.device) -> None:
    """Give a stage's parameters memory and values. Raises `ModelError`: the folder lacks one, or has another shape.

    Args:
        model: of which parts of other stages are taken out, and tensor-parallel stages are cut.
        names: by name of a parameter in the model, its first one, under which the folder knows it.
    """
    pretrained = pretrained_of(model)
    folder = _FOLDERS.get(model)
    stored = None if folder is None else StoredWeights(folder)
    if stored is None:
        _expect_one_draw(pretrained)
    made: dict[int, nn.Parameter] = {}
    for place in list(_places(model, names)):
        before = place.module._parameters[place.attribute]
        assert before is not None
        if id(before) not in made:
            local = torch.empty_like(before.to_local() if isinstance(before, DTensor) else before, device=device)
            with torch.no_grad():
                if stored is not None:
                    local.copy_(_read(stored, place.name, before))
                else:
                    local.copy_(_draw(pretrained, place, before, device)[_slices(before)])
            made[id(before)] = _like(before, local)
        place.module._parameters[place.attribute] = made[id(before)]
    if stored is not None:
        stored.close()


def _places(model: nn.Module, names: Mapping[str, str]) -> Iterator[_Place]:
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                yield _Place(module, attribute, names[f"{prefix}.{attribute}" if prefix else attribute])


def _read(stored: StoredWeights, name: str, parameter: Tensor) -> Tensor:
    if name not in stored:
        raise ModelError(
            f"the folder of the model has no {name}, which this rank holds; its names are not those of the model's "
            "parameters. Load it with from_pretrained, and give deepspeed.initialize the model with its weights."
        )
    if stored.shape(name) != tuple(parameter.shape):
        raise ModelError(
            f"{name} is {list(stored.shape(name))} in the folder and {list(parameter.shape)} in the model."
        )
    return stored.read(name, _slices(parameter))


def _draw(pretrained: PretrainedModel, place: _Place, before: Tensor, device: torch.device) -> Tensor:
    """The values that transformers would draw for a whole parameter, from a seed by its name."""
    module = place.module
    whole = nn.Parameter(torch.empty(tuple(before.shape), dtype=before.dtype, device=device), requires_grad=False)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(torch.initial_seed() ^ zlib.crc32(place.name.encode()))
        kept, module._parameters[place.attribute] = module._parameters[place.attribute], whole
        try:
            _init(pretrained, module, place.attribute)
        finally:
            module._parameters[place.attribute] = kept
    return whole


def _init(pretrained: PretrainedModel, module: nn.Module, attribute: str | None = None) -> None:
    """Let transformers initialize a module: the parameter of that name, or buffers alone."""
    others = [p for name, p in module._parameters.items() if p is not None and name != attribute]
    for parameter in others:
        setattr(parameter, _FILLED, True)
    pretrained._init_weights(module)
    for parameter in others:
        delattr(parameter, _FILLED)


def _expect_one_draw(pretrained: PretrainedModel) -> None:
    """Refuse an embedding whose first values differ from those of the head that it is tied to."""
    table = pretrained.get_input_embeddings()
    is_tied = pretrained.config.to_dict().get("tie_word_embeddings")
    if is_tied and getattr(table, "padding_idx", None) is not None:
        raise ModelError(
            f"{type(pretrained).__name__} cannot be built on the meta device without weights: its embedding has zeros "
            "at pad_token_id, and is tied to a head that is drawn without them. Set pad_token_id to None, or give the "
            "folder of its weights."
        )


def _slices(parameter: Tensor) -> tuple[slice, ...]:
    """Of a whole parameter, what this rank has of it."""
    return tuple(slice(start, stop) for start, stop in held_box(parameter))


def _like(before: nn.Parameter, local: Tensor) -> nn.Parameter:
    """A parameter with a rank's values, cut as the one on the meta device was."""
    value = local
    if isinstance(before, DTensor):
        cut = before.device_mesh, before.placements
        value = DTensor.from_local(local, *cut, run_check=False, shape=before.shape, stride=before.stride())
    return nn.Parameter(value, requires_grad=before.requires_grad)


def _nothing(dtype: torch.dtype) -> float | int | bool:
    """A value that no buffer has."""
    return float("nan") if dtype.is_floating_point else False if dtype is torch.bool else torch.iinfo(dtype).min


def _is_nothing(buffer: Tensor) -> Tensor:
    if buffer.dtype.is_floating_point:
        return buffer.isnan()
    return buffer.eq(_nothing(buffer.dtype)) if buffer.dtype is not torch.bool else torch.ones_like(buffer)


_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class StoredWeights:
    """Tensors in a folder of ``save_pretrained``, in files with an index. Raises `ModelError`: it cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: Entries = {}
        self._files = _files_of(folder)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, whole."""
        return tuple(self._slices(name).get_shape())

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Read a part, a slice per dimension, of a tensor on the disk. Raises `ModelError`: it is damaged."""
        try:
            tensor: Tensor = self._slices(name)[part] if part else self._file(name).get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{name} cannot be read from {self._folder / self._files[name]}: {error}.") from error
        return tensor

    def close(self) -> None:
        """Close the files."""
        self._open.clear()

    def _slices(self, name: str) -> Any:
        return self._file(name).get_slice(name)

    def _file(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._open:
            try:
                self._open[file] = safe_open(self._folder / file, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{self._folder / file} cannot be read: {error}.") from error
        return self._open[file]


def _files_of(folder: Path) -> Mapping[str, str]:
    """By name of a tensor, the file that holds it."""
    if (folder / _INDEX).is_file():
        content = read_file(folder / _INDEX, "index of weights", ModelError)
        files = content.get("weight_map") if isinstance(content, Mapping) else None
        if not isinstance(files, Mapping) or not all(isinstance(file, str) for file in files.values()):
            raise ModelError(
                f"{folder / _INDEX} has no weight_map of tensors and files. Download or save the model again."
            )
        if missing := sorted({file for file in files.values() if not (folder / file).is_file()}):
            raise ModelError(
                f"{folder} lacks {', '.join(missing[:3])}, which its index names. Download the model again."
            )
        return dict(files)
    if not (folder / _SINGLE).is_file():
        raise ModelError(
            f"{folder} holds neither {_SINGLE} nor {_INDEX}: weights are read by stage from safetensors alone. Save "
            "the model with save_pretrained, or give deepspeed.initialize a model with its weights."
        )
    try:
        with safe_open(folder / _SINGLE, framework="pt", device="cpu") as file:
            return dict.fromkeys(file.keys(), _SINGLE)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder / _SINGLE} cannot be read: {error}.") from error
