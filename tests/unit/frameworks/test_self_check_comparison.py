"""What the comparison of a piece with one process takes for rounding, and what for a fault. Budget: 2 s."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ds_hetero.frameworks.transformers.self_check.comparison import (
    GRADIENT,
    INPUT,
    LOSS,
    OUTPUT,
    PARAMETER,
    ErrorKey,
    Errors,
    LocalTokens,
    compare_runs,
    find_faults,
    noise_of,
    worst_differences,
)
from ds_hetero.frameworks.transformers.self_check.recorded_run import ModuleOutput, RecordedRun

EPS = torch.finfo(torch.float32).eps
COHERE_WITH_LORA = 6.7e-7  # the error for which it was refused, where embeddings shaken by a unit showed no noise


def _faults(kind: str, error: float, noise: float = 0.0, eps: float = EPS) -> list[str]:
    key = ErrorKey(kind, ModuleOutput("lm_head", 0, 0))
    errors: Errors = {key: torch.tensor([0.0, error])}
    faults = find_faults([[], worst_differences(errors, {key: noise}, eps)])
    return [f"{fault.rank} {fault.difference.module}" for fault in faults]


@pytest.mark.parametrize("kind", [OUTPUT, GRADIENT, INPUT, LOSS, PARAMETER])
def test_sums_in_another_order_are_no_fault_where_shaken_embeddings_show_no_noise(kind: str) -> None:
    assert _faults(kind, COHERE_WITH_LORA) == []
    assert _faults(kind, COHERE_WITH_LORA, noise=3e-9) == []  # 8 times this, 3e-8 with the floor then, was allowed
    assert _faults(kind, 100 * COHERE_WITH_LORA) == ["1 lm_head"]
    assert _faults(kind, float("nan")) == ["1 lm_head"]


def test_a_tenth_of_a_percent_is_a_fault_in_fp32_and_rounding_in_bf16() -> None:
    assert _faults(OUTPUT, 1e-3) == ["1 lm_head"]
    assert _faults(OUTPUT, 1e-3, eps=torch.finfo(torch.bfloat16).eps) == []


TOKENS, FEATURES, RANK = 24, 512, 16
INTERVALS = ((0, 5), (20, 24))  # of this rank


def _low_rank(x: Tensor) -> Tensor:
    """[1, tokens, FEATURES] through a layer with a LoRA beside it, whose scale is large."""
    torch.manual_seed(0)
    plain, down, up = nn.Linear(FEATURES, 64), nn.Linear(FEATURES, RANK, bias=False), nn.Linear(RANK, 64, bias=False)
    with torch.no_grad():
        out: Tensor = plain(x) + 32 * up(down(x))
    return out


def _recorded(out: Tensor) -> RecordedRun:
    run = RecordedRun()
    run.outputs[ModuleOutput("lora", 0, 0)] = out
    return run


def test_a_layer_over_fewer_rows_is_no_fault_and_one_token_off_is() -> None:
    x = torch.randn(1, TOKENS, FEATURES, generator=torch.Generator().manual_seed(1))
    parts = [x[:, start:stop] for start, stop in INTERVALS]
    whole = _recorded(_low_rank(x))
    sharded = torch.cat([_low_rank(part) for part in parts], dim=1)
    tokens = LocalTokens(INTERVALS, torch.ones(1, TOKENS, dtype=torch.bool))
    noise = noise_of(whole, _recorded(_low_rank(x * (1 + EPS))), tokens)
    assert find_faults([worst_differences(compare_runs(whole, _recorded(sharded), tokens), noise, EPS)]) == []
    sharded[0, 3] *= 1 + 1e-3
    (fault,) = find_faults([worst_differences(compare_runs(whole, _recorded(sharded), tokens), noise, EPS)])
    assert (fault.rank, fault.difference.kind, fault.difference.module) == (0, OUTPUT, "lora")
