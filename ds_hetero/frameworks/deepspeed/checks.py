"""Checks of the optimizer steps of an engine of DeepSpeed; `ds_hetero.runtime.step_checks` runs them."""

from __future__ import annotations

from ds_hetero.frameworks.deepspeed.optimizer_groups import SameGroups
from ds_hetero.frameworks.deepspeed.replica_engine import ReplicaEngine
from ds_hetero.frameworks.deepspeed.zero.gathered_modules import compare_gathered_modules
from ds_hetero.frameworks.deepspeed.zero.used_parameters import used_parameters_of
from ds_hetero.frameworks.deepspeed.zero.user_optimizer import SameNumberOfGroups
from ds_hetero.runtime.step_checks import (
    RTOL,
    RTOL_HALF_UPDATES,
    AsLoaded,
    ClassLoss,
    GraphChanges,
    LocalWeights,
    SameSwitches,
    StepCheck,
    TokenFactors,
    TokenWeights,
    same_gradients,
    same_parameters,
    same_untrained,
)


def checks_of_model(hooked: ReplicaEngine) -> list[StepCheck]:
    """Return the checks of an engine without pipelines, the same on every rank.

    Some checks of a model that is split over the sequence are also stored in attributes of the model: its forward
    reports to them there, for example the number of labels in a shard.
    """
    model, engine = hooked.trained.sequences, hooked.engine
    checks: list[StepCheck] = [SameGroups(hooked), SameNumberOfGroups(engine), *_checks_of_same_model(hooked)]
    checks.append(used_parameters_of(engine))
    compare_gathered_modules(engine)
    if model is not None:
        losses, steps = model.losses, engine.gradient_accumulation_steps()
        losses.token_weights = TokenWeights(losses, steps, scales=engine.fp16_enabled())
        losses.token_factors = TokenFactors(losses, steps)
        losses.local_weights = LocalWeights(losses)
        losses.graphs = GraphChanges()
        model.placement.as_loaded = AsLoaded(model)
        checks += [model.placement.as_loaded, losses.token_weights, losses.token_factors, losses.local_weights]
        checks += [model.pace, losses.graphs]
        if name := model.model_loss.class_with_own_forward:
            losses.class_loss = ClassLoss(name)
            checks.append(losses.class_loss)
    return checks


def _checks_of_same_model(hooked: ReplicaEngine) -> list[StepCheck]:
    """Return the checks that all ranks train the same model, with the same switches."""
    engine, stage = hooked.engine, hooked.engine.zero_optimization_stage()
    replicas = [schedule.ranks for schedule in hooked.trained.replica.plan.schedules]
    hooked.switches = SameSwitches(engine.module, is_split=hooked.trained.sequences is not None)
    checks: list[StepCheck] = [hooked.switches, same_untrained(engine.module, frozen=stage < 3, replicas=replicas)]
    if stage < 3:
        is_half = engine.fp16_enabled() or engine.bfloat16_enabled()
        checks.append(same_parameters(engine.module, rtol=RTOL_HALF_UPDATES if is_half and stage == 0 else RTOL))
    if stage == 0:
        checks.append(same_gradients(engine.module))
    return checks
