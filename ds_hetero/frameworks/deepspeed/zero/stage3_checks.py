"""Settings that ZeRO-3 cannot have with shards of unequal size, or inside nodes: refused by name."""

from __future__ import annotations

import deepspeed.runtime.superoffload.superoffload_stage3
from deepspeed.runtime.zero.config import get_zero_config
from packaging.specifiers import SpecifierSet

from ds_hetero.engine.ds_config import DsConfig
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.names import WHOLE
from ds_hetero.values.section import SECTION


def check_stage3(ds_config: DsConfig) -> None:
    """Refuse settings of stage 3 that need shards of one size. Raises `ConfigError`: names the setting.

    What no stage can do stands in `ds_hetero.frameworks.deepspeed.keys`.
    """
    if get_zero_config(ds_config).use_all_reduce_for_fetch_params:
        raise ConfigError(
            '"zero_partition" with unequal weights does not work on ZeRO stage 3 together with '
            "stage3_use_all_reduce_for_fetch_params, which needs shards of one size. Remove it, or set "
            '"zero_partition": "uniform".'
        )


def check_nodes(ds_config: DsConfig) -> None:
    """Refuse settings that keep shards from lying inside nodes. Raises `ConfigError`: it names the setting."""
    zero = get_zero_config(ds_config)
    refused = {
        f"DeepSpeed {deepspeed.__version__} (it needs {WHOLE})": deepspeed.__version__ not in SpecifierSet(WHOLE),
        f"ZeRO stage {int(zero.stage)}": zero.stage != 3,
        "offload_optimizer": zero.offload_optimizer is not None,
        "offload_param": zero.offload_param is not None,
        '"elastic"': ds_config[SECTION].get("elastic") is not None,
    }
    if against := [name for name, is_set in refused.items() if is_set]:
        raise ConfigError(
            f'"zero_within" copies the shards of ZeRO stage 3 across nodes, and does not work with '
            f"{' and '.join(against)}. Remove one of them."
        )
