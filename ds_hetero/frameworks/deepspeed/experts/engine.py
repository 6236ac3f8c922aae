"""Hooks of an engine whose model has experts that are divided among ranks: its reduction, step and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from torch import nn

from ds_hetero.engine.patching import Function
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.experts.checkpoints import load_experts, save_experts
from ds_hetero.frameworks.deepspeed.experts.optimizer import ExpertOptimizer
from ds_hetero.frameworks.deepspeed.hook_makers import HookRow, after
from ds_hetero.frameworks.deepspeed.protocols import Engine, State
from ds_hetero.job.manifest import Manifest
from ds_hetero.runtime.experts.parts import ExpertParts
from ds_hetero.values.section import SECTION


@dataclass(frozen=True)
class EngineExperts:
    """The experts of one engine's model.

    Args:
        optimizer: None if the experts are frozen, or the engine has no optimizer.
    """

    engine: Engine
    parts: ExpertParts
    optimizer: ExpertOptimizer | None

    def hooks(self) -> list[HookRow]:
        """Return the hooks of the engine's methods; they are the innermost ones."""
        # DeepSpeed looks for the names of all parameters that its optimizer does not have.
        self.engine.param_names.update({part.parameter: name for name, part in self.parts.parts.items()})
        rows = [
            HookRow("buffered_allreduce_fallback", self.reduce_others),
            HookRow("_get_param_fragment_func", self.whole_fragment),
            HookRow("load_module_state_dict", self.load_module),
        ]
        if self.optimizer is not None:
            rows += [
                HookRow("_take_model_step", self.take_step),
                HookRow("clip_fp32_gradients", self.optimizer.clip_without_zero),
                HookRow("zero_grad", after(self.optimizer.clear)),
            ]
        return rows

    def reduce_others(self, reduce: Function, *args: object, **kwargs: object) -> object:
        """Replace ``buffered_allreduce_fallback``, which averages the gradients of all parameters without ZeRO."""
        with self.parts.hidden():
            return reduce(*args, **kwargs)

    def whole_fragment(self, read: Function, parameter: nn.Parameter) -> object:
        """Replace ``_get_param_fragment_func``, by which frozen and empty parameters are saved: save whole experts."""
        whole = self.parts.whole_of(parameter)
        return read(parameter) if whole is None else whole

    def load_module(self, load: Function, checkpoint: State, **kwargs: object) -> object:
        """Replace ``load_module_state_dict``, which would load whole experts again where they are frozen or empty.

        The module's part of the checkpoint has them already, so they are copied onto themselves.
        """
        if checkpoint.get(FROZEN_PARAM_FRAGMENTS) is not None:
            loaded = {name: part.parameter.data for name, part in self.parts.parts.items()}
            checkpoint = {**checkpoint, FROZEN_PARAM_FRAGMENTS: {**checkpoint[FROZEN_PARAM_FRAGMENTS], **loaded}}
        return load(checkpoint=checkpoint, **kwargs)

    def take_step(self, step: Function, *args: object, **kwargs: object) -> object:
        """Replace ``_take_model_step``: update the experts with the other parameters."""
        assert self.optimizer is not None
        self.optimizer.take()
        result = step(*args, **kwargs)
        self.optimizer.update(self.engine.was_step_applied())
        return result

    def save(self, save: Function, save_dir: str, tag: str, *args: object, **kwargs: object) -> object:
        """Replace DeepSpeed's ``save_checkpoint`` inside `save_whole`: save whole weights, and the experts' state."""
        with self.parts.gathered():
            saved = save(save_dir, tag, *args, **kwargs)
        if self.optimizer is not None:
            save_experts(self.engine.checkpoint_engine, Path(save_dir, tag), self.parts, self.optimizer)
        return saved

    def expect_saveable(self) -> None:
        """Refuse a checkpoint engine that writes files after the save. Raises `ConfigError` on every rank."""
        if self.engine.checkpoint_engine.is_decoupled():
            raise ConfigError(
                f'"{SECTION}.experts" saves the experts with the checkpoint, but "checkpoint" of ds_config.json has a '
                "writer that returns before the files are written. Leave it out."
            )

    def load(self, folder: Path, manifest: Manifest | None, *, only_weights: bool) -> None:
        """Load the experts' state after DeepSpeed has loaded the rest. Raises `CheckpointError` on every rank."""
        if self.optimizer is not None:
            load_experts(folder, manifest, self.parts, self.optimizer, with_state=not only_weights)


def move_alike(engine: Any, parts: ExpertParts) -> None:
    """Move the experts to where DeepSpeed has moved the other parameters, and cast them alike."""
    experts = [part.parameter for part in parts.parts.values()]
    ids = set(map(id, experts))
    moved = next(parameter for parameter in engine.module.parameters() if id(parameter) not in ids)
    for expert in experts:
        expert.data = expert.data.to(moved.device, moved.dtype)
