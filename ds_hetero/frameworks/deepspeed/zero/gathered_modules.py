"""Check on ZeRO-3 that all ranks call the same modules in the same order.

ZeRO-3 gathers a module's parameters when the module is called, and reduces gradients in the order in which they are
made. Ranks whose tokens call different modules (some experts, the head of one task) therefore run unlike collectives.
If the sizes happen to be equal, a rank gets parts of another module's parameters; otherwise ranks hang, or gloo fails.

To compare every call would cost one collective for each call. Instead, each rank predicts its next call from the calls
so far, with a table that is the same on all ranks. Before a call that was not predicted, the rank compares the call
with the other ranks in a collective:

    all ranks call the predicted module     nobody compares
    all ranks call another one              all compare, and all add the call to their tables
    ranks call different modules            at most one of these was predicted, so some ranks compare. If all do, all
                                            see the difference. If some do not, they wait in a gathering meanwhile, and
                                            `ds_hetero.runtime.peers` finds the difference in `own_gathers`

As long as the calls of all ranks are equal, their tables are equal, too. In an ordinary job no rank compares after the
first forward and backward, with two exceptions: at the beginning of a forward without gradients, which a rank might run
alone (to look at a sample with ``generate``), and where training and evaluation alternate.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import takewhile
from typing import Any
from zlib import crc32

import torch
from deepspeed.runtime import compiler
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import z3_leaf_module
from torch import nn

from ds_hetero.common.text import ranks_by_value, ranks_text
from ds_hetero.errors import StepError
from ds_hetero.runtime.collectives import all_gather_bytes
from ds_hetero.runtime.experts.parts import WHOLE_SHAPE
from ds_hetero.runtime.peers.calls import GATHERS_DIFFER, History, first_difference, own_gathers
from ds_hetero.runtime.peers.watch import waiting_for_peers

# If a pass goes another way than all passes before (layers that are skipped at random), the latest calls predict the
# next one. A layer of transformers has about as many modules with parameters, so that layers are told apart.
_WINDOW = 8
_MAX_REMEMBERED_CALLS = 1 << 17  # predictions in the table; a model of 1,000 modules has some thousands


def compare_gathered_modules(engine: Any) -> None:
    """Let the ranks compare the modules that they call, if the engine trains with ZeRO-3."""
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        in_nodes = getattr(engine.optimizer, "nodes", None) is not None
        coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
        GatheredModules(engine.module, coordinator, in_nodes=in_nodes)


class GatheredModules:
    """Compares the modules of one model that the ranks call.

    Args:
        model: the model.
        coordinator: DeepSpeed's object that gathers parameters before a module's forward and backward; two of its
            methods are replaced.
        in_nodes: whether parameters are gathered inside nodes, so that ranks of different nodes may run unlike forwards
            without gradients.

    Collectives: one `all_gather_bytes` before each call that was not predicted, and at the beginning of each forward
        without gradients; one more if the calls differ.
    """

    def __init__(self, model: nn.Module, coordinator: Any, *, in_nodes: bool) -> None:
        self._in_nodes = in_nodes
        self._modules = dict(model.named_modules())
        self._names = {module: name for name, module in self._modules.items()}
        self._pass_checksum = 0  # of the calls of this pass: a forward, and its backward
        self._has_gradients = True  # whether this pass has a backward
        self._compares_next_call = False  # even if the next call is the predicted one
        self._latest: deque[str] = deque(maxlen=_WINDOW)  # latest calls, also of earlier passes
        self._called: set[tuple[nn.Module, bool]] = set()  # modules called in this pass; True: in their forward
        # The table of predictions. Keys are ("pass", checksum of a pass so far) and ("latest", checksum of the latest
        # calls).
        self._next_call: dict[tuple[str, int], str] = {}
        coordinator.fetch_sub_module = _not_compiled(partial(self._record_and_fetch, coordinator.fetch_sub_module))
        coordinator.reset_step = _not_compiled(partial(self._begin_forward, coordinator.reset_step))

    def _record_and_fetch(self, stock: Callable[..., None], module: nn.Module, forward: bool = True) -> None:
        """Replace ``fetch_sub_module``, which is called before every forward and backward of a module."""
        # Experts that are divided among ranks are not partitioned, nor gathered.
        listed = iter_params(module, recurse=z3_leaf_module(module))
        parameters = [parameter for parameter in listed if not hasattr(parameter, WHOLE_SHAPE)]
        # A call counts as a gathering also if the parameters are available already (shared with an earlier module, or
        # gathered ahead): once ranks have called different modules, different parameters are available on them. Only
        # parameters that always stay gathered (``ds_persist``) and are available do not count.
        gathers = any(p.ds_status is not ZeroParamStatus.AVAILABLE or not p.ds_persist for p in parameters)
        gathers &= self._has_gradients or not self._in_nodes or not forward
        # Gradients are put into buckets in the order in which they are made, also those of parameters that stay
        # gathered. So the order of the first calls counts.
        trains = any(parameter.requires_grad for parameter in parameters) and (self._has_gradients or not forward)
        if gathers or (trains and (module, forward) not in self._called):
            self._called.add((module, forward))
            name = self._names.get(module) or type(module).__name__
            self._record_call(name if forward else f"the backward of {name}")
        stock(module, forward=forward)

    def _begin_forward(self, stock: Callable[[], None]) -> None:
        """Replace ``reset_step``, which is called before every forward of the model."""
        self._pass_checksum = 0
        self._has_gradients = torch.is_grad_enabled()  # read here: in a module's hook it is always False
        self._compares_next_call = not self._has_gradients
        self._called.clear()
        stock()

    def _record_call(self, call: str) -> None:
        """Compare a call with the other ranks, unless it was predicted, and add it to the table."""
        own_gathers.record(call)
        # The whole pass so far predicts best; the latest calls predict in a pass that no earlier pass began like.
        pass_key = ("pass", self._pass_checksum)
        latest_key = ("latest", crc32("\n".join(self._latest).encode()))
        predicted_call = self._next_call.get(pass_key, self._next_call.get(latest_key))
        if self._compares_next_call or call != predicted_call:
            self._compares_next_call = False
            self._compare(call)
        if len(self._next_call) >= _MAX_REMEMBERED_CALLS:
            self._next_call.clear()
        self._next_call[pass_key] = self._next_call[latest_key] = call
        self._pass_checksum = crc32(call.encode(), self._pass_checksum)
        self._latest.append(call)

    def _compare(self, call: str) -> None:
        """Compare the number and the name of this call with those of the other ranks.

        Raises:
            StepError: on every rank that compares, if ranks call different modules.
        """
        local_call = own_gathers.number, crc32(call.encode())
        with waiting_for_peers("calling a module on ZeRO-3, as every rank has to, in generate too"):
            call_by_rank, _ = all_gather_bytes(local_call, b"")
            if all(tuple(call_of_rank) == local_call for call_of_rank in call_by_rank):
                return
            _, history_by_rank = all_gather_bytes((), json.dumps(own_gathers.history()).encode())
        histories = {rank: History(*json.loads(history)) for rank, history in enumerate(history_by_rank)}
        latest_calls = {rank: history.calls[-1] for rank, history in histories.items()}
        raise self._make_error(first_difference(histories) or latest_calls)

    def _make_error(self, calls: Mapping[int, str]) -> StepError:
        """Return the error of ranks that call different modules.

        Args:
            calls: for each rank, its first call that differs from a call of another rank.
        """
        ranks_by_call = ranks_by_value(calls.items())
        calls_text = ", ".join(f"{ranks_text(ranks)} called {call}" for call, ranks in ranks_by_call.items())
        culprit_text = self._culprit_text(list(calls.values()))
        return StepError(f"{calls_text}. {GATHERS_DIFFER.format(known=culprit_text)}")

    def _culprit_text(self, calls: list[str]) -> str:
        """Return a text with the class of the module that may have chosen between ``calls``; empty if there is none.

        That is the innermost module that contains all called modules. Example: for "layers.3.experts.0" and
        "layers.3.experts.5" it is the parent of the list "layers.3.experts".
        """
        paths = [call.removeprefix("the backward of ").split(".") for call in calls]
        # One tuple for each level of the module tree, with the names of all calls: ("layers", "layers"), ("3", "3") ...
        levels = zip(*paths, strict=False)
        common_levels = takewhile(lambda names: len(set(names)) == 1, levels)
        container = ".".join(first for first, *_ in common_levels)
        if not container or container not in self._modules:
            return ""
        while isinstance(self._modules[container], (nn.ModuleList, nn.ModuleDict)) and "." in container:
            container = container.rpartition(".")[0]  # a list or dictionary of modules is not called itself
        return f" (here maybe {type(self._modules[container]).__name__})"


def _not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, excluded from torch.compile like the methods of DeepSpeed that it replaces."""

    def call_function(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    disable: Any = getattr(compiler, "lazy_disable", compiler.disable)  # DeepSpeed 0.18.9 has no lazy_disable
    excluded_function: Callable[..., Any] = disable(call_function)
    return excluded_function
