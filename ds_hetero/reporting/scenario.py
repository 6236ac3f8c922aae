"""Read and write the scenario of a plan: the cluster, model and workload that it was made for, in the plan's file.

    {"version": 1, "num_heads": 32, ..., "scenario": {
        "cost_model": "calibrated", "model": {"name": ..., "config": {...}}, "workload": {"seq_len": 65536, ...},
        "clusters": [{...}], "lengths": null}}

``clusters`` has one cluster of the whole plan, or one per replica. A job that is faster without some of the given
devices also has ``"left_out": {"RTX-3090": [4, 5]}``: their ranks in the whole cluster, by device. A model whose layers
are unlike, or whose attention has windows or is latent, also has ``"sizes"``, the fields of `ModelSpec` that its
``"config"`` does not say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from typing import Any

from ds_hetero.cluster import Cluster, load_cluster
from ds_hetero.cluster.file_values import cluster_to_dict
from ds_hetero.common.reading import MAX_SEQ_LEN, JsonDict, is_list, is_whole, shortened
from ds_hetero.cost import Workload
from ds_hetero.cost.workload import EXPERT_RULES, Buffers
from ds_hetero.errors import PlanError
from ds_hetero.models import model_from_config
from ds_hetero.models.latent import LatentAttention
from ds_hetero.models.saved_tensors import SavedTensors
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.values.plans.plan import SCENARIO

_WORKLOAD_FIELDS = tuple(field.name for field in fields(Workload) if field.name not in ("zero_cluster", "zero_order"))
# Fields of `ModelSpec` that "sizes" may have.
_SIZE_FIELDS = (
    "shared_mlp_size",
    "gated_attention",
    "head_norms",
    "dense_layers",
    "dense_mlp_size",
    "window",
    "window_layers",
    "latent",
    "saved",
    "other_layer_parameters",
    "other_parameters",
)
_KEYS = ("cost_model", "model", "workload", "clusters", "lengths")
_LEFT_OUT = "left_out"  # further key, of jobs on a part of the given devices
SCENARIO_REMEDY = (
    'Write the file with "ds-hetero plan ... --out FILE", or give a run.json of a job that had "report" in its section.'
)


@dataclass(frozen=True, kw_only=True)
class PlanScenario:
    """Cluster, model and workload that a plan was made for."""

    cost_model: str  # name of the cost model that predicts the plan
    model: ModelSpec
    workload: Workload  # workload of every replica; if batches of replicas differ, they are in the plan
    clusters: tuple[Cluster, ...]  # one for the whole plan, or one per replica
    lengths: tuple[int, ...] | None = None  # tokens of every document of a row; None if not planned for documents
    # Devices that were given to the search and are not in ``clusters``: name, and ranks in the whole cluster.
    left_out: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def to_dict(self) -> JsonDict:
        """Return the content of "scenario"."""
        workload = {name: getattr(self.workload, name) for name in _WORKLOAD_FIELDS}
        return {
            "cost_model": self.cost_model,
            "model": _model_of(self.model),
            "workload": {
                **workload,
                "zero_weights": _list_or_none(self.workload.zero_weights),
                "experts": _experts_value(self.workload.experts),
                "buffers": asdict(self.workload.buffers),
            },
            "clusters": [cluster_to_dict(cluster) for cluster in self.clusters],
            "lengths": _list_or_none(self.lengths),
            **({_LEFT_OUT: {name: list(ranks) for name, ranks in self.left_out}} if self.left_out else {}),
        }


def _experts_value(experts: str | tuple[float, ...] | None) -> str | list[float] | None:
    """Return the division of experts as JSON has it."""
    return list(experts) if isinstance(experts, tuple) else experts


def read_scenario(data: Any) -> PlanScenario:
    """Read the content of "scenario".

    Raises:
        PlanError, ClusterError, ModelError: a key is missing or wrong; the message names it.
    """
    has_left_out = isinstance(data, Mapping) and _LEFT_OUT in data
    _expect_keys(SCENARIO, data, (*_KEYS, _LEFT_OUT) if has_left_out else _KEYS)
    sizes = data["model"].get("sizes") if isinstance(data["model"], Mapping) else None
    _expect_keys(f"{SCENARIO}.model", data["model"], ("name", "config", *(() if sizes is None else ("sizes",))))
    clusters, lengths, name = data["clusters"], data["lengths"], data["model"]["name"]
    if not isinstance(name, str) or not isinstance(data["cost_model"], str):
        raise PlanError(f"{SCENARIO}: cost_model and model.name must be text. {SCENARIO_REMEDY}")
    if not (isinstance(clusters, list) and clusters and all(isinstance(cluster, Mapping) for cluster in clusters)):
        raise PlanError(f"{SCENARIO}.clusters must be a list of clusters, got {shortened(clusters)}.")
    if lengths is not None and not (is_list(lengths) and all(is_whole(tokens, 1, MAX_SEQ_LEN) for tokens in lengths)):
        raise PlanError(f"{SCENARIO}.lengths must be null or a list of whole numbers >= 1, got {shortened(lengths)}.")
    return PlanScenario(
        cost_model=data["cost_model"],
        model=_with_sizes(model_from_config(data["model"]["config"], name), sizes),
        workload=_read_workload(data["workload"]),
        clusters=tuple(load_cluster(dict(cluster)) for cluster in clusters),
        lengths=None if lengths is None else tuple(lengths),
        left_out=_read_left_out(data[_LEFT_OUT]) if has_left_out else (),
    )


def _read_left_out(data: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the ranks of the devices that were left out. Raises `PlanError`: not lists of ranks by device."""
    is_valid = isinstance(data, Mapping) and all(
        is_list(ranks) and all(is_whole(rank, 0, 2**24) for rank in ranks) for ranks in data.values()
    )
    if not is_valid:
        raise PlanError(f"{SCENARIO}.{_LEFT_OUT} must have lists of ranks by device, got {shortened(data)}.")
    return tuple((str(name), tuple(ranks)) for name, ranks in data.items())


# Fields of a workload that files of earlier releases lack.
_LATER_FIELDS = (
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
    "keep_attention",
    "ring_gradients",
    "experts",
)


def _read_workload(data: Any) -> Workload:
    """Read the workload of a scenario. Raises `PlanError`: a field is missing or has a wrong type."""
    defaults = asdict(Workload(seq_len=1))
    if isinstance(data, Mapping):
        data = {**{name: defaults[name] for name in _LATER_FIELDS}, **data}
    _expect_keys(f"{SCENARIO}.workload", data, _WORKLOAD_FIELDS)
    for name in _WORKLOAD_FIELDS:
        value = data[name]
        if not _is_workload_value(name, value, defaults[name]):
            raise PlanError(
                f"{SCENARIO}.workload.{name}: {shortened(value)} is not a value of this field. {SCENARIO_REMEDY}"
            )
    weights, buffers, experts = data["zero_weights"], data["buffers"], data["experts"]
    if buffers is not None:
        _expect_keys(f"{SCENARIO}.workload.buffers", buffers, tuple(field.name for field in fields(Buffers)))
    parts = {
        "zero_weights": None if weights is None else tuple(weights),
        "experts": tuple(experts) if is_list(experts) else experts,
        "buffers": Buffers() if buffers is None else Buffers(**buffers),  # files of earlier versions have none
    }
    return Workload(**{**data, **parts})


def _is_workload_value(name: str, value: Any, default: Any) -> bool:
    """Return True if a value has a type that the field ``name`` of a workload takes.

    Args:
        default: default of the field.
    """
    if isinstance(default, bool):
        return isinstance(value, bool)
    if value is None:
        return name in ("zero_weights", "tile_tokens", "logit_bytes", "quantization", "buffers", "experts")
    if name == "zero_weights":
        return is_list(value)
    if name == "experts":
        return is_list(value) or value in EXPERT_RULES
    if name in ("quantization", "ring_gradients"):
        return isinstance(value, str)
    if name == "buffers":
        return isinstance(value, Mapping) and all(map(_is_number, value.values()))
    return _is_number(value)


def _is_number(value: Any) -> bool:
    """Return True if a value is a finite number >= 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value) and value >= 0


def _model_of(model: ModelSpec) -> JsonDict:
    """Return the content of "model": a configuration, and the sizes that cannot be read from this configuration."""
    config = _config_of(model)
    sizes_of_config = asdict(model_from_config(config, model.name))
    sizes = {name: value for name, value in asdict(model).items() if value != sizes_of_config[name]}
    return {"name": model.name, "config": config, **({"sizes": sizes} if sizes else {})}


def _with_sizes(model: ModelSpec, sizes: Any) -> ModelSpec:
    """Return the model with the sizes of a plan's file.

    Raises:
        PlanError: ``sizes`` has an unknown field, or a value that its field does not take.
    """
    if sizes is None:
        return model
    where = f"{SCENARIO}.model.sizes"
    if not isinstance(sizes, Mapping) or not set(sizes) <= set(_SIZE_FIELDS):
        raise PlanError(f"{where} takes {', '.join(_SIZE_FIELDS)}, got {shortened(sizes)}. {SCENARIO_REMEDY}")
    values = {name: value for name, value in sizes.items() if name not in ("latent", "saved")}
    for name, value in values.items():
        if isinstance(getattr(model, name), bool):
            is_valid = isinstance(value, bool)
        else:
            is_valid = is_whole(value, 0, 2**50)
        if not is_valid:
            raise PlanError(f"{where}.{name}: {shortened(value)} is not a value of this field. {SCENARIO_REMEDY}")
    if "saved" in sizes:
        model = replace(model, saved=_read_saved(sizes["saved"], f"{where}.saved"))
    return replace(model, **values, latent=_read_latent(sizes.get("latent"), f"{where}.latent"))


def _read_latent(data: Any, where: str) -> LatentAttention | None:
    """Return latent attention from its sizes; None for null. Raises `PlanError`: ``data`` has other keys or values."""
    if data is None:
        return None
    names = tuple(field.name for field in fields(LatentAttention))
    if (
        not isinstance(data, Mapping)
        or set(data) != set(names)
        or not all(is_whole(data[name], 0, 2**24) for name in names)
    ):
        raise PlanError(f"{where} takes whole numbers {', '.join(names)}, got {shortened(data)}. {SCENARIO_REMEDY}")
    return LatentAttention(**data)


def _read_saved(data: Any, where: str) -> SavedTensors:
    """Return what autograd saves of a layer. Raises `PlanError`: ``data`` has other keys or values."""
    usual = asdict(SavedTensors())
    if not isinstance(data, Mapping) or set(data) != set(usual):
        raise PlanError(f"{where} takes {', '.join(usual)}, got {shortened(data)}. {SCENARIO_REMEDY}")
    for name, value in data.items():
        if isinstance(usual[name], bool):
            is_valid = isinstance(value, bool)
        else:
            is_valid = value is None or _is_number(value)
        if not is_valid:
            raise PlanError(f"{where}.{name}: {shortened(value)} is not a value of this field. {SCENARIO_REMEDY}")
    return SavedTensors(**data)


def _config_of(model: ModelSpec) -> JsonDict:
    """Return keys of a config.json from which `model_from_config` makes an equal model."""
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
    """Return a model type of transformers whose models have the same gates and norms as ``model``."""
    if model.recurrent is not None:
        return "qwen3_next" if model.gated_attention else "bamba"
    if model.head_norms:
        return "qwen3"
    return "llama" if model.gated_mlp else "gpt_neox"


def _list_or_none(values: Sequence[Any] | None) -> list[Any] | None:
    """Return values as a list for JSON; None stays None."""
    return None if values is None else list(values)


def _expect_keys(where: str, data: Any, keys: Sequence[str]) -> None:
    """Raise `PlanError` if ``data`` is not an object with exactly these keys."""
    if not isinstance(data, Mapping) or set(data) != set(keys):
        actual = shortened(sorted(data, key=str) if isinstance(data, Mapping) else data)
        raise PlanError(f'"{where}" takes {", ".join(keys)}, got {actual}. {SCENARIO_REMEDY}')
