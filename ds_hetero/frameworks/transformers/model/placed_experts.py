"""Divide the experts of a transformers model among the ranks of a replica, through transformers' registry of experts.

transformers 5 keeps the experts of a layer in one module with weights [experts, ...], and calls the function that
``config._experts_implementation`` names. Here each such module keeps this rank's part of the weights, and the name is
changed to `NAME`. The function of that name sends tokens to the ranks of their experts
(`ds_hetero.runtime.experts.layer`); there the implementation that the model had before computes them, as for a model
that has only these experts. So every family of the registry works without code of its own.

A forward needs every rank of the replica at the same time:

    forwards on shards, and their recomputation in a backward        run
    whole forwards of the self-check, which all ranks run together   run
    any other whole forward (evaluation, generate)                   refused: a rank may run it alone
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ds_hetero.engine.forward_mode import forward_mode
from ds_hetero.engine.patching import Patches
from ds_hetero.errors import ModelError
from ds_hetero.frameworks.transformers.model.adapted_experts import (
    adapter_problem,
    chain_around,
    holders_of,
    trains,
    use_fewer_experts,
    wrappers_of,
)
from ds_hetero.frameworks.transformers.model.model_checks import containers_of_experts
from ds_hetero.frameworks.transformers.model.packed_experts import cut_constants, packed_weights, packing_problem
from ds_hetero.runtime.experts.layer import run_placed_experts
from ds_hetero.runtime.experts.parts import WHOLE_SHAPE, ExpertPart, ExpertParts, Holder
from ds_hetero.runtime.experts.replicas import ReplicaExperts
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.section import SECTION
from ds_hetero.values.splits import Split, share

NAME = "ds_hetero"  # under which the function is registered with transformers
_LAYER = "_ds_hetero_layer"  # attribute of a module that holds its `ExpertLayer`
_PARTS = "_ds_hetero_experts"  # attribute of a model that holds its `ExpertParts`
_WHOLE_FORWARD = (
    '"{0}.experts" divides the experts among the ranks, so a forward needs every rank of the replica, but this one '
    'runs on whole sequences, as generate does, and evaluation without "{0}.evaluation": "sharded". Evaluate sharded, '
    "or load a checkpoint into a job without the key."
)


def install(patches: Patches) -> None:
    """Register the function with transformers."""
    ALL_EXPERTS_FUNCTIONS[NAME] = _run_experts
    patches.on_undo(lambda: ALL_EXPERTS_FUNCTIONS.pop(NAME))


class ExpertLayer:
    """The experts of one layer, of which a module keeps this rank's part.

    Args:
        module: transformers' module of the layer's experts; its weights are cut in place.
        name: of the module in the model.
        in_replicas: experts of each rank, by replica.
        adapters: modules of the adapters on these experts, which are cut alike.

    Attributes:
        experts: experts of each rank of this replica.
        range: experts ``[start, stop)`` of this rank.
        rows: rows that each of these got in training, until `ExpertParts.take_rows`.
        holders: the module, and those of its adapters.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        in_replicas: ReplicaExperts,
        replica: Replica,
        adapters: Sequence[Holder] = (),
    ) -> None:
        self.module, self.in_replicas, self.replica = module, in_replicas, replica
        self.experts = experts = in_replicas.splits[replica.replica_id]
        self.range = experts.ranges[replica.sp_rank]
        self.rows = [0] * experts.sizes[replica.sp_rank]
        packed = list(packed_weights(module))
        self.holders = [Holder(module, name), *adapters]
        self.holders += [Holder(weight.container, f"{name}.parametrizations.{weight.name}") for weight in packed]
        self._former = _implementation_of(module)
        start, stop = self.range
        for holder in self.holders:
            for parameter in holder.module.parameters(recurse=False):
                self._cut(parameter, in_columns=holder.in_columns)
        for weight in packed:
            cut_constants(weight, experts, replica.sp_rank)
        vars(module)["num_experts"] = stop - start
        vars(module)[_LAYER] = self

    @torch.no_grad()
    def _cut(self, parameter: nn.Parameter, *, in_columns: bool) -> None:
        """Keep this rank's part of a parameter."""
        setattr(parameter, WHOLE_SHAPE, tuple(parameter.shape))
        part = ExpertPart(parameter, self.experts, self.in_replicas, parameter.shape, in_columns)
        # In place, so that optimizers that were made before still refer to the parameter.
        parameter.data = part.cut(parameter.data, self.replica.sp_rank).clone()
        # DeepSpeed's name for a parameter that ranks do not share: it is neither reduced nor compared.
        parameter.allreduce = False  # type: ignore[attr-defined]

    def run(self, tokens_TH: Tensor, expert_ids_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """Compute the layer: see `run_placed_experts`."""

        def run_local(rows_MH: Tensor, local_ids_M: Tensor) -> Tensor:
            # Weights of 1: the router's are applied where the tokens are.
            ones_M1 = torch.ones_like(local_ids_M, dtype=weights_Tk.dtype).unsqueeze(1)
            result: Tensor = self._former(self.module, rows_MH, local_ids_M.unsqueeze(1), ones_M1)
            return result

        return run_placed_experts(
            tokens_TH,
            expert_ids_Tk,
            weights_Tk,
            run_local,
            self.experts,
            self.replica.sp_group,
            trains_experts=trains(self.holders),
            note_rows=self._note_rows if self.module.training else None,
        )

    def _note_rows(self, rows: list[int]) -> None:
        """Count rows of this rank's experts; a recomputation counts them again, which changes no share."""
        self.rows = [before + more for before, more in zip(self.rows, rows, strict=True)]


def place_experts(model: nn.Module, weights: Sequence[float], replica: Replica) -> ExpertParts:
    """Keep this rank's part of every layer's experts, and let the layers exchange tokens from now on.

    It cannot be undone: a model that was placed before keeps its parts.

    Args:
        model: a model that `check_placeable` has accepted.
        weights: one per rank of the job; each replica shares a layer's experts among its ranks by largest remainder.

    Caller: every rank of the job.

    Raises:
        ModelError: the model was placed before, with other weights.
    """
    ranks = tuple(schedule.ranks for schedule in replica.plan.schedules)
    weights_by_replica = [[weights[rank] for rank in of_replica] for of_replica in ranks]
    placed: ExpertParts | None = vars(model).get(_PARTS)
    if placed is not None:
        for division in placed.in_replicas:  # of all replicas, so that every rank refuses the same
            now = [list(split.sizes) for split in division.splits]
            wanted = [list(share(division.splits[0].total, of_replica)) for of_replica in weights_by_replica]
            if now != wanted:
                raise ModelError(
                    f"the experts of {type(model).__name__} are divided as {now} by replica already, and cannot be "
                    f"divided as {wanted} now. Load the model again."
                )
        return placed
    layers = []
    wrappers, name_by_id = wrappers_of(model), {id(module): name for name, module in model.named_modules()}
    for name, module in _registered_modules(model):
        num_experts = int(module.num_experts)  # type: ignore[arg-type]
        splits = tuple(Split(share(num_experts, of_replica)) for of_replica in weights_by_replica)
        in_replicas, chain = ReplicaExperts(ranks, splits), chain_around(module, wrappers)
        layers.append(ExpertLayer(module, name, in_replicas, replica, list(holders_of(chain, name_by_id))))
        use_fewer_experts(chain, layers[-1].experts.sizes[replica.sp_rank])
    for layer in layers:
        layer.module.config._experts_implementation_internal = NAME  # type: ignore[union-attr]
    parts = ExpertParts(layers, replica.sp_group)
    vars(model)[_PARTS] = parts
    return parts


def check_placeable(model: nn.Module) -> None:
    """Check that the experts of a model can be divided among ranks. Raises `ModelError`: it says why they cannot."""
    if _PARTS in vars(model):
        return  # it was checked before its experts were cut
    found = dict(_registered_modules(model))
    name = type(model).__name__
    others = [type(module).__name__ for module in containers_of_experts(model) if module not in found.values()]
    if others:
        raise ModelError(
            f'"{SECTION}.experts" works through transformers\' registry of experts, which {others[0]} of {name} does '
            "not use. Leave the key out: every rank then holds all experts, or its part under ZeRO-3."
        )
    if not found:
        raise ModelError(f'"{SECTION}.experts" divides experts among ranks, but {name} has none. Leave the key out.')
    wrappers = wrappers_of(model)
    for path, module in found.items():
        problem = adapter_problem(module, chain_around(module, wrappers)) or packing_problem(module)
        if problem:
            raise ModelError(f'"{SECTION}.experts": {path} {problem}. Change this, or leave the key out.')
        _check_plain(module, path)


def _check_plain(module: nn.Module, path: str) -> None:
    """Check that all weights of a layer's experts but packed ones can be cut by expert. Raises `ModelError`."""
    packed = {id(weight.container.original) for weight in packed_weights(module)}
    for name, parameter in module.named_parameters():
        if id(parameter) in packed:
            continue
        if hasattr(parameter, "ds_id"):
            raise ModelError(
                f'"{SECTION}.experts": {path}.{name} was partitioned by ZeRO-3 when the model was made, so its experts '
                "are on no rank. Make the model without deepspeed.zero.Init, and without transformers' "
                "HfDeepSpeedConfig, or leave the key out."
            )
        whole = parameter.dim() > 1 and parameter.shape[0] == module.num_experts and "." not in name
        if not whole or not parameter.is_floating_point() or type(parameter) is not nn.Parameter:
            raise ModelError(
                f'"{SECTION}.experts": {path}.{name} ({type(parameter).__name__}, {parameter.dtype}, '
                f"{list(parameter.shape)}) is not a plain weight with one part for each of the {module.num_experts} "
                "experts, so it cannot be divided. Leave the key out."
            )


def _registered_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of each layer's experts that transformers runs through its registry."""
    for name, module in model.named_modules():
        # Attributes that transformers' decorator sets; other modules have no ``forward`` around another one.
        is_registered = hasattr(module, "is_transposed") and hasattr(module, "has_bias")
        if is_registered and hasattr(type(module).forward, "__wrapped__"):
            yield name, module


def _implementation_of(module: nn.Module) -> Any:
    """Return the function that computes a module's experts now: of the registry, or the class's own."""
    own_forward = type(module).forward.__wrapped__  # type: ignore[attr-defined]
    name = module.config._experts_implementation  # type: ignore[union-attr]
    return ALL_EXPERTS_FUNCTIONS.get_interface(name, own_forward)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute a layer whose experts are on several ranks, as transformers' functions of the registry do.

    Raises:
        ModelError: the forward runs on whole sequences, or the module was copied or made after the job's start.
    """
    layer: ExpertLayer | None = vars(module).get(_LAYER)
    if layer is None or layer.module is not module:
        raise ModelError(
            f"{type(module).__name__} has the configuration of a model whose experts are divided among ranks, but its "
            "own are not. Give a second model a configuration of its own."
        )
    mode = forward_mode()
    recomputes = torch._C._current_graph_task_id() != -1  # -1: no backward runs in this thread
    if mode.forward is None and not mode.is_compared and not recomputes:
        raise ModelError(_WHOLE_FORWARD.format(SECTION))
    return layer.run(hidden_states, top_k_index, top_k_weights)
