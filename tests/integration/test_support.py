"""`run_deepspeed` gives ranks in which real DeepSpeed starts, trains and stops."""

import deepspeed
import torch
import torch.distributed as dist

from tests.integration.tiny import SMALL_BUCKETS
from tests.support import run_deepspeed


def test_deepspeed_trains_a_step_on_two_ranks():
    weights = run_deepspeed(_one_step, 2)
    assert weights[0] == weights[1]
    assert weights[0] != [[1.0, 1.0]]


def _one_step(rank):
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1, **SMALL_BUCKETS}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    assert dist.get_world_size() == 2
    engine.backward(engine(torch.tensor([[1.0, float(rank)]])).square().mean())
    engine.step()
    return model.weight.tolist()
