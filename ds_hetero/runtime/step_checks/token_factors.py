"""Check that the sums over tokens in a script's loss have the same factor on all ranks.

One process adds up values over all tokens of a batch and divides by one number; class weights, smoothing, a focal
factor, a penalty on logits are inside the sum. On parts of sequences each rank r has a sum S_r over its own tokens. The
gradient of the loss must have the same factor dL/dS_r on all ranks of a replica, however the loss combines the sums. An
average of the ranks' weighted means has unlike factors:

    loss                                         dL/dS_r
    (S_0 + S_1) / (D_0 + D_1)                    1 / (D_0 + D_1), on both ranks
    (S_0 / D_0 + S_1 / D_1) / 2                  1 / (2 D_0) and 1 / (2 D_1)

Sums and means are nodes in the graph of the loss: a walk from the loss down finds them, and a hook on each sees the
gradient that arrives, after all scaling. So the check need not know what is added up. A rank without labels still has
the factor of its sum, which distinguishes an average of means from a loss that is divided once.

The names of the nodes from the loss to a sum are its path. A rank has several sums of one path if it adds up chunks of
its tokens, which have one factor, or means of documents, which have a factor each. No rank's numbers tell which of
these it is, so unlike factors of a path with several sums are only a warning. A stack of one sum may be the mean of a
document, too, if every rank holds one whole document and nothing else; otherwise it is a mean of the rank's part.

A rank without tokens gets a token without a label, so that no shape is empty. On a rank with a single token, the weight
of that token looks like a number by which all tokens are multiplied. So the factor is compared with and without such a
number, and counts as different only if neither value fits the factors of the other ranks.

If only one rank has labels, the other ranks may multiply their sums by zero, and there is nothing to compare with. A
factor of one over the rank's labels and over the number of ranks is that of an average of means. A loss that is scaled
on purpose may have it, too, so it is only a warning.

Plain cross entropy has a stronger check, that of the weight of every label, in
`ds_hetero.runtime.step_checks.token_weights`. All numbers stay on the device until the one exchange of the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from ds_hetero.common.text import ranks_by_value
from ds_hetero.errors import ConfigError, HeteroError
from ds_hetero.runtime.data.graph_nodes import ELEMENT_LOSSES, LIKELIHOODS, SAME_VALUES, total_weight
from ds_hetero.runtime.data.parameter_terms import may_be_of_parameters
from ds_hetero.runtime.data.saved_hooks import hook_of
from ds_hetero.runtime.data.shard_info import may_be_one_document, shard_info
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_checks.protocol import Undecided, Verdict

_MAX_BACKWARDS = 8  # of a step that are examined, spread over its accumulation
# Paths to sums in one loss. Chosen, never measured: cross entropy with smoothing has 2, and terms have one each.
_MAX_PATHS_TO_SUMS = 4
_MAX_NODES_TO_SUMS = (
    4096  # of a walk, which sees the operations on scalars above the sums: two for each penalized weight
)
_MAX_SCALARS = 64  # elements of a node above the sums: one per sequence or rank; chosen, never measured
_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are spread evenly: Weyl's sequence
# Relative differences that rounding explains: a few operations on scalars in fp32, and in half precision, where numbers
# are rounded by 2^-9 each. In fp32, counts of labels that differ by one in a thousand are distinguished.
_RTOL, _RTOL_HALF = 1e-4, 3e-2

_TOTALS = frozenset({"SumBackward0", "SumBackward1", "MeanBackward0", "MeanBackward1"})
_STACKS = frozenset({"StackBackward0", "CatBackward0"})
_PRODUCTS = frozenset({"MulBackward0", "DivBackward0"})
_ADDITION = "AddBackward0"
_IGNORED = -100
# Kinds of paths: of one sum; of one sum that may be the mean of a whole document; of several sums.
_ONE_SUM, _OF_DOCUMENT, _SEVERAL = range(3)
_MAX_TOKEN_NUMBERS = 2  # that may be weights of a rank's single token: its weight, and a focal factor


class _Factors(NamedTuple):
    """Numbers that ranks exchange about the factors of one rank's sums with one path."""

    path: float  # checksum of the path; 0 if the rank has no such path
    kind: float  # `_ONE_SUM`, `_OF_DOCUMENT` or `_SEVERAL`
    min_factor: float  # smallest factor; not finite if no sum has a factor that counts
    max_factor: float  # largest factor
    # Numbers that either belong to the factor or are weights of the rank's single token; 1 if there are none.
    first_number: float
    second_number: float
    to_own_mean: float  # factor relative to that of the mean over the rank's own labels, averaged over ranks

    @property
    def is_counted(self) -> bool:
        """Whether a sum has a factor that counts."""
        return isfinite(self.max_factor)

    @property
    def is_settled(self) -> bool:
        """Whether the factor is certain: no number of the rank may be a weight of its single token instead."""
        return self.first_number == self.second_number == 1

    def candidates(self) -> list[_Factors]:
        """Return the possible factors: multiplied by neither number, by the first, by the second, and by both."""
        products = (1.0, self.first_number, self.second_number, self.first_number * self.second_number)
        return [self._times(product) for product in products]

    def nearest_to(self, factor: float) -> _Factors:
        """Return the candidate that is nearest to ``factor``."""
        return min(self.candidates(), key=lambda candidate: abs(candidate.max_factor - factor))

    def _times(self, number: float) -> _Factors:
        min_factor, max_factor = self.min_factor * number, self.max_factor * number
        return self._replace(min_factor=min_factor, max_factor=max_factor, first_number=1.0, second_number=1.0)


@dataclass
class _Sum:
    """A sum in the graph of a loss; its tensors are on the device.

    Attributes:
        share: factor of a token's value in the result of the node: one over the count of a mean, or a number by which a
            sum multiplies.
        token_numbers: [] each, further numbers that belong to the share, or are weights of the rank's single token.
        gradient: [], the gradient of the result; for a vector, a combination of its elements.
    """

    share: Tensor | float
    token_numbers: tuple[Tensor, ...] = ()
    gradient: Tensor | None = None


@dataclass
class _Path:
    """The sums in the graph of a loss that have one path.

    Attributes:
        names: of the nodes from the loss to the sums, joined by "/".
        sums: the sums that could be read.
        num_found: number of sums, also of sums that could not be read.
        is_stacked: the script has stacked a sum; the stack may have more sums in another batch or on another rank.
        kind: see `_Factors`.
        num_labels: [], labels of the rank that count; None if not known.
        divisor: by which the engine's backward divides the loss.
    """

    names: str
    sums: list[_Sum] = field(default_factory=list)
    num_found: int = 0
    is_stacked: bool = False
    kind: int = _ONE_SUM
    num_labels: Tensor | None = None
    divisor: int = 1

    @property
    def checksum(self) -> int:
        """Checksum of ``names``, by which ranks tell each other which path they mean."""
        return crc32(self.names.encode())


@dataclass
class _Step:
    """What this rank has noted in the present step."""

    backwards: list[list[_Path]] = field(default_factory=list)  # the paths in the loss of each examined backward
    num_backwards: int = 0  # of all backwards
    is_half: bool = False  # a loss, or a sum in one, is of half precision
    left_out: bool = False  # there are sums that were not examined
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


class _StepFlags(NamedTuple):
    """Numbers of one rank about a whole step."""

    replica: float  # id of the rank's replica
    is_half: float  # a loss, or a sum in one, is of half precision
    left_out: float  # there are sums that were not examined


class _FoundSum(NamedTuple):
    """A sum over tokens in the graph of a loss."""

    node: Node
    names: str  # of its path
    is_stacked: bool  # the script has stacked it with others


class _PathKey(NamedTuple):
    """Identifies a path in the losses of a step."""

    backward: int  # index of the examined backward
    path: int  # checksum of the path


class _UnreadableError(Exception):
    """The factor of a token's value in a sum cannot be read."""


class _HookedError(_UnreadableError):
    """A saved tensor that is needed has hooks, of the script or a framework."""


class ModelOnReplica(Protocol):
    """What `TokenFactors` reads of a model whose sequences are split over ranks."""

    latest_positions: Tensor | None

    @property
    def replica(self) -> Replica:
        """This rank's replica, which may change between steps."""


class TokenFactors:
    """Compares the factors of the sums in the losses of one split model between ranks, as a step check.

    Args:
        model: whose replica may change between steps.
        accumulation: micro-batches of an optimizer step.
    """

    def __init__(self, model: ModelOnReplica, accumulation: int) -> None:
        self._model = model
        self._slots = min(accumulation, _MAX_BACKWARDS)
        self._stride = -(-accumulation // _MAX_BACKWARDS)
        self.width = len(_StepFlags._fields) + self._slots * _MAX_PATHS_TO_SUMS * len(_Factors._fields)
        self._step, self._num_steps = _Step(), 0
        self._names: dict[int, str] = {}  # names of the paths of the step that is judged, by checksum

    def note_backward(self, loss: Tensor, divisor: int = 1) -> None:
        """Examine the sums in ``loss``, which the script computed itself; does not wait for the device.

        Args:
            divisor: by which the engine's backward divides the loss.
        """
        step = self._step
        index = step.num_backwards
        step.num_backwards += 1
        is_skipped = (index + self._num_steps) % self._stride != 0
        if len(step.backwards) >= self._slots or is_skipped or loss.grad_fn is None:
            return
        step.device = loss.device
        step.is_half |= loss.element_size() < 4
        paths: dict[str, _Path] = {}
        sums, is_cut = _find_sums(loss.grad_fn)
        step.left_out |= is_cut
        for found_sum in sums:
            path = paths.setdefault(found_sum.names, _Path(found_sum.names))
            path.is_stacked |= found_sum.is_stacked
            path.num_found += 1
            try:
                path.sums.append(_watch(found_sum.node))
            except _UnreadableError as error:
                step.left_out |= isinstance(error, _HookedError)
            # The likelihood of half logits is of half precision, even if the loss is of fp32.
            step.is_half |= _is_half(found_sum.node)
        self._note_labels(paths.values(), divisor)
        step.backwards.append(list(paths.values()))

    def _note_labels(self, paths: Iterable[_Path], divisor: int) -> None:
        """Store in ``paths`` the number of labels of the latest batch, the divisor, and the kind of each path.

        The kind depends on whether this rank holds one whole document of the batch and nothing else.
        """
        positions = self._model.latest_positions
        info = shard_info(positions)
        num_labels = None if info is None or info.labels is None else info.labels.ne(_IGNORED).sum()
        for path in paths:
            path.num_labels, path.divisor = num_labels, divisor
            if path.num_found > 1:
                path.kind = _SEVERAL
            elif path.is_stacked and may_be_one_document(positions, self._model.replica.rank):
                path.kind = _OF_DOCUMENT

    @torch.no_grad()
    def numbers(self) -> tuple[Tensor, ...]:
        """Return the flags of the step that ends, and the numbers of `_Factors` for each path."""
        step, self._step = self._step, _Step()
        self._num_steps += 1
        self._names = {path.checksum: path.names for paths in step.backwards for path in paths}
        flags = _StepFlags(float(self._model.replica.replica_id), float(step.is_half), float(step.left_out))
        parts = [torch.tensor(flags, dtype=torch.float64)]
        for slot in range(self._slots):
            paths = step.backwards[slot] if slot < len(step.backwards) else []
            parts += [_numbers_of(path, step.device) for path in paths]
            parts += [_NO_PATH] * (_MAX_PATHS_TO_SUMS - len(paths))
        return tuple(parts)

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """Refuse different factors of the ranks of a replica; warn of factors that cannot be judged."""
        num_flags = len(_StepFlags._fields)
        flags = [_StepFlags(*row[:num_flags]) for row in rows]
        by_rank = [_factors_by_path(row[num_flags:]) for row in rows]
        rtol = _RTOL_HALF if any(rank_flags.is_half for rank_flags in flags) else _RTOL
        undecided = Undecided(_LEFT_OUT) if any(rank_flags.left_out for rank_flags in flags) else None
        for ranks in ranks_by_value((rank, rank_flags.replica) for rank, rank_flags in enumerate(flags)).values():
            for key in sorted({key for rank in ranks for key in by_rank[rank]}):
                found = self._judge_path(key, {rank: by_rank[rank] for rank in ranks}, rtol)
                if isinstance(found, HeteroError):
                    return found
                if found is not None:
                    undecided = found
        return undecided

    def _judge_path(self, key: _PathKey, by_rank: dict[int, dict[_PathKey, _Factors]], rtol: float) -> Verdict:
        """Compare the factors of one path on the ranks of a replica."""
        factors = _settle(
            {rank: paths[key] for rank, paths in by_rank.items() if key in paths and paths[key].is_counted}
        )
        undecided = None
        ignored_ranks = [rank for rank, paths in by_rank.items() if rank not in factors and _is_ignored(paths, key)]
        if len(factors) == 1 and ignored_ranks:
            ((rank, only_factors),) = factors.items()
            if abs(only_factors.to_own_mean - 1) <= rtol:
                undecided = Undecided(_ONE_RANK.format(rank, ignored_ranks), subject=_ONE_RANK)
        min_factors = [factors_of_rank.min_factor for factors_of_rank in factors.values()]
        max_factors = [factors_of_rank.max_factor for factors_of_rank in factors.values()]
        if not _differ(min_factors, rtol) and not _differ(max_factors, rtol):
            return undecided
        kinds = {factors_of_rank.kind for factors_of_rank in factors.values()}
        if _SEVERAL in kinds or kinds == {_OF_DOCUMENT}:
            return Undecided(_SEVERAL_SUMS)
        # Ranks of other replicas may have no such sum; they raise the error without its names.
        return _error(dict(zip(factors, max_factors, strict=True)), self._names.get(key.path, ""))


def _find_sums(top: Node) -> tuple[list[_FoundSum], bool]:
    """Return the uppermost sums and means over tokens in a graph, and whether there are more than were examined.

    Additions do not count in a path, since a script may add up chunks one by one: ``total = total + chunk``.

    Args:
        top: node of the loss.
    """
    todo: list[tuple[Node, tuple[str, ...], bool]] = [(top, (), False)]  # node, names above it, is below a stack
    seen: set[Node] = set()
    paths: set[tuple[str, ...]] = set()
    sums: list[_FoundSum] = []
    is_cut = False
    while todo and len(seen) < _MAX_NODES_TO_SUMS:
        node, names, is_stacked = todo.pop()
        if node in seen or _numel(node) > _MAX_SCALARS:
            continue
        seen.add(node)
        if node.name() != _ADDITION:
            names = (*names, node.name())
        operands: list[Node] = [operand for operand, _ in node.next_functions if operand is not None]
        if _is_sum_or_mean(node):
            operands = _scalars_of(node)
            if _is_over_tokens(node) and (names in paths or len(paths) < _MAX_PATHS_TO_SUMS):
                paths.add(names)
                sums.append(_FoundSum(node, "/".join(names), is_stacked))
            elif _is_over_tokens(node):
                is_cut = True
        elif node.name() in _STACKS:
            is_stacked |= not _have_one_origin(operands)
        todo += [(operand, names, is_stacked) for operand in reversed(operands)]
    return sums, is_cut or bool(todo)


def _is_over_tokens(node: Node) -> bool:
    """Whether a sum or mean is one over tokens, so that its factor has to be the same on all ranks.

    Two kinds are not. The factors in a sum over scalars may differ: means of chunks may be weighed by the chunks'
    tokens; the sums below it are checked. A penalty on parameters is the same on all ranks; under a declared ``"loss"``
    each rank multiplies it by its share of the tokens, and these shares add up to one.
    """
    return not _scalars_of(node) and not may_be_of_parameters(node)


def _is_sum_or_mean(node: Any) -> bool:
    """Whether a node computes a sum or a mean over elements."""
    if node.name() in _TOTALS:
        return True
    return node.name() in LIKELIHOODS | ELEMENT_LOSSES and node._saved_reduction in (1, 2)


def _scalars_of(node: Node) -> list[Node]:
    """Return the node of the scalars over which a sum is taken, such as means of sequences; [] for a sum over tokens.

    The walk goes down from the sum while nodes have few elements. It ends at a stack of scalars, or at a gather over
    ranks, which is an autograd function written in Python. Below a sum over tokens it ends at logits, which have many
    elements.
    """
    operand = _only_operand(node)
    while operand is not None and _numel(operand) <= _MAX_SCALARS:
        if operand.name() in _STACKS:
            are_scalars = all(_numel(part) == 1 for part, _ in operand.next_functions if part is not None)
            return [operand] if are_scalars else []
        if issubclass(type(operand), BackwardCFunction):
            return [operand]
        operand = _only_operand(operand)
    return []


def _have_one_origin(parts: Sequence[Node]) -> bool:
    """Whether several parts of a stack were computed from one result, such as that of a gather over ranks."""
    nodes_of_parts = []
    for part in parts:
        nodes: set[Node] = set()
        node: Node | None = part
        while node is not None and _numel(node) <= _MAX_SCALARS:
            nodes.add(node)
            node = None if _is_sum_or_mean(node) else _only_operand(node)
        nodes_of_parts.append(nodes)
    return len(parts) > 1 and bool(set.intersection(*nodes_of_parts))


def _only_operand(node: Node) -> Node | None:
    """Return the operand with a gradient of a node that has one such operand; else None."""
    operands = [operand for operand, _ in node.next_functions if operand is not None]
    return operands[0] if len(operands) == 1 else None


def _numel(node: Any) -> int:
    """Return the elements of a node's first result; of a leaf, those of its tensor."""
    metadata = node._input_metadata
    return prod(int(size) for size in metadata[0].shape) if metadata else _MAX_SCALARS + 1


def _is_half(node: Any) -> bool:
    """Whether a node's first result is of half precision."""
    return bool(node._input_metadata[0].dtype.itemsize < 4)


def _watch(node: Any) -> _Sum:
    """Return a record of a sum; a hook stores the gradient that arrives at its node in it.

    Raises:
        _UnreadableError: the share of a token's value cannot be read.
    """
    watched = _Sum(*_share_of_tokens(node))

    def store_gradient(gradients: tuple[Tensor | None, ...]) -> None:
        if gradients and gradients[0] is not None:
            watched.gradient = _combine(gradients[0].detach())

    node.register_prehook(store_gradient)
    return watched


def _share_of_tokens(node: Any) -> tuple[Tensor | float, tuple[Tensor, ...]]:
    """Return the factor of a token's value in the result of a sum or mean: one over the count of a mean.

    Further sums, means and products with numbers below the node count as well. Example: (2 * x).mean() over 10 tokens
    has the share 2 / 10.

    Returns:
        The share; and numbers that belong to it, or are weights of the rank's single token, see `_Sum`.

    Raises:
        _UnreadableError: a number cannot be read, or stands below weights of elements; or there are more than
            `_MAX_TOKEN_NUMBERS` that may be weights of a single token.
    """
    if node.name() in LIKELIHOODS:
        return (1 / total_weight(node, _saved) if node._saved_reduction == 1 else 1.0), ()
    if node.name() in ELEMENT_LOSSES:
        return (1 / max(_operand_numel(node), 1) if node._saved_reduction == 1 else 1.0), ()
    share: Tensor | float = 1.0
    token_numbers: list[Tensor] = []
    is_weighted = False
    current: Any = node
    while current is not None:
        number: Tensor | float | None = 1.0
        if current.name() in ("MeanBackward0", "MeanBackward1"):
            num_elements = prod(int(size) for size in current._saved_self_sym_sizes)
            number = 1 / max(num_elements // max(_numel(current), 1), 1)
        elif current.name() in _PRODUCTS:
            if current.name().startswith("Div") and current.next_functions[0][0] is None:
                break  # a number divided by the tokens' values
            number = _multiplier(current)
            if isinstance(number, Tensor) and _may_be_weight_of_token(current):
                token_numbers.append(number)
                number = 1.0
        elif current.name() not in SAME_VALUES | _TOTALS:
            break
        if number is None:
            is_weighted = True
        elif is_weighted and not (isinstance(number, float) and number == 1):
            raise _UnreadableError  # the weights may undo the number, as counts undo the division of a mean below
        else:
            share = share * number
        current = _only_operand(current)
    if len(token_numbers) > _MAX_TOKEN_NUMBERS:
        raise _UnreadableError
    return share, tuple(token_numbers)


def _saved(node: Any, name: str) -> Any:
    """Return a tensor that a node has saved for its backward.

    Raises:
        _HookedError: the tensor has hooks, which reading it would run. A hook that offloads may return it only once, so
            that the backward would not find it; one of checkpoints computes a whole region again.
    """
    if hook_of(node, name) is not None:
        raise _HookedError
    return getattr(node, f"_saved_{name}")


def _operand_numel(node: Node) -> int:
    """Return the elements of the first operand with a gradient."""
    operand, index = next((operand, index) for operand, index in node.next_functions if operand is not None)
    metadata: Any = operand._input_metadata
    return prod(int(size) for size in metadata[index].shape)


def _multiplier(node: Any) -> Tensor | None:
    """Return the number by which an autograd node ``Mul`` or ``Div`` multiplies its operand, 1 / divisor for ``Div``.

    Returns None if the other operand has several elements.
    """
    value = _saved_operand(node)
    if value.numel() != 1:
        return None
    number = value.detach().double().reshape(())
    return 1 / number if node.name().startswith("Div") else number


def _may_be_weight_of_token(node: Any) -> bool:
    """Whether the number of `_multiplier` looks like the weight of a rank's single token."""
    return bool(_saved_operand(node).dim()) and _numel(node) == 1


def _saved_operand(node: Any) -> Tensor:
    """Return the tensor by which a product or quotient multiplies. Raises `_UnreadableError`: it is a Python number."""
    value = _saved(node, "other" if node.next_functions[0][0] is not None else "self")
    if not isinstance(value, Tensor):
        raise _UnreadableError
    return value


def _combine(gradient: Tensor) -> Tensor:
    """Return a scalar for a gradient of any shape: a scalar itself, or the elements' sum with fixed unlike weights."""
    flat = gradient.double().reshape(-1)
    order = torch.arange(len(flat), device=flat.device, dtype=torch.float64)
    return (flat * (1 + torch.frac(order * _GOLDEN))).sum()


_NAN = float("nan")
_NO_FACTORS = _Factors(0.0, 0.0, _NAN, _NAN, 1.0, 1.0, _NAN)
_NO_PATH = torch.tensor(_NO_FACTORS, dtype=torch.float64)


def _numbers_of(path: _Path, device: torch.device) -> Tensor:
    """Summarize the factors of a path as the numbers of `_Factors`, [7].

    Factors of zero and infinity do not count: a rank without labels may multiply its sum by zero, or divide it by its
    count of zero.
    """
    start = torch.tensor([float(path.checksum), float(path.kind)], dtype=torch.float64, device=device)
    # With several sums it would not be known whose weight a number is.
    sums = path.sums
    if len(sums) > 1:
        sums = [one_sum for one_sum in path.sums if not one_sum.token_numbers]
    factors_of_sums = []
    for one_sum in sums:
        if one_sum.gradient is not None:
            factors_of_sums.append((one_sum.gradient * one_sum.share).to(device))
    if not factors_of_sums:
        return torch.cat([start, _NO_PATH[len(start) :].to(device)])
    factors = torch.stack(factors_of_sums)
    is_ignored = ~factors.isfinite() | (factors == 0)
    min_factor = factors.masked_fill(is_ignored, float("inf")).min()
    max_factor = factors.masked_fill(is_ignored, -float("inf")).max()
    numbers = [number.to(device) for number in sums[0].token_numbers]
    numbers += [torch.ones_like(max_factor)] * (_MAX_TOKEN_NUMBERS - len(numbers))
    to_own_mean = _to_own_mean(path, max_factor) if len(factors_of_sums) == 1 else torch.full_like(max_factor, _NAN)
    return torch.cat([start, torch.stack([min_factor, max_factor, *numbers, to_own_mean])])


def _to_own_mean(path: _Path, factor: Tensor) -> Tensor:
    """Return [], a factor relative to that of the mean over the rank's own labels, averaged over ranks.

    The mean is over labels, or one that the node of the sum computes, as over weights of classes. The ratio that is
    nearer to 1 counts.
    """
    (gradient,) = (one_sum.gradient for one_sum in path.sums if one_sum.gradient is not None)
    ratios = [gradient.to(factor.device).reshape(())]
    if path.num_labels is not None:
        ratios.append(factor * path.num_labels.to(factor.device))
    candidates = torch.stack(ratios) * path.divisor
    return candidates.gather(0, (candidates - 1).abs().argmin()[None])[0]


def _factors_by_path(numbers: Sequence[float]) -> dict[_PathKey, _Factors]:
    """Return the factors in a rank's numbers by their paths."""
    size = len(_Factors._fields)
    by_path: dict[_PathKey, _Factors] = {}
    for index, start in enumerate(range(0, len(numbers), size)):
        factors = _Factors(*numbers[start : start + size])
        if factors.path:
            by_path[_PathKey(index // _MAX_PATHS_TO_SUMS, int(factors.path))] = factors
    return by_path


def _settle(by_rank: dict[int, _Factors]) -> dict[int, _Factors]:
    """Return the factors by rank, each the one of its `_Factors.candidates` that makes the ranks most alike.

    Only a rank with a single token has several candidates: a number there may belong to the factor or to that token.
    """
    if not by_rank:
        return {}
    settled = [factors for factors in by_rank.values() if factors.is_settled]
    references = settled[:1] or next(iter(by_rank.values())).candidates()
    attempts = []
    for reference in references:
        attempts.append({rank: factors.nearest_to(reference.max_factor) for rank, factors in by_rank.items()})
    return min(attempts, key=_relative_spread)


def _relative_spread(by_rank: dict[int, _Factors]) -> float:
    """Return the largest difference of factors relative to the largest factor."""
    factors = [rank_factors.max_factor for rank_factors in by_rank.values()]
    return (max(factors) - min(factors)) / (max(map(abs, factors)) or 1.0)


def _is_ignored(by_path: dict[_PathKey, _Factors], key: _PathKey) -> bool:
    """Whether a rank without a factor to compare for path ``key`` lacks it for want of labels.

    That is so if the rank has the path, with a factor of zero or infinity, or if none of its factors in the backward
    counts. A rank that has counted factors of other paths only computed another loss.
    """
    of_backward = [factors for path, factors in by_path.items() if path.backward == key.backward]
    return key in by_path or not any(factors.is_counted for factors in of_backward)


def _differ(factors: Sequence[float], rtol: float) -> bool:
    """Whether factors of ranks are unlike beyond rounding."""
    return bool(factors) and max(factors) - min(factors) > rtol * max(map(abs, factors))


def _error(factors: dict[int, float], names: str) -> ConfigError:
    """Return the error for unlike factors, by rank, of sums with a path of these ``names``."""
    largest = max(factors.values(), key=abs)
    shares = [f"{factor / largest:.4g}" for factor in factors.values()]
    location = f" The sum is {names.split('/')[-1]}, the last of {names} in the graph of the loss." if names else ""
    return ConfigError(
        f"the loss given to backward weighs the sums of ranks over their tokens by {shares} on ranks {list(factors)}, "
        f"relative to the largest, where one process divides the sum over all tokens by one number.{location} This "
        "happens with an average of the ranks' means, and if a mean over weights is declared as one over labels. "
        "Divide the sum over all ranks, by a differentiable all_reduce, by the divisor of all ranks, which needs no "
        "gradient; or give values of single tokens to handle.mean(per_token, batch); or set model.loss_function, which "
        "is called with the logits and labels of the whole batch."
    )


_SEVERAL_SUMS = (
    "the loss given to backward adds up several sums that are made alike, as of chunks, documents or sequences, and "
    "their factors differ between ranks. That is right for means of whole documents, and wrong for chunks whose sum is "
    "divided by the rank's own count: which of the two it is cannot be checked"
)
_ONE_RANK = (
    "the loss given to backward weighs the sum of rank {} over its tokens by one over its labels and over the number "
    "of ranks, and leaves out the sums of ranks {}. An average of the ranks' means does so if ranks without labels "
    "count as zero, and is wrong: one process does not divide by the number of ranks. A loss that is scaled on purpose "
    "looks alike"
)
_LEFT_OUT = (
    f"the loss given to backward has more than {_MAX_PATHS_TO_SUMS} kinds of sums, or sums whose tensors are offloaded "
    "or checkpointed: whether these have one factor on all ranks was not checked"
)
