"""One optimizer step of a small Llama in pipelines of lone stages, against the same step in one process.

It is tried in the 16-bit type of training, and in float32 with an embedding that the first and the last stage share.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

import ds_hetero
from ds_hetero.common.extras import TRAINING, require
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

_TIMES = 4.0  # the limit of a call: DeepSpeed is imported, and the first batch is checked
_TOKENS = 37  # of a sequence


def check_pipelines(session: Session) -> Iterator[Line]:
    """Yield one line without, one with a tied embedding."""
    try:
        require(*TRAINING, purpose="training")
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
    for name, is_tied, of_step in (
        ("pipeline step", False, dtype),
        ("pipeline step, tied embedding", True, torch.float32),
    ):
        model = llama_of(NUM_HEADS, NUM_KV_HEADS, _TOKENS, num_layers=NUM_LAYERS, is_tied=is_tied)
        with session.watch.call(name, times=_TIMES), warnings_only():
            try:
                expected = train_alone(model, batch, session.device, of_step)
                found = _train(copy.deepcopy(model), plan, batch, of_step)
                is_right, detail = compare_steps(found, expected, of_step)
            except HeteroError as error:  # raised on all ranks
                is_right, detail = False, f"{type(error).__name__}: {error}"
        yield Line(name, "pass" if is_right else "fail", detail if not is_right else f"{_shape(plan)}: {detail}")


def _train(model: nn.Module, plan: Plan, batch: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Loss, gradient norm, and the weights that this rank holds."""
    from ds_hetero.frameworks.deepspeed.small_job import train_one_pipelined_step

    config: JsonDict = {
        "gradient_clipping": CLIP,
        "zero_allow_untested_optimizer": True,
        **precision(dtype),
        "heterogeneity": {"schedule": plan.to_dict()},
    }
    model.train()
    step = train_one_pipelined_step(ds_hetero.register(), model, optimizer_of(model.parameters()), batch, config)
    # A head that is tied to the embedding has the embedding's name in a whole model.
    tied = {name: name.replace("lm_head", "model.embed_tokens") for name in step.parameters}
    is_tied = bool(getattr(model.config, "tie_word_embeddings", False))
    weights = {tied[name] if is_tied else name: tensor for name, tensor in step.parameters.items()}
    return {"the loss": torch.tensor(step.loss), "the gradient norm": torch.tensor(step.grad_norm), **weights}


def _shape(plan: Plan) -> str:
    """Return the stages as ``"stages 4+2"``."""
    return "stages " + "+".join(str(len(pipeline.stages)) for pipeline in plan.pipelines)
