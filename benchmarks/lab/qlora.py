"""Steps of QLoRA in the planned pipeline of three unequal ranks, and in accelerate's ``device_map="balanced"``.

    planned      the pipelines that the planner finds for the measured ranks and their memories
    balanced b   accelerate's balanced device map, with micro-batches of b sequences; the b that is fastest in the
                 warm-up is measured

Balanced is what a script of transformers alone does with a model that is larger than one GPU: one process, whose layers
are shared equally among the devices, and run one after the other. Here it is one process that changes its emulated
speed at the first layer of a stage, forward and backward; accelerate makes the map and its own hooks dispatch. It gets
more than it would have: nothing is sent between stages, its memory is not limited, and it never recomputes.

Ranks of the pipelines may allocate what their emulated memory has and `_HOST_BYTES`, beyond what they have when the
pipelines are built.
"""

from __future__ import annotations

import importlib
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.emulation.cluster import EmulatedCluster, EmulatedNode
from benchmarks.emulation.emulator import RankLab, limit_memory
from benchmarks.lab.planning import model_of, product_rate, scaled
from benchmarks.measure.contenders import Shape
from benchmarks.measure.turns import take_turns
from benchmarks.measure.workloads import workload
from benchmarks.pipelines.run import at_asked_speeds, of_rank_0, profile_of, speeds_meanwhile
from ds_hetero.cluster import Cluster
from ds_hetero.cost import Workload
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.planner.pipelines.given import judge_plan
from ds_hetero.planner.pipelines.planning import plan_pipelines
from ds_hetero.values.plans import Plan

SPEEDS = MEMORIES = (2, 1, 1)
CLUSTER = EmulatedCluster(nodes=(EmulatedNode(speeds=SPEEDS),))  # memory is limited later, see `measure`
PLANNED, BALANCED, MACHINE = "planned", "balanced", "machine"
SIZES = (1, 2)  # sequences of a micro-batch of the pipeline
BALANCED_SIZES = (1, 2, 4)  # the same of the balanced job, which is measured with its fastest size
ADAPTER_RANK = 8
RTOL_LOSS = 1e-4  # of two runs in fp32 whose sums are in different orders

_WARM_UPS = 2
_SPEED_S = 0.5  # of a look at how fast the machine is
_RESERVED = 0.1  # of a rank's memory, for what torch keeps besides tensors; chosen
_HOST_BYTES = 96 * 2**20  # for gloo and Python's objects, which a rank with a GPU has in its host's memory; chosen


@dataclass(frozen=True)
class QloraPlan:
    """What to measure.

    Args:
        folder: the model's config.json and weights.
        shape: of the model.
        tokens: of a sequence.
        samples: sequences of an optimizer step.
        unit_bytes: memory of a rank whose entry in `MEMORIES` is 1.
        rounds: turns of every contender at most.
        budget_s: seconds after which no further round begins.
    """

    folder: str
    shape: Shape
    tokens: int
    samples: int
    unit_bytes: int
    rounds: int
    budget_s: float

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """Memory of every rank."""
        return tuple(self.unit_bytes * share for share in MEMORIES)


def measure(lab: RankLab, plan: QloraPlan) -> dict[str, Any]:
    """Measure all contenders on this rank; the result of rank 0 is complete."""
    profile = profile_of(lab)
    cluster = _with_memories(at_asked_speeds(lab, profile), plan)
    chosen = of_rank_0(lambda: _planned(cluster, plan))
    lab.report(0.1, "building the balanced model")
    steps: dict[str, Callable[[], float]] = {}
    device_map: Mapping[str, int] = {}
    if lab.rank == 0:
        device_map, steps = _balanced_steps(lab, plan)
    else:
        steps = {f"{BALANCED} {size}": _wait for size in BALANCED_SIZES}
    dist.barrier()
    _import_frameworks()  # their code is no memory of a GPU
    limit_memory(plan.memory_bytes[lab.rank] + _HOST_BYTES)
    lab.report(0.2, "building the pipeline")
    steps[PLANNED] = _pipeline_step(chosen, plan)
    losses, warm_s = {}, {}
    for done, (name, step) in enumerate(steps.items()):
        lab.report(0.2 + 0.1 * done, f"warming up {name}")
        losses[name] = []
        for _ in range(_WARM_UPS):
            begin = time.perf_counter()
            losses[name].append(step())
            warm_s[name] = time.perf_counter() - begin  # the last one stays: the first also fills caches
        dist.barrier()
    _expect_equal_losses(lab, losses)
    slower = of_rank_0(lambda: _slower_balanced(warm_s))
    steps = {name: step for name, step in steps.items() if name not in slower}
    lab.report(0.5, "by turns")
    rates: list[float] = []
    looks = {MACHINE: lambda: rates.append(product_rate(_SPEED_S))}
    turns = take_turns({**looks, **steps}, plan.rounds, plan.budget_s, lab.own_pids)
    del turns.seconds[MACHINE]
    speeds = speeds_meanwhile(lab, median(rates) / profile[1])
    meanwhile = _with_memories(scaled(profile[0], speeds), plan)
    predicted_s = of_rank_0(lambda: _predicted_s(meanwhile, plan, chosen))
    return {
        **lab.to_dict(),
        "text": lab.describe(),
        "losses": losses,
        "plan": chosen.to_dict(),
        "device_map": dict(device_map),
        "warm_s": warm_s,
        "speeds_meanwhile": speeds,
        "predicted_s": predicted_s,
        **asdict(turns),
    }


def summarize(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the median steps, the gain over the balanced contender, and the error of the prediction."""
    median_s = {name: median(seconds) for name, seconds in measured["seconds"].items()}
    planned_s = median_s.pop(PLANNED)
    ((fastest, balanced_s),) = median_s.items()
    pairs = zip(measured["seconds"][fastest], measured["seconds"][PLANNED], strict=True)
    return {
        "planned_s": planned_s,
        "balanced_s": balanced_s,
        "fastest_balanced": fastest,
        "slower_s": {name: measured["warm_s"][name] for name in _slower_balanced(measured["warm_s"])},
        "gain": median([theirs / ours for theirs, ours in pairs]),
        "predicted_s": measured["predicted_s"],
        "prediction_error": measured["predicted_s"] / planned_s - 1,
        "rounds": len(measured["seconds"][PLANNED]),
        "foreign_cores": measured["foreign_cores"],
    }


def _slower_balanced(warm_s: Mapping[str, float]) -> list[str]:
    """Return the balanced contenders but the fastest in the warm-up."""
    balanced = sorted((seconds, name) for name, seconds in warm_s.items() if name.startswith(BALANCED))
    return [name for _, name in balanced[1:]]


def save_model(shape: Shape, tokens: int, folder: str) -> None:
    """Write config.json and weights of the base model, which both contenders quantize."""
    from benchmarks.measure.models import trained_model

    trained_model(shape, tokens, "sdpa").save_pretrained(folder)


# --- the planned pipeline -----------------------------------------------------------------------------


def _planned(cluster: Cluster, plan: QloraPlan) -> Plan:
    """Return the plan of pipelines of the planner, with recomputation or without."""
    work = _workload(plan)
    found = plan_pipelines(cluster, model_of(plan.shape), work, plan.samples, micro_batch_sizes=SIZES)
    return found.plan.with_layers()


def _predicted_s(cluster: Cluster, plan: QloraPlan, chosen: Plan) -> float:
    """Return the seconds of a step of the chosen plan on a cluster."""
    work = replace(_workload(plan), activation_checkpointing=bool(chosen.activation_checkpointing))
    costs = CalibratedStageCosts(cluster, model_of(plan.shape), work)
    return judge_plan(costs, chosen, costs.time_objective()).step_s


def _workload(plan: QloraPlan) -> Workload:
    return replace(workload(plan.tokens), adapter_rank=ADAPTER_RANK, quantization="nf4")


def _with_memories(cluster: Cluster, plan: QloraPlan) -> Cluster:
    """Return the cluster with the emulated memory of every rank, less what is not tensors.

    The devices get no reserve: with one, plans would count NCCL's communicators, and gloo's are no tensors.
    """
    sizes = iter(plan.memory_bytes)
    nodes = []
    for node in cluster.nodes:
        devices = []
        for device in node.devices:
            size = next(sizes)
            devices.append(replace(device, memory_bytes=int(size * (1 - _RESERVED)), reserved_bytes=0))
        nodes.append(replace(node, devices=tuple(devices)))
    return replace(cluster, nodes=tuple(nodes))


def _import_frameworks() -> None:
    for name in ("bitsandbytes", "deepspeed", "peft", "transformers.models.llama.modeling_llama", "ds_hetero.engine"):
        importlib.import_module(name)


def _pipeline_step(chosen: Plan, plan: QloraPlan) -> Callable[[], float]:
    """Return the step of this engine; every rank reads and quantizes its own layers. Caller: every rank."""
    import deepspeed

    import ds_hetero

    deepspeed.init_distributed("gloo", verbose=False)
    ds_hetero.register()
    torch.manual_seed(1)
    model = ds_hetero.empty_model(
        plan.folder, adapters=_adapters(), quantization_config=_four_bits(), dtype=torch.float32
    )
    schedule = {key: value for key, value in chosen.to_dict().items() if key != "predicted"}
    config = {"gradient_clipping": 1.0, "steps_per_print": 10**6, "heterogeneity": {"schedule": schedule}}
    engine = deepspeed.initialize(model=model.train(), optimizer=_optimizer(model), config=config)[0]
    batch = _batch(plan)

    def step() -> float:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return float(loss)

    return step


# --- accelerate's balanced device map -----------------------------------------------------------------


def _balanced_steps(lab: RankLab, plan: QloraPlan) -> tuple[Mapping[str, int], dict[str, Callable[[], float]]]:
    """Return the device map, and a step of the dispatched model for every size of micro-batches."""
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    steps: dict[str, Callable[[], float]] = {}
    device_map: dict[str, int] = {}
    for size in BALANCED_SIZES:
        base = AutoModelForCausalLM.from_pretrained(
            plan.folder, dtype=torch.float32, quantization_config=_four_bits(), device_map={"": "cpu"}
        )
        whole = list(base._no_split_modules)
        limits = get_balanced_memory(base, dict(enumerate(plan.memory_bytes)), no_split_module_classes=whole)
        device_map = infer_auto_device_map(base, max_memory=limits, no_split_module_classes=whole)
        # The emulated devices are one CPU: accelerate's hooks have nothing to move between them.
        dispatch_model(base, dict.fromkeys(device_map, "cpu"), force_hooks=True)
        _change_speed_at_stages(lab, base, device_map)
        torch.manual_seed(1)
        model = get_peft_model(base, _adapters()).train()
        steps[f"{BALANCED} {size}"] = _dispatched_step(lab, model, size, plan)
    return device_map, steps


def _change_speed_at_stages(lab: RankLab, model: nn.Module, stage_of: Mapping[str, int]) -> None:
    """Let this process run at the speed of the stage whose modules compute, forward and backward."""
    cores = lab.cluster.cores
    current: list[int] = [0]

    def run_at(stage: int) -> None:
        if current[0] != stage:
            current[0] = stage
            lab.change_speed(cores[stage])

    for name, stage in stage_of.items():
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda module, inputs, stage=stage: run_at(stage))
        module.register_full_backward_pre_hook(lambda module, gradients, stage=stage: run_at(stage))


def _dispatched_step(lab: RankLab, model: nn.Module, size: int, plan: QloraPlan) -> Callable[[], float]:
    """Return the step of a plain loop: micro-batches one after the other, each through all stages."""
    optimizer, batch = _optimizer(model), _batch(plan)
    micro_batches = [
        {name: entry[first : first + size] for name, entry in batch.items()} for first in range(0, plan.samples, size)
    ]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step() -> float:
        total = 0.0
        with _without_memory_limit():
            for micro_batch in micro_batches:
                loss = model(**micro_batch, use_cache=False).loss / len(micro_batches)
                loss.backward()
                total += float(loss.detach())
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        lab.change_speed(lab.cluster.cores[lab.rank])
        return total

    return step


@contextmanager
def _without_memory_limit() -> Iterator[None]:
    """Lift this process's limit of memory inside: the balanced job has the memory of all devices."""
    limit, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _wait() -> float:
    """Do nothing: the balanced job is one process, and the others are its idle devices."""
    return 0.0


# --- both ---------------------------------------------------------------------------------------------


def _batch(plan: QloraPlan) -> dict[str, Tensor]:
    """Return the global batch of every step."""
    from benchmarks.measure.models import VOCABULARY

    shape = (plan.samples, plan.tokens)
    tokens = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def _four_bits() -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )


def _adapters() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=ADAPTER_RANK, target_modules="all-linear", task_type="CAUSAL_LM")


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-4)


def _expect_equal_losses(lab: RankLab, losses: Mapping[str, list[float]]) -> None:
    """Raise `RuntimeError` if the contenders do not train the same thing. Only rank 0 runs all of them."""
    if lab.rank:
        return
    expected = losses[PLANNED]
    for name, of_steps in losses.items():
        for ours, theirs in zip(expected, of_steps, strict=True):
            if abs(ours - theirs) > RTOL_LOSS * abs(theirs):
                raise RuntimeError(f"losses of {name} are {of_steps}, those of the pipeline {expected}.")
