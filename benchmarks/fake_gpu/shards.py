"""Count what a rank launches, and the bytes it moves, to reduce and gather weighted ZeRO-3 shards of one decoder layer.

    python -m benchmarks.fake_gpu.shards [--json]

The layer is that of Llama-3.1-8B, on eight GPUs that do not exist, of which four own four times as much as the others.
Its gradients are reduced to the owners in one bucket, and its parameters gathered in one batch, as DeepSpeed's prefetch
asks for them. torch's fake process group counts as gloo does: a gather is one broadcast per rank.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.fake_gpu.device import device, rank_of
from benchmarks.fake_gpu.recorder import Recorder
from benchmarks.fake_gpu.step import DTYPE, alone, the_mode, use_device
from ds_hetero.sharding.zero_partition import cut_parameter

_WEIGHTS = (4, 4, 4, 4, 1, 1, 1, 1)
_HIDDEN, _MLP, _KV = 4096, 14_336, 1024
_SIZES = (*(_HIDDEN * width for width in (_HIDDEN, _KV, _KV, _HIDDEN, _MLP, _MLP, _MLP)), _HIDDEN, _HIDDEN)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    rows = launches_of_shards()
    if args.json:
        print(json.dumps(rows))
        return 0
    table = Table("pass", "operator", "launches", "MB read and written")
    for row in rows:
        table.add_row(row["pass"], row["operator"], str(row["launches"]), f"{row['num_bytes'] / 1e6:,.0f}")
    Console().print(table)
    return 0


def launches_of_shards() -> list[dict[str, Any]]:
    """Return a row for each operator of the reduction and of the gathering on rank 0, which owns a large shard."""
    use_device()
    import deepspeed

    # These take the accelerator of the device, so they are imported after it is set.
    from ds_hetero.frameworks.deepspeed.zero.weighted_gathering import Gathering, reduce_to_owners

    cuts = [cut_parameter(size, _WEIGHTS) for size in _SIZES]
    rows: list[dict[str, Any]] = []
    with rank_of(0, len(_WEIGHTS)), alone():
        deepspeed.init_distributed("fake", verbose=False)
        group = dist.group.WORLD
        assert group is not None
        recorder = Recorder(the_mode())
        with the_mode(), recorder:
            grads = [torch.empty(size, device=device(), dtype=DTYPE) for size in _SIZES]
            shards = [torch.empty(cut.sizes[0], device=device(), dtype=DTYPE) for cut in cuts]
            recorder.record.events.clear()
            reduce_to_owners(grads, cuts, group, len(_WEIGHTS))
            rows += _rows("reduce", recorder)
            Gathering(shards, cuts, group).wait()
            rows += _rows("gather", recorder)
    return rows


def _rows(name: str, recorder: Recorder) -> list[dict[str, Any]]:
    """Return the rows of the operations so far, and clear the record."""
    by_operator: dict[str, list[int]] = {}
    for operation in recorder.record.operations:
        by_operator.setdefault(operation.name, []).append(operation.num_bytes)
    recorder.record.events.clear()
    return [
        {"pass": name, "operator": operator, "launches": len(sizes), "num_bytes": sum(sizes)}
        for operator, sizes in by_operator.items()
    ]


if __name__ == "__main__":
    raise SystemExit(main())
