"""Modules that the fork server of `benchmarks.first_gpu.crew` imports once; none of them may call CUDA.

Forked processes cannot use CUDA after a call of their parent. Whether they can use it is tried before the first part.
"""

from __future__ import annotations

import os

import deepspeed
import sympy  # noqa: F401  torch imports it in a process's first backward with a given gradient
import transformers.models.llama.modeling_llama  # noqa: F401

import ds_hetero.frameworks.transformers.model.facts
import ds_hetero.frameworks.transformers.model.small_llama
import ds_hetero.registration
import ds_hetero.selftest.run  # noqa: F401

if os.environ.get("DS_ACCELERATOR") == "cpu":  # its extension would be compiled first, for a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
