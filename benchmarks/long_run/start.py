"""How a rank of the long run or of the soak starts: command line, records, DeepSpeed with the plugin, configuration."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.long_run.records import Records

SILENCE_S = 60.0  # a worker is killed after it: on a machine with much other work, one may not run for seconds
_AGENT = "DS_HETERO_ELASTIC_AGENT"  # environment variable: name of the node, a hyphen, number of the worker


def parser_of_rank() -> argparse.ArgumentParser:
    """Return a parser of the options that every rank gets."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=Path, required=True, help="file of the records of all ranks")
    parser.add_argument("--folder", type=Path, required=True, help="of the job")
    parser.add_argument("--local_rank", type=int, help="given by some launchers")
    return parser


def start_rank(events: Path) -> tuple[Records, Any]:
    """Record that this process is there, then import DeepSpeed, register ds_hetero, and connect to the other ranks.

    Args:
        events: file of the records.

    Returns:
        The records, and the handle of ds_hetero.
    """
    records = Records(events)
    records.add("spawn", pid=os.getpid(), agent=os.environ.get(_AGENT))

    import deepspeed

    import ds_hetero

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes a minute
    handle = ds_hetero.register()
    deepspeed.init_distributed("gloo")
    return records, handle


def own_node() -> str:
    """Return the name of this process's node."""
    return os.environ[_AGENT].rpartition("-")[0]


def configuration(section: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return ds_config.json for one row a step on ZeRO-2.

    Args:
        section: "heterogeneity".
        more: further keys.
    """
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **more,
        "heterogeneity": dict(section),
    }


def cluster_of(nodes: Sequence[str], cores: Sequence[float]) -> dict[str, Any]:
    """Return a cluster file: nodes of one device each, with links of one machine.

    Args:
        cores: emulated speed of every node, as a share of a core.
    """
    devices = {
        f"device-{node}": {
            "peak_tflops": 0.05 * share,
            "memory_gib": 4,
            "memory_bandwidth_gb_per_s": 10 * share,
        }
        for node, share in zip(nodes, cores, strict=True)
    }
    link = {"bandwidth_gb_per_s": 1, "latency_us": 50}
    return {
        "nodes": [{"name": node, "device": f"device-{node}", "count": 1, "link": link} for node in nodes],
        "network": link,
        "devices": devices,
    }
