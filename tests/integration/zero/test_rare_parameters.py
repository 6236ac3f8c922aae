"""Parameters that only some ranks, or none, use in a step train as on one process, on every ZeRO stage.

Budget: 50 s.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ds_hetero.engine.framework_source import has_name
from ds_hetero.errors import ConfigError, StepError
from ds_hetero.frameworks.deepspeed.keys import expect_supported_keys
from ds_hetero.frameworks.deepspeed.names import HAND_OVER, OWN_GROUPS, STAGE_3
from tests.integration.tiny import UNEVEN_2, VOCAB, checkpoint_activations, ds_config, llama
from tests.support import run_deepspeed

# The first rank has three quarters of the tokens.
SCHEDULE = {**UNEVEN_2, "layout": "contiguous"}
FIRST, LENGTH = 30, 40
# Of four ranks two have the tokens of the first, two those of the second.
SCHEDULE_4 = {
    **SCHEDULE,
    "groups": [{"ranks": [rank], "tokens": [tokens], "heads": [4]} for rank, tokens in enumerate((3, 3, 1, 1))],
}
EVEN, ODD, BOTH = 0, 1, 2


class Choice(nn.Module):  # a name that does not end with "Experts", which are gathered at once anyway
    """Two experts of unequal size: one of even tokens, one of odd; the one without a token is skipped."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.even = nn.Linear(width, width)
        self.odd = nn.Sequential(nn.Linear(width, 48), nn.Tanh(), nn.Linear(48, width))

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        added = torch.zeros_like(x)
        for parity, expert in enumerate((self.even, self.odd)):
            if (hit := tokens % 2 == parity).any():
                added[hit] = expert(x[hit])
        return added


def with_experts(place: str = "embedding") -> Any:
    """A Llama with `Choice`."""
    model = llama()
    torch.manual_seed(5)
    model.experts = Choice(model.config.hidden_size)
    seen: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        seen[:] = [args[0]]

    def add(module: nn.Module, args: object, out: Tensor) -> Tensor:
        return out + model.experts(seen[0], out)

    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(note)
    (embedding if place == "embedding" else model.model.layers[0].mlp).register_forward_hook(add)
    return model.train()


def batch(seed: int, parities: tuple[int, int]) -> dict[str, Tensor]:
    """Tokens of one parity, or of both, on each rank."""
    ids = torch.randint(8, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(seed))
    for part, parity in zip((slice(0, FIRST), slice(FIRST, LENGTH)), parities, strict=True):
        if parity != BOTH:
            ids[:, part] += parity - ids[:, part] % 2
    return {"input_ids": ids, "labels": ids.clone()}


# In the first step all experts are used everywhere, so that a look at the first step alone shows nothing.
SOME = [(BOTH, BOTH), (EVEN, ODD), (EVEN, BOTH), (ODD, EVEN), (EVEN, ODD)]
NONE = [(BOTH, BOTH), (EVEN, EVEN), (EVEN, BOTH), (ODD, ODD)]
# All ranks use the same experts: in the second step another one by micro-batch, in the third one alone, in the last
# the other one, from the second micro-batch on.
ALIKE = [(BOTH, BOTH), (BOTH, BOTH), (EVEN, EVEN), (ODD, ODD), (EVEN, EVEN), (EVEN, EVEN), (EVEN, EVEN), (BOTH, BOTH)]
CLIP = 0.3  # less than the norm of every step, so that all gradients depend on all
AT_ONCE = [(EVEN, ODD), (ODD, EVEN), (EVEN, ODD)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


def sgd_with_state(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5, weight_decay=0.1)


def rprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5, weight_decay=0.1, eps=1e-2)


OPTIMIZERS = {"sgd": sgd, "momentum": sgd_with_state, "rmsprop": rprop}


def on_one_process(
    parities: list[tuple[int, int]], optimizer: str, accumulate: int, place: str = "embedding", clip: float = 0.0
) -> dict[str, np.ndarray]:
    model = with_experts(place)
    chosen = OPTIMIZERS[optimizer](model)
    for step, of_step in enumerate(parities):
        (model(**batch(step, of_step), use_cache=False).loss / accumulate).backward()
        if (step + 1) % accumulate == 0:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip or torch.inf)
            assert norm > clip, norm
            chosen.step()
            chosen.zero_grad()
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def on_ranks(rank: int, cases: list[dict[str, Any]]) -> list[dict[str, np.ndarray]]:
    return [train(**case) for case in cases]


def train(
    stage: int,
    parities: list[tuple[int, int]],
    optimizer: str = "sgd",
    weights: Any = None,
    zero: Any = None,
    accumulate: int = 1,
    checkpoints: str | None = None,
    place: str = "embedding",
    leaf: bool = False,
    nodes: list[int] | None = None,
    clip: float = 0.0,
) -> dict[str, np.ndarray]:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, set_z3_leaf_modules

    import ds_hetero

    handle = ds_hetero.register()
    model = with_experts(place)
    if checkpoints is not None:
        checkpoint_activations(model, checkpoints == "reentrant")
    if leaf:
        set_z3_leaf_modules(model, [Choice])
    config = ds_config(
        stage,
        SCHEDULE if int(os.environ["WORLD_SIZE"]) == 2 else SCHEDULE_4,
        zero=zero or {},
        gradient_accumulation_steps=accumulate,
        gradient_clipping=clip,
        train_micro_batch_size_per_gpu=1,
        zero_force_ds_cpu_optimizer=False,
    )
    if weights is not None:
        config["heterogeneity"]["zero_partition"] = weights
    if nodes is not None:
        config["heterogeneity"]["zero_within"] = nodes
    engine, *_ = deepspeed.initialize(model=model, optimizer=OPTIMIZERS[optimizer](model), config=config)
    for each in handle.dataloader([batch(step, of_step) for step, of_step in enumerate(parities)]):
        engine.backward(engine(**each).loss)
        engine.step()
    read = safe_get_full_fp32_param if stage else (lambda p: p)
    trained = {name: read(p).detach().float().numpy().copy() for name, p in model.named_parameters()}
    engine.destroy()
    handle.undo()
    return trained


def _is_let_in(case: dict[str, Any]) -> bool:
    """Whether the installed release of DeepSpeed computes a case rightly; an older one is refused by name else."""
    try:
        expect_supported_keys(ds_config(case["stage"], SCHEDULE, zero=case.get("zero", {})))
    except ConfigError as error:
        assert "with DeepSpeed" in str(error), error
        return False
    is_offloaded = case["stage"] == 3 and "offload_optimizer" in case.get("zero", {})
    hands_over = not is_offloaded or has_name(f"{STAGE_3}.{HAND_OVER}")
    return hands_over and ("nodes" not in case or has_name(f"{STAGE_3}.{OWN_GROUPS}"))


def assert_as_on_one_process(cases: list[dict[str, Any]], expected: dict[str, np.ndarray], world: int = 2) -> None:
    cases = list(filter(_is_let_in, cases))
    start = {name: p.detach().numpy() for name, p in with_experts().named_parameters()}
    for case, trained, *_ in zip(cases, *run_deepspeed(on_ranks, world, cases), strict=True):
        for name, value in expected.items():
            moved = np.linalg.norm(value - start[name])
            # Of the change: float32 rounds values, which is about 1e-7 of them, while steps change them by some 1e-3.
            error = np.linalg.norm(trained[name] - value) / (moved + 1e-4 * np.linalg.norm(value))
            assert error < 2e-3, f"{name} is off by {error:.1e} of its change: {case}"


OF_SOME = {
    "contiguous": {"stage": 2},
    "not contiguous": {"stage": 2, "zero": {"contiguous_gradients": False}},
    "overlapped": {"stage": 2, "zero": {"overlap_comm": True}},
    "small buckets": {"stage": 2, "zero": {"reduce_bucket_size": 1000}},
    "all-reduced": {"stage": 2, "zero": {"reduce_scatter": False}},
    "weighted": {"stage": 2, "weights": [3, 1]},
    "stage 1": {"stage": 1},
    "stage 1, overlapped, weighted": {"stage": 1, "weights": [1, 2], "zero": {"overlap_comm": True}},
    "offloaded": {"stage": 2, "zero": {"offload_optimizer": {"device": "cpu"}}},
    "stage 0": {"stage": 0},
}


@pytest.mark.parametrize("parities", [SOME, AT_ONCE], ids=["from the second step", "from the first step"])
def test_gradients_that_a_rank_lacks_are_zeros(parities: list[tuple[int, int]]) -> None:
    cases = [{"parities": parities, **case} for case in OF_SOME.values()]
    assert_as_on_one_process(cases, on_one_process(parities, "sgd", 1))


def test_with_accumulation_and_checkpointed_layers() -> None:
    parities = [*SOME, (EVEN, ODD)]
    accumulated = [{"parities": parities, "stage": stage, "accumulate": 2} for stage in (1, 2)]
    assert_as_on_one_process(accumulated, on_one_process(parities, "sgd", 2))
    checkpointed = [
        {"parities": SOME, "stage": 2, "checkpoints": kind, "place": "mlp"} for kind in ("reentrant", "not reentrant")
    ]
    assert_as_on_one_process(checkpointed, on_one_process(SOME, "sgd", 1, "mlp"))


OF_NONE = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2, weighted": {"stage": 2, "weights": [3, 1]},
    "stage 2, offloaded": {"stage": 2, "zero": {"offload_optimizer": {"device": "cpu"}}},
    "stage 3": {"stage": 3, "leaf": True},
    "stage 3, weighted": {"stage": 3, "leaf": True, "weights": [3, 1]},
}


@pytest.mark.parametrize("optimizer", ["momentum", "rmsprop"])
def test_what_no_rank_uses_neither_decays_nor_moves(optimizer: str) -> None:
    cases = [{"parities": NONE, "optimizer": optimizer, **case} for case in OF_NONE.values()]
    assert_as_on_one_process(cases, on_one_process(NONE, optimizer, 1))


STALE = {
    "of one size": {},
    "weighted": {"weights": [3, 1]},
    "offloaded": {"zero": {"offload_optimizer": {"device": "cpu"}}},
    "partitioned experts alone": {"zero": {"stage3_param_persistence_threshold": 0}},
    "checkpointed": {"checkpoints": "not reentrant", "place": "mlp"},
    "of nodes": {"nodes": [1, 1]},
}


def test_a_release_that_leaves_gradients_out_is_refused_where_it_would() -> None:
    """Before 0.19.5 nothing gives an offloaded optimizer what the last micro-batch does not reach."""
    first, second = run_deepspeed(_train_as_before_0_19, 2)
    assert first == second
    assert "such as experts.even.bias, have gradients of an earlier micro-batch of this step" in first
    assert "Install deepspeed>=0.19.5" in first


def _train_as_before_0_19(rank: int) -> str:
    from ds_hetero.frameworks.deepspeed.zero import stale_gradients

    stale_gradients.HAND_OVER = "is not there"
    with pytest.raises(StepError) as caught:
        train(3, ALIKE, zero={"offload_optimizer": {"device": "cpu"}}, accumulate=2)
    return str(caught.value)


@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop"])
def test_zero_3_forgets_gradients_of_earlier_steps(optimizer: str) -> None:
    common = {"stage": 3, "parities": ALIKE, "optimizer": optimizer, "accumulate": 2, "clip": CLIP}
    for place in ("embedding", "mlp"):
        cases = [{**common, **case} for case in STALE.values() if case.get("place", "embedding") == place]
        assert_as_on_one_process(cases, on_one_process(ALIKE, optimizer, 2, place, CLIP))
