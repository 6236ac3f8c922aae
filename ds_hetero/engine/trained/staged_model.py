"""Interface of this rank's stage of a model that is cut into stages of pipelines."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ds_hetero.runtime.data.shards import Entries
from ds_hetero.runtime.pipeline.batches import StageBatch
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_clock import StepClock
from ds_hetero.values.plans import Plan
from ds_hetero.values.section import RingGradients


class StagedModel(Protocol):
    """This rank's stage of a model that was cut into stages of pipelines.

    It is a `ds_hetero.runtime.pipeline.runner.StageCompute`: a call runs a forward of the stage.
    """

    plan: Plan
    width: int
    dtype: torch.dtype
    is_writer: bool
    measures: Tensor | None

    @property
    def model(self) -> nn.Module:
        """The user's model, without the parts of other stages."""

    @property
    def configuration(self) -> Entries:
        """The content of config.json of the whole model."""

    def __call__(self, batch: StageBatch, hidden: Tensor | None) -> Tensor:
        """Run the forward of a micro-batch."""

    def shard_sequences(self, replica: Replica, kernel: str | None, ring_gradients: RingGradients) -> None:
        """Switch a ``"sequence"`` stage to the attention of its schedule."""

    def cut_by_tensor_parallelism(self, mesh: DeviceMesh) -> None:
        """Replace the parameters of a ``"tensor"`` stage, or of a tensor group, by this rank's shards."""

    def fill(self, device: torch.device) -> None:
        """Allocate this rank's parameters and buffers, and load their values, for a model built on the meta device."""

    def time_layers(self, clock: StepClock) -> None:
        """Let a clock measure the phases of the stage, and the time of its layers."""

    def change_layers(self, plan: Plan, device: torch.device) -> None:
        """Hold the layers of another plan, whose ranks and stages are the same."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters, by the names of the whole model."""

    def partial_parameters(self) -> frozenset[str]:
        """Return names of parameters whose gradients have to be summed over ranks that hold the same tokens."""

    def save_pretrained(self, folder: str) -> None:
        """Write the weights of all stages as transformers reads them. Caller: every rank."""
