"""Checks of the steps of one engine of DeepSpeed's; how they run: `ds_hetero.runtime.step_checks`."""

from __future__ import annotations

from ds_hetero.engine.whole_model import WholeModel
from ds_hetero.frameworks.deepspeed.hooks import SplitEngine
from ds_hetero.frameworks.deepspeed.optimizer_groups import SameGroups
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


def checks_of_model(hooked: SplitEngine) -> list[StepCheck]:
    """Checks of an engine whose model is split over the sequence, or runs whole on every rank; on every rank alike."""
    model, engine = hooked.model, hooked.engine
    checks: list[StepCheck] = [SameGroups(hooked), SameNumberOfGroups(engine), *_same_model(hooked)]
    checks.append(used_parameters_of(engine))
    compare_gathered_modules(engine)
    if not isinstance(model, WholeModel):
        model.token_weights = TokenWeights(model, engine.gradient_accumulation_steps(), scales=engine.fp16_enabled())
        model.token_factors = TokenFactors(model, engine.gradient_accumulation_steps())
        model.local_weights = LocalWeights(model)
        model.as_loaded, model.graphs = AsLoaded(model), GraphChanges()
        checks += [model.as_loaded, model.token_weights, model.token_factors, model.local_weights]
        checks += [model.pace, model.graphs]
        if name := model.class_with_own_forward:
            model.class_loss = ClassLoss(name)
            checks.append(model.class_loss)
    return checks


def _same_model(hooked: SplitEngine) -> list[StepCheck]:
    """Checks that ranks train one model."""
    engine, stage = hooked.engine, hooked.engine.zero_optimization_stage()
    replicas = [schedule.ranks for schedule in hooked.model.replica.plan.schedules]
    hooked.switches = SameSwitches(engine.module, is_split=not isinstance(hooked.model, WholeModel))
    checks: list[StepCheck] = [hooked.switches, same_untrained(engine.module, frozen=stage < 3, replicas=replicas)]
    if stage < 3:
        is_half = engine.fp16_enabled() or engine.bfloat16_enabled()
        checks.append(same_parameters(engine.module, rtol=RTOL_HALF_UPDATES if is_half and stage == 0 else RTOL))
    if stage == 0:
        checks.append(same_gradients(engine.module))
    return checks
