"""Checkpoints of pipelines: under every plan, with adapters, as a Hugging Face folder, and cut off in mid-save."""

import contextlib
import io
import json
import os
from pathlib import Path

import pytest
import torch

from ds_hetero.gradient_sync.shards import full_parameter
from tests.integration.pipelines.test_pipelines import (
    ALONE,
    HEADS,
    PLANS,
    adamw,
    batches,
    consolidated,
    grouped_stage,
    made_model,
    of_eight_samples,
    pipeline,
    plan_of,
    sequence_stage,
    train,
    trained,
)
from tests.integration.tiny import compute_in
from tests.support import run_deepspeed

FIVE = {
    **PLANS,
    "three pipelines": plan_of(
        pipeline(1, 3, {"ranks": [0, 1], "layers": [0, 4], "inner": "tensor"}),
        pipeline(2, 1, {"ranks": [2], "layers": [0, 1]}, {"ranks": [4], "layers": [1, 4]}),
        pipeline(1, 3, {"ranks": [3], "layers": [0, 4]}),
    ),
}
STEPS = 2


def started(plan, lora=False, tied=True, **changes):
    """An engine on a new model, the model, and its first values by name."""
    import deepspeed

    model = made_model({"tie_word_embeddings": tied, **changes}, lora)
    first = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = adamw(trained(model))
    config = {"gradient_clipping": 0.5, "heterogeneity": {"schedule": of_eight_samples(plan)}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine, model, first


def saved_values(folder):
    from ds_hetero.frameworks.deepspeed.pipeline.checkpoints import open_rank_files, whole_tensor

    parts = [part["optimizer"]["owned"] for part in open_rank_files(Path(folder))]
    return {key: torch.from_numpy(value) for key, value in consolidated(parts, whole_tensor).items()}


def has_the_bits(engine, saved):
    """Whether this rank's values and moments are those that were saved."""
    optimizer = engine.optimizer
    for name, owned in optimizer.sync.owned.items():
        state = {"value": owned, **optimizer.inner.state[owned]}
        for key in ("value", "exp_avg", "exp_avg_sq"):
            whole = saved[name, key]
            boxes = [whole[tuple(slice(a, b) for a, b in box)] for box in optimizer.sync.owned_boxes[name]]
            if not torch.equal(state[key], torch.cat([box.reshape(-1) for box in boxes])):
                return False
    return True


def all_pairs(rank, folder):
    """By pair of plans, whether the second has the bits of the first, and the loss of the step after."""
    import ds_hetero

    compute_in(torch.float64)
    handle = ds_hetero.register()
    plans = {**FIVE, "alone": ALONE}
    steps = batches(of_eight_samples(ALONE), STEPS + 1, False)
    for name, plan in plans.items():
        engine, *_ = started(plan)
        train(handle.for_engine(engine), engine, steps[:STEPS])
        engine.save_checkpoint(folder, tag=name)
        engine.destroy()
    outcomes = {}
    for target, plan in plans.items():
        engine, *_ = started(plan)
        for source in plans:
            engine.load_checkpoint(folder, tag=source)
            exact = has_the_bits(engine, saved_values(Path(folder, source)))
            (loss,) = train(handle.for_engine(engine), engine, steps[STEPS:])
            outcomes[source, target] = exact, engine.global_steps, loss
        engine.destroy()
    return outcomes


@pytest.mark.sweep(keep=0)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_plan_loads_what_every_other_one_saved(tmp_path):
    outcomes = run_deepspeed(all_pairs, 5, str(tmp_path), timeout_s=500)
    losses = [loss for of_rank in outcomes for _, _, loss in of_rank.values()]
    assert len(outcomes[0]) == 64
    assert all(exact and steps == STEPS + 1 for of_rank in outcomes for exact, steps, _ in of_rank.values())
    assert max(losses) - min(losses) < 1e-11


DEGREES = {  # of tensor parallelism
    "2": plan_of(
        pipeline(1, 8, grouped_stage([0, 4], 2, [([0, 2], [3, 1], [2, 2]), ([4, 6], [1, 2], [4, 0])], HEADS)),
        kv_heads=HEADS,
    ),
    "4": plan_of(pipeline(1, 8, grouped_stage([0, 4], 4, [([0, 4], [2, 1], [4, 0])], HEADS)), kv_heads=HEADS),
    "2 beside 4": plan_of(
        pipeline(1, 4, grouped_stage([0, 4], 2, [([0], [1], [4]), ([2], [2], [4])], HEADS)),
        pipeline(1, 4, {"ranks": [4, 5, 6, 7], "layers": [0, 4], "inner": "tensor"}),
        kv_heads=HEADS,
    ),
    "1": plan_of(
        pipeline(
            1,
            8,
            {"ranks": [0], "layers": [0, 1]},
            sequence_stage([1, 2, 3], [1, 4], [3, 1, 2], [2, 1, 1], kv_heads=HEADS),
        ),
        kv_heads=HEADS,
    ),
}


def degrees_change(rank, folder):
    """By pair of plans, each the next one's source: whether the second has the first's bits, and its next loss."""
    import ds_hetero

    compute_in(torch.float64)
    handle = ds_hetero.register()
    steps = batches(of_eight_samples(ALONE), STEPS + 1, True)
    names, outcomes, source = list(DEGREES), {}, None
    for name in [*names, names[0]]:
        engine, *_ = started(DEGREES[name], num_key_value_heads=HEADS)
        if source is None:
            train(handle.for_engine(engine), engine, steps[:STEPS])
        else:
            engine.load_checkpoint(folder, tag=source)
            exact = has_the_bits(engine, saved_values(Path(folder, source)))
        engine.save_checkpoint(folder, tag=name if source is None else f"{name} from {source}")
        if source is not None:
            (loss,) = train(handle.for_engine(engine), engine, steps[STEPS:])
            outcomes[source, name] = exact, engine.global_steps, loss
            source = f"{name} from {source}"
        else:
            source = name
        engine.destroy()
    return outcomes


@pytest.mark.slow
def test_tensor_groups_go_on_under_other_degrees(tmp_path):
    """From degree 2 to 4, to 2 beside 4, to none, and back; the same state all the way, so the same loss next."""
    outcomes = run_deepspeed(degrees_change, 8, str(tmp_path), timeout_s=280)
    losses = [loss for of_rank in outcomes for _, _, loss in of_rank.values()]
    assert len(outcomes[0]) == 4
    assert all(exact and steps == STEPS + 1 for of_rank in outcomes for exact, steps, _ in of_rank.values())
    assert max(losses) - min(losses) < 1e-11


def adapters_move(rank, folder):
    """Losses of the step after under two plans; whether frozen values are those of the model that was saved."""
    import ds_hetero

    compute_in(torch.float64)
    handle = ds_hetero.register()
    steps = batches(of_eight_samples(ALONE), STEPS + 1, False)
    losses, unchanged = [], []
    for number, plan in enumerate((PLANS["sequence stage and single stages"], ALONE, FIVE["three pipelines"])):
        engine, model, first = started(plan, lora=True, tied=False)
        if number == 0:
            train(handle.for_engine(engine), engine, steps[:STEPS])
            engine.save_checkpoint(folder, tag="t")
        else:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.5)
            engine.load_checkpoint(folder)
            frozen = {name: full_parameter(p) for name, p in model.named_parameters() if not p.requires_grad}
            unchanged.append(all(torch.equal(p, first[name]) for name, p in frozen.items()))
        losses += train(handle.for_engine(engine), engine, steps[STEPS:])
        engine.destroy()
    return losses, unchanged


def test_adapters_and_what_they_adapt_load_under_another_plan(tmp_path):
    for losses, unchanged in run_deepspeed(adapters_move, 5, str(tmp_path)):
        assert max(losses) - min(losses) < 1e-12
        assert unchanged == [True, True]
    said = weights(tmp_path, tmp_path / "out", code=2)
    assert "adapters" in said


def saves_twice(rank, folder, dies):
    """Save after one step and after two; ``dies`` in the middle of the second save, on rank 1."""
    import ds_hetero

    handle = ds_hetero.register()
    steps = batches(of_eight_samples(ALONE), STEPS, False)
    engine, *_ = started(FIVE["three pipelines"])
    train(handle.for_engine(engine), engine, steps[:1])
    engine.save_checkpoint(folder)
    train(handle.for_engine(engine), engine, steps[1:])
    if dies and rank == 1:
        save = torch.save

        def die(content, file, *args, **kwargs):
            save({"half": 1}, file)
            os._exit(9)

        torch.save = die
    engine.save_checkpoint(folder)
    return engine.global_steps


def loads_latest(rank, folder):
    import ds_hetero

    ds_hetero.register()
    engine, *_ = started(PLANS["tensor to sequence to single"])
    path, _ = engine.load_checkpoint(folder)
    return Path(path).name, engine.global_steps


def test_a_rank_that_dies_in_mid_save_leaves_the_checkpoint_before(tmp_path):
    with pytest.raises(AssertionError):
        run_deepspeed(saves_twice, 5, str(tmp_path), True)
    assert set(run_deepspeed(loads_latest, 5, str(tmp_path))) == {("global_step1", 1)}


def weights(checkpoint, out, *more, code=0):
    """What ``ds-hetero weights`` prints."""
    from ds_hetero.cli import main

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            ended = main(["weights", "--checkpoint", str(checkpoint), "--out", str(out), *more])
        except SystemExit as exit_:
            ended = exit_.code
    assert ended == code, said.getvalue()
    return said.getvalue()


def saves_and_exports(rank, folder):
    """Save a checkpoint, and the same weights as a folder through the ranks."""
    import ds_hetero

    handle = ds_hetero.register()
    engine, model, _ = started(FIVE["three pipelines"])
    train(handle.for_engine(engine), engine, batches(of_eight_samples(ALONE), 1, False))
    engine.save_checkpoint(f"{folder}/checkpoint")
    handle.registry.find_stage(model).save_pretrained(f"{folder}/exported")


def test_a_checkpoint_becomes_a_folder_without_ranks(tmp_path):
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    run_deepspeed(saves_and_exports, 5, str(tmp_path))
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    said = json.loads(weights(checkpoint, out, "--json").splitlines()[-1])
    assert said["step"] == 1 and said["files"] == ["model-00001-of-00001.safetensors"]
    ours, expected = (AutoModelForCausalLM.from_pretrained(at, dtype="auto") for at in (out, tmp_path / "exported"))
    theirs = dict(expected.named_parameters())
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in ours.named_parameters())
    assert "holds weights already" in weights(checkpoint, out, code=2)
    half = tmp_path / "half"
    assert "tensors" in weights(checkpoint, half, "--dtype", "bfloat16")
    with safe_open(half / "model-00001-of-00001.safetensors", framework="pt") as file:
        assert file.get_tensor("model.norm.weight").dtype is torch.bfloat16
    part = next(Path(checkpoint, "global_step1").glob("mp_rank_03*"))
    part.write_bytes(part.read_bytes()[:-10])
    assert f"{part.name} is damaged" in weights(checkpoint, tmp_path / "no", code=2)
    assert "no file named latest" in weights(tmp_path / "nowhere", tmp_path / "no", code=2)
