"""Data parallelism over replicas of different tensor-parallel degree: a Llama whole on one rank, in halves on two.

The cut within a replica is torch's own tensor parallelism. What is new are the lines with ``sync``: gradients are added
up, and parameters returned, between ranks that hold different parts of a layer. Every replica gets a share of the batch
in proportion to its ranks. Seven processes on a machine without GPUs, in replicas of one, two and four:

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 7 examples/unequal_replicas.py --degrees 1 2 4

and the same training on one rank:

    torchrun --nproc-per-node 1 examples/unequal_replicas.py --degrees 1
"""

import argparse
import os
from itertools import accumulate

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import corpus
from ds_hetero.gradient_sync import AsymmetricGradientSync, tensor_parallel_layouts
from ds_hetero.values.splits import share

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--degrees", type=int, nargs="+", default=[1, 2, 4], help="of tensor parallelism, by replica")
parser.add_argument("--batch-size", type=int, default=7, help="sequences of all replicas")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--tokens", type=int, default=256, help="of a sequence")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank = dist.get_rank()

# Ranks of every replica in order: [0], [1, 2], [3, 4, 5, 6].
replicas = [list(range(end - degree, end)) for degree, end in zip(args.degrees, accumulate(args.degrees), strict=True)]
meshes = [DeviceMesh(device, ranks) for ranks in replicas]
mine = next(index for index, ranks in enumerate(replicas) if rank in ranks)

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=corpus.VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
).to(device)
columns = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
rows = ["self_attn.o_proj", "mlp.down_proj"]
plan = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in rows}
parallelize_module(model, meshes[mine], plan)

parameters = dict(model.named_parameters())
sync = AsymmetricGradientSync(parameters, tensor_parallel_layouts(parameters, replicas[mine]))
optimizer = torch.optim.AdamW(sync.owned.values(), lr=1e-3)

files = corpus.long_files(min_tokens=args.tokens, max_tokens=2**20, count=args.steps * args.batch_size)
sequences = torch.stack([file["input_ids"][: args.tokens] for file in files]).to(device)
shares = share(args.batch_size, args.degrees)
for step, batch in enumerate(sequences.split(args.batch_size)):
    part = batch.split(shares)[mine]
    tokens = part.numel() - len(part)  # the first of a sequence is not predicted
    sync.start(tokens)
    loss = model(input_ids=part, labels=part).loss  # a mean over this replica's tokens
    loss.backward()
    sync.finish()
    norm = sync.grad_norm()
    optimizer.step()
    sync.gather()

    total = torch.stack([loss.detach() * tokens, torch.tensor(float(tokens), device=device)])
    total = total if rank == replicas[mine][0] else torch.zeros_like(total)
    dist.all_reduce(total)
    if rank == 0:
        print(f"step {step}: loss {(total[0] / total[1]).item():.4f}, gradient norm {norm:.4f}")
dist.destroy_process_group()
