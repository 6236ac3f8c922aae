"""Plain data parallelism takes the script's own batches, with any arguments: nothing is split, so nothing is refused.

Budget: 10 s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.integration.tiny import VOCAB, ds_config, llama
from tests.support import run_deepspeed

LENGTH, STEPS = 20, 3

MORE: dict[str, dict[str, Any]] = {
    "labels alone": {},
    "positions": {"position_ids": torch.arange(LENGTH)[None]},
    "a padding mask": {"attention_mask": torch.ones(1, LENGTH, dtype=torch.long)},
    "a mask of its own": {"attention_mask": torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()},
    "what is not for shards": {"position_ids": torch.arange(LENGTH)[None], "logits_to_keep": 0, "is_causal": True},
    "what nobody has tried": {"position_ids": torch.arange(LENGTH)[None], "of_my_own": torch.ones(3)},
}


def batch(step: int, rank: int) -> dict[str, Tensor]:
    ids = torch.randint(8, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(2 * step + rank))
    return {"input_ids": ids, "labels": ids.clone()}


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(rank: int) -> dict[str, list[float]]:
    import deepspeed

    import ds_hetero

    losses = {}
    for name, more in MORE.items():
        handle, model = ds_hetero.register(), llama()
        config = ds_config(2, "ulysses", train_micro_batch_size_per_gpu=1, gradient_clipping=0.0)
        config |= {"sequence_parallel_size": 1}
        config["heterogeneity"]["zero_partition"] = [3, 1]
        engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=config)
        losses[name] = []
        for step in range(STEPS):
            loss = engine(**batch(step, rank), **more).loss
            engine.backward(loss)
            engine.step()
            losses[name].append(loss.item())
        engine.destroy()
        handle.undo()
    return losses


def test_batches_of_the_script_with_any_arguments() -> None:
    by_rank = run_deepspeed(train, 2)
    model = llama()
    optimizer = sgd(model)
    for step in range(STEPS):
        expected = [model(**batch(step, rank)).loss for rank in (0, 1)]
        torch.stack(expected).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank, loss in enumerate(expected):
            for name, losses in by_rank[rank].items():
                assert abs(losses[step] - loss.item()) < 1e-5, (name, step, rank)
