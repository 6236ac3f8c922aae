"""Train steps on one real GPU, and compare their time and memory with the predictions.

    python -m benchmarks.gpu_steps [--only TEXT] [--json] [--budget-s 480] [--output FILE]

    alone   jobs of one rank as users run them: a model of real size with random weights, behind DeepSpeed; all weights,
            LoRA or QLoRA
    rank    one rank of the jobs of `benchmarks.fake_gpu`. Its process group is torch's fake one, which sends nothing:
            messages of other ranks are filled with the rank's own numbers. Every kernel of the rank runs, and its
            memory is that of the job

Each job runs in a process of its own, one at a time on the GPU. Two steps warm up, and the median of three counts. The
calibrated cost model predicts with the catalogue's rates of this GPU. A rank computes at the rates of this GPU, not of
its job's cluster, so its memory alone is predicted. Without a GPU the command says so and exits with 0.

    python -m benchmarks.gpu_steps --predict FILE

compares today's predictions with the measurements in FILE, on any machine.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.fake_gpu.jobs import SETTINGS, Setting, config_of
from benchmarks.fit.training import in_4_bits
from benchmarks.measure.machine import describe_machine
from benchmarks.measure.results import FOLDER, header, write
from benchmarks.measure.workers import in_order
from ds_hetero.cluster import cluster_from_dict
from ds_hetero.cluster.notation import read_notation
from ds_hetero.cost import CostModel, Workload, make_cost_model
from ds_hetero.cost.terms.flops import mlp_flops
from ds_hetero.models import model_from_config
from ds_hetero.planner.memory import stacks
from ds_hetero.runtime.devices import default_device
from ds_hetero.values.baselines import ring
from ds_hetero.values.schedule import Schedule

RESULT = FOLDER / "gpu_steps.json"
_WARM_UPS, _STEPS = 2, 3
_SEED, _STD = 0, 0.02
_TENSORS = "output_tensor", "output", "input_tensor", "input"  # of a collective of torch's, in this order


@dataclass(frozen=True, kw_only=True)
class Alone:
    """A job of one rank.

    Args:
        model: name of a preset.
        length: tokens of a sequence.
        adapter_rank: of LoRA on every linear layer; 0 to train all weights.
        quantized: whether frozen weights have 4 bits.
        tile_tokens: tokens of a tile of MLPs and loss; None for no tiles.
        checkpointing: whether every layer is recomputed.
        zero_stage: of DeepSpeed.
        layers: number of layers to keep; None for all.
    """

    model: str
    length: int
    adapter_rank: int = 0
    quantized: bool = False
    tile_tokens: int | None = 4096
    checkpointing: bool = True
    zero_stage: int = 1
    layers: int | None = None

    @property
    def name(self) -> str:
        """Name of the job, for people."""
        train = f"{'Q' if self.quantized else ''}LoRA {self.adapter_rank}" if self.adapter_rank else "all weights"
        tiles = f"tiles of {self.tile_tokens:,}" if self.tile_tokens else "no tiles"
        recomputation = "" if self.checkpointing else ", no recomputation"
        return f"{self.model}, {train}, {self.length:,} tokens, ZeRO-{self.zero_stage}, {tiles}{recomputation}"


ALONE = (
    Alone(model="llama-3.2-1b", length=8192, tile_tokens=None),
    Alone(model="llama-3.2-1b", length=4096, tile_tokens=None, checkpointing=False),
    Alone(model="llama-3.2-1b", length=32768),
    Alone(model="llama-3.2-1b", length=131072),
    Alone(model="llama-3.2-3b", length=16384),
    Alone(model="llama-3.1-8b", length=8192, adapter_rank=16),
    Alone(model="llama-3.1-8b", length=65536, adapter_rank=16),
    Alone(model="llama-3.1-8b", length=8192, adapter_rank=16, quantized=True),
    Alone(model="qwen3-4b", length=16384, adapter_rank=16, zero_stage=3),
)
RANKS = tuple(
    (setting, rank)
    for place, ranks in ((0, (0, 4)), (1, (0,)), (2, (0,)), (4, (0,)), (1, (4,)))
    for setting in (SETTINGS[place],)
    for rank in ranks
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a job failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="jobs whose name has this in it")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--budget-s", type=float, default=480.0, help="begin no further job after so many seconds")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--predict", type=Path, help="measure nothing: predict the jobs of this result again")
    options = parser.parse_args(arguments)
    if options.predict:
        result = json.loads(options.predict.read_text())
        _predict(result)
        write(result, options.predict)
        print(json.dumps(result)) if options.json else _show(result)
        return 0
    if not torch.cuda.is_available():
        text = "no CUDA device: nothing to measure"
        print(json.dumps({"skipped": text}) if options.json else text)
        return 0
    tasks: list[Any] = [*ALONE, *RANKS]
    tasks = [task for task in tasks if options.only in _name(task)]
    result = {
        **header(" ".join(["python -m benchmarks.gpu_steps", *(sys.argv[1:] if arguments is None else arguments)])),
        "machine": describe_machine() | {"gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda},
        "jobs": [],
    }
    give_up = time.time() + options.budget_s
    lock = multiprocessing.get_context("spawn").Lock()
    prepare = partial(_prepare, lock, give_up)
    for row in in_order(_row, tasks, 3, start_method="spawn", prepare=prepare):
        result["jobs"].append(row)
        print(
            row.get("error") or f"{row['step_s']:.3f} s, {row['peak_bytes'] / 2**30:.2f} GiB",
            row["name"],
            flush=True,
        )
        write(result, options.output)
    _predict(result)
    write(result, options.output)
    if options.json:
        print(json.dumps(result))
    else:
        _show(result)
    return 1 if any("error" in row for row in result["jobs"]) else 0


def _predict(result: dict[str, Any]) -> None:
    """Write the predicted seconds and bytes of every job into its row."""
    alone, ranks = {job.name: job for job in ALONE}, {_name(task): task for task in RANKS}
    for row in result["jobs"]:
        if row["name"] in alone:
            cost, schedule = cost_of(alone[row["name"]], result["machine"]["gpu"])
            row["predicted_s"] = cost.predict(schedule).iteration_s
            if row.get("third_forward"):  # of tiles, which checkpointed layers computed once more than they do today
                forward_flops = mlp_flops(cost.model) * cost.model.num_layers * cost.workload.seq_len
                (device,) = cost.cluster.devices
                row["predicted_s"] += forward_flops / (device.peak_flops_per_s * device.efficiency.matmul)
            (stack,) = stacks(cost, schedule)
            row["predicted_bytes"] = stack.tensors
        elif row["name"] in ranks:
            setting, rank = ranks[row["name"]]
            row["predicted_bytes"] = setting.fit_bytes(rank)


def cost_of(job: Alone, gpu: str) -> tuple[CostModel, Schedule]:
    """Return the cost model of a job on one GPU of this kind, and its schedule."""
    config = config_of(job.model, job.layers, job.length)
    workload = Workload(
        seq_len=job.length,
        zero_stage=job.zero_stage,
        activation_checkpointing=job.checkpointing,
        tiled_logits=job.tile_tokens is not None,
        tiled_mlp=job.tile_tokens is not None,
        tile_tokens=job.tile_tokens,
        adapter_rank=job.adapter_rank,
        quantization="nf4" if job.quantized else None,
    )
    cluster = cluster_from_dict(read_notation(gpu.removeprefix("NVIDIA ")).content)
    model = model_from_config(config, job.model)
    cost = make_cost_model("calibrated", cluster, model, workload)
    return cost, ring(1, config["num_attention_heads"], config["num_key_value_heads"])


def _name(task: Any) -> str:
    """Return the name of a job of one rank, or of one rank of a job: ``lab, rank 1 of 4``."""
    return task.name if isinstance(task, Alone) else f"{task[0].name}, rank {task[1]} of {task[0].job().world_size}"


_of_card: Any = None
_give_up = 0.0


def _prepare(lock: Any, give_up: float) -> None:
    """Import the modules of a job before it gets the GPU."""
    global _of_card, _give_up
    _of_card, _give_up = lock, give_up
    import deepspeed  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import ds_hetero.frameworks.transformers.model.facts
    import ds_hetero.frameworks.transformers.model.small_llama  # noqa: F401


def _row(task: Any) -> dict[str, Any]:
    """Run one job when it is its turn on the GPU; return its row, with ``error`` if it failed or had no time."""
    row: dict[str, Any] = {"name": _name(task), "kind": "alone" if isinstance(task, Alone) else "rank"}
    with _of_card:
        if time.time() > _give_up:
            return row | {"error": "left out: no time left"}
        began_s = time.time()
        try:
            row |= _alone(task) if isinstance(task, Alone) else _rank(*task)
        except Exception as error:
            return row | {"error": f"{type(error).__name__}: {str(error)[:300]}", "traceback": traceback.format_exc()}
        return row | {"seconds": time.time() - began_s}


# --- jobs of one rank


def _alone(job: Alone) -> dict[str, Any]:
    """Run a job of one rank; return its row."""
    import deepspeed

    import ds_hetero

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ[name] = value
    os.environ["MASTER_PORT"] = "0"
    where = default_device()
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("nccl" if where.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
    config = config_of(job.model, job.layers, job.length)
    handle = ds_hetero.register()
    schedule = ring(1, config["num_attention_heads"], config["num_key_value_heads"])
    section: dict[str, Any] = {"schedule": schedule.to_dict(), "checks": {"compare_every": "off"}}
    if job.tile_tokens is not None:
        section["tile_tokens"] = job.tile_tokens
    ds_config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": job.zero_stage},
        "bf16": {"enabled": True},
        "heterogeneity": section,
    }
    torch.manual_seed(_SEED)
    model: Any = _model(job, config, ds_config)
    if job.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-4, fused=True
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)
    engine_handle = handle.for_engine(engine)
    ids = torch.randint(config["vocab_size"], (1, job.length), generator=torch.Generator().manual_seed(_SEED))
    (shard,) = engine_handle.dataloader([{"input_ids": ids, "labels": ids.clone()}], batches="same")

    def forward() -> Tensor:
        outputs = engine(**shard)
        return engine_handle.loss(outputs, shard)

    return _timed(engine, forward)


def _model(job: Alone, config: dict[str, Any], ds_config: dict[str, Any]) -> Any:
    """Make the model of a job on the device."""
    import deepspeed
    from transformers import AutoConfig, AutoModelForCausalLM

    is_whole = job.zero_stage < 3
    cut = contextlib.nullcontext() if is_whole else deepspeed.zero.Init(config_dict_or_path=ds_config)
    with default_device(), cut:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    if job.quantized:
        model = in_4_bits(model, torch.bfloat16, default_device())
    if job.adapter_rank:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=job.adapter_rank, target_modules="all-linear"))
        model.enable_input_require_grads()
    model.train()
    return model


# --- one rank of many


def _rank(setting: Setting, rank: int) -> dict[str, Any]:
    """Run one rank of a job on the fake process group; return its row."""
    from benchmarks.fake_gpu.step import alone, engine_of, header_of, placed_batch
    from ds_hetero.runtime.data.shards import model_inputs

    job, where = setting.job(), default_device()
    torch.manual_seed(_SEED)
    with _one_of(rank, job.world_size) as replies, alone():
        engine, handle = engine_of(job, where, _fill_weights)
        placed = placed_batch(job)
        headers = [header_of(placed, of_rank, engine.module).to(where) for of_rank in job.schedule.ranks]
        shard = model_inputs(placed.shard(rank), where)

        def forward() -> Tensor:
            replies[:] = headers
            loss: Tensor = engine(**{name: entry for name, entry in shard.items() if name != "labels"}).loss
            return loss

        row = _timed(engine, forward)
        handle.undo()
    return row | {"tokens": setting.schedule().tokens(setting.length)[rank]}


def _fill_weights(model: nn.Module) -> None:
    """Fill parameters with random numbers, as an initialized model has; vectors, which scale, with ones."""
    for parameter in model.parameters():
        data = getattr(parameter, "ds_tensor", parameter).data
        data.fill_(1.0) if len(getattr(parameter, "ds_shape", parameter.shape)) == 1 else data.normal_(std=_STD)


@contextlib.contextmanager
def _one_of(rank: int, world_size: int) -> Iterator[list[Tensor]]:
    """Make this process one rank of a world in which no messages are sent.

    Collectives run on torch's fake group; what a rank would receive is filled with this rank's own numbers.

    Yields:
        A list that the caller may fill with the tensors of all ranks for the next all-gather of their shape.
    """
    from benchmarks.fake_gpu.device import fake_group, post_each

    replies: list[Tensor] = []

    def all_gather(parts: list[Tensor], own: Tensor, *args: Any, **options: Any) -> Any:
        work = _all_gather(parts, own, *args, **options)
        gathered = replies[:] if replies and replies[0].shape == own.shape else [own] * len(parts)
        if len(gathered) == len(parts) and gathered[0] is not own:
            replies.clear()
        for part, tensor in zip(parts, gathered, strict=True):
            part.copy_(tensor)
        return work

    def with_filled_output(collective: Callable[..., Any]) -> Callable[..., Any]:
        """Return a collective whose output, its first tensor, is filled from its input, the second."""

        def call(*args: Any, **options: Any) -> Any:
            work = collective(*args, **options)
            positional = [argument for argument in args if isinstance(argument, Tensor)]
            named = [options[name] for name in _TENSORS if name in options]
            _fill(*[*positional, *named][:2])
            return work

        return call

    def batch_isend_irecv(operations: Any) -> Any:
        works = post_each(operations)
        sent = [operation.tensor for operation in operations if operation.op is dist.isend]
        for operation in operations:
            if operation.op is dist.irecv:
                _fill(operation.tensor, sent[0] if sent else torch.randn_like(operation.tensor))
        return works

    _all_gather = dist.all_gather
    stable_names = "all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor", "_all_gather_base"
    new_names = "all_gather_single", "reduce_scatter_single"  # of recent releases of torch
    names = [name for name in (*stable_names, *new_names) if hasattr(dist, name)]

    def reduce_scatter(out: Tensor, parts: list[Tensor], *args: Any, **options: Any) -> Any:
        work = _reduce_scatter(out, parts, *args, **options)
        _fill(out, parts[rank % len(parts)])
        return work

    _reduce_scatter = dist.reduce_scatter
    replacements = [
        (dist, "reduce_scatter", reduce_scatter),
        (dist, "all_gather", all_gather),
        (dist, "batch_isend_irecv", batch_isend_irecv),
        *((dist, name, with_filled_output(getattr(dist, name))) for name in names),
    ]
    with fake_group(rank, world_size), contextlib.ExitStack() as stack:
        for owner, name, value in replacements:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield replies


def _fill(out: Tensor, local_part: Tensor) -> None:
    """Fill ``out``, which would receive a message, with this rank's numbers, repeated as needed."""
    out, local_part = out.detach().reshape(-1) if out.is_contiguous() else out.view(-1), local_part.detach().reshape(-1)
    if not local_part.numel():
        return
    num_repeated = out.numel() // local_part.numel() * local_part.numel()
    if num_repeated:
        out[:num_repeated].view(-1, local_part.numel()).copy_(local_part.expand(num_repeated // local_part.numel(), -1))
    out[num_repeated:].copy_(local_part[: out.numel() - num_repeated])


# --- what is measured


def _timed(engine: Any, forward: Callable[[], Tensor]) -> dict[str, Any]:
    """Return the seconds of the median step and of its passes, and its bytes."""
    gc.collect()
    steps: list[dict[str, Any]] = []
    for _ in range(_WARM_UPS + _STEPS):
        torch.cuda.reset_peak_memory_stats()
        resting = torch.cuda.memory_allocated()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]  # type: ignore[no-untyped-call]
        marks[0].record()
        loss = forward()
        marks[1].record()
        forward_peak = torch.cuda.max_memory_allocated()
        engine.backward(loss)
        marks[2].record()
        backward_peak = torch.cuda.max_memory_allocated()
        engine.step()
        marks[3].record()
        number = loss.item()
        del loss
        torch.cuda.synchronize()
        times = [first.elapsed_time(second) / 1e3 for first, second in pairwise(marks)]
        steps.append(
            {
                "step_s": time.perf_counter() - begin,
                "passes_s": times,
                "loss": number,
                "peak_bytes": torch.cuda.max_memory_allocated(),
                "peaks_bytes": [forward_peak, backward_peak],
                "resting_bytes": resting,
                "reserved_bytes": torch.cuda.max_memory_reserved(),
            }
        )
    timed_steps = sorted(steps[_WARM_UPS:], key=lambda step: step["step_s"])
    middle = timed_steps[len(timed_steps) // 2]
    return {
        **middle,
        "peak_bytes": max(step["peak_bytes"] for step in timed_steps),
        "steps_s": [s["step_s"] for s in steps],
    }


def _show(result: dict[str, Any]) -> None:
    """Print the table."""
    table = Table("job", "step, s", "forward, backward, step", "predicted", "peak, GiB", "reserved", "predicted")
    for row in result["jobs"]:
        if "error" in row:
            table.add_row(row["name"], row["error"])
            continue
        passes = " ".join(f"{each:.3f}" for each in row["passes_s"])
        times = _with_prediction(row.get("predicted_s"), row["step_s"])
        sizes = [f"{row[key] / 2**30:.2f}" for key in ("peak_bytes", "reserved_bytes")]
        memory = _with_prediction(row.get("predicted_bytes"), _whole_peak(row), 2**30)
        table.add_row(row["name"], f"{row['step_s']:.3f}", passes, times, *sizes, memory)
    Console(width=None if sys.stdout.isatty() else 170).print(table)
    measured = [row for row in result["jobs"] if "error" not in row]
    for predicted, what, value in (
        ("predicted_s", "seconds", lambda row: row["step_s"]),
        ("predicted_bytes", "bytes", _whole_peak),
    ):
        errors = [abs(row[predicted] / value(row) - 1) for row in measured if row.get(predicted)]
        if errors:
            print(f"{what}: {len(errors)} predictions, median error {median(errors):.1%}, largest {max(errors):.1%}")


def _whole_peak(row: dict[str, Any]) -> float:
    """Return the bytes at the peak, including those of an optimizer that did not step."""
    peak: float = row["peak_bytes"] + row.get("missing_bytes", 0)
    return peak


def _with_prediction(predicted: float | None, measured: float, unit: float = 1.0) -> str:
    """Return a predicted value in ``unit`` with its error, ``0.26 (-16%)``; empty without a prediction."""
    return "" if predicted is None else f"{predicted / unit:.2f} ({predicted / measured - 1:+.0%})"


if __name__ == "__main__":
    sys.exit(main())
