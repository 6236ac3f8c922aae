"""Former place of `ds_hetero.engine.handle`."""

from ds_hetero.engine.handle import Handle as Handle
