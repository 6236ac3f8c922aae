"""Measure the live ranks, and describe them as a cluster file.

    content = measure()                   on every rank, under any launcher; the same content everywhere

    1. devices     all ranks at once time matmuls, copies, layers and attention blocks
    2. links       pairs of ranks exchange messages, inside nodes and between them, alone and all at once;
                   groups run ragged all-to-alls
    3. fit         rank 0 turns the timings into numbers, by `ds_hetero.profiler.fit`

The raw timings stay in the file under ``profile``, with the errors of the fits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

import torch
import torch.distributed as dist

from ds_hetero.common.reading import JsonDict
from ds_hetero.errors import ClusterError
from ds_hetero.profiler.cluster_file import RankFacts, cluster_content, nodes_of
from ds_hetero.profiler.device_probes import (
    AttentionProbe,
    SdpaProbe,
    Timer,
    attention_probes,
    attention_table,
    layer_probes,
    matmul_probe,
    memory_probe,
)
from ds_hetero.profiler.link_probes import all_to_all_round, pair_round
from ds_hetero.profiler.live_ranks import current_rank, describe_ranks, process_group
from ds_hetero.profiler.machine import CpuWatch, quietness_of
from ds_hetero.profiler.message_overhead import message_overhead_s
from ds_hetero.profiler.pair_rounds import rounds_between, rounds_inside
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.devices import default_device, default_dtype

WINDOW_S = 0.15  # per timing; the measurement as a whole takes about half a minute
Advance = Callable[[str, float], None]
"""Shows the name of the current part, and adds its share of the measurement to the progress."""


def measure(
    *,
    dtype: torch.dtype | None = None,
    attention: AttentionProbe | None = None,
    window_s: float = WINDOW_S,
    show_progress: bool = True,
) -> JsonDict:
    """Measure all ranks; return the content of a cluster file.

    Args:
        dtype: data type of the probes; left out, `default_dtype` of the device.
        attention: kernel to time; left out, torch's own.

    Caller: every rank. Without a default process group, one is made from the launcher's environment and destroyed.

    Raises:
        ClusterError: on every rank, if a rank could not be measured.
    """
    device = default_device()
    dtype = default_dtype(device) if dtype is None else dtype
    attention = SdpaProbe() if attention is None else attention
    with process_group(device), _progress(show_progress and current_rank() == 0) as advance:
        ranks = describe_ranks(device, dtype, attention)
        measured_at = datetime.now(timezone.utc)
        watch = CpuWatch(ranks[current_rank()].host)
        samples = _time_devices(len(ranks), Timer(device, window_s), dtype, attention, advance)
        links = _time_links(ranks, device, advance) if len(ranks) > 1 else {}
        host_s = message_overhead_s(device) if len(ranks) > 1 else 0.0
        measurements = on_all_ranks(lambda: (links, host_s, watch.read()))
        uses = []
        for rank_samples, (rank_links, rank_host_s, use) in zip(samples, measurements, strict=True):
            rank_samples["links"] = rank_links
            rank_samples["message_overhead_s"] = rank_host_s
            uses.append(use)
        quietness = quietness_of(uses, [rank_samples["repeats"] for rank_samples in samples])
        circumstances = {"measured_at": measured_at.isoformat(timespec="seconds"), "machine": asdict(quietness)}
        advance("fitting", 1.0)

        def fit() -> JsonDict:
            if current_rank() > 0:
                return {}
            with _raise_naming_part("fitting"):
                return cluster_content(ranks, samples, circumstances)

        return on_all_ranks(fit)[0]


def _time_devices(
    num_ranks: int, timer: Timer, dtype: torch.dtype, attention: AttentionProbe, advance: Advance
) -> list[JsonDict]:
    """Time the devices of all ranks, part by part, all ranks at once; return the samples by rank.

    After every part the same matmul is timed, as ``repeats``: if its times differ, the machine is busy.
    """

    def with_progress(name: str, samples: Iterable[Any]) -> list[Any]:
        """Return the samples as a list, and show the progress after each."""
        sample_list = []
        for sample in samples:
            sample_list.append(sample)
            advance(name, 0.7 / 16)  # 6 layers and 10 attention blocks count as 0.7 of the measurement
        return sample_list

    parts: dict[str, Callable[[], Any]] = {
        "peak_flops_per_s": lambda: matmul_probe(timer, dtype),
        "memory_bytes_per_s": lambda: memory_probe(timer),
        "layers": lambda: with_progress("layers", layer_probes(timer, dtype)),
        "attention": lambda: with_progress("attention", attention_probes(timer, dtype, attention)),
        "attention_table": lambda: attention_table(timer, dtype, attention),
    }
    samples: list[JsonDict] = [{"repeats": []} for _ in range(num_ranks)]
    for name, part in parts.items():

        def time_part(name: str = name, part: Callable[[], Any] = part) -> Any:
            with _raise_naming_part(name):
                return part(), matmul_probe(timer, dtype)

        sample_and_repeat_by_rank = on_all_ranks(time_part, names_rank_0=True)
        for rank_samples, (sample, repeat) in zip(samples, sample_and_repeat_by_rank, strict=True):
            rank_samples[name] = sample
            rank_samples["repeats"].append(repeat)
    return samples


@contextmanager
def _raise_naming_part(part: str) -> Iterator[None]:
    """Raise an error of any kind as a `ClusterError` that names the part and the remedy."""
    try:
        yield
    except Exception as error:  # such as too little memory for a probe
        raise ClusterError(
            f"{part}: {type(error).__name__}: {error}. The live ranks cannot be measured; give a cluster file instead."
        ) from error


def _time_links(ranks: list[RankFacts], device: torch.device, advance: Advance) -> JsonDict:
    """Time this rank's links; return its samples by round. All ranks go through the same rounds in the same order."""
    ranks_by_node: Mapping[str, list[int]] = nodes_of(ranks)
    rank = dist.get_rank()
    node_ranks = list(ranks_by_node.values())
    samples: JsonDict = {}
    for name, pairs in (rounds_inside(node_ranks) | rounds_between(node_ranks)).items():
        advance(f"links {name}", 0.02)
        samples[name] = pair_round(pairs, rank, device, pairs_share_nic=name.endswith("at once"))
    groups = {}
    for node, members in ranks_by_node.items():
        groups[f"all-to-all inside {node}"] = (members, dist.new_group(members))
    if len(ranks_by_node) > 1:
        groups["all-to-all of all"] = (list(range(dist.get_world_size())), dist.group.WORLD)
    for name, (members, group) in groups.items():
        advance(name, 0.02)
        samples[name] = list(all_to_all_round(members, group, rank, device))
        if group is not dist.group.WORLD and rank in members:
            dist.destroy_process_group(group)  # frees its buffers for the model
    return samples


@contextmanager
def _progress(is_shown: bool) -> Iterator[Advance]:
    """Show a progress bar on stderr, if ``is_shown``."""
    if not is_shown:
        yield lambda part, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("measuring {task.description:32}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        task = progress.add_task("devices", total=1.0)
        yield lambda part, share: progress.update(task, description=part, advance=share)
