"""Section "steps": whole training steps of one rank, by kernel, with attention recomputed and kept."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.first_gpu.cudnn_kernel import CudnnKernel, cudnn_refusal, without_cudnn
from benchmarks.first_gpu.kept_attention import keeping_attention
from benchmarks.first_gpu.lifted import lift_checks
from benchmarks.first_gpu.parts import Context, Part, Row, Section
from ds_hetero.runtime.devices import has_native_bf16

TORCH, CUDNN, KEPT = WAYS = ("torch", "cudnn", "cudnn, attention kept")
_SEED = 0
_RTOL = 1e-2  # relative, of loss and gradient norm; kernels round in 16 bits in other places


class _Job(NamedTuple):
    """A model and a length, the numbers of steps, and the ways of `WAYS`."""

    model: str
    length: int
    adapter_rank: int = 0
    warm_ups: int = 1
    steps: int = 2
    ways: tuple[str, ...] = WAYS

    @property
    def text(self) -> str:
        return f"{self.model}, {self.length:,} tokens" + (f", LoRA {self.adapter_rank}" if self.adapter_rank else "")


_SHORT = _Job("llama-3.2-1b", 32_768)
# 20 s a step on an H200 (benchmarks/results/gpu_steps.json): there is no time to warm up.
_LONG = _Job("llama-3.2-1b", 131_072, warm_ups=0, steps=1)
_ADAPTERS = _Job("llama-3.1-8b", 65_536, adapter_rank=16, warm_ups=0, steps=1, ways=(TORCH, KEPT))
_REHEARSED = {  # a Llama with heads of 16
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
}


def train(context: Context, job: _Job) -> None:
    """Train a job in each way, on the same batch from the same weights; report seconds, memory and losses."""
    if not has_native_bf16(context.device):
        context.report({"job": job.text, "left_out": "these jobs train in bfloat16, which the device does not have"})
        return
    lifted = lift_checks()
    first: Row = {}
    _be_one_rank(context)
    for way in job.ways:
        row: Row = {"job": job.text, "way": way, "predicted_s": _predicted_s(context, job)}
        try:
            with _way(context, way) as told:
                row |= _steps(context, job)
            row |= told()
        except torch.OutOfMemoryError:
            row["left_out"] = "not enough memory"
        # Here and not in `_steps`: its variables, which the error would hold too, keep a model and its optimizer.
        _give_memory_back(context)
        if "left_out" in row:
            context.report(row)
            continue
        first = first or row
        differences = [abs(row[name] / first[name] - 1) for name in ("loss", "grad_norm")]
        row |= {"difference": max(differences), "right": max(differences) <= _RTOL}
        context.report(row | {"lifted": lifted})


def _be_one_rank(context: Context) -> None:
    context.join()
    if context.device.type == "cuda":
        torch.cuda.set_device(context.device)
    os.environ["ACCELERATE_USE_CPU"] = str(context.rehearsal).lower()


@contextmanager
def _way(context: Context, way: str) -> Iterator[Callable[[], Row]]:
    """Run attention in a way inside; the yielded object tells afterwards how often it was computed."""
    from ds_hetero.runtime.attention.kernels import torch_native

    with ExitStack() as stack:
        kept_attention = None
        if way in (CUDNN, KEPT):
            kernel = CudnnKernel(without_cudnn() if context.rehearsal else None)
            stack.enter_context(mock.patch.object(torch_native, "_operators", _with_cudnn(kernel)))
        if way == KEPT:
            kept_attention = stack.enter_context(keeping_attention())

        def counts() -> Row:
            """Return how often attention was computed and reused, where this is counted."""
            if kept_attention is None:
                return {}
            return {"computed": kept_attention.computed, "reused": kept_attention.reused}

        yield counts


def _with_cudnn(kernel: CudnnKernel) -> Callable[..., Any]:
    """Return a choice of kernels that prefers cuDNN's operator for blocks that it supports."""
    from ds_hetero.runtime.attention.kernels import torch_native

    stock = torch_native._operators

    def choose(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> Any:
        otherwise = stock(device, dtype, head_dim, softcap)

        def forward(q: Any, k: Any, v: Any, scores: Any, blocks: Any) -> Any:
            is_taken = cudnn_refusal(q, k, scores, blocks) is None
            return (kernel if is_taken else otherwise).forward(q, k, v, scores, blocks)

        def backward(dout: Any, saved: Any, scores: Any, blocks: Any) -> Any:
            is_taken = cudnn_refusal(saved.q, saved.k, scores, blocks) is None
            return (kernel if is_taken else otherwise).backward(dout, saved, scores, blocks)

        return torch_native._Operators(forward, backward)

    return choose


def _steps(context: Context, job: _Job) -> Row:
    """Yield one step that warms up, and those that count."""
    import deepspeed

    import ds_hetero
    from benchmarks.fake_gpu.jobs import config_of
    from ds_hetero.values.baselines import ring

    length = context.choose(job.length, 96)
    config = config_of(job.model, None, length) | context.choose({}, _REHEARSED)
    handle = ds_hetero.register()
    schedule = ring(1, config["num_attention_heads"], config["num_key_value_heads"])
    section = {
        "schedule": schedule.to_dict(),
        "checks": {"compare_every": "off"},
        "tile_tokens": context.choose(4096, 64),
        "attention": "torch",  # the one in whose place cuDNN is put
    }
    ds_config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "heterogeneity": section,
    }
    model = _model(context, job, config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=context.device.type == "cuda")
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)
    try:
        model_handle = handle.for_engine(engine)
        ids = torch.randint(config["vocab_size"], (1, length), generator=torch.Generator().manual_seed(_SEED))
        (shard,) = model_handle.dataloader([{"input_ids": ids, "labels": ids.clone()}], batches="same")
        return _timed(context, job, engine, lambda: model_handle.loss(engine(**shard), shard))
    finally:
        engine.destroy()
        handle.undo()


def _give_memory_back(context: Context) -> None:
    gc.collect()
    if context.device.type == "cuda":
        torch.cuda.empty_cache()


def _model(context: Context, job: _Job, config: dict[str, Any]) -> Any:
    """Return the model of a job."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(_SEED)
    with context.device:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    if job.adapter_rank:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=job.adapter_rank, target_modules="all-linear"))
        model.enable_input_require_grads()
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _timed(context: Context, job: _Job, engine: Any, forward: Callable[[], torch.Tensor]) -> Row:
    """Return seconds, memory and losses of a step."""
    seconds = []
    on_gpu = context.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(job.warm_ups + context.choose(job.steps, 1)):
        context.synchronize()
        began_s = time.perf_counter()
        loss = forward()
        engine.backward(loss)
        engine.step()
        number, norm = loss.item(), float(engine.get_global_grad_norm())
        del loss
        context.synchronize()
        seconds.append(time.perf_counter() - began_s)
    row: Row = {"step_s": min(seconds[job.warm_ups :]), "first_step_s": seconds[0], "loss": number, "grad_norm": norm}
    return row | ({"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if on_gpu else {})


def _predicted_s(context: Context, job: _Job) -> float | None:
    """Return the seconds of the cost model with the catalogue's rates of this GPU; None if it lacks the GPU."""
    from benchmarks.gpu_steps import Alone, cost_of
    from ds_hetero.errors import HeteroError

    name = context.choose(torch.cuda.get_device_name, lambda: "H100-SXM-80GB")()
    try:
        cost, schedule = cost_of(Alone(model=job.model, length=job.length, adapter_rank=job.adapter_rank), name)
    except HeteroError:
        return None
    return cost.predict(schedule).iteration_s


SECTION = Section(
    name="steps",
    budget_s=110,
    decides="the gain of cuDNN and of kept attention in whole steps, and whether steps are predicted",
    parts=(
        Part(name="1B at 32K", run=partial(train, job=_SHORT), limit_s=45),
        Part(name="1B at 128K", run=partial(train, job=_LONG), limit_s=110),
        Part(name="8B with adapters at 64K", run=partial(train, job=_ADAPTERS), limit_s=110),
    ),
)
