"""Table of all keys that DeepSpeed 0.19.8 reads, and of how ds_hetero treats each: exact, harmless, refused, ...

    python -m tests.decision_pages          # writes the table into docs/deepspeed-keys.md

A key that changes the results and was never tried with ds_hetero must not pass unnoticed. So every key has a row in
`KEYS`; rank 0 announces keys without a row, which a newer release may have added. Messages of refusals and the page of
docs/ are made from the rows. Imports no framework.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ds_hetero.common.extras import release_of
from ds_hetero.common.name_rows import NameRow, is_in, row_of
from ds_hetero.common.reading import shortened
from ds_hetero.common.spelling import nearest
from ds_hetero.engine.ds_config import DsConfig
from ds_hetero.engine.framework_source import ABSENT, digest_of
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.names import PACKAGE
from ds_hetero.frameworks.deepspeed.protocols import Content
from ds_hetero.values.section import SECTION

_OFF: tuple[object, ...] = (None, False, "none", "auto", {}, [])
_ON: tuple[object, ...] = (None, True, "auto")


@dataclass(frozen=True, kw_only=True, slots=True)
class Key(NameRow):
    """Row of one key, or of all keys of a section; see `NameRow`."""

    off: tuple[object, ...] = _OFF  # values of a refused key that are allowed, since they switch it off
    with_pipelines: str = ""  # why the key is refused with pipelines alone; empty if it is not
    off_with_pipelines: tuple[object, ...] = _OFF  # values that are allowed with pipelines


def _exact(why: str = "", with_pipelines: str = "") -> Key:
    return Key(kind="exact", why=why, with_pipelines=with_pipelines)


def _harmless(why: str) -> Key:
    return Key(kind="harmless", why=why)


def _ignored(why: str) -> Key:
    return Key(kind="ignored", why=why)


def _refused(why: str, *off: object) -> Key:
    return Key(kind="refused", why=why, off=(*_OFF, *off))


_REPORTS = "it only reports"
_SPEED = "it changes when data moves and in which portions, but no result"
_CHECKPOINT = "it concerns checkpoints only; see docs/checkpoints.md"
_NEEDS_SWITCH = "it is read only if the feature is switched on"
_REMOVED = "DeepSpeed 0.19.8 has removed it; leave it out"
_NVME_UNTRIED = 'offloading to disks was not tried with this engine; use "device": "cpu"'
_ONLY_STAGE_3 = "ranks of pipelines keep all parameters of their layers on the device; leave it out"

KEYS: Mapping[str, Key] = {
    # Batches, steps, gradients.
    "train_batch_size": _exact("samples of an optimizer step over all replicas"),
    "train_micro_batch_size_per_gpu": _exact("samples of a micro-batch of one replica"),
    "gradient_accumulation_steps": _exact("micro-batches of one replica in an optimizer step"),
    "managed_gradient_accumulation": Key(
        kind="refused",
        why="this engine relies on DeepSpeed to count the micro-batches of a step; leave it out, or set it to true",
        off=_ON,
    ),
    "gradient_clipping": _exact("gradients are clipped by the norm that one process would compute"),
    "gradient_allreduce_op": _refused(
        "gradients equal those of one process for any number of ranks, and a sum would multiply them by the number of "
        'ranks; leave it out, or set it to "mean", and scale the loss in the script if you want a sum',
        "mean",
    ),
    "prescale_gradients": _exact("gradients are divided before they are added"),
    "gradient_predivide_factor": _exact(
        "gradients are divided by it before they are added, and by the rest afterwards"
    ),
    "communication_data_type": _exact("gradients are added up, and rounded, in this type"),
    "seq_parallel_communication_data_type": _ignored(
        "the engine is built without DeepSpeed's sequence parallelism; gradients follow communication_data_type"
    ),
    "disable_allgather": _ignored("DeepSpeed reads it but does not use it"),
    "sequence_parallel_size": _exact("number of ranks of a replica; it must agree with the schedule"),
    "data_parallel_size": _ignored("it follows from the number of ranks and of replicas"),
    "dataloader_drop_last": _exact("it is for the loader that DeepSpeed makes from training_data"),
    # Optimizer and learning rate.
    "optimizer.type": Key(
        kind="refused",
        why="this optimizer was never compared with one process; use Adam, AdamW, SGD, Adagrad, RMSprop, Adamax, "
        "NAdam, RAdam, Adadelta or Rprop; or compare yours, make it in the script, and give it to deepspeed.initialize",
        off=(*_OFF, *("adam", "adamw", "sgd", "adagrad", "rmsprop", "adamax", "nadam", "radam", "adadelta", "rprop")),
    ),
    "optimizer.params.*": _exact("it is passed to the optimizer"),
    "optimizer.legacy_fusion": _exact("it is for DeepSpeed's fused fp16 optimizer"),
    "scheduler.type": _exact("learning rates are those of one process"),
    "scheduler.params.*": _exact("it is passed to the scheduler"),
    "zero_allow_untested_optimizer": _harmless("it allows an optimizer that DeepSpeed has not tested"),
    "zero_force_ds_cpu_optimizer": _harmless("it requires DeepSpeed's optimizer if state is on the host"),
    # Data types.
    "bf16.enabled": _exact("equal up to the rounding of bfloat16"),
    "bfloat16.*": _exact('the former name of "bf16"'),
    "bf16.immediate_grad_update": _exact("it sets when a gradient is added to its fp32 copy"),
    "bf16.check_grad_overflow": _exact("all ranks skip a step with infinite gradients"),
    "bf16.bf16_master_weights_and_grads": Key(
        kind="untried", why="DeepSpeed requires its own CPU optimizer, which is compiled for the machine"
    ),
    "bf16.bf16_optimizer_states": _exact("optimizer state in bfloat16, rounded as on one process"),
    "fp16.*": Key(
        kind="untried",
        why="DeepSpeed refuses it on CPUs without instructions for fp16; if a step overflows on one rank, DeepSpeed "
        "skips it on all ranks",
        with_pipelines='fp16 does not work with pipelines yet; use "bf16", or fp32',
    ),
    "ddp_bf16": _ignored("DeepSpeed reads it but does not use it"),
    "torch_autocast.*": _exact(
        "equal up to the rounding of its data type", with_pipelines='it does not work with pipelines; use "bf16"'
    ),
    "data_types.grad_accum_dtype": _exact("the data type in which gradients of micro-batches are added"),
    "data_types.param_dtype": _exact("DeepSpeed requires the data type of bf16 or fp16"),
    "data_types.buffer_dtype": _exact("the data type of the model's buffers"),
    "data_types.keep_in_fp32_modules": _exact("buffers that stay in fp32"),
    # ZeRO.
    "zero_optimization.stage": Key(
        kind="exact",
        why="0 to 3",
        with_pipelines="ranks of pipelines keep all parameters of their layers; use 0, 1 or 2, with which optimizer "
        "state is partitioned over the ranks that have the parameter",
        off_with_pipelines=(*_OFF, 0, 1, 2),
    ),
    "zero_optimization.contiguous_gradients": _exact(_SPEED),
    "zero_optimization.reduce_scatter": _exact("without it, every rank gets all gradients and uses its own part"),
    "zero_optimization.reduce_bucket_size": _exact(
        f"{_SPEED}; it is also the bucket size of pipelines, which is 25 MiB if the key is left out, "
        '"auto" or DeepSpeed\'s default of 5e8'
    ),
    "zero_optimization.allgather_bucket_size": _exact(_SPEED),
    "zero_optimization.use_multi_rank_bucket_allreduce": _exact(_SPEED),
    "zero_optimization.allgather_partitions": _exact(_SPEED),
    "zero_optimization.overlap_comm": _exact(_SPEED),
    "zero_optimization.compute_grad_norm": Key(
        kind="refused",
        why="clipping and comparisons need the gradient norm; leave it out, or set it to true",
        off=_ON,
    ),
    "zero_optimization.load_from_fp32_weights": _harmless(_CHECKPOINT),
    "zero_optimization.elastic_checkpoint": _refused(
        "it saves equal partitions, and checkpoints of ds_hetero load on any number of ranks without it; leave it out"
    ),
    "zero_optimization.offload_param.device": Key(
        kind="refused", why=_NVME_UNTRIED, off=(*_OFF, "cpu"), with_pipelines=_ONLY_STAGE_3
    ),
    "zero_optimization.offload_param.*": _harmless("it sets how offloaded parameters are stored"),
    "zero_optimization.offload_optimizer.device": Key(
        kind="refused",
        why=_NVME_UNTRIED,
        off=(*_OFF, "cpu"),
        with_pipelines="offloading does not work with pipelines yet; leave it out",
    ),
    "zero_optimization.offload_optimizer.ratio": _refused(
        "partial offload of the optimizer was not tried with this engine; leave it out, or set it to 1", 1, 1.0
    ),
    "zero_optimization.offload_optimizer.super_offload": _refused(
        "SuperOffload was not tried with this engine; leave it out"
    ),
    "zero_optimization.offload_optimizer.*": _harmless("it sets how offloaded state is stored"),
    "zero_optimization.cpu_offload": _refused('DeepSpeed calls it deprecated; use "offload_optimizer"'),
    "zero_optimization.cpu_offload_param": _refused('DeepSpeed calls it deprecated; use "offload_param"'),
    "zero_optimization.cpu_offload_use_pin_memory": _refused(
        'DeepSpeed calls it deprecated; use "pin_memory" of "offload_optimizer" or "offload_param"'
    ),
    "zero_optimization.zenflow": _refused(
        "ZenFlow applies only the most important gradients in each step, so training differs; leave it out"
    ),
    "zero_optimization.zenflow.*": _ignored(_NEEDS_SWITCH),
    "zero_optimization.sub_group_size": _exact("number of parameters that the optimizer updates at once"),
    "zero_optimization.stage3_prefetch_bucket_size": _exact(_SPEED),
    "zero_optimization.stage3_param_persistence_threshold": _exact(_SPEED),
    "zero_optimization.stage3_model_persistence_threshold": _exact(_SPEED),
    "zero_optimization.stage3_max_live_parameters": _exact(_SPEED),
    "zero_optimization.stage3_max_reuse_distance": _exact(_SPEED),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _harmless(_CHECKPOINT),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _harmless(_CHECKPOINT),
    "zero_optimization.stage3_module_granularity_threshold": _refused(
        "DeepSpeed 0.19.8 itself fails with it on CPUs (unknown parameter type, at the step), so it is "
        "untested; leave it out, or name modules in leaf_module",
        0,
    ),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _exact(_SPEED),
    "zero_optimization.stage3_allgather_sequential": _exact(_SPEED),
    "zero_optimization.ignore_unused_parameters": _harmless(
        "it sets whether DeepSpeed reports parameters without gradients"
    ),
    "zero_optimization.legacy_stage1": _refused(_REMOVED),
    "zero_optimization.round_robin_gradients": _exact("it changes which rank owns which part of the state"),
    "zero_optimization.parameter_alignment": _exact("it changes where parameters begin in their buffers"),
    "zero_optimization.zero_hpz_partition_size": _refused(
        "secondary partitions (hpZ) were not tried with this engine; leave it out, or set it to 1", 1
    ),
    "zero_optimization.zero_quantized_weights": _refused(
        "one process trains without quantized weights, so results differ; leave it out"
    ),
    "zero_optimization.zero_quantized_nontrainable_weights": _refused(
        "one process trains without quantized weights, so results differ; leave it out"
    ),
    "zero_optimization.zero_quantized_gradients": _refused(
        "one process trains without quantized gradients, so results differ; leave it out"
    ),
    "zero_optimization.memory_efficient_linear": _exact("it changes what linear layers keep for their backward"),
    "zero_optimization.pipeline_loading_checkpoint": _harmless(_CHECKPOINT),
    "zero_optimization.override_module_apply": _harmless(
        "it changes how weights are initialized while they are partitioned"
    ),
    "zero_optimization.log_trace_cache_warnings": _harmless(_REPORTS),
    "zero_optimization.enable_sanity_checks": _harmless("it switches on internal checks of DeepSpeed"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": _ignored("it is for the Muon optimizer only"),
    "zero_optimization.leaf_module.*": _exact("it names modules whose parameters are gathered at once"),
    "zero_optimization.mics_shard_size": _refused(_REMOVED, -1),
    "zero_optimization.mics_hierarchical_params_gather": _refused(_REMOVED),
    "zero_optimization.zeropp_loco_param": _refused(_REMOVED),
    # Logs, measurements, files.
    "steps_per_print": _harmless(_REPORTS),
    "dump_state": _harmless(_REPORTS),
    "log_level": _harmless(_REPORTS),
    "wall_clock_breakdown": _harmless(_REPORTS),
    "memory_breakdown": _harmless(_REPORTS),
    "vocabulary_size": _harmless("DeepSpeed warns if it is not a multiple of 8"),
    "disable_python_gc": _harmless("it changes when Python collects garbage"),
    "timers.*": _harmless(_REPORTS),
    "comms_logger.*": _harmless(_REPORTS),
    "flops_profiler.*": _harmless(_REPORTS),
    "tensorboard.*": _harmless(_REPORTS),
    "wandb.*": _harmless(_REPORTS),
    "comet.*": _harmless(_REPORTS),
    "csv_monitor.*": _harmless(_REPORTS),
    "aio.*": _harmless("it changes how fast disks are read"),
    "checkpoint.tag_validation": _harmless(_CHECKPOINT),
    "checkpoint.load_universal": _exact("on ZeRO 1; see docs/checkpoints.md"),
    "checkpoint.use_node_local_storage": _harmless(_CHECKPOINT),
    "checkpoint.parallel_write.pipeline_stage": _ignored("it is for DeepSpeed's own pipelines"),
    "checkpoint.checkpoint_serialization": _harmless(_CHECKPOINT),
    "checkpoint.writer": _refused(
        "ds_hetero reads and writes checkpoints by torch.save and torch.load alone; leave the writer out, see "
        "docs/checkpoints.md"
    ),
    "checkpoint.writer.*": _ignored(_NEEDS_SWITCH),
    "datastates_ckpt": _refused(
        "ds_hetero reads and writes checkpoints by torch.save and torch.load alone; leave it out"
    ),
    "datastates_ckpt.*": _ignored(_NEEDS_SWITCH),
    "activation_checkpointing.*": _ignored("it is for deepspeed.checkpointing, which transformers models do not call"),
    # Other ways to train.
    "pipeline.*": _ignored("it is for DeepSpeed's own pipelines, which are refused by name"),
    "tensor_parallel.autotp_size": _refused(
        "tensor parallelism of DeepSpeed cannot be used here, where ranks share sequences; leave one of the two out",
        0,
        1,
    ),
    "tensor_parallel.*": _ignored(_NEEDS_SWITCH),
    "expert_parallel.enabled": _refused("expert parallelism was not tried with this engine; leave it out"),
    "expert_parallel.*": _ignored(_NEEDS_SWITCH),
    "use_data_before_expert_parallelism": _ignored("it is for expert parallelism, which is refused"),
    "compile.deepcompile": _refused(
        "DeepCompile replaces ZeRO's own scheduling; leave it out, torch.compile works without it"
    ),
    "compile.*": _ignored(_NEEDS_SWITCH),
    "hybrid_engine.enabled": _refused(
        "it replaces layers by inference kernels, which need whole sequences; leave it out"
    ),
    "hybrid_engine.*": _ignored(_NEEDS_SWITCH),
    "weight_quantization": _refused("one process trains without quantized weights, so results differ; leave it out"),
    "weight_quantization.*": _ignored(_NEEDS_SWITCH),
    "data_efficiency.enabled": _refused(
        "curriculum learning and random-LTD shorten sequences behind the loader; leave it out, and choose samples in "
        "the loader"
    ),
    "data_efficiency.*": _ignored(_NEEDS_SWITCH),
    "autotuning.*": _ignored("it is for DeepSpeed's launcher"),
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
"""Rows by path of the key; ``name.*`` stands for all keys below ``name`` that have no other row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseFault:
    """A combination of settings that some releases of DeepSpeed compute wrongly without an error."""

    why: str  # what is wrong
    settings: Mapping[str, tuple[object, ...]]  # it applies if each of these keys, by path, has one of the values
    function: str  # the function of DeepSpeed that tells the releases apart, as in `ds_hetero.engine.framework_source`
    wrong: str  # digest of its body in releases with the fault, or ``absent``
    since: str  # first release without the fault, for the message


_OPTIMIZER = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"

FAULTS: tuple[ReleaseFault, ...] = (
    ReleaseFault(
        why="the step uses the gradients of one micro-batch only (fixed by its pull requests 7967 and 7981)",
        settings={
            "zero_optimization.stage": (1, 2),
            "zero_optimization.offload_optimizer.device": ("cpu", "nvme"),
        },
        function=f"{_OPTIMIZER}.async_accumulate_grad_in_cpu_via_gpu",
        wrong="675fa07558",
        since="0.19.0",
    ),
    ReleaseFault(
        why="master weights differ from the checkpoint after a universal checkpoint was loaded",
        settings={"zero_optimization.stage": (1, 2), "checkpoint.load_universal": (True,)},
        function=f"{_OPTIMIZER}._add_full_reduction_to_compact_grad_partition",  # older releases were not tried
        wrong=ABSENT,
        since="0.19.8",
    ),
    ReleaseFault(
        why="the last micro-batch of a step is not averaged over the ranks (fixed by its pull request 7985)",
        settings={
            "zero_optimization.stage": (1,),
            "bf16.enabled": (True,),
            "data_types.grad_accum_dtype": ("fp32",),
        },
        function=f"{_OPTIMIZER}.get_gradient_for_reduction",
        wrong="af51776857",
        since="0.19.8",
    ),
)
"""Whether a release has a fault is found by its source, and not by its number."""


def key_of(path: str) -> Key | None:
    """Return the row of a key, or of the section that contains it; None if the table has neither."""
    return row_of(KEYS, path)


def expect_supported_keys(ds_config: DsConfig, *, pipelines: bool = False) -> None:
    """Check that a job with these settings trains as one process does.

    Args:
        pipelines: whether the plan has pipelines.

    Raises:
        ConfigError: some settings are refused; the message lists them with reasons.
    """
    lines = []
    for path, value in _settings(ds_config):
        key = key_of(path)
        reason = "" if key is None else _refusal_reason(path, value, key, pipelines)
        if reason:
            lines.append(f'"{path}": {shortened(value)}: {reason}.')
    lines += _release_faults(ds_config)
    if lines:
        feature = "pipelines" if pipelines else f'"{SECTION}"'
        raise ConfigError(f"these settings of ds_config.json do not work together with {feature}:\n" + "\n".join(lines))


def unknown_keys(ds_config: DsConfig) -> list[str]:
    """Return the keys without a row, each as a text with the known key that it may be a misspelling of."""
    unknown = []
    for path, value in _settings(ds_config):
        is_leaf = not isinstance(value, Mapping) or not value
        if is_leaf and key_of(path) is None and not _is_section(path):
            unknown.append(_with_suggestion(path))
    return unknown


def _release_faults(ds_config: DsConfig) -> list[str]:
    """Return a line for each of `FAULTS` that the installed release has and these settings lead to."""
    release = release_of(PACKAGE)
    if release is None:
        return []
    value_by_path = dict(_settings(ds_config))
    lines = []
    for fault in FAULTS:
        is_met = all(is_in(value_by_path.get(path), values) for path, values in fault.settings.items())
        if is_met and digest_of(fault.function) == fault.wrong:
            settings = ", ".join(f'"{path}": {shortened(value_by_path[path])}' for path in fault.settings)
            lines.append(
                f"{settings}: with DeepSpeed {release} {fault.why}. Install deepspeed>={fault.since}, or leave one of "
                "them out."
            )
    return lines


def _with_suggestion(path: str) -> str:
    """Return a key in quotes with the most similar key, if there is one: ``"bf61" (do you mean "bf16"?)``."""
    names = [name.removesuffix(".*") for name in KEYS]
    alike = nearest(path, names, cutoff=0.85)
    return f'"{path}"' + (f' (do you mean "{alike}"?)' if alike else "")


def _is_section(path: str) -> bool:
    """Return whether a key is a section whose keys have rows; it may be empty, as in ``"bf16": {}``."""
    return any(name.startswith(f"{path}.") for name in KEYS)


def _settings(section: Content, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the path and value of every key, a section before its keys; skip the section of ds_hetero.

    ``{"bf16": {"enabled": true}}`` yields "bf16" and "bf16.enabled".
    """
    for name, value in section.items():
        path = f"{prefix}{name}"
        if path == SECTION:
            continue
        yield path, value
        if isinstance(value, Mapping):
            yield from _settings(value, f"{path}.")


def _refusal_reason(path: str, value: object, key: Key, pipelines: bool) -> str:
    """Return why the value of a key is refused; empty if it is allowed."""
    if key.kind == "refused" and not is_in(value, key.off):
        return key.why
    if pipelines and key.with_pipelines and not is_in(value, key.off_with_pipelines) and not _is_detail(path):
        return key.with_pipelines
    return ""


def _is_detail(path: str) -> bool:
    """Return whether a key configures a feature that the key ``enabled`` of its section switches on."""
    return path.startswith(("fp16.", "torch_autocast.")) and not path.endswith(".enabled")
