"""Keys of DeepSpeed's configuration: everyone is in the table, and what the table says of it holds on two ranks.

Budget: 30 s; 150 s with the slow draw.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from packaging.version import Version

from ds_hetero.engine.surface import read_record
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed import keys
from ds_hetero.frameworks.deepspeed.keys import FAULTS, KEYS, ReleaseFault, expect_supported_keys, key_of, unknown_keys
from tests.integration.tiny import UNEVEN_2, assert_same_parameters, batches, ds_config, llama, parameters
from tests.support import run_deepspeed

SEED, DRAWN = 11, 40
_OFFLOADED = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False}
_FP16 = {"enabled": True, "initial_scale_power": 4}

# By key: a value other than DeepSpeed's own, and what else has to stand in the configuration, as nested objects.
VALUES: dict[str, tuple[Any, dict[str, Any]]] = {
    "train_batch_size": (4, {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}),
    "train_micro_batch_size_per_gpu": (2, {}),
    "gradient_accumulation_steps": (3, {}),
    "managed_gradient_accumulation": (False, {}),
    "gradient_clipping": (0.3, {}),
    "gradient_allreduce_op": ("Sum", {}),
    "prescale_gradients": (True, {}),
    "gradient_predivide_factor": (2.0, {"prescale_gradients": True}),
    "communication_data_type": ("fp32", {}),
    "seq_parallel_communication_data_type": ("fp16", {}),
    "disable_allgather": (True, {}),
    "dataloader_drop_last": (True, {}),
    "optimizer.type": ("Lamb", {"optimizer": {"params": {"lr": 1e-2}}}),
    "optimizer.params.weight_decay": (0.2, {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3}}}),
    "optimizer.params.momentum": (0.8, {"optimizer": {"type": "SGD", "params": {"lr": 1e-2}}}),
    "optimizer.legacy_fusion": (True, {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3}}}),
    "scheduler.type": ("WarmupLR", {"scheduler": {"params": {"warmup_num_steps": 2}}}),
    "scheduler.params.warmup_num_steps": (3, {"scheduler": {"type": "WarmupLR"}}),
    "zero_force_ds_cpu_optimizer": (False, {}),
    "bf16.enabled": (True, {}),
    "bfloat16.enabled": (True, {}),
    "bf16.immediate_grad_update": (True, {"bf16": {"enabled": True}}),
    "bf16.check_grad_overflow": (False, {"bf16": {"enabled": True}}),
    "bf16.bf16_master_weights_and_grads": (True, {"bf16": {"enabled": True}}),
    "bf16.bf16_optimizer_states": (True, {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}),
    "fp16.enabled": (True, {"fp16": {"initial_scale_power": 4}}),
    "fp16.loss_scale": (8, {"fp16": _FP16}),
    "fp16.loss_scale_window": (1, {"fp16": _FP16}),
    "fp16.hysteresis": (1, {"fp16": _FP16}),
    "fp16.min_loss_scale": (2, {"fp16": _FP16}),
    "torch_autocast.enabled": (True, {"torch_autocast": {"dtype": "bfloat16"}}),
    "data_types.grad_accum_dtype": ("fp32", {"bf16": {"enabled": True}}),
    "data_types.param_dtype": ("bf16", {"bf16": {"enabled": True}}),
    "data_types.buffer_dtype": ("fp32", {"bf16": {"enabled": True}}),
    "data_types.keep_in_fp32_modules": (["rotary_emb"], {"bf16": {"enabled": True}}),
    **{
        f"zero_optimization.{name}": (value, {})
        for name, value in {
            "stage": 3,
            "contiguous_gradients": False,
            "reduce_scatter": False,
            "reduce_bucket_size": 1000,
            "allgather_bucket_size": 1000,
            "use_multi_rank_bucket_allreduce": False,
            "allgather_partitions": False,
            "overlap_comm": True,
            "compute_grad_norm": False,
            "load_from_fp32_weights": False,
            "elastic_checkpoint": True,
            "sub_group_size": 1000,
            "cpu_offload": True,
            "cpu_offload_param": True,
            "ignore_unused_parameters": False,
            "legacy_stage1": True,
            "round_robin_gradients": True,
            "parameter_alignment": True,
            "zero_hpz_partition_size": 2,
            "zero_quantized_weights": True,
            "zero_quantized_gradients": True,
            "memory_efficient_linear": False,
            "zenflow": {"topk_ratio": 0.1},
            "mics_shard_size": 2,
            "enable_sanity_checks": True,
        }.items()
    },
    "zero_optimization.offload_optimizer.device": ("cpu", {"zero_force_ds_cpu_optimizer": False}),
    "zero_optimization.offload_optimizer.pin_memory": (False, _OFFLOADED),
    "zero_optimization.offload_optimizer.ratio": (0.5, _OFFLOADED),
    "zero_optimization.offload_optimizer.super_offload": (True, _OFFLOADED),
    **{
        f"zero_optimization.{name}": (value, {"zero_optimization": {"stage": 3}})
        for name, value in {
            "offload_param.device": "cpu",
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0,
            "stage3_model_persistence_threshold": 100,
            "stage3_max_live_parameters": 1000,
            "stage3_max_reuse_distance": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
            "stage3_module_granularity_threshold": 1000,
            "stage3_use_all_reduce_for_fetch_params": True,
            "stage3_allgather_sequential": True,
            "log_trace_cache_warnings": True,
            "override_module_apply": False,
            "leaf_module.classes": ["transformers.models.llama.modeling_llama.LlamaMLP"],
        }.items()
    },
    "steps_per_print": (1, {}),
    "dump_state": (True, {}),
    "wall_clock_breakdown": (True, {}),
    "memory_breakdown": (True, {}),
    "vocabulary_size": (63, {}),
    "disable_python_gc": (True, {}),
    "timers.throughput.enabled": (False, {}),
    "comms_logger.enabled": (True, {}),
    "flops_profiler.enabled": (True, {"flops_profiler": {"profile_step": 2, "output_file": "flops.txt"}}),
    "csv_monitor.enabled": (True, {"csv_monitor": {"output_path": "csv"}}),
    "aio.block_size": (2**20, {}),
    "checkpoint.tag_validation": ("Fail", {}),
    "checkpoint.writer": ({"type": "PYTHON"}, {}),
    "datastates_ckpt": ({"host_cache_size": 1}, {}),
    "activation_checkpointing.partition_activations": (True, {}),
    "pipeline.stages": (2, {}),
    "tensor_parallel.autotp_size": (2, {}),
    "expert_parallel.enabled": (True, {}),
    "use_data_before_expert_parallelism": (True, {}),
    "compile.deepcompile": (True, {}),
    "compile.debug_log": (True, {}),
    "hybrid_engine.enabled": (True, {}),
    "weight_quantization": ({"quantized_initialization": {"num_bits": 8}}, {}),
    "data_efficiency.enabled": (True, {}),
    "autotuning.fast": (False, {}),
    "elasticity": ({"enabled": True}, {}),
    "amp": ({"enabled": True}, {}),
}


def test_every_key_that_deepspeed_reads_has_a_row() -> None:
    """By its own models of the configuration, and the names in its constants."""
    missing = run_deepspeed(_keys_without_a_row, 1)[0]
    assert missing == []


def _keys_without_a_row(rank: int) -> list[str]:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.runtime import constants
    from deepspeed.runtime.config import (
        _REMOVED_TOP_LEVEL_CONFIG_KEYS,
        _REMOVED_ZERO_CONFIG_KEYS,
        HybridEngineConfig,
    )
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    sections = {
        "zero_optimization.": DeepSpeedZeroConfig,
        "zero_optimization.offload_param.": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer.": DeepSpeedZeroOffloadOptimizerConfig,
        "bf16.": DeepSpeedBF16Config,
        "fp16.": DeepSpeedFP16Config,
        "comms_logger.": CommsLoggerConfig,
        "compile.": CompileConfig,
        "": DeepSpeedMonitorConfig,
        "hybrid_engine.": HybridEngineConfig,
        "tensor_parallel.": TPTrainingConfig,
    }
    paths = [
        prefix + (field.alias or name)
        for prefix, section in sections.items()
        for name, field in section.model_fields.items()
    ]
    read = [
        "BATCH_SIZE",
        "MICRO_BATCH_SIZE_PER_GPU",
        "ACCUMULATION",
        "STEPS_PER_PRINT",
        "ZERO_ALLOW",
        "ZERO_FORCE",
        "DATA_TYPE",
        "CLIPPING",
        "PRESCALE",
        "PREDIVIDE",
        "ALLREDUCE_OP",
        "DISABLE",
        "DUMP_STATE",
        "VOCABULARY",
        "BREAKDOWN",
        "DROP_LAST",
        "EXPERT_PARALLEL",
        "LOG_LEVEL",
    ]
    paths += [
        value
        for name, value in vars(constants).items()
        if isinstance(value, str)
        and any(part in name for part in read)
        and not name.endswith(("_FORMAT", "_DEFAULT", "_MEAN", "_SUM"))
    ]
    paths += [*_REMOVED_TOP_LEVEL_CONFIG_KEYS, *(f"zero_optimization.{name}" for name in _REMOVED_ZERO_CONFIG_KEYS)]
    with_rows_inside = {name.rpartition(".")[0] for name in KEYS}
    return sorted(path for path in paths if key_of(path) is None and path not in with_rows_inside)


def test_a_key_that_nobody_knows_is_named_with_what_it_may_mean() -> None:
    config = {
        "gradient_cliping": 1.0,
        "zero_optimization": {"stage": 1, "brand_new": 3},
        "bf16": {},
        "heterogeneity": {},
    }
    assert unknown_keys(config) == [
        '"gradient_cliping" (do you mean "gradient_clipping"?)',
        '"zero_optimization.brand_new"',
    ]
    expect_supported_keys(config)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.why)
def test_what_a_release_computes_wrongly_is_refused_there_alone(
    fault: ReleaseFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: dict[str, Any] = {"heterogeneity": {}}
    for path, values in fault.settings.items():
        part = config
        *sections, name = path.split(".")
        for section in sections:
            part = part.setdefault(section, {})
        part[name] = values[0]
    for release, surface in read_record()["deepspeed"].items():
        # As the installed release would say it.
        monkeypatch.setattr(keys, "digest_of", lambda name, surface=surface: surface[name].rpartition(" ")[2])
        if Version(release) >= Version(fault.since):
            expect_supported_keys(config)
        else:
            with pytest.raises(ConfigError, match=rf"{re.escape(fault.why)}. Install deepspeed>={fault.since}"):
                expect_supported_keys(config)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_sum_over_ranks_is_refused_at_every_stage(stage: int) -> None:
    """It made gradients as many times too large as there are ranks. With pipelines it is left to one rank."""
    outcome = _outcomes(["gradient_allreduce_op"], stage)["gradient_allreduce_op"]
    assert outcome == "refused by name"


def test_some_keys_train_as_on_one_process_or_are_refused_by_name() -> None:
    _expect_kinds(
        ["prescale_gradients", "zero_optimization.round_robin_gradients", "bfloat16.enabled", "optimizer.type"]
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_keys_drawn_at_random_train_as_on_one_process_or_are_refused_by_name() -> None:
    _expect_kinds(random.Random(SEED).sample(sorted(VALUES), DRAWN))


def _expect_kinds(paths: list[str]) -> None:
    outcomes = _outcomes(paths, stage=1)
    for path, outcome in outcomes.items():
        print(f"{path:60s} {outcome}")
    wanted = {path: ("refused by name",) if _is_refused(path) else ("exact", "refused by stock") for path in paths}
    assert {path: outcome for path, outcome in outcomes.items() if outcome not in wanted[path]} == {}


def _is_refused(path: str) -> bool:
    try:
        expect_supported_keys(_configuration(path, stage=1))
    except ValueError:
        return True
    return False


def _outcomes(paths: list[str], stage: int) -> dict[str, str]:
    """By key: ``"exact"``, ``"refused by name"``, ``"refused by stock"``, or what is wrong."""
    configurations = [_configuration(path, stage) for path in paths]
    alone = run_deepspeed(_train_each, 1, configurations, timeout_s=300)[0]
    ours = run_deepspeed(_train_each, 2, configurations, timeout_s=300)
    return {path: _outcome(path, *both) for path, *both in zip(paths, configurations, alone, *ours, strict=True)}


def _outcome(path: str, config: dict[str, Any], alone: Any, first: Any, second: Any) -> str:
    if isinstance(first, str) or isinstance(second, str):
        if first != second:
            return f"the ranks say different things: {first} / {second}"
        if first.startswith("ConfigError") and f'"{path}' in first:
            return "refused by name"
        return "refused by stock" if alone == first else f"obscure: {first}; alone: {alone}"
    if isinstance(alone, str):
        return f"refused by stock alone: {alone}"
    rounding = any(config.get(name, {}).get("enabled") for name in ("bf16", "bfloat16", "fp16", "torch_autocast"))
    tolerance = 3e-2 if rounding else 1e-5  # of the data type, over three steps of Adam
    try:
        for ours in (first, second):
            np.testing.assert_allclose(ours[0], alone[0], rtol=tolerance)
            np.testing.assert_allclose(ours[1], alone[1], rtol=tolerance)
            assert_same_parameters(ours[2], alone[2], rtol=tolerance)
    except AssertionError as error:
        return f"wrong: {error}"
    return "exact"


def _train_each(rank: int, configurations: list[dict[str, Any]]) -> list[Any]:
    """Losses, norms and parameters of three steps with each configuration, or the error; stock on one rank."""
    import torch.distributed as dist

    outcomes: list[Any] = []
    for config in configurations:
        if int(os.environ["WORLD_SIZE"]) == 1:
            config = {name: value for name, value in config.items() if name != "heterogeneity"}
        try:
            outcomes.append(_train(config))
        except Exception as error:
            outcomes.append(f"{type(error).__name__}: {error}")
        if dist.is_initialized():
            dist.barrier()
    return outcomes


def _train(config: dict[str, Any]) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    import deepspeed
    import torch

    import ds_hetero

    handle = ds_hetero.register()
    model = llama()
    optimizer = None if "optimizer" in config else torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=model.parameters(), config=config
    )
    whole = batches(3 * engine.gradient_accumulation_steps(), 2)
    losses, norms = [], []
    for batch in handle.dataloader(whole, batches="same") if "heterogeneity" in config else whole:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    stage = engine.zero_optimization_stage()
    trained = parameters(engine.module, stage)
    engine.destroy()
    return losses, norms, trained


def _configuration(path: str, stage: int) -> dict[str, Any]:
    """One with the key at its value in `VALUES`."""
    value, more = VALUES[path]
    config = ds_config(stage, UNEVEN_2)
    _merge(config, more)
    *sections, name = path.split(".")
    inside = config
    for section in sections:
        inside = inside.setdefault(section, {})
    inside[name] = value
    return config


def _merge(config: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in _copied(more):
        if isinstance(value, dict) and isinstance(config.get(name), dict):
            _merge(config[name], value)
        else:
            config[name] = value


def _copied(more: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in more.items():
        yield name, dict(_copied(value)) if isinstance(value, Mapping) else value
