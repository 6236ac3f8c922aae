"""What DeepSpeed's and accelerate's own tests of sequence parallelism demand holds with this engine in their place.

The cases are those of DeepSpeed's tests/unit/ulysses_alst/test_ulysses_sp_hf.py and of accelerate's
test_ds_alst_ulysses_sp.py, told anew, with models made here; gradients are compared more closely than there.

Budget: 45 s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.integration.tiny import ds_config, llama, mean_over_group
from tests.support import run_deepspeed

_SECTION = {"heterogeneity": {"schedule": "ulysses"}}


def _samples() -> list[dict[str, torch.Tensor]]:
    ids = torch.tensor([[1, 10, 10, 10, 2, 2], [1, 20, 20, 20, 2, 2]])
    return [{"input_ids": row, "position_ids": torch.arange(6), "labels": row} for row in ids]


def _loader() -> DataLoader[Any]:
    return DataLoader(_samples(), batch_size=1)  # type: ignore[arg-type]


def test_deepspeeds_own_test_of_ulysses_holds(tmp_path: Path) -> None:
    llama(vocab_size=64).save_pretrained(tmp_path)
    run_deepspeed(_deepspeed_cases, 2, str(tmp_path))


def _deepspeed_cases(rank: int, folder: str) -> None:
    import ds_hetero

    handle = ds_hetero.register()
    for stage in (2, 3):
        _check_sp_hf(rank, folder, stage)
    handle.undo()
    ds_hetero.register()
    _check_without_a_section(folder)


def _check_sp_hf(rank: int, folder: str, stage: int) -> None:
    """One engine without sequence parallelism and one with it see the same sample: same shards, loss and gradient."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
    from deepspeed.utils import groups, safe_get_full_grad
    from transformers import AutoModelForCausalLM

    adam = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}
    plain = ds_config(stage, None, train_micro_batch_size_per_gpu=1, optimizer=adam)
    model = AutoModelForCausalLM.from_pretrained(folder)
    alone, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=plain)
    loss_alone = alone(**next(iter(_loader()))).loss
    alone.backward(loss_alone)
    grad_alone = safe_get_full_grad(alone.module.model.layers[0].self_attn.q_proj.weight)

    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=folder,
        core_attn_implementation="sdpa",
        sequence_parallel_size=2,
        micro_batch_size=1,
        seq_length=64,
        seq_length_is_variable=True,
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = {**plain, **_SECTION, "sequence_parallel_size": 2}
    split, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, mpu=mpu)
    group = groups._get_sequence_parallel_group()
    assert groups._get_sequence_parallel_world_size() == 2 and groups._get_sequence_parallel_rank() == rank
    adapter = UlyssesSPDataLoaderAdapter(_loader(), sp_rank=rank, sp_group=group, sp_world_size=2, device=split.device)
    batch = next(iter(adapter))
    expected = [
        {"input_ids": [[1, 10, 10]], "position_ids": [[0, 1, 2]], "shift_labels": [[10, 10, 10]]},
        {"input_ids": [[10, 2, 2]], "position_ids": [[3, 4, 5]], "shift_labels": [[2, 2, -100]]},
    ]
    assert {name: entry.tolist() for name, entry in batch.items()} == expected[rank]

    labels = batch["shift_labels"]
    loss = split.module.loss_function(
        logits=split(**batch).logits, labels=None, shift_labels=labels, vocab_size=split.module.config.vocab_size
    )
    loss = mean_over_group(loss, labels, group)
    split.backward(loss)
    torch.testing.assert_close(loss, loss_alone)
    torch.testing.assert_close(safe_get_full_grad(split.module.model.layers[0].self_attn.q_proj.weight), grad_alone)
    groups.mpu = None
    parallel_state_sp._release_sequence_parallel_groups()


def _check_without_a_section(folder: str) -> None:
    """Registration by name or by anything with a config, evaluation, kernels from the hub and refusals stay stock's."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def register(model: Any, core: str = "sdpa", **more: Any) -> Any:
        parallel_state_sp._release_sequence_parallel_groups()
        return UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation=core,
            sequence_parallel_size=2,
            micro_batch_size=1,
            seq_length=64,
            seq_length_is_variable=True,
            **more,
        )

    class HasConfig:
        config = AutoConfig.from_pretrained(folder)

    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert register(HasConfig()).get_sequence_parallel_world_size() == 2
    del ALL_ATTENTION_FUNCTIONS["sdpa"]

    whole = {"input_ids": _samples()[0]["input_ids"][None], "position_ids": torch.arange(6)[None]}
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder).eval()(**whole).logits
        register(folder, disable_in_eval=True)
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not stock
        assert torch.equal(AutoModelForCausalLM.from_pretrained(folder).eval()(**whole).logits, expected)
    del ALL_ATTENTION_FUNCTIONS["sdpa"]

    HasConfig.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="does not match model config attn_implementation"):
        register(HasConfig(), core="flash_attention_2")
    dist.barrier()


@pytest.mark.parametrize("stage", [2, 3])
def test_accelerates_own_test_of_ulysses_holds(stage: int, tmp_path: Path) -> None:
    llama(vocab_size=256, max_position_embeddings=256).save_pretrained(tmp_path)
    env = {
        "ACCELERATE_USE_CPU": "false",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage),
    }
    for losses in run_deepspeed(_accelerate_script, 2, str(tmp_path), env=env):
        assert len(losses) == 4  # every sample once
        assert losses == sorted(losses) or max(losses) - min(losses) < 0.5


def _accelerate_script(rank: int, folder: str) -> list[float]:
    import ds_hetero

    ds_hetero.register()
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, ParallelismConfig, set_seed
    from accelerate.utils.dataclasses import DeepSpeedSequenceParallelConfig
    from deepspeed.utils import groups
    from transformers import AutoModelForCausalLM

    set_seed(42)
    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length=256, sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    plugin = DeepSpeedPlugin(gradient_clipping=1.0)
    plugin.deepspeed_config.update(_SECTION)
    accelerator = Accelerator(
        deepspeed_plugin=plugin,
        parallelism_config=ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=handler),
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(1, 129).view(-1, 32) + 100
    positions = torch.arange(128).view(-1, 32)  # each sample's begin where those of the one before ended
    rows = [{"input_ids": i, "position_ids": p, "labels": i} for i, p in zip(ids, positions, strict=True)]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=1))  # type: ignore
    assert len(loader) == 4
    group, losses_seen = groups._get_sequence_parallel_group(), []
    unwrapped = accelerator.unwrap_model(model)
    for batch in loader:
        optimizer.zero_grad()
        assert batch["input_ids"].shape == (1, 16)
        labels = batch["shift_labels"]
        loss = unwrapped.loss_function(
            logits=model(**batch).logits, labels=None, shift_labels=labels, vocab_size=unwrapped.config.vocab_size
        )
        loss = mean_over_group(loss, labels, group)
        accelerator.log({"train_loss": loss})
        accelerator.backward(loss)
        optimizer.step()
        losses_seen.append(loss.item())
    accelerator.end_training()
    return losses_seen
