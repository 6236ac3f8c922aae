"""A plan that says what it was made for: cluster, model and batch, as data in the plan's own file.

    {"version": 1, "num_heads": 32, ..., "scenario": {
        "cost_model": "calibrated", "model": {"name": ..., "config": {...}}, "workload": {"seq_len": 65536, ...},
        "clusters": [{...}], "lengths": null}}

Jobs read such a file as any other plan and leave its "scenario" alone; `ds-hetero report` and `ds-hetero trace` need
it. `clusters` has one cluster of the whole plan, or one per replica.

Assumptions of a plan, in a line that stands beside every answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

from ds_hetero.cluster import Cluster, load_cluster
from ds_hetero.cluster.catalogue import CATALOGUE
from ds_hetero.cluster.file_values import cluster_to_dict
from ds_hetero.cluster.topology import Node
from ds_hetero.common.reading import MAX_SEQ_LEN, JsonDict, is_list, is_whole, read_file, shortened
from ds_hetero.common.units import GB
from ds_hetero.cost import CostModel, Workload, make_cost_model
from ds_hetero.cost.terms.host_memory import USABLE_HOST_FRACTION
from ds_hetero.cost.workload import Buffers
from ds_hetero.errors import PlanError
from ds_hetero.models import model_from_config
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.values.plans import Plan, read_plan
from ds_hetero.values.plans.plan import SCENARIO
from ds_hetero.values.schedule import Schedule

_WORKLOAD = tuple(field.name for field in fields(Workload) if field.name not in ("zero_cluster", "zero_order"))
_KEYS = ("cost_model", "model", "workload", "clusters", "lengths")
_REMEDY = (
    'Write the file with "ds-hetero plan ... --out FILE", or give a run.json of a job that had "report" in its section.'
)


@dataclass(frozen=True, kw_only=True)
class PlanScenario:
    """Scenario that a plan was made for."""

    cost_model: str  # name of the cost model that judges it
    model: ModelSpec  # what is trained
    workload: Workload  # of every replica; a replica's own batches are in the plan
    clusters: tuple[Cluster, ...]  # one for the whole plan, or one per replica
    lengths: tuple[int, ...] | None = None  # tokens of a row's documents, where the plan is for them

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


@dataclass(frozen=True, kw_only=True)
class DescribedPlan:
    """A plan and what it was made for. Raises `PlanError`: the plan's ranks are not those of the clusters."""

    plan: Plan  # what the job does
    scenario: PlanScenario  # what it was made for

    def __post_init__(self) -> None:
        held = sum(cluster.num_ranks for cluster in self.scenario.clusters)
        if max(self.plan.ranks) >= held or (self.plan.is_replicas and len(self.plan.ranks) != held):
            raise PlanError(
                f"the plan is for {len(self.plan.ranks)} ranks up to rank {max(self.plan.ranks)}, and the clusters of "
                f'its "{SCENARIO}" have {held} devices. {_REMEDY}'
            )

    @property
    def num_replicas(self) -> int:
        """Replicas, which is pipelines of one stage; 0 for a plan of pipelines."""
        return len(self.plan.pipelines) if self.plan.is_replicas else 0

    def cluster_of(self, replica: int) -> Cluster:
        """The devices of one replica, numbered from 0."""
        if len(self.scenario.clusters) > 1:
            return self.scenario.clusters[replica]
        ranks = self.plan.schedules[replica].ranks
        return self.scenario.clusters[0].part(ranks[0], ranks[-1] + 1)

    def schedule_of(self, replica: int) -> Schedule:
        """The schedule of one replica, whose ranks begin at 0."""
        return self.plan.schedules[replica].shifted(0)

    def cost_of(self, replica: int) -> CostModel:
        """The cost model of one replica with its own batches."""
        workload, pipeline = self.scenario.workload, self.plan.pipelines[replica]
        if pipeline.micro_batches is not None and pipeline.micro_batch_size is not None:
            workload = replace(workload, micro_batch=pipeline.micro_batch_size, micro_batches=pipeline.micro_batches)
        if self.num_replicas > 1:
            workload = replace(workload, zero_cluster=self._whole_cluster)
        return make_cost_model(self.scenario.cost_model, self.cluster_of(replica), self.scenario.model, workload)

    @property
    def _whole_cluster(self) -> Cluster | None:
        """The devices of all replicas, where one cluster describes them."""
        only = self.scenario.clusters[0]
        return only if len(self.scenario.clusters) == 1 else None

    def to_dict(self) -> JsonDict:
        """Return the content of a plan file, which a job reads too."""
        is_single = self.num_replicas == 1 and self.plan.batch_split is None
        if is_single:
            content = self.plan.schedules[0].to_dict()
        else:
            content = self.plan.to_replicas_dict() if self.num_replicas else self.plan.to_dict()
        return {**content, SCENARIO: self.scenario.to_dict()}


def read_described_plan(path: str | Path) -> DescribedPlan | Plan:
    """Read a plan file, or what ``ds-hetero plan --json`` printed; the plan alone where it says no scenario.

    Raises:
        PlanError, ScheduleError: the file cannot be read, is of another version, or is wrong.
        ClusterError, ModelError: its scenario is.
    """
    data = read_file(path, "plan", PlanError)
    scenario = data.get(SCENARIO) if isinstance(data, Mapping) else None
    for name in ("plan", "schedule"):
        if isinstance(data, Mapping) and isinstance(data.get(name), Mapping):
            data = data[name]
            scenario = data.get(SCENARIO) if scenario is None else scenario
    plan = read_plan(data)
    return plan if scenario is None else DescribedPlan(plan=plan, scenario=read_scenario(scenario))


def read_scenario(data: Any) -> PlanScenario:
    """Read the content of "scenario". Raises `PlanError`, `ClusterError` or `ModelError`: the key and its fault."""
    _expect_keys(SCENARIO, data, _KEYS)
    _expect_keys(f"{SCENARIO}.model", data["model"], ("name", "config"))
    clusters, lengths, name = data["clusters"], data["lengths"], data["model"]["name"]
    if not isinstance(name, str) or not isinstance(data["cost_model"], str):
        raise PlanError(f"{SCENARIO}: cost_model and model.name must be text. {_REMEDY}")
    if not (isinstance(clusters, list) and clusters and all(isinstance(one, Mapping) for one in clusters)):
        raise PlanError(f"{SCENARIO}.clusters must be a list of clusters, got {shortened(clusters)}.")
    if lengths is not None and not (is_list(lengths) and all(is_whole(one, 1, MAX_SEQ_LEN) for one in lengths)):
        raise PlanError(f"{SCENARIO}.lengths must be null or a list of whole numbers >= 1, got {shortened(lengths)}.")
    return PlanScenario(
        cost_model=data["cost_model"],
        model=model_from_config(data["model"]["config"], name),
        workload=_read_workload(data["workload"]),
        clusters=tuple(load_cluster(dict(one)) for one in clusters),
        lengths=None if lengths is None else tuple(lengths),
    )


_LATER = (  # fields that files of earlier versions do not have
    *("tiled_mlp", "offload_activations", "tile_tokens", "adapter_rank", "trains_embedding"),
    *("quantization", "logit_bytes", "fused_kernels", "compiled", "selective_checkpointing", "zero_within"),
)


def _read_workload(data: Any) -> Workload:
    usual = asdict(Workload(seq_len=1))
    if isinstance(data, Mapping):
        data = {**{name: usual[name] for name in _LATER}, **data}
    _expect_keys(f"{SCENARIO}.workload", data, _WORKLOAD)
    for name in _WORKLOAD:
        value = data[name]
        if isinstance(usual[name], bool):
            is_right = isinstance(value, bool)
        elif name == "zero_weights":
            is_right = value is None or is_list(value)
        elif name in ("tile_tokens", "logit_bytes"):
            is_right = value is None or _is_number(value)
        elif name == "quantization":
            is_right = value is None or isinstance(value, str)
        elif name == "buffers":
            is_right = value is None or (isinstance(value, Mapping) and all(map(_is_number, value.values())))
        else:
            is_right = _is_number(value)
        if not is_right:
            raise PlanError(f"{SCENARIO}.workload.{name}: {shortened(value)} is not what a workload takes. {_REMEDY}")
    weights, buffers = data["zero_weights"], data["buffers"]
    if buffers is not None:
        _expect_keys(f"{SCENARIO}.workload.buffers", buffers, tuple(field.name for field in fields(Buffers)))
    parts = {
        "zero_weights": None if weights is None else tuple(weights),
        "buffers": Buffers() if buffers is None else Buffers(**buffers),  # files of earlier versions have none
    }
    return Workload(**{**data, **parts})


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value) and value >= 0


def _config_of(model: ModelSpec) -> JsonDict:
    """Return the keys of a config.json that make this model again."""
    config: JsonDict = {
        "model_type": "qwen3" if model.head_norms else "llama" if model.gated_mlp else "gpt_neox",
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
        config |= {"model_type": "qwen3_next" if model.gated_attention else "bamba"}
        config |= {"shared_expert_intermediate_size": model.shared_mlp_size} if model.shared_mlp_size else {}
    return config


def _list_or_none(values: Sequence[Any] | None) -> list[Any] | None:
    return None if values is None else list(values)


def _expect_keys(where: str, data: Any, keys: Sequence[str]) -> None:
    if not isinstance(data, Mapping) or set(data) != set(keys):
        found = shortened(sorted(data, key=str) if isinstance(data, Mapping) else data)
        raise PlanError(f'"{where}" takes {", ".join(keys)}, got {found}. {_REMEDY}')


def assumptions(scenario: PlanScenario) -> list[str]:
    """Assumptions about network, cards and training, each as a few words."""
    work = scenario.workload
    clusters = dict.fromkeys(scenario.clusters)
    ports = [words for cluster in clusters if len(cluster.nodes) > 1 for words in _ports(cluster.nodes)]
    nodes = [node for cluster in clusters for node in cluster.nodes]
    states = f"{work.optimizer_bytes:g} bytes of optimizer state a parameter"
    return [
        *dict.fromkeys(ports),
        *(["GeForce cards exchange through the host's memory"] if any(map(_through_host, nodes)) else []),
        f"ZeRO stage {work.zero_stage}, {8 * work.element_bytes}-bit parameters, {states}",
        *(work.memory_savers or ["no activation checkpointing"]),
        *_hosts(nodes, work),
        *([] if work.tiled_logits else ["the whole loss at once"]),
    ]


def assumed_line(scenario: PlanScenario) -> str:
    """The line of `assumptions`."""
    return f"assumed:    {'; '.join(assumptions(scenario))}"


def _ports(nodes: Sequence[Node]) -> list[str]:
    """The ports of nodes with several cards."""
    rates = dict.fromkeys(f"{node.nic_bytes_per_s / GB:.3g}" for node in nodes if node.nic_bytes_per_s is not None)
    words = [f"cards of a node share {' or '.join(rates)} GB/s of network (--nics, nics)"] if rates else []
    alone = any(node.nic_bytes_per_s is None and len(node.devices) > 1 for node in nodes)
    return [*words, *(["a network port for every card"] if alone else [])]


def _hosts(nodes: Sequence[Node], work: Workload) -> list[str]:
    """Say of machines that offloads fill what is known of their memory, and where it is the cards' own."""
    devices = [device for node in nodes for device in node.devices]
    shared = dict.fromkeys(device.name for device in devices if device.shares_host_memory)
    words = [f"offloads free nothing of {' and '.join(shared)}, whose memory is the machine's"] if shared else []
    apart = [node for node in nodes if not all(device.shares_host_memory for device in node.devices)]
    if not (work.offloads and apart):
        return words
    if any(node.host_memory_bytes is None for node in apart):
        return [*words, "machines have the memory that offloads need (--host-memory, host_memory_gib)"]
    return [*words, f"offloads may take {USABLE_HOST_FRACTION:.0%} of a machine's memory"]


def _through_host(node: Node) -> bool:
    names = [device.name for device in node.devices]
    return len(names) > 1 and any(name in CATALOGUE and not CATALOGUE[name].peer_to_peer for name in names)
