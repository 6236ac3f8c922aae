"""Loops that train pipelines of unequal stages as one process does: accelerate's own, TRL, the Trainer's resume."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.tiny import CLIP, adam, assert_same_parameters, ds_config, llama, parameters, samples
from tests.integration.trainer.test_trainer import PIPELINES, assert_same_logs, logged, make_trainer, one_process, ranks
from tests.support import run_deepspeed

GLOBAL = 4


def loop(rank: int, plan: Any) -> dict[str, Any]:
    """Losses, norms, learning rates, evaluation and weights of an accelerate loop of two epochs."""
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig, set_seed
    from torch.utils.data import DataLoader

    import ds_hetero
    from ds_hetero.errors import BatchError

    options: dict[str, Any] = {"cpu": True}
    if plan is not None:
        ds_hetero.register()
        config = ds_config(1, plan, train_micro_batch_size_per_gpu=GLOBAL, gradient_accumulation_steps=1)
        handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
        parallelism = ParallelismConfig(sp_backend="deepspeed", sp_size=4, dp_shard_size=1, sp_handler=handler)
        options = {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config), "parallelism_config": parallelism}
    accelerator = Accelerator(**options)
    model = llama()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6)
    loader: Any = DataLoader(samples(10), GLOBAL, shuffle=True)
    evaluation: Any = DataLoader(samples(6), 3)
    set_seed(0)
    model, optimizer, loader, evaluation, scheduler = accelerator.prepare(
        model, optimizer, loader, evaluation, scheduler
    )
    numbers: list[float] = []
    for _ in range(2):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            numbers += [loss.item(), float(norm), scheduler.get_last_lr()[0]]
        model.eval()
        with torch.no_grad():
            losses = [accelerator.gather_for_metrics(model(**batch).loss.reshape(1)) for batch in evaluation]
        numbers += torch.cat(losses).tolist()
    if plan is None:
        return {"numbers": numbers, "parameters": parameters(accelerator.unwrap_model(model))}
    with pytest.raises(BatchError, match="Generation and other uses"):
        model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=2)
    unwrapped = accelerator.unwrap_model(model)
    unwrapped_stages = ds_hetero.register().registry.find_stage(unwrapped)
    unwrapped_stages.save_pretrained("weights")
    return {"numbers": numbers, "parameters": None if rank else read_weights("weights")}


def read_weights(folder: str) -> Any:
    from transformers import LlamaForCausalLM

    return parameters(LlamaForCausalLM.from_pretrained(folder))


def test_accelerates_own_loop_trains_as_one_process() -> None:
    (expected,) = run_deepspeed(loop, 1, None, env={"ACCELERATE_USE_CPU": "true"})
    outcomes = run_deepspeed(loop, 4, PIPELINES, env={"ACCELERATE_USE_CPU": "false"})
    for ours in outcomes:
        np.testing.assert_allclose(ours["numbers"], expected["numbers"], rtol=1e-5)
    assert_same_parameters(outcomes[0]["parameters"], expected["parameters"])


TRL_LOGGED = ("entropy", "mean_token_accuracy", "num_tokens")


def train_sft(rank: int, plan: Any, options: dict[str, Any]) -> Any:
    """Logs of TRL's trainer, with what it logs of tokens."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    import ds_hetero

    ds = None
    if plan is not None:
        ds_hetero.register()
        ds = {**ds_config(1, plan), "train_micro_batch_size_per_gpu": GLOBAL, "gradient_accumulation_steps": 1}
    rows = [{"input_ids": row["input_ids"][: 12 + 3 * i].tolist()} for i, row in enumerate(samples(8))]
    trainer = make_trainer(
        ds,
        4,
        SFTTrainer,
        config=SFTConfig,
        dataset=Dataset.from_list(rows),
        per_device_train_batch_size=GLOBAL,
        gradient_accumulation_steps=1,
        max_length=32,
        bf16=False,
        gradient_checkpointing=False,
        **options,
    )
    trainer.train()
    of_tokens = [{name: entry[name] for name in TRL_LOGGED if name in entry} for entry in trainer.state.log_history]
    return logged(trainer), of_tokens


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"packing": True, "packing_strategy": "wrapped"}],
    ids=["padded", "packed"],
)
def test_trl_trains_pipelines_as_one_process(options: dict[str, Any]) -> None:
    expected = one_process(train_sft, None, options)
    for logs, of_tokens in ranks(train_sft, 4, PIPELINES, options):
        assert_same_logs(logs, expected[0])
        assert_same_logs(of_tokens, expected[1])


def train_and_resume(rank: int, plan: Any, options: dict[str, Any]) -> Any:
    """Logs of a whole training that saves, and of one that goes on from its fourth step, amid the second epoch."""
    import ds_hetero

    ds_hetero.register()
    ds = {**ds_config(1, plan), "train_micro_batch_size_per_gpu": GLOBAL, "gradient_accumulation_steps": 1}
    whole = make_trainer(ds, 4, **options)
    whole.train()
    resumed = make_trainer(ds, 4, **options)
    resumed.train(resume_from_checkpoint=f"{options['output_dir']}/checkpoint-4")
    return logged(whole), logged(resumed)


def test_the_trainer_resumes_pipelines(tmp_path: Any) -> None:
    options = {"per_device_train_batch_size": GLOBAL, "gradient_accumulation_steps": 1, "lr_scheduler_type": "cosine"}
    options |= {"save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path)}
    for whole, resumed in ranks(train_and_resume, 4, PIPELINES, options):
        assert len(whole) == 7
        assert_same_logs(resumed[4:-1], whole[4:-1])
