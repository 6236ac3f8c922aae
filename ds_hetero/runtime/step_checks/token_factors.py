"""Check of the losses that scripts compute: the factor of each rank's sums over tokens in what trains.

One process adds something up over all tokens of a batch and divides by one number: weights of classes, smoothing, a
focal factor, a penalty on logits are inside the sum. On parts of sequences each rank has a sum S_r over its own tokens,
and whatever the loss makes of them, its gradient has to have one factor dL/dS_r on all ranks of a replica. An average
of the ranks' weighted means has another one on each:

    loss                                         dL/dS_r
    (S_0 + S_1) / (D_0 + D_1)                    1 / (D_0 + D_1), on both ranks
    (S_0 / D_0 + S_1 / D_1) / 2                  1 / (2 D_0) and 1 / (2 D_1)

The sums stand in the graph of the loss, where a node adds up or averages: a walk from the loss down finds them, and a
hook on each sees the gradient that arrives, after all scaling. So nothing has to be known of what is added up. Where a
rank has no label, the factor is still that of its sum, which tells an average of means from a loss that is divided.

Sums that are made alike go by one path. A rank has several of them if it adds up chunks of its tokens, which have one
factor, or documents' means, which have one each; of those no rank's number says what the others' should be. So where
a path has several sums, unlike factors are undecided.

`ds_hetero.runtime.step_checks.token_weights` sees more of plain cross entropy: the weight of every label. All numbers
stay on the device until the one exchange of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from ds_hetero.common.text import ranks_by_value
from ds_hetero.errors import ConfigError
from ds_hetero.runtime.data.loss_graph import (
    LIKELIHOODS,
    MEANS_OF_ELEMENTS,
    SAME_VALUES,
    may_be_of_parameters,
    total_weight,
)
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_checks.protocol import Undecided, Verdict

_MOST_BACKWARDS = 8  # of a step that are looked at, spread over its accumulation
_MOST_PATHS = 4  # to sums of a loss; chosen, never measured: cross entropy with smoothing has 2, and terms one each
_MOST_NODES = 4096  # of a walk, which sees the operations on scalars above the sums: two for each penalized weight
_MOST_SCALARS = 64  # in a node above the sums: one a sequence or a rank; chosen, never measured
_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are spread evenly: Weyl's sequence
# Relative differences that rounding explains: of a few operations on scalars in fp32, and in half precision, whose
# numbers are rounded by 2^-9 each. Counts of labels that differ by one in a thousand are told apart in fp32.
_RTOL, _RTOL_HALF = 1e-4, 3e-2

_TOTALS = frozenset({"SumBackward0", "SumBackward1", "MeanBackward0", "MeanBackward1"})
_STACKS = frozenset({"StackBackward0", "CatBackward0"})
_PRODUCTS = frozenset({"MulBackward0", "DivBackward0"})
_ADDITION = "AddBackward0"


class _Factors(NamedTuple):
    """Numbers of one rank about its sums of one path."""

    path: float  # checksum of the names of the nodes from the loss to the sum; 0 where there is none
    several: float  # the path may have more than one sum
    least: float  # of their factors that count; not finite where none does
    most: float


@dataclass
class _Sum:
    """A sum in the graph of a loss, on its device."""

    share: Tensor | float  # of its tokens' values in it: one over the count of a mean, factors inside of a sum
    gradient: Tensor | None = None  # [] that has arrived; of a vector a combination of all


@dataclass
class _Path:
    """Sums in the graph of a loss that the same operations lead to."""

    names: str  # of the nodes from the loss to the sums
    sums: list[_Sum] = field(default_factory=list)
    is_taken: bool = False  # a sum of it was found, whether or not it could be read
    several: bool = False  # there may be others on the path, in another batch or on another rank

    @property
    def checksum(self) -> int:
        return crc32(self.names.encode())


@dataclass
class _Step:
    """Record of the step that runs, on this rank."""

    backwards: list[list[_Path]] = field(default_factory=list)
    num_backwards: int = 0
    is_half: bool = False
    left_out: bool = False  # sums that were not looked at
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


class _UnreadableError(Exception):
    """The factor by which a sum multiplies its tokens cannot be read."""


class _HookedError(_UnreadableError):
    """A tensor that it needs has hooks of the script's, or of a framework's."""


class OfReplica(Protocol):
    """A model that is split over the sequence."""

    replica: Replica


class TokenFactors:
    """`ds_hetero.runtime.step_checks.protocol.StepCheck` of the sums in the losses of one split model.

    Args:
        model: whose replica may change between steps.
        accumulation: micro-batches of an optimizer step.
    """

    def __init__(self, model: OfReplica, accumulation: int) -> None:
        self._model = model
        self._slots = min(accumulation, _MOST_BACKWARDS)
        self._stride = -(-accumulation // _MOST_BACKWARDS)
        self.width = 3 + self._slots * _MOST_PATHS * len(_Factors._fields)
        self._step, self._number = _Step(), 0
        self._names: dict[int, str] = {}  # of the paths of the step that is judged, by their checksums

    def note_backward(self, loss: Tensor) -> None:
        """The script gives ``loss``, which it has computed itself, to backward; waits for no device."""
        step = self._step
        number = step.num_backwards
        step.num_backwards += 1
        if len(step.backwards) >= self._slots or (number + self._number) % self._stride or loss.grad_fn is None:
            return
        step.device = loss.device
        step.is_half |= loss.element_size() < 4
        paths: dict[str, _Path] = {}
        sums, is_cut = _sums_of(loss.grad_fn)
        step.left_out |= is_cut
        for node, names, is_part in sums:
            path = paths.setdefault(names, _Path(names))
            path.several |= is_part or path.is_taken
            path.is_taken = True
            try:
                path.sums.append(_watched(node))
            except _UnreadableError as error:
                step.left_out |= isinstance(error, _HookedError)
            # The likelihood of half logits is half, and the loss may be of fp32 all the same.
            step.is_half |= _is_half(node)
        step.backwards.append(list(paths.values()))

    @torch.no_grad()
    def numbers(self) -> tuple[Tensor, ...]:
        """See `StepCheck`."""
        step, self._step = self._step, _Step()
        self._number += 1
        self._names = {path.checksum: path.names for paths in step.backwards for path in paths}
        start = [float(self._model.replica.replica_id), float(step.is_half), float(step.left_out)]
        parts = [torch.tensor(start, dtype=torch.float64)]
        for slot in range(self._slots):
            paths = step.backwards[slot] if slot < len(step.backwards) else []
            parts += [_numbers_of(path, step.device) for path in paths]
            parts += [_NO_PATH] * (_MOST_PATHS - len(paths))
        return tuple(parts)

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """See `StepCheck`."""
        replicas = ranks_by_value((rank, row[0]) for rank, row in enumerate(rows)).values()
        rtol = _RTOL_HALF if any(row[1] for row in rows) else _RTOL
        of_ranks = [_by_path(row[3:]) for row in rows]
        undecided = Undecided(_LEFT_OUT) if any(row[2] for row in rows) else None
        for ranks in replicas:
            for key in sorted({key for rank in ranks for key in of_ranks[rank]}):
                factors = {rank: of_ranks[rank][key] for rank in ranks if key in of_ranks[rank]}
                ends = [one.least for one in factors.values()], [one.most for one in factors.values()]
                if not any(_differ(end, rtol) for end in ends):
                    continue
                if not any(one.several for one in factors.values()):
                    # Ranks of other replicas may have no such sum; they raise the error without its names.
                    return _error({rank: one.most for rank, one in factors.items()}, self._names.get(key[1], ""))
                undecided = Undecided(_OF_SEVERAL)
        return undecided


def _sums_of(top: Node) -> tuple[list[tuple[Node, str, bool]], bool]:
    """Nodes of a loss that add up or average, above all other sums; and whether there are more than are looked at.

    With each the names of the nodes on the way to it, in which additions do not count, as of ``total = total + chunk``;
    and whether it is one of a list that the script has stacked.
    """
    todo: list[tuple[Node, tuple[str, ...], bool]] = [(top, (), False)]
    seen: set[Node] = set()
    paths: set[tuple[str, ...]] = set()
    sums: list[tuple[Node, str, bool]] = []
    is_cut = False
    while todo and len(seen) < _MOST_NODES:
        node, way, is_part = todo.pop()
        if node in seen or _numel(node) > _MOST_SCALARS:
            continue
        seen.add(node)
        if node.name() != _ADDITION:
            way = (*way, node.name())
        below: list[Node] = [one for one, _ in node.next_functions if one is not None]
        if _adds_up(node):
            below = _scalars_of(node)
            if _is_of_tokens(node) and (way in paths or len(paths) < _MOST_PATHS):
                paths.add(way)
                sums.append((node, "/".join(way), is_part))
            elif _is_of_tokens(node):
                is_cut = True
        elif node.name() in _STACKS:
            is_part |= not _of_one_result(below)
        todo += [(one, way, is_part) for one in reversed(below)]
    return sums, is_cut or bool(todo)


def _is_of_tokens(node: Node) -> bool:
    """Whether a sum's factor has to be that of other ranks.

    Of a sum over scalars only the sums below count: means of chunks may be weighed by the chunks' tokens. A penalty on
    parameters is the same on all ranks. Under a declared ``"loss"`` each rank multiplies it by its share of the tokens,
    and these shares add up to one.
    """
    return not _scalars_of(node) and not may_be_of_parameters(node)


def _adds_up(node: Any) -> bool:
    """Whether a node adds up or averages elements."""
    if node.name() in _TOTALS:
        return True
    return node.name() in LIKELIHOODS | MEANS_OF_ELEMENTS and node._saved_reduction in (1, 2)


def _scalars_of(node: Node) -> list[Node]:
    """Return the scalars that a sum is made of, such as means of sequences or ranks; empty for a sum over tokens.

    Operations on few numbers lead from it to a stack of scalars, or to a gather over ranks, which is a function of
    Python's. From a sum over tokens they lead to logits, which are many.
    """
    below = _only_operand(node)
    while below is not None and _numel(below) <= _MOST_SCALARS:
        if below.name() in _STACKS:
            are_scalars = all(_numel(part) == 1 for part, _ in below.next_functions if part is not None)
            return [below] if are_scalars else []
        if issubclass(type(below), BackwardCFunction):
            return [below]
        below = _only_operand(below)
    return []


def _of_one_result(parts: Sequence[Node]) -> bool:
    """Whether several parts of a stack are made of one result, such as that of a gather over ranks."""
    ways = []
    for part in parts:
        way: set[Node] = set()
        one: Node | None = part
        while one is not None and _numel(one) <= _MOST_SCALARS:
            way.add(one)
            one = None if _adds_up(one) else _only_operand(one)
        ways.append(way)
    return len(parts) > 1 and bool(set.intersection(*ways))


def _only_operand(node: Node) -> Node | None:
    below = [one for one, _ in node.next_functions if one is not None]
    return below[0] if len(below) == 1 else None


def _numel(node: Any) -> int:
    """Return the elements of a node's first result; for a leaf those of its tensor."""
    metadata = node._input_metadata
    return prod(int(size) for size in metadata[0].shape) if metadata else _MOST_SCALARS + 1


def _is_half(node: Any) -> bool:
    return bool(node._input_metadata[0].dtype.itemsize < 4)


def _watched(node: Any) -> _Sum:
    """Let a hook keep the gradient that arrives at a sum."""
    one = _Sum(_share_of_tokens(node))

    def keep(gradients: tuple[Tensor | None, ...]) -> None:
        if gradients and gradients[0] is not None:
            one.gradient = _combined(gradients[0].detach())

    node.register_prehook(keep)
    return one


def _share_of_tokens(node: Any) -> Tensor | float:
    """Return the factor of single tokens in a sum: inside a mean, one over its count."""
    if node.name() in LIKELIHOODS:
        return 1 / total_weight(node, _saved) if node._saved_reduction == 1 else 1.0
    if node.name() in MEANS_OF_ELEMENTS:
        return 1 / max(_operand_numel(node), 1) if node._saved_reduction == 1 else 1.0
    share: Tensor | float = 1.0
    is_weighted = False
    one: Any = node
    while one is not None:
        number: Tensor | float | None = 1.0
        if one.name() in ("MeanBackward0", "MeanBackward1"):
            number = 1 / max(prod(int(size) for size in one._saved_self_sym_sizes) // max(_numel(one), 1), 1)
        elif one.name() in _PRODUCTS:
            if one.name().startswith("Div") and one.next_functions[0][0] is None:
                break  # a number divided by the tokens' values
            number = _multiplier(one)
        elif one.name() not in SAME_VALUES | _TOTALS:
            break
        if number is None:
            is_weighted = True
        elif is_weighted and not (isinstance(number, float) and number == 1):
            raise _UnreadableError  # weights of elements may undo it, such as counts that a mean below is divided by
        else:
            share = share * number
        one = _only_operand(one)
    return share


def _saved(node: Any, name: str) -> Any:
    """Return a tensor that a node keeps for its backward, unless a hook would run for it.

    To read runs the hook: one that offloads forgets what it has given back, so that the backward finds nothing; one
    of checkpoints computes their region again.

    Raises:
        _HookedError: it has hooks.
    """
    if getattr(node, f"_raw_saved_{name}").unpack_hook is not None:
        raise _HookedError
    return getattr(node, f"_saved_{name}")


def _operand_numel(node: Node) -> int:
    """Return elements of what a node was made of, the first that has gradients."""
    below, index = next((one, index) for one, index in node.next_functions if one is not None)
    metadata: Any = below._input_metadata
    return prod(int(size) for size in metadata[index].shape)


def _multiplier(node: Any) -> Tensor | None:
    """Return the number that a product or a quotient multiplies all elements with; None of unlike weights.

    Raises:
        _UnreadableError: where a rank has one token, its weight looks like a number that all tokens share.
    """
    value = _saved(node, "other" if node.next_functions[0][0] is not None else "self")
    if not isinstance(value, Tensor) or (value.dim() and value.numel() == 1 and _numel(node) == 1):
        raise _UnreadableError
    if value.numel() != 1:
        return None
    number = value.detach().double().reshape(())
    return 1 / number if node.name().startswith("Div") else number


def _combined(gradient: Tensor) -> Tensor:
    """[] of a gradient of any shape: itself of a scalar, a sum with fixed unlike weights of a vector."""
    flat = gradient.double().reshape(-1)
    order = torch.arange(len(flat), device=flat.device, dtype=torch.float64)
    return (flat * (1 + torch.frac(order * _GOLDEN))).sum()


_NO_PATH = torch.tensor([0.0, 0.0, float("nan"), float("nan")], dtype=torch.float64)  # see `_Factors`


def _numbers_of(path: _Path, device: torch.device) -> Tensor:
    """Summarize the factors of a path as the numbers of `_Factors`, [4].

    A rank without labels may leave its sum out by a factor of zero, or divide by its count: no token of it counts.
    """
    start = torch.tensor([float(path.checksum), float(path.several)], dtype=torch.float64, device=device)
    factors = [(one.gradient * one.share).to(device) for one in path.sums if one.gradient is not None]
    if not factors:
        return torch.cat([start, torch.full_like(start, float("nan"))])
    every = torch.stack(factors)
    left_out = ~every.isfinite() | (every == 0)
    least = every.masked_fill(left_out, float("inf")).min()
    most = every.masked_fill(left_out, -float("inf")).max()
    return torch.cat([start, torch.stack([least, most])])


def _by_path(numbers: Sequence[float]) -> dict[tuple[int, int], _Factors]:
    """Factors by the number of the backward and the way to the sums; of those that count."""
    size = len(_Factors._fields)
    factors: dict[tuple[int, int], _Factors] = {}
    for start in range(0, len(numbers), size):
        one = _Factors(*numbers[start : start + size])
        if one.path and isfinite(one.most):
            factors[start // (size * _MOST_PATHS), int(one.path)] = one
    return factors


def _differ(factors: Sequence[float], rtol: float) -> bool:
    return bool(factors) and max(factors) - min(factors) > rtol * max(map(abs, factors))


def _error(factors: dict[int, float], names: str) -> ConfigError:
    largest = max(factors.values(), key=abs)
    shares = [f"{factor / largest:.4g}" for factor in factors.values()]
    place = f" The sum is {names.split('/')[-1]}, the last of {names} in the graph of the loss." if names else ""
    return ConfigError(
        f"the loss given to backward weighs the sums of ranks over their tokens by {shares} on ranks {list(factors)}, "
        f"relative to the largest, where one process divides the sum over all tokens by one number.{place} So it is "
        "with an average of the ranks' means, and where a mean over weights is said to be one over labels. Divide the "
        "sum over all ranks, by a differentiable all_reduce, by the divisor of all ranks, which needs no gradient; or "
        "give values of single tokens to handle.mean(per_token, batch); or set model.loss_function, which is called "
        "with the logits and labels of the whole batch."
    )


_OF_SEVERAL = (
    "the loss given to backward adds up several sums that are made alike, as of chunks, documents or sequences, and "
    "their factors differ between ranks. That is right of the means of whole documents, and wrong of chunks whose sum "
    "is divided by the rank's own count: which it is was not checked"
)
_LEFT_OUT = (
    f"the loss given to backward has more than {_MOST_PATHS} kinds of sums, or sums whose tensors are offloaded or "
    "checkpointed: that these have one factor on all ranks was not checked"
)
