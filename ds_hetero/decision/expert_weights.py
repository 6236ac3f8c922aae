"""Shares of a layer's experts by rank, as ``"experts"`` of the section asks, and the settings that cannot go with it.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_hetero.cluster import Cluster
from ds_hetero.common.text import ranks_text, time_text
from ds_hetero.cost.terms.expert_shares import EQUAL, expert_weights
from ds_hetero.cost.terms.expert_traffic import token_bytes, weight_bytes_of_experts
from ds_hetero.decision.facts import FP32_BYTES, JobFacts, TrainingFacts
from ds_hetero.decision.forecast import Forecast
from ds_hetero.errors import ConfigError
from ds_hetero.planner.expert_choice import gathered_instead
from ds_hetero.values.plans import Plan
from ds_hetero.values.section import SECTION, HeterogeneitySection
from ds_hetero.values.splits import share

_KEY = f'"{SECTION}.experts"'


def check_expert_weights(section: HeterogeneitySection, num_ranks: int) -> None:
    """Check the length of a list of weights. Raises `ConfigError`: it is not one per rank."""
    wish = section.experts
    if isinstance(wish, list) and len(wish) != num_ranks:
        raise ConfigError(
            f"{_KEY} has {len(wish)} weights, {wish}, but the job has {num_ranks} ranks. Give one per rank."
        )


def expert_weights_of(facts: JobFacts, plan: Plan, cluster: Cluster | None) -> tuple[float, ...]:
    """Return the weight of each rank of the job, by which each replica divides the experts of every layer.

    What the weights are, see `expert_weights`.

    Args:
        cluster: of the job; None if it is unknown.

    Raises:
        ConfigError: several replicas on ZeRO-3, all ranks of a replica have weight 0, or the devices are unknown.
    """
    wish = facts.section.experts
    assert wish is not None
    num_ranks = len(plan.ranks)
    if len(plan.pipelines) > 1 and facts.training.zero_stage == 3:
        raise ConfigError(
            f"{_KEY}: several replicas divide experts under ZeRO 0 to 2 alone, since stage 3 was not compared with one "
            "process. Set a lower stage, or leave the key out."
        )
    if isinstance(wish, list):
        _expect_experts_in_replicas(wish, plan)
        return tuple(wish)
    if wish == EQUAL:
        return (1.0,) * num_ranks
    if cluster is None or cluster.num_ranks != num_ranks:
        raise ConfigError(
            f'{_KEY}: "{wish}" needs the devices of all {num_ranks} ranks. Set "{SECTION}.cluster" to "measure" or to '
            "the file of this job's cluster, or give a list of weights."
        )
    return expert_weights(wish, cluster)


def _expect_experts_in_replicas(weights: Sequence[float], plan: Plan) -> None:
    """Check that each replica has a rank for its experts. Raises `ConfigError`: a replica has none."""
    for number, schedule in enumerate(plan.schedules):
        if not any(weights[rank] for rank in schedule.ranks):
            raise ConfigError(
                f"{_KEY} is {list(weights)}, so replica {number}, {ranks_text(schedule.ranks)}, has no experts, "
                "but each replica needs all of them. Give one of its ranks a weight above 0."
            )


def experts_text(weights: Sequence[float], facts: JobFacts, plan: Plan, forecasts: Sequence[Forecast] = ()) -> str:
    """Describe how the experts of a layer are divided, and which is cheaper: tokens that travel, or weights (ZeRO-3).

    The bytes of both, and if a step is predicted, the seconds of both. Only the numbers of experts if there are several
    replicas, or the length of a sequence is unknown; only weights if the model's shape is.
    """
    spec = facts.model.spec
    if spec is None or not spec.num_experts:
        return f"experts by rank in proportion to {' : '.join(f'{weight:.4g}' for weight in weights)}"
    experts, *of_others = (
        share(spec.num_experts, [weights[rank] for rank in schedule.ranks]) for schedule in plan.schedules
    )
    text = f"experts of a layer by rank: {' | '.join(map(str, experts))}"
    if of_others:
        by_replica = "; ".join(" | ".join(map(str, sizes)) for sizes in (experts, *of_others))
        not_predicted = "; predictions count all experts on every rank" if forecasts else ""
        return (
            f"experts of a layer by rank of each replica: {by_replica}; replicas add up their gradients{not_predicted}"
        )
    length = facts.section.seq_len or facts.model.max_seq_len
    if length is None:
        return text
    element_bytes = facts.model.element_bytes
    samples = facts.training.micro_batch_size or 1
    tokens = [samples * count for _, count in sorted(plan.schedules[0].tokens(length).items())]
    sent = max(token_bytes(spec, tokens, experts, element_bytes))
    of_weights = weight_bytes_of_experts(spec, len(experts), element_bytes)
    seconds = "".join(_seconds_text(forecast) for forecast in forecasts[:1])
    return (
        f"{text}; with {sum(tokens):,} tokens in a micro-batch, a rank sends up to {sent / 1e6:,.0f} MB of tokens per "
        f"layer, and would send {of_weights / 1e6:,.0f} MB of experts under ZeRO-3{seconds}"
    )


def _seconds_text(forecast: Forecast) -> str:
    """Say how long a step takes with tokens that travel, and with weights that travel; empty if neither is predicted.

    The tokens of the ranks are the same in both, so that the two differ in the experts alone.
    """
    if forecast.cost.workload.experts is None:
        return ""
    gathered = gathered_instead(forecast.cost).predict(forecast.schedule.shifted(0))
    return (
        f". A step is predicted to take {time_text(forecast.prediction.iteration_s)}, and "
        f"{time_text(gathered.iteration_s)} if weights travelled"
    )


def check_experts(
    section: HeterogeneitySection, training: TrainingFacts, *, is_split: bool, is_elastic: bool, element_bytes: int
) -> None:
    """Check that the settings of a job can go with divided experts. Raises `ConfigError`: names the first that cannot.

    Args:
        is_split: whether sequences are split over ranks.
        element_bytes: of the model's parameters.
    """
    is_bf16 = training.mixed_precision == "bfloat16"
    is_half = training.mixed_precision is not None or training.autocast is not None or element_bytes < FP32_BYTES
    problems = {
        'elastic jobs do not move experts between ranks yet. Leave "elastic" out, and start it without --elastic': (
            is_elastic
        ),
        "sequences are not split over the ranks. Set the sequence-parallel size to the number of ranks": not is_split,
        '"zero_within" is not tried with it. Leave that out': section.zero_within is not None,
        'training in 16 bits is compared with one process for "bf16" of ds_config.json alone. Use it, or train in '
        "fp32": is_half and not (is_bf16 and training.autocast is None),
        # DeepSpeed's optimizer of stage 0 computes the norm itself, of its own parameters alone.
        '"bf16" without ZeRO clips by a norm that lacks the experts. Set stage 1, 2 or 3': is_bf16
        and training.zero_stage == 0,
        'its optimizer state is not offloaded. Leave "offload_optimizer" out': training.offloads_optimizer,
        'its weights are not offloaded. Leave "offload_param" out': training.offloads_parameters,
        're-planning is not tried with it. Leave "replan" out': section.replan.enabled,
    }
    for problem, applies in problems.items():
        if applies:
            raise ConfigError(f"{_KEY} is {section.experts!r}, but {problem}; or leave the key out.")
