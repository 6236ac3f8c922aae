"""Cache of profiles, so that ranks are measured only once.

    content, is_new = measure_cached()        on every rank

A profile is a file. Its name is a fingerprint of all ranks' hosts, devices, memory and torch, and of data type, kernel,
head size and soft cap of the training. A profile of a busy machine is used, but not saved.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import astuple
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ds_hetero.cluster.files import cluster_from_dict
from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.atomic_writing import write_whole
from ds_hetero.common.private_files import expect_own_file, make_cache_folder
from ds_hetero.common.reading import JsonDict, JsonObject, read_file
from ds_hetero.common.text import bytes_text
from ds_hetero.errors import ClusterError, ConfigError
from ds_hetero.profiler.cluster_file import VERSION, RankFacts, cluster_content, fingerprint
from ds_hetero.profiler.device_probes import AttentionProbe, SdpaProbe
from ds_hetero.profiler.live_ranks import current_rank, describe_ranks, process_group
from ds_hetero.profiler.machine import busy_reason
from ds_hetero.profiler.measure import WINDOW_S, measure
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.devices import default_device, default_dtype

RTOL_PROFILE = 0.01  # numbers of a profile may differ so much from a new fit of its timings; never measured
MAX_PROFILE_BYTES = 2**28  # all-to-alls of 1,000 ranks take some 50 MB

logger = logging.getLogger(__name__)


def cache_folder() -> Path | None:
    """Return ``ds_hetero`` in the user's cache folder; None if the user has no home directory.

    The cache folder is ``XDG_CACHE_HOME`` if that is an absolute path; relative ones are ignored, as XDG specifies.
    """
    xdg_folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if xdg_folder.is_absolute():
        return xdg_folder / "ds_hetero"
    try:
        return Path.home() / ".cache" / "ds_hetero"
    except RuntimeError:  # a user id without a name, as in containers
        return None


def measure_cached(
    *,
    dtype: torch.dtype | None = None,
    attention: AttentionProbe | None = None,
    window_s: float = WINDOW_S,
    show_progress: bool = True,
    folder: Path | None = None,
) -> tuple[JsonDict, bool]:
    """Return the content of a cluster file that describes the live ranks, and whether it was measured just now.

    The content is read from the cache if the same ranks have been measured before. All ranks get the same content.

    Rank 0 reads and writes the cache. It ignores a damaged file with a warning, and replaces it. If the cache has no
    folder, or cannot be read or written, rank 0 warns and the ranks are measured. Profiles of busy machines are not
    saved.

    Args:
        dtype: data type of the probes; None for the device's default.
        attention: kernel to time; None for torch's own.
        window_s: seconds of a timing.
        show_progress: whether rank 0 shows a progress bar.
        folder: folder of the cache; None for `cache_folder`.

    Caller: every rank.
    """
    device = default_device()
    dtype = default_dtype(device) if dtype is None else dtype
    attention = SdpaProbe() if attention is None else attention
    with process_group(device):
        ranks = describe_ranks(device, dtype, attention)
        path = _profile_file(folder or cache_folder(), ranks) if current_rank() == 0 else None
        cached = on_all_ranks(lambda: None if path is None else read_profile(path, ranks))[0]
        if cached is not None:
            return cached, False
        content = measure(dtype=dtype, attention=attention, window_s=window_s, show_progress=show_progress)
        if path is not None and busy_reason(content["profile"]) is None:
            _write(path, content)
        return content, True


def describe_age(content: JsonObject, is_new: bool) -> str:
    """Return a text that says when a profile was measured, where it is kept, and how to measure anew; on rank 0.

    Args:
        content: first result of `measure_cached`.
        is_new: second result of `measure_cached`.
    """
    profile = content["profile"]
    if not is_new:
        measured_at = datetime.fromisoformat(profile["measured_at"])
        age_text = _ago(datetime.now(timezone.utc) - measured_at)
        return (
            f"as measured before, {age_text} ({measured_at:%Y-%m-%d %H:%M} UTC); after "
            '"ds-hetero profile --again" the next job measures anew'
        )
    if (reason := busy_reason(profile)) is not None:
        return (
            f"measured now on a busy machine: {reason}. The profile is used and not kept, so the next job measures "
            "anew; start it on an idle machine"
        )
    folder = cache_folder()
    if folder is None or not _is_saved(folder / f"{profile['fingerprint']}.json", profile["measured_at"]):
        return "measured now; the profile could not be kept, so the next job measures anew"
    return f"measured now; profiles are kept in {folder}"


def _is_saved(path: Path, measured_at: str) -> bool:
    """Return whether the file at ``path`` is the profile that was measured at ``measured_at``."""
    try:
        return measured_at in path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


def _ago(age: timedelta) -> str:
    """Return an age as text, such as ``3 days ago``, in the largest unit of which it has at least one."""
    for unit_s, unit in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        count = int(age.total_seconds() // unit_s)
        if count > 0:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "less than a minute ago"


def delete_profiles(folder: Path) -> int:
    """Delete the profiles in ``folder``; return their number. Raises `ClusterError`: one cannot be deleted."""
    paths = sorted(folder.glob("*.json"))
    try:
        for path in paths:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ClusterError(f"the profiles in {folder} cannot be deleted: {error}.") from error
    return len(paths)


def _profile_file(folder: Path | None, ranks: Sequence[RankFacts]) -> Path | None:
    """Return the path of the ranks' profile; None, with a warning, if there is no cache folder."""
    if folder is None:
        logger.warning("there is no home directory to keep profiles in; set XDG_CACHE_HOME to an absolute path")
        return None
    return folder / f"{fingerprint(ranks)}.json"


def read_profile(path: Path, ranks: Sequence[RankFacts]) -> JsonDict | None:
    """Read the cached profile of ``ranks``; return None if it is missing or unusable.

    A profile decides how a job trains: a file that others may have written, or that was changed by hand, is not used.
    """
    try:
        if not os.path.lexists(path):
            return None
        expect_own_file(path)
        content: JsonDict = read_file(path, "profile", ClusterError, max_bytes=MAX_PROFILE_BYTES)
        profile = content["profile"]
        if (profile["version"], profile["fingerprint"]) != (VERSION, fingerprint(ranks)):
            raise ValueError("it describes other ranks, or is of another release")
        if datetime.fromisoformat(profile["measured_at"]).tzinfo is None:
            raise ValueError("its date has no time zone")
        busy_reason(profile)
        cluster = cluster_from_dict(content)
        if cluster.num_ranks != len(ranks):
            raise ValueError("it has another number of ranks")
        _expect_numbers_of(ranks, cluster, profile.get("samples"))
    except ConfigError as error:
        logger.warning("not reading a profile that others may have written, and measuring anew: %s", error)
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        logger.warning("ignoring the damaged profile %s (%s: %s) and measuring anew", path, type(error).__name__, error)
        return None
    logger.info("using the profile %s, measured before on the same ranks", path)
    return content


def _expect_numbers_of(ranks: Sequence[RankFacts], cluster: Cluster, samples: Any) -> None:
    """Refuse numbers that contradict the ranks or the timings, as after a change by hand. Raises `ValueError`.

    Args:
        cluster: with the numbers of the profile.
        samples: timings by rank; empty in a profile without timings.
    """
    for rank, (device, facts) in enumerate(zip(cluster.devices, ranks, strict=True)):
        if not np.isclose(device.memory_bytes, facts.memory_bytes, rtol=RTOL_PROFILE):
            raise ValueError(
                f"it gives rank {rank} a memory of {bytes_text(device.memory_bytes)} GiB, and the rank has "
                f"{bytes_text(facts.memory_bytes)} GiB"
            )
    if not samples:
        return
    fitted_cluster = cluster_from_dict(cluster_content(ranks, samples))
    for name in ("peak_flops_per_s", "memory_bytes_per_s", "node_bytes_per_s"):
        if not np.allclose(getattr(cluster, name), getattr(fitted_cluster, name), rtol=RTOL_PROFILE):
            raise ValueError(f"its {name} is not what its own timings give")
    saved_efficiencies = np.array([astuple(device.efficiency) for device in cluster.devices])
    fitted_efficiencies = np.array([astuple(device.efficiency) for device in fitted_cluster.devices])
    if not np.allclose(saved_efficiencies, fitted_efficiencies, rtol=RTOL_PROFILE):
        raise ValueError("its efficiencies are not what its own timings give")


def _write(path: Path, content: JsonObject) -> None:
    """Write a profile completely or not at all, as another job may read it at any time."""
    try:
        make_cache_folder(path.parent)
        write_whole(path, json.dumps(content))
        logger.info("wrote the profile %s", path)
    except (OSError, ConfigError) as error:
        logger.warning("cannot keep the profile in %s: %s", path, error)
