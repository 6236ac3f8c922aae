"""The attention kernels by name, best first; configuration, documents and the running half read this list.

Imports no torch, so that a configuration can be checked without it. What stands behind a name, and where it works:
`ds_hetero.runtime.attention.kernels.choice`.
"""

from __future__ import annotations

from typing import Literal, get_args

KernelName = Literal["flash_attn", "torch", "triton"]
KERNEL_NAMES: tuple[KernelName, ...] = get_args(KernelName)

# What a configuration may ask for: one kernel, one by rank, or one by a part of the device's name; None leaves the
# choice to the device.
KernelWish = KernelName | list[KernelName | None] | dict[str, KernelName] | None
