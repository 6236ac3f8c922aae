"""Read the configuration from the arguments of `deepspeed.initialize`, and compare it between ranks."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from pathlib import Path

import deepspeed
import hjson
from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys
from torch import nn

from ds_hetero.engine.ds_config import DsConfig
from ds_hetero.engine.same_configuration import agree_on_configuration
from ds_hetero.frameworks.deepspeed.protocols import Arguments


def read_configuration(arguments: Arguments) -> DsConfig | None:
    """Return the configuration as a mapping, read by the rules of `deepspeed.initialize`.

    None if the arguments have no configuration; `deepspeed.initialize` raises an error for that later.
    """
    config = arguments.get("config") or arguments.get("config_params")
    config = config or getattr(arguments.get("args"), "deepspeed_config", None)
    return None if config is None else load_configuration(config)


def load_configuration(config: str | Path | DsConfig) -> DsConfig:
    """Return a configuration, of a file or text read as DeepSpeed reads it: JSON, or JSON with comments (Hjson).

    DeepSpeed's own function for this, ``load_ds_config``, came with 0.18.6.

    Args:
        config: the configuration itself, path of a file, or the content of a file in base64.

    Raises:
        ValueError: it is none of these, or a key is given twice.
    """
    if isinstance(config, Mapping):
        return config
    if os.path.exists(config):
        return _of_json(Path(config).read_text())
    try:
        return _of_json(base64.urlsafe_b64decode(str(config)).decode())
    except ValueError as error:  # not base64, or not JSON in it
        raise ValueError(
            f"the configuration of DeepSpeed is neither the path of a file nor JSON in base64: {config}"
        ) from error


def _of_json(text: str) -> DsConfig:
    loaded: DsConfig = hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    return loaded


def read_same_configuration(arguments: Arguments) -> DsConfig | None:
    """Read the configuration, see `read_configuration`, and compare it between all ranks.

    Caller: every rank of the world.
    Collectives: those of `agree_on_configuration`.

    Raises:
        ConfigError: the ranks have different configurations, or another rank could not read its configuration. A rank
            that could not read its configuration raises the error of DeepSpeed's reader instead.
    """
    init_distributed(arguments)
    error: Exception | None = None
    try:
        ds_config = read_configuration(arguments)
    except Exception as caught:
        error, ds_config = caught, None
    model = arguments.get("model")
    try:
        agree_on_configuration(ds_config, model if isinstance(model, nn.Module) else None, error)
    finally:
        if error is not None:
            raise error
    return ds_config


def init_distributed(arguments: Arguments) -> None:
    """Choose this rank's device, and make the default process group, as `deepspeed.initialize` does later."""
    accelerator = deepspeed.get_accelerator()
    if "LOCAL_RANK" in os.environ:
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    port = {name: arguments[name] for name in ("distributed_port",) if name in arguments}
    deepspeed.init_distributed(
        accelerator.communication_backend_name(), dist_init_required=arguments.get("dist_init_required"), **port
    )
