"""The self-check run on a model by itself, and what it must leave as it was."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.integration.tiny import VOCAB


def batch_of(kind: str = "plain", num_labels: int = VOCAB) -> dict[str, Tensor]:
    """A batch of three rows.

    Args:
        kind: ``"plain"``; ``"left"`` or ``"right"``, padded on that side; ``"packed"``; ``"prompt"``, with few labels.
        num_labels: the label of a token is its id modulo this.
    """
    torch.manual_seed(1)
    ids = torch.randint(6, VOCAB, (3, 151))
    ids[:, ::7] = 5  # the mask token of masked-language models
    batch = {"input_ids": ids, "labels": ids.clone() if num_labels == VOCAB else ids.remainder(num_labels)}
    if kind in ("left", "right"):
        mask = torch.ones_like(ids)
        mask[1, :120] = mask[2, :7] = 0
        batch["attention_mask"] = mask if kind == "left" else mask.flip(1)
        batch["labels"] = ids.masked_fill(batch["attention_mask"] == 0, -100)
    if kind == "packed":
        batch["position_ids"] = torch.cat([torch.arange(length) for length in (70, 41, 40)])[None].repeat(3, 1)
    if kind == "prompt":
        batch["labels"][:, :140] = -100
    return batch


def verdict(model: Any, batch: dict[str, Tensor], schedule: dict[str, Any]) -> str:
    """Return what the self-check says of a model, empty if nothing; the model must be as it was afterwards.

    Args:
        model: to be checked, not prepared by any engine.
        batch: the same on every rank.
        schedule: whose numbers of heads are replaced by the model's.
    """
    import ds_hetero
    from ds_hetero.errors import ModelError
    from ds_hetero.frameworks.transformers.model.model_checks import head_counts
    from ds_hetero.frameworks.transformers.model.sharded_model import ShardedModel
    from ds_hetero.frameworks.transformers.self_check import check_batch

    ds_hetero.register()
    with unchanged(model):
        sharded = ShardedModel(model, _replica_of(repr(schedule), *head_counts(model)), None)
        try:
            check_batch(sharded, batch)
            return ""
        except ModelError as error:
            return str(error)
        finally:
            sharded.restore()
            assert sharded.losses.latest_positions is None


@contextlib.contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """The self-check inside must leave a model in training, its gradients, and the generator as they are."""
    is_trained = [parameter.requires_grad for parameter in model.parameters()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    yield
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    assert [parameter.requires_grad for parameter in model.parameters()] == is_trained
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@functools.cache
def _replica_of(schedule: str, num_heads: int, num_kv_heads: int) -> Any:
    """This rank's, with process groups that the models of one process share."""
    import ast

    from ds_hetero.runtime.replica import make_replica
    from ds_hetero.values.plans import Plan
    from ds_hetero.values.schedule import Schedule

    fitting = {**ast.literal_eval(schedule), "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    return make_replica(Plan.of_replicas([Schedule.from_dict(fitting)]))
