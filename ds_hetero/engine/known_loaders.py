"""Names of attributes of the frameworks' loaders, samplers and datasets that our loaders read; see `LoaderNames`."""

from __future__ import annotations

from ds_hetero.runtime.data.loader_names import TORCH_LOADERS, LoaderNames

# DeepSpeedDataLoader and DeepSpeedDataSampler
_DEEPSPEED = LoaderNames(
    wrapped=("data_sampler",), shards=(("data_parallel_size", "data_parallel_rank"),), with_epoch=("data_sampler",)
)

# BatchSamplerShard and IterableDatasetShard, which DataLoaderShard puts into every loader of several processes.
# DataLoaderShard always has state_dict and load_state_dict, but they work only if the wrapped loader has them.
_ACCELERATE = LoaderNames(
    wrapped=("base_dataloader", "dataloader"),
    shards=(("num_processes", "process_index"),),
    always_sharding=(("DataLoaderShard", "accelerate"),),
    with_state=("base_dataloader",),
    at_end=("end_of_dataloader",),
)

# split_dataset_by_node
_DATASETS = LoaderNames(wrapped=("_distributed",), shards=(("world_size", "rank"),))

KNOWN_LOADERS = TORCH_LOADERS | _DEEPSPEED | _ACCELERATE | _DATASETS
