"""Faults A3, A5 and A7 to A10: of the HF Trainer, of accelerate, and of elastic jobs.

Each job compares other numbers than parameters: values that were read, logged or saved. A fault begins at the step at
which an earlier revision began to differ.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.planted.job import Job, Trace
from tests.integration.tiny import llama

_ROWS, _LENGTH = 8, 40


class _Counted(Job):
    """A job whose numbers are compared instead of its parameters."""

    begins = 0
    is_apart = True
    section: ClassVar[Mapping[str, Any]] = {"schedule": "even"}

    def count(self, config: dict[str, Any]) -> dict[str, list[float]]:
        raise NotImplementedError

    def _train(self, trace: Trace, checks: bool) -> None:
        import ds_hetero

        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "zero_optimization": {"stage": 1},
        }
        if not self.alone:
            off = {} if checks else {"checks": "off"}
            config["heterogeneity"] = {**self.section, **off}
        self.handle = ds_hetero.register()
        numbers = self.count(config)
        trace.state = {name: np.asarray(values, dtype=float) for name, values in numbers.items()}
        trace.start = {name: np.zeros_like(values) for name, values in trace.state.items()}
        trace.steps = max(map(len, numbers.values()))

    def arguments(self, config: dict[str, Any], **more: Any) -> Any:
        from transformers import TrainingArguments

        options = {
            "deepspeed": None if self.alone else config,
            "use_cpu": self.alone,
            "report_to": "none",
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "train_sampling_strategy": "sequential",
        }
        return TrainingArguments(tempfile.mkdtemp(), **{**options, **more})


def _logged(trainer: Any) -> dict[str, list[float]]:
    entries = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {name: [float(entry[name]) for entry in entries] for name in ("loss", "grad_norm")}


class ClassWeightsOfSamples(_Counted):
    name = "A3 weights of classes"
    what = '"batch": [3, 1] and compute_loss with weights by class'
    section: ClassVar[Mapping[str, Any]] = {"batch": [3, 1]}

    def count(self, config: dict[str, Any]) -> dict[str, list[float]]:
        from transformers import BertConfig, BertForSequenceClassification, Trainer

        torch.manual_seed(0)
        sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
        quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = BertForSequenceClassification(BertConfig(**sizes, num_attention_heads=4, num_labels=3, **quiet))
        classes = [0, 0, 0, 2, 1, 1, 1, 2, 0, 1, 0, 2, 1, 0, 1, 2]
        data = [{"input_ids": torch.randint(3, 50, (10,)), "labels": torch.tensor(label)} for label in classes]

        class Weighted(Trainer):  # type: ignore[misc]
            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
                labels = inputs.pop("labels")
                outputs = model(**inputs)
                weight = torch.tensor([1.0, 2.0, 8.0])
                loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=weight)
                return (loss, outputs) if return_outputs else loss

        size = 4 if self.alone else 2
        arguments = self.arguments(config, per_device_train_batch_size=size, max_steps=4, learning_rate=1e-3)
        trainer = Weighted(model=model, train_dataset=data, args=arguments)
        trainer.train()
        return _logged(trainer)


class ChangedWhileSaved(_Counted):
    name = "A5 changed while saved"
    what = "a script changes all that an elastic job saves, in place, before the save is written"

    def count(self, config: dict[str, Any]) -> dict[str, list[float]]:
        if not self.alone:
            from tests.integration.elastic.test_changed_in_place import _check

            self.handle.undo()
            _check(self.rank, 1)
        return {"saved": [1.0]}


class SamplerOverRanks(_Counted):
    name = "A7 a sampler over ranks"
    what = "a DistributedSampler over all ranks in get_train_dataloader"

    def count(self, config: dict[str, Any]) -> dict[str, list[float]]:
        from transformers import Trainer

        rank, world = self.rank, 1 if self.alone else self.world
        data = _rows()

        class OwnSampler(Trainer):  # type: ignore[misc]
            def get_train_dataloader(self) -> Any:
                sampler = DistributedSampler(self.train_dataset, num_replicas=world, rank=rank, shuffle=False)
                return DataLoader(self.train_dataset, batch_size=2, sampler=sampler)

        arguments = self.arguments(config, per_device_train_batch_size=2, num_train_epochs=1)
        trainer = OwnSampler(model=llama(), train_dataset=data, args=arguments)
        trainer.train()
        return {"steps": [trainer.state.global_step], "epoch": [trainer.state.epoch]}


class ResumedGroups(_Counted):
    name = "A8 resumed groups"
    what = "a resume amid an epoch with group_by_length"
    begins = 3

    def count(self, config: dict[str, Any]) -> dict[str, list[float]]:
        from transformers import Trainer, TrainerCallback

        numbers = range(3, 15)
        data = [{"input_ids": [n] * (2 + 2 * n), "labels": [n] * (2 + 2 * n)} for n in numbers]
        read: list[float] = []

        def collate(rows: Any) -> Any:
            length = max(len(row["input_ids"]) for row in rows)
            read.extend(sorted(row["input_ids"][0] for row in rows))
            fills = (("input_ids", 0), ("labels", -100))
            return {
                key: torch.tensor([row[key] + [fill] * (length - len(row[key])) for row in rows]) for key, fill in fills
            }

        class Stop(TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                control.should_training_stop = control.should_save = state.global_step == 3

        folder = [tempfile.mkdtemp()]
        if not self.alone:
            torch.distributed.init_process_group("gloo") if not torch.distributed.is_initialized() else None
            torch.distributed.broadcast_object_list(folder)
        options = {"per_device_train_batch_size": 2, "max_steps": 6, "save_steps": 3, "save_strategy": "steps"}
        for callbacks, resumed in (([Stop()], None), ([], f"{folder[0]}/checkpoint-3")):
            arguments = self.arguments(config, **options, train_sampling_strategy="group_by_length", seed=3)
            arguments.output_dir = folder[0]
            trainer = Trainer(
                model=llama(), train_dataset=data, data_collator=collate, args=arguments, callbacks=callbacks
            )
            num_read_kept = len(read)
            trainer.train(resume_from_checkpoint=resumed)
        return {"read after": read[num_read_kept:][-6:]}


class EqualMicroBatches(_Counted):
    name = "A9 micro-batches alike"
    what = "accumulation of a model with accepts_loss_kwargs = False"

    def count(self, config: dict[str, Any]) -> dict[str, list[float]]:
        from transformers import LlamaForCausalLM, Trainer

        class AsQwenVL(LlamaForCausalLM):  # type: ignore[misc]
            accepts_loss_kwargs = False

        torch.manual_seed(0)
        model = AsQwenVL(llama().config)
        data = _rows()
        for number, row in enumerate(data):
            row["labels"] = row["labels"].clone()
            row["labels"][: 36 if number % 2 else 4] = -100
        options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 3}
        trainer = Trainer(model=model, train_dataset=data, args=self.arguments(config, **options))
        trainer.train()
        return _logged(trainer)


class GatheredMetrics(_Counted):
    name = "A10 gathered metrics"
    what = "gather_for_metrics with a short last batch"

    def count(self, config: dict[str, Any]) -> dict[str, list[float]]:
        from accelerate import Accelerator, DeepSpeedPlugin

        config["train_micro_batch_size_per_gpu"] = 2
        config["gradient_accumulation_steps"] = 1
        config["zero_allow_untested_optimizer"] = True
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        rows = _rows()[:5]
        model = llama()
        train = DataLoader(rows[:2], batch_size=2)
        evaluation = DataLoader([{**row, "number": torch.tensor(n)} for n, row in enumerate(rows)], batch_size=2)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer, train, evaluation = accelerator.prepare(model, optimizer, train, evaluation)
        model.eval()
        gathered: list[float] = []
        for batch in evaluation:
            numbers = batch.pop("number")
            with torch.no_grad():
                model(**batch)
            gathered += accelerator.gather_for_metrics(numbers).tolist()
        return {"mean": [sum(gathered) / len(gathered)], "rows": [float(len(gathered))]}


def _rows() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(0, 64, (_ROWS, _LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


TRAINERS: list[type[Job]] = [
    ClassWeightsOfSamples,
    ChangedWhileSaved,
    SamplerOverRanks,
    ResumedGroups,
    EqualMicroBatches,
    GatheredMetrics,
]
