"""Parts of the search for pipelines: layer cuts, split of the batch, starts, moves, refinement, a lower bound."""
