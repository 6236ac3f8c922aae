"""Checkpoints of ZeRO-1 and 2 outlive weights, ranks and their own writing being cut short.

Budget: 60 s.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from ds_hetero.errors import CheckpointError
from ds_hetero.job.manifest import MANIFEST
from tests.integration.tiny import LR, UNEVEN_2, batches, ds_config, llama, skip_where_refused
from tests.integration.trainer.test_trainer import assert_same_logs, logged, make_trainer, one_process, ranks
from tests.integration.zero.test_zero12 import two_groups, whole_state
from tests.support import run_deepspeed

STEPS, SAVED_AT = 5, 3
OF_A_STEP = 4  # micro-batches, whatever the number of ranks
RTOL = 1e-5  # of a parameter's norm, after five steps whose sums are taken in another order
A, B, OF_TWO = [4, 3, 2, 1], [1, 0, 1, 2], [3, 1]
OF_FOUR: dict[str, Any] = {"stock": "stock", "A": A, "B": B}  # checkpoints of four ranks, and their weights


def make_engine(
    weights: Any, stage: int, zero: Any = None, groups: Any = two_groups, size: int = 32, **config: Any
) -> Any:
    """An engine whose ranks each train on batches of their own; with weights ``"stock"`` on DeepSpeed's optimizer."""
    import deepspeed
    import torch.distributed as dist

    import ds_hetero
    from ds_hetero.frameworks.deepspeed.zero.optimizers import OPTIMIZERS

    ds_hetero.register()
    config = ds_config(stage, "ulysses", zero=zero or {}, **config) | {
        "sequence_parallel_size": 1,
        "gradient_accumulation_steps": OF_A_STEP // dist.get_world_size(),
        "zero_force_ds_cpu_optimizer": False,
    }
    if weights != "stock":
        config["heterogeneity"]["zero_partition"] = weights
    model = llama(hidden_size=size)
    optimizer = torch.optim.AdamW(groups(model), lr=LR, eps=1e-3)
    with patch.dict(OPTIMIZERS, clear=weights == "stock"):
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine: Any, start: int, stop: int) -> list[float]:
    """Losses of the steps from ``start`` to ``stop``, of the whole batch."""
    import torch.distributed as dist

    import ds_hetero

    handle = ds_hetero.register()
    whole = batches(STEPS * OF_A_STEP)[start * OF_A_STEP : stop * OF_A_STEP]
    micro_batches = []
    for batch in handle.dataloader(whole[dist.get_rank() :: dist.get_world_size()], batches="same"):
        loss = handle.loss(engine(**batch), batch)
        engine.backward(loss)
        engine.step()
        micro_batches.append(loss.detach())
    losses = torch.stack(micro_batches).view(stop - start, -1).mean(1)
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


def outcome(engine: Any, start: int) -> dict[str, Any]:
    """Train to the end."""
    losses = train(engine, start, STEPS)
    result = {"losses": losses[SAVED_AT - start :], **whole_state(engine)}
    engine.destroy()
    return result


def assert_same_outcome(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    np.testing.assert_allclose(ours["losses"], expected["losses"], rtol=RTOL)
    for kind in ("model", "fp32", "exp_avg", "exp_avg_sq"):
        for name, value in expected[kind].items():
            error = np.linalg.norm(ours[kind][name] - value) / np.linalg.norm(value)
            assert error <= RTOL, f"{kind} of {name} is off by {error:.1e}"


# --- any layout under any other --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """A folder with checkpoints of four and of two ranks, and what uninterrupted training comes to."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    expected = run_deepspeed(_save_of_four, 4, folder)[0]
    run_deepspeed(_save_of_two, 2, folder, expected)
    return folder, expected


def _save_of_four(rank: int, folder: str) -> dict[str, Any]:
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    deepspeed.init_distributed("gloo")
    expected = outcome(make_engine("stock", 2), 0)
    for tag, weights in OF_FOUR.items():
        engine = make_engine(weights, 2)
        train(engine, 0, SAVED_AT)
        engine.save_checkpoint(folder, tag)
        weights_then = whole_state(engine)["fp32"]
        assert_same_outcome(outcome(engine, SAVED_AT), expected)
        of_script = get_fp32_state_dict_from_zero_checkpoint(folder, tag)
        for name, value in weights_then.items():
            np.testing.assert_array_equal(of_script[name].detach().numpy(), value)
    return expected


def _save_of_two(rank: int, folder: str, expected: dict[str, Any]) -> None:
    import deepspeed

    deepspeed.init_distributed("gloo")
    engine = make_engine(OF_TWO, 1, {"round_robin_gradients": True})
    train(engine, 0, SAVED_AT)
    engine.save_checkpoint(folder, "of two")
    assert_same_outcome(outcome(engine, SAVED_AT), expected)


# Ranks, ZeRO stage, weights, changes of "zero_optimization", and the checkpoint to load.
LOADS: dict[str, tuple[int, int, Any, dict[str, Any], str]] = {
    **{
        f"{tag} by {name}": (4, 2, weights, {}, tag)
        for tag in OF_FOUR
        for name, weights in (("A", A), ("B", B), ("uniform", "uniform"))
    },
    "stock by two": (2, 1, OF_TWO, {}, "stock"),
    "A by two": (2, 1, OF_TWO, {}, "A"),
    "B by two, offload": (2, 1, OF_TWO, {"offload_optimizer": {"device": "cpu"}}, "B"),
    "two by A, round robin": (4, 2, A, {"round_robin_gradients": True}, "of two"),
    "two by uniform": (4, 2, "uniform", {}, "of two"),
}


_QUICK = ("stock by A", "B by two, offload", "two by A, round robin")


@pytest.mark.sweep(keep=5)
@pytest.mark.parametrize(
    ("world_size", "stage", "weights", "zero", "tag"),
    [pytest.param(*load, id=name, marks=[] if name in _QUICK else pytest.mark.slow) for name, load in LOADS.items()],
)
def test_every_layout_and_number_of_ranks_loads_every_other(
    world_size: int, stage: int, weights: Any, zero: dict[str, Any], tag: str, saved: tuple[str, dict[str, Any]]
) -> None:
    """Equal partitions of stock, 4:3:2:1, 1:0:1:2 and 3:1 on two ranks."""
    skip_where_refused(ds_config(stage, "ulysses", zero=zero))
    run_deepspeed(_load, world_size, stage, weights, zero, tag, saved)


def _load(
    rank: int, stage: int, weights: Any, zero: dict[str, Any], tag: str, saved: tuple[str, dict[str, Any]]
) -> None:
    import deepspeed

    deepspeed.init_distributed("gloo")
    folder, expected = saved
    engine = make_engine(weights, stage, zero)
    engine.load_checkpoint(folder, tag)
    assert_same_outcome(outcome(engine, SAVED_AT), expected)


def test_universal_checkpoints_go_to_stock_and_back(saved: tuple[str, dict[str, Any]]) -> None:
    """Stock refuses other layouts than its own, as it refuses other numbers of ranks; this is its way to them."""
    skip_where_refused(ds_config(2, "ulysses", checkpoint={"load_universal": True}))
    folder, expected = saved
    run_deepspeed(_convert, 1, folder)
    run_deepspeed(_load_universal, 4, folder, expected)


def _convert(rank: int, folder: str) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    for tag in ("B", "of two"):
        main(
            SimpleNamespace(
                input_folder=f"{folder}/{tag}",
                output_folder=f"{folder}/universal {tag}",
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )


def _load_universal(rank: int, folder: str, expected: dict[str, Any]) -> None:
    import deepspeed

    deepspeed.init_distributed("gloo")
    for weights, tag in (("stock", "B"), (B, "B"), ("stock", "of two"), (A, "of two")):
        engine = make_engine(weights, 2, checkpoint={"load_universal": True})
        engine.load_checkpoint(folder, f"universal {tag}")
        assert_same_outcome(outcome(engine, SAVED_AT), expected)


# --- checkpoints that are not whole ------------------------------------------------------------------------


def test_what_is_missing_damaged_or_of_another_model_is_refused(saved: tuple[str, dict[str, Any]]) -> None:
    folder, _ = saved
    shard = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    for tag in ("missing", "damaged", "missing before 0.3", "damaged before 0.3"):
        shutil.copytree(f"{folder}/A", f"{folder}/{tag}")
        if "before" in tag:
            Path(folder, tag, MANIFEST).unlink()
        if "missing" in tag:
            Path(folder, tag, shard).unlink()
        else:
            os.truncate(Path(folder, tag, shard), 1000)
    run_deepspeed(_refuse, 2, folder)


def _refuse(rank: int, folder: str) -> None:
    import deepspeed

    deepspeed.init_distributed("gloo")
    for tag, options, said in (
        ("missing", {}, r"step 3, but zero_pp_rank_1_mp_rank_00_optim_states.pt is missing"),
        ("damaged", {}, r"step 3, but zero_pp_rank_1_mp_rank_00_optim_states.pt is damaged \(1,000 bytes instead of"),
        ("missing before 0.3", {}, r"saved by 4 ranks, but 1 of their files are missing: .*rank_1_mp_rank_00_optim"),
        ("damaged before 0.3", {}, r"rank_1_mp_rank_00_optim_states.pt is damaged"),
        ("A", {"size": 16}, r"cannot be loaded: .*size mismatch for model.embed_tokens.weight"),
        ("A", {"groups": _one_group}, "2 parameter groups hold"),
        ("stock", {"groups": _one_group}, "has 2 parameter groups, but the optimizer has 1"),
        ("nowhere", {}, "there is no finished checkpoint in .*nowhere"),
    ):
        engine = make_engine(OF_TWO, 1, **options)
        with pytest.raises(CheckpointError, match=f"(?s){said}"):
            engine.load_checkpoint(folder, tag)
        engine.destroy()


def _one_group(model: Any) -> Any:
    return model.parameters()


def test_ranks_killed_while_saving_leave_the_checkpoint_before(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="died of signal SIGKILL"):
        run_deepspeed(_die_while_saving, 2, str(tmp_path))
    assert (tmp_path / "second.saving").is_dir()
    whole, resumed = run_deepspeed(_resume, 2, str(tmp_path))[0]
    np.testing.assert_allclose(resumed, whole, rtol=RTOL)


def _die_while_saving(rank: int, folder: str) -> None:
    import deepspeed

    deepspeed.init_distributed("gloo")
    engine = make_engine(OF_TWO, 2)
    train(engine, 0, 2)
    engine.save_checkpoint(folder, "first")
    train(engine, 2, 3)
    if rank == 1:
        engine.checkpoint_engine.save = _write_half_and_die
    engine.save_checkpoint(folder, "second")


def _write_half_and_die(state: Any, path: str) -> None:
    torch.save(state, path)
    os.truncate(path, os.path.getsize(path) // 2)
    os.kill(os.getpid(), signal.SIGKILL)


def _resume(rank: int, folder: str) -> tuple[list[float], list[float]]:
    import deepspeed

    deepspeed.init_distributed("gloo")
    whole = train(make_engine("stock", 2), 0, STEPS)
    engine = make_engine([1, 3], 2)
    path, _ = engine.load_checkpoint(folder)
    assert Path(path).parent.name == "first"
    resumed = train(engine, 2, STEPS)
    for tag, said in (
        ("second", r"no finished checkpoint in .*second\. second\.saving beside it is from a save that was"),
        ("second.saving", "is from a save that was interrupted"),
    ):
        with pytest.raises(CheckpointError, match=said):
            engine.load_checkpoint(folder, tag)
    return whole[2:], resumed


# --- the HF Trainer ----------------------------------------------------------------------------------------


def test_the_trainer_resumes_under_other_weights(tmp_path: Path) -> None:
    options = {"save_steps": 4, "max_steps": 7, "save_strategy": "steps"}
    expected = one_process(_train_and_resume, [None, None], {**options, "output_dir": str(tmp_path / "one")})[0]
    for whole, resumed in ranks(
        _train_and_resume, 2, [OF_TWO, [0, 1]], {**options, "output_dir": str(tmp_path / "two")}
    ):
        assert_same_logs(whole, expected)
        assert_same_logs(resumed[4:-1], expected[4:-1])


def _train_and_resume(rank: int, partitions: list[Any], options: dict[str, Any]) -> list[Any]:
    """Logs of a run of seven steps, and of one that goes on after the fourth; with weights, the models it leaves."""
    import ds_hetero

    if partitions[0] is not None:
        ds_hetero.register()
    logs = []
    for weights, checkpoint in zip(partitions, [None, f"{options['output_dir']}/checkpoint-4"], strict=True):
        ds = None
        if weights is not None:
            ds = ds_config(2, UNEVEN_2, train_micro_batch_size_per_gpu=1)
            ds["heterogeneity"]["zero_partition"] = weights
        trainer = make_trainer(ds, 2, per_device_train_batch_size=1, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        logs.append(logged(trainer))
        if weights is not None:
            _check_saved_models(trainer, options["output_dir"])
    return logs


def _check_saved_models(trainer: Any, folder: str) -> None:
    """`save_pretrained` and `save_16bit_model` write what has been trained."""
    from safetensors.torch import load_file

    trained = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.save_model(f"{folder}/pretrained")
    trainer.model_wrapped.save_16bit_model(f"{folder}/16bit", "model.bin")
    if trainer.is_world_process_zero():
        for written in (
            load_file(f"{folder}/pretrained/model.safetensors"),
            torch.load(f"{folder}/16bit/model.bin", weights_only=True),
        ):
            for name, value in trained.items():
                torch.testing.assert_close(written[name], value, rtol=0, atol=0)
