"""Read the weights in a folder of transformers tensor by tensor, so that a rank reads only its own part."""

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
_DAMAGED = "If the file is damaged, download or save the model again."


class StoredWeights:
    """The tensors in a folder that ``save_pretrained`` wrote.

    Args:
        folder: contains one safetensors file, or several and an index.

    Raises:
        ModelError: the folder cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open_files: Entries = {}  # by name
        self._file_by_tensor = _read_file_by_tensor(folder)  # by the name of the tensor

    def __contains__(self, name: str) -> bool:
        return name in self._file_by_tensor

    def names_below(self, name: str) -> tuple[str, ...]:
        """Return the names of tensors that begin with a name and a dot, such as the constants of a packed weight."""
        return tuple(key for key in self._file_by_tensor if key.startswith(f"{name}."))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the full tensor, from the header of its file."""
        return tuple(self._slices(name).get_shape())

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Read a part of a tensor. Raises `ModelError`: the file is damaged.

        Args:
            part: one slice per dimension.
        """
        try:
            # safetensors cannot index a tensor without dimensions.
            tensor: Tensor = self._slices(name)[part] if part else self._file(name).get_tensor(name)
        except SafetensorError as error:
            raise ModelError(
                f"{name} cannot be read from {self._folder / self._file_by_tensor[name]}: {error}. {_DAMAGED}"
            ) from error
        return tensor

    def close(self) -> None:
        """Close the files."""
        self._open_files.clear()

    def _slices(self, name: str) -> Any:
        """Return safetensors' handle of a tensor, which reads only those parts that are indexed."""
        return self._file(name).get_slice(name)

    def _file(self, name: str) -> Any:
        """Return the open file of a tensor. Raises `ModelError`: it cannot be opened."""
        file = self._file_by_tensor[name]
        if file not in self._open_files:
            try:
                self._open_files[file] = safe_open(self._folder / file, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{self._folder / file} cannot be read: {error}. {_DAMAGED}") from error
        return self._open_files[file]


def _read_file_by_tensor(folder: Path) -> Mapping[str, str]:
    """Return the file of each tensor, from the index or from the header of the only file. Raises `ModelError`."""
    if (folder / _INDEX).is_file():
        content = read_file(folder / _INDEX, "index of weights", ModelError)
        files = content.get("weight_map") if isinstance(content, Mapping) else None
        if not isinstance(files, Mapping) or not all(isinstance(file, str) for file in files.values()):
            raise ModelError(
                f"{folder / _INDEX} has no weight_map from tensors to files. Download or save the model again."
            )
        missing = sorted({file for file in files.values() if not (folder / file).is_file()})
        if missing:
            raise ModelError(
                f"{folder} lacks {', '.join(missing[:3])}, which its index names. Download the model again."
            )
        return dict(files)
    if not (folder / _SINGLE).is_file():
        raise ModelError(
            f"{folder} contains neither {_SINGLE} nor {_INDEX}, but a stage reads its weights only from safetensors. "
            "Save the model with save_pretrained, or give deepspeed.initialize a model that has its weights."
        )
    try:
        with safe_open(folder / _SINGLE, framework="pt", device="cpu") as file:
            return dict.fromkeys(file.keys(), _SINGLE)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder / _SINGLE} cannot be read: {error}. {_DAMAGED}") from error
