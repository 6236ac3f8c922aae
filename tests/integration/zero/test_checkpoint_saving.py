"""Saving is whole or not at all, one error on all ranks, and loading takes the parts of one save only.

Budget: 60 s.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hetero.errors import CheckpointError
from ds_hetero.job.checkpoints import begin, draft_of, publish, recover
from ds_hetero.job.manifest import MANIFEST
from tests.integration.tiny import UNEVEN_2, batches, ds_config, llama
from tests.integration.trainer.test_trainer import make_trainer
from tests.support import run_deepspeed, run_to_the_end

REPLICAS = {
    "version": 1,
    "replicas": [
        {"schedule": {**UNEVEN_2, "groups": [{"ranks": [rank], "tokens": [1], "heads": [4]}]}} for rank in (0, 1)
    ],
}
# ZeRO stage, schedule, weights.
JOBS: dict[str, tuple[int, Any, Any]] = {
    "1 uniform": (1, UNEVEN_2, "uniform"),
    "2 weighted": (2, UNEVEN_2, [3, 1]),
    "1 weighted, replicas": (1, REPLICAS, [1, 2]),
    "3 uniform": (3, UNEVEN_2, "uniform"),
    "3 weighted": (3, UNEVEN_2, [3, 1]),
}


def start(job: str) -> tuple[Any, Any]:
    """Handle and engine."""
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    stage, schedule, weights = JOBS[job]
    config = ds_config(stage, schedule, zero_force_ds_cpu_optimizer=False)
    config["heterogeneity"]["zero_partition"] = weights
    model = llama()
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    return handle, engine


def train(handle: Any, engine: Any, steps: int = 1) -> None:
    for batch in handle.for_engine(engine).dataloader(batches(steps), batches="same"):
        engine.backward(handle.for_engine(engine).loss(engine(**batch), batch))
        engine.step()


# --- a folder takes its place whole ------------------------------------------------------------------------

_OLD = {"a_model_states.pt": "old", "b_optim_states.pt": "old", MANIFEST: "old", "notes.txt": "of the user"}
_NEW = {"a_model_states.pt": "new", MANIFEST: "new"}


def _die_at(rank: int, folder: Path, last: int) -> None:
    """Publish a checkpoint, killed at the call of the file system after so many."""
    calls = 0

    def count(event: str, args: tuple[Any, ...]) -> None:
        nonlocal calls
        if event in ("os.remove", "os.rmdir") or (event in ("os.mkdir", "os.rename", "open") and "/t" in str(args[0])):
            calls += 1
            if calls > last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    draft = begin(folder)
    for name, text in _NEW.items():
        Path(draft, name).write_text(text)
    publish(folder)
    os._exit(0)


def _contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_death_at_any_call_of_the_file_system_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    folder, outcomes = tmp_path / "t", []
    for calls in range(40):
        shutil.rmtree(tmp_path)
        folder.mkdir(parents=True)
        for name, text in _OLD.items():
            Path(folder, name).write_text(text)
        (ending,) = run_to_the_end(_die_at, 1, folder, calls)
        recover(folder)
        contents = _contents(folder)
        assert contents in (_OLD, {**_NEW, "notes.txt": "of the user"}), calls
        outcomes.append(contents[MANIFEST])
        if ending.code == 0:
            break
        assert ending.code == -signal.SIGKILL, ending.output
    assert ending.code == 0 and calls >= 10
    assert outcomes == sorted(outcomes, reverse=True) and set(outcomes) == {"old", "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_folder_of_the_user_becomes_a_checkpoint_with_what_is_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    Path(folder, "notes.txt").write_text("mine")
    Path(begin(folder), "a_model_states.pt").write_text("new")
    publish(folder)
    assert _contents(folder) == {"notes.txt": "mine", "a_model_states.pt": "new"}
    for name in (".", "..", "t.saving"):
        with pytest.raises(CheckpointError, match="cannot be saved as"):
            begin(Path(tmp_path, name) if name != "." else Path("."))


# --- parts of one save -------------------------------------------------------------------------------------


def test_parts_of_two_saves_and_damaged_parts_are_refused_by_name(tmp_path: Path) -> None:
    run_deepspeed(_mix, 2, str(tmp_path))


def _mix(rank: int, folder: str) -> None:
    import torch.distributed as dist

    from ds_hetero.frameworks.deepspeed.saving import STAMP

    for job in JOBS:
        handle, engine = start(job)
        checkpoint = Path(folder, job, "t")
        train(handle, engine)
        engine.save_checkpoint(f"{folder}/{job}", "t", client_state={"mine": 1})
        shutil.copytree(checkpoint, f"{folder}/{job}/first {rank}")
        train(handle, engine, 2)
        engine.save_checkpoint(f"{folder}/{job}", "t")
        shutil.copytree(checkpoint, f"{folder}/{job}/second {rank}")
        part = next(path.name for path in checkpoint.glob("*rank_1_mp_rank_00_optim_states.pt"))
        model = next(path.name for path in sorted(checkpoint.glob("*model_states.pt")))
        dist.barrier()
        for name, content, fault in (
            (part, Path(folder, job, "first 1", part).read_bytes(), "is of another save, of step 1"),
            (model, Path(folder, job, "first 0", model).read_bytes(), "is of another save, of step 1"),
            (part, _with_a_bit_changed(checkpoint / part), "is damaged (its checksum"),
        ):
            _expect_refused(engine, checkpoint, name, content, f"is of step 3, but {name} {fault}")
        _, again = start(job)
        assert not {"mine", STAMP} & again.load_checkpoint(f"{folder}/{job}")[1].keys()
        assert again.global_steps == 3
        assert again.load_checkpoint(f"{folder}/{job}", "first 0")[1]["mine"] == 1
        again.destroy()
        engine.destroy()


def _with_a_bit_changed(file: Path) -> bytes:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    return bytes(content)


def _expect_refused(engine: Any, checkpoint: Path, name: str, content: bytes, fault: str) -> None:
    """With another content of a part the checkpoint is refused on every rank."""
    import torch.distributed as dist

    good = (checkpoint / name).read_bytes()
    dist.barrier()
    if dist.get_rank() == 0:
        (checkpoint / name).write_bytes(content)
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(str(checkpoint.parent), checkpoint.name)
    assert fault in str(caught.value)
    dist.barrier()
    if dist.get_rank() == 0:
        (checkpoint / name).write_bytes(good)


def test_checkpoints_without_a_manifest_load_and_the_log_says_so(tmp_path: Path) -> None:
    warnings, _ = run_deepspeed(_load_without_manifest, 2, str(tmp_path))
    assert len(warnings) == 1 and "has no manifest" in warnings[0]


def _load_without_manifest(rank: int, folder: str) -> list[str]:
    import torch.distributed as dist

    handle, engine = start("1 uniform")
    train(handle, engine)
    engine.save_checkpoint(folder, "t")
    if rank == 0:
        Path(folder, "t", MANIFEST).unlink()
    dist.barrier()
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_hetero").addHandler(handler)
    engine.load_checkpoint(folder)
    return records


# --- disks that are full -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
def test_a_disk_that_is_full_on_one_rank_is_one_error_on_all(stage: int, tmp_path: Path) -> None:
    """The limit on the size of a file is one that a rank can have alone; what it writes then fails in the middle."""
    first, second = run_deepspeed(
        _save_with_a_limit, 2, str(tmp_path), f"{stage} weighted" if stage == 3 else "1 uniform"
    )
    assert first == second
    assert "cannot be saved: on rank 1, " in first and "rank_1_mp_rank_00" in first and "File too large" in first


def _save_with_a_limit(rank: int, folder: str, job: str) -> str:
    handle, engine = start(job)
    train(handle, engine)
    engine.save_checkpoint(folder, "t")
    train(handle, engine)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    message = ""
    for tag in ("t", "second"):
        with pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint(folder, tag)
        message = str(caught.value)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in Path(folder).iterdir() if path.is_dir()) == ["t"]
    _, again = start(job)
    again.load_checkpoint(folder)
    assert again.global_steps == 1
    engine.save_checkpoint(folder, "t")
    _, again = start(job)
    again.load_checkpoint(folder)
    assert again.global_steps == 2
    return message


@contextlib.contextmanager
def _small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_file_system_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    with _small_disk(tmp_path / "disk", "800k") as disk:
        first, second = run_deepspeed(_fill, 2, str(disk))
    assert first == second
    assert "No space left on device" in first


def _fill(rank: int, folder: str) -> str:
    import torch.distributed as dist

    handle, engine = start("3 weighted")
    train(handle, engine)
    engine.save_checkpoint(folder, "t")
    train(handle, engine)
    dist.barrier()
    if rank == 0:
        free = shutil.disk_usage(folder).free
        Path(folder, "ballast").write_bytes(bytes(free - 200_000))
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(folder, "t")
    _, again = start("3 weighted")
    again.load_checkpoint(folder)
    assert again.global_steps == 1
    return str(caught.value)


def test_ranks_killed_between_two_renames_leave_the_new_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="died of signal SIGKILL"):
        run_deepspeed(_die_while_swapping, 2, str(tmp_path))
    assert not (tmp_path / "t").exists() and (tmp_path / "t.replaced").is_dir()
    assert run_deepspeed(_load_latest, 2, str(tmp_path)) == [2, 2]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["t"]


def _die_while_swapping(rank: int, folder: str) -> None:
    handle, engine = start("2 weighted")
    train(handle, engine)
    engine.save_checkpoint(folder, "t")
    train(handle, engine)

    def die(event: str, args: tuple[Any, ...]) -> None:
        if event == "os.rename" and Path(args[0]) == draft_of(Path(folder, "t")):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die)
    engine.save_checkpoint(folder, "t")


def _load_latest(rank: int, folder: str) -> int:
    _, engine = start("2 weighted")
    engine.load_checkpoint(folder)
    return int(engine.global_steps)


# --- the HF Trainer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["model.safetensors", "trainer_state.json", "rng_state_1.pth", "zero_pp_rank_1"])
def test_what_the_trainer_cannot_write_is_one_error_and_the_checkpoint_before_is_resumed(
    part: str, tmp_path: Path
) -> None:
    first, second = run_deepspeed(_train_until_full, 2, str(tmp_path), part, env={"ACCELERATE_USE_CPU": "false"})
    assert first == second
    assert "checkpoint-4.unfinished; delete it" in first
    from transformers.trainer_utils import get_last_checkpoint

    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-2")


def _train_until_full(rank: int, folder: str, part: str) -> str:
    """The second checkpoint finds a folder in the place of one of its files, or rank 1 at its limit."""
    from transformers import TrainerCallback

    import ds_hetero

    class Limit(TrainerCallback):
        def on_save(self, *args: Any, **kwargs: Any) -> None:
            if part.startswith("zero") and rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    ds_hetero.register()
    ds = ds_config(2, UNEVEN_2, train_micro_batch_size_per_gpu=1)
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "per_device_train_batch_size": 1}
    trainer = make_trainer(ds, 2, output_dir=folder, **options)
    trainer.add_callback(Limit())
    if not part.startswith("zero"):
        Path(folder, "checkpoint-4", part).mkdir(parents=True, exist_ok=True)
    with pytest.raises(CheckpointError) as caught:
        trainer.train()
    return str(caught.value)
