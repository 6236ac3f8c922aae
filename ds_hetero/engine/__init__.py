"""The part of ds_hetero between scripts and frameworks, without framework code: handle, registry, loaders, losses."""
