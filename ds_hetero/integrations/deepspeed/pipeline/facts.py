"""What the search for pipelines needs to know of a model and its training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ds_hetero.integrations.deepspeed.facts import read_training_facts, section_of
from ds_hetero.integrations.transformers.facts import describe_model
from ds_hetero.integrations.transformers.stages import check_cuttable, impossible_inners
from ds_hetero.job.decide_pipelines import PipelineFacts
from ds_hetero.job.facts import JobFacts

__all__ = ["read_pipeline_facts"]


def read_pipeline_facts(model: nn.Module, ds_config: Mapping[str, Any]) -> PipelineFacts:
    """Read what this rank knows of a job whose pipelines are searched for.

    Raises:
        ConfigError: the section is wrong.
        ModelError: the model cannot be cut into stages.
    """
    section = section_of(ds_config)
    assert section is not None
    check_cuttable(model)
    job = JobFacts(section=section, model=describe_model(model), training=read_training_facts(ds_config))
    return PipelineFacts(job=job, no_inners=impossible_inners(model))
