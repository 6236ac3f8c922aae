"""Modules that each rank calls on ZeRO-3: all ranks have to call the same ones in the same order.

ZeRO-3 gathers parameters where a module is called, and adds up gradients in the order in which they are made. Ranks
whose tokens call other modules (experts in a list, heads of tasks) gather and add up different ones: each is given
parts of another's where sizes agree, and else they wait for each other, or gloo ends them.

So every rank predicts the module that it calls next from those that it has called so far, by one table that is the same
on all ranks. A rank that calls another module than the predicted one asks the others first, and all of them note the
answer. Until the ranks part, their calls are equal, so their tables and predictions are too. Where they part, at most
one of the modules is the predicted one, so some rank asks: either all do, and see it, or the others wait in a
gathering, and `ds_hetero.runtime.peers` sees it from `own_gathers`. In an ordinary job nobody asks after the first
forward and backward, but at the beginning of a forward without gradients, which a rank may run alone (a ``generate``
for a look at the model), and where training and evaluation take turns.
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
from ds_hetero.runtime.peers.calls import GATHERS_DIFFER, History, first_difference, own_gathers
from ds_hetero.runtime.peers.watch import waiting_for_peers

# Calls that predict the next one where this pass as a whole is new, as with layers that are skipped at random: a layer
# of transformers has about as many modules with parameters, so that one layer is told from the next.
_WINDOW = 8
_MOST_PREDICTIONS = 1 << 17  # that are remembered; a model of 1,000 modules has some thousands


def compare_gathered_modules(engine: Any) -> None:
    """Have the ranks compare the modules that they call, where the engine is one of ZeRO-3."""
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        in_nodes = getattr(engine.optimizer, "nodes", None) is not None
        coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
        GatheredModules(engine.module, coordinator, in_nodes=in_nodes)


class GatheredModules:
    """Comparison of the modules that the ranks call, of one model.

    Args:
        model: whose modules have names.
        coordinator: of DeepSpeed's, which gathers parameters before a module's forward and backward.
        in_nodes: whether parameters are gathered inside nodes, so that forwards without gradients need not be alike.

    Collectives: one `all_gather_bytes` before each call that is not predicted and at the beginning of each forward
        without gradients, one more where the ranks have parted.
    """

    def __init__(self, model: nn.Module, coordinator: Any, *, in_nodes: bool) -> None:
        self._in_nodes = in_nodes
        self._modules = dict(model.named_modules())
        self._names = {module: name for name, module in self._modules.items()}
        self._pass = 0  # checksum of what was called in this pass, which is forward and backward
        self._has_gradients = True  # in this pass
        self._asks_next = False  # whatever is predicted
        self._latest: deque[str] = deque(maxlen=_WINDOW)  # in all passes
        self._called: set[tuple[nn.Module, bool]] = set()  # in this pass, and whether forward
        self._next: dict[tuple[str, int], str] = {}  # after a whole pass so far, and after the latest calls
        coordinator.fetch_sub_module = _not_compiled(partial(self._fetch, coordinator.fetch_sub_module))
        coordinator.reset_step = _not_compiled(partial(self._reset, coordinator.reset_step))

    def _fetch(self, stock: Callable[..., None], module: nn.Module, forward: bool = True) -> None:
        """Replace ``fetch_sub_module``, which is called before every forward and backward of a module."""
        parameters = list(iter_params(module, recurse=z3_leaf_module(module)))
        # Also where it has them already, of an earlier module or ahead: which those are is no more the same once the
        # ranks have parted. Those that stay are gathered once.
        gathers = any(not one.ds_persist or one.ds_status is not ZeroParamStatus.AVAILABLE for one in parameters)
        gathers &= self._has_gradients or not self._in_nodes or not forward
        # Gradients meet in buckets, in the order in which they are made, of parameters that stay gathered too.
        trains = any(parameter.requires_grad for parameter in parameters) and (self._has_gradients or not forward)
        if gathers or (trains and (module, forward) not in self._called):
            self._called.add((module, forward))
            name = self._names.get(module) or type(module).__name__
            self._note(name if forward else f"the backward of {name}")
        stock(module, forward=forward)

    def _reset(self, stock: Callable[[], None]) -> None:
        """Replace ``reset_step``, which is called before every forward of the model."""
        self._pass = 0
        self._has_gradients = torch.is_grad_enabled()  # not to be told in a module's hook, which runs without
        self._asks_next = not self._has_gradients
        self._called.clear()
        stock()

    def _note(self, call: str) -> None:
        own_gathers.record(call)
        so_far = ("pass", self._pass)
        lately = ("latest", crc32("\n".join(self._latest).encode()))
        if self._asks_next or self._next.get(so_far, self._next.get(lately)) != call:
            self._asks_next = False
            self._ask(call)
        if len(self._next) >= _MOST_PREDICTIONS:
            self._next.clear()
        self._next[so_far] = self._next[lately] = call
        self._pass = crc32(call.encode(), self._pass)
        self._latest.append(call)

    def _ask(self, call: str) -> None:
        """Compare the place and the name of this call with those of the other ranks."""
        own = own_gathers.number, crc32(call.encode())
        with waiting_for_peers("calling a module on ZeRO-3, as every rank has to, in generate too"):
            by_rank, _ = all_gather_bytes(own, b"")
            if all(tuple(of_rank) == own for of_rank in by_rank):
                return
            _, encoded = all_gather_bytes((), json.dumps(own_gathers.history()).encode())
        histories = {rank: History(*json.loads(of_rank)) for rank, of_rank in enumerate(encoded)}
        raise self._error(first_difference(histories) or {rank: h.calls[-1] for rank, h in histories.items()})

    def _error(self, calls: Mapping[int, str]) -> StepError:
        by_call = ranks_by_value(calls.items())
        said = ", ".join(f"{ranks_text(ranks)} called {call}" for call, ranks in by_call.items())
        return StepError(f"{said}. {GATHERS_DIFFER.format(known=self._class_that_chooses(list(calls.values())))}")

    def _class_that_chooses(self, calls: list[str]) -> str:
        """Return the class of the innermost module that has all of these: it may choose among them."""
        paths = [call.removeprefix("the backward of ").split(".") for call in calls]
        together = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
        holder = ".".join(first for first, *_ in together)
        if not holder or holder not in self._modules:
            return ""
        while isinstance(self._modules[holder], (nn.ModuleList, nn.ModuleDict)) and "." in holder:
            holder = holder.rpartition(".")[0]  # these are not called themselves
        return f" (here maybe {type(self._modules[holder]).__name__})"


def _not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Left out of torch.compile, as DeepSpeed's own methods are."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    disable: Any = getattr(compiler, "lazy_disable", compiler.disable)  # not in 0.18.9
    disabled: Callable[..., Any] = disable(called)
    return disabled
