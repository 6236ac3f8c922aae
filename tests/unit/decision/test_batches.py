"""Batches by rank become a plan, or a refusal that names the number to write."""

from __future__ import annotations

import pytest

from ds_hetero.decision.batches import balanced_batches, plan_of_batches
from ds_hetero.decision.facts import TrainingFacts
from ds_hetero.errors import ConfigError
from ds_hetero.values.section import read_section


def test_a_list_is_the_micro_batch_of_every_rank() -> None:
    split = plan_of_batches([6, 2], TrainingFacts(micro_batch_size=4, accumulation_steps=2), 2).batch_split
    assert split is not None
    assert (split.micro_batch_sizes, split.micro_batches, split.samples) == ((6, 2), (2, 2), 16)


@pytest.mark.parametrize(
    "training", [TrainingFacts(micro_batch_size=4), TrainingFacts(train_batch_size=24, accumulation_steps=2)]
)
def test_by_speed_begins_with_equal_batches_of_the_same_sum(training: TrainingFacts) -> None:
    split = plan_of_batches("by_speed", training, 3).batch_split
    assert split is not None and split.micro_batch_sizes == (4, 4, 4)


def test_by_speed_begins_by_the_memory_of_unlike_devices() -> None:
    split = plan_of_batches("by_speed", TrainingFacts(micro_batch_size=4), 2, [24, 8]).batch_split
    assert split is not None and split.micro_batch_sizes == (6, 2)


def test_samples_are_dealt_out_by_speed_and_room() -> None:
    assert balanced_batches(6, [1.0, 2.0], [6, 6]) == (4, 2)  # the example of its docstring
    assert balanced_batches(8, [1.0, 3.0], [8, 8]) == (6, 2)
    assert balanced_batches(8, [1.0, 3.0], [5, 8]) == (5, 3)
    assert balanced_batches(9, [1.0, 1.0, 50.0], [9, 9, 9]) == (4, 4, 1)


@pytest.mark.parametrize("micro", [3, 4])
def test_a_mean_may_be_rounded(micro: int) -> None:
    training = TrainingFacts(micro_batch_size=micro, train_batch_size=2 * micro)
    assert plan_of_batches([5, 2], training, 2).batch_split is not None


@pytest.mark.parametrize(
    ("batch", "training", "named"),
    [
        ([6, 2, 1], TrainingFacts(), ["3 numbers", "2 processes"]),
        ([6, 2], TrainingFacts(micro_batch_size=8), ["8 samples in all", "is 8. Make that 4", "sum to 16"]),
        ([6, 2], TrainingFacts(train_batch_size=9), ["global batch of 8", "train_batch_size is 9"]),
        ("by_speed", TrainingFacts(), ['"train_micro_batch_size_per_gpu"']),
        ("by_speed", TrainingFacts(train_batch_size=1), ["1 samples for 2 ranks"]),
    ],
)
def test_wrong_batches_are_refused(batch: object, training: TrainingFacts, named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of_batches(batch, training, 2)  # type: ignore[arg-type]
    for text in named:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"batch": [6, 0]}, "It takes the samples of every rank's micro-batch"),
        ({"batch": "fast"}, '"by_speed"'),
        ({"batch": [1, 1], "zero_partition": "memory"}, 'Give "zero_partition" a list of weights'),
        ({"batch": [1, 1], "schedule": "ring"}, '"schedule" says how sequences or layers are split'),
    ],
)
def test_wrong_sections_are_refused(section: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_section(section)
    assert named in str(caught.value)
