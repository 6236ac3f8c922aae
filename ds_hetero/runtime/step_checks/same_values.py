"""Check that tensors which every rank holds whole are the same on every rank: parameters, buffers, averaged gradients.

Norms are compared, not bits, since unlike GPUs round statistics, and the updates of ZeRO 0, in different ways.

A step reads one part of a large tensor, the next step the next part, so that reading takes little time even if a step
has few tokens. A change of the whole tensor is found at once, a change of a few rows within `_TURNS` steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ds_hetero.errors import ModelError
from ds_hetero.runtime.step_checks.protocol import Numbers, Undecided, Verdict

_BINS = 8  # norms of a rank: each is of every eighth tensor, so that a tensor that changes is a large part of its bin
# Relative differences of norms that rounding explains: sums in fp32 of up to 1e9 numbers, in another order by GPU.
RTOL = 1e-5
# Statistics of activations, which may be rounded to half precision.
RTOL_STATISTICS = 1e-3
# Parameters of half precision that every rank updates itself (ZeRO 0): a parameter rounded otherwise is off by 2^-8.
RTOL_HALF_UPDATES = 1e-2
# A step reads one of 32 parts of a tensor, and at least 65,536 elements. For 7e9 parameters in bf16 that is 0.44 GB, or
# 0.2 ms at 2 TB/s; a step of 1,024 tokens takes 0.1 s at the peak of a GPU with 400 TFLOP/s.
_TURNS, _MIN_PART_ELEMENTS = 32, 1 << 16
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # for which torch has norms


class SameValues:
    """Compares tensors that every rank holds whole between ranks, as a step check.

    Args:
        tensors: returns tensors of floating point by name; the same names in the same order on every rank. Called once
            per step.
        rtol: relative difference of norms that rounding explains.
        noun: the tensors, for the message.
        remedy: how to keep them equal, for the message.
        strict_groups: groups of ranks; a difference inside a group is an error, one between groups a warning. None: one
            group of all ranks.
    """

    width = 2 * _BINS

    def __init__(
        self,
        tensors: Callable[[], Mapping[str, Tensor]],
        rtol: float,
        noun: str,
        remedy: str,
        strict_groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._tensors, self._rtol, self._noun, self._remedy = tensors, rtol, noun, remedy
        self._strict_groups = strict_groups
        self._names: list[str] = []  # of the step that ends, in the order of the norms
        self._step = 0

    @torch.no_grad()
    def numbers(self) -> Numbers:
        """Return the norm of each bin, then its number of elements; bin b has the tensors b, b + 8, ..."""
        by_kind: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        for name, tensor in self._tensors().items():
            by_kind.setdefault((tensor.device, tensor.dtype), {})[name] = _part(tensor, self._step)
        self._names = [name for tensors_of_kind in by_kind.values() for name in tensors_of_kind]
        self._step += 1
        if not self._names:
            return [0.0] * self.width
        device = next(iter(by_kind))[0]
        norms = torch.cat([_norms(list(tensors_of_kind.values())).to(device) for tensors_of_kind in by_kind.values()])
        sizes = [tensor.numel() for tensors_of_kind in by_kind.values() for tensor in tensors_of_kind.values()]
        sizes_of_bins = torch.tensor([sum(sizes[number::_BINS]) for number in range(_BINS)], dtype=torch.float64)
        padded = nn.functional.pad(norms.square(), (0, -len(norms) % _BINS))
        return padded.view(-1, _BINS).sum(dim=0).sqrt(), sizes_of_bins

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """Refuse unlike norms inside a strict group; warn of unlike norms between groups."""
        all_ranks = range(len(rows))
        for number in range(_BINS):
            for ranks in self._strict_groups or [all_ranks]:
                have_same_size = len({rows[rank][_BINS + number] for rank in ranks}) == 1
                if have_same_size and self._differ(rows, ranks, number):
                    return ModelError(f"{self._described(rows, number)}. One process has one of each. {self._remedy}")
        for number in range(_BINS):
            if self._differ(rows, all_ranks, number):
                # Between groups, or with unlike sizes, as of a cache that grows with the tokens of a rank.
                return Undecided(
                    f"{self._described(rows, number)}: whether they have to be equal is not known. If they have, one "
                    f"process has one of each. {self._remedy}",
                    subject=self._noun,
                )
        return None

    def _differ(self, rows: Sequence[Sequence[float]], ranks: Sequence[int], number: int) -> bool:
        """Whether the norm of bin ``number`` differs between ``ranks`` by more than rounding explains."""
        norms = [rows[rank][number] for rank in ranks]
        # False for NaN and infinity, which have other causes: masks, overflows of fp16, a model that diverged.
        return max(norms) - min(norms) > self._rtol * max(norms)

    def _described(self, rows: Sequence[Sequence[float]], number: int) -> str:
        """Return a text on bin ``number``, whose norms differ: names of its tensors, and the norm on every rank."""
        names = self._names[number::_BINS]
        listed = ", ".join(names[:3]) + (f", and {len(names) - 3} more" if len(names) > 3 else "")
        norms = [f"{row[number]:.6g}" for row in rows]
        return f"{self._noun} differ between ranks: norms by rank of one of ({listed}) are {norms}"


def same_parameters(module: nn.Module, *, rtol: float = RTOL) -> SameValues:
    """Return the check of the trained parameters of a model, for ZeRO 0 to 2, where every rank holds them whole."""
    parameters = dict(module.named_parameters())

    def trained() -> dict[str, Tensor]:
        return {name: p for name, p in parameters.items() if p.requires_grad and _is_common(p)}

    remedy = "A script that changes weights in place has to do so on every rank alike."
    return SameValues(trained, rtol, "parameters of the model", remedy)


def same_untrained(module: nn.Module, *, frozen: bool, replicas: Sequence[Sequence[int]]) -> SameValues:
    """Return the check of buffers and frozen parameters, which scripts and modules may change.

    Ranks of one replica run the same batch, so statistics of the batch have to be equal on them. Replicas run different
    batches, so statistics differ between them under plain data parallelism as well, such as those of BatchNorm: there a
    difference is a warning.

    Args:
        frozen: check frozen parameters as well, for ZeRO 0 to 2, where every rank holds them whole.
        replicas: the ranks of each replica.
    """
    modules = dict(module.named_modules())
    parameters = dict(module.named_parameters()) if frozen else {}

    def untrained() -> dict[str, Tensor]:
        buffers = {
            f"{prefix}.{name}" if prefix else name: buffer
            for prefix, owner in modules.items()
            for name, buffer in owner._buffers.items()
            if buffer is not None and _is_common(buffer)
        }
        return buffers | {name: p for name, p in parameters.items() if not p.requires_grad and _is_common(p)}

    return SameValues(
        untrained,
        RTOL_STATISTICS,
        "buffers or frozen parameters of the model",
        "A tensor that follows a batch (a running mean, a teacher) has to follow all of it: add its sums up over the "
        "ranks (torch.distributed.all_reduce), and update it on every rank. Keep a tensor that is not part of the "
        "model as an attribute, not as a buffer.",
        replicas,
    )


def same_gradients(module: nn.Module) -> SameValues:
    """Return the check of averaged gradients, for ZeRO 0, where every rank holds them whole."""
    parameters = dict(module.named_parameters())
    no_gradient = torch.zeros(1)  # stands for a missing gradient, so that all ranks have the same names

    def gradients() -> dict[str, Tensor]:
        compared = {}
        for name, parameter in parameters.items():
            if parameter.requires_grad and _is_common(parameter):
                gradient = parameter.grad
                is_dense = gradient is not None and gradient.layout == torch.strided
                compared[name] = gradient if is_dense and gradient is not None else no_gradient
        return compared

    remedy = 'Clip or scale them on every rank alike, or by "gradient_clipping".'
    return SameValues(gradients, RTOL, "gradients, which have been averaged over the ranks,", remedy)


def _is_common(tensor: Tensor) -> bool:
    """Whether every rank holds a tensor whole, and norms can be computed; DeepSpeed marks experts that ranks shard."""
    is_plain = tensor.dtype in _DTYPES and tensor.layout == torch.strided and not tensor.is_meta
    return is_plain and getattr(tensor, "allreduce", True)


def _part(tensor: Tensor, step: int) -> Tensor:
    """Return the part of ``tensor`` that is read in ``step``; the same on every rank."""
    size = tensor.numel()
    if size <= _MIN_PART_ELEMENTS or not tensor.is_contiguous():
        return tensor.detach()
    length = max(_MIN_PART_ELEMENTS, -(-size // _TURNS))
    start = step % -(-size // length) * length
    return tensor.detach().view(-1)[start : start + length]


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of each tensor as float64 [number of tensors]; computed in float32 for other dtypes."""
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=dtype)).double()
