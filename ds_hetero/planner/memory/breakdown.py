"""Memory breakdown of every rank at its peak: bytes by what they are used for, and what the device has."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from ds_hetero.cluster.topology import DeviceSpec
from ds_hetero.common.reading import JsonDict
from ds_hetero.cost.model import CostModel
from ds_hetero.values.schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Bytes of one rank at its peak, from the bottom up, and what its card has.

    Args:
        activations: kept for the backward, and what the backward of one layer needs beside them; 0 where the peak is in
            the optimizer's step.
    """

    rank: int  # whose they are
    device: str  # name of its card
    weights: float  # parameters that stay on the rank
    gradients: float  # what they take beyond the activations that they replace; all of them with accumulation
    optimizer_state: float  # master weights and moments
    activations: float
    logits: float  # of the head, and what the loss makes of them; 0 where the peak is not at the loss
    buffers: float  # gathered parameters, visiting keys and values, packed exchanges, gradients under way or in fp32
    communicators: float  # NCCL's buffers, as far as the reserve does not cover them
    reserve: float  # what no tensor gets: the driver's context, NCCL's first buffers, and what lies between tensors
    card: float  # memory of the card

    @property
    def total(self) -> float:
        """All parts, the reserve included."""
        return sum(float(getattr(self, part)) for part in PARTS)

    @property
    def tensors(self) -> float:
        """Bytes of tensors: what PyTorch counts as allocated."""
        return self.total - self.reserve - self.communicators

    @property
    def free(self) -> float:
        """Bytes of the card that stay free; negative if it does not fit."""
        return self.card - self.total

    def to_dict(self) -> JsonDict:
        """Plain data for JSON."""
        return {**asdict(self), "total": self.total, "free": self.free}


PARTS = tuple(field.name for field in fields(Stack) if field.name not in ("rank", "device", "card"))


def stacks(cost: CostModel, schedule: Schedule) -> tuple[Stack, ...]:
    """The stack of every rank of a schedule; without the reserve it is what `CostModel.predict` says.

    Raises:
        PlanError: the schedule's ranks or heads are not those of the cluster and the model.
    """
    parts = cost.memory_parts(*cost.arrays(schedule))

    def of(rank: int, device: DeviceSpec) -> Stack:
        own = parts.of_rank(rank)
        return Stack(
            rank=rank,
            device=device.name,
            weights=float(own.weights),
            gradients=float(own.gradients),
            optimizer_state=float(own.optimizer_state),
            activations=float(own.activations + own.layer),
            logits=float(own.logits),
            buffers=float(own.gathered + own.ring_buffers + own.exchange_buffers + own.bucket + own.step),
            communicators=float(own.communicators),
            reserve=device.memory_bytes - device.usable_bytes,
            card=float(device.memory_bytes),
        )

    return tuple(of(rank, device) for rank, device in enumerate(cost.cluster.devices))
