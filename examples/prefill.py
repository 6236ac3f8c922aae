"""Prefill of a long prompt by an uneven ring: every rank computes, and keeps, its share of the KV cache.

    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1         # on a machine without GPUs
    torchrun --nproc-per-node 4 examples/prefill.py

`prefill` is all that is needed. The rest of the script has every rank compute the whole prompt by itself as well, and
compares: exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel

import corpus
import ds_hetero
from ds_hetero.engine.handle import Handle
from ds_hetero.values.placement import stream_placement
from tiny_llama import tiny_llama, without_compiling

CONFIGS = Path(__file__).resolve().parents[1] / "ds_configs"
TOLERANCE = 1e-5  # of the largest value; sums of fp32 taken in another order differ by less


@torch.no_grad()
def prefill(handle: Handle, model: PreTrainedModel, prompt: torch.Tensor) -> tuple[torch.Tensor, DynamicCache]:
    """Logits and KV cache of this rank's tokens.

    They are at ``stream_placement(handle.schedule, length).positions(rank)``.

    prompt    [B, L], the same on every rank
    logits    [B, s, V]
    cache     keys and values [B, G, s, D] in every layer, for every KV head
    """
    with handle.sharded():
        (shard,) = handle.dataloader([{"input_ids": prompt}], batches="same")
        outputs = model(**shard, use_cache=True)
    return outputs.logits, outputs.past_key_values


@torch.no_grad()
def differences(
    model: PreTrainedModel, prompt: torch.Tensor, positions: list[int], logits: torch.Tensor, cache: DynamicCache
) -> dict[str, float]:
    """Largest difference to a prefill of the whole prompt by this process alone, over the largest value."""
    whole = model(input_ids=prompt, use_cache=True)  # in evaluation a model takes whole sequences
    pairs = {"logits": [(logits, whole.logits[:, positions])], "KV cache": []}
    for ours, theirs in zip(cache.layers, whole.past_key_values.layers, strict=True):
        pairs["KV cache"] += [
            (ours.keys, theirs.keys[:, :, positions]),
            (ours.values, theirs.values[:, :, positions]),
        ]
    return {name: max(((a - b).abs().max() / b.abs().max()).item() for a, b in same) for name, same in pairs.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", type=Path, default=CONFIGS / "schedules/four_ranks_4_3_2_1.json")
    parser.add_argument("--tokens", type=int, default=8192, help="of the prompt, or a few more")
    args = parser.parse_args()

    without_compiling()
    handle = ds_hetero.register()
    model = tiny_llama()
    section = {"schedule": json.loads(args.schedule.read_text())}
    engine, *_ = deepspeed.initialize(
        model=model, config={"train_micro_batch_size_per_gpu": 1, "heterogeneity": section}
    )
    engine.eval()
    (sample,) = corpus.long_files(min_tokens=args.tokens, max_tokens=2 * args.tokens, count=1)
    prompt = sample["input_ids"][None].to(engine.device)

    rank, length = dist.get_rank(), prompt.shape[1]
    placement = stream_placement(handle.schedule, length)
    logits, cache = prefill(handle, model, prompt)
    row = {
        "tokens": logits.shape[1],
        "positions": ", ".join(f"{start}-{stop - 1}" for start, stop in placement.intervals(rank)),
        "cache bytes": sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers),
        **differences(model, prompt, placement.positions(rank), logits, cache),
    }
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    same = all(row[name] <= TOLERANCE for row in rows for name in ("logits", "KV cache"))
    if rank == 0:
        report(rows, length, same)
    dist.destroy_process_group()
    return 0 if same else 1


def report(rows: list[dict], length: int, same: bool) -> None:
    table = Table(title=f"Prefill of {length:,} tokens by {len(rows)} ranks", box=box.SIMPLE)
    for heading in ("rank", "tokens", "positions", "KV cache", "logits\nrel. diff.", "KV cache\nrel. diff."):
        table.add_column(heading, justify="right")
    for rank, row in enumerate(rows):
        differs = (f"{row[name]:.0e}" for name in ("logits", "KV cache"))
        table.add_row(str(rank), f"{row['tokens']:,}", row["positions"], f"{row['cache bytes'] / 1e6:.1f} MB", *differs)
    console = Console()
    console.print(table)
    verdict = "[green]PASS[/]: equal to" if same else "[red]FAIL[/]: not equal to"
    console.print(f"{verdict} a prefill by one process, up to {TOLERANCE:.0e} of the largest value.")


if __name__ == "__main__":
    sys.exit(main())
