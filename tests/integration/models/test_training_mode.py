"""The self-check compares what a model computes in training alone, and leaves alone what is random there.

Budget: 10 s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.integration.self_checking import batch_of, verdict
from tests.integration.tiny import UNEVEN_2, llama
from tests.support import run_ranks


class _Around(nn.Module):
    """Around an MLP, what `added` makes of its input in training alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        seen: Tensor = self.inner(x)
        return seen + self.added(x) if self.training else seen

    def added(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class _Pooling(_Around):
    """The mean over the sequence."""

    def added(self, x: Tensor) -> Tensor:
        return 0.3 * x.mean(dim=1, keepdim=True).expand_as(x)


class _MeanOfGradients(torch.autograd.Function):
    """Nothing in the forward; the mean over the tokens in the backward."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].mean(dim=1, keepdim=True).expand_as(gradients[0])


class _Backward(_Around):
    """A backward that mixes tokens."""

    def added(self, x: Tensor) -> Tensor:
        mixed: Tensor = _MeanOfGradients.apply(x)  # type: ignore[no-untyped-call]
        return 0.1 * mixed


class _Scale(_Around):
    """Every token by itself."""

    def added(self, x: Tensor) -> Tensor:
        return 0.1 * x.tanh()


class _Rates(_Around):
    """Dropout and noise by rates that are kept in four ways, and counts of forwards in training."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.dropout = nn.Dropout(0.2)
        self.hidden_dropout = 0.2
        self.router_jitter_noise = 0.1
        self.neftune_noise_alpha = 5  # whole numbers too
        self.count = 0
        self.register_buffer("seen", torch.zeros(()))

    def added(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen += 1
        kept = F.dropout(self.dropout(x), self.hidden_dropout, self.training)
        jitter = 1 + (self.router_jitter_noise + self.neftune_noise_alpha) * torch.randn_like(x)
        return 0.1 * kept * jitter


class _OwnGenerator(_Around):
    """Channels that a generator of its own draws."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self._generator = torch.Generator().manual_seed(3)

    def added(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape[-1], generator=self._generator).gt(0.2)


class _SeveralRows(_Around):
    """What batch norm demands of its input, and no piece of a batch has."""

    def added(self, x: Tensor) -> Tensor:
        if x.shape[0] < 64:
            raise ValueError("expected more rows when training")
        return x


_Layer = Callable[[nn.Module], nn.Module]

# And what the message has.
WRONG: dict[_Layer, str] = {
    _Pooling: "in training mode",
    _Backward: "the gradient at model.layers.0.post_attention_layernorm differs",
}
RIGHT: tuple[_Layer, ...] = (_Scale, _Rates)
TOLD: dict[_Layer, str] = {
    _OwnGenerator: "something else every time",
    _SeveralRows: "ValueError: expected more rows when training",
}


def test_what_mixes_tokens_in_training_alone_is_refused_and_no_dropout_is() -> None:
    of_ranks = run_ranks(_verdicts, 2)
    assert of_ranks[0][0] == of_ranks[1][0], of_ranks
    verdicts, warnings = of_ranks[0]
    for layer, words in WRONG.items():
        assert words in verdicts[layer.__name__], verdicts
    assert [verdicts[layer.__name__] for layer in RIGHT] == [""] * len(RIGHT)
    assert [verdicts[layer.__name__] for layer in TOLD] == [""] * len(TOLD)
    assert len(warnings) == len(TOLD), warnings
    for text, words in zip(warnings, TOLD.values(), strict=True):
        assert words in text


def _verdicts(rank: int) -> tuple[dict[str, str], list[str]]:
    warnings = _Warnings()
    logging.getLogger("ds_hetero").addHandler(warnings)
    verdicts = {}
    for layer in (*WRONG, *RIGHT, *TOLD):
        model = llama(attention_dropout=0.1)
        model.model.layers[0].mlp = layer(model.model.layers[0].mlp)
        model.train()
        verdicts[layer.__name__] = verdict(model, batch_of(), UNEVEN_2)
        around = model.model.layers[0].mlp
        assert getattr(around, "count", 0) == 0 and getattr(around, "hidden_dropout", 0.2) == 0.2
        assert model.config.attention_dropout == 0.1
    return verdicts, warnings.texts


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
