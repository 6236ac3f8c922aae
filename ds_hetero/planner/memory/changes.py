"""Changes of a training that save memory, and how they are made.

The same cluster with a card more, a card less, or another network.

add=3090      cards beside those of the last node, as in `ds_hetero.cluster.notation`
remove=1      without rank 1
network=10    10 GB/s between any two nodes, or 80Gbit/s
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ds_hetero.cluster.files import best_rate, cluster_from_dict
from ds_hetero.cluster.notation import network_gb_per_s, read_notation
from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.reading import shortened
from ds_hetero.common.text import GB
from ds_hetero.cost.terms.layer_memory import MLP_TILE_TOKENS
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import ClusterError
from ds_hetero.models.configs import USUAL_RANK
from ds_hetero.planner.memory.best import Fitted, best_schedule, weights_by_memory, with_workload
from ds_hetero.values.schedule import Schedule

PLANNED = "planned tokens and heads"  # a change of the schedule's source
SMALL_BUCKET = 50_000_000  # elements; a tenth of DeepSpeed's, and still long enough for a link


@dataclass(frozen=True, slots=True)
class Changed:
    """A training after changes."""

    fitted: Fitted  # its schedule and prediction

    @property
    def iteration_s(self) -> float:
        """Predicted time of an optimizer step."""
        return self.fitted.prediction.iteration_s


@dataclass(frozen=True, slots=True)
class Change:
    """One way to need less memory.

    Args:
        applies: whether it would change a workload that is planned by a source.
    """

    name: str  # for people and for JSON
    how: str  # what to write where
    applies: Callable[[Workload, str | Schedule], bool]
    workload: Callable[[Workload], Workload]  # the workload after it; the same where it changes something else
    trains_less: bool = False  # other weights learn, which is a change of the result
    offloads: bool = False  # to the machine's memory, which frees nothing where a card has no other


def _stage(stage: int) -> Change:
    return Change(
        f"ZeRO stage {stage}",
        f'"zero_optimization": {{"stage": {stage}}} in ds_config.json',
        lambda work, _: work.zero_stage < stage,
        lambda work: replace(work, zero_stage=max(stage, work.zero_stage)),
    )


CHANGES = (
    Change(
        "tiled loss",
        "deepspeed's sequence_tiled_compute around the function that makes logits and loss, in a loop of your own",
        lambda work, _: not work.tiled_logits,
        lambda work: replace(work, tiled_logits=True),
    ),
    Change(
        "tiled MLP and loss",
        f'"tile_tokens": {MLP_TILE_TOKENS} in the section, and loss = engine(**batch).loss in a loop of your own',
        lambda work, _: not work.tiled_mlp,
        lambda work: replace(work, tiled_logits=True, tiled_mlp=True),
    ),
    Change(
        "smaller gradient buckets",
        f'"zero_optimization": {{"reduce_bucket_size": {SMALL_BUCKET:.0e}}} in ds_config.json',
        lambda work, _: work.zero_stage > 0 and work.buffers.reduce_bucket > SMALL_BUCKET,
        lambda work: replace(work, buffers=replace(work.buffers, reduce_bucket=SMALL_BUCKET)),
    ),
    Change(
        "activation checkpointing",
        "model.activation_checkpointing_enable(), or activation_checkpointing=True of the HF Trainer (gradient_... "
        "before transformers 5.23)",
        lambda work, _: not work.activation_checkpointing,
        lambda work: replace(work, activation_checkpointing=True),
    ),
    Change(
        PLANNED,
        '"schedule": "plan" in the section: small cards get fewer tokens and heads',
        lambda _, source: source != "plan",
        lambda work: work,
    ),
    Change(
        "weights by memory",
        '"zero_partition": "memory" in the section: large cards own more of the model states',
        lambda work, _: work.zero_stage > 0 and work.zero_weights is None,
        lambda work: work,
    ),
    _stage(1),
    _stage(2),
    _stage(3),
    Change(
        "optimizer offload",
        '"zero_optimization": {"offload_optimizer": {"device": "cpu"}} in ds_config.json',
        lambda work, _: work.zero_stage > 0 and not work.offload_optimizer,
        lambda work: replace(work, offload_optimizer=work.zero_stage > 0),
        offloads=True,
    ),
    Change(
        "one sequence per micro-batch",
        '"train_micro_batch_size_per_gpu": 1, with as many more "gradient_accumulation_steps"',
        lambda work, _: work.micro_batch > 1,
        lambda work: replace(work, micro_batch=1, micro_batches=work.micro_batches * work.micro_batch),
    ),
    Change(
        "activation offload",
        "model.activation_checkpointing_enable(offload=True) of transformers, or activation_checkpointing_kwargs="
        '{"offload": True} of the HF Trainer',
        lambda work, _: not work.offload_activations,
        lambda work: replace(work, activation_checkpointing=True, offload_activations=True),
        offloads=True,
    ),
    Change(
        "LoRA",
        f"get_peft_model(model, LoraConfig(r={USUAL_RANK}, target_modules='all-linear')) of peft: fewer weights learn",
        lambda work, _: not work.adapter_rank,
        lambda work: replace(work, adapter_rank=work.adapter_rank or USUAL_RANK),
        trains_less=True,
    ),
    Change(
        "QLoRA",
        "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True), and LoRA",
        lambda work, _: work.quantization is None,
        lambda work: replace(work, adapter_rank=work.adapter_rank or USUAL_RANK, quantization="nf4"),
        trains_less=True,
    ),
)


def apply(fitted: Fitted, source: str | Schedule, changes: tuple[Change, ...]) -> Changed:
    """Plan the training with these changes.

    Args:
        changes: of `CHANGES`, each at most once.

    Raises:
        PlanError: the strategy has no schedule for it, or the changes are not enough by far.
    """
    names = {change.name for change in changes}
    work = fitted.cost.workload
    for change in sorted(changes, key=CHANGES.index):
        work = change.workload(work)
    if PLANNED in names:
        source = "plan"
    after = best_schedule(with_workload(fitted.cost, work), source)
    if "weights by memory" in names and not after.fits:
        weights = weights_by_memory([(after.cost, after.schedule)])
        after = best_schedule(with_workload(fitted.cost, replace(work, zero_weights=weights)), after.schedule)
    return Changed(after)


def read_what_if(text: str, cluster: Cluster) -> Cluster:
    """The cluster after a change.

    Raises:
        ClusterError: no such change, card, rank or rate.
    """
    key, equals, value = text.partition("=")
    makers = {"add": _added, "remove": _removed, "network": _networked}
    if not equals or key.strip() not in makers:
        raise ClusterError(f"--what-if is add=CARDS, remove=RANK or network=GB/s, got {shortened(text)}.")
    return makers[key.strip()](cluster, value.strip())


def _added(cluster: Cluster, value: str) -> Cluster:
    if "|" in value:
        raise ClusterError("--what-if add=... adds cards to the last node. Give another node in --gpus.")
    new = cluster_from_dict(read_notation(value).content).nodes[0]
    last = cluster.nodes[-1]
    slowest = min(last.link, new.link, key=lambda link: link.bytes_per_s)
    link = replace(slowest, name=last.link.name, latency_s=max(last.link.latency_s, new.link.latency_s))
    nic_bytes_per_s = last.nic_bytes_per_s
    if len(cluster.nodes) > 1 and len(last.devices) == 1 and nic_bytes_per_s is None:
        # Of one rank its port is not said; cards that are added share it.
        nic_bytes_per_s = best_rate(cluster, len(cluster.nodes) - 1)
    grown = replace(last, devices=(*last.devices, *new.devices), link=link, nic_bytes_per_s=nic_bytes_per_s)
    return replace(cluster, nodes=(*cluster.nodes[:-1], grown))


def _removed(cluster: Cluster, value: str) -> Cluster:
    if not value.isdecimal() or int(value) >= cluster.num_ranks:
        raise ClusterError(f"--what-if remove=RANK: ranks are 0 to {cluster.num_ranks - 1}, got {shortened(value)}.")
    if cluster.num_ranks == 1:
        raise ClusterError("--what-if remove=0 would leave no card.")
    return cluster.without([int(value)])


def _networked(cluster: Cluster, value: str) -> Cluster:
    if len(cluster.nodes) == 1:
        raise ClusterError("--what-if network=... changes what joins nodes, and the cluster has one.")
    network = replace(cluster.network, bytes_per_s=network_gb_per_s("--what-if network", value) * GB)
    nodes = list(cluster.nodes)
    for i, node in enumerate(nodes):
        if node.nic_bytes_per_s is not None:  # so many ports as before, each as fast as the network
            ports = node.nic_bytes_per_s / best_rate(cluster, i)
            nodes[i] = replace(node, nic_bytes_per_s=ports * network.bytes_per_s)
    return replace(cluster, nodes=tuple(nodes), network=network, links=())
