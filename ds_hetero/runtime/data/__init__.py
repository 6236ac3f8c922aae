"""From a loader of whole batches to the shards of one rank."""
