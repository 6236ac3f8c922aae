"""Whether somebody changes parameters that are not trained, and so belong to no save, is seen."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ds_hetero.frameworks.deepspeed.in_memory import FrozenSample


@pytest.fixture
def engine():
    module = nn.ParameterDict(
        {
            "bf16": nn.Parameter(torch.randn(300, 7, dtype=torch.bfloat16), requires_grad=False),
            "transposed": nn.Parameter(torch.randn(5, 90).t(), requires_grad=False),
            "packed": nn.Parameter(torch.arange(256, dtype=torch.uint8), requires_grad=False),
            "trained": nn.Parameter(torch.randn(4)),
        }
    )
    return SimpleNamespace(module=module)


def test_steps_change_nothing_that_counts(engine):
    sample = FrozenSample(engine)
    assert set(sample.sums) == {("bf16", False), ("transposed", False), ("packed", False)}
    engine.module["trained"].data.add_(1)
    assert not sample.has_changed()
    engine.module["bf16"].data = engine.module["bf16"].data.clone()  # the same values elsewhere
    assert not sample.has_changed()


@pytest.mark.parametrize("name", ["bf16", "transposed", "packed"])
def test_a_change_in_place_and_another_tensor_are_seen(engine, name):
    sample, parameter = FrozenSample(engine), engine.module[name]
    assert not sample.has_changed()
    before = parameter.data.clone()
    parameter.data.mul_(2)
    assert sample.has_changed()
    parameter.data.copy_(before)
    assert not sample.has_changed()
    parameter.data = before + 1
    assert sample.has_changed()


def test_a_parameter_that_is_trained_no_longer_is_seen(engine):
    sample = FrozenSample(engine)
    engine.module["trained"].requires_grad_(False)
    assert sample.has_changed()
