"""Time training steps of a model that keeps the devices busy, and compare time and memory with the predictions.

The ranks are profiled as `ds-hetero profile` does, and a schedule is planned on that profile. Steps are timed under
this schedule and under a ring of equal shares. The lines are for information: a difference is not a fault, but it says
how far to trust a plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch

import ds_hetero
from ds_hetero.cluster import cluster_from_dict
from ds_hetero.common.extras import TRAINING_PACKAGES, require
from ds_hetero.common.reading import JsonDict
from ds_hetero.common.units import GIB, TERA
from ds_hetero.cost import CostModel, Workload, make_cost_model
from ds_hetero.errors import HeteroError, PlanError
from ds_hetero.models import model_from_config
from ds_hetero.planner import plan, strategy
from ds_hetero.planner.memory import stacks
from ds_hetero.profiler.kernel_probe import profile_ranks
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.selftest.lines import Line
from ds_hetero.selftest.one_process import warnings_only
from ds_hetero.selftest.session import Session
from ds_hetero.values.schedule import Schedule

_TIMES = 5.0  # limits of a call that a profile of many links, or steps of slow devices, may take
_WARM_UPS, _STEPS = 2, 3


def check_prediction(session: Session, measured: JsonDict) -> Iterator[Line]:
    """Yield one line for the fastest attention, and two per schedule: seconds of a step, and this rank's memory.

    Args:
        session: the run of the self-test.
        measured: part of the report. Its key "profile" is set to the profile, without host names; its key "steps" to
            the numbers of the lines.
    """
    try:
        require(*TRAINING_PACKAGES, purpose="training")
    except HeteroError as error:
        yield Line("predicted steps", "skip", str(error))
        return
    setting = _Setting.for_session(session)
    with session.watch.call("profiling devices and links", times=_TIMES):
        content = profile_ranks(setting.dtype, window_s=0.03 if session.quick else 0.1, show_progress=False)
    measured["profile"] = _without_hosts(content)
    attention = max(map(_attention_flops_per_s, content["profile"]["samples"][session.rank]["attention"]))
    yield Line("attention", "info", f"{attention / TERA:.3g} TFLOPS, forward and backward, at the best size")
    model = model_from_config(setting.config, "the self-test's model")
    cost = make_cost_model("calibrated", cluster_from_dict(content), model, setting.workload)
    measured["steps"] = []
    for name in ("plan", "ring"):
        try:
            if name == "plan":
                schedule = plan(cost.cluster, model, setting.workload).schedule
            else:
                schedule = strategy(name, cost)
        except PlanError as error:  # the same on all ranks
            yield Line(f"step under {name}", "skip", str(error))
            continue
        with session.watch.call(f"steps under {name}", times=_TIMES), warnings_only():
            row = _measure(setting, schedule, cost, session)
        measured["steps"].append({"schedule": schedule.to_dict(), "name": name, **row})
        yield _comparison(f"step under {name}", "s", row["predicted_s"], row["measured_s"])
        memory = row["ranks"][session.rank]
        peak_gib = None if memory["peak_bytes"] is None else memory["peak_bytes"] / GIB
        yield _comparison(f"memory under {name}", "GiB", memory["predicted_bytes"] / GIB, peak_gib)


def _comparison(name: str, unit: str, predicted: float, measured: float | None) -> Line:
    """Return a line with a predicted and a measured value (None: not measured), and the prediction's error in %."""
    text = f"{predicted:.3g} {unit} predicted"
    if measured is None:
        return Line(name, "info", f"{text}; not measured on CPUs")
    return Line(name, "info", f"{text}, {measured:.3g} measured: {100 * (predicted / measured - 1):+.0f} %")


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """The model and the batch: a Llama of few layers, on GPUs as wide as models of some billion parameters."""

    dtype: torch.dtype
    config: JsonDict
    tokens: int  # of a sequence

    @classmethod
    def for_session(cls, session: Session) -> _Setting:
        """Choose sizes for the device: small ones on CPUs, short sequences with ``--quick``."""
        on_gpu = session.device.type == "cuda"
        heads, head_dim = (16, 128) if on_gpu else (8, 32)
        quick_tokens, full_tokens = (1024, 4096) if on_gpu else (64, 256)  # of each rank
        tokens = (quick_tokens if session.quick else full_tokens) * session.size
        config = {
            "model_type": "llama",
            "hidden_size": heads * head_dim,
            "intermediate_size": heads * head_dim * 11 // 4,
            "num_hidden_layers": 4 if on_gpu else 2,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "vocab_size": 32_000 if on_gpu else 512,
            "hidden_act": "silu",
            "max_position_embeddings": tokens,
            "use_cache": False,
        }
        dtype = session.trained_dtype if on_gpu else torch.float32
        return cls(dtype=dtype, config=config, tokens=tokens)

    @property
    def workload(self) -> Workload:
        """The workload that the cost model predicts: ZeRO-1, no recomputation, logits of all tokens at once."""
        return Workload(
            seq_len=self.tokens,
            zero_stage=1,
            activation_checkpointing=False,
            tiled_logits=False,
            element_bytes=self.dtype.itemsize,
            gradient_bytes=self.dtype.itemsize,
            optimizer_bytes=12,
        )

    @property
    def ds_config(self) -> JsonDict:
        """The DeepSpeed configuration of the same workload, without the schedule."""
        precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(self.dtype)
        return {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            **({} if precision is None else {precision: {"enabled": True}}),
        }


def _measure(setting: _Setting, schedule: Schedule, cost: CostModel, session: Session) -> JsonDict:
    """Train some steps under ``schedule``; return predictions and measurements as a row of ``measured["steps"]``.

    The time of a step is that of its slowest rank; the row has the median over steps.
    """
    from ds_hetero.frameworks.deepspeed.small_job import time_steps
    from ds_hetero.frameworks.transformers.model.small_llama import llama

    model = llama(setting.config)
    generator = torch.Generator().manual_seed(1)  # the same tokens on every rank
    ids = torch.randint(0, setting.config["vocab_size"], (1, setting.tokens), generator=generator)
    ds_config = setting.ds_config | {
        "heterogeneity": {"schedule": schedule.to_dict(), "checks": {"compare_every": "off"}}
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = {"input_ids": ids, "labels": ids.clone()}
    seconds, peak_bytes = time_steps(ds_hetero.register(), model, optimizer, [batch] * (_WARM_UPS + _STEPS), ds_config)
    times_and_peaks = on_all_ranks(lambda: (seconds[_WARM_UPS:], peak_bytes))  # by rank
    times_of_steps = zip(*(times for times, _ in times_and_peaks), strict=True)
    prediction = cost.predict(schedule)
    memory_by_rank = []
    for stack, (_, peak_of_rank) in zip(stacks(cost, schedule), times_and_peaks, strict=True):
        memory_by_rank.append({"predicted_bytes": stack.tensors, "peak_bytes": peak_of_rank})
    return {
        "predicted_s": prediction.iteration_s,
        "measured_s": median(map(max, times_of_steps)),
        "terms": prediction.to_dict()["terms"],
        "ranks": memory_by_rank,
    }


def _attention_flops_per_s(sample: list[float]) -> float:
    """Return FLOPs per second of an attention sample of the profile, forward and backward together.

    Forward has two matmuls and backward five, of 2 FLOPs per multiply-add: 4 + 10 = 14 FLOPs for each pair of query and
    key and each head dimension.
    """
    rows, keys, causal, head_dim, forward_s, backward_s = sample
    pairs = rows * keys / (2 if causal else 1)
    return 14 * pairs * head_dim / (forward_s + backward_s)


def _without_hosts(content: JsonDict) -> JsonDict:
    """Return the content of a cluster file without private data: "node 0" for host names, no timings of ranks."""
    without_profile = {key: entry for key, entry in content.items() if key != "profile"}
    text = json.dumps(without_profile | {"fit_errors": content["profile"]["fit_errors"]})
    for number, node in enumerate(content["nodes"]):
        name = json.dumps(node["name"])
        text = text.replace(name, f'"node {number}"').replace(f"inside {name[1:]}", f'inside node {number}"')
    redacted: JsonDict = json.loads(text)
    return redacted
