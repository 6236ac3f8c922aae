"""What docs/forward-arguments.md says of the arguments of a forward on shards is so.

Budget: 30 s.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.architectures import build
from tests.integration.loops.test_losses import sgd
from tests.integration.models.test_recurrent import make as make_recurrent
from tests.integration.self_checking import verdict
from tests.integration.sweep import _batch, _compare, _whole, make_model
from tests.integration.tiny import UNEVEN_2, batches, ds_config, llama
from tests.integration.trainer.test_trainer import PIPELINES
from tests.support import run_deepspeed, run_ranks

ITEMS = 91  # more than a micro-batch has labels, as in accumulation


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {**llama().config.to_dict(), "num_local_experts": 4, "router_aux_loss_coef": 0.1, "model_type": "mixtral"}
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**sizes))


def norm_of(model: Any) -> float:
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf))


@pytest.fixture(scope="module")
def sharded() -> list[dict[str, Any]]:
    """By rank, what became of forwards with one argument or another."""
    return run_deepspeed(_forwards, 2)


def _forwards(rank: int) -> dict[str, Any]:
    import deepspeed

    import ds_hetero
    from ds_hetero.errors import BatchError

    handle, numbers = ds_hetero.register(), {}
    (whole,) = batches(1)
    arguments: dict[str, Any] = {
        "n": {"num_items_in_batch": torch.tensor(ITEMS)},
        "n as a number": {"num_items_in_batch": ITEMS},
        "a tuple": {"return_dict": False},
        "nothing": dict.fromkeys(("output_attentions", "is_causal", "head_mask", "encoder_hidden_states", "own")),
        "routers": {"num_items_in_batch": ITEMS, "output_router_logits": True},
    }
    for name, given in arguments.items():
        model = mixtral() if name == "routers" else llama()
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=sgd(model), config=ds_config(1, UNEVEN_2, gradient_clipping=0.0)
        )
        for batch in handle.dataloader([whole], batches="same"):
            outputs = engine(**batch, **given)
            loss = outputs[0] if isinstance(outputs, tuple) else outputs.loss
            engine.backward(loss)
            engine.step()
        numbers[name] = [type(outputs).__name__, loss.item(), float(engine.get_global_grad_norm())]
        if name == "a tuple":
            with pytest.raises(BatchError, match=r"got a tuple. Leave out return_dict=False"):
                handle.loss(outputs, batch)
    numbers["no labels"] = _without_labels(handle, whole)
    (batch,) = handle.dataloader([{**whole, "num_items_in_batch": ITEMS}], batches="same")
    in_batch = engine(**batch).loss.item()
    return {"numbers": numbers, "in the batch": in_batch, "refused": _refused(handle, engine, whole)}


def _without_labels(handle: Any, whole: dict[str, Tensor]) -> list[float]:
    """The loss of a micro-batch without labels by both ways, and the norm of a step of it alone, and beside another."""
    import deepspeed

    model, numbers = llama(), []
    config = ds_config(1, UNEVEN_2, gradient_clipping=0.0, gradient_accumulation_steps=2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=config)
    none = {**whole, "labels": torch.full_like(whole["labels"], -100)}
    for i, batch in enumerate(handle.dataloader([none, none, none, whole], batches="same")):
        outputs = engine(**batch, num_items_in_batch=ITEMS)
        engine.backward(outputs.loss, scale_wrt_gas=False)
        engine.step()
        if i < 3:
            numbers += [outputs.loss.item(), handle.loss(outputs, batch, num_items=ITEMS).item()]
        if i % 2:
            numbers.append(float(engine.get_global_grad_norm()))
    return numbers


def _refused(handle: Any, engine: Any, whole: dict[str, Tensor]) -> dict[str, str]:
    """What was said of forwards, and of batches, that are refused."""
    from ds_hetero.errors import BatchError

    (batch,) = handle.dataloader([whole], batches="same")
    labels, said = batch["shift_labels"], {}
    without = {name: entry for name, entry in batch.items() if name != "shift_labels"}
    calls: dict[str, dict[str, Any]] = {
        "output_attentions": batch | {"output_attentions": True},
        "logits_to_keep": batch | {"logits_to_keep": 3},
        "is_causal": batch | {"is_causal": False},
        "ignore_index": batch | {"ignore_index": 5},
        "encoder_hidden_states": batch | {"encoder_hidden_states": torch.ones(2, 3, 32)},
        "pixel_values": batch | {"pixel_values": torch.ones(2, 3, 4, 4)},
        "own": batch | {"own": torch.ones(2, 37)},
        "num_items_in_batch": batch | {"num_items_in_batch": ITEMS, "labels": labels},
        "labels": without | {"labels": labels},
    }
    for name, given in calls.items():
        with pytest.raises(BatchError) as caught:
            engine(**given)
        said[name] = str(caught.value)
    one_row = {name: entry[:1] for name, entry in whole.items()}
    ends = {"cu_seq_lens_q": torch.tensor([0, 9, 37]), "cu_seq_lens_k": torch.tensor([0, 12, 37])}
    batches_refused = {
        "cu_seq_lens_k": one_row | ends,
        "a list": one_row | {"cu_seq_lens_q": [0, 37]},
        "seq_idx": one_row | {"seq_idx": torch.zeros(1, 37, dtype=torch.int32)},
        "no rows": {name: entry[:0] for name, entry in whole.items()},
        "no tokens": {name: entry[:, :0] for name, entry in whole.items()},
    }
    for name, given in batches_refused.items():
        with pytest.raises(BatchError) as caught:
            next(iter(handle.dataloader([given], batches="same")))
        said[name] = str(caught.value)
    return said


@pytest.mark.parametrize("name", ["n", "n as a number", "routers"])
def test_the_sum_over_num_items_in_batch_is_that_of_one_process(sharded: list[dict[str, Any]], name: str) -> None:
    model = mixtral() if name == "routers" else llama()
    given = {"output_router_logits": True} if name == "routers" else {}
    loss = model(**batches(1)[0], num_items_in_batch=torch.tensor(ITEMS), **given).loss
    loss.backward()
    for rank in sharded:
        assert rank["numbers"][name][1:] == pytest.approx([loss.item(), norm_of(model)], rel=1e-5)
    if name == "routers":
        assert [rank["in the batch"] for rank in sharded] == [pytest.approx(loss.item(), rel=0.2)] * 2


@pytest.mark.parametrize(("name", "kind"), [("a tuple", "tuple"), ("nothing", "CausalLMOutputWithPast")])
def test_tuples_and_arguments_without_a_value_pass(sharded: list[dict[str, Any]], name: str, kind: str) -> None:
    model = llama()
    loss = model(**batches(1)[0]).loss
    loss.backward()
    for rank in sharded:
        assert rank["numbers"][name] == [kind, *(pytest.approx(x, rel=1e-5) for x in (loss.item(), norm_of(model)))]


def test_a_batch_without_labels_counts_nothing(sharded: list[dict[str, Any]]) -> None:
    model = llama()
    model(**batches(1)[0], num_items_in_batch=torch.tensor(ITEMS)).loss.backward()
    for rank in sharded:
        assert rank["numbers"]["no labels"] == [0.0] * 7 + [pytest.approx(norm_of(model), rel=1e-5)]


REFUSED = {
    "output_attentions": '"output_attentions": True: attention weights are never held; leave it out.',
    "logits_to_keep": '"logits_to_keep": 3: a rank would keep the last of its own tokens',
    "is_causal": '"is_causal": False: the model\'s configuration says it',
    "ignore_index": '"ignore_index": 5: labels that do not count are -100',
    "encoder_hidden_states": '"encoder_hidden_states": Tensor of shape [2, 3, 32]: cross attention is not supported',
    "pixel_values": '"pixel_values": Tensor of shape [2, 3, 4, 4]: the model puts no images or sounds before',
    "own": '"own": Tensor of shape [2, 37]: it was never tried on parts of sequences',
    "num_items_in_batch": '"num_items_in_batch": with labels, the loss is that of the shard alone',
    "labels": '"labels": the model would shift the labels of a shard again; give it shift_labels instead',
    "cu_seq_lens_k": "cu_seq_lens_k must equal cu_seq_lens_q, because a sharded batch attends only within itself",
    "a list": "cu_seq_lens_q must be a tensor of boundaries, got list",
    "seq_idx": "seq_idx shows documents to some layers only; give cu_seq_lens_q or position_ids as well",
    "no rows": "a batch without tokens has nothing to train on, got shapes {'input_ids': (0, 37)}",
    "no tokens": "a batch without tokens has nothing to train on, got shapes {'input_ids': (2, 0)}",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named_on_every_rank(sharded: list[dict[str, Any]], name: str) -> None:
    first, second = (rank["refused"][name] for rank in sharded)
    assert first == second
    assert REFUSED[name] in first


BY_TOKEN: dict[tuple[str, str], dict[str, int]] = {
    ("masked", "bert"): {"token_type_ids": 2},
    ("masked", "ernie"): {"token_type_ids": 2, "task_type_ids": 3},
    ("masked", "roc_bert"): {"input_shape_ids": 32, "input_pronunciation_ids": 32},
}


@pytest.fixture(scope="module")
def by_token() -> list[dict[tuple[str, str], tuple[str, str]]]:
    return run_deepspeed(_entries_by_token, 2)


@pytest.mark.parametrize("case", BY_TOKEN, ids=" ".join)
def test_entries_by_token_are_cut_with_the_tokens(by_token: list[dict[tuple[str, str], Any]], case: Any) -> None:
    assert [rank[case] for rank in by_token] == [("exact", "")] * 2


def _entries_by_token(rank: int) -> dict[tuple[str, str], tuple[str, str]]:
    outcomes = {}
    for (head, name), entries in BY_TOKEN.items():
        model = make_model(head, name, torch.device("cpu"))
        if name == "ernie":
            model.config.use_task_id = True
            torch.manual_seed(0)
            model = type(model)(model.config).double().eval()
        batch = _batch(head, model)
        generator = torch.Generator().manual_seed(2)
        plain, _ = _whole(model, batch)
        batch |= {
            entry: torch.randint(0, count, batch["input_ids"].shape, generator=generator)
            for entry, count in entries.items()
        }
        loss, gradients = _whole(model, batch)
        assert loss != plain, "the entries change nothing"
        outcomes[head, name] = tuple(_compare(model, batch, loss, gradients))
    return outcomes


def test_documents_that_one_process_does_not_keep_apart_are_warned_of_and_not_refused() -> None:
    run_ranks(_packed_by_boundaries, 2, nccl_rules=False)


def _packed_by_boundaries(rank: int) -> None:
    lengths = (12, 20, 47)
    torch.manual_seed(1)
    ids = torch.randint(6, 60, (1, sum(lengths)))
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    batch = {"input_ids": ids, "labels": ids, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    batch |= {"max_length_q": 47, "max_length_k": 47}
    for model, given in (
        (build("gpt_oss", torch.float32), batch | {"position_ids": positions}),
        (build("llama", torch.float32), batch | {"position_ids": positions}),
        (build("llama", torch.float32), batch),
        (make_recurrent("Bamba").float(), batch | {"position_ids": positions}),
    ):
        assert not verdict(model, given, UNEVEN_2), type(model).__name__


def test_pipelines_take_these_arguments_alone() -> None:
    for said, numbers in run_deepspeed(_pipelined, 4):
        assert '"output_attentions": True: attention weights are never held' in said[0]
        assert '"logits_to_keep": 1: a rank would keep the last of its own tokens' in said[1]
        assert '"token_type_ids": Tensor of shape [4, 37]: pipelines hand stages tokens' in said[2]
        loss, over_items, first_of_tuple, without_labels = numbers
        labels = batches(1, 4)[0]["labels"][:, 1:].ne(-100).sum().item()
        assert over_items == pytest.approx(loss * labels / ITEMS, rel=1e-5)
        assert (first_of_tuple, without_labels) == (pytest.approx(loss, rel=1e-5), 0.0)


def _pipelined(rank: int) -> tuple[list[str], list[float]]:
    import deepspeed

    import ds_hetero
    from ds_hetero.errors import BatchError

    handle, model = ds_hetero.register(), llama()
    config = ds_config(1, PIPELINES, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=config)
    (batch,) = handle.dataloader(batches(1, 4))
    said = []
    for given in ({"output_attentions": True}, {"logits_to_keep": 1}, {"token_type_ids": batch["input_ids"]}):
        with pytest.raises(BatchError) as caught:
            engine(**batch, **given)
        said.append(str(caught.value))
    engine.module.eval()
    with torch.no_grad():
        losses = [engine(**batch).loss, engine(**batch, num_items_in_batch=torch.tensor(ITEMS)).loss]
        losses.append(engine(**batch, return_dict=False)[0])
        losses.append(engine(**{**batch, "labels": torch.full_like(batch["labels"], -100)}).loss)
    return said, [float(loss) for loss in losses]
