"""Weighted ZeRO and the report of stragglers for a module that is none of transformers', one rank per replica.

Budget: 25 s.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support import run_deepspeed

WIDTH, BATCH, STEPS = 24, 4, 5


class Regression(nn.Module):
    """Images to numbers: a convolution and two linear layers; the loss is made in ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Conv2d(1, 6, 3)
        self.first, self.last = nn.Linear(6 * 36, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, images: Tensor, values: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(self.seen(images).flatten(1)))
        return (self.last(hidden)[:, 0] - values).square().mean()


def _module() -> Regression:
    torch.manual_seed(0)
    return Regression()


def _batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((BATCH, 1, 8, 8), (BATCH,))
    return [tuple(torch.randn(shape, generator=generator) for shape in shapes) for _ in range(count)]  # type: ignore[misc]


def _config(stage: int, **section: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "sequence_parallel_size": 1,
        **({"heterogeneity": section} if section else {}),
    }


def _train(rank: int, world_size: int, config: dict[str, Any], slow_s: float = 0.0, steps: int = STEPS) -> Any:
    """Losses, norms, trained values, and the elements of optimizer state that this rank holds."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    import ds_hetero

    ds_hetero.register()
    stage = config["zero_optimization"]["stage"]
    module = _module()
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=torch.optim.AdamW(module.parameters(), lr=1e-2), config=config
    )
    if slow_s:
        module.first.register_forward_hook(lambda *_: time.sleep(slow_s * (1 if rank else 3)))
    losses, norms = [], []
    for images, values in _batches(steps * world_size)[rank::world_size]:
        loss = engine(images, values)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        norms.append(float(engine.get_global_grad_norm() or 0) if stage else 0.0)
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    owned = sum(v.numel() for s in inner.state.values() for n, v in s.items() if n == "exp_avg")
    trained = {
        name: (p if stage == 0 else safe_get_full_fp32_param(p)).detach().numpy().copy()
        for name, p in module.named_parameters()
    }
    engine.destroy()
    return losses, norms, trained, owned


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
def test_any_module_trains_with_weighted_zero_as_with_equal_partitions(stage: int) -> None:
    stock = run_deepspeed(_train, 3, 3, _config(stage))
    ours = run_deepspeed(_train, 3, 3, _config(stage, zero_partition=[3, 1, 2]))
    assert [round(each[3] / ours[1][3]) for each in ours] == [3, 1, 2]
    for (losses, norms, trained, _), (expected_losses, expected_norms, expected, _) in zip(ours, stock, strict=True):
        np.testing.assert_allclose(losses, expected_losses, rtol=2e-6)
        np.testing.assert_allclose(norms, expected_norms, rtol=2e-6)
        for name, value in expected.items():
            np.testing.assert_allclose(trained[name], value, rtol=2e-5, atol=1e-7, err_msg=name)


def test_a_slow_rank_of_any_module_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    run_deepspeed(_train, 2, 2, _config(0, replan={"report_only": True, "interval_steps": 5}), 0.01, 25)
    assert "rank 0 is a straggler" in "".join(capfd.readouterr())


def test_what_needs_tokens_is_refused_by_name() -> None:
    first, second = run_deepspeed(_refuse, 2)
    assert first == second
    loss, documents, split = first
    assert '"heterogeneity.loss" is "local_mean"' in loss and "Regression is not split" in loss
    assert '"heterogeneity.placement": "documents"' in documents
    assert "Regression holds none" in split and '"sequence_parallel_size": 1' in split


def _refuse(rank: int) -> list[str]:
    import deepspeed

    import ds_hetero

    ds_hetero.register()
    texts = []
    cases = ({"loss": "local_mean"}, {"placement": "documents"}, {"schedule": "ulysses"})
    for size, section in zip((1, 1, 2), cases, strict=True):
        config = {**_config(1, **section), "sequence_parallel_size": size}
        with pytest.raises(ds_hetero.HeteroError) as caught:
            deepspeed.initialize(model=_module(), config=config)
        texts.append(str(caught.value))
    return texts
