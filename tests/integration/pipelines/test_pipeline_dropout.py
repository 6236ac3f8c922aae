"""Dropout in tensor stages: one process that draws from the states of the stages' first ranks computes the same."""

import pytest
import torch
from torch import nn

from ds_hetero.errors import ModelError
from ds_hetero.frameworks.transformers.model.model_checks import pretrained_of
from ds_hetero.frameworks.transformers.stages import check_cuttable, impossible_stage_kinds
from tests.integration.pipelines.test_pipelines import LAYERS, PLANS, adamw, batches, trained
from tests.integration.tiny import VOCAB, checkpoint_activations, compute_in, llama
from tests.support import run_deepspeed

SEED = 40
WORDS = VOCAB + 3  # which no degree divides
PLAN = PLANS["tensor at both ends"]


def adapted():
    """A Llama with dropout in attention, and adapters with dropout before layers that are cut either way."""
    from peft import LoraConfig, get_peft_model

    model = llama(num_hidden_layers=LAYERS, vocab_size=WORDS, attn_implementation="eager", attention_dropout=0.2)
    torch.manual_seed(1)
    targets = ["q_proj", "o_proj", "gate_proj", "down_proj"]
    return get_peft_model(
        model, LoraConfig(r=4, target_modules=targets, lora_dropout=0.3, init_lora_weights=False)
    ).double()


def phi():
    """Dropout of the embedding and of the residual stream, by modules."""
    return other("Phi", embd_pdrop=0.1, resid_pdrop=0.2, attention_dropout=0.2)


def starcoder2():
    """Dropout of the residual stream, by functions inside the modules that are cut."""
    return other("Starcoder2", residual_dropout=0.2, attention_dropout=0.2)


def other(family, **changes):
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    options = {"vocab_size": WORDS, "num_hidden_layers": LAYERS, "tie_word_embeddings": False, **sizes, **changes}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**options, attn_implementation="eager")
    return getattr(transformers, f"{family}ForCausalLM")(config).double()


MODELS = {"adapters": adapted, "phi": phi, "starcoder2": starcoder2}


class StageDraws:
    """Lets one process draw what the stages of a plan do, each from a state of its own."""

    def __init__(self, model, plan):
        self._stages = [pipeline["stages"] for pipeline in plan["pipelines"]]
        generator = torch.Generator()
        self._states = {
            (i, j): generator.manual_seed(SEED + min(stage["ranks"])).get_state()
            for i, stages in enumerate(self._stages)
            for j, stage in enumerate(stages)
        }
        self._now = None
        for number, layer in enumerate(pretrained_of(model).base_model.layers):
            layer.register_forward_pre_hook(lambda *_, number=number: self._reach(number))

    def begin(self, pipeline):
        """A micro-batch of a pipeline begins, with its first stage."""
        self._enter(pipeline, 0)

    def _reach(self, layer):
        i, j = self._now
        if layer == self._stages[i][j]["layers"][1]:
            self._enter(i, j + 1)

    def _enter(self, i, j):
        if self._now is not None:
            self.end()
        self._now = i, j
        torch.set_rng_state(self._states[i, j])
        if self._is_tensor():
            seed = torch.randint(2**62, (1,))
            self._states[i, j] = torch.get_rng_state()
            torch.manual_seed(int(seed))

    def end(self):
        """The last stage has ended."""
        if not self._is_tensor():
            self._states[self._now] = torch.get_rng_state()
        self._now = None

    def _is_tensor(self):
        i, j = self._now
        return self._stages[i][j].get("inner") == "tensor"


def train_alone(model, plan, steps, optimizer):
    """Losses and norms of one process, micro-batch after micro-batch."""
    draws, losses, norms = StageDraws(model, plan), [], []
    for batch in steps:
        shifted = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        total, start = 0.0, 0
        for i, pipeline in enumerate(plan["pipelines"]):
            for _ in range(pipeline["micro_batches"]):
                rows = slice(start, start := start + pipeline["micro_batch_size"])
                draws.begin(i)
                logits = model(input_ids=batch["input_ids"][rows], use_cache=False).logits
                draws.end()
                loss = (
                    nn.functional.cross_entropy(
                        logits.flatten(0, 1), shifted[rows].flatten(), ignore_index=-100, reduction="sum"
                    )
                    / (shifted != -100).sum()
                )
                loss.backward()
                total += loss.item()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms


def drops_as_one_process(rank, name, recomputes):
    """The largest difference of a loss, a norm or a parameter, and the losses."""
    import deepspeed

    import ds_hetero

    compute_in(torch.float64)
    whole, model = (MODELS[name]().train() for _ in range(2))
    steps = batches(PLAN, 3, False)
    losses, norms = train_alone(whole, PLAN, steps, adamw(trained(whole)))
    if recomputes:
        checkpoint_activations(model, reentrant=False)
    handle = ds_hetero.register()
    config = {"gradient_clipping": 0.5, "heterogeneity": {"schedule": PLAN}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(trained(model)), config=config)
    torch.manual_seed(SEED + rank)
    worst = 0.0
    for batch, loss, norm in zip(handle.for_engine(engine).dataloader(steps), losses, norms, strict=True):
        ours = engine(**batch).loss
        engine.backward(ours)
        engine.step()
        worst = max(worst, abs(ours.item() - loss), abs(engine.get_global_grad_norm() - norm))
    expected = dict(whole.named_parameters())
    for at, parameter in model.named_parameters():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        worst = max(worst, (full - expected[at]).detach().abs().max().item())
    engine.destroy()
    return worst


@pytest.mark.parametrize(
    ("name", "recomputes"), [("adapters", False), ("adapters", True), ("phi", False), ("starcoder2", False)]
)
def test_ranks_of_a_tensor_stage_drop_what_one_process_drops(name, recomputes):
    """Adapters under NCCL's rules, too."""
    rules = name == "adapters"
    assert max(run_deepspeed(drops_as_one_process, 5, name, recomputes, nccl_rules=rules)) < 1e-12


def test_dropout_inside_a_kernel_of_attention_is_refused_in_tensor_stages():
    reasons = impossible_stage_kinds(llama(attention_dropout=0.1))
    assert "dropout inside 'sdpa' attention: a rank cannot draw" in reasons["tensor"]
    assert "tensor" not in impossible_stage_kinds(llama(attention_dropout=0.1, attn_implementation="eager"))


def test_dropout_between_stages_is_refused_whatever_the_mode_of_the_model():
    """Every stage would drop elements of the hidden states once more."""
    model = other("Starcoder2", embedding_dropout=0.1).eval()
    with pytest.raises(ModelError, match="changes the hidden states outside its layers"):
        check_cuttable(model)
    assert not model.training
