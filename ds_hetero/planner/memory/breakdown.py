"""Memory breakdown of every rank at its peak: bytes by their use, and the memory of the card."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from ds_hetero.cluster.topology import DeviceSpec
from ds_hetero.common.reading import JsonDict
from ds_hetero.cost.model import CostModel
from ds_hetero.values.schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Memory breakdown of one rank at its peak, in bytes, and the memory of its card.

    Args:
        activations: activations saved for the backward, and what the backward of one layer needs in addition; 0 if the
            peak is in the optimizer's step.
    """

    rank: int
    device: str  # name of its card
    weights: float  # parameters that stay on the rank
    gradients: float  # gradients beyond the activations that they replace; all gradients with accumulation
    optimizer_state: float  # master weights and moments
    activations: float
    logits: float  # logits and the temporaries of the loss; 0 if the peak is not at the loss
    buffers: float  # gathered parameters, keys and values of the ring, buffers of all-to-alls and of gradients
    communicators: float  # NCCL's buffers, as far as the reserve does not cover them
    reserve: float  # not for tensors: the driver's context, NCCL's first buffers, fragmentation of the allocator
    card: float  # memory of the card

    @property
    def total(self) -> float:
        """Sum of all parts, including the reserve."""
        return sum(float(getattr(self, part)) for part in PARTS)

    @property
    def tensors(self) -> float:
        """Bytes of tensors, which PyTorch reports as allocated."""
        return self.total - self.reserve - self.communicators

    @property
    def free(self) -> float:
        """Bytes of the card that stay free; negative if the rank does not fit."""
        return self.card - self.total

    def to_dict(self) -> JsonDict:
        """Plain data for JSON."""
        return {**asdict(self), "total": self.total, "free": self.free}


PARTS = tuple(field.name for field in fields(Stack) if field.name not in ("rank", "device", "card"))


def stacks(cost: CostModel, schedule: Schedule) -> tuple[Stack, ...]:
    """Return the memory breakdown of every rank; without the reserve, its sum is the memory of `CostModel.predict`.

    Raises:
        PlanError: the schedule's ranks or heads are not those of the cluster and the model.
    """
    parts = cost.memory_parts(*cost.arrays(schedule))

    def stack_of(rank: int, device: DeviceSpec) -> Stack:
        rank_parts = parts.of_rank(rank)
        buffers = (
            rank_parts.gathered
            + rank_parts.ring_buffers
            + rank_parts.exchange_buffers
            + rank_parts.bucket
            + rank_parts.step
        )
        return Stack(
            rank=rank,
            device=device.name,
            weights=float(rank_parts.weights),
            gradients=float(rank_parts.gradients),
            optimizer_state=float(rank_parts.optimizer_state),
            activations=float(rank_parts.activations + rank_parts.layer),
            logits=float(rank_parts.logits),
            buffers=float(buffers),
            communicators=float(rank_parts.communicators),
            reserve=device.memory_bytes - device.usable_bytes,
            card=float(device.memory_bytes),
        )

    return tuple(stack_of(rank, device) for rank, device in enumerate(cost.cluster.devices))
