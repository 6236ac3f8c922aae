"""A module that is none of transformers', one rank per replica: weighted ZeRO, stragglers, unlike batches.

Budget: 35 s.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests.integration.tiny import CLIP, SMALL_BUCKETS, adam, assert_same_parameters, parameters
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
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **SMALL_BUCKETS},
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


@pytest.mark.sweep(keep=0)
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
    assert '"heterogeneity.loss": "local_mean"' in loss and "Regression runs whole on every rank" in loss
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


def test_a_parameter_without_a_dimension_is_refused_by_name() -> None:
    """DeepSpeed 0.19.8 sends bytes of parameters, which torch cannot make of a scalar; an older release trains it."""
    first, second = run_deepspeed(_refuse_scalar, 2)
    assert first == second
    assert "DeepSpeed cannot send a parameter without a dimension" in first and "Regression has scale" in first


def _refuse_scalar(rank: int) -> str:
    import deepspeed

    import ds_hetero

    ds_hetero.register()
    module = _module()
    module.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ds_hetero.ModelError) as caught:
        deepspeed.initialize(model=module, optimizer=adam(module), config=_config(1, report="runs"))
    return str(caught.value)


# --- replicas that take different batches -------------------------------------------------------------

TWO, THREE = ((3, 2), (1, 2)), ((4, 1), (2, 3), (1, 1))  # by rank: samples of a micro-batch, micro-batches


def _replicas(batches: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    return {
        "version": 1,
        "replicas": [
            {
                "schedule": {
                    "version": 1,
                    "num_heads": 1,
                    "num_kv_heads": 1,
                    "groups": [{"ranks": [rank], "tokens": [1], "heads": [1]}],
                },
                "micro_batch_size": size,
                "micro_batches": count,
            }
            for rank, (size, count) in enumerate(batches)
        ],
    }


def _samples(batches: tuple[tuple[int, int], ...]) -> list[tuple[Tensor, Tensor, int]]:
    """Of five steps, the last with two samples less."""
    generator = torch.Generator().manual_seed(2)
    total = STEPS * sum(size * count for size, count in batches) - 2
    return [
        (torch.randn(1, 8, 8, generator=generator), torch.randn((), generator=generator), number)
        for number in range(total)
    ]


class Stream(IterableDataset[Any]):
    """The samples without a length."""

    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __iter__(self) -> Any:
        return iter(self._samples)


def _one_process(batches: tuple[tuple[int, int], ...]) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    """Losses, norms and trained parameters of plain torch on the global batches."""
    module, losses, norms = _module(), [], []
    optimizer = adam(module)
    for images, values, _ in DataLoader(_samples(batches), sum(size * count for size, count in batches)):
        optimizer.zero_grad()
        loss = module(images, values)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), CLIP)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, parameters(module)


@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize(
    ("batches", "stage", "streamed"),
    [
        (TWO, 3, False),
        (THREE, 1, True),
        *(
            pytest.param(batches, stage, False, marks=pytest.mark.slow)
            for batches in (TWO, THREE)
            for stage in (0, 1, 2, 3)
            if (batches, stage) != (TWO, 3)
        ),
    ],
)
def test_replicas_with_different_batches_equal_one_process(
    batches: tuple[tuple[int, int], ...], stage: int, streamed: bool
) -> None:
    expected_losses, expected_norms, expected = _one_process(batches)
    ranks = run_deepspeed(_train_unlike, len(batches), batches, stage, streamed)
    samples = sum(size * count for size, count in batches)
    for step, expected_loss in enumerate(expected_losses):
        by_number = {number: loss for losses, _, _ in ranks for numbers, loss in losses[step] for number in numbers}
        total = min(samples, len(_samples(batches)) - step * samples)
        assert sorted(by_number) == list(range(step * samples, step * samples + total))
        np.testing.assert_allclose(sum(by_number.values()) / total, expected_loss, rtol=1e-5)
    for _, norms, trained in ranks:
        if stage:
            np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)
        assert_same_parameters(trained, expected)


def _train_unlike(rank: int, batches: tuple[tuple[int, int], ...], stage: int, streamed: bool) -> Any:
    """By step, the numbers of samples with the loss of their micro-batch; norms; trained values."""
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    module = _module()
    config = _config(stage, schedule=_replicas(batches), loss="sample_mean")
    del config["train_micro_batch_size_per_gpu"]
    engine, *_ = deepspeed.initialize(model=module, optimizer=adam(module), config=config)
    samples: Any = _samples(batches)
    loader = handle.dataloader(DataLoader(Stream(samples) if streamed else samples, batch_size=4))
    losses, norms, of_step = [], [], []
    for images, values, numbers in loader:
        loss = engine(images, values)
        engine.backward(loss)
        engine.step()
        of_step.append((numbers.tolist(), float(loss.detach())))
        if len(of_step) == max(count for _, count in batches):
            losses.append(of_step)
            norms.append(float(engine.get_global_grad_norm() or 0) if stage else 0.0)
            of_step = []
    assert engine.global_steps == STEPS and not of_step
    assert streamed or len(loader) == STEPS * max(count for _, count in batches)
    module.eval()
    assert sum(len(numbers) for _, _, numbers in loader) == len(samples)
    return losses, norms, parameters(module, stage)


def test_different_batches_whose_loss_is_not_known_are_refused_by_name() -> None:
    first, second = run_deepspeed(_refuse_unlike, 2)
    alike, changing, unknown, unscaled, ahead, normalized, added = first
    assert first[:-1] == second[:-1]
    assert "the schedule has no micro_batch_size" in alike
    assert '"replan": {"enabled": true}' in changing and "Regression runs whole" in changing
    assert "Take batches from handle.dataloader" in unknown
    assert "backward was called on the loss itself" in unscaled
    assert "micro-batch 1 of an optimizer step, but the engine is at 0" in ahead
    assert "has 3 samples, but nothing in it has as many rows: they are [4]" in added and "they are [2]" in second[-1]
    assert "0 of Sequential is BatchNorm2d" in normalized


def _refuse_unlike(rank: int) -> list[str]:
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    texts = []
    unlike = {"schedule": _replicas(TWO), "loss": "sample_mean"}

    def initialize(section: dict[str, Any], module: nn.Module | None = None) -> Any:
        config = _config(1, **section)
        if "schedule" in section:
            del config["train_micro_batch_size_per_gpu"]
        module = _module() if module is None else module
        engine, *_ = deepspeed.initialize(model=module, optimizer=adam(module), config=config)
        return engine

    for section in ({"loss": "sample_mean"}, {**unlike, "replan": {"enabled": True}}):
        with pytest.raises(ds_hetero.HeteroError) as caught:
            initialize(section)
        texts.append(str(caught.value))
    engine = initialize(unlike)
    samples = _samples(TWO)
    images, values, _ = next(iter(DataLoader(samples, 2)))
    with pytest.raises(ds_hetero.HeteroError) as caught:
        engine.backward(engine(images, values))
    texts.append(str(caught.value))
    for images, values, _ in handle.for_engine(engine).dataloader(DataLoader(samples, 2)):
        with pytest.raises(ds_hetero.HeteroError) as caught:
            engine(images, values).backward()
            engine.step()
        break
    texts.append(str(caught.value))
    engine = initialize(unlike)
    batches = iter(handle.for_engine(engine).dataloader(DataLoader(samples, 2)))
    images, values, _ = next(batches)
    next(batches)
    with pytest.raises(ds_hetero.HeteroError) as caught:
        engine.backward(engine(images, values))
    texts.append(str(caught.value))
    engine = initialize(unlike, nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 1)))
    with pytest.raises(ds_hetero.HeteroError) as caught:
        engine(torch.zeros(2, 1, 8, 8))
    texts.append(str(caught.value))
    longer = DataLoader([image for image, _, _ in samples], 2, collate_fn=lambda rows: torch.stack([*rows, rows[0]]))
    with pytest.raises(ds_hetero.HeteroError) as caught:
        next(iter(handle.for_engine(engine).dataloader(longer)))
    return [*texts, str(caught.value)]
