"""Modules that the fork server of `ranks` imports once, so that no rank imports them and no measurement contains it."""

from __future__ import annotations

import deepspeed
import sympy  # noqa: F401  torch imports it in a process's first backward with a given gradient: 0.3 s
import transformers.models.llama.modeling_llama  # noqa: F401
from deepspeed.runtime.sequence_parallel import ulysses_sp  # noqa: F401
from torch.distributed.tensor.experimental import _attention  # noqa: F401

import ds_hetero.registration  # noqa: F401

# DeepSpeed's shared-memory all_reduce, for inference on one machine, would be compiled first; nothing here uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
