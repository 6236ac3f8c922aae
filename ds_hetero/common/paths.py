"""Where the files that come with ds_hetero are."""

from __future__ import annotations

from pathlib import Path


def config_dir() -> Path:
    """The folder of ready ds_config.json files, ``clusters/`` and ``models/``: ds_configs/ of the repository.

    A clone has it as the link ds_hetero/configs, an installed wheel as a folder in the same place.
    """
    return Path(__file__).parents[1] / "configs"


def is_file(path: str | Path) -> bool:
    """Whether there is such a file; no for a name that no file can have, too long or with a NUL."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: str | Path) -> bool:
    """Whether there is such a folder; see `is_file`."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False


def is_pipe(path: str | Path) -> bool:
    """Whether there is such a pipe, as a shell's ``<(command)`` makes it; see `is_file`."""
    try:
        return Path(path).is_fifo()
    except (OSError, ValueError):
        return False
