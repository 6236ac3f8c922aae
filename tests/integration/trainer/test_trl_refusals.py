"""Every trainer of TRL that is not known is started on two ranks, each in a job of its own: all ranks say no by name.

Budget: 120 s.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.integration.tiny import UNEVEN_2, ds_config, llama
from tests.integration.trainer.test_trainer import make_trainer, ranks
from tests.integration.trainer.test_trl import chats, is_known, preferences, tokenizer, trainer_classes

# Of a trainer: what its data and its arguments must be, see `_options`, and settings.
_GENERATES = {"num_generations": 2, "beta": 0.0}
STARTED: dict[str, tuple[str, dict[str, Any]]] = {
    "DistillationTrainer": ("teacher", {}),
    "experimental.a2po.A2POTrainer": ("rewards", {}),
    "experimental.async_distillation.AsyncDistillationTrainer": (
        "prompts",
        {"teacher_server_urls": ["http://localhost:1"]},
    ),
    "experimental.async_grpo.AsyncGRPOTrainer": ("rewards", {}),
    "experimental.bema_for_ref_model.DPOTrainer": ("preferences", {}),
    "experimental.distillation.DistillationTrainer": ("teacher", {}),
    "experimental.gmpo.GMPOTrainer": ("rewards", _GENERATES),
    "experimental.gold.GOLDTrainer": ("teacher of ids", {}),  # of texts, it takes byte-level tokenizers alone
    "experimental.iw_opd.IWOPDTrainer": ("teacher", {}),
    "experimental.online_dpo.OnlineDPOTrainer": ("rewards", {}),
    "experimental.sdft.SDFTTrainer": ("contexts", {"num_generations": 2}),
    "experimental.sdpo.SDPOTrainer": ("rewards", {"num_generations": 2}),
    "experimental.server_distillation.ServerDistillationTrainer": (
        "chats",
        {"teacher_model_server_url": "http://localhost:1"},
    ),
    "experimental.tpo.TPOTrainer": ("references", {}),
}

# What says no before this engine is asked: TRL, while the trainer is made.
REFUSED_BY_TRL = {
    "experimental.async_distillation.AsyncDistillationTrainer": "ImportError: `kernels` is either not installed",
    "experimental.async_grpo.AsyncGRPOTrainer": (
        "AssertionError: Torch not compiled with CUDA enabled",
        "RuntimeError: Cannot re-initialize CUDA in forked subprocess",  # of a torch that is, without a card
    ),
    "experimental.server_distillation.ServerDistillationTrainer": "ImportError: vLLM is not installed",
}


@pytest.mark.sweep(keep=4)
@pytest.mark.slow
@pytest.mark.parametrize("name", STARTED)
def test_a_trainer_that_is_not_known_says_so_on_every_rank(name: str) -> None:
    first, second = ranks(_start, 2, name)
    assert first == second
    assert first.startswith(
        REFUSED_BY_TRL.get(name, f"ConfigError: TRL's {name} is not known to train on parts of sequences")
    )


@pytest.mark.slow
def test_adalora_whose_term_trl_leaves_out_on_one_process_is_refused_on_every_rank() -> None:
    first, second = ranks(_start, 2, "SFTTrainer", "adalora")
    assert first == second
    assert first.startswith("ConfigError: PEFT adapter 'default' is of AdaLoRA")


@pytest.mark.slow
def test_every_trainer_that_is_not_known_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    assert STARTED.keys() == {name for name, kind in trainer_classes().items() if not is_known(kind)}


def _no_reward(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def _options(needs: str, rank: int) -> tuple[Any, dict[str, Any]]:
    """A dataset, and arguments of the trainer."""
    from datasets import Dataset

    pairs = preferences(4)
    prompts = pairs.select_columns(["prompt"])
    options: dict[str, tuple[Any, dict[str, Any]]] = {
        "chats": (chats(4), {}),
        "contexts": (prompts.add_column("privileged_context", ["3 4"] * 4), {}),
        "preferences": (pairs, {}),
        "prompts": (prompts, {}),
        "references": (pairs.add_column("reference", pairs["chosen"]), {}),
        "rewards": (prompts, {"reward_funcs": _no_reward}),
        "teacher of ids": (Dataset.from_list([{"input_ids": [3, 4, 5, 1]}] * 4), {"teacher_model": _saved_model(rank)}),
        "teacher": (chats(4), {"teacher_model": _saved_model(rank)}),
    }
    return options[needs]


def _start(rank: int, name: str, adapter: str = "") -> str:
    """How a training ends that starts."""
    import ds_hetero

    ds_hetero.register()
    _saved_model(rank)
    needs, settings = STARTED.get(name, ("chats", {}))
    dataset, more = _options(needs, rank)
    if adapter:
        from peft import AdaLoraConfig

        more["peft_config"] = AdaLoraConfig(init_r=4, target_r=2, total_step=100, target_modules=["q_proj"])
    kind = name.rpartition(".")[2]
    try:
        trainer = make_trainer(
            {**ds_config(2, UNEVEN_2, train_micro_batch_size_per_gpu=2), "sequence_parallel_size": 2},
            0,  # some refuse a ParallelismConfig themselves
            _member(name, kind),
            config=_member(name, kind.replace("Trainer", "Config")),
            model=f"model-{rank}" if kind.startswith("Async") else _saved_model(rank),  # which take names alone
            more={"processing_class": tokenizer(), **more},
            dataset=dataset,
            per_device_train_batch_size=2,
            max_steps=1,
            bf16=False,
            gradient_checkpointing=False,
            **settings,
        )
        trainer.train()
    except Exception as error:  # whose it is, the test says
        return f"{type(error).__name__}: {error}"
    return "trained"


def _member(name: str, kind: str) -> Any:
    """A class of the package that a trainer is of, or of TRL itself."""
    import trl

    package = importlib.import_module(f"trl.{name.rpartition('.')[0]}".rstrip("."))
    return getattr(package, kind, None) or getattr(trl, kind)


def _saved_model(rank: int) -> Any:
    """A model that has a name, by which some trainers load another one."""
    from transformers import AutoModelForCausalLM

    path = f"model-{rank}"
    llama().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path, dtype="float32")


@pytest.mark.slow
def test_preferences_on_unlike_batches_are_refused_on_every_rank() -> None:
    first, second = ranks(_dpo_on_unlike_batches, 2)
    assert first == second
    assert first.startswith("DPOTrainer pairs and divides the samples of a batch by its own rules")


def _dpo_on_unlike_batches(rank: int) -> str:
    from trl import DPOConfig, DPOTrainer

    import ds_hetero

    ds_hetero.register()
    config = ds_config(2, None)
    del config["train_micro_batch_size_per_gpu"]
    trainer = make_trainer(
        {**config, "heterogeneity": {"batch": [3, 1]}},
        0,
        DPOTrainer,
        config=DPOConfig,
        model=llama(),
        more={"processing_class": tokenizer(), "ref_model": llama()},
        dataset=preferences(16),
        bf16=False,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        include_num_input_tokens_seen="no",
    )
    with pytest.raises(ds_hetero.ConfigError) as caught:
        trainer.train()
    return str(caught.value)
