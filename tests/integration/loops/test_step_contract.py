"""A step is a contract: what one rank leaves out, or decides alone, is one error on all ranks and no hang.

Budget: 60 s.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integration.models.test_features import start
from tests.integration.tiny import batches, llama, train_on_one_process
from tests.support import run_deepspeed


def step(handle: Any, engine: Any, batch: Any) -> None:
    """One training step."""
    engine.backward(handle.loss(engine(**batch), batch))
    engine.step()


def test_a_loop_left_by_one_rank_meets_the_others_in_a_checkpoint(tmp_path: Any) -> None:
    messages = run_deepspeed(_leave_and_save, 2, str(tmp_path))
    assert messages[0] == messages[1]
    left, waiting = "rank 0 has left the loop over its batches and is saving a checkpoint", "reading the next batch"
    assert messages[0].startswith(f"{left}, while the other ranks are {waiting}. Every rank has to")


def _leave_and_save(rank: int, folder: str) -> str:
    from ds_hetero import StepError

    handle, engine = start(llama(), stage=1)
    with pytest.raises(StepError) as caught:
        for number, batch in enumerate(handle.dataloader(batches(4), batches="same")):
            step(handle, engine, batch)
            if rank == 0 and number == 1:
                break
        engine.save_checkpoint(folder)
    return str(caught.value)


def test_a_loop_left_by_one_rank_for_another_epoch() -> None:
    messages = run_deepspeed(_leave_and_begin_anew, 2)
    assert messages[0] == messages[1]
    assert "rank 1 ran 1 forward, 1 backward, 1 step since its last batch and waits for batch 0" in messages[0]
    assert "the other ranks ran 1 forward, 1 backward, 1 step since its last batch and waits for batch 2" in messages[0]


def _leave_and_begin_anew(rank: int) -> str:
    from ds_hetero import StepError

    handle, engine = start(llama(), stage=1)
    loader = handle.dataloader(batches(4), batches="same")
    with pytest.raises(StepError) as caught:
        for _ in range(2):
            for number, batch in enumerate(loader):
                step(handle, engine, batch)
                if rank == 1 and number == 1:
                    break
    return str(caught.value)


def test_a_step_left_out_in_the_middle_of_accumulation() -> None:
    messages = run_deepspeed(_leave_out_a_step, 2)
    assert messages[0] == messages[1]
    assert "rank 1 ran 1 forward, 1 backward, 0 steps" in messages[0]
    assert "rank 0" not in messages[0]


def _leave_out_a_step(rank: int) -> str:
    from ds_hetero import StepError

    handle, engine = start(llama(), stage=1, gradient_accumulation_steps=2)
    with pytest.raises(StepError) as caught:
        for number, batch in enumerate(handle.dataloader(batches(4), batches="same")):
            engine.backward(handle.loss(engine(**batch), batch))
            if rank == 0 or number != 2:
                engine.step()
    return str(caught.value)


def test_several_backwards_for_one_step_are_exact_or_refused() -> None:
    messages = run_deepspeed(_several_backwards, 2)
    assert messages[0] == messages[1]
    for stage, message in zip((1, 2), messages[0], strict=True):
        assert "a second backward without engine.step() between: with gradient_accumulation_steps=1" in message
        assert f"on ZeRO stage {stage} the second would write its own over them. Add the losses" in message


def _several_backwards(rank: int) -> list[str]:
    from ds_hetero import StepError

    first, second = batches(2)
    (expected,) = train_on_one_process(llama(), [[first, second]])[1]
    messages = []

    def begin(stage: int, accumulation: int = 1) -> tuple[Any, list[Any]]:
        handle, engine = start(llama(), stage=stage, gradient_accumulation_steps=accumulation)
        loader = handle.for_engine(engine).dataloader([first, second], batches="same")
        return engine, [engine(**batch).loss for batch in loader]

    def expect_mean(engine: Any, sums: bool = True) -> None:
        norm = float(engine.get_global_grad_norm())
        assert norm == pytest.approx(2 * expected if sums else expected, rel=1e-4), (norm, expected)

    for stage in (1, 2):  # the first backward's gradients would be lost
        engine, (loss, other) = begin(stage)
        engine.backward(other)
        with pytest.raises(StepError) as caught:
            engine.backward(loss)
        messages.append(str(caught.value))
        engine, losses = begin(stage)
        with engine.coalesce_grad_reduction():
            for loss in losses:
                engine.backward(loss)
        engine.step()
        expect_mean(engine)
        engine, (loss, other) = begin(stage)
        engine.backward(other)
        engine.zero_grad()  # dropped by the script
        engine.backward(loss)
        engine.step()
    engine, losses = begin(3)  # DeepSpeed alone loses the first here, too
    for loss in reversed(losses):
        engine.backward(loss)
    engine.step()
    expect_mean(engine)
    for stage in (1, 3):
        engine, losses = begin(stage, accumulation=2)
        for loss in losses:
            engine.backward(loss)
            engine.step()
        expect_mean(engine, sums=False)
        engine, losses = begin(stage)
        engine.backward(sum(losses))
        engine.step()
        expect_mean(engine)
    return messages


PIPELINE = {
    "version": 2,
    "model": {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2},
    "pipelines": [
        {
            "micro_batch_size": 1,
            "micro_batches": 2,
            "stages": [{"ranks": [0], "layers": [0, 1]}, {"ranks": [1], "layers": [1, 2]}],
        }
    ],
}


def start_pipeline() -> tuple[Any, Any]:
    """Handle and engine; two stages, one on each rank."""
    import deepspeed

    import ds_hetero

    handle, model = ds_hetero.register(), llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config={"heterogeneity": {"schedule": PIPELINE}}
    )
    return handle, engine


def test_a_backward_left_out_by_one_stage_of_a_pipeline() -> None:
    messages = run_deepspeed(_leave_out_a_backward_of_a_pipeline, 2)
    assert messages[0] == messages[1]
    assert "rank 0 ran 1 forward, 0 backwards, 1 step" in messages[0]
    assert "the other ranks ran 1 forward, 1 backward, 1 step" in messages[0]


def _leave_out_a_backward_of_a_pipeline(rank: int) -> str:
    from ds_hetero import StepError

    handle, engine = start_pipeline()
    with pytest.raises(StepError) as caught:
        for number, batch in enumerate(handle.dataloader(batches(4))):
            loss = engine(**batch).loss
            if rank == 1 or number != 2:
                engine.backward(loss)
            engine.step()
    return str(caught.value)


def test_a_loop_left_by_one_stage_of_a_pipeline_meets_the_other_in_a_checkpoint(tmp_path: Any) -> None:
    messages = run_deepspeed(_leave_a_pipeline_and_save, 2, str(tmp_path))
    assert messages[0] == messages[1]
    left, waiting = "rank 0 has left the loop over its batches and is saving a checkpoint", "reading the next batch"
    assert messages[0].startswith(f"{left}, while the other ranks are {waiting}. Every rank has to")


def _leave_a_pipeline_and_save(rank: int, folder: str) -> str:
    from ds_hetero import StepError

    handle, engine = start_pipeline()
    with pytest.raises(StepError) as caught:
        for number, batch in enumerate(handle.dataloader(batches(4))):
            engine.backward(engine(**batch).loss)
            engine.step()
            if rank == 0 and number == 1:
                break
        engine.save_checkpoint(folder)
    return str(caught.value)


def test_what_all_ranks_decide_together_stays_legal() -> None:
    run_deepspeed(_do_odd_things, 2)


def _do_odd_things(rank: int) -> None:
    import threading
    from queue import Queue

    handle, engine = start(llama(), stage=1)
    loader, other = (handle.dataloader(batches(3), batches="same") for _ in range(2))
    for batch in loader:  # left by all
        step(handle, engine, batch)
        break
    for first, second in zip(loader, other, strict=True):  # two forwards, then two backwards
        losses = [handle.loss(engine(**batch), batch) for batch in (first, second)]
        for loss in reversed(losses):
            engine.backward(loss)
            engine.step()
    for batch in loader:  # evaluation on one rank amid training, and a batch skipped by all
        step(handle, engine, batch)
        if rank == 0:
            engine.eval()
            with torch.no_grad():
                engine(**batches(1)[0])
            engine.train()
        next(loader, None)
    queue: Queue[Any] = Queue(1)

    def read() -> None:
        for batch in loader:
            queue.put(batch)
        queue.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (batch := queue.get()) is not None:  # read ahead by a thread
        step(handle, engine, batch)
