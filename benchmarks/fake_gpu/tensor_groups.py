"""Launches and waits of one decoder layer on GPUs that do not exist, in tensor groups and without them.

The stage of a plan is made by the real modules: cut by tensor parallelism, its attention on the schedule of its column.
It runs a forward and a backward of a micro-batch on rank 0. One layer's launches are those of a model with three layers
less those of one with two.

    python -m benchmarks.fake_gpu.tensor_groups [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.fake_gpu.device import DEVICE_TYPE, device, rank_of
from benchmarks.fake_gpu.jobs import config_of
from benchmarks.fake_gpu.recorder import Record, Recorder
from benchmarks.fake_gpu.step import DTYPE, alone, header_of, the_mode, use_device, watch_layers
from ds_hetero.frameworks.deepspeed.pipeline.engine import plan_of_stages
from ds_hetero.frameworks.transformers.stages.stage_model import StageModel
from ds_hetero.runtime.data.shards import PlacedBatch, read_batch
from ds_hetero.runtime.pipeline.batches import StageBatch
from ds_hetero.runtime.replica import make_replica
from ds_hetero.values.placement import stream_placement
from ds_hetero.values.plans import Plan, read_plan

MODEL, HEADS, KV_HEADS = "llama-3.1-8b", 32, 8
_COLLECTIVES = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_", "alltoall_base_", "send", "recv_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage of tensor groups that share sequences of 65,536 tokens in the shares 2:1.

    Args:
        size: ranks of a tensor group; 1 for none.
        in_ring: whether the two groups pass keys and values in a ring; else they exchange heads.
        checkpointing: whether layers are recomputed.
    """

    size: int
    in_ring: bool = False
    checkpointing: bool = True

    @property
    def name(self) -> str:
        """Name for people."""
        groups = f"tensor groups of {self.size}" if self.size > 1 else "single ranks"
        return f"two {groups} in {'a ring' if self.in_ring else 'an all-to-all'}"

    def plan(self, layers: int) -> Plan:
        """Return the plan of this stage alone."""
        shares = (
            [([0], [2], [HEADS]), ([self.size], [1], [HEADS])]
            if self.in_ring
            else [([0, self.size], [2, 1], [HEADS // 2] * 2)]
        )
        groups = [{"ranks": ranks, "tokens": tokens, "heads": heads} for ranks, tokens, heads in shares]
        schedule = {"version": 1, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "layout": "zigzag", "groups": groups}
        stage: dict[str, Any] = {"ranks": list(range(2 * self.size)), "layers": [0, layers], "inner": "sequence"}
        grouping = {"tensor_size": self.size} if self.size > 1 else {}
        model = {"num_layers": layers, "num_heads": HEADS, "num_kv_heads": KV_HEADS}
        pipeline = {"micro_batch_size": 1, "micro_batches": 1, "stages": [{**stage, **grouping, "schedule": schedule}]}
        return read_plan({"version": 2, "model": model, "pipelines": [pipeline]})


STAGES = (Stage(size=1), Stage(size=2), Stage(size=4), Stage(size=1, in_ring=True), Stage(size=2, in_ring=True))


def main() -> int:
    """Run the command; return 0 if no layer waits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    options = parser.parse_args()
    rows = [launches_of_layer(stage) for stage in STAGES]
    if options.json:
        print(json.dumps(rows))
    else:
        table = Table("stage", "launches of a layer", "of them collectives", "waits in layers")
        for row in rows:
            table.add_row(*(str(row[key]) for key in ("stage", "launches", "collectives", "syncs_in_layers")))
        Console().print(table)
    return 1 if any(row["syncs_in_layers"] for row in rows) else 0


def launches_of_layer(stage: Stage, length: int = 65_536) -> dict[str, Any]:
    """Return the launches of one layer of the stage on rank 0, by operator, and the waits inside all layers."""
    use_device()
    records = [_record_of(stage, layers, length) for layers in (2, 3)]
    fewer, more = (Counter(operation.name for operation in record.operations) for record in records)
    waits = [sync for record in records for sync in record.syncs if sync.layer is not None]
    of_layer = more - fewer
    return {
        "stage": stage.name,
        "launches": sum(more.values()) - sum(fewer.values()),
        "collectives": sum(of_layer[name] for name in _COLLECTIVES),
        "operators": dict(of_layer.most_common()),
        "syncs_in_layers": len(waits),
        "sync_places_in_layers": dict(Counter(f"{sync.phase}: {sync.name} {sync.place}" for sync in waits)),
        "syncs": dict(Counter(f"{s.phase}: {s.name} {s.place}" for s in records[0].syncs if s.layer is None)),
    }


def _record_of(stage: Stage, layers: int, length: int) -> Record:
    """Run a micro-batch through the stage twice, and return the record of the second run."""
    plan = stage.plan(layers)
    with rank_of(0, len(plan.ranks)), alone():
        recorder = Recorder(the_mode())
        with the_mode(), recorder:
            _run(plan, config_of(MODEL, layers, length), length, recorder, checkpointing=stage.checkpointing)
    return recorder.record


def _run(plan: Plan, config: dict[str, Any], length: int, recorder: Recorder, *, checkpointing: bool) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    import ds_hetero

    handle = ds_hetero.register()
    with torch.device(device()), no_init_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=DTYPE)
    model.tie_weights()
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    stage = StageModel(model, plan, 0)
    stage.shard_sequences(make_replica(plan_of_stages(plan)), None, "fp32")
    (planned,) = plan.pipelines[0].stages
    if planned.is_tensor_parallel:
        stage.cut_by_tensor_parallelism(DeviceMesh(DEVICE_TYPE, list(planned.holders_with(0))))
    watch_layers(model, recorder)
    ids = torch.zeros(1, length, dtype=torch.int64)
    batch = read_batch({"input_ids": ids, "labels": ids.clone()})
    schedule = planned.schedule_of(0)
    assert schedule is not None
    placed = PlacedBatch(batch, stream_placement(schedule, length))
    headers = [header_of(placed, rank, model) for rank in schedule.ranks]
    for _ in range(2):
        recorder.begin_step()
        recorder.replies = headers
        with recorder.inside("model"):
            loss = stage(StageBatch(batch=batch, scale=1.0), None)
        recorder.backward = True
        with recorder.inside("backward"):
            loss.backward()
        recorder.backward, recorder.layer = False, None
    handle.undo()


if __name__ == "__main__":
    sys.exit(main())
