"""Ranks that are struck or go another way: all end, with one clear message that names the rank. Budget: 120 s.

How soon, `benchmarks.faults` measures; here it is long before the backend's half an hour.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.models.test_features import start
from tests.integration.tiny import UNEVEN_2, UNEVEN_4, batches, llama
from tests.support import ROOT, Ending, free_port, run_to_the_end

pytestmark = pytest.mark.alone  # it waits in real time for what other work on the cores would delay

WENT_ON_ALONE = {
    "continue": "rank 1 left out a forward, in which the others wait.",
    "caught": "rank 1 went on after a forward, which ended with ValueError: odd batch",
    "barrier": "rank 1 has left the loop over its batches and waits in barrier at test_failures.py",
    "end": "rank 1 ended, while the others",
}


@pytest.mark.parametrize("how", WENT_ON_ALONE)
def test_a_rank_that_goes_on_alone_ends_all_ranks(how: str) -> None:
    ends = run_to_the_end(_go_on_alone, 2, how)
    _expect_named(ends, "StepError", WENT_ON_ALONE[how], unless=1 if how == "end" else None)


def _go_on_alone(rank: int, how: str) -> None:
    import torch.distributed as dist

    handle, engine = start(llama(), stage=1)
    for number, batch in enumerate(handle.dataloader(batches(4), batches="same")):
        if rank == 1 and number == 1:
            if how == "continue":
                continue
            if how in ("barrier", "end"):
                break
            engine.module.register_forward_pre_hook(_refuse)
        try:
            loss = handle.loss(engine(**batch), batch)
        except ValueError:
            continue
        engine.backward(loss)
        engine.step()
    if rank == 0 or how == "barrier":
        dist.barrier()


def _refuse(*_: Any) -> None:
    raise ValueError("odd batch")


STRUCK = {
    "killed in the data set": "rank 2 gone: killed, or crashed without a last word.",
    "killed in a forward": "rank 2 gone: killed, or crashed without a last word.",
    "killed in the script": "rank 2 gone: killed, or crashed without a last word.",
    "an error in the script": "rank 2 has ended with ValueError: odd batch",
}


@pytest.mark.parametrize("how", STRUCK)
def test_the_rank_that_was_struck_is_named_by_all_others(how: str) -> None:
    ends = run_to_the_end(_strike, 4, how)
    _expect_named(ends, "PeerError", STRUCK[how], unless=2)


def _strike(rank: int, how: str) -> None:
    import torch
    import torch.distributed as dist

    handle, engine = start(llama(), 2, UNEVEN_4)

    def strike(where: str) -> None:
        if rank == 2 and how.endswith(where) and engine.global_steps == 1:
            if how.startswith("an error"):
                raise ValueError("odd batch")
            os.kill(os.getpid(), signal.SIGKILL)

    def read() -> Any:
        for batch in batches(4):
            strike("data set")
            yield batch

    engine.module.model.layers[1].register_forward_pre_hook(lambda *_: strike("forward"))
    for batch in handle.dataloader(read(), batches="same"):
        engine.backward(handle.loss(engine(**batch), batch))
        engine.step()
        strike("script")
        dist.all_reduce(torch.zeros(1))  # past this engine


def _expect_named(ends: list[Ending], error: str, text: str, unless: int | None) -> None:
    """Every rank but ``unless`` ends, with one line that names the rank and no other."""
    for rank, end in enumerate(ends):
        if rank == unless:
            continue
        assert end.code == 1, end
        last = end.output.strip().splitlines()[-1].removeprefix(f"[rank{rank}]: ")  # torch's
        assert last.startswith(f"ds_hetero.errors.{error}: {text}"), last


@pytest.mark.parametrize(
    "pair",
    [
        "all_reduce all_gather",
        pytest.param("barrier broadcast", marks=pytest.mark.slow),
        pytest.param("subgroup barrier", marks=pytest.mark.slow),
    ],
)
def test_ranks_in_collectives_of_the_script_that_never_meet_are_told_which_ones(pair: str) -> None:
    ends = run_to_the_end(_meet_never, 2, pair)
    first, second = pair.replace("subgroup", "all_reduce").split()
    for end in ends:
        assert end.code == 1, end
        assert "these collectives can never meet" in end.output, end
        assert f"waits in {first} at test_failures.py" in end.output and f"waits in {second} at" in end.output, end


def _meet_never(rank: int, pair: str) -> None:
    import torch.distributed as dist

    handle, engine = start(llama(), stage=1)
    subgroup, ones = dist.new_group([0, 1]), torch.ones(4)
    for batch in handle.dataloader(batches(2), batches="same"):
        engine.backward(handle.loss(engine(**batch), batch))
        engine.step()
    if pair == "all_reduce all_gather":
        dist.all_gather([torch.ones(4), torch.ones(4)], ones) if rank else dist.all_reduce(ones)
    elif pair == "barrier broadcast":
        dist.broadcast(ones, 0) if rank else dist.barrier()
    else:
        dist.barrier() if rank else dist.all_reduce(ones, group=subgroup)
    dist.barrier()


@pytest.mark.slow
def test_slow_and_paused_ranks_are_waited_for() -> None:
    ends = run_to_the_end(_dawdle, 2)
    assert [end.code for end in ends] == [0, 0], ends


def _dawdle(rank: int) -> None:
    import subprocess
    import sys

    handle, engine = start(llama(), stage=1)
    goes_on = f"import os, time; time.sleep(3); os.kill({os.getpid()}, {int(signal.SIGCONT)})"
    for number, batch in enumerate(handle.dataloader(batches(3), batches="same")):
        if rank == 1 and number == 1:
            time.sleep(3)
        if rank == 1 and number == 2:
            subprocess.Popen([sys.executable, "-c", goes_on])
            os.kill(os.getpid(), signal.SIGSTOP)
        engine.backward(handle.loss(engine(**batch), batch))
        engine.step()


def test_a_refusal_is_one_message_of_rank_0() -> None:
    first, second = run_to_the_end(_break_a_rule, 2)
    assert first.code == second.code == 1
    assert first.output.count("ds_hetero.errors.ConfigError: ") == 1
    assert "no_such_key" in first.output
    for end in (first, second):
        assert "Traceback" not in end.output
    assert "ConfigError" not in second.output


def test_a_variable_brings_the_tracebacks_of_all_ranks_back() -> None:
    for end in run_to_the_end(_break_a_rule, 2, env={"DS_HETERO_TRACEBACK": "1"}):
        assert "Traceback (most recent call last)" in end.output and "no_such_key" in end.output


def _break_a_rule(rank: int) -> None:
    start(llama(), heterogeneity={"schedule": UNEVEN_2, "no_such_key": 1})


def test_what_one_rank_alone_breaks_is_shown_by_it() -> None:
    ends = run_to_the_end(_break_a_rule_alone, 2)
    assert "ds_hetero.errors.PeerError: rank 1 has ended with ds_hetero.errors.ScheduleError: too odd" in ends[0].output
    assert ends[1].output.strip().splitlines()[-1].endswith("ds_hetero.errors.ScheduleError: too odd")


def _break_a_rule_alone(rank: int) -> None:
    from ds_hetero import ScheduleError

    handle, engine = start(llama(), stage=1)
    for batch in handle.dataloader(batches(3), batches="same"):
        if rank == 1:
            raise ScheduleError("too odd")
        engine.backward(handle.loss(engine(**batch), batch))


def test_the_hook_for_errors_goes_with_the_handle() -> None:
    assert all(
        end.output.endswith("ValueError: plain\n") and "Traceback" in end.output for end in run_to_the_end(_undo, 1)
    )


def _undo(rank: int) -> None:
    import sys

    import ds_hetero

    before = sys.excepthook
    handle = ds_hetero.register()
    assert sys.excepthook is not before
    handle.undo()
    assert sys.excepthook is before
    raise ValueError("plain")


@pytest.mark.slow  # torchrun starts two ranks three times, which import everything
def test_a_job_that_torchrun_starts_again_twice_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    """With the static rendezvous, torchrun's default; `benchmarks.faults` has c10d's, too."""
    options = ["--nproc-per-node=2", "--max-restarts=2", "--monitor-interval=0.2", f"--master-port={free_port()}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, __file__, str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=140)
    assert run.returncode == 0, run.stdout + run.stderr
    steps = [tuple(map(int, line.split())) for line in (tmp_path / "steps").read_text().splitlines()]
    assert steps == [(0, 1), (0, 2), (1, 2), (1, 3), (1, 4), (2, 4), (2, 5), (2, 6)]  # start of the job, and step


def _train_and_die(folder: Path) -> None:
    """As a script under torchrun: each of the first two starts ends in a kill -9, after a step that was not saved."""
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model, start_number = llama(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    section = {"heterogeneity": {"schedule": UNEVEN_2}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, **section}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.load_checkpoint(str(folder))
    for batch in handle.dataloader(batches(6)[engine.global_steps :], batches="same"):
        engine.backward(handle.loss(engine(**batch), batch))
        engine.step()
        if engine.global_rank == 0:
            with (folder / "steps").open("a") as file:
                file.write(f"{start_number} {engine.global_steps}\n")
        torch.distributed.barrier()
        if start_number < 2 and engine.global_rank == start_number and engine.global_steps == 2 * start_number + 2:
            os.kill(os.getpid(), signal.SIGKILL)
        engine.save_checkpoint(str(folder))


if __name__ == "__main__":
    _train_and_die(Path(sys.argv[1]))
