"""LoRA and QLoRA in pipelines of two and three unequal stages, each of which quantizes its own layers alone.

They train as on one process, go on under another plan, and are saved as PEFT saves them.

Budget: 60 s.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_hetero.errors import CheckpointError, ModelError
from ds_hetero.frameworks.deepspeed.pipeline.checkpoints import frozen_state, load_frozen
from ds_hetero.frameworks.transformers.stages import StageModel, check_stages
from ds_hetero.frameworks.transformers.stages.adapter_files import adapter_tensors
from ds_hetero.runtime.data.shards import read_batch
from ds_hetero.runtime.packed_weights import is_packed
from ds_hetero.runtime.pipeline.batches import StageBatch
from ds_hetero.values.plans import Plan, read_plan
from tests.integration.models.test_adapters import EXACT
from tests.integration.pipelines.test_pipelines import (
    LAYERS,
    adamw,
    batches,
    pipeline,
    plan_of,
    sequence_stage,
    train,
    trained,
)
from tests.integration.tiny import ds_config, llama, samples
from tests.integration.trainer.test_trainer import assert_same_logs, logged, make_trainer, one_process, ranks
from tests.support import run_deepspeed

# PEFT asks for it.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

PLANS = {
    "two stages": plan_of(pipeline(2, 3, {"ranks": [0], "layers": [0, 3]}, {"ranks": [1], "layers": [3, 4]})),
    "three stages": plan_of(
        pipeline(
            1,
            6,
            {"ranks": [2], "layers": [0, 1]},
            {"ranks": [0], "layers": [1, 3]},
            {"ranks": [1], "layers": [3, 4]},
        )
    ),
    "a stage that shares sequences": plan_of(
        pipeline(2, 3, sequence_stage([0, 1], [0, 3], [3, 1], [3, 1]), {"ranks": [2], "layers": [3, 4]})
    ),
}
STEPS, GLOBAL = 2, 6
FP32, FP64 = torch.float32, torch.float64


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("base")
    llama(hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS).save_pretrained(folder)
    return str(folder)


def four_bits() -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=FP32
    )


def lora(**options: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules="all-linear", **options)


def whole_model(weights: str, bits: int, dtype: torch.dtype = FP32) -> Any:
    """The model of one process, with its adapters."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    quantized = {"quantization_config": four_bits(), "device_map": {"": "cpu"}} if bits == 4 else {}
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=FP32, **quantized)
    torch.manual_seed(1)
    return in_dtype(get_peft_model(model, lora()), dtype)


def model_of_stages(weights: str, bits: int, dtype: torch.dtype = FP32) -> Any:
    """The same model without weights: every rank reads and quantizes those of its stage."""
    import ds_hetero

    torch.manual_seed(1)
    quantization = four_bits() if bits == 4 else None
    model = ds_hetero.empty_model(weights, adapters=lora(), quantization_config=quantization, dtype=FP32)
    return in_dtype(model, dtype)


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """Cast all but the weights of 4 bits, which bitsandbytes quantizes from fp32 at most."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and not is_packed(parameter):
            parameter.data = parameter.data.to(dtype)
    return model.train()


def started(plan: Any, model: Any, **section: Any) -> Any:
    import deepspeed

    config = {"gradient_clipping": 0.5, "heterogeneity": {"schedule": plan, **section}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(trained(model)), config=config)
    return engine


def train_by_micro_batches(model: Any, plan: Any, steps: list[Any]) -> list[float]:
    """Losses of one process with the micro-batches of the plan, so that every product has the same shape."""
    (stages,) = plan["pipelines"]
    optimizer, losses = adamw(trained(model)), []
    for batch in steps:
        labels = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        count, loss_sum = int((labels != -100).sum()), 0.0
        size = stages["micro_batch_size"]
        for ids, targets in zip(batch["input_ids"].split(size), labels.split(size), strict=True):
            logits = model(input_ids=ids, use_cache=False).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count
            loss.backward()
            loss_sum += loss.item()
        nn.utils.clip_grad_norm_(trained(model), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss_sum)
    return losses


def worst_difference(model: Any, whole: Any) -> float:
    expected = dict(whole.named_parameters())
    differences = [
        (parameter - expected[name]).detach().abs().max().item()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    return max(differences, default=0.0)


def stages_of(weights: str, bits: int, dtype: torch.dtype, plan: Plan) -> list[StageModel]:
    """All stages of the only pipeline of a plan, in this process."""
    stages = []
    for stage in plan.pipelines[0].stages:
        model = model_of_stages(weights, bits, dtype)
        check_stages(model, plan)
        made = StageModel(model, plan, stage.ranks[0])
        made.fill(torch.device("cpu"))
        stages.append(made)
    return stages


def run_stages(stages: list[StageModel], batch: Any) -> float:
    """Run a batch forward and backward through all stages, as the runner of pipelines does; return its loss."""
    whole = read_batch(batch)
    count = int((whole.sequences["shift_labels"] != -100).sum())
    micro_batch = StageBatch(batch=whole, scale=1 / count)
    inputs: list[Any] = [None]
    outputs = []
    for stage in stages:
        outputs.append(stage(micro_batch, inputs[-1]))
        inputs.append(outputs[-1].detach().requires_grad_())
    outputs[-1].backward()
    for output, received in zip(outputs[-2::-1], inputs[-2:0:-1], strict=True):
        output.backward(received.grad)
    return outputs[-1].item()


@pytest.mark.parametrize("name", ["two stages", "three stages"])
@pytest.mark.parametrize("bits", [4, 32])
def test_stages_one_after_the_other_compute_what_the_whole_model_does(weights: str, bits: int, name: str) -> None:
    """Gradients of adapters to 1e-10 in fp64; a stage holds its own weights, and the constants of these, alone."""
    plan = read_plan(PLANS[name])
    whole, stages = whole_model(weights, bits, FP64), stages_of(weights, bits, FP64, plan)
    (batch,) = batches(PLANS[name], 1, False)
    logits = whole(input_ids=batch["input_ids"], use_cache=False).logits
    labels = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    loss.backward()
    assert run_stages(stages, batch) == pytest.approx(loss.item(), abs=1e-12)
    expected = dict(whole.named_parameters())
    seen = set()
    for stage in stages:
        for key, parameter in stage.parameters().items():
            assert torch.equal(parameter.data, expected[key].data) if not parameter.is_meta else False
            if parameter.requires_grad:
                assert (parameter.grad - expected[key].grad).abs().max() < 1e-10
                seen.add(key)
        layers = [module for module in stage.model.modules() if getattr(module, "quant_state", None) is not None]
        assert len(layers) == (7 * stage_layers(plan, stage) if bits == 4 else 0)
    assert seen == {key for key, parameter in expected.items() if parameter.requires_grad}


def stage_layers(plan: Plan, stage: StageModel) -> int:
    """Number of layers of a stage."""
    own = plan.stage_of(stage._rank)
    assert own is not None
    return own.num_layers


SHARED_BY_LAYERS = {"VBLORA": "vector_bank", "UNILORA": "theta_d", "TINYLORA": "tinylora_v"}
"""Adapters of which layers share trained weights, and the names of these."""

SOME_KINDS = ("VERA", "RANDLORA", "IA3", "LOHA", "OFT")  # frozen weights are shared, or none


def with_adapters_of_kind(name: str) -> Any:
    """A Llama of four layers in fp64, with adapters that change what it computes."""
    from peft import get_peft_model

    torch.manual_seed(2)
    model = get_peft_model(llama(num_hidden_layers=LAYERS), config_of(name)).double().train()
    for parameter in trained(model):
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def config_of(name: str) -> Any:
    from peft import PeftType
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    return PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(name)](**EXACT[name])


def stage_gradients_against_one_process(make: Any) -> float:
    """Largest difference of a gradient of adapters, stage after stage in this process, from the whole model."""
    plan = read_plan(PLANS["two stages"])
    whole, stages = make(), []
    for stage in plan.pipelines[0].stages:
        model = make()
        check_stages(model, plan)
        stages.append(StageModel(model, plan, stage.ranks[0]))
    (batch,) = batches(PLANS["two stages"], 1, False)
    logits = whole(input_ids=batch["input_ids"], use_cache=False).logits
    labels = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    run_stages(stages, batch)
    expected = {name: p.grad for name, p in whole.named_parameters() if p.requires_grad and p.grad is not None}
    found = {
        name: p.grad
        for stage in stages
        for name, p in stage.parameters().items()
        if p.requires_grad and p.grad is not None
    }
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.parametrize("name", SOME_KINDS)
def test_adapters_with_weights_of_one_layer_are_exact_in_stages(name: str) -> None:
    assert stage_gradients_against_one_process(lambda: with_adapters_of_kind(name)) < 1e-10


@pytest.mark.parametrize("name", SHARED_BY_LAYERS)
def test_adapters_whose_weights_layers_share_are_refused_by_name(name: str) -> None:
    with pytest.raises(ModelError, match=rf"\({name}\) share trained weights between layers.*{SHARED_BY_LAYERS[name]}"):
        check_stages(with_adapters_of_kind(name), read_plan(PLANS["two stages"]))


def whole_kinds() -> list[str]:
    """All kinds that are exact on shards and have weights of one layer."""
    left_out = {*SOME_KINDS, *SHARED_BY_LAYERS, "LORA", "ADALORA"}
    return [name for name in EXACT if "." not in name and name not in left_out]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of merging, of kernels for CUDA, and of sparse tensors
@pytest.mark.parametrize("name", whole_kinds())
def test_every_other_kind_is_exact_in_stages_or_refused(name: str) -> None:
    """What is accepted computes the gradients of one process."""
    try:
        check_stages(with_adapters_of_kind(name), read_plan(PLANS["two stages"]))
    except ModelError as error:
        assert name in str(error)
        return
    assert stage_gradients_against_one_process(lambda: with_adapters_of_kind(name)) < 1e-10


def test_parts_of_adapters_are_together_what_peft_saves(weights: str) -> None:
    from peft import get_peft_model_state_dict

    whole = whole_model(weights, 4)
    joined: dict[str, Any] = {}
    for stage in stages_of(weights, 4, FP32, read_plan(PLANS["three stages"])):
        joined |= adapter_tensors(stage.model, "default", stage.parameters())
    expected = get_peft_model_state_dict(whole)
    assert joined.keys() == expected.keys()
    assert all(torch.equal(joined[name], expected[name]) for name in expected)


def test_checkpoints_have_checksums_of_four_bit_weights(weights: str) -> None:
    """A stage that quantized the same weights loads; one of other weights, or without quantization, does not."""
    plan = read_plan(PLANS["two stages"])
    first, _ = stages_of(weights, 4, FP32, plan)
    saved = frozen_state(SimpleNamespace(stage=first), None)  # type: ignore[arg-type]
    packed = [name for name, parameter in first.parameters().items() if is_packed(parameter)]
    assert len(packed) == 3 * 7 and all(saved[name].shape == () for name in packed)
    again, _ = stages_of(weights, 4, FP32, plan)
    load_frozen(SimpleNamespace(stage=again), [{"module": saved}], is_strict=True)
    other = {**saved, packed[0]: saved[packed[0]] + 1}
    plain, _ = stages_of(weights, 32, FP32, plan)
    for stage, content in ((again, other), (plain, saved)):
        with pytest.raises(CheckpointError, match="same quantization"):
            load_frozen(SimpleNamespace(stage=stage), [{"module": content}], is_strict=True)


def errors_by_case(rank: int, weights: str, cases: list[tuple[str, int, torch.dtype]]) -> dict[Any, float]:
    """By plan, bits and data type: the largest difference of a loss or of a value of an adapter from one process."""
    import ds_hetero

    handle = ds_hetero.register()
    errors = {}
    for case in cases:
        name, bits, dtype = case
        plan = PLANS[name]
        steps = batches(plan, STEPS, False)
        whole, model = whole_model(weights, bits, dtype), model_of_stages(weights, bits, dtype)
        engine = started({**plan, "activation_checkpointing": name == "two stages"}, model)
        losses = train(handle.for_engine(engine), engine, steps)
        expected = train_by_micro_batches(whole, plan, steps)
        assert any(parameter.requires_grad for parameter in model.parameters()) or rank not in ranks_of(plan)
        of_losses = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        errors[case] = max(of_losses, worst_difference(model, whole))
        engine.destroy()
    return errors


def ranks_of(plan: Any) -> set[int]:
    return set(read_plan(plan).ranks)


def test_adapters_train_in_stages_as_on_one_process(weights: str) -> None:
    """In fp64 the products of 4-bit weights are in fp32 all the same; those of equal shape have equal bits."""
    cases = [(name, 4, FP64) for name in ("two stages", "three stages")]
    cases += [("a stage that shares sequences", 4, FP32), ("three stages", 32, FP32)]
    for errors in run_deepspeed(errors_by_case, 3, weights, cases, timeout_s=300):
        for (name, bits, dtype), error in errors.items():
            assert error < (1e-10 if dtype is FP64 else 1e-5), (name, bits, dtype, error)


def move_save_and_load(rank: int, weights: str, folder: str) -> Any:
    """Train under one plan, go on under another; what is refused; what a rank holds."""
    import ds_hetero
    from ds_hetero.errors import CheckpointError, HeteroError

    handle = ds_hetero.register()
    steps = batches(PLANS["two stages"], STEPS + 1, False)
    model = model_of_stages(weights, 4)
    engine = started(PLANS["three stages"], model)
    held_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    train(handle.for_engine(engine), engine, steps[:STEPS])
    engine.save_checkpoint(f"{folder}/checkpoint")
    handle.registry.find_stage(model).save_pretrained(f"{folder}/adapters")
    engine.destroy()
    engine = started(PLANS["two stages"], model_of_stages(weights, 4))
    engine.load_checkpoint(f"{folder}/checkpoint")
    (loss,) = train(handle.for_engine(engine), engine, steps[STEPS:])
    engine.destroy()

    refused = []
    for kind, section in ((lambda: model_of_stages(weights, 4), {"replan": {"enabled": True}}), (eight_bits, {})):
        with pytest.raises(HeteroError) as caught:
            started(PLANS["two stages"], kind(weights) if kind is eight_bits else kind(), **section)
        refused.append(str(caught.value))
    engine = started(PLANS["two stages"], model_of_stages(weights, 32))
    with pytest.raises(CheckpointError) as caught_load:
        engine.load_checkpoint(f"{folder}/checkpoint")
    engine.destroy()
    refused.append(str(caught_load.value))
    return loss, held_bytes, refused


def eight_bits(weights: str) -> Any:
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(weights, quantization_config=settings, device_map={"": "cpu"})
    return get_peft_model(model, lora()).train()


def test_qlora_goes_on_under_another_plan_and_is_saved_as_peft_saves_it(weights: str, tmp_path: Path) -> None:
    from peft import PeftModel

    whole = whole_model(weights, 4)
    steps = batches(PLANS["two stages"], STEPS + 1, False)
    losses = train_by_micro_batches(whole, PLANS["two stages"], steps)
    outcomes = run_deepspeed(move_save_and_load, 3, weights, str(tmp_path))
    for loss, held_bytes, refused in outcomes:
        assert loss == pytest.approx(losses[-1], abs=1e-5)
        assert held_bytes < sum(p.numel() * p.element_size() for p in whole.parameters() if not p.requires_grad)
        assert '"replan" out' in refused[0] and "4 bits" in refused[0]
        assert "load_in_8bit" in refused[1] and "4-bit weights" in refused[1]
        assert "same quantization" in refused[2]

    two_steps = whole_model(weights, 4)
    train_by_micro_batches(two_steps, PLANS["two stages"], steps[:STEPS])
    loaded = PeftModel.from_pretrained(whole_model(weights, 4).unload(), str(tmp_path / "adapters"), is_trainable=True)
    assert worst_difference(loaded, two_steps) < 1e-5
    assert len(trained(loaded)) == len(trained(two_steps)) == 2 * 7 * LAYERS
    assert (
        sorted(path.name for path in (tmp_path / "adapters").iterdir())
        == [
            "README.md",
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        or not (tmp_path / "adapters" / "README.md").exists()
    )


def train_sft(rank: int, plan: Any, weights: str, folder: str) -> Any:
    """Logs of TRL's SFT of QLoRA, which saves its adapters; every rank quantizes its stage alone."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    import ds_hetero

    ds = None
    if plan is not None:
        ds_hetero.register()
        ds = ds_config(1, plan, train_micro_batch_size_per_gpu=GLOBAL, gradient_accumulation_steps=1)
    trainer = make_trainer(
        ds,
        2,
        SFTTrainer,
        config=SFTConfig,
        model=whole_model(weights, 4) if plan is None else model_of_stages(weights, 4),
        dataset=Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in samples(2 * GLOBAL)]),
        per_device_train_batch_size=GLOBAL,
        gradient_accumulation_steps=1,
        num_train_epochs=1,
        max_length=32,
        bf16=False,
        gradient_checkpointing=False,
    )
    in_dtype(trainer.model, FP32)  # TRL casts adapters on quantized weights to bf16, in which one process also steps
    trainer.train()
    trainer.save_model(folder)
    return logged(trainer)


@pytest.mark.slow
def test_trl_trains_qlora_in_stages_as_on_one_process_and_saves_its_adapters(weights: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    expected = one_process(train_sft, None, weights, str(tmp_path / "one"))
    for logs in ranks(train_sft, 2, PLANS["two stages"], weights, str(tmp_path / "two")):
        assert_same_logs(logs, expected)
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("two", "one"))
    assert ours.keys() == theirs.keys()
    assert max((ours[name] - theirs[name]).abs().max().item() for name in theirs) < 1e-5


def test_adapters_that_stages_would_not_train_are_refused_by_name(weights: str) -> None:
    from peft import AdaLoraConfig, PromptTuningConfig, get_peft_model

    import ds_hetero
    from ds_hetero.frameworks.transformers.stages import check_cuttable, impossible_stage_kinds

    def refusal(config: Any) -> str:
        with pytest.raises(ModelError) as caught:
            check_cuttable(get_peft_model(llama(num_hidden_layers=LAYERS), config))
        return str(caught.value)

    ada = AdaLoraConfig(target_modules=["q_proj"], total_step=10)
    assert "'default', ADALORA: it adds a term to the loss" in refusal(ada)
    assert "PROMPT_TUNING" in refusal(PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    for options in ({"use_dora": True}, {"init_lora_weights": "pissa"}):
        with pytest.raises((ModelError, NotImplementedError, RuntimeError)) as caught:
            ds_hetero.empty_model(weights, adapters=lora(**options))
        assert "first values of" in str(caught.value), options
    assert "packs" in impossible_stage_kinds(whole_model(weights, 4))["tensor"]
