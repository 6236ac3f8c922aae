"""Models compiled by torch.compile around attention: exact, and how many graphs a layer is.

Budget: 60 s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.models.test_features import start, train
from tests.integration.tiny import (
    assert_same_parameters,
    batches,
    checkpoint_activations,
    llama,
    parameters,
    train_on_one_process,
)
from tests.support import run_deepspeed

_LAYERS = 3  # more than the steps that share a graph, so that a graph that runs so often is one of layers
_LENGTHS = (37, 24, 41)  # the second is compiled anew, with lengths as unknowns, the third is not


@pytest.mark.slow
@pytest.mark.measured  # nothing is compiled under the strict group, which looks at every operation
def test_a_model_compiled_by_inductor_trains_as_on_one_process() -> None:
    """With torch's nested graph breaks a layer is two graphs, around its attention; without them it is four."""
    run_deepspeed(_check_inductor, 2)


def _check_inductor(rank: int) -> None:
    from torch._inductor.compile_fx import compile_fx

    nested = hasattr(torch._dynamo.config, "nested_graph_breaks")  # not in the oldest torch that is admitted
    if nested:
        torch._dynamo.config.nested_graph_breaks = True
    runs: Counter[int] = Counter()

    def counted(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled = compile_fx(graph, inputs)
        number = len(runs)
        runs[number] = 0

        def run(*values: Any) -> Any:
            runs[number] += 1
            return compiled(*values)

        return run

    _expect_parity(counted)
    runs_of_layers = sum(count for count in runs.values() if count >= _LAYERS)
    assert runs_of_layers == (2 if nested else 4) * _LAYERS * len(_LENGTHS), runs


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("reentrant", [True, False])
def test_compiled_checkpointed_layers_train_as_on_one_process(stage: int, reentrant: bool) -> None:
    run_deepspeed(_check_checkpointed, 2, stage, reentrant)


def _check_checkpointed(rank: int, stage: int, reentrant: bool) -> None:
    _expect_parity("aot_eager", stage, lambda model: checkpoint_activations(model, reentrant))


def _expect_parity(backend: Any, stage: int = 1, change: Callable[[Any], None] = lambda model: None) -> None:
    model, whole = llama(num_hidden_layers=_LAYERS), [batches(1, length=length)[0] for length in _LENGTHS]
    change(model)
    handle, engine = start(model, stage=stage)
    engine.compile(backend=backend)
    losses = train(handle, engine, whole)
    twin = llama(num_hidden_layers=_LAYERS)
    expected, _ = train_on_one_process(twin, [[batch] for batch in whole])
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same_parameters(parameters(model, stage), parameters(twin))
