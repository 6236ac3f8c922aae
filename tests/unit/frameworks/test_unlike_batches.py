"""What the Trainer's batches of unequal sizes refuse before they are drawn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.transformers.unlike_batches import expect_independent_samples


def test_losses_of_whole_sequences_refuse_unequal_batches() -> None:
    trainer: Any = SimpleNamespace(args=SimpleNamespace(train_sampling_strategy="random"))
    expect_independent_samples(trainer, of_sequences=False)
    with pytest.raises(ConfigError, match=r'divides the samples .* Leave "heterogeneity\.batch" out'):
        expect_independent_samples(trainer, of_sequences=True)
