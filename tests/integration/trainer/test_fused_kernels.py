"""Kernels put into a model: Liger, Cut Cross Entropy, those of the Hub, flex_attention, FlashAttention 4.

None of them runs on a CPU. What a kernel computes is computed here by the plain formula in its place, inside what its
package puts into the model: the signatures and the arguments are those of liger-kernel 0.8.5 and cut-cross-entropy
25.1.1, and where a package is installed they are compared with its own.

Budget: 40 s.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.integration.tiny import (
    UNEVEN_2,
    adam,
    assert_same_parameters,
    batches,
    ds_config,
    llama,
    parameters,
    train_on_one_process,
)
from tests.integration.trainer.test_trainer import assert_same_logs, logged, make_trainer, one_process, ranks
from tests.support import run_deepspeed


def liger_loss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor | None,
    hidden_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    final_logit_softcapping: float | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **kwargs: Any,
) -> Tensor:
    """``LigerForCausalLMLoss``, by cross entropy of logits."""
    if shift_labels is None:
        assert labels is not None
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    logits = hidden_states.reshape(-1, hidden_size) @ lm_head_weight.T
    reduction = "sum" if num_items_in_batch is not None else "mean"
    loss = nn.functional.cross_entropy(logits, shift_labels.reshape(-1), ignore_index=ignore_index, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def liger_forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    output_attentions: bool | None = None,
    output_hidden_states: bool | None = None,
    return_dict: bool | None = None,
    cache_position: Tensor | None = None,
    logits_to_keep: int = 0,
    skip_logits: bool | None = None,
    **kwargs: Any,
) -> Any:
    """``lce_forward`` of Llama: in training with labels there are no logits, and the loss is of hidden states."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    decoded = self.model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        **kwargs,
    )
    shift_labels = kwargs.pop("shift_labels", None)
    has_labels = labels is not None or shift_labels is not None
    skip_logits = self.training and has_labels if skip_logits is None else skip_logits
    loss = logits = None
    if skip_logits:
        weight, size = self.lm_head.weight, self.config.hidden_size
        loss = liger_loss(decoded[0], weight, labels, size, shift_labels=shift_labels, **kwargs)
    else:
        logits = self.lm_head(decoded[0])
        if has_labels:
            vocabulary = {"vocab_size": self.config.vocab_size, "shift_labels": shift_labels}
            loss = self.loss_function(logits=logits, labels=labels, **vocabulary, **kwargs)
    return CausalLMOutputWithPast(loss=loss, logits=logits)


def _norm_of_a_kernel(self: Any, hidden_states: Tensor) -> Tensor:
    """What kernels of Liger and of the Hub put into the place of a norm's forward."""
    return nn.functional.rms_norm(hidden_states, hidden_states.shape[-1:], self.weight, self.variance_epsilon)


def with_liger(model: Any) -> Any:
    """As ``_apply_liger_kernel_to_instance`` leaves a Llama."""
    model.forward = MethodType(liger_forward, model)
    return with_norms(model)


def with_norms(model: Any) -> Any:
    """As ``use_kernels=True`` leaves it: layers of the same class with another forward."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(_norm_of_a_kernel, module)
    return model


def with_attention(name: str) -> Callable[[Any], Any]:
    """As a model that was loaded with a kernel of the Hub, or FlashAttention 4, by its name."""

    def load(model: Any) -> Any:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask

        AttentionInterface.register(name, sdpa_attention_forward)
        AttentionMaskInterface.register(name, sdpa_mask)
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation_internal = name
        return model

    return load


LOADED: dict[str, Callable[[Any], Any]] = {
    "liger": with_liger,
    "norms of the hub": with_norms,
    "attention of the hub": with_attention("kernels-community/flash-attn3"),
    "flash_attention_4": with_attention("flash_attention_4"),
    "flex_attention": with_attention("flex_attention"),
}


# --- against one process ------------------------------------------------------------------------------


def _trained(rank: int, kernel: str, section: dict[str, Any] | None) -> Any:
    import ds_hetero

    torch.manual_seed(0)
    batch = 4 if section is None or "schedule" in section else 2
    ds = None
    if section is not None:
        ds_hetero.register()
        ds = {**ds_config(2, UNEVEN_2, train_micro_batch_size_per_gpu=batch), "heterogeneity": section}
    sp_size = 2 if section is not None and "schedule" in section else 0
    model = llama() if section is None else LOADED[kernel](llama())
    trainer = make_trainer(ds, sp_size, model=model, per_device_train_batch_size=batch, num_samples=12)
    trainer.train()
    return logged(trainer), parameters(trainer.model, 2 if section is not None else 0)


@pytest.mark.parametrize(
    "kernel", ["liger", *(pytest.param(k, marks=pytest.mark.slow) for k in LOADED if k != "liger")]
)
@pytest.mark.parametrize("sharing", ["tokens", "batches"])
def test_trainer_trains_with_kernels_as_one_process_without(kernel: str, sharing: str) -> None:
    section: dict[str, Any] = {"batch": [3, 1]} if sharing == "batches" else {"schedule": UNEVEN_2}
    expected_logs, expected = one_process(_trained, kernel, None)
    for logs, trained in ranks(_trained, 2, kernel, section):
        assert_same_logs(logs, expected_logs)
        assert_same_parameters(trained, expected)


def test_own_loops_train_with_kernels_as_one_process_without() -> None:
    model, whole = llama(), batches(3)
    losses, _ = train_on_one_process(model, [[batch] for batch in whole])
    for results in run_deepspeed(_own_loop, 2, list(LOADED)):
        for ours, trained in results.values():
            np.testing.assert_allclose(ours, losses, rtol=1e-5)
            assert_same_parameters(trained, parameters(model))


def _own_loop(rank: int, kernels: list[str]) -> dict[str, Any]:
    """By kernel the losses and parameters. Liger's loss of a shard is the mean over the rank's own labels."""
    import deepspeed
    import torch.distributed as dist

    import ds_hetero

    handle, results = ds_hetero.register(), {}
    for kernel in kernels:
        config = ds_config(2, UNEVEN_2)
        if kernel == "liger":
            config["heterogeneity"]["loss"] = "local_mean"
        model = LOADED[kernel](llama())
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
        losses = []
        for batch in handle.for_engine(engine).dataloader(batches(3), batches="same"):
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            labels = batch["shift_labels"].ne(-100).sum() if kernel == "liger" else torch.ones(())
            total = torch.stack([loss.detach() * labels, labels.float()])
            dist.all_reduce(total)
            losses.append(float(total[0] / total[1]))
        results[kernel] = losses, parameters(model, 2)
        engine.destroy()
    return results


# --- what is refused ----------------------------------------------------------------------------------


def apply_lce(
    e: Tensor, c: Tensor, labels: Tensor, opts: Any, bias: Any = None, softcap: Any = None, **loss: Any
) -> Any:
    """Of ``cut_cross_entropy.transformers``, by cross entropy of logits: it moves the labels itself."""
    logits = (e @ c.T)[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def cut_cross_entropy_forward(self: Any, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
    """``cce_forward``."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    hidden = self.model(input_ids=input_ids, **kwargs)[0]
    if labels is None:
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))
    return CausalLMOutputWithPast(loss=apply_lce(hidden, self.lm_head.weight, labels, None, **kwargs))


cut_cross_entropy_forward.__module__ = "cut_cross_entropy.transformers.llama"


def with_cut_cross_entropy(model: Any) -> Any:
    """As ``cce_patch`` leaves it."""
    model.forward = MethodType(cut_cross_entropy_forward, model)
    return model


def test_unknown_losses_of_kernels_are_refused_with_the_cure() -> None:
    first, second = run_deepspeed(_refusals, 2)
    assert first == second
    assert "Cut Cross Entropy shifts the labels" in first[0] and '"tile_tokens"' in first[0]
    assert '"loss": "local_mean"' in first[1]


def _refusals(rank: int) -> list[str]:
    import deepspeed

    import ds_hetero

    handle, messages = ds_hetero.register(), []
    with pytest.raises(ds_hetero.ModelError) as caught:
        deepspeed.initialize(model=with_cut_cross_entropy(llama()), config=ds_config(2, UNEVEN_2))
    messages.append(str(caught.value))
    model = with_liger(llama())
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=ds_config(2, UNEVEN_2))
    with pytest.raises(ds_hetero.ConfigError) as of_loss:
        for batch in handle.dataloader(batches(1), batches="same"):
            engine.backward(engine(**batch).loss)
            engine.step()
    messages.append(str(of_loss.value).partition("Use handle.loss")[2])
    return messages


def apply_lce_of_moved_labels(
    e: Tensor, c: Tensor, labels: Tensor, opts: Any, shift_labels: Tensor | None = None, **loss: Any
) -> Tensor:
    """As releases do that know ``shift_labels``."""
    if shift_labels is None:
        return nn.functional.cross_entropy((e @ c.T)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return nn.functional.cross_entropy((e @ c.T).flatten(0, 1), shift_labels.flatten())


@pytest.mark.parametrize("sharing", ["tokens", "batches"])
def test_cut_cross_entropy_trains_where_its_labels_are_in_place(sharing: str) -> None:
    expected_logs, expected = one_process(_trained, "", None)
    for logs, trained in ranks(_with_cut_cross_entropy, 2, sharing):
        assert_same_logs(logs, expected_logs)
        assert_same_parameters(trained, expected)


def _with_cut_cross_entropy(rank: int, sharing: str) -> Any:
    LOADED["cut cross entropy"] = with_cut_cross_entropy
    section: dict[str, Any] = {"batch": [3, 1]}
    if sharing == "tokens":
        globals()["apply_lce"], section = apply_lce_of_moved_labels, {"schedule": UNEVEN_2}
    return _trained(rank, "cut cross entropy", section)


# --- the packages -------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
def test_liger_has_the_signatures_that_these_tests_stand_in_for() -> None:
    from liger_kernel.transformers.model.llama import lce_forward
    from liger_kernel.transformers.model.loss_utils import LigerForCausalLMLoss

    for theirs, ours in ((lce_forward, liger_forward), (LigerForCausalLMLoss, liger_loss)):
        assert list(inspect.signature(theirs).parameters) == list(inspect.signature(ours).parameters)
