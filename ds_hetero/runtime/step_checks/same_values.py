"""Check that values which every rank holds whole are the same on every rank: parameters, buffers, averaged gradients.

Compared are norms, not bits: ranks on unlike GPUs round statistics, and updates of ZeRO 0, each in its way.

Of a large tensor a step reads one part, others by turns, so that reading costs little beside a step of few tokens: a
tensor that is changed as a whole is found at once, one that is changed in some rows within `_TURNS` steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ds_hetero.errors import ModelError
from ds_hetero.runtime.step_checks.protocol import Numbers, Undecided, Verdict

_BINS = 8  # norms of a rank; tensors share them in turn, so that one that changes is no small part of its bin
# Relative differences of norms that rounding explains: sums in fp32 of up to 1e9 numbers, in another order by GPU.
RTOL = 1e-5
# Statistics of activations follow the rounding of these, which may be that of half precision.
RTOL_STATISTICS = 1e-3
# Parameters of half precision that every rank updates itself (ZeRO 0): one that rounds otherwise is off by 2^-8.
RTOL_HALF_UPDATES = 1e-2
# A part of a tensor: a 32nd, and no less than 65,536 numbers. Of 7e9 parameters in bf16 a step reads 0.44 GB, 0.2 ms
# at 2 TB/s; a step of 1,024 tokens takes 0.1 s at the peak of a GPU with 400 TFLOP/s.
_TURNS, _SMALLEST_PART = 32, 1 << 16
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # of which torch has norms


class SameValues:
    """`ds_hetero.runtime.step_checks.protocol.StepCheck` of tensors that every rank holds whole.

    Args:
        tensors: by name, of floating point; the same names in the same order on every rank. Called once a step.
        rtol: relative difference of norms that rounding explains.
        what: the tensors, for the message.
        remedy: how they are kept equal.
        told_between: groups of ranks, between which a difference is told; inside one it is an error. None: everywhere.
    """

    width = 2 * _BINS

    def __init__(
        self,
        tensors: Callable[[], Mapping[str, Tensor]],
        rtol: float,
        what: str,
        remedy: str,
        told_between: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._tensors, self._rtol, self._what, self._remedy = tensors, rtol, what, remedy
        self._told_between = told_between
        self._names: list[str] = []  # of the step that ends, in the order of the norms
        self._step = 0

    @torch.no_grad()
    def numbers(self) -> Numbers:
        """Norms of bins, and how many numbers they are of; bin b has the tensors b, b + 8, ..."""
        by_kind: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        for name, tensor in self._tensors().items():
            by_kind.setdefault((tensor.device, tensor.dtype), {})[name] = _part(tensor, self._step)
        self._names = [name for of_kind in by_kind.values() for name in of_kind]
        self._step += 1
        if not self._names:
            return [0.0] * self.width
        home = next(iter(by_kind))[0]
        norms = torch.cat([_norms(list(of_kind.values())).to(home) for of_kind in by_kind.values()])
        sizes = [tensor.numel() for of_kind in by_kind.values() for tensor in of_kind.values()]
        of_bins = torch.tensor([sum(sizes[number::_BINS]) for number in range(_BINS)], dtype=torch.float64)
        padded = nn.functional.pad(norms.square(), (0, -len(norms) % _BINS))
        return padded.view(-1, _BINS).sum(dim=0).sqrt(), of_bins

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """See `StepCheck`."""
        everyone = range(len(rows))
        for number in range(_BINS):
            for ranks in self._told_between or [everyone]:
                if self._differ(rows, ranks, number) and len({rows[rank][_BINS + number] for rank in ranks}) == 1:
                    return ModelError(f"{self._described(rows, number)}. One process has one of each. {self._remedy}")
        for number in range(_BINS):
            if self._differ(rows, everyone, number):
                # Of unlike sizes: a cache that grows with the tokens that a rank sees, for one.
                return Undecided(
                    f"{self._described(rows, number)}: whether they have to be equal cannot be known. Where they do, "
                    f"one process has one of each. {self._remedy}",
                    subject=self._what,
                )
        return None

    def _differ(self, rows: Sequence[Sequence[float]], ranks: Sequence[int], number: int) -> bool:
        norms = [rows[rank][number] for rank in ranks]
        # NaN and infinity are another matter: masks, overflows of fp16, or a model that diverged.
        return max(norms) - min(norms) > self._rtol * max(norms)

    def _described(self, rows: Sequence[Sequence[float]], number: int) -> str:
        names = self._names[number::_BINS]
        listed = ", ".join(names[:3]) + (f", and {len(names) - 3} more" if len(names) > 3 else "")
        norms = [f"{row[number]:.6g}" for row in rows]
        return f"{self._what} differ between ranks: norms by rank of one of ({listed}) are {norms}"


def same_parameters(module: nn.Module, *, rtol: float = RTOL) -> SameValues:
    """Return the check of trained parameters, of a model whose parameters are whole on every rank (ZeRO 0 to 2)."""
    named = dict(module.named_parameters())

    def trained() -> dict[str, Tensor]:
        return {name: p for name, p in named.items() if p.requires_grad and _is_common(p)}

    remedy = "A script that changes weights in place has to do so on every rank alike."
    return SameValues(trained, rtol, "parameters of the model", remedy)


def same_untrained(module: nn.Module, *, frozen: bool, replicas: Sequence[Sequence[int]]) -> SameValues:
    """Return the check of buffers and frozen parameters, which scripts and modules change.

    Ranks of one replica run one batch, whose statistics are those of all of it. Replicas have a batch each, and what
    follows it differs between them under plain data parallelism, too, as of BatchNorm: that is told.

    Args:
        frozen: frozen parameters, too; they are whole on every rank (ZeRO 0 to 2).
        replicas: their ranks.
    """
    modules = dict(module.named_modules())
    named = dict(module.named_parameters()) if frozen else {}

    def untrained() -> dict[str, Tensor]:
        buffers = {
            f"{prefix}.{name}" if prefix else name: buffer
            for prefix, owner in modules.items()
            for name, buffer in owner._buffers.items()
            if buffer is not None and _is_common(buffer)
        }
        return buffers | {name: p for name, p in named.items() if not p.requires_grad and _is_common(p)}

    return SameValues(
        untrained,
        RTOL_STATISTICS,
        "buffers or frozen parameters of the model",
        "One that follows a batch (a running mean, a teacher) has to follow all of it: add its sums up over the ranks "
        "(torch.distributed.all_reduce), and update it on every rank. Keep a tensor that is not part of the model as "
        "an attribute, not as a buffer.",
        replicas,
    )


def same_gradients(module: nn.Module) -> SameValues:
    """Return the check of gradients that have been averaged over the ranks and are whole on each (ZeRO 0)."""
    named = dict(module.named_parameters())
    nothing = torch.zeros(1)  # of a parameter without a gradient, so that ranks have the same names

    def gradients() -> dict[str, Tensor]:
        trained = {name: p for name, p in named.items() if p.requires_grad and _is_common(p)}
        return {
            name: nothing if p.grad is None or p.grad.layout != torch.strided else p.grad for name, p in trained.items()
        }

    remedy = 'Clip or scale them on every rank alike, or by "gradient_clipping".'
    return SameValues(gradients, RTOL, "gradients, which have been averaged over the ranks,", remedy)


def _is_common(tensor: Tensor) -> bool:
    """Whether every rank is to hold it whole, and it has values; DeepSpeed marks experts that ranks share out."""
    is_plain = tensor.dtype in _DTYPES and tensor.layout == torch.strided and not tensor.is_meta
    return is_plain and getattr(tensor, "allreduce", True)


def _part(tensor: Tensor, step: int) -> Tensor:
    """Return the numbers of ``tensor`` that ``step`` reads; the same on every rank."""
    size = tensor.numel()
    if size <= _SMALLEST_PART or not tensor.is_contiguous():
        return tensor.detach()
    length = max(_SMALLEST_PART, -(-size // _TURNS))
    start = step % -(-size // length) * length
    return tensor.detach().view(-1)[start : start + length]


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """[number of tensors] in float64; of half precision, too, the norm is added up and returned in fp32."""
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=dtype)).double()
