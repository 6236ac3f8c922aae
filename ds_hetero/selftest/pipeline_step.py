"""Train one optimizer step of a small Llama in pipelines, and compare it with the same step in one process.

Every stage is one rank. The step is tried in the 16-bit type of training, and in float32 with tied embeddings, which
the first and the last stage share.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

import ds_hetero
from ds_hetero.common.extras import TRAINING_PACKAGES, require
from ds_hetero.common.reading import JsonDict
from ds_hetero.errors import HeteroError
from ds_hetero.selftest.lines import Line
from ds_hetero.selftest.lone_stages import NUM_LAYERS, lone_stages
from ds_hetero.selftest.one_process import (
    CLIP,
    batch_of,
    compare_steps,
    optimizer_of,
    precision,
    train_alone,
    warnings_only,
)
from ds_hetero.selftest.session import Session
from ds_hetero.selftest.uneven_schedules import NUM_HEADS, NUM_KV_HEADS
from ds_hetero.values.plans import Plan

_TIMES = 4.0  # limits of a call that a step may take: DeepSpeed is imported, and the first batch is checked
_TOKENS = 37  # of a sequence


def check_pipelines(session: Session) -> Iterator[Line]:
    """Yield two lines: a model with its own head, and a model whose head is tied to the embedding."""
    try:
        require(*TRAINING_PACKAGES, purpose="training")
    except HeteroError as error:
        yield Line("pipeline step", "skip", str(error))
        return
    if session.size == 1:
        yield Line("pipeline step", "skip", "one process has one stage")
        return
    from ds_hetero.frameworks.transformers.model.small_llama import VOCAB_SIZE, llama_of

    plan = lone_stages(session.size)
    assert plan.batch_split is not None
    batch = batch_of(_TOKENS, VOCAB_SIZE, plan.batch_split.samples)
    # Pipelines do not train in float16.
    dtype = session.trained_dtype if session.trained_dtype is torch.bfloat16 else torch.float32
    for name, is_tied, step_dtype in (
        ("pipeline step", False, dtype),
        ("pipeline step, tied embedding", True, torch.float32),
    ):
        model = llama_of(NUM_HEADS, NUM_KV_HEADS, _TOKENS, num_layers=NUM_LAYERS, is_tied=is_tied)
        with session.watch.call(name, times=_TIMES), warnings_only():
            try:
                expected = train_alone(model, batch, session.device, step_dtype)
                step_tensors = _train(copy.deepcopy(model), plan, batch, step_dtype)
                is_right, detail = compare_steps(step_tensors, expected, step_dtype)
            except HeteroError as error:  # raised on all ranks
                is_right, detail = False, f"{type(error).__name__}: {error}"
        if is_right:
            yield Line(name, "pass", f"{_stages_text(plan)}: {detail}")
        else:
            yield Line(name, "fail", detail)


def _train(model: nn.Module, plan: Plan, batch: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Train the step; return the loss, the gradient norm, and the weights of this rank's stage."""
    from ds_hetero.frameworks.deepspeed.small_job import train_one_pipelined_step

    config: JsonDict = {
        "gradient_clipping": CLIP,
        "zero_allow_untested_optimizer": True,
        **precision(dtype),
        "heterogeneity": {"schedule": plan.to_dict()},
    }
    model.train()
    step = train_one_pipelined_step(ds_hetero.register(), model, optimizer_of(model.parameters()), batch, config)
    weights = dict(step.parameters)
    if getattr(model.config, "tie_word_embeddings", False):
        # The model in one process has a tied head under the embedding's name alone.
        weights = {name.replace("lm_head", "model.embed_tokens"): tensor for name, tensor in weights.items()}
    return {"the loss": torch.tensor(step.loss), "the gradient norm": torch.tensor(step.grad_norm), **weights}


def _stages_text(plan: Plan) -> str:
    """Return the number of stages of every pipeline, as ``"stages 4+2"``."""
    return "stages " + "+".join(str(len(pipeline.stages)) for pipeline in plan.pipelines)
