"""Private names of accelerate that ds_hetero uses, and the releases of accelerate that have them."""

from __future__ import annotations

PACKAGE = "accelerate"
WORKS = ">=1.12"
PRIVATE_NAMES = (
    "accelerate.accelerator:Accelerator._prepare_deepspeed",
    "accelerate.accelerator:prepare_data_loader",
    "accelerate.accelerator:skip_first_batches",
    "accelerate.data_loader:BatchSamplerShard",  # of these three, attributes are read: `ds_hetero.engine.known_loaders`
    "accelerate.data_loader:DataLoaderShard",
    "accelerate.data_loader:IterableDatasetShard",
    "accelerate.scheduler:AcceleratedScheduler.step",
)
"""``module:attribute`` or ``module:Class.attribute``; `ds_hetero.registration` checks that they exist."""

ATTRIBUTES = ("accelerate.accelerator:Accelerator._custom_objects", "accelerate.accelerator:Accelerator._schedulers")
"""Private attributes that objects get at run time, with the class whose source sets them; tests check these sources."""
