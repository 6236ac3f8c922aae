"""``ds-hetero profile``: measures devices and links of the live ranks, and writes a cluster file.

torchrun --nproc-per-node 8 -m ds_hetero.cli profile --out cluster.yaml
deepspeed --num_gpus 8 --module ds_hetero.cli profile --out cluster.yaml
ds-hetero profile --again        # have the next job with "cluster": "measure" measure anew
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import click

from ds_hetero.cli.options import AS_JSON, FILE
from ds_hetero.cli.printing import check_out, print_lines
from ds_hetero.cluster.file_values import check_cluster_file, write_cluster
from ds_hetero.common.extras import require
from ds_hetero.common.reading import shortened
from ds_hetero.common.terminal import fitted_text, terminal_width
from ds_hetero.errors import ClusterError

DTYPES = ("bfloat16", "float16", "float32")


@click.command
@click.option("--out", type=FILE, help="Cluster file to write, .yaml or .json.")
@click.option("--dtype", help="bfloat16, float16 or float32; left out, what is usual on the device.")
@click.option("--window-s", type=float, default=0.15, help="Seconds per timing.")
@click.option("--again", is_flag=True, help='Have the next job with "cluster": "measure" measure anew; works alone.')
@AS_JSON
def profile(out: Path | None, dtype: str | None, window_s: float, again: bool, as_json: bool) -> None:
    """Measure devices and links of the live ranks; run it under the launcher that will train."""
    require("torch", purpose="ds-hetero profile")
    if again:
        _delete_cached_profiles()
        if out is None:
            return
    if out is None:
        raise ClusterError("--out is missing. Name the cluster file to write, .yaml or .json.")
    check_cluster_file("--out", out)
    if dtype is not None and dtype not in DTYPES:
        raise ClusterError(f"--dtype must be one of {', '.join(DTYPES)}, got {shortened(dtype)}.")
    if not 0 < window_s <= 10:
        raise ClusterError(f"--window-s must be greater than 0 and at most 10, got {window_s}.")
    is_first = _is_first()
    if is_first:
        check_out(out)  # before the measurement, which takes long
    import torch

    from ds_hetero.profiler.kernel_probe import profile_ranks
    from ds_hetero.profiler.machine import busy_reason

    begin_s = time.perf_counter()
    content = profile_ranks(
        None if dtype is None else getattr(torch, dtype), window_s=window_s, show_progress=not as_json
    )
    if not is_first:
        return
    write_cluster(content, out)
    if as_json:
        print(json.dumps(content))
        return
    ranks, nodes, seconds = len(content["profile"]["ranks"]), len(content["nodes"]), time.perf_counter() - begin_s
    nodes_text = f"{nodes} node{'s' if nodes > 1 else ''}"
    print_lines(f"{ranks} ranks on {nodes_text} measured in {seconds:.0f} s; written to {out}")
    for term, error in content["profile"]["fit_errors"].items():
        median, largest = 100 * error["median"], 100 * error["largest"]
        print_lines(f"  {term}: the fit is off by {median:.1f} % in the median, {largest:.0f} % at most")
    if (reason := busy_reason(content["profile"])) is not None:
        print_lines(f"the machine was busy: {reason}. Measure again when it is idle.")


def _is_first() -> bool:
    """Return whether this is rank 0, which writes and prints."""
    return int(os.environ.get("RANK", "0")) == 0


def _delete_cached_profiles() -> None:
    """Delete the profiles that earlier jobs measured and kept, on rank 0, and print how many there were."""
    from ds_hetero.profiler.cache import cache_folder, delete_profiles

    if _is_first():
        folder = cache_folder()
        num_profiles = 0 if folder is None else delete_profiles(folder)
        profiles_text = f"{num_profiles} profile{'' if num_profiles == 1 else 's'} in {folder}"
        deleted = f'{profiles_text} deleted; the next job with "cluster": "measure" measures anew'
        print(fitted_text(deleted, terminal_width(sys.stderr)), file=sys.stderr)
