"""What weighted ZeRO-3 saves, anybody loads: other weights, other numbers of ranks, DeepSpeed itself, its scripts.

Budget: 40 s.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_hetero.errors import CheckpointError
from ds_hetero.job.manifest import MANIFEST
from tests.integration.tiny import (
    UNEVEN_2,
    UNEVEN_4,
    assert_same_parameters,
    batches,
    ds_config,
    llama,
    samples,
)
from tests.integration.zero.test_zero3 import start, states
from tests.support import run_deepspeed

# One group over the ranks of two nodes.
UNEVEN_3 = {
    "version": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "groups": [{"ranks": [0, 1, 2], "tokens": [3, 1, 2], "heads": [2, 1, 1]}],
}
STEPS = 2  # before the checkpoint, and after it
SMALL = {"sub_group_size": 4000, "stage3_gather_16bit_weights_on_model_save": True}
# By name: ranks, schedule, weights. Without a schedule it is DeepSpeed alone.
LAYOUTS: dict[str, Any] = {
    "deepspeed": (2, None, None),
    "equal": (2, UNEVEN_2, None),
    "3:1": (2, UNEVEN_2, (3, 1)),
    "1:4": (2, UNEVEN_2, (1, 4)),
    "4:3:2:1": (4, UNEVEN_4, (4, 3, 2, 1)),
    "nodes": (3, UNEVEN_3, (3, 1, 2)),
}
NODES = {"nodes": [2, 1]}
SAVED = ("deepspeed", "3:1", "1:4", "4:3:2:1", "nodes")  # "equal" saves what "deepspeed" does
# DeepSpeed loads those of as many ranks; of what our loader does for equal shards, the rest is DeepSpeed's.
LOADED_BY = {
    "deepspeed": SAVED[:3],
    "equal": SAVED[3:],
    "3:1": (*SAVED, "universal"),
    "1:4": (*SAVED, "universal"),
    "4:3:2:1": (*SAVED, "universal"),
    "nodes": (*SAVED, "universal"),
}
LOADS = [(layout, checkpoint) for layout, checkpoints in LOADED_BY.items() for checkpoint in checkpoints]


def partly_frozen() -> Any:
    model = llama()
    for name, param in model.named_parameters():
        param.requires_grad = "embed" not in name and "layers.0.mlp.up" not in name
    return model


def launch(layout: str, model: Any = None, **more: Any) -> tuple[Any, Any]:
    """Handle, if it is not DeepSpeed alone, and engine."""
    _, schedule, weights = LAYOUTS[layout]
    section = {"zero_within": NODES[layout]} if layout in NODES else {}
    model = partly_frozen() if model is None else model
    handle, engine = start(weights, schedule, model, zero=SMALL, section=section, **more)
    return (handle if schedule else None), engine


def train(handle: Any, engine: Any, whole: list[Any]) -> list[float]:
    losses = []
    for batch in handle.dataloader(whole, batches="same") if handle else whole:
        outputs = engine(**batch)
        loss = handle.loss(outputs, batch) if handle else outputs.loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """A folder with the checkpoints, and by layout what training on from it comes to."""
    folder = tmp_path_factory.mktemp("checkpoints")
    whole = batches(2 * STEPS)
    of_ranks = {ranks: [name for name in SAVED if LAYOUTS[name][0] == ranks] for ranks in (2, 3, 4)}
    ends = {}
    for ranks, layouts in of_ranks.items():
        ends |= run_deepspeed(_save_all, ranks, str(folder), layouts, whole)[0]
    _convert_to_universal(folder / "3:1", folder / "universal")
    return str(folder), ends


_QUICK = {("equal", "nodes"), ("1:4", "3:1"), ("4:3:2:1", "universal"), ("nodes", "4:3:2:1"), ("3:1", "3:1")}


@pytest.mark.sweep(keep=6)
@pytest.mark.parametrize(
    ("layout", "checkpoint"),
    [
        pytest.param(*load, id="{1} by {0}".format(*load), marks=[] if load in _QUICK else pytest.mark.slow)
        for load in LOADS
    ],
)
def test_every_layout_loads_every_checkpoint(layout: str, checkpoint: str, saved: tuple[str, dict[str, Any]]) -> None:
    run_deepspeed(_load, LAYOUTS[layout][0], layout, checkpoint, *saved)


def _save_all(rank: int, folder: str, layouts: list[str], whole: list[Any]) -> dict[str, Any]:
    ends = {}
    for layout in layouts:
        handle, engine = launch(layout)
        train(handle, engine, whole[:STEPS])
        engine.save_checkpoint(f"{folder}/{layout}")
        _check_scripts(rank, engine, f"{folder}/{layout}")
        ends[layout] = train(handle, engine, whole[STEPS:]), states(engine)
        engine.destroy()
    return ends


def _check_scripts(rank: int, engine: Any, folder: str) -> None:
    """`zero_to_fp32.py` in the folder, and `save_16bit_model`, give the weights that the ranks hold."""
    live = states(engine)
    engine.save_16bit_model(folder, "model.bin")
    if rank == 0:
        with _arguments(f"{folder}/zero_to_fp32.py", folder, f"{folder}/converted") as script:
            runpy.run_path(script, run_name="__main__")
        converted = torch.load(f"{folder}/converted/pytorch_model.bin")
        gathered = torch.load(f"{folder}/model.bin")
        for name, param in engine.module.named_parameters():
            assert torch.equal(converted[name], gathered[name]), name
            assert not param.requires_grad or torch.equal(converted[name], torch.from_numpy(live[name])), name


@contextlib.contextmanager
def _arguments(*argv: str) -> Iterator[str]:
    before, sys.argv = sys.argv, list(argv)
    try:
        yield argv[0]
    finally:
        sys.argv = before


def _convert_to_universal(saved: Path, universal: Path) -> None:
    tag = (saved / "latest").read_text()
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--num_extract_workers", "1"]
    folders = ["--input_folder", str(saved / tag), "--output_folder", str(universal / tag)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    converted = subprocess.run([*command, *folders, "--num_merge_workers", "1"], env=environment, capture_output=True)
    assert converted.returncode == 0, converted.stderr.decode()


def _load(rank: int, layout: str, checkpoint: str, folder: str, ends: dict[str, Any]) -> None:
    universal = {"checkpoint": {"load_universal": True}}
    handle, engine = launch(layout, **(universal if checkpoint == "universal" else {}))
    for param in engine.module.parameters():
        if param.requires_grad:  # universal checkpoints hold no frozen parameters
            param.ds_tensor.zero_()
    assert engine.load_checkpoint(f"{folder}/{checkpoint}")[0] is not None
    assert engine.global_steps == STEPS
    expected_losses, expected = ends.get(checkpoint, ends["3:1"])
    losses = train(handle, engine, batches(2 * STEPS)[STEPS:])
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    assert_same_parameters(states(engine), expected, rtol=2e-6)
    if layout == checkpoint:
        np.testing.assert_equal((losses, states(engine)), ends[checkpoint])


def test_faulty_checkpoints_are_refused_and_weights_load_alone(tmp_path: Path) -> None:
    run_deepspeed(_meet_faults, 2, str(tmp_path))


def _meet_faults(rank: int, folder: str) -> None:
    import deepspeed

    bf16 = {"bf16": {"enabled": True}}
    handle, engine = launch("3:1", **bf16)
    train(handle, engine, batches(1))
    engine.save_checkpoint(f"{folder}/good", tag="t")
    engine.save_checkpoint(f"{folder}/bad", tag="t")
    files = sorted(Path(folder, "bad", "t").glob("*_optim_states.pt"))
    deepspeed.comm.barrier()
    if rank == 1:
        files[0].write_bytes(files[0].read_bytes()[:1000])
        files[1].unlink()
    deepspeed.comm.barrier()
    _, again = launch("1:4", **bf16)
    for manifest, fault in ((True, "is damaged (1,000 bytes instead of"), (False, "cannot be read")):
        if not manifest:  # as earlier versions saved
            Path(folder, "bad", "t", MANIFEST).unlink(missing_ok=True)
        deepspeed.comm.barrier()
        with pytest.raises(CheckpointError) as caught:
            again.load_checkpoint(f"{folder}/bad")
        assert f"{files[0].name} {fault}" in str(caught.value)
        assert f"{files[1].name} is missing" in str(caught.value)
    larger = llama(num_hidden_layers=3, intermediate_size=48)
    _, other = launch("1:4", larger, **bf16)
    with pytest.raises(CheckpointError, match="from another model") as caught:
        other.load_checkpoint(f"{folder}/good")
    assert "missing: model.embed_tokens.weight, model.layers.0.mlp.up_proj.weight" in str(caught.value)
    assert "model.layers.0.mlp.gate_proj.weight (64, 32) instead of (48, 32)" in str(caught.value)
    assert again.load_checkpoint(f"{folder}/good")[0] is not None
    np.testing.assert_equal(states(again), states(engine))

    _, weights_alone = launch("1:4", **bf16)
    for param in weights_alone.module.parameters():
        param.ds_tensor.zero_()
    assert weights_alone.load_checkpoint(f"{folder}/good", load_optimizer_states=False)[0] is not None
    ours, theirs = (list(made.module.parameters()) for made in (weights_alone, engine))
    with deepspeed.zero.GatheredParameters(ours + theirs):
        assert all(map(torch.equal, ours, theirs))
    for made in (engine, again, other, weights_alone):
        made.destroy()


def test_a_rank_killed_while_saving_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="died of signal SIGKILL"):
        run_deepspeed(_die_while_saving, 2, str(tmp_path))
    assert (tmp_path / "second.saving").is_dir()
    run_deepspeed(_go_on, 2, str(tmp_path))


def _die_while_saving(rank: int, folder: str) -> None:
    handle, engine = launch("3:1")
    train(handle, engine, batches(1))
    engine.save_checkpoint(folder, "first")
    train(handle, engine, batches(1))
    if rank == 1:
        engine.checkpoint_engine.save = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    engine.save_checkpoint(folder, "second")


def _go_on(rank: int, folder: str) -> None:
    _, engine = launch("1:4")
    path, _ = engine.load_checkpoint(folder)
    assert Path(path).parent.name == "first"
    assert engine.global_steps == 1
    with pytest.raises(CheckpointError, match=r"second\.saving beside it is from a save that was interrupted"):
        engine.load_checkpoint(folder, "second")


@pytest.mark.slow
def test_trainer_resumes_under_other_weights(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    run_deepspeed(_train_and_resume, 2, str(tmp_path), env={"ACCELERATE_USE_CPU": "false"})


def _train_and_resume(rank: int, folder: str) -> None:
    from safetensors.torch import load_file

    logs = []
    for weights, checkpoint in (("uniform", None), ([3, 1], None), ([1, 4], "checkpoint-2")):
        trainer = _trainer(folder, weights)
        trainer.train(resume_from_checkpoint=checkpoint and f"{folder}/out/{checkpoint}")
        names = ("loss", "grad_norm", "learning_rate", "step")
        logs.append([[entry[name] for name in names] for entry in trainer.state.log_history if "loss" in entry])
        if weights == "uniform" and rank == 0:
            shutil.rmtree(f"{folder}/out")
        live = states(trainer.model_wrapped)
        trainer.save_model(f"{folder}/final")
        if rank == 0:
            for name, value in load_file(f"{folder}/final/model.safetensors").items():
                assert np.array_equal(value.numpy(), live[name]), name
    np.testing.assert_allclose(logs[1], logs[0], rtol=1e-5)
    np.testing.assert_allclose(logs[2][-2:], logs[0][-2:], rtol=1e-5)


def _trainer(folder: str, weights: Any) -> Any:
    """A Trainer whose model is loaded into shards, as transformers does once the configuration asks for stage 3."""
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    import ds_hetero

    ds_hetero.register()
    ds = ds_config(3, UNEVEN_2, zero=SMALL, train_micro_batch_size_per_gpu=1)
    ds["heterogeneity"]["zero_partition"] = weights
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    arguments = TrainingArguments(
        output_dir=f"{folder}/out",
        max_steps=4,
        save_strategy="steps",
        save_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        adam_epsilon=1e-3,
        per_device_train_batch_size=1,
        deepspeed=ds,
        parallelism_config=ParallelismConfig(sp_backend="deepspeed", sp_size=2, dp_shard_size=1, sp_handler=handler),
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    model = LlamaForCausalLM.from_pretrained(f"{folder}/model", attn_implementation="sdpa")
    assert all(hasattr(param, "ds_tensor") for param in model.parameters())
    return Trainer(model=model, args=arguments, train_dataset=samples(8))
