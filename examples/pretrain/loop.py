"""Pretrain a small Llama in a loop around ``deepspeed.initialize``, on ranks that are not alike.

What a pretraining needs is here in full: warm-up and cosine, clipping (in ds_config.json), evaluation, checkpoints and
resuming, elastic restarts, samples at the end. Three processes on a machine without GPUs, started in any of four ways:

    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
    torchrun --nproc-per-node 3 examples/pretrain/loop.py --speeds 2,1,1
    deepspeed --num_gpus 3 --no_local_rank examples/pretrain/loop.py --speeds 2,1,1
    accelerate launch --use_deepspeed --num_processes 3 examples/pretrain/loop.py --speeds 2,1,1
    python -m ds_hetero.run --elastic --workers 3 examples/pretrain/loop.py --speeds 2,1,1

On GPUs leave the first line out, and --speeds: the job then measures the ranks and plans. On one process:

    torchrun --nproc-per-node 1 examples/pretrain/loop.py --speeds 1
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch.utils.data import DataLoader
from transformers import get_scheduler

import ds_hetero
import settings
from definitions import documents
from history import History, MeanLoss
from llama import VOCAB_SIZE, adamw, llama
from rows import EpochOrder, packed_rows
from samples import samples

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of tiny_llama.py

from tiny_llama import without_compiling

TAG = "newest"  # of the checkpoint; a save replaces the one before when it is complete


def main() -> None:
    args = settings.arguments(__doc__)
    without_compiling()
    handle = ds_hetero.register()

    text = documents(VOCAB_SIZE[args.size])
    rows = packed_rows(text.training, args.row_tokens, args.seed)[: args.rows]
    held_out = packed_rows(text.held_out, args.row_tokens, args.seed)[: args.eval_rows]
    order = EpochOrder(len(rows), args.seed)

    model = llama(args.size, args.seed)
    optimizer = adamw(model, args.learning_rate)
    scheduler = get_scheduler(
        "cosine_with_min_lr",
        optimizer,
        num_warmup_steps=args.warm_up_steps,
        num_training_steps=args.steps,
        scheduler_specific_kwargs={"min_lr_rate": settings.LOWEST_LEARNING_RATE},
    )
    config = settings.ds_config(args)
    if settings.has_tensorboard():
        config["tensorboard"] = {"enabled": True, "output_path": str(args.out), "job_name": "tensorboard"}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)

    mean_loss = MeanLoss()
    loader = handle.dataloader(DataLoader(rows, batch_size=1, sampler=order))
    loader = handle.elastic(loader, extra={"mean_loss": mean_loss})
    if args.resume and loader.resumed_step is None:
        _, saved = engine.load_checkpoint(str(args.out / "checkpoints"))
        loader.load_state_dict(saved["loader"])
        mean_loss.load_state_dict(saved["mean_loss"])

    history = History(args.out, is_writer=engine.global_rank == 0, row_tokens=args.row_tokens)
    history.begin(engine.global_steps)
    history.say(f"{sum(p.numel() for p in model.parameters()):,} weights, {len(rows):,} rows an epoch")
    if not settings.has_tensorboard():
        history.say("no logs for TensorBoard: the package tensorboard is not installed")

    step = engine.global_steps
    for epoch in loader.epochs(sys.maxsize):
        order.set_epoch(epoch)
        for batch in loader:
            learning_rate = scheduler.get_last_lr()[0]  # of this step: engine.step() moves it on
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            mean_loss.add(loss.item())
            if engine.global_steps == step:
                continue  # the step goes on with another micro-batch
            step = engine.global_steps
            if step % settings.LOG_EVERY == 0:
                norm = float(engine.get_global_grad_norm())
                history.step(step, mean_loss.take(), norm, learning_rate)
            if step % args.eval_every == 0 or step == args.steps:
                history.evaluation(step, evaluate(engine, held_out))
            if step % args.save_every == 0 or step == args.steps:
                state = {"loader": loader.state_dict(), "mean_loss": mean_loss.state_dict()}
                engine.save_checkpoint(str(args.out / "checkpoints"), TAG, client_state=state)
            if step >= args.steps:
                break
        if step >= args.steps:
            break

    for sample in samples(model, text.tokenizer):
        history.say(f"----\n{sample}")


def evaluate(engine: Any, rows: list[dict[str, torch.Tensor]]) -> float:
    """Return the mean loss of whole rows, each computed by all ranks together, and write it to TensorBoard."""
    engine.eval()
    total = 0.0
    for row in DataLoader(rows, batch_size=1):
        batch = {name: value.to(engine.device) for name, value in row.items()}
        with torch.no_grad():
            total += engine(**batch).loss.item()
    engine.train()
    loss = total / len(rows)
    if engine.monitor.enabled and engine.global_rank == 0:
        engine.monitor.write_events([("Evaluation/loss", loss, engine.global_samples)])
    return loss


if __name__ == "__main__":
    main()
