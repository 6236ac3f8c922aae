"""Sequence parallelism for DeepSpeed on clusters whose GPUs are not alike.

    import ds_hetero
    ds_hetero.register()       # before the Trainer, the Accelerator or deepspeed.initialize is made

Importing this package imports neither torch nor DeepSpeed; `register` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ds_hetero.schedule import Group, Schedule

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ds_hetero.integrations.handle import Handle

__all__ = ["Group", "Schedule", "__version__", "register"]

__version__ = "0.1.0"


def register(config: str | Path | Mapping[str, Any] | None = None) -> Handle:
    """Make DeepSpeed, accelerate and transformers use this engine wherever a configuration asks for it.

    See `ds_hetero.integrations.registration.register`.
    """
    from ds_hetero.integrations import registration

    return registration.register(config)
