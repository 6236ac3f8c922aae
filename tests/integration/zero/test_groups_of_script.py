"""Groups of the script's optimizer that DeepSpeed's steps do not follow are refused at the step where they part.

Budget: 10 s.
"""

from __future__ import annotations

import torch

from tests.integration.tiny import UNEVEN_2, batches, ds_config, llama
from tests.support import run_deepspeed

STEPS = 3
# Of each fault: the step at which it is found.
EXPECTED = {
    "made anew with another decay": 0,
    "a scheduler that is not followed": 1,
    "followed": None,
    "moved in the engine": None,
}


def test_settings_that_do_not_hold_are_refused_at_their_step() -> None:
    first, second = run_deepspeed(_train_all, 2)
    assert first == second
    assert {name: step for name, (step, _) in first.items()} == EXPECTED
    for name, setting in zip(EXPECTED, ("weight_decay", "lr"), strict=False):
        assert f"has another {setting} than the optimizer that DeepSpeed steps (ranks [0, 1])" in first[name][1]


def _train_all(rank: int) -> dict[str, tuple[int | None, str]]:
    return {fault: _train(fault) for fault in EXPECTED}


def _train(fault: str) -> tuple[int | None, str]:
    import deepspeed

    import ds_hetero
    from ds_hetero.errors import HeteroError

    handle = ds_hetero.register()
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    config = ds_config(1, UNEVEN_2)
    config["heterogeneity"]["checks"] = {"compare_every": "off"}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    if fault != "followed":  # as DeepSpeed would that makes an optimizer of its own
        engine.optimizer.optimizer = torch.optim.SGD([dict(group) for group in optimizer.param_groups], lr=0.1)
    if fault == "made anew with another decay":
        engine.optimizer.optimizer.param_groups[0]["weight_decay"] = 0.0
    if fault == "moved in the engine":
        scheduler.optimizer = engine.optimizer.optimizer
    try:
        for batch in handle.dataloader(batches(STEPS), batches="same"):
            engine.backward(engine(**batch).loss)
            engine.step()
    except HeteroError as error:
        return engine.global_steps, str(error)
    finally:
        handle.undo()
    return None, ""
