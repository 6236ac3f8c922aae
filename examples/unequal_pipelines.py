"""A training loop over pipelines of unequal stages: other layers, other ranks, other shares of the batch in each.

What a script changes is the plan in ds_config.json and the batch, which is that of a whole optimizer step. Four
processes on a machine without GPUs, by ds_configs/plans/four_ranks_4_3_2_1.json:

    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
    torchrun --nproc-per-node 4 examples/unequal_pipelines.py

and the same training in one process, without ds_hetero:

    torchrun --nproc-per-node 1 examples/unequal_pipelines.py --plan ""

Such plans come from ``ds-hetero plan --parallel full``; this one is short. Ranks 0 and 1 share the sequences of three
layers 4:3, rank 2 has the last layer and the head, and rank 3, which is slow, takes one sequence in nine through all.
"""

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import corpus
import ds_hetero
from tiny_llama import without_compiling

PLAN = Path(__file__).resolve().parents[1] / "ds_configs/plans/four_ranks_4_3_2_1.json"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--plan", default=str(PLAN), help="of version 2; empty for one process")
parser.add_argument("--batch-size", type=int, default=9, help="sequences of an optimizer step")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--tokens", type=int, default=512, help="of a sequence")
args = parser.parse_args()

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=corpus.VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
)
config = {"train_batch_size": args.batch_size, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}}
if args.plan:
    config["heterogeneity"] = {"schedule": json.loads(Path(args.plan).read_text())}
without_compiling()
handle = ds_hetero.register()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

files = corpus.long_files(min_tokens=args.tokens, max_tokens=2**20, count=args.steps * args.batch_size)
data = [{name: ids[: args.tokens] for name, ids in file.items()} for file in files]
for step, batch in enumerate(handle.dataloader(torch.utils.data.DataLoader(data, batch_size=args.batch_size))):
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0:
        print(f"step {step}: loss {loss.item():.4f}, gradient norm {engine.get_global_grad_norm():.4f}")
engine.destroy()
