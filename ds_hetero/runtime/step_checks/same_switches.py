"""Check that all ranks run and train one model: what is trained, train() and eval(), hooks on gradients, autocast.

In one process there is one model. Ranks hold a copy each, which a script may switch on one of them alone. DeepSpeed
averages gradients of the copies whatever they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

from torch import nn

from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.model_switches import (
    AUTOCAST,
    REQUIRES_GRAD,
    TRAINING,
    autocast_dtype,
    by_checksum,
    checksum,
    unlike,
)
from ds_hetero.runtime.peers.calls import SWITCH, own_calls
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.step_checks.protocol import Undecided, Verdict

_COMPARING = "comparing requires_grad, which has changed there (freeze and unfreeze parameters on every rank alike)"


class _Switches(NamedTuple):
    """Checksums of one rank about one step."""

    requires_grad: float
    training: float
    autocast: float
    hooks: float


class SameSwitches:
    """`ds_hetero.runtime.step_checks.protocol.StepCheck` of the model's switches; on the host alone.

    Args:
        module: what is trained.
        is_split: ranks exchange activations, whose precision has to be the same; else autocast moves rounding alone.
    """

    width = len(_Switches._fields)

    def __init__(self, module: nn.Module, *, is_split: bool) -> None:
        self._modules, self._parameters = list(module.modules()), list(module.parameters())
        self._is_split = is_split
        self._trained = self._what_is_trained()  # when it was compared last
        self._autocast: set[str] = set()  # under which forwards of the step ran

    def note_forward(self, device_type: str) -> None:
        """The script calls the engine, to train.

        Caller: every rank of the world.
        Collectives: those of `_agree_on_trained`, where the model is not split.

        Raises:
            ModelError: see `_agree_on_trained`.
            StepError: see `_agree_on_trained`.
        """
        self._autocast.add(str(autocast_dtype(device_type)))
        if not self._is_split:  # else it is compared at every forward
            self._agree_on_trained()

    def _agree_on_trained(self) -> None:
        """Compare what is trained where that has changed on this rank.

        Ranks that run a model whole exchange nothing before the backward, where messages of ranks that train other
        parameters have other sizes. A rank on which nothing has changed goes on into its backward and waits there: its
        record of calls lacks this comparison, by which it is told from one that goes the same way.

        Caller: every rank of the world on which it has changed.
        Collectives: one `on_all_ranks`, where it has.

        Raises:
            ModelError: it is not the same on all ranks; on every rank.
            StepError: it has not changed on the others.
        """
        trained = self._what_is_trained()
        if trained == self._trained:
            return
        self._trained = trained
        own_calls.record(SWITCH)
        with waiting_for_peers(_COMPARING):
            by_rank = on_all_ranks(lambda: trained)
        if len(set(by_rank)) > 1:
            raise unlike(REQUIRES_GRAD, by_checksum(by_rank))

    def _what_is_trained(self) -> int:
        return checksum(parameter.requires_grad for parameter in self._parameters)

    def numbers(self) -> Sequence[float]:
        """See `StepCheck`."""
        autocast, self._autocast = sorted(self._autocast), set()
        return _Switches(
            requires_grad=self._what_is_trained(),
            training=checksum(module.training for module in self._modules),
            autocast=crc32(repr(autocast).encode()),
            hooks=checksum(_num_hooks(parameter) for parameter in self._parameters),
        )

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """See `StepCheck`."""
        by_rank = dict(zip(_Switches._fields, zip(*rows, strict=True), strict=True))
        refused = [REQUIRES_GRAD, TRAINING]
        if self._is_split:
            refused.append(AUTOCAST)
        for switch in refused:
            if len(set(by_rank[switch])) > 1:
                return unlike(switch, by_checksum(by_rank[switch]))
        for switch in ("hooks", AUTOCAST):
            if len(set(by_rank[switch])) > 1:
                return Undecided(_TOLD[switch].format(by_checksum(by_rank[switch])), subject=switch)
        return None


# What may be right: a hook that only looks, as loggers register on one rank; the dtype that a device has.
_TOLD = {
    "hooks": (
        "the hooks on gradients of the model's parameters are not the same on all ranks: by rank {}. If they change "
        "gradients, one process has them once and the ranks train by unlike ones: register such hooks on every rank "
        "alike"
    ),
    AUTOCAST: (
        "autocast, and its dtype, is not the same in the forwards of a step on all ranks: by rank {}. Their gradients "
        "are averaged, and are rounded by rank"
    ),
}


def _num_hooks(parameter: nn.Parameter) -> int:
    """Hooks that see or change its gradient."""
    on_gradient = getattr(parameter, "_backward_hooks", None) or ()
    on_accumulated = getattr(parameter, "_post_accumulate_grad_hooks", None) or ()
    return len(on_gradient) + len(on_accumulated)
