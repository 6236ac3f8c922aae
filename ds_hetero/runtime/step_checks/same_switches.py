"""Check that the model has the same switches on all ranks: requires_grad, train() or eval(), gradient hooks, autocast.

Every rank holds a copy of the model. If a script freezes parameters on one rank alone, for example, DeepSpeed still
averages the gradients of all copies.
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
    checksum,
    checksum_texts,
    differing_switch_error,
)
from ds_hetero.runtime.peers.calls import SWITCH, own_calls
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.step_checks.protocol import Undecided, Verdict

_COMPARING = "comparing requires_grad, which has changed there (freeze and unfreeze parameters on every rank alike)"


class _Switches(NamedTuple):
    """Checksums of one rank's switches in one step."""

    requires_grad: float
    training: float
    autocast: float
    hooks: float


class SameSwitches:
    """Compares the model's switches between ranks, as a step check; computes on the host alone.

    Args:
        module: the model that is trained.
        is_split: ranks exchange activations, whose precision has to be the same. Otherwise autocast only changes
            rounding.
    """

    width = len(_Switches._fields)

    def __init__(self, module: nn.Module, *, is_split: bool) -> None:
        self._modules, self._parameters = list(module.modules()), list(module.parameters())
        self._is_split = is_split
        self._trained = self._checksum_of_trained()  # at the latest comparison
        self._autocast: set[str] = set()  # dtypes of autocast in the forwards of the step

    def note_forward(self, device_type: str) -> None:
        """Note a forward of training, when the script calls the engine.

        Caller: every rank of the world.
        Collectives: those of `_agree_on_trained`, if the model is not split.

        Raises:
            ModelError: see `_agree_on_trained`.
            StepError: see `_agree_on_trained`.
        """
        self._autocast.add(str(autocast_dtype(device_type)))
        if not self._is_split:  # a split model compares it at every forward anyway
            self._agree_on_trained()

    def _agree_on_trained(self) -> None:
        """Compare the trained parameters of all ranks, if they have changed on this rank.

        Ranks that run a model whole exchange nothing before the backward, where messages of ranks that train other
        parameters would have other sizes. A rank without a change goes on into its backward and waits there. Its record
        of calls lacks this comparison, so the waiting ranks can tell it from a rank that takes part.

        Caller: every rank of the world on which the trained parameters have changed.
        Collectives: one `on_all_ranks`, if they have.

        Raises:
            ModelError: the trained parameters differ between ranks; on every rank.
            StepError: they have not changed on another rank.
        """
        trained = self._checksum_of_trained()
        if trained == self._trained:
            return
        self._trained = trained
        own_calls.record(SWITCH)
        with waiting_for_peers(_COMPARING):
            by_rank = on_all_ranks(lambda: trained)
        if len(set(by_rank)) > 1:
            raise differing_switch_error(REQUIRES_GRAD, checksum_texts(by_rank))

    def _checksum_of_trained(self) -> int:
        """Return a checksum of ``requires_grad`` of all parameters."""
        return checksum(parameter.requires_grad for parameter in self._parameters)

    def numbers(self) -> Sequence[float]:
        """Return the numbers of `_Switches` for the step that ends."""
        autocast, self._autocast = sorted(self._autocast), set()
        return _Switches(
            requires_grad=self._checksum_of_trained(),
            training=checksum(module.training for module in self._modules),
            autocast=crc32(repr(autocast).encode()),
            hooks=checksum(_num_hooks(parameter) for parameter in self._parameters),
        )

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """Refuse unlike requires_grad, train() and autocast; warn of unlike hooks."""
        by_rank = dict(zip(_Switches._fields, zip(*rows, strict=True), strict=True))
        refused = [REQUIRES_GRAD, TRAINING]
        if self._is_split:
            refused.append(AUTOCAST)
        for switch in refused:
            if len(set(by_rank[switch])) > 1:
                return differing_switch_error(switch, checksum_texts(by_rank[switch]))
        for switch in ("hooks", AUTOCAST):
            if len(set(by_rank[switch])) > 1:
                return Undecided(_WARNINGS[switch].format(checksum_texts(by_rank[switch])), subject=switch)
        return None


# Differences that may be right: a hook that only reads, as loggers register on one rank; the dtype of a device.
_WARNINGS = {
    "hooks": (
        "the hooks on gradients of the model's parameters are not the same on all ranks: by rank {}. If they change "
        "gradients, the ranks train by unlike gradients: register such hooks on every rank alike"
    ),
    AUTOCAST: (
        "autocast or its dtype is not the same in the forwards of a step on all ranks: by rank {}. The gradients that "
        "are averaged have been rounded differently; use one dtype on all ranks, if their devices have it"
    ),
}


def _num_hooks(parameter: nn.Parameter) -> int:
    """Return the number of hooks that read or change the parameter's gradient."""
    on_gradient = getattr(parameter, "_backward_hooks", None) or ()
    on_accumulated = getattr(parameter, "_post_accumulate_grad_hooks", None) or ()
    return len(on_gradient) + len(on_accumulated)
