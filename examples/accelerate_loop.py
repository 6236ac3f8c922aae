"""A training loop with accelerate on ranks that are not alike.

Compared with a script for stock DeepSpeed, the two lines with ``handle`` are new, and the section "heterogeneity" in
ds_config.json. Four processes on a machine without GPUs, started in any of three ways:

    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
    deepspeed --num_gpus 4 --no_local_rank examples/accelerate_loop.py
    accelerate launch --use_deepspeed --num_processes 4 examples/accelerate_loop.py
    torchrun --nproc-per-node 4 examples/accelerate_loop.py

On GPUs leave the first line out. With a configuration that has no such section the same script trains on whole
sequences, as stock DeepSpeed does:

    torchrun --nproc-per-node 1 examples/accelerate_loop.py --ds-config MY_CONFIG.json
"""

import argparse
import os
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin, ParallelismConfig

import corpus
import ds_hetero
from tiny_llama import tiny_llama, without_compiling

CONFIGS = Path(__file__).resolve().parents[1] / "ds_configs"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ds-config", type=Path, default=CONFIGS / "zero2.json")
parser.add_argument("--sp-size", type=int, default=int(os.environ.get("WORLD_SIZE", "1")), help="all ranks if left out")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--tokens", type=int, default=2048, help="of the shortest sequence")
args = parser.parse_args()
parallelism = ParallelismConfig(sp_backend="deepspeed", sp_size=args.sp_size) if args.sp_size > 1 else None

without_compiling()
handle = ds_hetero.register()

accelerator = Accelerator(
    deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=str(args.ds_config)),
    parallelism_config=parallelism,
)
model = tiny_llama()
data = corpus.long_files(min_tokens=args.tokens, max_tokens=2 * args.tokens, count=args.steps)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters(), lr=1e-3), torch.utils.data.DataLoader(data, batch_size=1)
)
for step, batch in enumerate(loader):
    loss = handle.loss(model(**batch), batch)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"step {step}: loss {loss.item():.4f}, gradient norm {model.get_global_grad_norm():.4f}")
