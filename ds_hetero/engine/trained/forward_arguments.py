"""Arguments of a forward of any module: the samples in them, and the numbers that a loss may be divided by."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from ds_hetero.runtime.data.loss_units import Batch, num_rows, tensors_in

_POSITIONAL = "*"  # key of the tuple of positional arguments in `ForwardArguments.as_batch`
# Largest entry of a batch, in elements, whose total may be the divisor of a sum: labels and masks, not pictures.
# Chosen, never measured.
_MAX_DIVISOR_ELEMENTS = 65_536


class ForwardArguments(NamedTuple):
    """Positional and keyword arguments of one forward of a module."""

    args: tuple[Batch, ...]
    kwargs: dict[str, Batch]

    @property
    def rows(self) -> int:
        """Number of samples, from the shapes of the tensors."""
        return num_rows(self.kwargs, self.args)

    def as_batch(self) -> Batch:
        """Return all arguments as one batch, which can be cut into samples and run by `run_batch`."""
        return {**self.kwargs, _POSITIONAL: self.args}

    def totals(self) -> dict[str, tuple[float, float]]:
        """Return the total and the number of non-zeros of each small tensor, by ``name[index]``.

        One of these numbers may be the divisor of a sum in the loss.
        """
        entries = dict(self.kwargs)
        for index, argument in enumerate(self.args):
            entries[str(index)] = argument
        totals = {}
        for name, entry in entries.items():
            for index, part in enumerate(tensors_in(entry)):
                if part.numel() <= _MAX_DIVISOR_ELEMENTS and not part.is_complex():
                    totals[f"{name}[{index}]"] = float(part.double().sum()), float(part.ne(0).sum())
        return totals


NO_ARGUMENTS = ForwardArguments((), {})


def run_batch(model: nn.Module, batch: Batch) -> object:
    """Run a module on a batch of `ForwardArguments.as_batch`, or on some of its samples."""
    kwargs = dict(batch)
    args = kwargs.pop(_POSITIONAL)
    return model(*args, **kwargs)


def rows_of_batch(batch: Batch) -> int:
    """Return the number of samples of a batch, which may be one of `ForwardArguments.as_batch`."""
    return num_rows({**batch, _POSITIONAL: ()}, batch.get(_POSITIONAL, ()))
