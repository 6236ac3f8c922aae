"""Find the backend of a process group that carries this rank's tensors, and how it pairs messages.

``torch.distributed.get_backend`` returns the argument of ``init_process_group``, which is not always the name of a
backend: without an argument it is "undefined", and "cuda:nccl,cpu:gloo" names two. The configuration of a group always
has one backend for each type of device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import get_backend_config

from ds_hetero.errors import ConfigError
from ds_hetero.runtime.devices import default_device


class _Backend(NamedTuple):
    """Properties of a backend of torch.distributed."""

    pairs_by_order: bool  # the k-th send from a to b meets the k-th receive; else a send meets the receive with its tag
    takes_host_tensors: bool


_BACKENDS = {
    "nccl": _Backend(pairs_by_order=True, takes_host_tensors=False),
    "gloo": _Backend(pairs_by_order=False, takes_host_tensors=True),
    "fake": _Backend(pairs_by_order=False, takes_host_tensors=True),  # torch's backend that sends nothing, for counting
}


def name_of_backend(group: ProcessGroup | None = None) -> str | None:
    """Return the name of the backend that carries tensors of this rank's device; None if the group has none.

    Args:
        group: None for the whole job.
    """
    by_device = dict(pair.split(":", 1) for pair in get_backend_config(group).split(","))
    # If the accelerator has no backend, tensors go through the host's memory.
    return by_device.get(default_device().type, by_device.get("cpu"))


def backend_of(group: ProcessGroup | None = None) -> str:
    """Return `name_of_backend`. Raises `ConfigError`: the group has no backend, or one that is not supported."""
    backend = name_of_backend(group)
    device, config = default_device().type, get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    if backend is None:
        raise ConfigError(
            f"this rank computes on {device}, but its process group has no backend for {device} tensors (configured: "
            f'"{config}"). Give init_process_group a backend for {device}, or no backend.'
        )
    if backend not in _BACKENDS:
        raise ConfigError(
            f'ds_hetero supports nccl and gloo, but this process group uses "{backend}" for {device} tensors '
            f'(configured: "{config}"). Give init_process_group one of the two, or no backend.'
        )
    return backend


def pairs_by_order(group: ProcessGroup | None = None) -> bool:
    """Whether ``group`` pairs messages by the order in which they are posted, as NCCL does, and not by their tags."""
    return _BACKENDS[backend_of(group)].pairs_by_order


def gathers_unequal_parts(group: ProcessGroup | None = None) -> bool:
    """Whether an all_gather of ``group`` accepts parts of unequal size."""
    return backend_of(group) == "nccl"


def message_device(group: ProcessGroup | None = None) -> torch.device:
    """Return the device on which tensors must be for collectives of ``group``, or of the whole job if it is None."""
    if _BACKENDS[backend_of(group)].takes_host_tensors:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
