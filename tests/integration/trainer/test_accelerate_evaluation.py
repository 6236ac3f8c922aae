"""An evaluation with accelerate over shards: losses, guesses and labels of one process, each row once and in order.

Budget: 15 s.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.integration.tiny import UNEVEN_2, adam, ds_config, llama, samples
from tests.support import run_deepspeed

ROWS = 7


@pytest.mark.parametrize(
    ("world_size", "stage"),
    [pytest.param(2, 2, id="2 ranks"), pytest.param(4, 3, id="two replicas", marks=pytest.mark.slow)],
)
def test_rows_of_an_evaluation_are_those_of_one_process(world_size: int, stage: int) -> None:
    (expected,) = run_deepspeed(_loop, 1, None, env={"ACCELERATE_USE_CPU": "true"})
    for ours in run_deepspeed(_loop, world_size, stage, env={"ACCELERATE_USE_CPU": "false"}):
        for mine, theirs in zip(ours, expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def _loop(rank: int, stage: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Guesses and labels of all rows after a step, and as many of each."""
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig

    import ds_hetero

    options: dict[str, Any] = {"cpu": True}
    if stage is not None:
        ds_hetero.register()
        section = {"schedule": UNEVEN_2, "evaluation": "sharded"}
        config = ds_config(stage, None, heterogeneity=section, train_micro_batch_size_per_gpu=1)
        handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
        parallelism = ParallelismConfig(
            sp_backend="deepspeed", sp_size=2, dp_shard_size=int(os.environ["WORLD_SIZE"]) // 2, sp_handler=handler
        )
        options = {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config), "parallelism_config": parallelism}
    accelerator = Accelerator(**options)
    model = llama()
    evaluation: Any = DataLoader(samples(ROWS), 2)
    model, _, evaluation = accelerator.prepare(model, adam(model), evaluation)
    model.eval()
    guesses, labels = [], []
    with torch.no_grad():
        for batch in evaluation:
            made = model(**batch).logits.argmax(-1)
            gathered = accelerator.gather_for_metrics((made, batch["labels"]))
            guesses.append(gathered[0].numpy())
            labels.append(gathered[1].numpy())
    return np.concatenate(guesses), np.concatenate(labels)
