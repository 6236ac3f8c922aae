"""What a save of an engine holds, in bytes, where most parameters are not trained."""

import pytest
import torch

from benchmarks.elastic.small_model import make_model, trained
from tests.integration.tiny import SMALL_BUCKETS
from tests.support import run_deepspeed


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_that_are_not_trained_are_in_no_save(stage):
    run_deepspeed(_check_bytes, 2, stage)


def _check_bytes(rank, stage):
    import deepspeed

    from ds_hetero.elastic.content import Content
    from ds_hetero.frameworks.deepspeed.in_memory import FrozenSample, load_parts, parts_in_memory

    model = make_model(is_lora=True, width=192)
    sizes = [parameter.numel() for parameter in model.parameters()]
    num_trained = sum(parameter.numel() for parameter in trained(model))
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, **SMALL_BUCKETS},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    batch = torch.arange(32)[None]
    _step(engine, batch)
    sample = FrozenSample(engine)
    with parts_in_memory(engine, with_frozen=False) as parts:
        state = Content(parts)
        # master weight and two moments of Adam, rank 0's model besides, and names
        assert num_trained * 4 < 2 * state.num_bytes < 2 * (16 * num_trained + 60_000)
        kept = [None, None]
        torch.distributed.all_gather_object(kept, parts)  # by value
    with parts_in_memory(engine) as parts:
        more = Content(parts).num_bytes - state.num_bytes
        # ZeRO-1: whole on rank 0; ZeRO-3: each rank's half
        assert more > 4 * (sum(sizes) - num_trained) / 3 if rank == 0 or stage == 3 else more == 0
    loss = engine(input_ids=batch, labels=batch).loss.item()
    _step(engine, batch)
    assert not sample.has_changed()
    load_parts(engine, {**kept[1], **kept[0]}, with_frozen=False)
    assert engine(input_ids=batch, labels=batch).loss.item() == loss
    frozen = next(one for one in engine.module.parameters() if not one.requires_grad)
    getattr(frozen, "ds_tensor", frozen).data.mul_(1.01)
    assert sample.has_changed()


def _step(engine, batch):
    engine.backward(engine(input_ids=batch, labels=batch).loss)
    engine.step()
