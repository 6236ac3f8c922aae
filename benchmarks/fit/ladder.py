"""Train long sequences with little memory: a job that exceeds a real limit, and the same job with memory-saving keys.

    python -m benchmarks.fit.ladder [--tokens 262144] [--mib 2560] [--json] [--output FILE]

Two ranks hold a sequence in shares of 5:4 and train a small model with windowed attention, so that a step takes minutes
on a CPU. Their private memory is limited (RLIMIT_DATA) to what they have after all imports, plus ``--mib``, which
stands for the GPU's memory. The first job exceeds the limit; the second one recomputes the layers and has
``"tile_tokens"``, MLPs and loss in tiles. Before, the same path on a short sequence is compared with one process.

The exit code is 0 if the limit ended the first job, the second one trained, and the losses on the short sequence are
equal.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.measure.ranks import LOOPBACK, run
from benchmarks.measure.results import FOLDER, header, write

RESULT = FOLDER / "ladder.json"
SHORT_TOKENS, TILE_TOKENS, STEPS, TOLERANCE = 4096, 1024, 1, 1e-5
SHARES = (5, 4)
MODEL = {
    "vocab_size": 8192,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "sliding_window": 512,
    "max_position_embeddings": 1 << 20,
    "use_cache": False,
}
_OUT_OF_MEMORY = r".*(can't allocate memory|bad_alloc|MemoryError|Cannot allocate memory).*"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 18)
    parser.add_argument("--mib", type=int, default=2560, help="memory of a rank beside what it has at the start")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)  # in the ranks: what is freed leaves the process at once
    result = {
        **header(" ".join(["python -m benchmarks.fit.ladder", *sys.argv[1:]])),
        "model": MODEL,
        "shares": SHARES,
        "tokens": args.tokens,
        "limit_mib": args.mib,
        "short": _train(SHORT_TOKENS, args.mib, saving=True),
        "plain": _train(args.tokens, args.mib, saving=False),
        "saving": _train(args.tokens, args.mib, saving=True),
    }
    short = result["short"]
    error = abs(short["loss"] / short["loss_of_one_process"] - 1) if short["trained"] else float("inf")
    result["error"] = error
    write(result, args.output)
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{SHORT_TOKENS} tokens: loss {short.get('loss')}, one process {short.get('loss_of_one_process')}")
        for name in ("plain", "saving"):
            print(f"{args.tokens} tokens, {name}, {args.mib} MiB a rank: {result[name]['end']}")
    is_shown = result["plain"]["out_of_memory"] and result["saving"]["trained"] and error <= TOLERANCE
    return 0 if is_shown else 1


def _train(tokens: int, mib: int, *, saving: bool) -> dict[str, Any]:
    try:
        by_rank = run(_on_rank, [LOOPBACK] * len(SHARES), tokens, mib, saving)
    except RuntimeError as error:
        text = str(error)
        reason = re.search(_OUT_OF_MEMORY, text)
        end = f"out of memory: {reason[0].strip()}" if reason else f"failed: {text.strip().splitlines()[-1]}"
        return {"trained": False, "out_of_memory": reason is not None, "end": end}
    best = {key: max(results_of_rank[key] for results_of_rank in by_rank) for key in ("seconds", "used_mib")}
    end = f"trained, loss {by_rank[0]['loss']:.6f}, {best['seconds']:.0f} s, at most {best['used_mib']:.0f} MiB a rank"
    return {"trained": True, "out_of_memory": False, "end": end, **by_rank[0], **best}


# --- on a rank --------------------------------------------------------------------------------------


def _on_rank(rank: int, report: Any, tokens: int, mib: int, saving: bool) -> dict[str, Any]:
    """Train on one rank under the limit."""
    import deepspeed
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    import ds_hetero
    from ds_hetero.values.placement import stream_placement

    start_bytes = _private_bytes("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (start_bytes + (mib << 20),) * 2)
    deepspeed.init_distributed("gloo", verbose=False)
    ids = torch.randint(MODEL["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**MODEL, attn_implementation="sdpa"))
    alone = None
    if tokens <= SHORT_TOKENS:
        with torch.no_grad():
            alone = float(model(input_ids=ids, labels=ids).loss)
    groups = [
        {"ranks": [place], "tokens": [share], "heads": [MODEL["num_attention_heads"]]}
        for place, share in enumerate(SHARES)
    ]
    heads = {"num_heads": MODEL["num_attention_heads"], "num_kv_heads": MODEL["num_key_value_heads"]}
    section: dict[str, Any] = {
        "schedule": {"version": 1, **heads, "groups": groups},
        "checks": {"compare_every": "off"},
    }
    if saving:
        section["tile_tokens"] = TILE_TOKENS
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    handle = ds_hetero.register()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1 << 18},
        "sequence_parallel_size": len(SHARES),
        "heterogeneity": section,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    positions = stream_placement(handle.schedule, tokens).positions(rank)
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    shard = {
        "input_ids": ids[:, positions],
        "position_ids": torch.tensor([positions]),
        "shift_labels": labels[:, positions],
    }
    begin = time.perf_counter()
    for _ in range(STEPS):
        loss = engine(**shard).loss
        engine.backward(loss)
        engine.step()
    used_mib = (_private_bytes("VmHWM") - _private_bytes("VmRSS")) / 2**20  # what the peak had beyond the end
    return {
        "loss": float(loss.detach()),
        "loss_of_one_process": alone,
        "seconds": time.perf_counter() - begin,
        "used_mib": used_mib,
    }


def _private_bytes(name: str) -> int:
    """Return a number of /proc/self/status in bytes."""
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
