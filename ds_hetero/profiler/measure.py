"""Measure the live ranks and write what they are as a cluster file.

    file = measure()                      on every rank, under any launcher; the same content everywhere
    file, fresh = measure_cached()        the same, from a cache if these very ranks have been measured before

Devices run layers, attention blocks and copies, all ranks at once; then pairs of ranks exchange messages inside nodes
and between them, alone and all at once, and groups exchange ragged all-to-alls. `ds_hetero.profiler.fit` turns timings
into numbers. The raw timings stay in the file under ``profile``, with the errors of the fits.

This module and its probes are the only part of the planning half that imports torch.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_hetero.cluster.catalogue import catalogue_name
from ds_hetero.cluster.files import cluster_from_dict
from ds_hetero.errors import ClusterError
from ds_hetero.profiler.cluster_file import VERSION, RankFacts, cluster_content, fingerprint, nodes_of
from ds_hetero.profiler.device_probes import (
    AttentionProbe,
    SdpaProbe,
    Timer,
    attention_probes,
    layer_probes,
    matmul_probe,
    memory_probe,
)
from ds_hetero.profiler.link_probes import all_to_all_round, pair_round
from ds_hetero.profiler.link_rounds import rounds_between, rounds_inside

__all__ = ["cache_folder", "default_device", "default_dtype", "measure", "measure_cached"]

logger = logging.getLogger(__name__)


def measure(
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    attention: AttentionProbe | None = None,
    window_s: float = 0.15,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Measure devices and links of all ranks; about half a minute.

    Args:
        device: of this rank; left out, its accelerator, or the CPU where there is none.
        dtype: to measure in; left out, bfloat16 on accelerators (float16 where they lack it), float32 on CPUs.
        attention: the kernel to time, torch's own if left out.
        window_s: seconds per timing.
        show_progress: a bar on rank 0's stderr.

    Returns:
        the content of a cluster file, the same on every rank.

    Caller: every rank. Without a default process group one is made from the launcher's environment, for the duration.
    """
    device = default_device() if device is None else device
    dtype = default_dtype(device) if dtype is None else dtype
    with _process_group(device):
        attention = SdpaProbe() if attention is None else attention
        ranks = _describe_all(device, dtype, attention)
        return _measure(ranks, device, dtype, attention, window_s, show_progress)


def measure_cached(
    *, folder: Path | None = None, refresh: bool = False, **settings: Any
) -> tuple[dict[str, Any], bool]:
    """`measure`, or its result from the last time that these very ranks were measured.

    Rank 0 reads and writes the cache: one file per fingerprint of all ranks' hosts, devices, memory, torch and data
    type. A damaged file is ignored with a warning and written anew.

    Args:
        folder: of the cache; left out, ``ds_hetero`` in the user's cache folder.
        refresh: measure even if there is a cached result.
        settings: see `measure`.

    Returns:
        the cluster file's content and whether it was measured just now, the same on every rank.
    """
    device = settings.get("device") or default_device()
    dtype = settings.get("dtype") or default_dtype(device)
    with _process_group(device):
        ranks = _describe_all(device, dtype, settings.get("attention") or SdpaProbe())
        path = (folder or cache_folder()) / f"{fingerprint(ranks)}.json"
        found = _share(_read_cache(path, ranks) if _rank() == 0 and not refresh else None)
        if found is not None:
            return found, False
        content = measure(**settings)
        if _rank() == 0:
            _write_cache(path, content)
        return content, True


# --- measuring --------------------------------------------------------------------------------------


def _measure(
    ranks: Sequence[RankFacts],
    device: torch.device,
    dtype: torch.dtype,
    attention: AttentionProbe,
    window_s: float,
    show_progress: bool,
) -> dict[str, Any]:
    nodes = nodes_of(ranks)
    with _progress(show_progress and _rank() == 0) as advance:
        mine, problem = _time_device(Timer(device, window_s), dtype, attention, advance)
        _expect_measured(_gather(problem))
        mine["links"] = _time_links(nodes, device, advance) if len(ranks) > 1 else {}
        advance("fitting", 1.0)
        samples = _gather(mine)
    content: dict[str, Any] = {}
    problem = None
    if _rank() == 0:
        try:
            content = cluster_content(ranks, samples)
        except Exception as error:  # of any kind: the other ranks wait for the content
            problem = f"fitting: {type(error).__name__}: {error}"
    problem, content = _share((problem, content))
    _expect_measured([problem])
    return content


def _time_device(
    timer: Timer, dtype: torch.dtype, attention: AttentionProbe, advance: Any
) -> tuple[dict[str, Any], str | None]:
    """This rank's samples, and what went wrong; the other ranks are met before every part all the same."""

    def counted(name: str, samples: Iterable[Any]) -> list[Any]:
        found = []
        for sample in samples:
            found.append(sample)
            advance(name, 0.7 / 16)
        return found

    parts: dict[str, Callable[[], Any]] = {
        "peak_flops_per_s": lambda: matmul_probe(timer, dtype),
        "memory_bytes_per_s": lambda: memory_probe(timer),
        "layers": lambda: counted("layers", layer_probes(timer, dtype)),
        "attention": lambda: counted("attention", attention_probes(timer, dtype, attention)),
    }
    found: dict[str, Any] = {}
    problem = None
    for name, part in parts.items():
        _barrier()
        if problem is None:
            try:
                found[name] = part()
            except Exception as error:  # of any kind, such as memory that does not suffice
                problem = f"{name}: {type(error).__name__}: {error}"
    return found, problem


def _expect_measured(problems: Sequence[str | None]) -> None:
    """Refuse on every rank what failed on one.

    Args:
        problems: by rank.

    Raises:
        ClusterError: names the ranks.
    """
    failed = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem is not None]
    if failed:
        raise ClusterError(
            f"the live ranks cannot be measured; give a cluster file instead. What failed is {'; '.join(failed)}."
        )


def _time_links(nodes: Mapping[str, Sequence[int]], device: torch.device, advance: Any) -> dict[str, Any]:
    """This rank's samples by round; all ranks go through the same rounds."""
    rank, members = dist.get_rank(), list(nodes.values())
    found: dict[str, Any] = {}
    for name, pairs in (rounds_inside(members) | rounds_between(members)).items():
        advance(f"links {name}", 0.02)
        found[name] = pair_round(pairs, rank, device)
    groups = {f"all-to-all inside {node}": (ranks, dist.new_group(list(ranks))) for node, ranks in nodes.items()}
    if len(members) > 1:
        groups["all-to-all of all"] = (list(range(dist.get_world_size())), dist.group.WORLD)
    for name, (ranks, group) in groups.items():
        advance(name, 0.02)
        found[name] = list(all_to_all_round(ranks, group, rank, device))
        if group is not dist.group.WORLD and rank in ranks:
            dist.destroy_process_group(group)  # its buffers are the model's now
    return found


# --- ranks ------------------------------------------------------------------------------------------


def _describe_all(device: torch.device, dtype: torch.dtype, attention: AttentionProbe) -> list[RankFacts]:
    """Facts of all ranks; CPU ranks of a host share its memory."""
    ranks: list[RankFacts] = _gather(_describe(device, dtype, attention))
    on_host = Counter(rank.host for rank in ranks if rank.device == "CPU")
    return [replace(r, memory_bytes=r.memory_bytes // on_host[r.host]) if r.device == "CPU" else r for r in ranks]


def _describe(device: torch.device, dtype: torch.dtype, attention: AttentionProbe) -> RankFacts:
    if device.type == "cpu":
        name, memory = "CPU", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        properties = torch.cuda.get_device_properties(device)
        memory = properties.total_memory
        name = catalogue_name(properties.name, memory) or properties.name
    return RankFacts(
        node=f"{socket.gethostname()} {_network_namespace()}",
        host=socket.gethostname(),
        device=name,
        memory_bytes=memory,
        torch=torch.__version__,
        dtype=str(dtype).removeprefix("torch."),
        attention=attention.name,
    )


def _network_namespace() -> str:
    """Ranks of one host in different network namespaces (containers) talk over the network like different hosts."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def default_device() -> torch.device:
    """This rank's accelerator; the CPU where there is none, or where DeepSpeed is told to use it."""
    if not torch.cuda.is_available() or os.environ.get("DS_ACCELERATOR") == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))


def default_dtype(device: torch.device) -> torch.dtype:
    """What is trained in there: bfloat16, float16 where the accelerator lacks it, float32 on CPUs."""
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


# --- all ranks together -----------------------------------------------------------------------------


@contextmanager
def _process_group(device: torch.device) -> Iterator[None]:
    """The default process group, made and destroyed here if there is none and the launcher's variables are set."""
    if dist.is_initialized() or "RANK" not in os.environ:
        yield
        return
    if device.type != "cpu":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _gather(value: Any) -> list[Any]:
    """``value`` of every rank, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _share(value: Any) -> Any:
    """Rank 0's ``value`` on every rank."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


@contextmanager
def _progress(shown: bool) -> Iterator[Any]:
    """A bar on stderr; calling it names what comes next and adds to what is done, out of 1."""
    if not shown:
        yield lambda what, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("measuring {task.description:32}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        task = progress.add_task("devices", total=1.0)
        yield lambda what, share: progress.update(task, description=what, advance=share)


# --- cache ------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """``ds_hetero`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds_hetero"


def _read_cache(path: Path, ranks: Sequence[RankFacts]) -> dict[str, Any] | None:
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


def _write_cache(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all: another job may read at any moment."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(file.name, path)
        logger.info("wrote the profile %s", path)
    except OSError as error:
        logger.warning("cannot keep the profile in %s: %s", path, error)
