"""Scenario of a plan: the cluster, model and batch that the plan was made for, as data in the plan's file.

    {"version": 1, "num_heads": 32, ..., "scenario": {
        "cost_model": "calibrated", "model": {"name": ..., "config": {...}}, "workload": {"seq_len": 65536, ...},
        "clusters": [{...}], "lengths": null}}

``clusters`` has one cluster of the whole plan, or one per replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any

from ds_hetero.cluster import Cluster, load_cluster
from ds_hetero.cluster.file_values import cluster_to_dict
from ds_hetero.common.reading import MAX_SEQ_LEN, JsonDict, is_list, is_whole, shortened
from ds_hetero.cost import Workload
from ds_hetero.cost.workload import Buffers
from ds_hetero.errors import PlanError
from ds_hetero.models import model_from_config
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.values.plans.plan import SCENARIO

_WORKLOAD = tuple(field.name for field in fields(Workload) if field.name not in ("zero_cluster", "zero_order"))
_KEYS = ("cost_model", "model", "workload", "clusters", "lengths")
SCENARIO_REMEDY = (
    'Write the file with "ds-hetero plan ... --out FILE", or give a run.json of a job that had "report" in its section.'
)


@dataclass(frozen=True, kw_only=True)
class PlanScenario:
    """Cluster, model and batch of a plan."""

    cost_model: str  # name of the cost model that predicts the plan
    model: ModelSpec
    workload: Workload  # of every replica; the batches of a replica are in the plan
    clusters: tuple[Cluster, ...]  # one for the whole plan, or one per replica
    lengths: tuple[int, ...] | None = None  # tokens of the documents of a row; None if not planned for documents

    def to_dict(self) -> JsonDict:
        """Return the content of "scenario"."""
        workload = {name: getattr(self.workload, name) for name in _WORKLOAD}
        return {
            "cost_model": self.cost_model,
            "model": {"name": self.model.name, "config": _config_of(self.model)},
            "workload": {
                **workload,
                "zero_weights": _list_or_none(self.workload.zero_weights),
                "buffers": asdict(self.workload.buffers),
            },
            "clusters": [cluster_to_dict(cluster) for cluster in self.clusters],
            "lengths": _list_or_none(self.lengths),
        }


def read_scenario(data: Any) -> PlanScenario:
    """Read the content of "scenario". Raises `PlanError`, `ClusterError` or `ModelError`: the key and its fault."""
    _expect_keys(SCENARIO, data, _KEYS)
    _expect_keys(f"{SCENARIO}.model", data["model"], ("name", "config"))
    clusters, lengths, name = data["clusters"], data["lengths"], data["model"]["name"]
    if not isinstance(name, str) or not isinstance(data["cost_model"], str):
        raise PlanError(f"{SCENARIO}: cost_model and model.name must be text. {SCENARIO_REMEDY}")
    if not (isinstance(clusters, list) and clusters and all(isinstance(cluster, Mapping) for cluster in clusters)):
        raise PlanError(f"{SCENARIO}.clusters must be a list of clusters, got {shortened(clusters)}.")
    if lengths is not None and not (is_list(lengths) and all(is_whole(tokens, 1, MAX_SEQ_LEN) for tokens in lengths)):
        raise PlanError(f"{SCENARIO}.lengths must be null or a list of whole numbers >= 1, got {shortened(lengths)}.")
    return PlanScenario(
        cost_model=data["cost_model"],
        model=model_from_config(data["model"]["config"], name),
        workload=_read_workload(data["workload"]),
        clusters=tuple(load_cluster(dict(cluster)) for cluster in clusters),
        lengths=None if lengths is None else tuple(lengths),
    )


# Fields that files of earlier releases lack.
_LATER = (
    "tiled_mlp",
    "offload_activations",
    "tile_tokens",
    "adapter_rank",
    "trains_embedding",
    "quantization",
    "logit_bytes",
    "fused_kernels",
    "compiled",
    "selective_checkpointing",
    "zero_within",
)


def _read_workload(data: Any) -> Workload:
    usual = asdict(Workload(seq_len=1))
    if isinstance(data, Mapping):
        data = {**{name: usual[name] for name in _LATER}, **data}
    _expect_keys(f"{SCENARIO}.workload", data, _WORKLOAD)
    for name in _WORKLOAD:
        value = data[name]
        if not _is_workload_value(name, value, usual[name]):
            raise PlanError(
                f"{SCENARIO}.workload.{name}: {shortened(value)} is not what a workload takes. {SCENARIO_REMEDY}"
            )
    weights, buffers = data["zero_weights"], data["buffers"]
    if buffers is not None:
        _expect_keys(f"{SCENARIO}.workload.buffers", buffers, tuple(field.name for field in fields(Buffers)))
    parts = {
        "zero_weights": None if weights is None else tuple(weights),
        "buffers": Buffers() if buffers is None else Buffers(**buffers),  # files of earlier versions have none
    }
    return Workload(**{**data, **parts})


def _is_workload_value(name: str, value: Any, usual: Any) -> bool:
    """Return whether a value has a type that the field of a workload takes; ``usual`` is the field's default."""
    if isinstance(usual, bool):
        return isinstance(value, bool)
    if value is None:
        return name in ("zero_weights", "tile_tokens", "logit_bytes", "quantization", "buffers")
    if name == "zero_weights":
        return is_list(value)
    if name == "quantization":
        return isinstance(value, str)
    if name == "buffers":
        return isinstance(value, Mapping) and all(map(_is_number, value.values()))
    return _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value) and value >= 0


def _config_of(model: ModelSpec) -> JsonDict:
    """Return the keys of a config.json from which this model is read again."""
    config: JsonDict = {
        "model_type": _model_type(model),
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.mlp_size,
        "vocab_size": model.vocab_size,
        "hidden_act": "silu" if model.gated_mlp else "relu",
        "tie_word_embeddings": model.tied_embeddings,
    }
    if model.num_experts:
        config |= {"num_local_experts": model.num_experts, "num_experts_per_tok": model.experts_per_token}
    if model.recurrent is not None:
        config |= model.recurrent.to_config()
        if model.shared_mlp_size:
            config["shared_expert_intermediate_size"] = model.shared_mlp_size
    return config


def _model_type(model: ModelSpec) -> str:
    """Return a model type of transformers whose models have the same gates and norms as this one."""
    if model.recurrent is not None:
        return "qwen3_next" if model.gated_attention else "bamba"
    if model.head_norms:
        return "qwen3"
    return "llama" if model.gated_mlp else "gpt_neox"


def _list_or_none(values: Sequence[Any] | None) -> list[Any] | None:
    return None if values is None else list(values)


def _expect_keys(where: str, data: Any, keys: Sequence[str]) -> None:
    if not isinstance(data, Mapping) or set(data) != set(keys):
        found = shortened(sorted(data, key=str) if isinstance(data, Mapping) else data)
        raise PlanError(f'"{where}" takes {", ".join(keys)}, got {found}. {SCENARIO_REMEDY}')
