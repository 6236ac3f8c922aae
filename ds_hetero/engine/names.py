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

OF_FEATURES = (
    "torch:_assert_async",
    "torch:_foreach_norm",
    "torch._C:TensorBase._backward_hooks",
    "torch._C:TensorBase._version",
    "torch._C._distributed_c10d:Backend.Options._timeout",
    "torch._C._distributed_c10d:ProcessGroup._allgather_base",  # this and the next are recorded by the watch of peers
    "torch._C._distributed_c10d:ProcessGroup._reduce_scatter_base",
    "torch._C._distributed_c10d:ProcessGroup._get_backend",
    "torch.autograd.graph:Node._input_metadata",
    "torch.autograd.graph:Node._sequence_nr",
    "torch.autograd.profiler:_is_profiler_enabled",
    "torch.distributed.distributed_c10d:_World.pg_map",
    "torch.distributed.distributed_c10d:_new_process_group_helper",  # looked for on stacks, as the next
    "torch.distributed.distributed_c10d:_store_based_barrier",
    "torch.distributed.distributed_c10d:_world",
    # Reads TORCH_ELASTIC_WORKER_IDENTICAL, without which agents exchange their numbers of workers through the store.
    "torch.distributed.elastic.agent.server.api:SimpleElasticAgent._assign_worker_ranks",
)
"""Private names that single features use; a job does not need them to start, and tests check them."""

COMPILED = (
    "torch._C._distributed_c10d:ProcessGroup._get_sequence_number_for_group",
    "torch:Tensor._post_accumulate_grad_hooks",
    "torch:ops.aten._efficient_attention_backward",
    "torch:ops.aten._efficient_attention_forward",
    "torch:ops.aten._flash_attention_backward",
    "torch:ops.aten._flash_attention_forward",
    "torch:ops.aten._scaled_dot_product_cudnn_attention",
    "torch:ops.aten._scaled_dot_product_cudnn_attention_backward",
    "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
)
"""Private names that no Python source describes, so that no record has their signatures; tests check that they exist,
and those of attention kernels call them."""

IN_SOME_BUILDS = ("torch._C._distributed_c10d:_dump_nccl_trace_json",)
"""Private names that are used where a build has them: this one, with NCCL."""

SCHEDULED = "_wrapped_by_lr_sched"  # attribute of the step method of an optimizer that has a scheduler of torch

ATTRIBUTES = (
    *(
        f"torch.nn.modules.module:Module.{name}"
        for name in (
            *("_backward_hooks", "_backward_pre_hooks", "_buffers"),
            *("_modules", "_non_persistent_buffers_set", "_parameters"),
        )
    ),
    f"torch.optim.lr_scheduler:LRScheduler.{SCHEDULED}",
)
"""Private attributes that objects get at run time, each with the class that sets it; tests check them."""
