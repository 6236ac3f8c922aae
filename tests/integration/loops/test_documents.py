"""With batches placed by their documents, training is that of one process: every ZeRO stage, loop and kind of batch.

Budget: 100 s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_hetero.errors import BatchError
from tests.integration.tiny import (
    BY_DOCUMENTS,
    UNEVEN_2,
    UNEVEN_4,
    VOCAB,
    adam,
    assert_same_parameters,
    ds_config,
    llama,
    mean_over_ranks,
    parameters,
    train_on_one_process,
)
from tests.support import run_deepspeed


def packed(lengths: list[int], seed: int, **more: Any) -> dict[str, Any]:
    """One row of documents whose positions restart; the first label of each does not count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (1, sum(lengths)), generator=generator)
    labels = ids.clone()
    starts = np.cumsum([0, *lengths])
    labels[:, starts[:-1]] = -100
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "labels": labels, "position_ids": positions, **more}


def padded(lengths: list[int], seed: int, left: bool = False) -> dict[str, Any]:
    """Rows of unequal length with a mask, at whose padding no label counts."""
    generator = torch.Generator().manual_seed(seed)
    widest = max(lengths)
    ids = torch.randint(0, VOCAB, (len(lengths), widest), generator=generator)
    mask = torch.stack([torch.arange(widest) < length for length in lengths]).long()
    mask = mask.flip(1) if left else mask
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def _boundaries(lengths: list[int]) -> dict[str, Any]:
    """What collators say of packed documents for flash attention."""
    starts, longest = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32), max(lengths)
    return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}


def whole() -> list[dict[str, Any]]:
    """Batches of every kind, of different lengths."""
    cut = [3, 40, 1, 9, 20]
    return [
        packed([70], 1),
        packed([5, 1, 44, 8, 2, 30], 2),
        packed(cut, 3, **_boundaries(cut)),
        padded([30, 7, 1], 4),
        padded([19, 33], 5, left=True),
        packed([4] * 11, 6),
    ]


@pytest.mark.parametrize(("world_size", "schedule"), [(2, UNEVEN_2), (4, UNEVEN_4)], ids=["2 ranks", "4 ranks"])
def test_a_plain_loop_trains_as_one_process(world_size: int, schedule: Any) -> None:
    run_deepspeed(_train, world_size, schedule)


def _train(rank: int, schedule: Any) -> None:
    expected = llama(use_cache=False)  # with a cache, transformers does not look for packed documents
    expected_losses, expected_norms = train_on_one_process(expected, [[batch] for batch in whole()])
    for stage in range(4):
        trained, losses, norms = _train_stage(schedule, stage)
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
        if stage:
            np.testing.assert_allclose(np.array(norms, dtype=float), expected_norms, rtol=1e-5)
        assert_same_parameters(trained, parameters(expected))


def _train_stage(schedule: Any, stage: int) -> tuple[dict[str, np.ndarray], list[float], list[Any]]:
    """Trained parameters, losses and norms; the batches of the first stage are checked by the engine, too."""
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model = llama()
    if stage % 2:
        model.activation_checkpointing_enable({"use_reentrant": stage == 3})
    remap = "always" if stage in (1, 2) else "never"
    config = ds_config(stage, schedule, placement={**BY_DOCUMENTS, "remap": remap}, steps_per_print=3)
    config["heterogeneity"]["verify"] = "off" if stage else "first_batch"
    if stage == 2:  # every look gives the placing other costs
        config["heterogeneity"]["replan"] = {"enabled": True, "interval_steps": 1, "min_gain": 0}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
    losses, norms, zones, moved = [], [], set(), 0
    for batch in handle.dataloader(whole(), batches="same"):
        placement = batch["position_ids"].ds_hetero_shard.placement
        moved += len(placement.moves)
        zones |= {len(lane.members) for lane in placement.lanes}
        loss = handle.loss(engine(**batch), batch)
        engine.backward(loss)
        engine.step()
        losses.append(mean_over_ranks(loss))
        norms.append(engine.get_global_grad_norm())
    assert {1, 2} <= zones and (moved > 2) == (remap == "always")
    trained = parameters(model, stage)
    engine.destroy()
    handle.undo()
    return trained, losses, norms


# --- what a job gets that does not ask --------------------------------------------------------------------------------

# The schedule gives three quarters of a stream to the slower rank. Layers this small would be nothing beside the
# optimizer's step on a card that computes as fast as it reads.
CLUSTER = {
    "nodes": [
        {"name": name, "device": name, "count": 1, "link": {"bandwidth_gb_per_s": 10, "latency_us": 1}}
        for name in ("slow", "fast")
    ],
    "network": {"bandwidth_gb_per_s": 10, "latency_us": 1},
    "devices": {
        name: {
            "peak_tflops": tflops,
            "memory_gib": 24,
            "memory_bandwidth_gb_per_s": 300,
            "efficiency": {"matmul": 0.6},
        }
        for name, tflops in (("slow", 1e-4), ("fast", 3e-4))
    },
}


def test_documents_are_placed_by_default_where_devices_are_known_and_it_pays() -> None:
    run_deepspeed(_train_by_default, 2)


def _train_by_default(rank: int) -> None:
    """Batches stay as the loader gives them; one whose documents lie as they should is placed, one document is not."""
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model = llama()
    config = ds_config(1, UNEVEN_2)
    config["heterogeneity"] |= {"cluster": CLUSTER, "seq_len": 90}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
    losses, is_stream, shapes = [], [], []
    for batch in handle.dataloader(whole(), batches="same"):
        placement = batch["position_ids"].ds_hetero_shard.placement
        is_stream.append(placement.is_stream)
        shapes.append((len(batch["input_ids"]), placement.length))
        copied = {name: entry.clone() if isinstance(entry, Tensor) else entry for name, entry in batch.items()}
        loss = handle.loss(engine(**copied), batch)  # a copy has lost its mark
        engine.backward(loss)
        engine.step()
        losses.append(mean_over_ranks(loss))
    assert shapes == [(1, 70), (1, 90), (1, 73), (3, 30), (2, 33), (1, 44)]
    assert is_stream == [True, False, False, True, True, False]
    expected = llama(use_cache=False)
    expected_losses, _ = train_on_one_process(expected, [[batch] for batch in whole()])
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert_same_parameters(parameters(model, 1), parameters(expected))
    engine.destroy()
    handle.undo()


# --- what else a job may have ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_replicas_with_weights_and_evaluation_between_steps_train_as_one_process(stage: int) -> None:
    run_deepspeed(_train_replicas, 4, stage)


def _train_replicas(rank: int, stage: int) -> None:
    """Two replicas of two ranks place batches of their own; the model is checked and evaluated before every step."""
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model = llama()
    config = ds_config(stage, UNEVEN_2, placement=BY_DOCUMENTS)
    config["heterogeneity"] |= {"zero_partition": [3, 1, 2, 1], "verify": "always"}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
    replica, batches = handle.replica, whole()
    loader = torch.utils.data.DataLoader(batches[replica.replica_id :: 2], batch_size=None)
    checked, evaluated, losses, norms, lengths = _placements_of_checks(), [], [], [], []
    for batch in handle.dataloader(loader, batches="same"):
        lengths.append(batch["position_ids"].ds_hetero_shard.placement.length)
        evaluated.append(_evaluate(model, handle.dataloader(whole()[:2], batches="same")))
        loss = handle.loss(engine(**batch), batch)
        engine.backward(loss)
        engine.step()
        losses.append(mean_over_ranks(loss))
        norms.append(engine.get_global_grad_norm())
    # Rows of unequal length are one row of their real tokens, but where padding on the left predicts a token.
    assert lengths == [[70, 73, 33], [90, 38, 44]][replica.replica_id]
    assert len(checked) >= len(losses) and any(placement.rows for placement in checked)

    expected = llama(use_cache=False)
    optimizer = adam(expected)
    for step, pair in enumerate(zip(batches[::2], batches[1::2], strict=True)):
        np.testing.assert_allclose(evaluated[step], _evaluate(expected, whole()[:2]), rtol=1e-5)
        expected_loss, expected_norm = train_on_one_process(expected, [list(pair)], optimizer)
        np.testing.assert_allclose([losses[step], float(norms[step])], expected_loss + expected_norm, rtol=1e-5)
    assert_same_parameters(parameters(model, stage), parameters(expected))


def _placements_of_checks() -> list[Any]:
    """The placements of the pieces that the model is checked with from now on."""
    from ds_hetero.frameworks.transformers.self_check import runs

    placements, place = [], runs._place_piece

    def placed(*piece: Any) -> Any:
        placements.append(place(*piece).placement)
        return place(*piece)

    runs._place_piece = placed
    return placements


def _evaluate(model: Any, batches: Any) -> list[float]:
    model.eval()
    with torch.no_grad():
        losses = [float(model(**batch, use_cache=False).loss) for batch in batches]
    model.train()
    return losses


# --- marks that frameworks lose, and ranks that place otherwise -------------------------------------------------------


def test_shards_without_a_mark_are_known_by_their_positions_and_others_are_refused() -> None:
    run_deepspeed(_lose_marks, 2)


def _lose_marks(rank: int) -> None:
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model = llama()
    config = ds_config(1, UNEVEN_2, placement=BY_DOCUMENTS)
    deepspeed.initialize(model=model, optimizer=adam(model), config=config)
    drawn = list(handle.dataloader(whole(), batches="same"))
    expected = [model(**batch).logits.detach() for batch in drawn]
    for batch, logits in reversed(list(zip(drawn, expected, strict=True))):
        copied = {name: entry.clone() if isinstance(entry, Tensor) else entry for name, entry in batch.items()}
        assert torch.equal(model(**copied).logits, logits)
        one_rank = batch if rank else copied
        assert torch.equal(model(**one_rank).logits, logits)
    _expect_masks_to_be_told_apart(handle, model)
    foreign = {**drawn[1], "position_ids": drawn[1]["position_ids"] + 1}
    with pytest.raises(BatchError, match="do not belong to a recent batch that was placed by its documents"):
        model(**foreign)
    (placed,) = handle.dataloader([packed([30, 10], 8, **_boundaries([30, 10]))], batches="same")
    assert [batch["position_ids"].ds_hetero_shard.placement.is_stream for batch in (drawn[2], placed)] == [True, False]
    assert torch.equal(model(**_without_boundaries(drawn[2])).logits, expected[2])
    with pytest.raises(BatchError, match="by the documents in its cu_seq_lens_q"):
        model(**_without_boundaries(placed))
    placement = handle.registry.latest.sequences.placement
    if rank:
        placement.use(_Otherwise(placement.placer))
    with pytest.raises(BatchError, match=r"must be given the same batch, but by rank placement is"):
        next(iter(handle.dataloader(whole(), batches="same")))
    with pytest.raises(BatchError, match="otherwise than the rank that holds it"):
        next(iter(handle.dataloader(whole(), batches="own")))


def _without_boundaries(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in batch.items() if not name.startswith(("cu_seq", "max_length"))}


def _expect_masks_to_be_told_apart(handle: Any, model: Any) -> None:
    """Rows that cannot be joined have the same positions whatever their masks say, and copies have no other mark."""
    drawn = list(handle.dataloader([padded([33, 19], 7, left=True), padded([19, 33], 7, left=True)], batches="same"))
    expected = [model(**batch).logits.detach() for batch in drawn]
    for batch, logits in zip(drawn, expected, strict=True):
        copied = {name: entry.clone() for name, entry in batch.items() if isinstance(entry, Tensor)}
        real = copied["attention_mask"].bool()
        assert torch.equal(model(**copied).logits[real], logits[real])


class _Otherwise:
    """Places as if the units' costs were in reverse order."""

    def __init__(self, placer: Any) -> None:
        from ds_hetero.planner.documents import DocumentPlacer, UnitCosts

        costs = placer.costs
        turned = {name: getattr(costs, name)[::-1] for name in ("token_s", "square_s", "most_tokens")}
        kept = {name: getattr(costs, name) for name in ("node", "receive_s", "cross_s", "exchange_per_receive")}
        self._placer = DocumentPlacer(UnitCosts(**turned, **kept), placer.min_cut_tokens)

    def __call__(self, *args: Any) -> Any:
        return self._placer(*args)
