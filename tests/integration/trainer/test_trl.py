"""TRL's trainers of whole sequences train, log and evaluate on uneven ranks as on one process.

Budget: 60 s.
"""

from __future__ import annotations

import importlib
import pkgutil
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.tiny import UNEVEN_2, UNEVEN_4, VOCAB, assert_same_parameters, ds_config, llama, parameters
from tests.integration.trainer.test_trainer import make_trainer, one_process, ranks

# Of log entries, what depends on time.
_TIMES = ("runtime", "per_second", "flos")
_CELLS = "num_input_tokens_seen"  # with padding, of which two replicas' batches have less than one batch of all rows
# Of CPO and ORPO, means over all logits, those of padding too, which no loss reads and no two kernels agree on.
_OF_PADDING = ("logits/chosen", "logits/rejected")
STEPS, BATCH = 5, 2


def words(count: int, seed: int) -> str:
    """So many words of the tokenizer, the end of a text among them only at its end."""
    generator = torch.Generator().manual_seed(seed)
    return " ".join(str(int(word)) for word in torch.randint(3, VOCAB, (count,), generator=generator))


def tokenizer() -> Any:
    """A word per id, with a chat template that shows what was said."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="1", pad_token="2", model_max_length=64)
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return fast


def preferences(count: int) -> Any:
    """Prompts with a chosen and a rejected text, all of unlike lengths."""
    from datasets import Dataset

    return Dataset.from_list(
        [
            {
                "prompt": words(5 + i % 4, 3 * i),
                "chosen": f" {words(9 + 2 * (i % 3), 3 * i + 1)} 1",
                "rejected": f" {words(14 - i % 5, 3 * i + 2)} 1",
            }
            for i in range(count)
        ]
    )


def chats(count: int) -> Any:
    """A question and an answer each."""
    from datasets import Dataset

    said = [(words(5 + i % 4, 2 * i), words(9 + 2 * (i % 3), 2 * i + 1)) for i in range(count)]
    return Dataset.from_list(
        [
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            for question, answer in said
        ]
    )


def reward_model() -> Any:
    """With a head of one score."""
    from transformers import LlamaForSequenceClassification

    config = llama().config
    config.num_labels, config.pad_token_id = 1, 2
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    return model


def adapted() -> Any:
    """With an adapter to be trained."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(
        llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    )


def _dpo(common: dict[str, Any], model: Any = None) -> Any:
    from trl import DPOConfig, DPOTrainer

    reference = {"ref_model": llama(hidden_act="gelu")} if model is None else {}
    common["dataset"], common["eval_dataset"] = preferences(2 * STEPS * BATCH), preferences(4)
    return DPOTrainer, DPOConfig, model or llama(), reference, {"beta": 0.5}


def _reward(common: dict[str, Any]) -> Any:
    from trl import RewardConfig, RewardTrainer

    common["dataset"], common["eval_dataset"] = preferences(2 * STEPS * BATCH), preferences(4)
    return RewardTrainer, RewardConfig, reward_model(), {}, {"center_rewards_coefficient": 0.1}


def _gkd(common: dict[str, Any]) -> Any:
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    common["dataset"], common["eval_dataset"] = chats(2 * STEPS * BATCH), chats(4)
    teacher = {"teacher_model": llama(initializer_range=0.3)}  # far from the student: else rounding decides
    return GKDTrainer, GKDConfig, llama(), teacher, {"lmbda": 0.0, "beta": 0.3, "temperature": 0.8}


def _kto(common: dict[str, Any]) -> Any:
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    def judged(pairs: Any) -> Any:
        return Dataset.from_list(
            [
                {"prompt": pair["prompt"], "completion": pair[said], "label": said == "chosen"}
                for pair, said in zip(pairs, cycle(["chosen", "rejected", "rejected", "chosen"]), strict=False)
            ]
        )

    common["dataset"], common["eval_dataset"] = judged(preferences(2 * STEPS * BATCH)), judged(preferences(4))
    return KTOTrainer, KTOConfig, llama(), {"ref_model": llama(hidden_act="gelu")}, {"beta": 0.5}


def _experimental_kto(common: dict[str, Any]) -> Any:
    from trl.experimental.kto import KTOConfig, KTOTrainer

    return KTOTrainer, KTOConfig, *_kto(common)[2:]


def _cpo(common: dict[str, Any]) -> Any:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    common["dataset"], common["eval_dataset"] = preferences(2 * STEPS * BATCH), preferences(4)
    return CPOTrainer, CPOConfig, llama(), {}, {"beta": 0.5, "cpo_alpha": 0.7}


def _orpo(common: dict[str, Any]) -> Any:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    common["dataset"], common["eval_dataset"] = preferences(2 * STEPS * BATCH), preferences(4)
    return ORPOTrainer, ORPOConfig, llama(), {}, {"beta": 0.5}


KINDS: dict[str, Any] = {
    "DPO": _dpo,
    "DPO, the adapter taken off": lambda common: _dpo(common, adapted()),
    "reward": _reward,
    "GKD": _gkd,
    "KTO": _kto,
    "KTO, experimental": _experimental_kto,
    "CPO": _cpo,
    "ORPO": _orpo,
}


def _train(rank: int, stage: int | None, schedule: Any, kind: str, batch_size: int) -> Any:
    """Logs without times, and trained parameters; ``stage`` None is one process without DeepSpeed."""
    import ds_hetero

    sp_size = sum(len(group["ranks"]) for group in schedule["groups"])
    ds = None
    if stage is not None:
        ds_hetero.register()
        ds = ds_config(stage, schedule, train_micro_batch_size_per_gpu=batch_size, gradient_accumulation_steps=2)
    options: dict[str, Any] = {}
    trainer_class, config, model, more, settings = KINDS[kind](options)
    trainer = make_trainer(
        ds,
        sp_size,
        trainer_class,
        config=config,
        model=model,
        more={**more, "processing_class": tokenizer(), "eval_dataset": options.pop("eval_dataset")},
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size // BATCH,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        eval_strategy="steps",
        eval_steps=3,
        bf16=False,
        gradient_checkpointing=False,
        **options,
        **settings,
    )
    trainer.train()
    logs = [
        {name: value for name, value in entry.items() if not any(time in name for time in _TIMES)}
        for entry in trainer.state.log_history
    ]
    return logs, parameters(trainer.model, stage or 0)


def _assert_trains_alike(world_size: int, stage: int, schedule: Any, kind: str) -> None:
    sp_size = sum(len(group["ranks"]) for group in schedule["groups"])
    left_out = {_CELLS} if world_size > sp_size else set()
    if kind in ("CPO", "ORPO"):
        left_out |= {before + name for before in ("", "eval_") for name in _OF_PADDING}
    expected_logs, expected = one_process(_train, None, schedule, kind, BATCH * world_size // sp_size)
    for logs, trained in ranks(_train, world_size, stage, schedule, kind, BATCH):
        assert [sorted(entry) for entry in logs] == [sorted(entry) for entry in expected_logs]
        for ours, theirs in zip(logs, expected_logs, strict=True):
            for name in theirs.keys() - left_out:
                value = theirs[name]
                np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-5, err_msg=f"{name} in {theirs}")
        assert_same_parameters(trained, expected)


QUICK = ("DPO", "DPO, the adapter taken off", "reward", "GKD")


@pytest.mark.sweep(keep=4)
@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        pytest.param(kind, stage, marks=[] if stage == 2 and kind in ("DPO", "reward") else pytest.mark.slow)
        for kind in KINDS
        for stage in (2, 3)
    ],
)
def test_five_steps_equal_one_process(kind: str, stage: int) -> None:
    _assert_trains_alike(2, stage, UNEVEN_2, kind)


@pytest.mark.sweep(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_tokens_changes_nothing(kind: str) -> None:
    _assert_trains_alike(4, 3, UNEVEN_4, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in QUICK if kind != "GKD"])
def test_two_replicas_equal_one_process(kind: str) -> None:
    """But for losses that TRL itself averages by process: GKD's by labels, CPO's and ORPO's by tokens of a process.

    KTO pairs texts with others of a process's batch.
    """
    _assert_trains_alike(4, 2, UNEVEN_2, kind)


def test_an_experimental_trainer_is_not_taken_for_the_one_whose_name_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.bema_for_ref_model import DPOTrainer

    from ds_hetero.errors import ConfigError
    from ds_hetero.frameworks.trl.known_trainers import expect_known

    with pytest.raises(ConfigError, match=r"experimental\.bema_for_ref_model\.DPOTrainer is not known to train"):
        expect_known(object.__new__(DPOTrainer))


@pytest.mark.slow
def test_every_trainer_of_trl_is_known_or_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The known ones train as on one process here and in test_trl_completions; of each class ``train()`` asks this."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    classes = trainer_classes()
    known = {name for name, kind in classes.items() if is_known(kind)}
    of_packages = {f"experimental.{name.lower()}.{name}Trainer" for name in ("CPO", "GKD", "KTO", "ORPO")}
    assert known == of_packages | {f"{name}Trainer" for name in ("DPO", "GRPO", "KTO", "RLOO", "Reward", "SFT")}
    assert {"DistillationTrainer", "experimental.bema_for_ref_model.DPOTrainer"} < classes.keys() - known


def is_known(kind: type) -> bool:
    from ds_hetero.errors import ConfigError
    from ds_hetero.frameworks.trl.known_trainers import expect_known

    try:
        expect_known(object.__new__(kind))
    except ConfigError as error:
        assert f"{kind.__name__} is not known to train on parts of sequences" in str(error)
        return False
    return True


def trainer_classes() -> dict[str, type]:
    """All trainers that TRL has, by name, those of experimental packages with the package before it."""
    import trl.experimental
    import trl.trainer

    found: dict[str, type] = {}
    for root in (trl.trainer, trl.experimental):
        for module in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
            if not module.name.endswith("openenv_harness"):  # needs a package of its own
                members = vars(importlib.import_module(module.name)).values()
                found |= {_public_name(kind): kind for kind in members if _is_trainer(kind)}
    return found


def _is_trainer(kind: Any) -> bool:
    return (
        isinstance(kind, type)
        and kind.__module__.startswith("trl.")
        and kind.__name__.endswith("Trainer")
        and not kind.__name__.startswith("_")
    )


def _public_name(kind: type) -> str:
    packages = kind.__module__.split(".")[1:3]
    return ".".join([*(packages if packages[0] == "experimental" else []), kind.__name__])


def test_an_unknown_version_of_trl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_hetero.engine import patching
    from ds_hetero.errors import VersionError
    from ds_hetero.frameworks.trl.known_trainers import expect_known

    trainer = type("DPOTrainer", (), {"__module__": "trl.trainer.dpo_trainer"})()
    expect_known(trainer)
    monkeypatch.setattr(patching, "version", lambda package: "0.9.0")
    with pytest.raises(VersionError, match=r"trl 0\.9\.0 is not a version that works\. Install trl>=1\.16\."):
        expect_known(trainer)
