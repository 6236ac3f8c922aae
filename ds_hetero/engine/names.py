"""Private names of torch that engine and adapters build on, and the releases that have them."""

from __future__ import annotations

PACKAGE = "torch"
WORKS = ">=2.13,<3"
PRIVATE_NAMES = (
    "torch:_C._current_graph_task_id",
    "torch.distributed.distributed_c10d:_get_default_store",
    "torch.distributed.rendezvous:_create_c10d_store",
    "torch.nn.modules.batchnorm:_BatchNorm",
    "torch.utils.file_baton:FileBaton.wait",
)
"""``module:attribute`` or ``module:Class.attribute``; checked when this engine is registered."""

SCHEDULED = "_wrapped_by_lr_sched"  # of the step of an optimizer that a scheduler of torch's was made for

ATTRIBUTES = (
    *(
        f"torch.nn.modules.module:Module.{name}"
        for name in ("_backward_hooks", "_backward_pre_hooks", "_buffers", "_modules", "_parameters")
    ),
    f"torch.optim.lr_scheduler:LRScheduler.{SCHEDULED}",
)
"""Private attributes that objects get while the program runs, and the source that sets them; checked in the tests."""
