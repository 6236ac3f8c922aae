"""``"batch"`` with models of text, images and audio, with others' trainers and own losses, as on one process.

Budget: 40 s; 60 s more when slow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.integration.loops.test_unlike_batches import BATCH, _config
from tests.integration.tiny import (
    CLIP,
    VOCAB,
    adam,
    assert_same_parameters,
    collate,
    llama,
    parameters,
    samples,
    train_on_one_process,
)
from tests.integration.trainer.test_trainer import assert_same_logs, logged, make_trainer, one_process, ranks
from tests.support import run_deepspeed

STEPS, CLASSES = 2, 5
_TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_IMAGES = {**_TEXT, "image_size": 16, "patch_size": 8, "num_labels": CLASSES}
_SOUNDS = {
    **_TEXT,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "num_labels": CLASSES,
    "vocab_size": 16,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "pad_token_id": 0,
}
_SEQUENCES = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
_WHISPER = {**_SEQUENCES, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": VOCAB}
_STARTS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_T5 = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 1, "vocab_size": VOCAB}

# By class of transformers: its configuration's values, and the entries of its samples.
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "LlamaForCausalLM": ({**_TEXT, "num_key_value_heads": 2, "vocab_size": VOCAB}, "text, labels of tokens"),
    "BertForMaskedLM": ({**_TEXT, "vocab_size": VOCAB}, "text, labels of tokens"),
    "BertForSequenceClassification": ({**_TEXT, "vocab_size": VOCAB, "num_labels": CLASSES}, "text, a class"),
    "DistilBertForTokenClassification": (
        {"dim": 32, "hidden_dim": 64, "n_layers": 1, "n_heads": 4, "vocab_size": VOCAB, "num_labels": VOCAB},
        "text, labels of tokens",
    ),
    "T5ForConditionalGeneration": ({**_T5, "decoder_start_token_id": 0}, "text, labels of tokens"),
    "ViTForImageClassification": (_IMAGES, "image, a class"),
    "DeiTForImageClassification": (_IMAGES, "image, a class"),
    "ConvNextForImageClassification": (
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": CLASSES, "drop_path_rate": 0.0},
        "image, a class",
    ),
    "Wav2Vec2ForCTC": ({**_SOUNDS, "ctc_loss_reduction": "mean"}, "sound, letters"),
    "Wav2Vec2ForSequenceClassification": (_SOUNDS, "sound, a class"),
    "HubertForCTC": ({**_SOUNDS, "ctc_loss_reduction": "mean"}, "sound, letters"),
    "WhisperForConditionalGeneration": (
        {**_WHISPER, **_STARTS, "num_mel_bins": 8, "max_source_positions": 20},
        "mel, labels of tokens",
    ),
}


def _model(name: str) -> Any:
    import transformers

    kind = getattr(transformers, name)
    config = kind.config_class(**MODELS[name][0])
    for key in config.to_dict():
        if "dropout" in key and isinstance(getattr(config, key, None), float):
            setattr(config, key, 0.0)
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():  # no zeros, of which Adam would make steps of rounding alone
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def _samples(name: str, count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    made = []
    for of_tokens in samples(count):
        given, wanted = MODELS[name][1].split(", ")
        inputs = {
            "text": lambda ids=of_tokens["input_ids"]: {"input_ids": ids},
            "image": lambda: {"pixel_values": torch.randn(3, 16, 16, generator=generator)},
            "sound": lambda: {"input_values": torch.randn(400, generator=generator)},
            "mel": lambda: {"input_features": torch.randn(8, 40, generator=generator)},
        }[given]()
        letters = torch.full((6,), -100)
        letters[: 2 + len(made) % 5] = torch.randint(1, 16, (2 + len(made) % 5,), generator=generator)
        labels = {
            "labels of tokens": of_tokens["labels"],
            "a class": torch.randint(0, CLASSES, (), generator=generator),
            "letters": letters,
        }[wanted]
        made.append({**inputs, "labels": labels})
    return made


def _on_one_process(rank: int, names: list[str]) -> dict[str, Any]:
    """By model: norms and parameters."""
    results = {}
    for name in names:
        model, norms = _model(name), []
        optimizer = adam(model)
        for batch in DataLoader(_samples(name, STEPS * sum(BATCH)), sum(BATCH), collate_fn=collate):  # type: ignore[arg-type]
            optimizer.zero_grad()
            model(**batch).loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
        results[name] = norms, parameters(model)
    return results


def _on_ranks(rank: int, names: list[str], stage: int) -> dict[str, Any]:
    """By model: norms and parameters."""
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    results = {}
    for name in names:
        model, norms = _model(name), []
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=_config(stage))
        loader = DataLoader(_samples(name, STEPS * sum(BATCH)), 8, collate_fn=collate)  # type: ignore[arg-type]
        for batch in handle.for_engine(engine).dataloader(loader):
            engine.backward(engine(**batch).loss)
            engine.step()
            norms.append(float(engine.get_global_grad_norm()))
        results[name] = norms, parameters(model, stage)
        engine.destroy()
    return results


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_models_of_text_images_and_audio_equal_one_process(stage: int) -> None:
    expected = run_deepspeed(_on_one_process, 1, list(MODELS))[0]
    for results in run_deepspeed(_on_ranks, 2, list(MODELS), stage):
        for name, (norms, trained) in expected.items():
            np.testing.assert_allclose(results[name][0], norms, rtol=1e-5, err_msg=name)
            assert_same_parameters(results[name][1], trained)


# --- trainers -----------------------------------------------------------------------------------------


def _own_loss() -> tuple[type, dict[str, Any]]:
    from transformers import Trainer

    class OwnLoss(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            outputs = model(input_ids=inputs["input_ids"])
            logits, labels = outputs.logits[:, :-1], inputs["labels"][:, 1:]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
            return (loss, outputs) if return_outputs else loss

    return OwnLoss, {}


def _class_weights() -> tuple[type, dict[str, Any]]:
    from transformers import Trainer

    class Weighted(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            labels = inputs.pop("labels")
            logits = model(**inputs).logits[:, :-1].flatten(0, 1)
            return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), weight=torch.linspace(0.1, 3, VOCAB))

    return Weighted, {}


def _means_of_micro_batches() -> tuple[type, dict[str, Any]]:
    from transformers import Trainer

    class Means(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = False  # the Trainer divides by the number of micro-batches

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            return super().compute_loss(model, inputs, return_outputs)

    return Means, {}


def _loss_function() -> tuple[None, dict[str, Any]]:
    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
        logits, moved = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        total = nn.functional.cross_entropy(logits, moved, reduction="sum", label_smoothing=0.1)
        return total / (moved.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)

    return None, {"compute_loss_func": loss}


def _sft() -> tuple[type, dict[str, Any]]:
    from trl import SFTTrainer

    return SFTTrainer, {}


TRAINERS: dict[str, tuple[Callable[[], tuple[Any, dict[str, Any]]], str | None]] = {
    "compute_loss": (_own_loss, "token_mean"),
    "class weights": (_class_weights, None),
    "means of micro-batches": (_means_of_micro_batches, None),
    "compute_loss_func": (_loss_function, None),
    "SFTTrainer": (_sft, None),
}


def _train(rank: int, stage: int | None, name: str) -> Any:
    """Logs and trained parameters."""
    import ds_hetero

    make, unit = TRAINERS[name]
    kind, more = make()
    is_accumulated = name in ("class weights", "means of micro-batches")
    options: dict[str, Any] = {"dataset": samples(16 if is_accumulated else 12)}
    if name == "SFTTrainer":
        from datasets import Dataset
        from trl import SFTConfig

        rows = [{"input_ids": row["input_ids"][: 12 + 2 * i].tolist()} for i, row in enumerate(samples(12))]
        options = {
            "dataset": Dataset.from_list(rows),
            "config": SFTConfig,
            "bf16": False,
            "gradient_checkpointing": False,
        }
    elif more:
        options["more"] = more
    if stage is not None:
        ds_hetero.register()
    ds = None if stage is None else _config(stage, **({} if unit is None else {"loss": unit}))
    batch = sum(BATCH) if stage is None else sum(BATCH) // 2
    if kind is not None and name != "SFTTrainer":
        options["more"] = {"eval_dataset": None}
    accumulated = 2 if is_accumulated else 1
    trainer = make_trainer(
        ds, 0, kind, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulated, **options
    )
    trainer.train()
    logs = [{key: value for key, value in entry.items() if key != "num_input_tokens_seen"} for entry in logged(trainer)]
    return logs, parameters(trainer.model, stage or 0)


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_with_a_loss_of_their_own_equal_one_process(name: str) -> None:
    logs, expected = one_process(_train, None, name)
    for ours, trained in ranks(_train, 2, 2, name):
        assert_same_logs(ours, logs)
        assert_same_parameters(trained, expected)


# --- memory -------------------------------------------------------------------------------------------


def _with_weights(rank: int, stage: int, weights: Any) -> Any:
    """Norms, parameters, and the elements of optimizer state of this rank; or the error."""
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model, norms = llama(), []
    try:
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=adam(model), config=_config(stage, zero_partition=weights)
        )
    except ds_hetero.HeteroError as error:
        return str(error)
    loader = DataLoader(samples(12), 8, collate_fn=collate)  # type: ignore[arg-type]
    for batch in handle.dataloader(loader):
        engine.backward(engine(**batch).loss)
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    owned = sum(v.numel() for s in inner.state.values() for n, v in s.items() if n == "exp_avg")
    return norms, parameters(model, stage), owned


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_own_unequal_shares_beside_unequal_batches(stage: int) -> None:
    steps = [collate(samples(12)[i : i + sum(BATCH)]) for i in range(0, 12, sum(BATCH))]
    model = llama()
    _, norms = train_on_one_process(model, [[step] for step in steps])
    of_ranks = run_deepspeed(_with_weights, 2, stage, [3, 1])
    assert round(of_ranks[0][2] / of_ranks[1][2]) == 3
    for ours, trained, _ in of_ranks:
        np.testing.assert_allclose(ours, norms, rtol=1e-5)
        assert_same_parameters(trained, parameters(model))
