"""Check that the loss in a model's own ``forward`` is the cross entropy of its logits.

On parts of sequences the engine computes the loss, as the cross entropy of tokens, since a mean over the losses that a
class computes on the parts can be another loss. A script's class that overrides ``forward`` still gets the labels and
computes a loss. This loss is compared with the cross entropy of the logits, on every rank and at every step. So class
weights, smoothing, a penalty, or a term that begins later are found in the step in which they first matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ds_hetero.errors import ModelError
from ds_hetero.runtime.loss import cross_entropy_sum
from ds_hetero.runtime.step_checks.protocol import Undecided, Verdict

# Relative differences of equal losses: sums in fp32 in another order; losses of half precision, which keep 8 bits
# (2^-8), and sums of such.
_RTOL, _RTOL_HALF = 3e-5, 1e-2
_IGNORED = -100


@dataclass
class _ForwardLosses:
    """The losses of one forward of the step.

    Attributes:
        numbers: [3] on the device: the relative difference of the two losses, divided by the largest difference that
            rounding explains; the loss that the class computed; and the cross entropy of its logits.
        is_used: a gradient has reached the loss that the engine computed, so the script trains by this loss.
    """

    numbers: Tensor
    is_used: bool = False


class ClassLoss:
    """Checks the loss that a model's class computes itself, as a step check.

    Args:
        name: of the model's class.
    """

    width = 4

    def __init__(self, name: str) -> None:
        self._name = name
        self._forwards: list[_ForwardLosses] = []
        self._num_without_logits = 0  # forwards whose loss was computed tile by tile, so that there are no logits

    @torch.no_grad()
    def note_forward(
        self, class_loss: Tensor, logits: Tensor, labels: Tensor, term: Tensor | float, engine_loss: Tensor | None
    ) -> None:
        """Compare the losses of a forward of training on this rank's part; does not wait for the device.

        Args:
            class_loss: that the class computed.
            logits: [B, s, V], of the same tokens.
            labels: [B, s], that the class got; each is the label of the logits at the same position.
            term: the auxiliary loss of routers that the model adds.
            engine_loss: loss of the batch that the engine computed, which the script may use or not.
        """
        if class_loss.numel() != 1:
            return
        logits, class_loss = logits.detach(), class_loss.detach().reshape(())
        count = labels.ne(_IGNORED).sum()
        cross_entropy = cross_entropy_sum(logits, labels).double() / count + term
        rtol = _RTOL if class_loss.element_size() >= 4 else _RTOL_HALF
        difference = _relative(class_loss.double(), cross_entropy)
        if logits.element_size() < 4:  # a class may compute the cross entropy in half precision
            in_half = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=_IGNORED) + term
            difference = torch.minimum(difference, _relative(class_loss.double(), in_half.double()))
        difference = torch.where(count > 0, difference / rtol, 0.0).nan_to_num(nan=float("inf"))
        losses = _ForwardLosses(torch.stack([difference, class_loss.double(), cross_entropy]))
        self._forwards.append(losses)
        if engine_loss is not None and engine_loss.requires_grad:
            with torch.enable_grad():
                engine_loss.register_hook(lambda gradient: setattr(losses, "is_used", True))  # type: ignore[no-untyped-call]

    def note_forward_without_logits(self) -> None:
        """Note a forward of training without logits, whose loss cannot be compared."""
        self._num_without_logits += 1

    @torch.no_grad()
    def numbers(self) -> Tensor:
        """Return the largest difference, its two losses, and the number of forwards without logits."""
        used_numbers = [forward.numbers for forward in self._forwards if forward.is_used]
        num_without_logits = float(self._num_without_logits)
        self._forwards, self._num_without_logits = [], 0
        if not used_numbers:
            return torch.tensor([0.0, 0.0, 0.0, num_without_logits], dtype=torch.float64)
        rows = torch.stack([torch.zeros(3, dtype=torch.float64, device=used_numbers[0].device), *used_numbers])
        largest = rows.index_select(0, rows[:, 0].argmax()[None])[0]
        return torch.cat([largest, largest.new_full((1,), num_without_logits)])

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """Refuse a loss that differs from the cross entropy; warn of forwards without logits."""
        ranks_with_own_loss = [rank for rank, row in enumerate(rows) if row[0] > 1]
        if ranks_with_own_loss:
            first_rank = ranks_with_own_loss[0]
            class_loss, cross_entropy = rows[first_rank][1:3]
            return ModelError(
                f"the forward of {self._name} computes a loss of its own: {class_loss:.6g} from the labels of rank "
                f"{first_rank}, whose cross entropy is {cross_entropy:.6g} (ranks {ranks_with_own_loss}). On parts of "
                "sequences the engine computes outputs.loss, the cross entropy of tokens, and would train by that. "
                "Give the loss as a function, model.loss_function = f, which is called with the logits and labels of "
                "the whole batch; or compute it in the loop from the whole logits of handle.sharded_call; or give "
                "terms of single tokens to handle.mean(per_token, batch)."
            )
        if any(row[3] for row in rows):
            return Undecided(
                f"the forward of {self._name} is the script's, and may compute a loss of its own: this cannot be "
                'checked with "tile_tokens", which computes the cross entropy of tokens without all logits at once. '
                'Leave "tile_tokens" out to check it'
            )
        return None


def _relative(a: Tensor, b: Tensor) -> Tensor:
    """Return the difference of two scalars, divided by the larger absolute value."""
    return (a - b).abs() / torch.maximum(a.abs(), b.abs()).clamp(min=1e-30)
