"""A model that no rank can hold trains in stages, under a limit of the kernel that every rank has."""

import pytest
import torch

from benchmarks.emulation.emulator import limit_memory
from tests.integration.pipelines.test_pipelines import batches, pipeline, plan_of
from tests.integration.tiny import llama
from tests.support import run_deepspeed

LARGE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24}  # 101 million parameters
PARAMETER_BYTES = 16  # value, gradient and two moments in fp32: the least that one process needs
BUDGET_BYTES = 1000 * 2**20  # beyond what a process has before there is a model; threads' stacks count
RANKS = 4


def trains_alone(rank):
    """Parameters of the model, and the error that one process ends with."""
    limit_memory(BUDGET_BYTES)
    model = llama(**LARGE)
    size = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(RuntimeError, match="allocate memory"):
        model(input_ids=torch.zeros(1, 8, dtype=torch.long)).logits.sum().backward()
        optimizer.step()
    return size


def trains_in_stages(rank, plan):
    """Losses of three steps."""
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    deepspeed.init_distributed("gloo")
    limit_memory(BUDGET_BYTES)
    with torch.device("meta"):
        model = llama(**LARGE)
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "heterogeneity": {"schedule": plan}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    losses = []
    for batch in handle.dataloader(batches(plan, 1, False) * 3):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


@pytest.mark.slow
def test_a_model_that_no_rank_can_hold_trains_in_stages():
    (size,) = run_deepspeed(trains_alone, 1)
    assert size * PARAMETER_BYTES > 1.4 * BUDGET_BYTES
    each = LARGE["num_hidden_layers"] // RANKS
    stages = [{"ranks": [i], "layers": [each * i, each * (i + 1)]} for i in range(RANKS)]
    sizes = {"num_layers": LARGE["num_hidden_layers"], "num_heads": 4, "num_kv_heads": 2}
    plan = {**plan_of(pipeline(1, 4, *stages)), "model": sizes}
    for losses in run_deepspeed(trains_in_stages, RANKS, plan):
        assert losses[2] < losses[1] < losses[0]
