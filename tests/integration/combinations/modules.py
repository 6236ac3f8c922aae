"""Language models as scripts change them: mixing layers, parameters that only some ranks use, buffers, hooks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.integration.tiny import VOCAB, checkpoint_activations, llama

RARE_TOKEN = 7  # in few places of a batch, see `loaders`
CHANGES = (
    "zero mixer",
    "mixer",
    "depthwise convolution",
    "skipped experts",
    "rare parameters",
    "task heads",
    "buffer that counts",
    "buffer that follows the batch",
    "frozen embedding",
    "frozen layer",
    "gate",
    "scaled output",
    "scalar parameter",
    "hook on gradients",
)
# Which modules are called hangs on a rank's tokens, and ZeRO-3 waits for ever: docs/limits.md, Known defects.
CALLED_BY_TOKENS = ("skipped experts", "rare parameters")
COUNT_FORWARDS = ("buffer that counts", "task heads")
# On ZeRO a gradient that nobody has is zero, and None on one process: those of an optimizer with state differ.
WITHOUT_SOME_GRADIENTS = ("task heads",)


@dataclass(frozen=True)
class Module:
    """A language model of the script's.

    Args:
        change: of `CHANGES`, or "".
        tied: embedding and head are one parameter.
        zero_head: the head begins as zero, so that all losses are ln V at first. Not of tied models.
        recomputed: activations are computed again in the backward.
        layers: their number.
    """

    change: str
    tied: bool
    zero_head: bool
    recomputed: bool
    layers: int

    def describe(self) -> str:
        """For people."""
        parts = [
            f"llama of {self.layers} layers",
            self.change,
            "tied" if self.tied else "",
            "head of zeros" if self.zero_head else "",
            "recomputed" if self.recomputed else "",
        ]
        return ", ".join(filter(None, parts))


def draw(rng: random.Random) -> Module:
    """Any of them; half of them plain."""
    change = rng.choice(CHANGES) if rng.random() < 0.5 else ""
    tied = rng.random() < 0.2
    return Module(
        change=change,
        tied=tied,
        zero_head=not tied and rng.random() < 0.15,
        recomputed=rng.random() < 0.2,
        layers=rng.choice([1, 2]),
    )


def draw_stage(rng: random.Random, change: str) -> int:
    """A stage of ZeRO that can train a module with this change."""
    return rng.randrange(3 if change in CALLED_BY_TOKENS else 4)


def make(module: Module) -> Any:
    """The model in training, the same on every rank."""
    model = llama(tie_word_embeddings=module.tied, num_hidden_layers=module.layers)
    change(model, module.change)
    if module.zero_head:
        nn.init.zeros_(model.lm_head.weight)
    if module.recomputed:
        checkpoint_activations(model, reentrant=False)
    return model.train()


def change(model: Any, name: str) -> None:
    """Make a change of `CHANGES` to a model."""
    torch.manual_seed(5)
    if name:
        _CHANGES[name](model)


def numbers_of(model: Any) -> list[float]:
    """Buffers that training changes."""
    return [float(value.double().sum()) for name, value in model.named_buffers() if name.endswith("counted")]


class _Mixed(nn.Module):
    """An attention whose input is mixed with the three tokens before by a causal convolution, as Canon layers do."""

    def __init__(self, inner: nn.Module, width: int, scale: float) -> None:
        super().__init__()
        self.inner, self.kernel = inner, nn.Parameter(scale * torch.randn(width, 1, 4))

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        channels, length = hidden_states.transpose(1, 2), hidden_states.shape[1]
        mixed = nn.functional.conv1d(channels, self.kernel, groups=len(self.kernel), padding=3)[..., :length]
        return self.inner(hidden_states=hidden_states + mixed.transpose(1, 2), **kwargs)


class _Convolved(nn.Module):
    """The same by a module of torch's."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.convolution = inner, nn.Conv1d(width, width, 4, groups=width, padding=3)
        nn.init.zeros_(self.convolution.weight)
        nn.init.zeros_(self.convolution.bias)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        mixed = self.convolution(hidden_states.transpose(1, 2))[..., : hidden_states.shape[1]]
        return self.inner(hidden_states=hidden_states + mixed.transpose(1, 2), **kwargs)


def _mix(model: Any, scale: float) -> None:
    for layer in model.model.layers:
        layer.self_attn = _Mixed(layer.self_attn, model.config.hidden_size, scale)


def _convolve(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn = _Convolved(layer.self_attn, model.config.hidden_size)


def _skipped_experts(model: Any) -> None:
    """One expert for even tokens, one for odd ones; an expert without tokens is not called."""
    width = model.config.hidden_size
    model.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def add(embedding: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        added = torch.zeros_like(output)
        for remainder, expert in enumerate(model.experts):
            is_its = inputs[0] % 2 == remainder
            if is_its.any():
                added[is_its] = expert(output[is_its])
        return output + added

    model.model.embed_tokens.register_forward_hook(add)


class _ByRow(nn.Module):
    """An MLP beside which one of two experts is added, chosen by the first token of a row; the other is not called."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.experts = inner, nn.ModuleList(nn.Linear(width, width * (i + 1)) for i in range(2))

    def forward(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = self.inner(hidden_states)
        for i, expert in enumerate(self.experts):
            is_its = (hidden_states[:, 0, 6] > 0) == bool(i)
            if is_its.any():
                out = out.index_add(0, is_its.nonzero()[:, 0], expert(hidden_states[is_its])[..., : out.shape[-1]])
        return out


def _experts_by_row(model: Any) -> None:
    layer = model.model.layers[-1]
    layer.mlp = _ByRow(layer.mlp, model.config.hidden_size)


def _rare(model: Any) -> None:
    """A layer that is called where there is a rare token."""
    width = model.config.hidden_size
    model.rare = nn.Linear(width, width)

    def add(embedding: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        is_rare = inputs[0] == RARE_TOKEN
        return output + is_rare[..., None] * model.rare(output) if is_rare.any() else output

    model.model.embed_tokens.register_forward_hook(add)


def _task_heads(model: Any) -> None:
    """Two layers before the head, of which training uses one in each forward, by turns."""
    width = model.config.hidden_size
    model.heads = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
    model.register_buffer("turns_counted", torch.zeros(()))

    def add(norm: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        head = model.heads[int(model.turns_counted) % 2]
        if model.training and torch.is_grad_enabled():
            model.turns_counted += 1
        return output + head(output)

    model.model.norm.register_forward_hook(add)


def _counts(model: Any) -> None:
    """An MLP whose output grows with the forwards of training."""
    model.register_buffer("forwards_counted", torch.zeros(()))

    def scale(mlp: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if model.training and torch.is_grad_enabled():
            model.forwards_counted += 1
        return output * (1 + 0.2 * model.forwards_counted)

    model.model.layers[0].mlp.register_forward_hook(scale)


def _follows(model: Any) -> None:
    """An MLP less the running mean of its output over tokens, which begins as zero."""
    model.register_buffer("mean_counted", torch.zeros(model.config.hidden_size))

    def center(mlp: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if model.training and torch.is_grad_enabled():
            model.mean_counted.lerp_(output.detach().mean((0, 1)), 0.5)
        return output - model.mean_counted

    model.model.layers[0].mlp.register_forward_hook(center)


def _freeze_embedding(model: Any) -> None:
    model.model.embed_tokens.weight.requires_grad_(False)


def _freeze_layer(model: Any) -> None:
    for parameter in model.model.layers[0].mlp.parameters():
        parameter.requires_grad_(False)


def _gate(model: Any) -> None:
    """A gate by token, which begins as closed."""
    width = model.config.hidden_size
    model.gate = nn.Linear(width, 1)
    nn.init.zeros_(model.gate.weight)
    model.model.layers[-1].mlp.register_forward_hook(
        lambda mlp, inputs, output: output * (1 + model.gate(inputs[0]).tanh())
    )


def _scale(model: Any, *shape: int) -> None:
    """A learnt scale of the last norm's output."""
    model.scale = nn.Parameter(torch.ones(shape))
    model.model.norm.register_forward_hook(lambda norm, inputs, output: output * model.scale)


def _hook_on_gradients(model: Any) -> None:
    """Gradients of a layer's output are halved."""

    def halve(layer: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad / 2)

    model.model.layers[0].register_forward_hook(halve)


_CHANGES: dict[str, Any] = {
    "zero mixer": lambda model: _mix(model, 0.0),
    "mixer": lambda model: _mix(model, 0.1),
    "depthwise convolution": _convolve,
    "skipped experts": _skipped_experts,
    "rare parameters": _rare,
    "task heads": _task_heads,
    "buffer that counts": _counts,
    "buffer that follows the batch": _follows,
    "frozen embedding": _freeze_embedding,
    "frozen layer": _freeze_layer,
    "gate": _gate,
    "scaled output": lambda model: _scale(model, 1),
    "scalar parameter": _scale,
    "hook on gradients": _hook_on_gradients,
    "experts by row": _experts_by_row,  # is not drawn; see tests/integration/pipelines/test_pipeline_order.py
}
assert set(_CHANGES) == {*CHANGES, "experts by row"}
assert RARE_TOKEN < VOCAB
