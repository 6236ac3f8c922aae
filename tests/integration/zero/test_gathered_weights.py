"""ZeRO-3 with recomputation and frozen weights: no more is gathered at a time than the layer that is computed again.

Budget: 15 s.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.integration.tiny import UNEVEN_2, checkpoint_activations, collate, ds_config, llama, samples
from tests.support import run_deepspeed

LAYERS, ROWS, STEPS = 6, 4, 4
# Nothing is gathered ahead or kept for later; the bucket of gradients holds the adapters of one layer.
ZERO = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
    "reduce_bucket_size": 10_000,
}


def _model() -> Any:
    from peft import LoraConfig, get_peft_model

    model = llama(hidden_size=256, intermediate_size=768, num_hidden_layers=LAYERS)
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    checkpoint_activations(model, reentrant=False)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("sharing", ["tokens", "batches"])
def test_frozen_weights_are_not_kept_gathered(sharing: str) -> None:
    for layer, gathered, left in run_deepspeed(_gathered, 2, sharing):
        assert 0 < max(gathered) <= layer, (gathered, layer)
        assert left == [0] * STEPS  # after a backward


def _gathered(rank: int, sharing: str) -> tuple[int, list[int], list[int]]:
    """Bytes: of a layer's weights; gathered around every module; gathered after every backward."""
    import deepspeed

    import ds_hetero

    handle, model = ds_hetero.register(), _model()
    layer = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if ".layers.0." in name)
    config = ds_config(3, UNEVEN_2, train_micro_batch_size_per_gpu=ROWS, zero=ZERO)
    if sharing == "batches":
        config["heterogeneity"] = {"batch": [3, 1]}
        del config["train_micro_batch_size_per_gpu"]
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(trained, lr=1e-3), config=config)
    loader: Any = DataLoader(samples(ROWS * STEPS), batch_size=ROWS, collate_fn=collate)  # type: ignore[arg-type]
    gathered, left = list[int](), list[int]()

    def note(*_: object) -> None:
        at_hand = [p for p in model.parameters() if p.ds_status.name == "AVAILABLE"]
        gathered.append(sum(p.ds_numel * p.element_size() for p in at_hand))

    for module in model.modules():
        module.register_forward_pre_hook(note)
        module.register_forward_hook(note)
    for batch in handle.for_engine(engine).dataloader(loader):
        engine.backward(engine(**batch).loss)
        note()
        left.append(gathered[-1])
        engine.step()
    return layer, gathered, left
