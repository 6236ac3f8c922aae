"""Private names of accelerate that ds_hetero builds on, and the releases that have them."""

from __future__ import annotations

PACKAGE = "accelerate"
WORKS = ">=1.12,<2"
PRIVATE_NAMES = (
    "accelerate.accelerator:Accelerator._prepare_deepspeed",
    "accelerate.accelerator:prepare_data_loader",
    "accelerate.accelerator:skip_first_batches",
    "accelerate.data_loader:BatchSamplerShard",  # these three by their attributes, see `ds_hetero.engine.known_loaders`
    "accelerate.data_loader:DataLoaderShard",
    "accelerate.data_loader:IterableDatasetShard",
    "accelerate.scheduler:AcceleratedScheduler.step",
    "accelerate.state:AcceleratorState._shared_state",
    "accelerate.state:PartialState._shared_state",
)
"""``module:attribute`` or ``module:Class.attribute``; checked when this engine is registered."""

ATTRIBUTES = ("accelerate.accelerator:Accelerator._custom_objects", "accelerate.accelerator:Accelerator._schedulers")
"""Private attributes that objects get while the program runs, and the source that sets them; checked in the tests."""
