"""The loop of DeepSpeed's tutorial on Ulysses for Hugging Face models, without a word of ds_hetero.

Started through ``ds_hetero.run`` with a configuration that has a section "heterogeneity", it runs on uneven ranks:

    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1                            # on a machine without GPUs
    deepspeed --num_gpus 4 --module ds_hetero.run examples/ulysses_loop.py
    accelerate launch --use_deepspeed --num_processes 4 --module ds_hetero.run examples/ulysses_loop.py
    torchrun --nproc-per-node 4 -m ds_hetero.run examples/ulysses_loop.py

By itself, DeepSpeed refuses this model on four ranks, since 4 does not divide its 10 heads.
"""

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from torch.distributed._functional_collectives import all_gather_single  # differentiable; torch 2.15 names it

import corpus
from tiny_llama import tiny_llama, without_compiling

CONFIGS = Path(__file__).resolve().parents[1] / "ds_configs"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--local_rank", type=int, default=0, help="given by DeepSpeed's launcher")
parser.add_argument("--ds-config", type=Path, default=CONFIGS / "zero3.json")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--tokens", type=int, default=2048, help="of the shortest sequence")
args = parser.parse_args()

without_compiling()
deepspeed.init_distributed()
model = tiny_llama()
mpu = UlyssesSPAttentionHF.register_with_transformers(
    model_name_or_path=model,
    core_attn_implementation="sdpa",
    sequence_parallel_size=torch.distributed.get_world_size(),
    micro_batch_size=1,
    seq_length_is_variable=True,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
config = json.loads(args.ds_config.read_text())
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)

group = deepspeed.utils.groups._get_sequence_parallel_group()
data = corpus.long_files(min_tokens=args.tokens, max_tokens=2 * args.tokens, count=args.steps)
loader = UlyssesSPDataLoaderAdapter(
    torch.utils.data.DataLoader(data, batch_size=1),
    sp_rank=deepspeed.utils.groups._get_sequence_parallel_rank(),
    sp_group=group,
    sp_world_size=deepspeed.utils.groups._get_sequence_parallel_world_size(),
    device=engine.device,
)

for step, batch in enumerate(loader):
    shift_labels = batch["shift_labels"]
    logits = engine(**batch).logits
    loss = model.loss_function(logits, labels=None, shift_labels=shift_labels, vocab_size=model.config.vocab_size)
    # the mean over the tokens of all ranks
    losses = all_gather_single(loss[None], 0, group)
    counts = all_gather_single((shift_labels != -100).sum()[None], 0, group)
    loss = (losses * counts).sum() / counts.sum()
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0:
        print(f"step {step}: loss {loss.item():.4f}, gradient norm {engine.get_global_grad_norm():.4f}")
