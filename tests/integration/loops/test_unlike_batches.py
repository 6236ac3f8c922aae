"""``"batch"``: ranks take different batches of samples; the Trainer, accelerate and own loops train as one process.

Budget: 60 s.
"""

from __future__ import annotations

import contextlib
import io
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.integration.tiny import (
    CLIP,
    adam,
    assert_same_parameters,
    collate,
    ds_config,
    llama,
    parameters,
    samples,
)
from tests.integration.trainer.test_trainer import assert_same_logs, logged, make_trainer, one_process, ranks
from tests.support import run_deepspeed, run_to_the_end

BATCH = [3, 1]


def _config(stage: int, **section: Any) -> dict[str, Any]:
    config = ds_config(stage, "ulysses")
    config["heterogeneity"] = {"batch": BATCH, **section}
    for name in ("train_micro_batch_size_per_gpu", "train_batch_size", "sequence_parallel_size"):
        config.pop(name, None)
    return config


# --- the Trainer --------------------------------------------------------------------------------------


def _trained(rank: int, stage: int | None, options: dict[str, Any]) -> Any:
    """Logs, parameters, and what an evaluation says."""
    import ds_hetero

    batch = 4 if stage is None else 2
    if stage is not None:
        ds_hetero.register()
    ds = None if stage is None else {**_config(stage), "train_micro_batch_size_per_gpu": "auto"}
    if options.pop("by_speed", False) and ds is not None:
        ds["heterogeneity"] = {"batch": "by_speed", "replan": {"enabled": True, "interval_steps": 3}}
        options["model"] = llama()
        options["model"].register_forward_pre_hook(lambda *_: time.sleep(0.2 * rank))
    trainer = make_trainer(ds, 0, per_device_train_batch_size=batch, per_device_eval_batch_size=batch, **options)
    trainer.train()
    metrics = trainer.evaluate()
    if ds is not None and ds["heterogeneity"]["batch"] == "by_speed":
        assert ds_hetero.register().plan.batch_split.micro_batch_sizes == (3, 1)
    return logged(trainer), parameters(trainer.model, stage or 0), metrics["eval_loss"]


@pytest.mark.parametrize(
    ("stage", "accumulated"),
    [(0, 1), (3, 2), pytest.param(1, 2, marks=pytest.mark.slow), pytest.param(2, 1, marks=pytest.mark.slow)],
)
def test_trainer_equals_one_process(stage: int, accumulated: int) -> None:
    options = {"gradient_accumulation_steps": accumulated}
    expected_logs, expected, expected_loss = one_process(_trained, None, {**options, "num_samples": 15})
    for logs, trained, loss in ranks(_trained, 2, stage, {**options, "num_samples": 15}):
        assert_same_logs(logs, expected_logs, norm=stage > 0)
        assert_same_parameters(trained, expected)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)


def test_means_that_the_trainer_adds_up_over_a_step_are_added_up_here() -> None:
    """Of a classifier, whose loss ignores how many labels the step has that the Trainer tells it."""
    expected_logs, expected, _ = one_process(_classified, None)
    for logs, trained, _ in ranks(_classified, 2, 2):
        assert_same_logs(logs, expected_logs)
        assert_same_parameters(trained, expected)


def _classified(rank: int, stage: int | None) -> Any:
    from transformers import LlamaForSequenceClassification

    config = llama().config
    config.num_labels, config.pad_token_id = 3, 2
    torch.manual_seed(0)
    rows = [{**row, "labels": torch.tensor(number % 3)} for number, row in enumerate(samples(16))]
    options = {"model": LlamaForSequenceClassification(config), "dataset": rows, "gradient_accumulation_steps": 2}
    return _trained(rank, stage, {**options, "more": {"eval_dataset": rows[:4]}})


@pytest.mark.parametrize("where", ["model", "trainer"])
def test_class_weights_are_those_of_one_process(where: str) -> None:
    """In the loss that the model returns, and in the ``compute_loss`` that transformers' documentation shows.

    All samples of the first step are of one class, so that nothing shows there.
    """
    expected_logs, expected, _ = one_process(_weighing_classes, None, where)
    for logs, trained, _ in ranks(_weighing_classes, 2, 2, where):
        assert_same_logs(logs, expected_logs)
        assert_same_parameters(trained, expected)


def _weighing_classes(rank: int, stage: int | None, where: str) -> Any:
    from transformers import LlamaForSequenceClassification, Trainer

    def weighted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.float(), labels, weight=torch.tensor([1.0, 2.0, 8.0]))

    class Model(LlamaForSequenceClassification):
        def forward(self, input_ids: Any = None, labels: Any = None, **more: Any) -> Any:
            outputs = super().forward(input_ids=input_ids, **more)
            if labels is not None:
                outputs.loss = weighted(outputs.logits, labels)
            return outputs

    class Weighing(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            outputs = model(**{name: part for name, part in inputs.items() if name != "labels"})
            loss = weighted(outputs.logits, inputs["labels"])
            return (loss, outputs) if return_outputs else loss

    config = llama().config
    config.num_labels, config.pad_token_id = 3, 2
    torch.manual_seed(0)
    model = (Model if where == "model" else LlamaForSequenceClassification)(config)
    rows = [
        {"input_ids": row["input_ids"], "labels": torch.tensor(0 if number < 4 else number % 3)}
        for number, row in enumerate(samples(16))
    ]
    options = {"model": model, "dataset": rows, "train_sampling_strategy": "sequential"}
    kind = {"kind": Weighing} if where == "trainer" else {}
    return _trained(rank, stage, {**options, **kind, "more": {"eval_dataset": rows[:4]}})


def test_what_counts_otherwise_beside_other_samples_is_refused_on_every_rank() -> None:
    first, second = run_deepspeed(_counting_otherwise, 2)
    assert first == second
    assert "ModelError: the ranks take different batches, and GptOssForCausalLM lets the documents" in first[0]
    assert (
        "ConfigError: the ranks take different batches, and MixtralForCausalLM adds a loss of its routers" in first[1]
    )
    assert first[2] == "trained"


def _counting_otherwise(rank: int) -> list[str]:
    """Packed documents that gpt-oss's eager masks let see each other; a loss of routers; documents kept apart."""
    import deepspeed
    import transformers

    import ds_hetero

    sizes = {**llama().config.to_dict(), "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    sizes |= {
        "attn_implementation": "eager",
        "sliding_window": 8,
        "initializer_range": 0.2,
        "use_cache": False,
        "output_router_logits": False,
    }
    for name in ("model_type", "rope_parameters", "layer_types", "architectures"):
        sizes.pop(name, None)
    ends = []
    for kind, more in (("GptOss", {}), ("Mixtral", {"output_router_logits": True}), ("Mixtral", {})):
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**{**sizes, **more})
        model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="eager")
        handle = ds_hetero.register()
        try:
            engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=_config(2))
            for rows in handle.for_engine(engine).dataloader(DataLoader(samples(8), 4, collate_fn=_packed)):
                rows.pop("number")  # one for each sample
                engine.backward(engine(**rows).loss)
                engine.step()
            ends.append("trained")
        except ds_hetero.HeteroError as error:
            ends.append(f"{type(error).__name__}: {error}")
    return ends


def _packed(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A row of all documents; none of rank 1, which has one."""
    whole = {name: torch.cat([row[name] for row in rows])[None] for name in rows[0]}
    positions = torch.cat([torch.arange(len(row["input_ids"])) for row in rows])[None]
    whole["labels"] = whole["labels"].masked_fill(positions == 0, -100)
    return {**whole, "position_ids": positions, "number": torch.arange(len(rows))}


@pytest.mark.slow
def test_trainer_by_speed_equals_one_process() -> None:
    expected_logs, expected, _ = one_process(_trained, None, {"num_samples": 15})
    for logs, trained, _ in ranks(_trained, 2, 3, {"num_samples": 15, "by_speed": True}):
        assert_same_logs(logs, expected_logs)
        assert_same_parameters(trained, expected)


def test_trainer_resumes_amid_an_epoch(tmp_path: Any) -> None:
    whole = one_process(_trained, None, {"num_samples": 15})[0]
    first, second = ranks(_resumed, 2, str(tmp_path))
    assert first[0] == second[0]
    assert_same_logs(first[0][:-1], whole[-len(first[0]) - 1 : -2])


def _resumed(rank: int, folder: str) -> Any:
    """Logs of the steps after a checkpoint in the second epoch."""
    import ds_hetero

    ds_hetero.register()
    options = {"num_samples": 15, "per_device_train_batch_size": 2, "output_dir": folder, "save_steps": 5}
    make_trainer(_config(2), 0, **options, save_strategy="steps").train()
    trainer = make_trainer(_config(2), 0, **options)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-5")
    return (logged(trainer)[5:],)


# --- own loops and accelerate -------------------------------------------------------------------------


def _steps(count: int = 11) -> list[dict[str, torch.Tensor]]:
    rows = samples(count)
    return [collate(rows[i : i + sum(BATCH)]) for i in range(0, count, sum(BATCH))]


def _of_one_process() -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    model, losses, norms = llama(), [], []
    optimizer = adam(model)
    for batch in _steps():
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, parameters(model)


@pytest.mark.parametrize("loop", ["deepspeed", "accelerate", pytest.param("handle", marks=pytest.mark.slow)])
def test_loop_equals_one_process(loop: str) -> None:
    losses, norms, expected = _of_one_process()
    of_ranks = run_deepspeed(_loop, 2, loop, env={"ACCELERATE_USE_CPU": "false"})
    for step, loss in enumerate(losses):
        weighed = [ranks[0][step] for ranks in of_ranks]
        total = sum(tokens for _, tokens in weighed)
        np.testing.assert_allclose(sum(value * tokens for value, tokens in weighed) / total, loss, rtol=1e-5)
    for _, ours, trained, evaluated in of_ranks:
        np.testing.assert_allclose(ours, norms, rtol=1e-5)
        assert_same_parameters(trained, expected)
        assert evaluated == (4 if loop == "accelerate" else 11)


def _loop(rank: int, loop: str) -> Any:
    """By step the rank's loss and labels; norms; parameters; samples of an evaluation."""
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model = llama()
    loader: Any = DataLoader(samples(11), batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    if loop == "accelerate":
        from accelerate import Accelerator
        from accelerate.utils import DeepSpeedPlugin

        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=_config(1)))
        engine, _, loader, small = accelerator.prepare(
            model, adam(model), loader, DataLoader(samples(8), batch_size=2, collate_fn=collate)
        )
        backward, step = accelerator.backward, None
    else:
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=_config(3))
        loader = small = handle.dataloader(loader)
        backward, step = engine.backward, engine.step
    losses, norms = [], []
    for batch in loader:
        outputs = engine(**batch)
        backward(handle.loss(outputs, batch) if loop == "handle" else outputs.loss)
        if step is not None:
            step()
        losses.append((float(outputs.loss.detach()), int((batch["labels"][:, 1:] != -100).sum())))
        norms.append(float(engine.get_global_grad_norm()))
    trained = parameters(model, 1 if loop == "accelerate" else 3)
    model.eval()
    return losses, norms, trained, sum(len(batch["labels"]) for batch in small)


def test_labels_of_a_step_are_counted_where_a_rank_has_none_of_its_samples() -> None:
    """The last step has one sample: a rank is given a copy of a batch, in which nothing counts."""
    model, norms = llama(), []
    optimizer = adam(model)
    for batch in _steps(9):
        optimizer.zero_grad()
        outputs = model(**batch)
        counted = batch["labels"][:, 1:].ne(-100)
        (outputs.loss + 0.1 * _squares(outputs)[:, :-1][counted].mean()).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    for ours, trained, text in run_deepspeed(_count_labels, 2):
        np.testing.assert_allclose(ours, norms, rtol=1e-5)
        assert_same_parameters(trained, parameters(model))
        assert "plus a term (MeanBackward0) of this rank's own samples" in text


def _squares(outputs: Any) -> torch.Tensor:
    """[B, L]"""
    squares: torch.Tensor = outputs.logits.float().logsumexp(-1).square()
    return squares


def _count_labels(rank: int) -> Any:
    """Norms, parameters, and why a term of the rank's own is refused."""
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model, norms = llama(), []
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=_config(2))
    for batch in handle.dataloader(DataLoader(samples(9), batch_size=2, collate_fn=collate)):  # type: ignore[arg-type]
        outputs, items = engine(**batch), handle.count_items([batch])
        term = handle.mean(_squares(outputs), batch, num_items=items)
        engine.backward(handle.loss(outputs, batch, items) + 0.1 * term, scale_wrt_gas=False)
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    trained = parameters(model, 2)
    batch = next(iter(handle.dataloader(DataLoader(samples(9), batch_size=2, collate_fn=collate))))  # type: ignore[arg-type]
    outputs, items = engine(**batch), handle.count_items([batch])
    with pytest.raises(ds_hetero.ConfigError) as caught:
        engine.backward(handle.loss(outputs, batch, items) + 0.1 * _squares(outputs).mean())
    return norms, trained, str(caught.value)


# --- by speed -----------------------------------------------------------------------------------------


class Slow(nn.Module):
    """Rows to numbers; a rank takes ``s_per_sample`` for each in the backward, and as long as the others before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 1)
        self.s_per_sample, self.most_rows = 0.0, 100

    def forward(self, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        hidden = self.first(rows)
        if self.training:
            time.sleep(0.001 * len(rows))
            if hidden.requires_grad:
                hidden.register_hook(lambda grad: self._compute_backward(len(rows)))
        return (self.last(torch.tanh(hidden))[:, 0] - values).square().mean()

    def _compute_backward(self, rows: int) -> None:
        if rows > self.most_rows:
            raise torch.OutOfMemoryError("an emulated device is full")
        time.sleep(self.s_per_sample * rows)


def _rows(count: int) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(6, generator=generator), torch.randn((), generator=generator), i) for i in range(count)]


@pytest.mark.alone
def test_batches_follow_the_speeds_and_stay_exact() -> None:
    steps = 34
    model, expected = Slow(), []
    optimizer = adam(model)
    for rows, values, _ in DataLoader(_rows(8 * steps), 8):
        optimizer.zero_grad()
        loss = model(rows, values)
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    of_ranks = run_deepspeed(_by_speed, 2, steps)
    for step, loss in enumerate(expected):
        parts = [ranks[0][step] for ranks in of_ranks]
        assert sorted(number for numbers, _ in parts for number in numbers) == list(range(8 * step, 8 * step + 8))
        np.testing.assert_allclose(sum(len(n) * value for n, value in parts) / 8, loss, rtol=1e-5)
    for _, batches, trained in of_ranks:
        assert_same_parameters(trained, parameters(model))
        assert batches[0] == (4, 4) and (6, 2) in batches  # 3:1, and then the other rank is the slow one
        assert batches[-1] in ((2, 6), (3, 5))


@pytest.mark.alone
@pytest.mark.parametrize("stage", [2, pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow)])
def test_an_out_of_memory_while_by_speed_looks_is_survived(stage: int) -> None:
    steps = 14
    model, expected = Slow(), []
    optimizer = adam(model)
    for rows, values, _ in DataLoader(_rows(8 * steps), 8):
        optimizer.zero_grad()
        loss = model(rows, values)
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    of_ranks, said = zip(*run_deepspeed(_out_of_memory, 2, stage, steps), strict=True)
    for step, loss in enumerate(expected):
        parts = [ranks[0][step] for ranks in of_ranks]
        assert sorted(number for numbers, _ in parts for number in numbers) == list(range(8 * step, 8 * step + 8))
        np.testing.assert_allclose(sum(len(n) * value for n, value in parts) / 8, loss, rtol=1e-5)
    for _, batches, trained in of_ranks:
        assert_same_parameters(trained, parameters(model))
        assert batches[0] == (4, 4) and set(batches) == {(4, 4), (5, 3)}
    assert "rank 0 ran out of memory when 6 samples were tried, and goes on with 5 at most" in said[0]


def test_a_batch_that_does_not_fit_is_named_with_the_cure() -> None:
    first, second = run_to_the_end(_too_large, 2)
    assert (
        'OutOfMemoryError: rank 0 has not enough memory for its 6 samples of "batch": [6, 2]. Give it fewer'
        in first.output
    )
    assert "PeerError: rank 0 has ended with " in second.output
    assert "rank 0 has not enough memory for its 6 samples" in second.output
    assert first.code and second.code


def _too_large(rank: int) -> None:
    import deepspeed

    import ds_hetero

    handle, model = ds_hetero.register(), Slow()
    model.most_rows = 5
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=_config(2, batch=[6, 2]))
    for rows, values, _ in handle.dataloader(DataLoader(_rows(16), 8)):
        engine.backward(engine(rows, values))
        engine.step()


def _out_of_memory(rank: int, stage: int, steps: int) -> Any:
    """As `_by_speed`, at 3:1, where the faster rank has room for 5 samples."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        seen = _by_speed(rank, steps, stage=stage, slow_ranks=(1, 1), most_rows=100 if rank else 5)
    return seen, said.getvalue()


def _by_speed(
    rank: int, steps: int, *, stage: int = 2, slow_ranks: tuple[int, int] = (1, 0), most_rows: int = 100
) -> Any:
    """By step the numbers of samples and their loss; the batches of all steps; parameters."""
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model = Slow()
    model.most_rows = most_rows
    config = {**_config(stage), "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0}
    config["heterogeneity"] = {"batch": "by_speed", "replan": {"enabled": True, "interval_steps": 4}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
    seen, batches = [], []
    for step, (rows, values, numbers) in enumerate(handle.dataloader(DataLoader(_rows(8 * steps), 8))):
        slow = rank == slow_ranks[step >= steps // 2]
        model.s_per_sample = 0.03 if slow else 0.01
        batches.append(handle.plan.batch_split.micro_batch_sizes)
        loss = engine(rows, values)
        engine.backward(loss)
        engine.step()
        seen.append((numbers.tolist(), float(loss.detach())))
    return seen, batches, parameters(model, stage)


@pytest.mark.alone
@pytest.mark.slow
def test_checkpoint_goes_on_with_the_batches_that_it_had_come_to(tmp_path: Any) -> None:
    model, expected = Slow(), []
    optimizer = adam(model)
    for rows, values, _ in DataLoader(_rows(8 * 24), 8):
        optimizer.zero_grad()
        loss = model(rows, values)
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    for stage in (2, 3):
        of_ranks = run_deepspeed(_saved_and_loaded, 2, stage, str(tmp_path / str(stage)))
        for step, loss in enumerate(expected):
            parts = [ranks[0][step] for ranks in of_ranks]
            np.testing.assert_allclose(sum(n * value for n, value in parts) / 8, loss, rtol=1e-5)
        for _, come_to, begun, trained in of_ranks:
            assert come_to == begun != (4, 4)
            assert_same_parameters(trained, parameters(model))


def _saved_and_loaded(rank: int, stage: int, folder: str) -> Any:
    """By step samples and loss; batches when it was saved, and of the first step after it was loaded; parameters."""
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    config = {**_config(stage), "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0}
    config["heterogeneity"] = {"batch": "by_speed", "replan": {"enabled": True, "interval_steps": 4}}
    seen, batches, state = [], [], None
    for run in range(2):
        model = Slow()
        model.s_per_sample = 0.03 if rank else 0.01
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
        loader: Any = handle.for_engine(engine).dataloader(DataLoader(_rows(8 * 24), 8))
        if run:
            engine.load_checkpoint(folder)
            loader.load_state_dict(state)
        for step, (rows, values, _) in enumerate(loader):
            loss = engine(rows, values)
            engine.backward(loss)
            engine.step()
            seen.append((len(rows), float(loss.detach())))
            if run and step == 0:
                batches.append(handle.for_engine(engine).plan.batch_split.micro_batch_sizes)
                assert len(rows) == batches[-1][rank]
            if not run and step == 15:
                batches.append(handle.for_engine(engine).plan.batch_split.micro_batch_sizes)
                engine.save_checkpoint(folder)
                state = loader.state_dict()
                break
        trained = parameters(model, stage)
        engine.destroy()
    return seen, *batches, trained


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(_rows(16))


def test_by_speed_refuses_streams_and_batches_of_its_own() -> None:
    for messages in run_deepspeed(_refusals, 2):
        assert ["reads a stream" in messages[0], "batches that it makes itself" in messages[1]] == [True, True], (
            messages
        )
        assert all("Give a DataLoader over a dataset with a length" in message for message in messages)


def _refusals(rank: int) -> list[str]:
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    model = Slow()
    config = {**_config(1), "train_micro_batch_size_per_gpu": 4, "heterogeneity": {"batch": "by_speed"}}
    deepspeed.initialize(model=model, optimizer=adam(model), config=config)
    messages = []
    for loader in (DataLoader(_Stream(), 4), [tuple(rows[:2]) for rows in DataLoader(_rows(8), 4)]):
        with pytest.raises(ds_hetero.BatchError) as caught:
            for _ in handle.dataloader(loader):
                pass
        messages.append(str(caught.value))
    return messages
