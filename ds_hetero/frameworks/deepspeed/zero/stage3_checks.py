"""Refuse settings that do not work with unequal shards of ZeRO-3, or with shards inside nodes (``"zero_within"``)."""

from __future__ import annotations

import deepspeed.runtime.superoffload.superoffload_stage3
from deepspeed.runtime.zero.config import get_zero_config
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from ds_hetero.engine.ds_config import DsConfig
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.names import OWN_GROUPS
from ds_hetero.values.section import SECTION


def check_stage3(ds_config: DsConfig) -> None:
    """Check that no setting of stage 3 needs shards of equal size. Raises `ConfigError`: a setting does.

    Settings that work with no stage are refused by `ds_hetero.frameworks.deepspeed.keys`.
    """
    if get_zero_config(ds_config).use_all_reduce_for_fetch_params:
        raise ConfigError(
            '"zero_partition" with unequal weights does not work on ZeRO stage 3 together with '
            "stage3_use_all_reduce_for_fetch_params, which needs shards of equal size. Remove it, or set "
            '"zero_partition": "uniform".'
        )


def check_nodes(ds_config: DsConfig) -> None:
    """Check that the settings allow ``"zero_within"``. Raises `ConfigError`, which names the settings that do not."""
    zero = get_zero_config(ds_config)
    refused = {
        f"DeepSpeed {deepspeed.__version__} (it needs 0.19.8)": not hasattr(DeepSpeedZeroOptimizer_Stage3, OWN_GROUPS),
        f"ZeRO stage {int(zero.stage)}": zero.stage != 3,
        "offload_optimizer": zero.offload_optimizer is not None,
        "offload_param": zero.offload_param is not None,
        '"elastic"': ds_config[SECTION].get("elastic") is not None,
    }
    if conflicts := [name for name, is_set in refused.items() if is_set]:
        raise ConfigError(
            f'"zero_within" copies the shards of ZeRO stage 3 across nodes, and does not work with '
            f'{" and ".join(conflicts)}. Change these settings, or leave "zero_within" out.'
        )
