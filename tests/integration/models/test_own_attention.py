"""An attention of the script's own is refused by name at the start; another one may be set for evaluations.

Budget: 10 s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.integration.tiny import UNEVEN_2, batches, ds_config, llama
from tests.support import run_deepspeed


def my_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return (out * 1.1).transpose(1, 2), None


def start_with_own(rank: int) -> list[str]:
    import deepspeed
    from transformers import AttentionInterface

    import ds_hetero

    AttentionInterface.register("my_attention", my_attention)
    said = []
    for more in ({}, {"checks": "off"}, {"sequence_parallel_size": 1}):
        handle, model = ds_hetero.register(), llama(attn_implementation="my_attention")
        split = "sequence_parallel_size" not in more
        config = ds_config(2, UNEVEN_2 if split else "ulysses")
        (config["heterogeneity"] if split else config).update(more)
        try:
            deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
        except ds_hetero.ModelError as error:
            said.append(str(error))
        handle.undo()
    return said


def test_an_attention_of_the_script_is_refused_by_name() -> None:
    for said in run_deepspeed(start_with_own, 2):
        assert len(said) == 2  # where nothing is split, it runs as it is
        for text in said:
            assert '"my_attention" is' in text and "test_own_attention.my_attention" in text and "sdpa" in text


def train(rank: int, evaluates: bool) -> list[float]:
    import deepspeed

    import ds_hetero

    handle, model = ds_hetero.register(), llama().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(2, UNEVEN_2))
    losses = []
    for batch in handle.dataloader(batches(3)):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if evaluates:
            model.eval()
            model.set_attn_implementation("eager")
            with torch.no_grad():
                outputs = model(**batches(1)[0], output_attentions=True)
            assert outputs.attentions[0] is not None
            model.set_attn_implementation("sdpa")
            model.train()
    return losses


def test_another_attention_for_an_evaluation_and_back() -> None:
    assert run_deepspeed(train, 2, True) == run_deepspeed(train, 2, False)
