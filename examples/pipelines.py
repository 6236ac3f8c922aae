"""Train a small Llama in pipelines on four unequal ranks and in one process: what examples/pipelines.sh runs.

The shell script launches this script twice with DeepSpeed's launcher:

    1 process    plain DeepSpeed, without a "heterogeneity" section: the reference
    4 processes  first as a pipeline of equal stages, for its time per step; then with "parallel": "full", which
                 searches for the pipelines, and whose losses and gradient norms are compared with the reference

The ranks are processes on this machine, slowed down to speeds of 4:3:2:1, see emulated_speed.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import corpus
import ds_hetero
from emulated_speed import EmulatedSpeed
from tiny_llama import without_compiling

SPEEDS = (4, 3, 2, 1)
FASTEST_CORES = 0.6  # of a core, for the fastest rank: all four then take 1.5 cores
TOLERANCE = 1e-4  # relative; sums of fp32 taken in another order differ by less
LAYERS = 8
LINK = {"bandwidth_gb_per_s": 0.2, "latency_us": 5000}  # a rank that is held back answers late

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
Step = dict[str, float]


def main() -> int:
    args = _arguments()
    without_compiling()
    if WORLD_SIZE == 1:
        args.reference.parent.mkdir(parents=True, exist_ok=True)
        args.reference.write_text(json.dumps(train("1 process", None, args.steps, args)))
        return 0
    equal = train("equal stages", {"schedule": equal_stages(args.batch_size)}, min(args.steps, 3), args)
    section = {"parallel": "full", "cluster": emulated_cluster(), "seq_len": args.tokens}
    unequal = train("unequal pipelines", section, args.steps, args)
    return report(unequal, json.loads(args.reference.read_text()), equal)


def emulated_cluster() -> dict[str, Any]:
    """What "cluster": "measure" would find, if it saw the emulation: one CPU per node, in proportion to the speeds."""
    devices = {
        f"cpu-{speed}": {"peak_tflops": 0.004 * speed, "memory_gib": 4, "memory_bandwidth_gb_per_s": 2 * speed}
        for speed in SPEEDS
    }
    nodes = [{"name": f"n{i}", "device": name, "count": 1, "link": LINK} for i, name in enumerate(devices)]
    return {"nodes": nodes, "network": LINK, "devices": devices}


def equal_stages(samples: int) -> dict[str, Any]:
    """One pipeline with as many layers on every rank."""
    per_rank = LAYERS // len(SPEEDS)
    stages = [{"ranks": [i], "layers": [per_rank * i, per_rank * (i + 1)]} for i in range(len(SPEEDS))]
    pipeline = {"micro_batch_size": 1, "micro_batches": samples, "stages": stages}
    model = {"num_layers": LAYERS, "num_heads": 8, "num_kv_heads": 4}
    return {"version": 2, "model": model, "pipelines": [pipeline]}


def train(name: str, section: dict[str, Any] | None, num_steps: int, args: argparse.Namespace) -> list[Step]:
    """Train a new model for some steps; loss, gradient norm and seconds of each."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=corpus.VOCAB_SIZE, num_hidden_layers=LAYERS, **sizes))
    config: dict[str, Any] = {"train_batch_size": args.batch_size, "gradient_clipping": 1.0}
    config["zero_optimization"] = {"stage": 1}
    handle = ds_hetero.register()
    if section is not None:
        config["heterogeneity"] = section
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=config
    )
    files = corpus.long_files(min_tokens=args.tokens, max_tokens=2**20, count=num_steps * args.batch_size)
    data = [{key: ids[: args.tokens] for key, ids in file.items()} for file in files]
    loader = handle.for_engine(engine).dataloader(torch.utils.data.DataLoader(data, batch_size=args.batch_size))
    if section is not None:
        EmulatedSpeed(FASTEST_CORES * SPEEDS[RANK] / max(SPEEDS)).attach(model)
    steps = []
    for batch in loader:
        start = time.perf_counter()
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        norm = float(engine.get_global_grad_norm())
        steps.append({"loss": loss.item(), "gradient norm": norm, "seconds": time.perf_counter() - start})
        say(f"{name}, step {len(steps)}: loss {steps[-1]['loss']:.4f}, {steps[-1]['seconds']:.1f} s")
    engine.destroy()
    handle.undo()
    return steps


def report(unequal: list[Step], one: list[Step], equal: list[Step]) -> int:
    """Compare with one process, and with equal stages; 1 if losses or norms differ, else 0."""
    differences = [
        abs(ours[key] / theirs[key] - 1)
        for ours, theirs in zip(unequal, one, strict=True)
        for key in ("loss", "gradient norm")
    ]
    equal_s, unequal_s = (median(step["seconds"] for step in steps[1 : len(equal)]) for steps in (equal, unequal))
    say(f"Emulated time per step: equal stages {equal_s:.2f} s, unequal pipelines {unequal_s:.2f} s, ", end="")
    say(f"{equal_s / unequal_s:.2f} times as fast.")
    verdict = "PASS: unequal pipelines train as one process" if max(differences) <= TOLERANCE else "FAIL: they differ"
    say(f"{verdict}; largest relative difference {max(differences):.0e}, allowed {TOLERANCE:.0e}.")
    return int(max(differences) > TOLERANCE)


def say(text: str, end: str = "\n") -> None:
    """Print on rank 0."""
    if RANK == 0:
        print(text, end=end, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=12, help="sequences of an optimizer step")
    parser.add_argument("--tokens", type=int, default=512, help="of a sequence")
    parser.add_argument("--reference", type=Path, default=Path("runs/pipelines/reference.json"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
