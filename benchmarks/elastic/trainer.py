"""Train the benchmark's model with the HF Trainer or TRL's, and the same in one process without DeepSpeed."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.elastic.loops import GLOBAL, LAYERS, norm_of_owned
from benchmarks.elastic.small_model import CLIP, LENGTH, LR, VOCAB, make_loader, make_model, norm_of, padded

TOKEN_METRICS = ("entropy", "mean_token_accuracy", "num_tokens")  # that TRL logs
_LOG_EVERY = 3  # so that a fault comes between the steps of a mean


def train(
    config: dict[str, Any] | None,
    num_steps: int,
    world_size: int,
    log: Callable[..., None],
    pause_s: float = 0.0,
    *,
    loop: str = "trainer",
) -> None:
    """Train, and log every step.

    Args:
        config: of DeepSpeed; None for one process without DeepSpeed.
        pause_s: after each step.
        loop: "trainer"; "sft", TRL's SFTTrainer, which also logs token counts; "trainer_of_pipelines".
    """
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    kind, arguments_of, more = Trainer, TrainingArguments, {}
    is_cut, shape = loop == "trainer_of_pipelines", {}
    if is_cut:
        shape, more = {"layers": LAYERS}, {"data_collator": padded}
    if loop == "sft":
        from trl import SFTConfig, SFTTrainer

        kind, arguments_of = SFTTrainer, functools.partial(SFTConfig, max_length=LENGTH, gradient_checkpointing=False)
        more = {"processing_class": _tokenizer()}

    class Observed(kind):  # type: ignore[misc,valid-type]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.step_loss = super().training_step(*args, **kwargs)
            return self.step_loss

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            log("built", world_size=world_size)
            log("ready", world_size=world_size, step=state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            is_owned = is_cut and config is not None
            norm = norm_of_owned(trainer.deepspeed) if is_owned else norm_of(_whole_parameters(trainer, config))
            numbers = {"loss": float(trainer.step_loss), "parameters": norm}
            if state.is_world_process_zero:
                log("step", step=state.global_step, world_size=world_size, **numbers)
            time.sleep(pause_s)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if state.is_world_process_zero and logs and "loss" in logs:
                of_tokens = {name: float(logs[name]) for name in TOKEN_METRICS if name in logs}
                numbers = {"logged": float(logs["loss"]), "norm": float(logs.get("grad_norm", 0.0)), **of_tokens}
                log("log", step=state.global_step, **numbers)

    parallelism = None
    if world_size > 1:
        handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
        parallelism = ParallelismConfig(sp_backend="deepspeed", sp_size=world_size, sp_handler=handler)
    with tempfile.TemporaryDirectory() as folder:
        arguments = arguments_of(
            output_dir=folder,
            max_steps=num_steps,
            per_device_train_batch_size=GLOBAL if is_cut else 1,
            max_grad_norm=CLIP,
            learning_rate=LR,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=30,
            deepspeed=config,
            parallelism_config=parallelism,
            use_cpu=config is None,
            logging_steps=_LOG_EVERY,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            bf16=False,
        )
        dataset = make_loader().dataset
        if loop == "sft":
            from datasets import Dataset

            dataset = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in dataset])
        trainer = Observed(
            model=make_model(**shape), args=arguments, train_dataset=dataset, callbacks=[Steps()], **more
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def _whole_parameters(trainer: Any, config: dict[str, Any] | None) -> list[torch.Tensor]:
    """Return all parameters of the model, gathered from their owners."""
    parameters = list(trainer.model.parameters())
    if config is None:
        return parameters
    from deepspeed.utils import safe_get_full_fp32_param

    gathered = [safe_get_full_fp32_param(parameter) for parameter in parameters]
    return [p if w is None else w for w, p in zip(gathered, parameters, strict=True)]


def _tokenizer() -> Any:
    """Return a tokenizer with one word per id; TRL needs one, although the samples are ids already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="2")


def train_alone(num_steps: int, loop: str) -> list[dict[str, float]]:
    """Return the numbers of every step in this process, with those of logs at their steps."""
    from accelerate.utils import patch_environment

    rows: list[dict[str, float]] = []

    def log(event: str, **numbers: Any) -> None:
        if event == "step":
            rows.append({name: numbers[name] for name in ("loss", "parameters")})
        elif event == "log":
            rows[-1] |= {name: numbers[name] for name in ("logged", "norm", *TOKEN_METRICS) if name in numbers}

    with patch_environment(ACCELERATE_USE_CPU="true"):  # launchers that start later inherit the environment
        train(None, num_steps, 1, log, loop=loop)
    return rows
