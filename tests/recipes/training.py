"""Trains a shrunk recipe on two ranks at 3:1, by sequences and by batches, and on one process."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import sys
import tempfile
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.integration.architectures import VOCAB
from tests.integration.sweep_configs import tiny_config
from tests.integration.tiny import ds_config, parameters
from tests.integration.trainer.test_trainer import make_trainer
from tests.integration.trainer.test_trl import preferences, tokenizer
from tests.recipes.jobs import Job

SHARINGS = ("tokens", "batches")
"""What the ranks share 3:1: the tokens of each sequence, or the rows of each batch."""

STEPS, ROWS = 3, 4
_BATCH = [3, 1]
_LEAST = 0.1  # that a loss or norm counts as: gradients of a loss near zero are rounding
_RATE, _EPS = 1e-2, 1e-3  # this large, AdamW's eps does not turn rounding into a step of full size
_TO_32, _32 = torch.Tensor.float, torch.float32
_QUANTIZED = {
    "nf4": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.float32,
        "bnb_4bit_quant_storage": torch.float32,
    },
    "int8": {"load_in_8bit": True},
}
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv", "query", "value")


class Outcome(NamedTuple):
    """What became of a job under one sharing.

    Args:
        kind: exact, refused, wrong, obscure, or not run where one process does not train it either.
        why: what was said, or by how much it is off.
        error: the largest relative difference of a loss, norm or parameter.
    """

    kind: str
    why: str = ""
    error: float = 0.0


class Trained(NamedTuple):
    """Of one process or rank.

    Args:
        losses: of each step.
        norms: of its gradient; empty for ZeRO-0.
        values: of the parameters that are trained, by name.
    """

    losses: list[float]
    norms: list[float]
    values: dict[str, np.ndarray]


def train(rank: int, jobs: list[Job], sharing: str, dtype: torch.dtype = torch.float32) -> list[Trained | Outcome]:
    """Train each job on this rank of two, or on one process where ``sharing`` is empty.

    Fewer results than jobs where ranks came to differ: what follows would tell of that.

    Args:
        dtype: of everything that is computed; a quantized base is rounded to its 4 bits, and then has this type.
    """
    import logging

    import datasets

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    datasets.disable_progress_bars()
    results = []
    for job in jobs:
        with _computing_in(dtype):
            results.append(_train(job, sharing))
        _forget()
        if dist.is_initialized() and sharing:
            kinds: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(kinds, getattr(results[-1], "kind", ""))
            if len({*kinds}) > 1:
                break
    return results


@contextlib.contextmanager
def _computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Everything has this type, also what norms and softmaxes ask to have in 32 bits."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    to_dtype = torch.Tensor.double if dtype == torch.float64 else _TO_32
    try:
        with mock.patch.multiple(torch, float32=dtype, float=dtype), mock.patch.object(torch.Tensor, "float", to_dtype):
            yield
    finally:
        torch.set_default_dtype(before)


def _forget() -> None:
    """What accelerate keeps of a job in its process, and what ended jobs held."""
    import gc

    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # else models of the next job are made in parts, as ZeRO-3 wants them
    AcceleratorState._reset_state()
    GradientState._reset_state()
    gc.collect()


def _train(job: Job, sharing: str) -> Trained | Outcome:
    """An outcome where it ends in an error."""
    from ds_hetero.errors import HeteroError, PeerError

    try:
        return _train_images(job, sharing) if job.images else _train_text(job, sharing)
    except PeerError:
        return Outcome("obscure", traceback.format_exc()[-2000:])
    except HeteroError as error:
        return Outcome("refused", " ".join(str(error).split()))
    except Exception as error:
        if "Sequence parallelism does not support" in str(error):  # as transformers itself says of some layers
            return Outcome("refused", f"transformers: {error}")
        if "not supported with DeepSpeed sequence parallelism" in str(error):  # as TRL itself says of some losses
            return Outcome("refused", f"TRL: {error}")
        return Outcome("obscure", traceback.format_exc()[-2000:])


def compare(ours: list[Trained], expected: Trained, tolerance: float = 1e-5) -> Outcome:
    """Losses, norms and trained values of all ranks against those of one process."""
    errors: list[tuple[float, str]] = []
    largest = max(float(np.linalg.norm(value)) for value in expected.values.values())
    for result in ours:
        if result.values.keys() != expected.values.keys():
            other = sorted(result.values.keys() ^ expected.values.keys())[:4]
            return Outcome("wrong", f"other parameters: {other}", np.inf)
        for what, mine, theirs in (("loss", result.losses, expected.losses), ("norm", result.norms, expected.norms)):
            for step, (own, right) in enumerate(zip(mine, theirs, strict=bool(mine)), 1):
                error = abs(own - right) / (abs(right) + _LEAST)
                errors.append((error, f"the {what} of step {step} is {own:.8g}, and {right:.8g} on one process"))
        for name, value in expected.values.items():
            error = float(np.linalg.norm(result.values[name] - value) / (np.linalg.norm(value) + 1e-3 * largest))
            errors.append((error, f"{name} is off by {error:.1e}"))
    first = next((why for error, why in errors if not error <= tolerance), "")
    return Outcome("wrong" if first else "exact", first, max(error for error, _ in errors))


def _accumulated(job: Job) -> int:
    """Batches of a step; one where a loss of whole sequences ignores how many items these have: TRL adds them up."""
    return 1 if job.method == "gkd" else 2


def _config(job: Job, sharing: str, model: Any) -> dict[str, Any]:
    from ds_hetero.frameworks.transformers.model.model_checks import head_counts

    if sharing == "batches":
        config = ds_config(job.stage, None, gradient_accumulation_steps=_accumulated(job))
        del config["train_micro_batch_size_per_gpu"]
        return {**config, "heterogeneity": {"batch": _BATCH}}
    counts = head_counts(model)
    groups = [{"ranks": [rank], "tokens": [share], "heads": [counts[0]]} for rank, share in enumerate(_BATCH)]
    schedule = {"version": 1, "num_heads": counts[0], "num_kv_heads": counts[1], "groups": groups}
    return ds_config(
        job.stage, schedule, gradient_accumulation_steps=_accumulated(job), train_micro_batch_size_per_gpu=ROWS
    )


# --- models -------------------------------------------------------------------------------------------


@functools.cache
def _configuration(family: str, head: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = tiny_config(CONFIG_MAPPING[family], head)
    if family == "dbrx":
        config.attn_config.clip_qkv = 8.0  # as its checkpoints have it; without, its layers fail
    for part in (config, config.get_text_config()):
        for name, value in vars(part).items():
            if name.endswith("dropout") and isinstance(value, float):  # of functions; layers lose theirs in the model
                setattr(part, name, 0.0)
    return config


def _plain_model(job: Job) -> Any:
    """Tiny, random, in 32 bits, without dropout."""
    import transformers

    head = "images" if job.images else "causal"
    config = copy.deepcopy(
        _configuration(job.family, "" if job.family in ("bert", "modernbert", "xlm-roberta") else head)
    )
    kind = "AutoModelForMultimodalLM" if job.images or job.family == "mistral4" else "AutoModelForCausalLM"
    if job.method in ("reward", "classification"):
        kind, config.num_labels = "AutoModelForSequenceClassification", 1 if job.method == "reward" else 3
        config.pad_token_id = 2
    if "router_loss" in job.extras:
        text = config.get_text_config()
        text.output_router_logits, text.router_aux_loss_coef = True, 0.01
    torch.manual_seed(0)
    make = getattr(transformers, kind).from_config
    try:
        model = make(config, attn_implementation="sdpa", experts_implementation="eager")
    except ValueError:  # has eager attention only
        model = make(config, attn_implementation="eager", experts_implementation="eager")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.to(torch.get_default_dtype()).train()


def _model(job: Job) -> Any:
    model = _plain_model(job)
    if job.base:
        from safetensors.torch import save_model
        from transformers import BitsAndBytesConfig

        dtype = torch.get_default_dtype()
        # Gemma 3n reads the weights of these layers without calling them.
        skipped = {"llm_int8_skip_modules": ["lm_head", r".*\.altup"]} if job.family.startswith("gemma3n") else {}
        with tempfile.TemporaryDirectory() as folder, _computing_in(_32):
            model.config.save_pretrained(folder)
            save_model(  # on every rank, each its own
                model.float(), f"{folder}/model.safetensors", metadata={"format": "pt"}
            )
            model = type(model).from_pretrained(
                folder,
                quantization_config=BitsAndBytesConfig(**_QUANTIZED[job.base], **skipped),
                device_map={"": "cpu"},
                dtype=torch.float32,
                attn_implementation=model.config._attn_implementation,
                experts_implementation="eager",
            )
            if dtype == torch.float64:
                model = model.dequantize().double()
        model = model.train()
    if job.family == "llama4_text":
        model.base_model_prefix = "model"  # its class has another, by which TRL takes the whole model for the decoder
        model.config.num_experts = model.config.num_local_experts  # as TRL asks for it
    if "frozen_layers" in job.extras:
        every = list(model.parameters())
        for parameter in every[: len(every) // 2]:
            parameter.requires_grad_(requires_grad=False)
    return _adapted(model, job) if job.adapter else model


def _adapted(model: Any, job: Job) -> Any:
    import peft

    torch.manual_seed(1)
    task = "SEQ_CLS" if job.method in ("reward", "classification") else None if job.images else "CAUSAL_LM"
    if job.adapter != "lora":
        kinds = {"oft": ("OFTConfig", {"oft_block_size": 4, "r": 0}), "bone": ("MissConfig", {"r": 4})}
        kinds |= {"boft": ("BOFTConfig", {"boft_block_size": 4})}
        name, options = kinds[job.adapter]
        return peft.get_peft_model(model, getattr(peft, name)(target_modules="all-linear", task_type=task, **options))
    named = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    options: dict[str, Any] = {"r": 4, "lora_alpha": 8, "task_type": task, "target_modules": "all-linear"}
    if job.targets == "attention" and named & {*_ATTENTION}:
        options["target_modules"] = sorted(named & {*_ATTENTION})
    experts = sorted({name for name, p in model.named_parameters() if p.dim() == 3 and "experts" in name})
    if job.targets == "experts" and experts:
        options |= {"target_modules": sorted(named & {*_ATTENTION}), "target_parameters": experts}
    linear = {
        name.rpartition(".")[2]: type(m).__module__ for name, m in model.named_modules() if isinstance(m, nn.Linear)
    }
    routers = {
        name for name, module in linear.items() if module.startswith("transformers.")
    }  # return more than a tensor
    if options["target_modules"] == "all-linear" and routers | {name for name in linear if name.isdigit()}:
        options["target_modules"] = sorted(name for name in linear.keys() - routers - {"lm_head"} if not name.isdigit())
    if {"conv1d", "out_proj"} <= {name.rpartition(".")[2] for name, _ in model.named_modules()}:  # PEFT refuses these
        options["target_modules"] = sorted(named - {"out_proj", "lm_head"})
    if job.saves:
        options["modules_to_save"] = ["lm_head"]
    for word in job.settings:
        options |= {"use_dora": True} if word == "dora" else {"use_rslora": True} if word == "rslora" else {}
    start = [word for word in job.settings if word in ("pissa", "olora")]
    options["init_lora_weights"] = start[0] if start else experts != [] and "target_parameters" in options
    return peft.get_peft_model(model, peft.LoraConfig(**options))


# --- text ---------------------------------------------------------------------------------------------


def _train_text(job: Job, sharing: str) -> Trained | Outcome:
    import ds_hetero

    if sharing:
        ds_hetero.register()
    model = _model(job)
    kind, config, more, options = _METHODS[job.method](job)
    recompute = {"use_reentrant": job.recompute == "reentrant"}
    options |= {"gradient_checkpointing": bool(job.recompute), "gradient_checkpointing_kwargs": recompute}
    trainer = make_trainer(
        _config(job, sharing, model) if sharing else None,
        2 if sharing == "tokens" else 0,
        kind,
        config=config,
        model=model,
        more=more,
        per_device_train_batch_size=ROWS // 2 if sharing == "batches" else ROWS,
        gradient_accumulation_steps=_accumulated(job),
        max_steps=STEPS,
        num_train_epochs=1,
        lr_scheduler_type="cosine",
        warmup_steps=1,
        include_num_input_tokens_seen="no",
        optim="adamw_torch",
        # One process is wrapped, too; looking for unused parameters, torch does not know reentrant recomputation.
        **({"ddp_find_unused_parameters": False} if job.recompute == "reentrant" and not sharing else {}),
        **_known(config, options),
    )
    if job.base:  # TRL makes adapters of quantized models bf16, whose rounding hides what is compared
        for parameter in trainer.model.parameters():
            parameter.data = parameter.data.to(torch.get_default_dtype()) if parameter.requires_grad else parameter.data
    with contextlib.nullcontext() if sharing else _documents_apart(model):
        trainer.train()
    engine = trainer.model_wrapped
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    norms = [entry["grad_norm"] for entry in logs if "grad_norm" in entry] if job.stage or not sharing else []
    values = parameters(trainer.model, job.stage if sharing else 0)
    if hasattr(engine, "destroy"):
        engine.destroy()
    return Trained([entry["loss"] for entry in logs], norms, values)


@contextlib.contextmanager
def _documents_apart(model: Any) -> Iterator[None]:
    """Masks of one process that keep packed documents apart: some files of transformers forget to tell them positions.

    gpt-oss is one of them (5.23): with eager and flex attention a document sees those before it in its row.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    file, latest = sys.modules[type(base).__module__], {}
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else base

    def note(decoder: nn.Module, args: object, kwargs: dict[str, Any]) -> None:
        latest["position_ids"] = kwargs.get("position_ids")

    def telling(stock: Any) -> Any:
        return lambda *args, **kwargs: stock(*args, **{**kwargs, **{k: v for k, v in latest.items() if v is not None}})

    hook = decoder.register_forward_pre_hook(note, with_kwargs=True)
    names = [name for name in ("create_causal_mask", "create_sliding_window_causal_mask") if hasattr(file, name)]
    with (
        mock.patch.multiple(file, **{name: telling(getattr(file, name)) for name in names})
        if names
        else contextlib.nullcontext()
    ):
        yield
    hook.remove()


def _known(config: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names that the installed transformers has for recomputation."""
    fields = {field.name for field in dataclasses.fields(config)}
    renamed = {"gradient_checkpointing": "activation_checkpointing"}
    renamed |= {"gradient_checkpointing_kwargs": "activation_checkpointing_kwargs"}
    return {(name if name in fields else renamed.get(name, name)): value for name, value in options.items()}


def _rows(count: int) -> Iterator[dict[str, list[int]]]:
    """Samples of unlike lengths; the first third of each is a prompt."""
    generator = torch.Generator().manual_seed(1)
    for number in range(count):
        length = 12 + 5 * number % 17
        ids = torch.randint(6, VOCAB - 8, (length,), generator=generator).tolist()
        yield {"input_ids": ids, "completion_mask": [int(place >= length // 3) for place in range(length)]}


def _sft(job: Job) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = list(_rows(8 * STEPS * (3 if job.packing == "packed" else 1)))
    if job.method == "pretrain":
        rows = [{"input_ids": row["input_ids"]} for row in rows]
    dataset: Any = Dataset.from_list(rows)
    options = {
        "dataset": dataset.to_iterable_dataset() if "streaming" in job.extras else dataset,
        "bf16": False,
        "max_length": 48 if job.packing != "padding_free" else None,
        "packing": job.packing == "packed",
        "padding_free": job.packing != "",
        "completion_only_loss": job.method == "sft",
        **({"loss_type": job.loss} if job.loss else {}),
    }
    return SFTTrainer, SFTConfig, {"processing_class": tokenizer()}, options


def _preferences(trainer: str, package: str, **more: Any) -> Any:
    import importlib

    module = importlib.import_module(package)
    options = {"dataset": preferences(8 * STEPS), "bf16": False, **more}
    return getattr(module, f"{trainer}Trainer"), getattr(module, f"{trainer}Config"), _tokens(), options


def _tokens() -> dict[str, Any]:
    return {"processing_class": tokenizer()}


def _dpo(job: Job) -> Any:
    losses = job.loss.split()
    weights = {"loss_weights": [1.0, *[0.1] * (len(losses) - 1)]} if len(losses) > 1 else {}
    made = _preferences("DPO", "trl", beta=0.5, loss_type=losses, **weights)
    if not job.adapter:  # which TRL would load by the name of the model
        made[2]["ref_model"] = _plain_model(job)
    return made


def _kto(job: Job) -> Any:
    from datasets import Dataset

    made = _preferences("KTO", "trl", beta=0.5)
    rows = [
        {"prompt": pair["prompt"], "completion": pair["chosen" if i % 3 else "rejected"], "label": bool(i % 3)}
        for i, pair in enumerate(preferences(8 * STEPS))
    ]
    made[3]["dataset"] = Dataset.from_list(rows)
    if not job.adapter:
        made[2]["ref_model"] = _plain_model(job)
    return made


def _gkd(job: Job) -> Any:
    from tests.integration.trainer.test_trl import chats

    made = _preferences("GKD", "trl.experimental.gkd", lmbda=0.0, beta=0.3)
    made[3]["dataset"] = chats(8 * STEPS)
    teacher = _plain_model(dataclasses.replace(job, extras=()))
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.5)
    made[2]["teacher_model"] = teacher.eval()
    return made


def _classification(job: Job) -> Any:
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

    rows = [{"input_ids": row["input_ids"], "labels": number % 3} for number, row in enumerate(_rows(8 * STEPS))]
    more = {"data_collator": DataCollatorWithPadding(tokenizer()), **_tokens()}
    return Trainer, TrainingArguments, more, {"dataset": rows}


_METHODS: dict[str, Any] = {
    "sft": _sft,
    "pretrain": _sft,
    "dpo": _dpo,
    "kto": _kto,
    "gkd": _gkd,
    "classification": _classification,
    "reward": lambda job: _preferences("Reward", "trl"),
    "orpo": lambda job: _preferences("ORPO", "trl.experimental.orpo", beta=0.5),
    "cpo": lambda job: _preferences("CPO", "trl.experimental.cpo", beta=0.5),
    "simpo": lambda job: _preferences("CPO", "trl.experimental.cpo", beta=0.5, loss_type="simpo", cpo_alpha=0.0),
}


# --- images -------------------------------------------------------------------------------------------


def _image_batches(model: Any) -> list[dict[str, Tensor]]:
    """Two rows each, with an image or sound for both where the model takes one of the usual shapes."""
    from tests.integration.sweep_images import images_for

    made = []
    for number in range(2 * STEPS):
        generator = torch.Generator().manual_seed(10 + number)
        ids = torch.randint(6, VOCAB - 8, (2, 96), generator=generator)
        batch = {"input_ids": ids, "labels": ids.clone()}
        batch |= images_for(model, batch)
        batch["labels"][:, : 4 + 3 * number] = -100
        made.append(batch)
    return made


def _train_images(job: Job, sharing: str) -> Trained | Outcome:
    """In a loop of its own, with the arguments of the recipe; batches with images are not cut by rows here."""
    import deepspeed

    import ds_hetero

    if sharing == "batches":
        return Outcome("not run", "rows of a batch with images are cut by a processor's collator")
    batches = _image_batches(_plain_model(job).double())
    model = _model(job)
    if job.base:  # packed 4-bit weights stand in 32-bit storage, which may not be cast
        dtype = torch.get_default_dtype()
        batches = [{name: v.to(dtype) if v.is_floating_point() else v for name, v in of.items()} for of in batches]
    else:
        model = model.double()  # towers add up many products: rounding of 32 bits comes near to the tolerance
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=_RATE, eps=_EPS)
    if job.recompute:
        options = {"use_reentrant": job.recompute == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        if job.adapter:
            model.enable_input_require_grads()
    if not sharing:
        return _loop(model, optimizer, batches)
    handle = ds_hetero.register()
    config = {**_config(job, sharing, model), "train_micro_batch_size_per_gpu": 2}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses, norms, part = [], [], []
    for batch in handle.for_engine(engine).dataloader(batches, batches="same"):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        part.append(loss.item())
        if len(part) == 2:
            losses.append(sum(part) / 2)
            norms.append(float(engine.get_global_grad_norm() or 0))
            part = []
    values = parameters(model, job.stage)
    engine.destroy()
    return Trained(losses, norms, values)


def _loop(model: Any, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> Trained:
    """One process; a parameter that no loss reaches has a gradient of zeros, as under ZeRO, so that AdamW decays it."""
    losses, norms = [], []
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        optimizer.zero_grad()
        loss = (model(**first).loss + model(**second).loss) / 2
        loss.backward()
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norms.append(float(nn.utils.clip_grad_norm_(trained, 1.0)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return Trained(losses, norms, parameters(model))
