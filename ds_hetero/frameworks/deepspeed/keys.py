"""Every key that DeepSpeed 0.19.8 reads, and what becomes of it here: one table, which refusals and docs read.

    python -m tests.decision_pages          # writes the table into docs/deepspeed-keys.md

A key that changes what is computed and that nobody has tried must not pass. So each has a row, `KEYS`, and a key
without one is named at the start of the job: a newer release may have brought it. Imports no framework.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from ds_hetero.common.extras import release_of
from ds_hetero.common.reading import NameRow, is_in, row_of, shortened
from ds_hetero.common.spelling import nearest
from ds_hetero.engine.ds_config import DsConfig
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.names import PACKAGE, WHOLE
from ds_hetero.frameworks.deepspeed.protocols import Content
from ds_hetero.values.section import SECTION

_OFF: tuple[object, ...] = (None, False, "none", "auto", {}, [])
_ON: tuple[object, ...] = (None, True, "auto")


@dataclass(frozen=True, kw_only=True, slots=True)
class Key(NameRow):
    """Effect of one key, or of all keys below one."""

    off: tuple[object, ...] = _OFF  # see `NameRow`
    with_pipelines: str = ""  # why the key is refused with pipelines, where it is not refused elsewhere
    off_with_pipelines: tuple[object, ...] = _OFF  # values with which it is not


def _exact(why: str = "", with_pipelines: str = "") -> Key:
    return Key(kind="exact", why=why, with_pipelines=with_pipelines)


def _harmless(why: str) -> Key:
    return Key(kind="harmless", why=why)


def _ignored(why: str) -> Key:
    return Key(kind="ignored", why=why)


def _refused(why: str, *off: object) -> Key:
    return Key(kind="refused", why=why, off=(*_OFF, *off))


_REPORTS = "it reports, and changes nothing of what is computed"
_SPEED = "when and in which portions data moves, not what is computed"
_CHECKPOINT = "it concerns checkpoints; see docs/checkpoints.md"
_OF_ANOTHER = "read only together with the key that switches it on"
_REMOVED = "DeepSpeed 0.19.8 has removed it, and says so"
_NVME_UNTRIED = 'reading state from disks was not tried with this engine; use "device": "cpu"'
_STAGE_3_ALONE = "pipelines hold their layers whole; leave it out"

KEYS: Mapping[str, Key] = {
    # Batches, steps, gradients.
    "train_batch_size": _exact("samples of an optimizer step over all replicas"),
    "train_micro_batch_size_per_gpu": _exact("samples of a micro-batch of one replica"),
    "gradient_accumulation_steps": _exact("of one replica"),
    "managed_gradient_accumulation": Key(
        kind="refused", why="the engine counts the micro-batches of a step; leave it out, or set it to true", off=_ON
    ),
    "gradient_clipping": _exact("by the norm of one process"),
    "gradient_allreduce_op": _refused(
        "gradients here are those of one process, whatever the number of ranks, and a sum over ranks would make them "
        'so many times too large; leave it out, or set it to "mean", and scale the loss in the script for a sum',
        "mean",
    ),
    "prescale_gradients": _exact("gradients are divided before they are added"),
    "gradient_predivide_factor": _exact("which part of the division comes first"),
    "communication_data_type": _exact("gradients are added in this type, and rounded as it rounds"),
    "seq_parallel_communication_data_type": _ignored(
        "the engine is built without DeepSpeed's sequence parallelism; gradients follow communication_data_type"
    ),
    "disable_allgather": _ignored("DeepSpeed reads it and does not use it"),
    "sequence_parallel_size": _exact("ranks of a replica; must agree with the schedule"),
    "data_parallel_size": _ignored("follows from the number of ranks and of replicas"),
    "dataloader_drop_last": _exact("of the loader that DeepSpeed makes of training_data"),
    # Optimizer and learning rate.
    "optimizer.type": Key(
        kind="refused",
        why="an optimizer that nobody has held to one process here; make it in the script if you have tried it, or use "
        "one of Adam, AdamW, SGD, Adagrad, RMSprop, Adamax, NAdam, RAdam, Adadelta, Rprop",
        off=(*_OFF, *("adam", "adamw", "sgd", "adagrad", "rmsprop", "adamax", "nadam", "radam", "adadelta", "rprop")),
    ),
    "optimizer.params.*": _exact("the optimizer's own"),
    "optimizer.legacy_fusion": _exact("of DeepSpeed's fused fp16 optimizer"),
    "scheduler.type": _exact("learning rates are those of one process"),
    "scheduler.params.*": _exact("the schedule's own"),
    "zero_allow_untested_optimizer": _harmless("it lets an optimizer pass that DeepSpeed has not tested"),
    "zero_force_ds_cpu_optimizer": _harmless("it demands DeepSpeed's optimizer for state on the host"),
    # Data types.
    "bf16.enabled": _exact("to the rounding of bfloat16"),
    "bfloat16.*": _exact('the former name of "bf16"'),
    "bf16.immediate_grad_update": _exact("when a gradient is added to its fp32 copy"),
    "bf16.check_grad_overflow": _exact("a step with infinite gradients is left out on all ranks"),
    "bf16.bf16_master_weights_and_grads": Key(
        kind="untried", why="DeepSpeed demands its own optimizer on the host, which is compiled for the machine"
    ),
    "bf16.bf16_optimizer_states": _exact("optimizer state in bfloat16, rounded as on one process"),
    "fp16.*": Key(
        kind="untried",
        why="DeepSpeed refuses it on CPUs without instructions for fp16; a step that overflows on one rank is left out "
        "on all by DeepSpeed itself",
        with_pipelines='fp16 does not work with pipelines yet; use "bf16", or fp32',
    ),
    "ddp_bf16": _ignored("DeepSpeed reads it and does not use it"),
    "torch_autocast.*": _exact(
        "to the rounding of its data type", with_pipelines='it does not work with pipelines; use "bf16"'
    ),
    "data_types.grad_accum_dtype": _exact("the type in which micro-batches are added"),
    "data_types.param_dtype": _exact("DeepSpeed demands that it is the type of bf16 or fp16"),
    "data_types.buffer_dtype": _exact("of the model's buffers"),
    "data_types.keep_in_fp32_modules": _exact("buffers that stay in fp32"),
    # ZeRO.
    "zero_optimization.stage": Key(
        kind="exact",
        why="0 to 3",
        with_pipelines="ranks of pipelines hold their layers whole; use 0, 1 or 2, by which optimizer state is "
        "partitioned over the holders of every parameter",
        off_with_pipelines=(*_OFF, 0, 1, 2),
    ),
    "zero_optimization.contiguous_gradients": _exact(_SPEED),
    "zero_optimization.reduce_scatter": _exact("all ranks get all gradients without it, and use their own part"),
    "zero_optimization.reduce_bucket_size": _exact(
        f"{_SPEED}; gradients of pipelines leave in buckets of so many elements, and of 25 MiB where it is left out, "
        '"auto" or DeepSpeed\'s default of 5e8'
    ),
    "zero_optimization.allgather_bucket_size": _exact(_SPEED),
    "zero_optimization.use_multi_rank_bucket_allreduce": _exact(_SPEED),
    "zero_optimization.allgather_partitions": _exact(_SPEED),
    "zero_optimization.overlap_comm": _exact(_SPEED),
    "zero_optimization.compute_grad_norm": Key(
        kind="refused",
        why="without norms of gradients nothing can be clipped or compared; leave it out, or set it to true",
        off=_ON,
    ),
    "zero_optimization.load_from_fp32_weights": _harmless(_CHECKPOINT),
    "zero_optimization.elastic_checkpoint": _refused(
        "it stores equal parts; checkpoints here load on any number of ranks as they are: leave it out"
    ),
    "zero_optimization.offload_param.device": Key(
        kind="refused", why=_NVME_UNTRIED, off=(*_OFF, "cpu"), with_pipelines=_STAGE_3_ALONE
    ),
    "zero_optimization.offload_param.*": _harmless("how offloaded parameters are stored"),
    "zero_optimization.offload_optimizer.device": Key(
        kind="refused",
        why=_NVME_UNTRIED,
        off=(*_OFF, "cpu"),
        with_pipelines="offloading does not work with pipelines yet; leave it out",
    ),
    "zero_optimization.offload_optimizer.ratio": _refused(
        "splitting an optimizer between host and device was not tried with this engine; leave it out", 1, 1.0
    ),
    "zero_optimization.offload_optimizer.super_offload": _refused(
        "SuperOffload was not tried with this engine; leave it out"
    ),
    "zero_optimization.offload_optimizer.*": _harmless("how offloaded state is stored"),
    "zero_optimization.cpu_offload": _refused('DeepSpeed calls it deprecated; use "offload_optimizer"'),
    "zero_optimization.cpu_offload_param": _refused('DeepSpeed calls it deprecated; use "offload_param"'),
    "zero_optimization.cpu_offload_use_pin_memory": _refused(
        'DeepSpeed calls it deprecated; use "pin_memory" of "offload_optimizer" or "offload_param"'
    ),
    "zero_optimization.zenflow": _refused(
        "ZenFlow updates the most important gradients first, in a way of its own; leave it out"
    ),
    "zero_optimization.zenflow.*": _ignored(_OF_ANOTHER),
    "zero_optimization.sub_group_size": _exact("parameters that an optimizer steps at once"),
    "zero_optimization.stage3_prefetch_bucket_size": _exact(_SPEED),
    "zero_optimization.stage3_param_persistence_threshold": _exact(_SPEED),
    "zero_optimization.stage3_model_persistence_threshold": _exact(_SPEED),
    "zero_optimization.stage3_max_live_parameters": _exact(_SPEED),
    "zero_optimization.stage3_max_reuse_distance": _exact(_SPEED),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _harmless(_CHECKPOINT),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _harmless(_CHECKPOINT),
    "zero_optimization.stage3_module_granularity_threshold": _refused(
        "DeepSpeed 0.19.8 itself fails with it on CPUs (unknown parameter type, at the step), so that nobody has tried "
        "it here; leave it out, or name modules in leaf_module",
        0,
    ),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _exact(_SPEED),
    "zero_optimization.stage3_allgather_sequential": _exact(_SPEED),
    "zero_optimization.ignore_unused_parameters": _harmless(
        "whether DeepSpeed complains of parameters without gradients"
    ),
    "zero_optimization.legacy_stage1": _refused(_REMOVED),
    "zero_optimization.round_robin_gradients": _exact("which rank owns which part of the state"),
    "zero_optimization.parameter_alignment": _exact("where parameters begin in their buffers"),
    "zero_optimization.zero_hpz_partition_size": _refused(
        "secondary partitions (hpZ) were not tried with this engine; leave it out, or set it to 1", 1
    ),
    "zero_optimization.zero_quantized_weights": _refused(
        "quantized weights are not those of one process; leave it out"
    ),
    "zero_optimization.zero_quantized_nontrainable_weights": _refused(
        "quantized weights are not those of one process; leave it out"
    ),
    "zero_optimization.zero_quantized_gradients": _refused(
        "quantized gradients are not those of one process; leave it out"
    ),
    "zero_optimization.memory_efficient_linear": _exact("what linear layers keep for their backward"),
    "zero_optimization.pipeline_loading_checkpoint": _harmless(_CHECKPOINT),
    "zero_optimization.override_module_apply": _harmless("how weights are initialized while they are partitioned"),
    "zero_optimization.log_trace_cache_warnings": _harmless(_REPORTS),
    "zero_optimization.enable_sanity_checks": _harmless("it compares what ranks do"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": _ignored("of the Muon optimizer alone"),
    "zero_optimization.leaf_module.*": _exact("modules that are gathered at once"),
    "zero_optimization.mics_shard_size": _refused(_REMOVED, -1),
    "zero_optimization.mics_hierarchical_params_gather": _refused(_REMOVED),
    "zero_optimization.zeropp_loco_param": _refused(_REMOVED),
    # What is told, measured, written.
    "steps_per_print": _harmless(_REPORTS),
    "dump_state": _harmless(_REPORTS),
    "log_level": _harmless(_REPORTS),
    "wall_clock_breakdown": _harmless(_REPORTS),
    "memory_breakdown": _harmless(_REPORTS),
    "vocabulary_size": _harmless("DeepSpeed warns of sizes that are no multiple of 8"),
    "disable_python_gc": _harmless("when Python collects garbage"),
    "timers.*": _harmless(_REPORTS),
    "comms_logger.*": _harmless(_REPORTS),
    "flops_profiler.*": _harmless(_REPORTS),
    "tensorboard.*": _harmless(_REPORTS),
    "wandb.*": _harmless(_REPORTS),
    "comet.*": _harmless(_REPORTS),
    "csv_monitor.*": _harmless(_REPORTS),
    "aio.*": _harmless("how fast disks are read"),
    "checkpoint.tag_validation": _harmless(_CHECKPOINT),
    "checkpoint.load_universal": _exact("ZeRO 1; see docs/checkpoints.md"),
    "checkpoint.use_node_local_storage": _harmless(_CHECKPOINT),
    "checkpoint.parallel_write.pipeline_stage": _ignored("of DeepSpeed's own pipelines"),
    "checkpoint.checkpoint_serialization": _harmless(_CHECKPOINT),
    "checkpoint.writer": _refused(
        "checkpoints here are read and written by torch alone; leave the writer out, see docs/checkpoints.md"
    ),
    "checkpoint.writer.*": _ignored(_OF_ANOTHER),
    "datastates_ckpt": _refused("checkpoints here are read and written by torch alone; leave it out"),
    "datastates_ckpt.*": _ignored(_OF_ANOTHER),
    "activation_checkpointing.*": _ignored("of deepspeed.checkpointing, which models of transformers do not call"),
    # Other ways to train.
    "pipeline.*": _ignored("of DeepSpeed's own pipelines, which are refused by name"),
    "tensor_parallel.autotp_size": _refused(
        "tensor parallelism of DeepSpeed cannot be used here; remove one of them", 0, 1
    ),
    "tensor_parallel.*": _ignored(_OF_ANOTHER),
    "expert_parallel.enabled": _refused("experts that are spread over ranks were not tried here; leave it out"),
    "expert_parallel.*": _ignored(_OF_ANOTHER),
    "use_data_before_expert_parallelism": _ignored("of experts that are spread over ranks"),
    "compile.deepcompile": _refused("DeepCompile schedules ZeRO by itself; torch.compile works: leave it out"),
    "compile.*": _ignored(_OF_ANOTHER),
    "hybrid_engine.enabled": _refused(
        "it swaps layers for inference kernels, which hold whole sequences; leave it out"
    ),
    "hybrid_engine.*": _ignored(_OF_ANOTHER),
    "weight_quantization": _refused("quantized weights are not those of one process; leave it out"),
    "weight_quantization.*": _ignored(_OF_ANOTHER),
    "data_efficiency.enabled": _refused(
        "curriculum learning and random-LTD cut sequences by themselves; make the loader choose the samples"
    ),
    "data_efficiency.*": _ignored(_OF_ANOTHER),
    "autotuning.*": _ignored("of DeepSpeed's launcher"),
    **dict.fromkeys(
        (
            "nebula",
            "compression_training",
            "amp",
            "quantize_training",
            "sparse_gradients",
            "eigenvalue",
            "sparse_attention",
            "elasticity",
            "graph_harvesting",
            "curriculum_learning",
            "progressive_layer_drop",
        ),
        Key(kind="refused", why=_REMOVED, off=()),
    ),
}
"""By path; ``name.*`` stands for all keys below ``name`` that have no row of their own."""


FAULTS: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "the step takes the gradients of one micro-batch alone (mended by its pull requests 7967 and 7981)": {
        "zero_optimization.stage": (1, 2),
        "zero_optimization.offload_optimizer.device": ("cpu", "nvme"),
    },
    "master weights that are read after such a checkpoint was loaded are not those of the checkpoint": {
        "zero_optimization.stage": (1, 2),
        "checkpoint.load_universal": (True,),
    },
    "the last micro-batch of a step is not averaged over the ranks (mended by its pull request 7985)": {
        "zero_optimization.stage": (1,),
        "bf16.enabled": (True,),
        "data_types.grad_accum_dtype": ("fp32",),
    },
}
"""What releases of `names.WORKS` outside `names.WHOLE` compute wrongly without a word: by values of keys, all given."""


def key_of(path: str) -> Key | None:
    """Return the row of a key, its own or that of the keys below another; None where there is none."""
    return row_of(KEYS, path)


def expect_supported_keys(ds_config: DsConfig, *, pipelines: bool = False) -> None:
    """Refuse keys with which training is not that of one process. Raises `ConfigError`: names them."""
    lines = [
        f'"{path}": {shortened(value)}: {reason}.'
        for path, value, key in _known(ds_config)
        if (reason := _reason(path, value, key, pipelines))
    ] + _faults(ds_config)
    if lines:
        what = "pipelines" if pipelines else f'"{SECTION}"'
        raise ConfigError(f"what ds_config.json asks for does not work together with {what}:\n" + "\n".join(lines))


def unknown_keys(ds_config: DsConfig) -> list[str]:
    """Keys without a row, each with the one that it may be a misspelling of, in words."""
    leaves = [(path, value) for path, value in _paths(ds_config) if not isinstance(value, Mapping) or not value]
    return [_described(path) for path, _ in leaves if key_of(path) is None and not _is_parent(path)]


def _faults(ds_config: DsConfig) -> list[str]:
    """List what the installed release computes wrongly of what is asked for."""
    release = release_of(PACKAGE)
    if release is None or release in SpecifierSet(WHOLE):
        return []
    given = dict(_paths(ds_config))
    return [
        ", ".join(f'"{path}": {shortened(given[path])}' for path in keys)
        + f": with DeepSpeed {release} {why}. Install deepspeed{WHOLE}, or leave one of them out."
        for why, keys in FAULTS.items()
        if all(is_in(given.get(path), values) for path, values in keys.items())
    ]


def _described(path: str) -> str:
    names = [name.removesuffix(".*") for name in KEYS]
    alike = nearest(path, names, cutoff=0.85)
    return f'"{path}"' + (f' (do you mean "{alike}"?)' if alike else "")


def _is_parent(path: str) -> bool:
    """Whether it is a section of which some keys have rows, given without any."""
    return any(name.startswith(f"{path}.") for name in KEYS)


def _known(ds_config: DsConfig) -> Iterator[tuple[str, object, Key]]:
    for path, value in _paths(ds_config):
        key = key_of(path)
        if key is not None:
            yield path, value, key


def _paths(value: Content, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield every key with its value, sections before what is in them; not those of our own section."""
    for name, inner in value.items():
        path = f"{prefix}{name}"
        if path == SECTION:
            continue
        yield path, inner
        if isinstance(inner, Mapping):
            yield from _paths(inner, f"{path}.")


def _reason(path: str, value: object, key: Key, pipelines: bool) -> str:
    """Return why a value is refused; empty where it is allowed."""
    if key.kind == "refused" and not is_in(value, key.off):
        return key.why
    if pipelines and key.with_pipelines and not is_in(value, key.off_with_pipelines) and not _is_detail(path):
        return key.with_pipelines
    return ""


def _is_detail(path: str) -> bool:
    """Whether a key only says how something is done that another one, ``enabled``, switches on."""
    return path.startswith(("fp16.", "torch_autocast.")) and not path.endswith(".enabled")
