"""The cache of profiles: ranks that have been measured once are not measured again.

    content, fresh = measure_cached()        on every rank

One file per fingerprint of all ranks' hosts, devices, memory, torch and data type.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ds_hetero.cluster.files import cluster_from_dict
from ds_hetero.profiler.cluster_file import VERSION, RankFacts, fingerprint
from ds_hetero.profiler.device_probes import AttentionProbe, SdpaProbe
from ds_hetero.profiler.measure import WINDOW_S, measure
from ds_hetero.profiler.ranks import describe_ranks, own_rank, process_group
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.devices import default_device, default_dtype

__all__ = ["cache_folder", "measure_cached"]

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """``ds_hetero`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds_hetero"


def measure_cached(
    *,
    dtype: torch.dtype | None = None,
    attention: AttentionProbe | None = None,
    window_s: float = WINDOW_S,
    show_progress: bool = True,
    folder: Path | None = None,
) -> tuple[dict[str, Any], bool]:
    """Measure the live ranks, or return the result from the last time that these very ranks were measured.

    Rank 0 reads and writes the cache. A damaged file is ignored with a warning and written anew.

    Args:
        dtype: see `measure`.
        attention: see `measure`.
        window_s: see `measure`.
        show_progress: see `measure`.
        folder: of the cache; `cache_folder` if left out.

    Returns:
        The content of a cluster file and whether it was measured just now, the same on every rank.

    Caller: every rank.
    """
    device = default_device()
    dtype = default_dtype(device) if dtype is None else dtype
    attention = SdpaProbe() if attention is None else attention
    with process_group(device):
        ranks = describe_ranks(device, dtype, attention)
        path = (folder or cache_folder()) / f"{fingerprint(ranks)}.json"
        cached = on_all_ranks(lambda: _read(path, ranks) if own_rank() == 0 else None)[0]
        if cached is not None:
            return cached, False
        content = measure(dtype=dtype, attention=attention, window_s=window_s, show_progress=show_progress)
        if own_rank() == 0:
            _write(path, content)
        return content, True


def _read(path: Path, ranks: Sequence[RankFacts]) -> dict[str, Any] | None:
    """Read a cached profile of ``ranks``; None where there is none that can be used."""
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        profile = content["profile"]
        if (profile["version"], profile["fingerprint"]) != (VERSION, fingerprint(ranks)):
            raise ValueError("it is of other ranks")
        if cluster_from_dict(content).num_ranks != len(ranks):
            raise ValueError("it has another number of ranks")
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("ignoring the damaged profile %s (%s: %s) and measuring anew", path, type(error).__name__, error)
        return None
    logger.info("using the profile %s, measured before on the same ranks", path)
    return content


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a profile completely or not at all: another job may read at any moment."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(file.name, path)
        logger.info("wrote the profile %s", path)
    except OSError as error:
        logger.warning("cannot keep the profile in %s: %s", path, error)
