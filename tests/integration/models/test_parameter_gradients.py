"""The self-check compares gradients of parameters, whose faults outputs and tokens' gradients do not show at first.

Budget: 15 s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.integration.self_checking import VOCAB, batch_of, verdict
from tests.integration.tiny import UNEVEN_2, ds_config, llama
from tests.support import run_deepspeed, run_ranks


class _Before(nn.Module):
    """Attention behind a layer that adds zero to its input at first."""

    def __init__(self, inner: nn.Module, added: nn.Module) -> None:
        super().__init__()
        self.inner, self.added = inner, added

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        return self.inner(hidden_states=hidden_states + self.added(hidden_states), **kwargs)


class _Convolution(nn.Module):
    """Of the four latest tokens, by channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(width, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        mixed = nn.functional.conv1d(x.transpose(1, 2), self.kernel, groups=len(self.kernel), padding=3)
        return mixed[..., : x.shape[1]].transpose(1, 2)


class _KernelOfAnother(nn.Module):
    """The same with the kernel in a module that is never called, as fast kernels take it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = _Convolution(width)

    def forward(self, x: Tensor) -> Tensor:
        return _Convolution.forward(self.convolution, x)


class _Pooling(nn.Module):
    """The mean over the sequence, behind a gate of zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.gate * x.mean(1, keepdim=True).expand_as(x)


class _Shifted(nn.Module):
    """A projection of zeros of the tokens before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.projection.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])


class _LowRank(nn.Module):
    """LoRA, every token by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


class _Pointwise(nn.Module):
    """A convolution of one token, and a gate by channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.kernel, self.gate = nn.Parameter(torch.zeros(width, 1, 1)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        seen = nn.functional.conv1d(x.transpose(1, 2), self.kernel, groups=len(self.kernel)).transpose(1, 2)
        return seen + self.gate * x.tanh()


_Layer = Callable[[int], nn.Module]

# And what the message names.
WRONG: dict[_Layer, str] = {
    _Convolution: "the gradient of the parameter model.layers.0.self_attn.added.kernel differs",
    _KernelOfAnother: "the gradient of the parameter model.layers.0.self_attn.added.convolution.kernel differs",
    _Pooling: "the gradient of the parameter model.layers.0.self_attn.added.gate differs",
    _Shifted: (
        "the input of model.layers.0.self_attn.added.projection, from which the gradient of its weight is computed"
    ),
}
RIGHT: tuple[_Layer, ...] = (_LowRank, _Pointwise)


def test_layers_that_mix_tokens_and_begin_as_zero_are_refused_by_their_parameter() -> None:
    first, second = run_ranks(_verdicts, 2)
    assert first == second
    for layer, text in zip((*WRONG, *RIGHT), first, strict=True):
        assert WRONG[layer] in text if layer in WRONG else text == "", (layer, text)


def _verdicts(rank: int) -> list[str]:
    return [verdict(_changed(layer), batch_of(), UNEVEN_2) for layer in (*WRONG, *RIGHT)]


def _changed(layer: _Layer) -> Any:
    torch.manual_seed(0)
    model = llama(vocab_size=VOCAB)
    for block in model.model.layers:
        block.self_attn = _Before(block.self_attn, layer(model.config.hidden_size))
    return model


def test_it_is_refused_on_every_zero_stage_and_beside_adapters() -> None:
    for texts in run_deepspeed(_train, 2):
        for case, text in texts.items():
            assert text == "trained" if "pointwise" in case else ".self_attn.added.kernel differs" in text, (case, text)


def _train(rank: int) -> dict[str, str]:
    import deepspeed
    from peft import LoraConfig, get_peft_model

    import ds_hetero
    from ds_hetero.errors import ModelError

    handle = ds_hetero.register()
    texts = {}
    cases = [(stage, "convolution") for stage in (1, 2, 3)] + [(2, "adapted convolution"), (3, "pointwise")]
    for stage, kind in cases:
        model = _changed(_Pointwise if kind == "pointwise" else _Convolution)
        if kind.startswith("adapted"):
            model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
            for name, parameter in model.named_parameters():
                if name.endswith("kernel"):
                    parameter.requires_grad_()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(stage, UNEVEN_2))
        try:
            for batch in handle.dataloader([batch_of()] * 2, batches="same"):
                engine.backward(handle.loss(engine(**batch), batch))
                engine.step()
            text = "trained"
        except ModelError as error:
            text = str(error)
        texts[f"{stage} {kind}"] = text
        engine.destroy()
    return texts
