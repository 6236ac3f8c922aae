"""Pretrain a small Llama with the Hugging Face Trainer, on ranks that are not alike: the training of loop.py.

Three processes on a machine without GPUs, started in any of four ways:

    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
    torchrun --nproc-per-node 3 examples/pretrain/trainer.py --speeds 2,1,1
    deepspeed --num_gpus 3 --no_local_rank examples/pretrain/trainer.py --speeds 2,1,1
    accelerate launch --use_deepspeed --num_processes 3 examples/pretrain/trainer.py --speeds 2,1,1
    python -m ds_hetero.run --elastic --workers 3 examples/pretrain/trainer.py --speeds 2,1,1

On GPUs leave the first line out, and --speeds: the job then measures the ranks and plans. On one process:

    torchrun --nproc-per-node 1 examples/pretrain/trainer.py --speeds 1
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import ds_hetero
import settings
from definitions import documents
from history import History
from llama import VOCAB_SIZE, llama
from rows import EpochOrder, packed_rows
from samples import samples

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of tiny_llama.py

from tiny_llama import without_compiling


class InEpochOrder(Trainer):
    """A Trainer that reads the rows in the order of loop.py."""

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Sampler[int]:
        return EpochOrder(len(self.train_dataset), self.args.seed)


class Written(TrainerCallback):
    """Writes what the Trainer logs to the run's history."""

    def __init__(self, history: History) -> None:
        self.history = history

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin the history where the Trainer begins or resumes."""
        self.history.begin(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Note losses of steps and of evaluations; the Trainer also logs a summary at its end."""
        if logs and "loss" in logs:
            self.history.step(state.global_step, logs["loss"], logs["grad_norm"], logs["learning_rate"])
        if logs and "eval_loss" in logs:
            self.history.evaluation(state.global_step, logs["eval_loss"])


def main() -> None:
    args = settings.arguments(__doc__)
    without_compiling()
    ds_hetero.register()

    text = documents(VOCAB_SIZE[args.size])
    rows = packed_rows(text.training, args.row_tokens, args.seed)[: args.rows]
    held_out = packed_rows(text.held_out, args.row_tokens, args.seed)[: args.eval_rows]
    model = llama(args.size, args.seed)

    is_first = os.environ.get("RANK", "0") == "0"
    history = History(args.out, is_writer=is_first, row_tokens=args.row_tokens)
    history.say(f"{model.num_parameters():,} weights, {len(rows):,} rows an epoch")
    if not settings.has_tensorboard():
        history.say("no logs for TensorBoard: the package tensorboard is not installed")
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(args.out / "tensorboard")

    trainer = InEpochOrder(
        model=model,
        args=TrainingArguments(
            output_dir=str(args.out / "checkpoints"),
            deepspeed=settings.ds_config(args),
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            max_steps=args.steps,
            learning_rate=args.learning_rate,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": settings.LOWEST_LEARNING_RATE},
            warmup_steps=args.warm_up_steps,
            max_grad_norm=1.0,
            weight_decay=0.1,
            adam_beta2=0.95,
            seed=args.seed,
            prediction_loss_only=True,
            eval_strategy="steps",
            eval_steps=args.eval_every,
            save_strategy="steps",
            save_steps=args.save_every,
            save_total_limit=1,
            logging_steps=settings.LOG_EVERY,
            report_to="tensorboard" if settings.has_tensorboard() else "none",
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=rows,
        eval_dataset=held_out,
        callbacks=[Written(history)],
    )
    trainer.remove_callback(PrinterCallback)  # the history prints
    trainer.train(resume_from_checkpoint=args.resume)
    for sample in samples(trainer.model, text.tokenizer):
        history.say(f"----\n{sample}")


if __name__ == "__main__":
    main()
