"""Sequence parallelism for DeepSpeed on clusters whose GPUs are not alike.

    import ds_hetero
    ds_hetero.register()       # before the Trainer, the Accelerator or deepspeed.initialize is made

Importing this package imports neither torch nor DeepSpeed nor numpy; names that need one of them are loaded at their
first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ds_hetero.common.extras import TRAINING_PACKAGES, require
from ds_hetero.errors import (
    BatchError,
    CheckpointError,
    ClusterError,
    ConfigError,
    DependencyError,
    HeteroError,
    MemoryPlanError,
    ModelError,
    PeerError,
    PlanError,
    SamplingError,
    ScheduleError,
    StepError,
    SyncError,
    VersionError,
)
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Group, Schedule

if TYPE_CHECKING:
    from ds_hetero.cluster import load_cluster
    from ds_hetero.engine.handle import Handle
    from ds_hetero.frameworks.transformers.stages import empty_model
    from ds_hetero.gradient_sync.sync import AsymmetricGradientSync
    from ds_hetero.planner import plan
    from ds_hetero.registration import register

__all__ = [
    "AsymmetricGradientSync",
    "BatchError",
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "DependencyError",
    "Group",
    "Handle",
    "HeteroError",
    "MemoryPlanError",
    "ModelError",
    "PeerError",
    "Plan",
    "PlanError",
    "SamplingError",
    "Schedule",
    "ScheduleError",
    "StepError",
    "SyncError",
    "VersionError",
    "__version__",
    "empty_model",
    "load_cluster",
    "plan",
    "register",
]

__version__ = "0.3.0"

# Public names that are loaded at their first use: the module of each, and the packages that this module imports.
_LAZY: dict[str, tuple[str, tuple[str, ...]]] = {
    "AsymmetricGradientSync": ("ds_hetero.gradient_sync.sync", ("torch",)),
    "Handle": ("ds_hetero.engine.handle", TRAINING_PACKAGES),
    "empty_model": ("ds_hetero.frameworks.transformers.stages", TRAINING_PACKAGES),
    "load_cluster": ("ds_hetero.cluster", ()),
    "plan": ("ds_hetero.planner", ()),
    "register": ("ds_hetero.registration", TRAINING_PACKAGES),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ds_hetero' has no attribute {name!r}")
    module, packages = _LAZY[name]
    require(*packages, purpose=f"ds_hetero.{name}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
