"""Private names of torch that engine and adapters use, and the releases that have them."""

from __future__ import annotations

PACKAGE = "torch"
WORKS = ">=2.9"
PRIVATE_NAMES = (
    "torch:_C._autograd._get_current_graph_task_keep_graph",
    "torch:_C._current_graph_task_id",
    "torch.distributed.distributed_c10d:_get_default_store",
    "torch.distributed.rendezvous:_create_c10d_store",
    "torch.nn.modules.batchnorm:_BatchNorm",
    "torch.utils.file_baton:FileBaton.wait",
)
"""All private names, as ``module:attribute`` or ``module:Class.attribute``; `ds_hetero.register` checks them."""

SCHEDULED = "_wrapped_by_lr_sched"  # attribute of the step method of an optimizer that has a scheduler of torch

ATTRIBUTES = (
    *(
        f"torch.nn.modules.module:Module.{name}"
        for name in ("_backward_hooks", "_backward_pre_hooks", "_buffers", "_modules", "_parameters")
    ),
    f"torch.optim.lr_scheduler:LRScheduler.{SCHEDULED}",
)
"""Private attributes that objects get at run time, each with the class that sets it; tests check them."""
