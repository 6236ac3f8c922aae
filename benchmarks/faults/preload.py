"""Modules that the fork server imports once, so that a rank starts in a second; see `benchmarks.faults.world`."""

from __future__ import annotations

import accelerate  # noqa: F401
import deepspeed.module_inject
import deepspeed.moe.layer
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
import torchdata.stateful_dataloader  # noqa: F401
import transformers.trainer  # noqa: F401

import benchmarks.faults.training
import benchmarks.measure.preload  # noqa: F401
