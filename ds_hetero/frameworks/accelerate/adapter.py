"""Replace functions of accelerate, so that ranks of a replica read the same batch, and accelerate counts replicas.

    stock accelerate                                      with this engine
    a loader gives each rank another batch                gives each replica another batch (`loaders`)
    gather, gather_for_metrics: a value of each rank      a value of each replica (`gathering`)
    a scheduler steps once per rank and optimizer step    steps once per replica (`process_counts`)
    total steps of a DummyScheduler divided by ranks      divided by replicas (`process_counts`)
    get_state_dict reads a module's weights               rank 0 gets experts of all ranks (`whole_weights`)

If replicas take different batches, all ranks together look like one worker to the user: ``sp_size`` is the world size,
the global batch is that of one process, and the schedule decides how it is divided.

What is imported ``as`` itself belongs to `ds_hetero.engine.adapters.ProcessAdapter`.
"""

from __future__ import annotations

import accelerate.accelerator
import accelerate.data_loader
from accelerate.scheduler import AcceleratedScheduler

from ds_hetero.engine.patching import around
from ds_hetero.engine.registry import Registry
from ds_hetero.frameworks.accelerate.accelerators import asks_for_engine as asks_for_engine
from ds_hetero.frameworks.accelerate.accelerators import count_processes
from ds_hetero.frameworks.accelerate.accelerators import size_of_accelerate as size_of_accelerate
from ds_hetero.frameworks.accelerate.gathering import gather_for_metrics
from ds_hetero.frameworks.accelerate.gathering import gathered_from_replicas as gathered_from_replicas
from ds_hetero.frameworks.accelerate.gathering import gathering_over_replicas as gathering_over_replicas
from ds_hetero.frameworks.accelerate.loaders import loaders_over_replicas as loaders_over_replicas
from ds_hetero.frameworks.accelerate.loaders import prepare_data_loader
from ds_hetero.frameworks.accelerate.preparation import log_stock_training, prepare_deepspeed
from ds_hetero.frameworks.accelerate.preparation import objects_of_script as objects_of_script
from ds_hetero.frameworks.accelerate.process_counts import one_process_per_replica as one_process_per_replica
from ds_hetero.frameworks.accelerate.process_counts import step_scheduler
from ds_hetero.frameworks.accelerate.skipping import replace_wherever_imported
from ds_hetero.frameworks.accelerate.skipping import skip_first_batches as skip_first_batches
from ds_hetero.frameworks.accelerate.whole_weights import get_state_dict


def install(registry: Registry) -> None:
    """Replace the functions of accelerate that count ranks, so that they count replicas."""
    replace = registry.patches.replace
    replace(accelerate.Accelerator, "__init__", around(count_processes))
    replace(accelerate.Accelerator, "_prepare_deepspeed", around(prepare_deepspeed, registry))
    replace(accelerate.Accelerator, "prepare", around(log_stock_training, registry))
    replace(AcceleratedScheduler, "step", around(step_scheduler))
    replace(accelerate.Accelerator, "gather_for_metrics", around(gather_for_metrics))
    replace(accelerate.Accelerator, "get_state_dict", around(get_state_dict, registry))
    replace(accelerate.accelerator, "gather_object", gathered_from_replicas)
    replace(accelerate.accelerator, "prepare_data_loader", around(prepare_data_loader))
    # Modules that have imported the function by name have the function object, so its code is replaced, too.
    for module in (accelerate, accelerate.accelerator, accelerate.data_loader):
        replace(module, "skip_first_batches", skip_first_batches)
    replace_wherever_imported(registry.patches, accelerate.data_loader, "skip_first_batches", skip_first_batches)
