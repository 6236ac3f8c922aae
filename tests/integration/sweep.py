"""Every architecture that transformers maps to a text head, built tiny and run on uneven shards against one process.

Each goes through the door that users take: `deepspeed.initialize` with a "heterogeneity" section, the handle's loader,
the engine's forward and backward.

python -m tests.integration.sweep [model type ...]      # on two ranks, and records what it finds
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
import traceback
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from tests.integration.architectures import VOCAB
from tests.integration.sweep_configs import tiny_config
from tests.integration.sweep_images import NotBuiltError, images_for
from tests.integration.tiny import UNEVEN_2, ds_config
from tests.support import run_deepspeed, start_server
from tests.sweep_table import RECORD, recorded

# By kind of head: the class that makes the models, and the mapping that lists their types.
HEADS = {
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "images": ("AutoModelForMultimodalLM", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "tokens": ("AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"),
}
_LENGTH, _PADDING = 96, 13  # tokens of a row, and those of the second that are padding
_MOST_PARAMETERS = 20_000_000
_TOLERANCE = 1e-6  # relative; the models run in fp64, but some parts of them in fp32


class Outcome(NamedTuple):
    """What became of one architecture.

    Args:
        kind: ``"exact"``, ``"refused"``, ``"wrong"``, ``"obscure"``, or ``"not built"`` where one process has no
            loss of a tiny model either.
        why: what was said, or by how much it is off.
    """

    kind: Literal["exact", "refused", "wrong", "obscure", "not built"]
    why: str = ""


def architectures() -> list[tuple[str, str]]:
    """Return (head, model type) of all that transformers maps; a type that two heads know is run with both."""
    from transformers.models.auto import modeling_auto

    return [(head, name) for head, (_, listed) in HEADS.items() for name in sorted(getattr(modeling_auto, listed))]


def outcomes(rank: int, names: list[tuple[str, str]]) -> dict[str, Outcome]:
    """On every rank: what becomes of these architectures, by head and type."""
    import logging

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    found: dict[str, Outcome] = {}
    for head, name in names:
        found[f"{head} {name}"] = _outcome(head, name)
    return found


def _outcome(head: str, name: str) -> Outcome:
    from ds_hetero.errors import HeteroError
    from ds_hetero.frameworks.transformers.model.model_checks import check_model

    try:
        outline = make_model(head, name, torch.device("meta"))
        try:
            check_model(outline)
        except HeteroError as error:
            return Outcome("refused", _one_line(error))
        size = sum(parameter.numel() for parameter in outline.parameters())
        if size > _MOST_PARAMETERS:
            return Outcome("not built", f"{size} parameters")
        model = make_model(head, name, torch.device("cpu"))
        batch = _batch(head, model)
        loss, gradients = _whole(model, batch)
    except Exception as error:
        return Outcome("not built", f"{type(error).__name__}: {_one_line(error)}")
    try:
        outcome = _compare(model, batch, loss, gradients)
        has_images = any(entry.is_floating_point() for entry in batch.values())
        return outcome if head != "images" or has_images or outcome.kind != "exact" else Outcome("exact", "text alone")
    except HeteroError as error:
        return Outcome("refused", _one_line(error))
    except Exception:
        return Outcome("obscure", traceback.format_exc()[-6000:])


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def make_model(head: str, name: str, device: torch.device) -> Any:
    """The model in fp64, whose first forwards take shards, as no mode was set since it was prepared."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = tiny_config(CONFIG_MAPPING[name], head)
    make = getattr(transformers, HEADS[head][0]).from_config
    torch.manual_seed(0)
    with device:
        try:
            model = make(config, attn_implementation="sdpa", experts_implementation="eager")
        except ValueError:  # has eager attention only
            model = make(config, attn_implementation="eager", experts_implementation="eager")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.double().eval()


def _batch(head: str, model: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(6, VOCAB - 8, (2, _LENGTH), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if head == "masked":
        ids[:, ::7] = 5
    if head == "tokens":
        batch["labels"] = ids.remainder(model.config.num_labels)
    if head == "images":
        return batch | images_for(model, batch)
    batch["attention_mask"] = torch.ones_like(ids)
    batch["attention_mask"][1, -_PADDING:] = 0
    batch["labels"][1, -_PADDING:] = -100
    return batch


def _whole(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    with double_casts():
        extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
        loss = model(**batch, **extra).loss
        if loss is None or not loss.requires_grad:
            raise NotBuiltError("its head has no loss of labels")
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), gradients


def _compare(model: Any, batch: dict[str, Tensor], loss: Tensor, gradients: dict[str, Tensor]) -> Outcome:
    """Start a job as a user does, and hold the loss and the gradients that its engine averages to those given."""
    import deepspeed

    import ds_hetero
    from ds_hetero.frameworks.transformers.model.model_checks import head_counts

    handle = ds_hetero.register()
    num_heads, num_kv_heads = head_counts(model)
    schedule = {**UNEVEN_2, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(0, schedule))
    try:
        (shard,) = handle.for_engine(engine).dataloader([batch], batches="same")  # which checks the model
        with double_casts():
            ours = engine(**shard).loss
            engine.backward(ours)
    finally:
        engine.destroy()
        handle.registry.find(model).restore()
    error, worst = abs(ours.item() - loss.item()) / abs(loss.item()), "the loss"
    largest = max(float(gradient.norm()) for gradient in gradients.values())
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        expected = gradients.get(name, torch.zeros_like(parameter))
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        off = float((own - expected).norm() / (expected.norm() + 1e-3 * largest))
        error, worst = max((error, worst), (off, name))
    return Outcome("exact") if error < _TOLERANCE else Outcome("wrong", f"{worst} is off by {error:.1e}")


@contextlib.contextmanager
def double_casts() -> Iterator[None]:
    """Have casts to fp32 inside the modelling files be casts to fp64, so that what is left of rounding shows faults."""
    single, cast = torch.float32, torch.Tensor.float
    torch.float = torch.float32 = torch.float64  # type: ignore[misc]  # torch.float is how DeepSpeed asks for a type
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.float = torch.float32 = single  # type: ignore[misc]
        torch.Tensor.float = cast  # type: ignore[method-assign]


_LONGEST_REASON = 400
_AT_ONCE = 20


def _record(types: list[str]) -> None:
    """Run what is asked for, all if nothing is, and write it into the record."""
    from tests.integration.sweep import outcomes  # by a name that ranks can import

    start_server(["tests.integration.sweep"], deepspeed=True)
    names = [name for name in architectures() if not types or name[1] in types]
    found = recorded() if types and RECORD.exists() else {}
    for start in range(0, len(names), _AT_ONCE):
        first, _ = run_deepspeed(outcomes, 2, names[start : start + _AT_ONCE], timeout_s=600)
        found |= {name: (outcome.kind, outcome.why[:_LONGEST_REASON]) for name, outcome in first.items()}
        print(*(f"{name}: {outcome.kind}" for name, outcome in first.items()), sep="\n", flush=True)
    lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(found.items()))
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    _record(sys.argv[1:])
