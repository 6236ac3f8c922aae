"""Tiny models, batches and schedules, and training by plain torch on one process, with which parity tests compare."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

VOCAB, LENGTH, LR, CLIP = 64, 37, 1e-2, 1.0

# Short documents are cut, too.
BY_DOCUMENTS = {"mode": "documents", "min_cut_tokens": 4}

# Of DeepSpeed's own size a bucket is 2 GB, which every rank of a test fills with NaN.
SMALL_BUCKETS = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}

# Two groups, tokens 3:1, four heads.
UNEVEN_2 = {
    "version": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "groups": [{"ranks": [0], "tokens": [3], "heads": [4]}, {"ranks": [1], "tokens": [1], "heads": [4]}],
}
# One group, tokens 1:2, the second rank computes no head.
ONE_GROUP_2 = {
    "version": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "layout": "contiguous",
    "groups": [{"ranks": [0, 1], "tokens": [1, 2], "heads": [4, 0]}],
}
# Two groups over four ranks; rank 1 holds no token, rank 3 computes no head.
UNEVEN_4 = {
    "version": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "groups": [
        {"ranks": [0, 2], "tokens": [3, 1], "heads": [3, 1]},
        {"ranks": [1, 3], "tokens": [0, 2], "heads": [4, 0]},
    ],
}


def llama(**changes: Any) -> Any:
    """Two layers, four heads over two KV heads, the same weights on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "attn_implementation": "sdpa", **changes}))


def checkpoint_activations(model: Any, reentrant: bool) -> None:
    """By the name that the installed transformers has for it."""
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    getattr(model, next(name for name in names if hasattr(model, name)))({"use_reentrant": reentrant})


def mean_over_group(loss: Tensor, labels: Tensor, group: Any) -> Tensor:
    """The loss that DeepSpeed, accelerate and transformers document: the ranks' means, weighted by their labels."""
    from torch.distributed import _functional_collectives as differentiable

    # In the place of torch.distributed.nn.functional.all_gather, which torch 2.15 calls deprecated.
    gather = getattr(differentiable, "all_gather_single", None) or differentiable.all_gather_tensor_autograd
    losses, tokens = gather(loss[None], 0, group), gather((labels != -100).sum()[None], 0, group)
    return (torch.where(tokens > 0, losses, 0) * tokens).sum() / tokens.sum()


def mean_over_ranks(value: Tensor) -> float:
    """Over all ranks of the job."""
    value = value.detach().clone()
    torch.distributed.all_reduce(value)
    return float(value) / torch.distributed.get_world_size()


def compute_in(dtype: torch.dtype) -> None:
    """Make `dtype` the default of this process; Llama's norms follow it too.

    transformers rounds inside them to float32, where a difference of float64's last bit now and then moves a value by
    one of float32's.
    """
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def forward(self: LlamaRMSNorm, hidden: Tensor) -> Tensor:
        return nn.functional.rms_norm(hidden, hidden.shape[-1:], self.weight, self.variance_epsilon)

    torch.set_default_dtype(dtype)
    LlamaRMSNorm.forward = forward


def samples(count: int, length: int = LENGTH) -> list[dict[str, Tensor]]:
    """Random tokens; the i-th sample trains on fewer labels than the one before."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for i in range(count):
        ids = torch.randint(0, VOCAB, (length,), generator=generator)
        labels = ids.clone()
        labels[: 2 + 3 * i % (length // 2)] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def batches(count: int, batch_size: int = 2, length: int = LENGTH) -> list[dict[str, Tensor]]:
    """`samples`, collated."""
    rows = samples(count * batch_size, length)
    return [collate(rows[i : i + batch_size]) for i in range(0, len(rows), batch_size)]


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack every entry."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW whose denominator does not turn the rounding of a gradient near zero into a step of full size."""
    return torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3)


def train_on_one_process(
    model: nn.Module, steps: list[list[dict[str, Tensor]]], optimizer: torch.optim.Optimizer | None = None
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of plain torch; the loss of a step is the mean over its batches."""
    optimizer = optimizer or adam(model)
    losses, norms = [], []
    for step in steps:
        optimizer.zero_grad()
        loss = torch.stack([model(**batch).loss for batch in step]).mean()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def parameters(model: nn.Module, stage: int = 0) -> dict[str, np.ndarray]:
    """Whole trained parameters in fp32, gathered where ZeRO partitions them."""
    from deepspeed.utils import safe_get_full_fp32_param

    read = safe_get_full_fp32_param if stage else (lambda p: p)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: read(p).detach().float().numpy().copy() for name, p in trained.items()}


def assert_same_parameters(ours: dict[str, np.ndarray], expected: dict[str, np.ndarray], rtol: float = 1e-5) -> None:
    """Every parameter within ``rtol`` of its norm."""
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        error = np.linalg.norm(ours[name] - value) / np.linalg.norm(value)
        assert error <= rtol, f"{name} is off by {error:.2e}"


def skip_where_refused(ds_config: dict[str, Any]) -> None:
    """Skip a test of settings that the installed release of DeepSpeed computes wrongly, and that are refused there."""
    from ds_hetero.errors import ConfigError
    from ds_hetero.frameworks.deepspeed.keys import expect_supported_keys

    try:
        expect_supported_keys(ds_config)
    except ConfigError as error:
        assert "with DeepSpeed" in str(error), error
        pytest.skip(f"refused by name: {error}")


def ds_config(stage: int, schedule: Any, **more: Any) -> dict[str, Any]:
    """A DeepSpeed configuration with buckets for tiny models."""
    zero = {"stage": stage, **SMALL_BUCKETS, **more.pop("zero", {})}
    placement = {"placement": more.pop("placement")} if "placement" in more else {}
    section = {} if schedule is None else {"heterogeneity": {"schedule": schedule, **placement}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": CLIP,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        **section,
        **more,
    }
