"""Backends of a process group: which one carries this rank's tensors, and by what it pairs messages.

``torch.distributed.get_backend`` names what ``init_process_group`` was given, and that is not always a backend: without
an argument it says "undefined", and "cuda:nccl,cpu:gloo" is one name for two. The configuration of a group has one
backend for each type of device, whatever was given.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import get_backend_config

from ds_hetero.errors import ConfigError
from ds_hetero.runtime.devices import default_device


class _Backend(NamedTuple):
    pairs_by_order: bool  # the k-th send from a to b meets the k-th receive; else sends and receives of one tag meet
    takes_host_tensors: bool


_KNOWN = {
    "nccl": _Backend(pairs_by_order=True, takes_host_tensors=False),
    "gloo": _Backend(pairs_by_order=False, takes_host_tensors=True),
    "fake": _Backend(pairs_by_order=False, takes_host_tensors=True),  # torch's own, which moves nothing: for counting
}


def name_of_backend(group: ProcessGroup | None = None) -> str | None:
    """Name of the backend that carries tensors of this rank's device, known here or not; None if none does.

    Args:
        group: None for the whole job.
    """
    by_device = dict(pair.split(":", 1) for pair in get_backend_config(group).split(","))
    # Where the accelerator has none, tensors go through the host's memory.
    return by_device.get(default_device().type, by_device.get("cpu"))


def backend_of(group: ProcessGroup | None = None) -> str:
    """`name_of_backend`, one of those whose rules are known. Raises `ConfigError`: it is none of them."""
    backend = name_of_backend(group)
    device, config = default_device().type, get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    if backend is None:
        raise ConfigError(
            f'this rank computes on {device}, and its process group has no backend for it ("{config}"). Give '
            f"init_process_group a backend for {device}, or name none."
        )
    if backend not in _KNOWN:
        raise ConfigError(
            f'tensors on {device} travel by the backend "{backend}" ("{config}"), and ds_hetero does not know how it '
            "pairs messages. Give init_process_group a backend that it knows, nccl or gloo, or name none."
        )
    return backend


def pairs_by_order(group: ProcessGroup | None = None) -> bool:
    """Whether ``group`` pairs messages by the order in which they are posted, as NCCL does, and not by their tags."""
    return _KNOWN[backend_of(group)].pairs_by_order


def gathers_unequal_parts(group: ProcessGroup | None = None) -> bool:
    """Whether an all_gather of ``group`` takes parts of unequal size."""
    return backend_of(group) == "nccl"


def message_device(group: ProcessGroup | None = None) -> torch.device:
    """Return the device of small tensors that ``group``, or the whole job, exchanges."""
    if _KNOWN[backend_of(group)].takes_host_tensors:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
