"""Where the files that come with ds_hetero are."""

from __future__ import annotations

from pathlib import Path

__all__ = ["config_dir"]


def config_dir() -> Path:
    """The folder of ready ds_config.json files, ``clusters/`` and ``models/``: ds_configs/ of the repository.

    A clone has it as the link ds_hetero/configs, an installed wheel as a folder in the same place.
    """
    return Path(__file__).parents[1] / "configs"
