"""The Trainer and accelerate train mixtures whose experts are divided among ranks, and save and resume them.

Budget: 60 s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.integration.loops.test_experts import config_of, mixture
from tests.integration.tiny import CLIP, UNEVEN_2, adam, assert_same_parameters, mean_over_ranks, samples
from tests.integration.trainer.test_trainer import assert_same_logs, logged, make_trainer, one_process, ranks

NUM_SAMPLES, ACCUMULATED = 11, 2
EPOCH = -(-NUM_SAMPLES // ACCUMULATED)  # optimizer steps
OPTIONS = {
    "num_samples": NUM_SAMPLES,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": ACCUMULATED,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "num_train_epochs": 3,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,  # the first evaluation is the best one, so that loading it changes the model
}


def whole_parameters(model: Any) -> dict[str, np.ndarray]:
    """Parameters with the experts of all ranks."""
    experts = vars(model).get("_ds_hetero_experts")
    found = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach().float()
        if experts is not None and name in experts.parts:
            pieces: list[Any] = [None] * torch.distributed.get_world_size(experts.group)
            torch.distributed.all_gather_object(pieces, value, group=experts.group)
            value = torch.cat(pieces)
        found[name] = value.numpy().copy()
    return found


# Family, ZeRO stage, experts of the job, and of the job that resumes it.
CASES = {
    "mixtral": ("mixtral", 1, [3, 1], [1, 3]),
    "qwen3 moe, a rank without experts": ("qwen3 moe", 2, [0, 1], [2, 1]),
}
_SLOW = ("qwen3 moe, a rank without experts",)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=[pytest.mark.slow] * (name in _SLOW)) for name, case in CASES.items()],
)
def test_the_trainer_trains_evaluates_saves_and_resumes_as_one_process(
    case: tuple[str, int, Any, Any], tmp_path: Path
) -> None:
    """One process is compared by its checkpoints: transformers 5 resumes a mixture there without its experts."""
    family, stage, first, second = case
    ((logs, _),) = one_process(_train, family, None, [None], {**OPTIONS, "output_dir": str(tmp_path / "one")})
    best, last = (_saved_weights(family, tmp_path / "one" / f"checkpoint-{step}") for step in (EPOCH, 3 * EPOCH))
    for ours, resumed in ranks(_train, 2, family, stage, [first, second], {**OPTIONS, "output_dir": str(tmp_path)}):
        assert_same_logs(ours[0], logs)
        assert_same_parameters(ours[1], best)
        assert_same_logs(resumed[0][:-1], logs[:-1])
        assert_same_parameters(resumed[1], last)
    assert_same_parameters(_saved_weights(family, tmp_path / "final"), best)


def _saved_weights(family: str, folder: Path) -> dict[str, np.ndarray]:
    """Weights of a folder that the Trainer wrote, loaded as any user would."""
    return whole_parameters(type(mixture(family)).from_pretrained(folder))


def _train(rank: int, family: str, stage: int | None, shares: list[Any], options: dict[str, Any]) -> Any:
    """Train, load the best model and save it; then resume from the second checkpoint under other shares."""
    import ds_hetero

    found = []
    resume = None
    if stage is not None:
        ds_hetero.register()
    for experts in shares:
        ds = None
        if stage is not None:
            steps = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": ACCUMULATED}
            ds = config_of(stage, UNEVEN_2, experts, **steps)
        last = {} if resume is None else {"load_best_model_at_end": False}
        trainer = make_trainer(ds, 2, model=mixture(family), **{**options, **last})
        trainer.train(resume_from_checkpoint=resume)
        if resume is None:
            trainer.save_model(f"{options['output_dir']}/final")
            resume = f"{options['output_dir']}/checkpoint-{2 * EPOCH}"
        found.append((logged(trainer), whole_parameters(trainer.model)))
    return found


def test_an_accelerate_loop_saves_and_resumes_as_one_process(tmp_path: Path) -> None:
    expected = one_process(_accelerate_loop, None, [None, None], str(tmp_path / "one"))
    for ours in ranks(_accelerate_loop, 2, 2, [[3, 1], [1, 2]], str(tmp_path / "ours")):
        for name in ("losses", "evaluated"):
            np.testing.assert_allclose(ours[name], expected[name], rtol=1e-5)
        np.testing.assert_allclose(ours["norms"], expected["norms"], rtol=1e-5)
        assert_same_parameters(ours["parameters"], expected["parameters"])
    saved = [_saved_weights("mixtral", tmp_path / job / "weights") for job in ("ours", "one")]
    assert_same_parameters(*saved)


def _accelerate_loop(rank: int, stage: int | None, shares: list[Any], folder: str) -> dict[str, Any]:
    """Two epochs, and another one after the state was loaded under other shares."""
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig

    import ds_hetero

    losses, norms, evaluated = [], [], []
    if stage is not None:
        handle = ds_hetero.register()
    for job, experts in enumerate(shares):
        options: dict[str, Any] = {"cpu": True}
        if stage is not None:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
            sequences = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
            ds = config_of(stage, UNEVEN_2, experts)
            ds["heterogeneity"]["evaluation"] = "sharded"
            options = {
                "deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=ds),
                "parallelism_config": ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=sequences),
            }
        accelerator = Accelerator(**options)
        model = mixture()
        loader: Any = DataLoader(samples(6), 2)
        model, optimizer, loader, evaluation = accelerator.prepare(
            model, adam(model), loader, DataLoader(samples(3), 3)
        )
        if job:
            accelerator.load_state(f"{folder}/state")
        for _ in range(1 if job else 2):
            model.train()
            for batch in loader:
                outputs = model(**batch)
                loss = outputs.loss if stage is None else handle.for_engine(model).loss(outputs, batch)
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
                norms.append(float(norm if stage is None else model.get_global_grad_norm()))
                losses.append(float(loss) if stage is None else mean_over_ranks(loss))
            model.eval()
            for batch in evaluation:
                with torch.no_grad():
                    evaluated.append(model(**batch).loss.item())
        if not job:
            accelerator.save_state(f"{folder}/state")
            state = accelerator.get_state_dict(model)
            if accelerator.is_main_process:
                accelerator.unwrap_model(model).save_pretrained(f"{folder}/weights", state_dict=state)
    return {
        "losses": losses,
        "norms": norms,
        "evaluated": evaluated,
        "parameters": whole_parameters(accelerator.unwrap_model(model)),
    }
