"""Registering, undoing, and what all ranks agree on before training; nothing changes without a section.

Budget: 30 s.
"""

from __future__ import annotations

import importlib
import inspect
import os
from typing import Any

import pytest
import torch

from tests.integration.tiny import ONE_GROUP_2, UNEVEN_2, adam, batches, ds_config, llama
from tests.support import is_strict, run_deepspeed


def _everything_replaced() -> dict[str, Any]:
    """What frameworks offer under every name that this engine replaces or adds to."""
    import accelerate
    import accelerate.accelerator
    import accelerate.data_loader
    import accelerate.scheduler
    import deepspeed
    import transformers.trainer
    from deepspeed.runtime.sequence_parallel import ulysses_sp
    from deepspeed.utils import groups
    from transformers import AttentionInterface, AttentionMaskInterface, Trainer

    owners = {
        accelerate.Accelerator: ("__init__", "_prepare_deepspeed"),
        accelerate: ("skip_first_batches",),
        accelerate.accelerator: ("prepare_data_loader", "skip_first_batches"),
        accelerate.data_loader: ("skip_first_batches",),
        accelerate.scheduler.AcceleratedScheduler: ("step",),
        deepspeed: ("initialize",),
        groups: ("mpu", "mesh_device"),
        ulysses_sp.UlyssesSPAttentionHF: ("register_with_transformers",),
        ulysses_sp.UlyssesSPDataLoaderAdapter: ("__init__",),
        transformers.trainer: ("skip_first_batches",),
        Trainer: (
            "_get_dataloader",
            "_track_num_input_tokens",
            "compute_loss",
            "get_batch_samples",
            "set_initial_training_values",
        ),
    }
    seen = {f"{owner.__name__}.{name}": vars(owner)[name] for owner, names in owners.items() for name in names}
    seen["attention"] = dict(AttentionInterface._global_mapping)
    seen["masks"] = dict(AttentionMaskInterface._global_mapping)
    return seen


def test_undo_restores_every_name_and_registering_is_idempotent() -> None:
    run_deepspeed(_register_and_undo, 1)


def _register_and_undo(rank: int) -> None:
    import deepspeed

    import ds_hetero
    from ds_hetero.errors import ConfigError

    before = _everything_replaced()
    handle = ds_hetero.register()
    assert ds_hetero.register() is handle
    with pytest.raises(ConfigError, match="with another configuration"):
        ds_hetero.register({"heterogeneity": {}})
    with pytest.raises(ConfigError, match="no model has been prepared"):
        _ = handle.replica
    during = _everything_replaced()
    untouched = {name for name in before if before[name] is during[name] or before[name] == during[name]}
    assert untouched == {"deepspeed.utils.groups.mpu", "deepspeed.utils.groups.mesh_device"}
    model = llama()
    engine, *_ = deepspeed.initialize(model=model, config=ds_config(0, "ulysses"))
    assert handle.replica.sp_size == 1 and model.config._attn_implementation == "ds_hetero"
    loss = handle.loss(engine(**(shard := next(iter(handle.dataloader(batches(1)))))), shard)
    torch.testing.assert_close(loss, llama()(**batches(1)[0]).loss)
    handle.undo()
    assert _everything_replaced() == before
    assert model.config._attn_implementation == "sdpa"
    assert ds_hetero.register() is not handle


def test_without_a_section_stock_runs() -> None:
    run_deepspeed(_stock_runs, 2)


def _stock_runs(rank: int) -> None:
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
    from deepspeed.utils import groups
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    import ds_hetero

    deepspeed.init_distributed()
    handle = ds_hetero.register()
    stock, model = ALL_ATTENTION_FUNCTIONS["sdpa"], llama()
    arguments = {"core_attn_implementation": "sdpa", "sequence_parallel_size": 2, "micro_batch_size": 2}
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, **arguments)
    assert mpu is parallel_state_sp and ALL_ATTENTION_FUNCTIONS["sdpa"] is not stock
    config = ds_config(2, None, sequence_parallel_size=2, heterogeneity={"enabled": False, "schedule": "ring"})
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config, mpu=mpu)
    assert engine.sequence_parallel_size == 2 and engine.mpu is mpu is groups.mpu
    assert model.config._attn_implementation == "sdpa" and "forward" not in vars(engine)
    group = groups._get_sequence_parallel_group()
    whole = [{**batch, "position_ids": torch.arange(8).expand(2, -1)} for batch in batches(1, length=8)]
    adapter = UlyssesSPDataLoaderAdapter(whole, rank, group, 2, "cpu")
    assert type(adapter) is UlyssesSPDataLoaderAdapter and len(adapter) == 2
    engine(**next(iter(adapter)))
    loader = handle.elastic(handle.dataloader(whole))
    read = [batch["input_ids"].shape for _ in loader.epochs(2) for batch in loader]
    assert read == [(2, 8), (2, 8)] and loader.epoch == 2 and loader.resumed_step is None

    # A head count that stock cannot divide is told as before, one call later.
    parallel_state_sp._release_sequence_parallel_groups()
    del ALL_ATTENTION_FUNCTIONS["sdpa"]
    three = llama(num_attention_heads=3, num_key_value_heads=3, hidden_size=24)
    mpu = UlyssesSPAttentionHF.register_with_transformers(three, **arguments)
    with pytest.raises(ValueError, match="Attention head count 3 is not divisible by SP size 2"):
        deepspeed.initialize(model=three, config=ds_config(2, None), mpu=mpu)


# What one rank of two is given in place of the other's ds_config.json, and what the message of both says.
DIFFERENT_FILES: dict[str, tuple[dict[str, Any], str]] = {
    "no section": ({"heterogeneity": None}, '"heterogeneity": switched on on rank 0; missing on rank 1'),
    "switched off": (
        {"heterogeneity": {"enabled": False}},
        '"heterogeneity": switched on on rank 0; switched off ("enabled": false) on rank 1',
    ),
    "another stage": ({"zero_optimization": {"stage": 3}}, '"zero_optimization.stage": 1 on rank 0; 3 on rank 1'),
    "accumulation": (
        {"gradient_accumulation_steps": 2},
        '"gradient_accumulation_steps": missing on rank 0; 2 on rank 1',
    ),
    "clipping": ({"gradient_clipping": None}, '"gradient_clipping": 1.0 on rank 0; missing on rank 1'),
    "misspelled": ({"heterogenity": {}}, 'on rank 1: "heterogenity" in ds_config.json is not a DeepSpeed key'),
    "another algorithm": (
        {},
        "in the same environment, but these differ:\n  environment variable NCCL_ALGO: Ring on rank 0; not",
    ),
    "another model": ({}, "all ranks must build the same model, but these differ:\n  the model: 12 parameters"),
}


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, str]]:
    """Message of every refusal, by rank."""
    return run_deepspeed(_give_different_files, 2)


@pytest.mark.parametrize("name", DIFFERENT_FILES)
def test_a_difference_between_ranks_is_refused_before_anything_is_built(
    name: str, refusals: list[dict[str, str]]
) -> None:
    first, second = (by_name[name] for by_name in refusals)
    assert first == second
    assert DIFFERENT_FILES[name][1] in first


def test_what_may_differ_between_hosts_is_accepted(refusals: list[dict[str, str]]) -> None:
    assert all("accepted" in by_name for by_name in refusals)


def _give_different_files(rank: int) -> dict[str, str]:
    import deepspeed

    import ds_hetero

    ds_hetero.register()
    messages = {}
    for name, (changes, _) in DIFFERENT_FILES.items():
        changed = {**ds_config(1, UNEVEN_2), **changes} if rank else ds_config(1, UNEVEN_2)
        config = {key: value for key, value in changed.items() if value is not None}
        model = llama(num_hidden_layers=1 + rank if name == "another model" else 2)
        if name == "another algorithm" and rank == 0:
            os.environ["NCCL_ALGO"] = "Ring"
        with pytest.raises(ds_hetero.ConfigError) as caught:
            deepspeed.initialize(model=model, config=config)
        os.environ.pop("NCCL_ALGO", None)
        messages[name] = str(caught.value)
    os.environ |= {"NCCL_SOCKET_IFNAME": f"eth{rank}", "OMP_NUM_THREADS": f"{1 + rank}"}
    config = ds_config(1, UNEVEN_2, steps_per_print=5 + rank, aio={"thread_count": 1 + rank})
    deepspeed.initialize(model=(model := llama()), optimizer=adam(model), config=config)
    return {**messages, "accepted": ""}


def test_ranks_without_a_section_may_differ_as_in_stock_but_not_misspell_it() -> None:
    run_deepspeed(_initialize_without_section, 2)


def _initialize_without_section(rank: int) -> None:
    import deepspeed

    import ds_hetero

    ds_hetero.register()
    deepspeed.initialize(model=(model := llama()), optimizer=adam(model), config=ds_config(0, None, dump_state=False))
    misspelled = {**ds_config(0, None), "Heterogenous": {"schedule": UNEVEN_2}}
    with pytest.raises(ds_hetero.ConfigError, match=r'did you mean "heterogeneity"'):
        deepspeed.initialize(model=llama(), config=misspelled)
    with pytest.raises(ValueError, match=r"nowhere\.json"):
        deepspeed.initialize(model=llama(), config="nowhere.json")


# Kind of the error, and a part of its message.
ERRORS = {
    "a value of one rank": ("ConfigError", 'on rank 1: "heterogeneity.layout": "zig"'),
    "sections that differ": (
        "ConfigError",
        "groups[0].ranks is [0] on rank 0; [0, 1] on rank 1",
    ),
    "two sizes": (
        "ConfigError",
        "sequence-parallel size is given twice: sequence_parallel_size of ds_config=1, mesh_param of deepspeed",
    ),
    "tensor parallelism": ("ConfigError", '"tensor_parallel.autotp_size": 2: tensor parallelism of DeepSpeed cannot'),
    "no file": ("ConfigError", '"nowhere.json" is neither a file nor a strategy'),
    "another model": ("ScheduleError", "the schedule is for num_heads=4, num_kv_heads=2; the model has 8 and 2"),
    "too many ranks": ("ScheduleError", "the schedule has 3 ranks, the job has 2"),
    "a kernel that no rank has": (
        "ConfigError",
        'heterogeneity.attention = "flash_attn" does not work here: flash-attn runs on CUDA devices, not on cpu',
    ),
    "dropout on one rank": (
        "ModelError",
        "on rank 1: LlamaForCausalLM cannot be split over the sequence:\n  - attention_dropout=0.1",
    ),
    "linear attention": ("ModelError", "layers of type linear_attention"),
    "no transformers model": ("ModelError", "holds none. Train this module with"),
}


@pytest.fixture(scope="module")
def errors() -> list[dict[str, tuple[str, str]]]:
    """Kind and message of every error, by rank."""
    return run_deepspeed(_provoke, 2)


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_one_rank_is_raised_on_every_rank(name: str, errors: list[dict[str, tuple[str, str]]]) -> None:
    first, second = (by_name[name] for by_name in errors)
    assert first == second
    kind, message = first
    assert kind == ERRORS[name][0]
    assert ERRORS[name][1] in message


def _provoke(rank: int) -> dict[str, tuple[str, str]]:
    import deepspeed

    import ds_hetero
    from ds_hetero.errors import HeteroError

    ds_hetero.register()
    three = {**UNEVEN_2, "groups": [*UNEVEN_2["groups"], {"ranks": [2], "tokens": [1], "heads": [4]}]}
    linear = llama()
    linear.config.layer_types = ["full_attention", "linear_attention"]
    section = {"schedule": UNEVEN_2}
    attempts: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (llama(), {"heterogeneity": {**section, "layout": "zig" if rank else "zigzag"}}, {}),
        (llama(), {"heterogeneity": {"schedule": ONE_GROUP_2 if rank else UNEVEN_2}}, {}),
        (llama(), {"heterogeneity": section, "sequence_parallel_size": 1}, {"mesh_param": (1, 2)}),
        (llama(), {"heterogeneity": section, "tensor_parallel": {"autotp_size": 2}}, {}),
        (llama(), {"heterogeneity": {"schedule": "nowhere.json"}}, {}),
        (llama(num_attention_heads=8), {"heterogeneity": section}, {}),
        (llama(), {"heterogeneity": {"schedule": three}}, {}),
        (llama(), {"heterogeneity": {**section, "attention": "flash_attn"}}, {}),
        (llama(attention_dropout=0.1 * rank), {"heterogeneity": section}, {}),
        (linear, {"heterogeneity": section}, {}),
        (torch.nn.Linear(2, 2), {"heterogeneity": section}, {}),
    ]
    errors = {}
    for name, (model, config, arguments) in zip(ERRORS, attempts, strict=True):
        with pytest.raises(HeteroError) as caught:
            deepspeed.initialize(model=model, config={**ds_config(1, None), **config}, **arguments)
        errors[name] = type(caught.value).__name__, str(caught.value)
    return errors


def test_the_private_names_that_are_listed_exist() -> None:
    assert run_deepspeed(_missing_names, 1) == [[]]


def _missing_names(rank: int) -> list[str]:
    """Attributes that the sources which should set them do not name; a missing name of another kind is an error."""
    from ds_hetero.engine import names as of_torch
    from ds_hetero.engine.patching import expect_package
    from ds_hetero.frameworks.accelerate import names as of_accelerate
    from ds_hetero.frameworks.deepspeed import names as of_deepspeed
    from ds_hetero.frameworks.transformers import names as of_transformers
    from ds_hetero.frameworks.trl import names as of_trl

    attributes: list[str] = []
    for names in (of_torch, of_accelerate, of_deepspeed, of_transformers, of_trl):
        expect_package(names.PACKAGE, names.WORKS, (*names.PRIVATE_NAMES, *_of_features(names)))
        attributes += names.ATTRIBUTES
    return [path for path in attributes if path.rpartition(".")[2] not in inspect.getsource(_owner(path))]


def _of_features(names: Any) -> tuple[str, ...]:
    return (*getattr(names, "OF_FEATURES", ()), *getattr(names, "COMPILED", ()))


def _owner(path: str) -> Any:
    module, _, names = path.partition(":")
    return getattr(importlib.import_module(module), names.partition(".")[0])


def test_a_version_outside_the_range_or_a_missing_name_is_refused() -> None:
    from ds_hetero.engine.patching import expect_package
    from ds_hetero.errors import VersionError

    assert expect_package("torch", ">=2", ["torch:nn.Linear.forward"]) == ()
    with pytest.raises(VersionError, match=r"torch 2\S* is not a version that works. Install torch<2."):
        expect_package("torch", "<2", [])
    with pytest.raises(VersionError, match=r"does not have torch:nn.Nothing, no_such:thing, which ds_hetero uses"):
        expect_package("torch", ">=2", ["torch:nn.Nothing", "no_such:thing"])


def test_a_release_that_nobody_tried_trains_if_its_surface_is_known_and_is_announced() -> None:
    (printed,) = run_deepspeed(_train_with_unknown_releases, 1)
    assert "not tested with this release of ds_hetero: deepspeed 999.0" in printed[0]
    assert "were not tried" not in printed[0]
    assert "It builds on functions that were not tried as they are here: deepspeed.runtime.engine:" in printed[1]
    assert "deepspeed 999.0 was not tried, and differs from" in printed[2]
    assert "DeepSpeedEngine.backward: (self, when) -> (self, loss" in printed[2]


def _train_with_unknown_releases(rank: int) -> list[str]:
    """What a job says under numbers that are not on record: a known surface, another body, another signature."""
    import contextlib
    import io
    from importlib.metadata import version

    import deepspeed

    import ds_hetero
    from ds_hetero.common import extras
    from ds_hetero.engine import patching, surface
    from ds_hetero.errors import VersionError

    name, release = "deepspeed.runtime.engine:DeepSpeedEngine.backward", version("deepspeed")
    record = surface.read_record()
    record["deepspeed"] = {release: record["deepspeed"][release]}
    state = record["deepspeed"][release][name]
    surface.read_record = lambda: record
    patching.version = extras.release_of = lambda package: "999.0" if package == "deepspeed" else version(package)
    printed = []
    for changed in (state, surface.signature_of(state) + " another", "(self, when) another"):
        record["deepspeed"][release][name] = changed
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                handle = ds_hetero.register()
                model = llama()
                engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=ds_config(1, "ulysses"))
                for batch in handle.dataloader(batches(1)):
                    engine.backward(engine(**batch).loss)
                    engine.step()
                assert engine.global_steps == 1
                engine.destroy()
                handle.undo()
        except VersionError as error:
            output.write(str(error))
        printed.append(output.getvalue())
    return printed


def test_a_loader_wrapped_before_the_configuration_is_known_is_refused_or_works_with_register_config() -> None:
    run_deepspeed(_wrap_early, 2)


def _wrap_early(rank: int) -> None:
    import deepspeed
    import torch.distributed as dist
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter

    import ds_hetero
    from ds_hetero.engine.loader import ModelLoader
    from ds_hetero.errors import ConfigError

    config = ds_config(1, UNEVEN_2)
    arguments = {"core_attn_implementation": "sdpa", "sequence_parallel_size": 2, "micro_batch_size": 2}
    deepspeed.init_distributed()

    handle = ds_hetero.register()
    mpu = UlyssesSPAttentionHF.register_with_transformers(model := llama(), **arguments)
    UlyssesSPDataLoaderAdapter(batches(1), rank, mpu.get_sequence_parallel_group(), 2, "cpu")
    with pytest.raises(ConfigError, match=r"made before deepspeed.initialize.*ds_hetero.register\(ds_config\)"):
        deepspeed.initialize(model=model, config=config, mpu=mpu)
    handle.undo()

    handle = ds_hetero.register(config)
    mpu = UlyssesSPAttentionHF.register_with_transformers(model := llama(), **arguments)
    assert dist.get_process_group_ranks(mpu.get_sequence_parallel_group()) == [0, 1]
    loader = UlyssesSPDataLoaderAdapter(batches(2), rank, mpu.get_sequence_parallel_group(), 2, "cpu")
    assert type(loader) is ModelLoader and len(loader) == 2
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config, mpu=mpu)
    for batch in loader:
        assert batch["input_ids"].shape == (2, [28, 9][rank])
        engine.backward(handle.loss(engine(**batch), batch))
        engine.step()


def test_models_are_freed_with_their_engines() -> None:
    run_deepspeed(_train_one_after_another, 2)


def _train_one_after_another(rank: int) -> None:
    import gc
    import weakref

    import deepspeed

    import ds_hetero
    from ds_hetero.frameworks.transformers.former_attention import _former

    handle = ds_hetero.register()
    models, replicas = [], []
    for _ in range(3):
        model = llama()
        config = ds_config(1, UNEVEN_2)  # of ZeRO-3, DeepSpeed itself keeps every model
        config["heterogeneity"]["replan"] = {"enabled": True}
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
        for batch in handle.dataloader(batches(1)):
            engine.backward(handle.loss(engine(**batch), batch))
            engine.step()
        models.append(weakref.ref(model))
        replicas.append(handle.replica)
        engine.destroy()
        del engine, model, batch, _
        gc.collect()
    assert [model() for model in models] == [None] * 3
    assert replicas[0] is replicas[1] is replicas[2]  # with its process groups
    assert not _former
    with pytest.raises(ds_hetero.ConfigError, match="no model has been prepared"):
        _ = handle.replica


def test_ranks_that_never_register_and_engines_before_it_are_named() -> None:
    (warned, refused, early), (_, _, also_early) = run_deepspeed(_register_too_late, 2)
    for text in (warned, refused):
        assert text.startswith("rank 1 did not reach deepspeed.initialize with ds_hetero registered")
        assert "Call ds_hetero.register() on every rank" in text
    assert early == also_early
    assert (
        'register() was called after an engine was built from a configuration with a "heterogeneity" section' in early
    )


def _register_too_late(rank: int) -> tuple[str, str, str]:
    """Rank 0 looks for rank 1 while that waits; then both build an engine before they register."""
    import logging

    import deepspeed
    import torch.distributed as dist

    import ds_hetero
    from ds_hetero.engine import registered_ranks
    from ds_hetero.errors import ConfigError

    deepspeed.init_distributed("gloo")
    warnings: list[str] = []
    refused = ""
    if rank == 0:
        handler = logging.Handler()
        handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
        registered_ranks.logger.addHandler(handler)
        with pytest.raises(ConfigError) as caught:
            registered_ranks.expect_all_registered(warn_after_s=0.1, give_up_after_s=0.5)
        refused = str(caught.value)
    dist.barrier()
    model = llama()
    config = {"train_batch_size": 2, "heterogeneity": {"schedule": UNEVEN_2}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
    with pytest.raises(ConfigError) as caught:
        ds_hetero.register()
    engine.destroy()
    return "".join(warnings), refused, str(caught.value)


def test_undo_closes_the_process_groups_of_replicas() -> None:
    closed = 2 if is_strict() else 1  # the replica's, and there its group of messages between nodes
    assert run_deepspeed(_count_groups, 2) == [(closed, closed)] * 2


def _count_groups(rank: int) -> tuple[int, int]:
    """Groups beside those of the world and of DeepSpeed, after `undo` and after another job and `undo`."""
    import deepspeed
    from torch.distributed import distributed_c10d

    import ds_hetero

    counts = []
    for _ in range(2):
        handle = ds_hetero.register()
        model = llama()
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=ds_config(1, ONE_GROUP_2))
        before = len(distributed_c10d._world.pg_map)
        engine.destroy()
        handle.undo()
        counts.append(before - len(distributed_c10d._world.pg_map))
    return counts[0], counts[1]
