"""Modules that the fork server of `support` imports for integration tests, so that ranks need not import them.

The import also compiles and loads DeepSpeed's shared-memory extension. Otherwise every rank would do so at its start:
it takes over a minute the first time, and a rank that is killed meanwhile leaves a lock behind at which all later ranks
hang.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import shutil
import threading
from pathlib import Path

import accelerate  # noqa: F401
import deepspeed.moe.layer  # this and the next two are what deepspeed.initialize imports late
import deepspeed.ops
import deepspeed.runtime.zero.muon.muon_optimizer
import torchdata.stateful_dataloader  # noqa: F401
import tqdm
import transformers.models.llama.modeling_llama
import transformers.trainer  # noqa: F401
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

import ds_hetero.registration  # noqa: F401

for name in (  # what libraries import late, and the oldest releases that are tested lack in part
    "deepspeed.module_inject.auto_ep_layer",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "transformers.models.auto.processing_auto",
    "transformers.models.auto.video_processing_auto",
    "peft.utils.transformers_weight_conversion",
    "trl.chat_template_utils",
    "trl.trainer.dpo_trainer",
    "trl.trainer.reward_trainer",
    "trl.trainer.sft_trainer",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

# A bucket of the default size is 2 GB, which deterministic mode fills with NaN in every rank.
DeepSpeedZeroConfig.model_fields["reduce_bucket_size"].default = 10**6
DeepSpeedZeroConfig.model_rebuild(force=True)

# tqdm's own lock is a semaphore for processes, which a rank that ends by os._exit would leave behind.
tqdm.tqdm.set_lock(threading.RLock())

compatible_ops = deepspeed.ops.__compatible_ops__  # looked at the first time, this probes every op with a compiler
cache = Path(os.environ["TORCH_EXTENSIONS_DIR"])
cache.mkdir(parents=True, exist_ok=True)
if shutil.which(os.environ.get("CXX", "c++")):
    with open(cache / "session_lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (cache / "deepspeed_shm_comm" / "lock").unlink(missing_ok=True)
        get_accelerator().create_op_builder("ShareMemCommBuilder").load()
else:  # DeepSpeed would try to compile it and fail; this is what it does itself where the extension cannot work
    compatible_ops["deepspeed_shm_comm"] = False
