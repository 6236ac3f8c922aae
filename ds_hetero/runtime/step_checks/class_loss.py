"""Check of models whose class may compute a loss of its own in its ``forward``.

On parts of sequences the engine makes the loss, the cross entropy of tokens, since a mean of what a class makes of
parts can be another loss. A class of the script's that overrides ``forward`` is given its labels all the same, and what
it makes of them is compared with the cross entropy of its own logits, on every rank and at every step: a weight by
class, smoothing, a penalty or a term that begins later shows at the step where it first matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ds_hetero.errors import ModelError
from ds_hetero.runtime.loss import cross_entropy_sum
from ds_hetero.runtime.step_checks.protocol import Undecided, Verdict

# Relative difference of two sums of the same numbers in fp32, in another order; of a loss of half precision, which
# keeps 8 bits (2^-8), and of a sum of such.
_RTOL, _RTOL_HALF = 3e-5, 1e-2
_IGNORED = -100


@dataclass
class _Seen:
    """One forward of the step: relative difference over what rounding explains, and the two losses; on its device."""

    numbers: Tensor  # [3]
    is_used: bool = False  # a gradient has reached the loss that the engine made


class ClassLoss:
    """`ds_hetero.runtime.step_checks.protocol.StepCheck` of the loss that a model's class computes itself.

    Args:
        name: of the class whose forward may compute it.
    """

    width = 4

    def __init__(self, name: str) -> None:
        self._name = name
        self._forwards: list[_Seen] = []
        self._unseen = 0  # forwards without logits, whose loss was made tile by tile

    @torch.no_grad()
    def note_forward(
        self, of_class: Tensor, logits: Tensor, labels: Tensor, term: Tensor | float, engine_loss: Tensor | None
    ) -> None:
        """A forward of training made a loss of this rank's part; waits for no device.

        Args:
            of_class: what the class made.
            logits: [B, s, V], of the same tokens.
            labels: [B, s], of the token at the same place, that the class was given.
            term: what the model adds for its routers.
            engine_loss: the loss of the batch that the engine made, which the script may use or not.
        """
        if of_class.numel() != 1:
            return
        logits, of_class = logits.detach(), of_class.detach().reshape(())
        count = labels.ne(_IGNORED).sum()
        plain = cross_entropy_sum(logits, labels).double() / count + term
        rtol = _RTOL if of_class.element_size() >= 4 else _RTOL_HALF
        difference = _relative(of_class.double(), plain)
        if logits.element_size() < 4:  # a class may take the cross entropy of them as they are
            in_half = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=_IGNORED) + term
            difference = torch.minimum(difference, _relative(of_class.double(), in_half.double()))
        difference = torch.where(count > 0, difference / rtol, 0.0).nan_to_num(nan=float("inf"))
        seen = _Seen(torch.stack([difference, of_class.double(), plain]))
        self._forwards.append(seen)
        if engine_loss is not None and engine_loss.requires_grad:
            with torch.enable_grad():
                engine_loss.register_hook(lambda gradient: setattr(seen, "is_used", True))  # type: ignore[no-untyped-call]

    def note_unseen(self) -> None:
        """A forward of training made no logits, so that there is nothing to compare with."""
        self._unseen += 1

    @torch.no_grad()
    def numbers(self) -> Tensor:
        """See `StepCheck`; the largest difference, with its losses, and the forwards that were not seen."""
        used = [seen.numbers for seen in self._forwards if seen.is_used]
        unseen, self._forwards, self._unseen = self._unseen, [], 0
        rows = torch.stack([torch.zeros(3, dtype=torch.float64, device=used[0].device), *used]) if used else None
        if rows is None:
            return torch.tensor([0.0, 0.0, 0.0, float(unseen)], dtype=torch.float64)
        largest = rows.index_select(0, rows[:, 0].argmax()[None])[0]
        return torch.cat([largest, largest.new_full((1,), float(unseen))])

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """See `StepCheck`."""
        others = [rank for rank, row in enumerate(rows) if row[0] > 1]
        if others:
            of_class, plain = rows[others[0]][1:3]
            return ModelError(
                f"the forward of {self._name} computes a loss of its own: {of_class:.6g} from the labels of rank "
                f"{others[0]}, whose cross entropy is {plain:.6g} (ranks {others}). On parts of sequences the engine "
                "makes outputs.loss, the cross entropy of tokens, and would train by that. Give it as a function, "
                "model.loss_function = f, which is called with the logits and labels of the whole batch; or compute "
                "it in the loop from the whole logits of handle.sharded_call; or give terms of single tokens to "
                "handle.mean(per_token, batch)."
            )
        if any(row[3] for row in rows):
            return Undecided(
                f"the forward of {self._name} is the script's, and may compute a loss of its own: it is not known "
                'where "tile_tokens" makes the loss, which is the cross entropy of tokens'
            )
        return None


def _relative(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs() / torch.maximum(a.abs(), b.abs()).clamp(min=1e-30)
