"""A training loop around ``deepspeed.initialize`` on ranks that are not alike.

Compared with a script for stock DeepSpeed, the three lines with ``handle`` are new, and the section "heterogeneity" in
ds_config.json. Four processes on a machine without GPUs, started in any of three ways:

    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
    deepspeed --num_gpus 4 --no_local_rank examples/deepspeed_loop.py
    accelerate launch --use_deepspeed --num_processes 4 examples/deepspeed_loop.py
    torchrun --nproc-per-node 4 examples/deepspeed_loop.py

On GPUs leave the first line out. With a configuration that has no such section the same script trains on whole
sequences, as stock DeepSpeed does:

    torchrun --nproc-per-node 1 examples/deepspeed_loop.py --ds-config MY_CONFIG.json
"""

import argparse
from pathlib import Path

import deepspeed
import torch

import corpus
import ds_hetero
from tiny_llama import tiny_llama, without_compiling

CONFIGS = Path(__file__).resolve().parents[1] / "ds_configs"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ds-config", type=Path, default=CONFIGS / "zero1.json")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--tokens", type=int, default=2048, help="of the shortest sequence")
parser.add_argument("--local_rank", type=int, help="given by launchers of DeepSpeed; the environment says it too")
args = parser.parse_args()

without_compiling()
handle = ds_hetero.register()

model = tiny_llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=str(args.ds_config))
data = corpus.long_files(min_tokens=args.tokens, max_tokens=2 * args.tokens, count=args.steps)
loader = handle.dataloader(torch.utils.data.DataLoader(data, batch_size=1))

for step, batch in enumerate(loader):
    loss = handle.loss(engine(**batch), batch)
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0:
        print(f"step {step}: loss {loss.item():.4f}, gradient norm {engine.get_global_grad_norm():.4f}")
