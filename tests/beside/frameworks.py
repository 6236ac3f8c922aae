"""How each framework is installed, and the recipe that it trains.

All recipes are the same: supervised fine-tuning of all weights in fp32, five steps of two micro-batches, padded rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.beside.inputs import DATA, MODEL, NUM_HEADS, NUM_KV_HEADS

STEPS = 5
ACCUMULATION = 2
ROWS = 4  # of a micro-batch of one process
SHARES = [3, 1]
_LENGTH = 512  # no row is longer

ONE_PROCESS = "one process"
SHARINGS: dict[str, dict[str, Any]] = {
    "tokens": {
        "sequence_parallel_size": 2,
        "heterogeneity": {
            "schedule": {
                "version": 1,
                "num_heads": NUM_HEADS,
                "num_kv_heads": NUM_KV_HEADS,
                "groups": [
                    {"ranks": [rank], "tokens": [share], "heads": [NUM_HEADS]} for rank, share in enumerate(SHARES)
                ],
            }
        },
    },
    "batches": {"heterogeneity": {"batch": SHARES}},
}
"""What two ranks share 3:1, and the keys of ds_config.json for it: the tokens of every row, or the rows of a batch."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training.

    Args:
        folder: where the framework writes.
        inputs: the folder with model and data.
        sharing: a key of `SHARINGS`, or `ONE_PROCESS`, which trains without DeepSpeed and without this engine.
        zero_stage: of DeepSpeed.
    """

    folder: Path
    inputs: Path
    sharing: str
    zero_stage: int

    @property
    def batch_size(self) -> int:
        """What the frameworks call the batch size of a device; for unequal batches it is their mean."""
        return sum(SHARES) // len(SHARES) if self.sharing == "batches" else ROWS

    def deepspeed(self) -> dict[str, str]:
        """Write ds_config.json and return the framework's setting with its path; empty for one process."""
        if self.sharing == ONE_PROCESS:
            return {}
        config = {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {
                "stage": self.zero_stage,
                "stage3_gather_16bit_weights_on_model_save": self.zero_stage == 3,
            },
            **SHARINGS[self.sharing],
        }
        path = self.folder / "ds_config.json"
        path.write_text(json.dumps(config, indent=2))
        return {"deepspeed": str(path)}


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A framework and its recipe.

    Args:
        title: as the page writes it.
        distribution: its name for pip.
        installs: arguments of ``pip install``, one call after the other.
        command: trains on one process, the framework's own command with its first arguments.
        module: trains on the ranks of a launcher, see ``python -m ds_hetero.run -m``.
        arguments: writes the recipe of a job and returns the arguments of the command or module.
        zero_stage: of the recipe.
        torch: what pip installs first. ``===`` takes no build with a local version, such as 2.13.0+cpu: torchvision
            from PyPI does not load beside it.
    """

    title: str
    distribution: str
    installs: tuple[str, ...]
    command: tuple[str, ...]
    module: str
    arguments: Callable[[Job], list[str]]
    zero_stage: int = 2
    torch: str = "torch===2.13.0"


# Names that all three take over from transformers. The large epsilon keeps AdamW from making a step of full size
# out of a gradient that is rounding.
_COMMON = {
    "gradient_accumulation_steps": ACCUMULATION,
    "max_steps": STEPS,
    "learning_rate": 0.01,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 1,
    "adam_epsilon": 0.001,
    "max_grad_norm": 1.0,
    "weight_decay": 0.01,
    "logging_steps": 1,
    "save_steps": STEPS,
    "seed": 7,
}


def _axolotl(job: Job) -> list[str]:
    recipe = {
        "base_model": str(job.inputs / MODEL),
        "datasets": [{"path": str(job.inputs / DATA), "ds_type": "json", "type": "alpaca"}],
        "dataset_prepared_path": str(job.folder / "prepared"),
        "output_dir": str(job.folder / "output"),
        "sequence_len": _LENGTH,
        "micro_batch_size": job.batch_size,
        **{name: value for name, value in _COMMON.items() if name != "lr_scheduler_type"},
        "lr_scheduler": _COMMON["lr_scheduler_type"],
        "optimizer": "adamw_torch",
        "attn_implementation": "sdpa",
        "bf16": False,
        "fp16": False,
        "tf32": False,
        **job.deepspeed(),
    }
    return [_written(job, recipe)]


def _llama_factory(job: Job) -> list[str]:
    recipe = {
        "model_name_or_path": str(job.inputs / MODEL),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset_dir": str(job.inputs),
        "dataset": "sort",
        "template": "default",
        "cutoff_len": _LENGTH,
        "output_dir": str(job.folder / "output"),
        "per_device_train_batch_size": job.batch_size,
        **_COMMON,
        "flash_attn": "sdpa",
        "report_to": "none",
        **job.deepspeed(),
    }
    return [_written(job, recipe)]


def _ms_swift(job: Job) -> list[str]:
    recipe = {
        "model": job.inputs / MODEL,
        "model_type": "llama",
        "template": "default",
        "tuner_type": "full",
        "dataset": job.inputs / DATA,
        "max_length": _LENGTH,
        "torch_dtype": "float32",
        "fp16": "false",  # else it trains weights of float32 under fp16
        "bf16": "false",
        "attn_impl": "sdpa",
        "output_dir": job.folder / "output",
        "per_device_train_batch_size": job.batch_size,
        **_COMMON,
        "gradient_checkpointing": "false",
        "report_to": "none",
        **job.deepspeed(),
    }
    return [text for name, value in recipe.items() for text in (f"--{name}", str(value))]


def _written(job: Job, recipe: dict[str, Any]) -> str:
    path = job.folder / "config.yml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return str(path)


FRAMEWORKS = {
    "axolotl": Framework(
        title="Axolotl",
        distribution="axolotl",
        installs=("axolotl==0.19.0", "deepspeed==0.19.8"),
        command=("axolotl", "train", "--launcher", "python"),
        module="axolotl.cli.train",
        torch="torch==2.13.0",  # a build for CPUs, if pip finds one: without GPUs it does not start beside one for GPUs
        arguments=_axolotl,
        zero_stage=3,  # on other stages it loads the model onto the GPU of the rank's number, also without GPUs
    ),
    "ms-swift": Framework(
        title="ms-swift",
        distribution="ms-swift",
        installs=("ms-swift==4.6.0 torchvision deepspeed==0.19.8",),
        command=("swift", "sft"),
        module="swift.cli.sft",
        arguments=_ms_swift,
    ),
    "llama-factory": Framework(
        title="LLaMA-Factory",
        distribution="llamafactory",
        installs=("llamafactory==0.9.5 deepspeed==0.19.8", "accelerate==1.12.0"),
        command=("llamafactory-cli", "train"),
        module="llamafactory.launcher",
        arguments=_llama_factory,
    ),
}
