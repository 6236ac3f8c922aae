"""Read the input of most commands from options and files: a scenario, a schedule, or a plan.

A scenario is a cluster, a model, a workload and a cost model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ds_hetero.cli.options import BEST_EXPERTS, EXPERTS, FILE, TOKENS
from ds_hetero.cli.printing import check_out
from ds_hetero.cluster.catalogue import with_kernel
from ds_hetero.cluster.files import load_cluster
from ds_hetero.cluster.host_memory import with_host_memory
from ds_hetero.cluster.notation import read_notation
from ds_hetero.cluster.prices import read_prices, with_prices
from ds_hetero.cluster.remarks import device_remarks
from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.reading import JsonDict, is_file, is_pipe, read_file, shortened
from ds_hetero.common.terminal import fitted_text, terminal_width
from ds_hetero.common.text import listed
from ds_hetero.cost import CalibratedCostModel, make_cost_model
from ds_hetero.cost.model import CostModel
from ds_hetero.cost.workload import OPTIMIZER_BYTES, RING_GRADIENT_BYTES, Workload
from ds_hetero.errors import PlanError, ScheduleError
from ds_hetero.models import load_model
from ds_hetero.models.trained_weights import read_training
from ds_hetero.planner.expert_choice import divided_stages
from ds_hetero.planner.planning import check_workload
from ds_hetero.planner.strategies import strategy
from ds_hetero.reporting.scenario import PlanScenario
from ds_hetero.values.baselines import STRATEGIES
from ds_hetero.values.plans import Plan, read_plan
from ds_hetero.values.plans.plan import SCENARIO
from ds_hetero.values.schedule import Schedule

if TYPE_CHECKING:
    from ds_hetero.cost.stages.stage import StageCosts
    from ds_hetero.planner.pipeline_search.finish import Finished

_CLUSTER_HELP = "Cluster file, YAML or JSON, or the name of a ready one"
CLUSTER_FILE = click.option("--cluster", required=True, help=f"{_CLUSTER_HELP}.")
CLUSTERS_OF_REPLICAS = click.option(
    "--cluster", required=True, multiple=True, help="Cluster of one replica; once per replica, in rank order."
)
_CLUSTER = (
    click.option("--cluster", help=f"{_CLUSTER_HELP}."),
    click.option("--gpus", help='Instead of --cluster: "5090,3090x2", or "8xH100 | 8xA100" for two nodes.'),
    click.option("--network", help="Port of a node of --gpus to the others: 25 for GB/s one way, or 200Gbit/s."),
    click.option("--nics", type=int, help="Such ports of a node, which its cards share; left out, 1."),
    click.option("--host-memory", type=float, help="Memory of each machine itself, GiB, where offloads go."),
    click.option("--price", help="Money for one hour of a card, by card: 5090=0.5,3090=0.2."),
    click.option("--save-cluster", type=FILE, help="Write the cluster of --gpus here, .yaml or .json."),
)
_MODEL = click.option(
    "--model", required=True, help="Hugging Face config.json or its folder, a preset, or its name on the Hub."
)
_SEQ_LEN_HELP = "Tokens of a sequence, over all ranks; 128K is 128 x 1024, 1M is 1024K."
_BATCH = (
    click.option("--micro-batch", type=int, default=1, help="Sequences per micro-batch."),
    click.option("--micro-batches", type=int, default=1, help="Micro-batches per iteration."),
)
_CAUSAL = click.option("--causal/--full", default=True, help="Causal or full attention.")
_MEMORY = (
    click.option("--zero-stage", type=int, default=3, help="ZeRO stage, 0 to 3."),
    click.option("--zero-within", is_flag=True, help="Stage 3 inside every node, which owns all model states."),
    click.option(
        "--checkpointing/--no-checkpointing",
        "activation_checkpointing",
        default=True,
        help="Activation checkpointing of every layer.",
    ),
    click.option(
        "--keep-attention", is_flag=True, help="Recomputation takes attention from the forward: more memory, less time."
    ),
    click.option(
        "--ring-gradients",
        type=click.Choice(tuple(RING_GRADIENT_BYTES)),
        default="fp32",
        help="Of gradients of keys and values on the way round a ring; bf16 rounds them at every hop.",
    ),
    click.option(
        "--experts",
        type=EXPERTS,
        help="Experts live on ranks, and tokens travel: by_speed, by_memory, equal, 3,1; best: if faster; or no.",
    ),
    click.option("--tiled-mlp/--whole-mlp", default=False, help="Compute MLPs in tiles of tokens."),
    click.option("--offload-activations", is_flag=True, help="Checkpoints in the host's memory."),
    click.option("--offload-optimizer", is_flag=True, help="Optimizer state in the host's memory."),
)
_TILED_LOSS = click.option(
    "--tiled-loss/--whole-loss", "tiled_logits", default=False, help="Compute the loss in tiles of tokens."
)
_TRAINING = (
    click.option("--train", default="full", help="full, lora[:rank] or qlora[:rank]: which weights are trained."),
    click.option(
        "--optimizer", type=click.Choice(tuple(OPTIMIZER_BYTES)), default="adamw", help="Its bytes of state count."
    ),
    click.option(
        "--gradient-dtype", type=click.Choice(("bf16", "fp32")), default="bf16", help="Of gradients while they add up."
    ),
    click.option("--liger", "fused_kernels", is_flag=True, help="Liger's kernels: the loss in tiles, lean MLPs."),
    click.option("--compile", "compiled", is_flag=True, help="torch.compile joins kernels of norms and activations."),
    click.option(
        "--selective-checkpointing", is_flag=True, help="Compute norms and activations again, not whole layers."
    ),
)
_ATTENTION = click.option(
    "--attention", help="Kernel whose rates count, such as flash_attn_3; left out, what an installation would choose."
)
_COST_MODEL = click.option(
    "--cost-model",
    default="calibrated",
    help="calibrated, or published: Eqs. 2-12 of HexiSeq to the letter; of pipelines calibrated, hexiscale "
    "(its public code) or hexiscale-paper (its equations as printed).",
)


@dataclass(frozen=True, kw_only=True)
class Scenario(PlanScenario):
    """Training of a model, as the options of a command describe it, on one cluster, or on one cluster per replica."""

    chooses_experts: bool = False  # --experts best: the search may divide experts among ranks
    assumed_machines: tuple[str, ...] = ()  # what was assumed about the machines of --gpus, in a few words each

    @property
    def cluster(self) -> Cluster:
        """The cluster of a scenario that has only one."""
        (cluster,) = self.clusters
        return cluster

    @property
    def cost(self) -> CostModel:
        """Cost model of the only cluster. Raises `PlanError`: more ranks than tokens, or an unknown cost model."""
        check_workload(self.cluster, self.workload)
        return make_cost_model(self.cost_model, self.cluster, self.model, self.workload)

    @property
    def cost_of_documents(self) -> CalibratedCostModel:
        """Cost model for placing documents. Raises `PlanError`: as `cost`, or --cost-model is not calibrated."""
        cost = self.cost
        if not isinstance(cost, CalibratedCostModel):
            raise PlanError(
                f"documents can only be placed under the calibrated cost model, but --cost-model is {cost.name}. "
                "Leave --cost-model out."
            )
        return cost

    def stage_costs(self, cluster: Cluster | None = None) -> StageCosts:
        """Return the cost model of pipelines on a cluster; None: on the only cluster of this scenario.

        Raises:
            PlanError: the cost model is unknown, or does not cover the model or the workload.
        """
        from ds_hetero.cost.stages.hexiscale import make_stage_costs
        from ds_hetero.planner.pipeline_search.stage_schedules import ScheduleFinder

        find = ScheduleFinder()
        return make_stage_costs(self.cost_model, cluster or self.cluster, self.model, self.workload, find)

    def with_workload(self, **changes: Any) -> Scenario:
        """Return the scenario with some fields of the workload changed."""
        return replace(self, workload=replace(self.workload, **changes))


_CLUSTER_PARAMETERS = ("cluster", "gpus", "network", "nics", "host_memory", "price", "save_cluster")


def scenario_options(
    cluster: Callable[..., Any] | None = None, *, batch: bool = True, memory: bool = True, cost_model: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options of a scenario to a command, which gets the scenario, read and checked, as ``scenario``.

    Args:
        cluster: option that names clusters by file; left out, all options that describe a cluster.
        batch: whether to add ``--micro-batch`` and ``--micro-batches``.
        memory: whether to add ``--zero-stage``, ``--checkpointing``, ``--tiled-mlp``, ``--offload-activations``,
            ``--offload-optimizer`` and the options of the trained weights.
        cost_model: whether to add ``--cost-model``; without it, the cost model is the calibrated one.
    """
    options = (
        *(_CLUSTER if cluster is None else (cluster,)),
        _MODEL,
        click.option("--seq-len", type=TOKENS, required=True, help=_SEQ_LEN_HELP),
        *(_BATCH if batch else ()),
        _CAUSAL,
        *((*_MEMORY, *_TRAINING) if memory else ()),
        _ATTENTION,
        _TILED_LOSS,
        *((_COST_MODEL,) if cost_model else ()),
    )

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def with_scenario(**arguments: Any) -> Any:
            scenario = _take_scenario(arguments)
            return function(scenario=scenario, **arguments)

        command: Callable[..., Any] = with_scenario
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _take_scenario(arguments: JsonDict) -> Scenario:
    """Return the scenario that arguments of a command describe, and remove these from ``arguments``."""

    def pop_all(*names: str) -> JsonDict:
        """Remove the arguments of these names that the command has, and return them."""
        return {name: arguments.pop(name) for name in names if name in arguments}

    attention = arguments.pop("attention", None)
    training_fields = _training_fields(**pop_all("train", "optimizer", "gradient_dtype"))
    if arguments.get("selective_checkpointing"):
        arguments["activation_checkpointing"] = False
    clusters, assumed_machines = _read_clusters(**pop_all(*_CLUSTER_PARAMETERS))
    workload_fields = pop_all(*(field.name for field in fields(Workload)))
    chooses_experts = workload_fields.get("experts") == BEST_EXPERTS
    if chooses_experts:
        workload_fields["experts"] = None
    workload = _with_stage_of_experts(Workload(**workload_fields, **training_fields))
    return Scenario(
        clusters=tuple(with_kernel(cluster, attention) for cluster in clusters),
        workload=workload,
        model=load_model(arguments.pop("model")),
        cost_model=arguments.pop("cost_model", "calibrated"),
        chooses_experts=chooses_experts,
        assumed_machines=assumed_machines,
    )


def _with_stage_of_experts(work: Workload) -> Workload:
    """Return the workload in a ZeRO stage in which jobs divide experts, unless the user named one.

    Raises:
        PlanError: experts are to be divided in a stage that the user named, and jobs refuse that.
    """
    if work.experts is None or work.zero_stage in divided_stages(work):
        return work
    stages = divided_stages(work)
    if click.get_current_context().get_parameter_source("zero_stage") is not click.core.ParameterSource.COMMANDLINE:
        return replace(work, zero_stage=stages[0])
    raise PlanError(
        f"--experts divides experts among the ranks, which jobs do under ZeRO {listed(map(str, stages))}, not "
        f"--zero-stage {work.zero_stage}. Leave one of them out."
    )


def _training_fields(train: str = "full", optimizer: str = "adamw", gradient_dtype: str = "bf16") -> JsonDict:
    """Return the fields of `Workload` on trained weights and on bytes of optimizer state and gradients per weight."""
    training = read_training(train)
    return {
        "adapter_rank": training.adapter_rank,
        "quantization": training.quantization,
        "optimizer_bytes": OPTIMIZER_BYTES[optimizer],
        "gradient_bytes": {"bf16": 2, "fp32": 4}[gradient_dtype],
    }


def _read_clusters(
    cluster: str | Sequence[str] | None,
    gpus: str | None = None,
    network: str | None = None,
    nics: int | None = None,
    host_memory: float | None = None,
    price: str | None = None,
    save_cluster: Path | None = None,
) -> tuple[tuple[Cluster, ...], tuple[str, ...]]:
    """Load the clusters that the options name; return them, and sentences on what was assumed about machines.

    Remarks on default values and unsupported devices go to stderr.

    Raises:
        ClusterError: a cluster cannot be read.
        PlanError: the file of ``--save-cluster`` cannot be written.
    """
    if (cluster is None) == (gpus is None):
        raise click.UsageError("give either --cluster or --gpus.")
    if gpus is None:
        if (network, nics, save_cluster) != (None, None, None):
            raise click.UsageError(
                "--network, --nics and --save-cluster belong to --gpus. Leave them out with --cluster, or give --gpus."
            )
        names = (cluster,) if isinstance(cluster, str) else cluster or ()
        clusters = list(map(load_cluster, names))
        _print_notes(device_remarks(list(chain.from_iterable(loaded.devices for loaded in clusters))))
        if host_memory is not None:
            clusters = [with_host_memory(loaded, host_memory) for loaded in clusters]
        if price is not None:
            clusters = [with_prices(loaded, read_prices(price, loaded)) for loaded in clusters]
        return tuple(clusters), ()
    notation = read_notation(gpus, network, nics)
    # Options also go into the content, which --save-cluster writes.
    if host_memory is not None:
        for entry in notation.content["nodes"]:
            entry["host_memory_gib"] = host_memory
    loaded = load_cluster(notation.content)
    if price is not None:
        prices = read_prices(price, loaded)
        loaded = with_prices(loaded, prices)
        notation.content["devices"] = {name: {"price_per_hour": value} for name, value in prices.items()}
    if save_cluster is not None:
        from ds_hetero.cluster.file_values import check_cluster_file, write_cluster

        check_cluster_file("--save-cluster", save_cluster)
        check_out(save_cluster, "--save-cluster")
        write_cluster(notation.content, save_cluster)
    _print_notes((*notation.remarks, *notation.assumed, *device_remarks(loaded.devices)))
    return (loaded,), notation.assumed


def _print_notes(remarks: Sequence[str]) -> None:
    """Print each remark to stderr, as ``note: ...`` on a line."""
    for remark in remarks:
        print(fitted_text(f"note: {remark}.", terminal_width(sys.stderr)), file=sys.stderr)


def read_schedule(source: str, cost: CostModel) -> Schedule:
    """Read a schedule from a file, or make the schedule of a strategy.

    Args:
        source: schedule file, file with the output of ``ds-hetero plan --json``, or name of a strategy. If a file and a
            strategy have the same name, the file is read.

    Raises:
        ScheduleError: ``source`` is neither, or the file does not have one schedule.
        PlanError: the strategy has no schedule for this cluster.
    """
    if not is_file(source) and source in STRATEGIES:
        return strategy(source, cost)
    if not (is_file(source) or is_pipe(source)):
        raise ScheduleError(
            f"cannot read schedule {shortened(source)}: it is neither a readable file nor a strategy. "
            f"Strategies: {', '.join(STRATEGIES)}."
        )
    data = read_file(source, "schedule", ScheduleError)
    if isinstance(data, Mapping) and "schedule" in data:
        data = data["schedule"]
    if isinstance(data, Mapping) and "replicas" in data:
        raise ScheduleError(
            f"{shortened(source)} holds several replicas. Give the schedule of one, and the cluster it runs on."
        )
    if isinstance(data, Mapping):
        data = {key: value for key, value in data.items() if key != SCENARIO}
    return Schedule.from_dict(data)


def read_plan_file(path: Path) -> Plan:
    """Read a plan file, or a file with the output of ``ds-hetero plan --json``.

    Raises:
        PlanError, ScheduleError: the file cannot be read, or has no plan.
    """
    data = read_file(path, "plan", PlanError)
    return read_plan(data["plan"] if isinstance(data, dict) and "plan" in data else data)


def predict_plan_file(scenario: Scenario, path: Path) -> tuple[Plan, StageCosts, Finished]:
    """Read a plan of pipelines and predict its step, with or without recomputation, as the plan says.

    Raises:
        PlanError, ScheduleError: the file cannot be read, or its plan is not one for this scenario.
    """
    from ds_hetero.planner.pipelines.given import judge_given
    from ds_hetero.planner.pipelines.native_types import expect_trainable

    plan = read_plan_file(path)
    expect_trainable(scenario.cluster.devices, scenario.workload, plan)
    return plan, *judge_given(plan, scenario.cost_model, scenario.cluster, scenario.model, scenario.workload)
