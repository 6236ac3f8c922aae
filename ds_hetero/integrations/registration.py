"""Former place of `ds_hetero.engine.registration`."""

from ds_hetero.engine.registration import register as register
