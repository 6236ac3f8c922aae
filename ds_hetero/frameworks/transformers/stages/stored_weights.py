"""Read a folder of transformers' weights tensor by tensor, so that a rank reads only what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ds_hetero.common.reading import read_file
from ds_hetero.errors import ModelError
from ds_hetero.runtime.data.shards import Entries

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class StoredWeights:
    """Tensors of a folder that ``save_pretrained`` wrote. Raises `ModelError`: the folder cannot be read.

    Args:
        folder: with one safetensors file, or with several and an index.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: Entries = {}
        self._files = _files_of(folder)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the full tensor, read from the header of its file."""
        return tuple(self._slices(name).get_shape())

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Read a part of a tensor, one slice per dimension. Raises `ModelError`: the file is damaged."""
        try:
            # safetensors cannot index a tensor without dimensions.
            tensor: Tensor = self._slices(name)[part] if part else self._file(name).get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{name} cannot be read from {self._folder / self._files[name]}: {error}.") from error
        return tensor

    def close(self) -> None:
        """Close the files."""
        self._open.clear()

    def _slices(self, name: str) -> Any:
        """Return safetensors' handle of a tensor, which reads only the parts that are indexed."""
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
    """Map the name of each tensor to its file, by the index or by the header of the only file."""
    if (folder / _INDEX).is_file():
        content = read_file(folder / _INDEX, "index of weights", ModelError)
        files = content.get("weight_map") if isinstance(content, Mapping) else None
        if not isinstance(files, Mapping) or not all(isinstance(file, str) for file in files.values()):
            raise ModelError(
                f"{folder / _INDEX} has no weight_map of tensors and files. Download or save the model again."
            )
        missing = sorted({file for file in files.values() if not (folder / file).is_file()})
        if missing:
            raise ModelError(
                f"{folder} lacks {', '.join(missing[:3])}, which its index names. Download the model again."
            )
        return dict(files)
    if not (folder / _SINGLE).is_file():
        raise ModelError(
            f"{folder} holds neither {_SINGLE} nor {_INDEX}: a stage reads its weights from safetensors only. Save "
            "the model with save_pretrained, or give deepspeed.initialize a model with its weights."
        )
    try:
        with safe_open(folder / _SINGLE, framework="pt", device="cpu") as file:
            return dict.fromkeys(file.keys(), _SINGLE)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder / _SINGLE} cannot be read: {error}.") from error
