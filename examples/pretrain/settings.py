"""Command line and ds_config.json of the two training scripts, so that both do the same training."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from ds_hetero.values.splits import share
from llama import KV_HEADS, PEAK_LEARNING_RATE, QUERY_HEADS, VOCAB_SIZE

WARM_UP_SHARE = 0.1  # of the steps
LOWEST_LEARNING_RATE = 0.1  # of the peak, at the end of the cosine
LOG_EVERY = 10  # steps


def arguments(description: str | None) -> argparse.Namespace:
    """Parse the command line that both scripts have, and add ``warm_up_steps``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/pretrain/run"), help="folder of all that is written")
    parser.add_argument("--size", choices=VOCAB_SIZE, default="small", help="of the model")
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps, of one row each")
    parser.add_argument("--row-tokens", type=int, default=1024)
    parser.add_argument("--rows", type=int, help="of an epoch; left out: all that the documents fill")
    parser.add_argument("--learning-rate", type=float, help="after the warm-up; left out: that of the size")
    parser.add_argument("--eval-every", type=int, default=100, help="steps")
    parser.add_argument("--eval-rows", type=int, default=16, help="held-out rows of an evaluation")
    parser.add_argument("--save-every", type=int, default=250, help="steps")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint in --out")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the rows and their order")
    parser.add_argument("--ds-config", type=Path, default=Path(__file__).with_name("ds_config.json"))
    parser.add_argument("--speeds", help="of the ranks, such as 2,1,1: tokens and heads are shared in proportion")
    parser.add_argument("--local_rank", type=int, help="given by some launchers; the environment says it too")
    args = parser.parse_args()
    args.learning_rate = args.learning_rate or PEAK_LEARNING_RATE[args.size]
    args.warm_up_steps = max(1, round(WARM_UP_SHARE * args.steps))
    return args


def ds_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the content of --ds-config with what the command line adds: shares of the ranks, where to report.

    An elastic job starts the script anew with another WORLD_SIZE when ranks are lost or join. Then the first speeds of
    the list count.
    """
    config = json.loads(args.ds_config.read_text())
    section = config["heterogeneity"]
    section.update(seq_len=args.row_tokens, report=str(args.out))
    if args.speeds:
        speeds = [float(speed) for speed in args.speeds.split(",")]
        section["schedule"] = uneven_schedule(speeds[: int(os.environ.get("WORLD_SIZE", "1"))])
    return config


def uneven_schedule(speeds: list[float]) -> dict[str, Any]:
    """Return a schedule of one group, whose ranks have tokens and heads in proportion to their speeds."""
    queries_per_kv_head = QUERY_HEADS // KV_HEADS
    heads = [queries_per_kv_head * kv_heads for kv_heads in share(KV_HEADS, speeds)]
    return {
        "version": 1,
        "num_heads": QUERY_HEADS,
        "num_kv_heads": KV_HEADS,
        "groups": [{"ranks": list(range(len(speeds))), "tokens": speeds, "heads": heads}],
    }


def has_tensorboard() -> bool:
    """True if the package tensorboard is installed."""
    return importlib.util.find_spec("tensorboard") is not None
