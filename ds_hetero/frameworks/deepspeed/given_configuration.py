"""The configuration that `deepspeed.initialize` is given, compared on all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping

import deepspeed
from torch import nn

from ds_hetero.engine.ds_config import DsConfig
from ds_hetero.engine.same_configuration import agree_on_configuration
from ds_hetero.frameworks.deepspeed.protocols import Arguments


def given_configuration(given: Arguments) -> DsConfig | None:
    """Return the configuration as a mapping, by the rules of `deepspeed.initialize`; None where that will complain."""
    config = given.get("config") or given.get("config_params") or getattr(given.get("args"), "deepspeed_config", None)
    if config is None or isinstance(config, Mapping):
        return config
    loaded: DsConfig = deepspeed.load_ds_config(config)
    return loaded


def agreed_configuration(given: Arguments) -> DsConfig | None:
    """Return `given_configuration`, compared on all ranks.

    Raises:
        ConfigError: on all ranks, if configurations differ or some rank could not read its own; there the error of
            DeepSpeed's reader.
    """
    init_distributed(given)
    error: Exception | None = None
    try:
        ds_config = given_configuration(given)
    except Exception as caught:
        error, ds_config = caught, None
    model = given.get("model")
    try:
        agree_on_configuration(ds_config, model if isinstance(model, nn.Module) else None, error)
    finally:
        if error is not None:
            raise error
    return ds_config


def init_distributed(given: Arguments) -> None:
    """Make the process group as `deepspeed.initialize` would a moment later; ranks choose their devices first."""
    accelerator = deepspeed.get_accelerator()
    if "LOCAL_RANK" in os.environ:
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    port = {name: given[name] for name in ("distributed_port",) if name in given}
    deepspeed.init_distributed(
        accelerator.communication_backend_name(), dist_init_required=given.get("dist_init_required"), **port
    )
