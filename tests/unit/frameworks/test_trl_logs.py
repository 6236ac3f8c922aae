"""What a trainer of TRL has added up for its logs goes on with an elastic job; other trainers of TRL are refused."""

from collections import defaultdict

import pytest
from trl import DPOTrainer, SFTTrainer

from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.trl.running_state import running_state, set_running_state


def _trainer(metrics, tokens):
    trainer = SFTTrainer.__new__(SFTTrainer)
    trainer._metrics = {mode: defaultdict(list, of_mode) for mode, of_mode in metrics.items()}
    trainer._total_train_tokens = tokens
    return trainer


def test_numbers_since_the_last_log_go_on():
    before = _trainer({"train": {"entropy": [1.0, 2.0]}, "eval": {}}, 7)
    state = running_state(before)
    before._metrics["train"]["entropy"].append(3.0)
    after = _trainer({"train": {"entropy": [9.0], "num_tokens": [1]}, "eval": {}}, 0)
    set_running_state(after, state)
    assert after._metrics == {"train": {"entropy": [1.0, 2.0]}, "eval": {}} and after._total_train_tokens == 7
    after._metrics["train"]["mean_token_accuracy"].append(0.5)  # still one of TRL's, which makes lists as it needs them


def test_a_trainer_that_compares_with_what_no_save_holds_is_refused():
    with pytest.raises(ConfigError, match=r"DPOTrainer cannot be kept by an elastic job yet.*SFTTrainer resumes"):
        running_state(DPOTrainer.__new__(DPOTrainer))


def test_a_trainer_that_is_not_of_trl_has_nothing_more():
    assert running_state(object()) == {}
