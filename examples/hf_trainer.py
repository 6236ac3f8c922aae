"""The Hugging Face Trainer on ranks that are not alike.

Compared with a script for stock DeepSpeed, the line ``ds_hetero.register()`` is new, and the section "heterogeneity" in
ds_config.json. Four processes on a machine without GPUs, started in any of three ways:

    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
    deepspeed --num_gpus 4 --no_local_rank examples/hf_trainer.py
    accelerate launch --use_deepspeed --num_processes 4 examples/hf_trainer.py
    torchrun --nproc-per-node 4 examples/hf_trainer.py

On GPUs leave the first line out. With a configuration that has no such section the same script trains on whole
sequences, as stock DeepSpeed does:

    torchrun --nproc-per-node 1 examples/hf_trainer.py --ds-config MY_CONFIG.json
"""

import argparse
import os
from pathlib import Path

from accelerate import ParallelismConfig
from transformers import Trainer, TrainingArguments

import corpus
import ds_hetero
from tiny_llama import tiny_llama, without_compiling

CONFIGS = Path(__file__).resolve().parents[1] / "ds_configs"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ds-config", type=Path, default=CONFIGS / "zero3.json")
parser.add_argument("--sp-size", type=int, default=int(os.environ.get("WORLD_SIZE", "1")), help="all ranks if left out")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--tokens", type=int, default=2048, help="of the shortest sequence")
args = parser.parse_args()
parallelism = ParallelismConfig(sp_backend="deepspeed", sp_size=args.sp_size) if args.sp_size > 1 else None

without_compiling()
ds_hetero.register()

trainer = Trainer(
    model=tiny_llama(),
    args=TrainingArguments(
        output_dir="runs/hf_trainer",
        deepspeed=str(args.ds_config),
        parallelism_config=parallelism,
        per_device_train_batch_size=1,
        max_steps=args.steps,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=corpus.long_files(min_tokens=args.tokens, max_tokens=2 * args.tokens, count=args.steps),
)
trainer.train()
