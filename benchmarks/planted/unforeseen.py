"""Faults that were not known when the checks were written: mistakes of users, and changes of frameworks.

Steps are counted from 0. A class plants one fault; `Job` explains the methods that it overrides.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.planted.job import IGNORED, LENGTH, STEPS, Job, num_ranks, token_losses, whole_batches
from tests.integration.tiny import UNEVEN_4, VOCAB, llama


class ShiftedTwice(Job):
    name = "labels shifted twice"
    what = "one rank shifts its labels once more"
    says = r"labels.*rank"

    def change(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.is_culprit:
            labels = batch["shift_labels"]
            batch["shift_labels"] = F.pad(labels, (0, 1), value=IGNORED)[:, 1:].contiguous()
        return batch


class PositionsOff(Job):
    name = "positions off by one"
    what = "one rank adds one to position_ids, in place"
    begins = 2
    says = "position_ids"

    def change(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.is_culprit:
            batch["position_ids"] += 1
        return batch


class AnotherRow(Job):
    name = "another row"
    what = "one rank's dataset gives another row of the same shape"
    says = "must be given the same batch"

    def batches(self) -> list[dict[str, Tensor]]:
        batches = whole_batches(STEPS)
        if not self.alone and self.rank == 1:
            batches[3]["input_ids"][1], batches[4]["input_ids"][1] = (
                batches[4]["input_ids"][1].clone(),
                batches[3]["input_ids"][1].clone(),
            )
        return batches


class RandomDataset(Job):
    name = "a dataset that draws"
    what = "__getitem__ replaces a token drawn from Python's random, unseeded"
    begins = 0
    says = "must be given the same batch"

    def batches(self) -> list[dict[str, Tensor]]:
        batches = whole_batches(STEPS)
        draw = random.Random(None if not self.alone else 0)
        for batch in batches:
            batch["input_ids"][0, 5] = (
                3 + draw.randrange(60) if self.alone else 3 + (draw.randrange(30) * 2 + self.rank)
            )
        return batches


class WeightInPlace(Job):
    name = "a weight in place"
    what = "one rank scales a weight in place, ZeRO 1"
    says = r"(parameter|weight)s?\b.*(rank|differ)"

    def change(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.is_beginning:
            with torch.no_grad():
                self.model.lm_head.weight[:8] *= 1.5
        return batch


class WeightInPlaceZero0(WeightInPlace):
    name = "a weight in place, ZeRO 0"
    what = "the same on ZeRO 0, where it stays"
    stage = 0


class RateOfOneRank(Job):
    name = "a rate of one rank"
    what = "one rank's scheduler halves lr"
    says = "settings of the optimizer's groups"

    def before_step(self) -> None:
        if self.is_culprit:
            self.engine.optimizer.param_groups[0]["lr"] = self.lr / 2


class FrozenOnOneRank(Job):
    name = "frozen on one rank"
    is_apart = True  # ranks wait for one another
    what = "one rank freezes an MLP before deepspeed.initialize"
    begins = 0
    says = r"(requires_grad|trains?|frozen|parameters).*(rank|differ)"

    def make_model(self) -> Any:
        model = super().make_model()
        if self.is_culprit:
            model.model.layers[1].mlp.requires_grad_(False)
        return model


class FrozenLater(Job):
    name = "frozen on one rank, later"
    is_apart = True  # ranks wait for one another
    what = "one rank freezes an MLP amid training"
    says = r"requires_grad"

    def change(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.is_culprit:
            self.model.model.layers[1].mlp.requires_grad_(False)
        return batch


class FrozenWhole(FrozenLater):
    name = "frozen where models run whole"
    what = "the same on ranks that take 3 and 1 samples"
    schedule = None
    section = {"batch": [3, 1]}

    def batches(self) -> list[dict[str, Tensor]]:
        return whole_batches(STEPS, batch_size=4)

    def loader(self) -> Iterable[Any]:
        rows = [{name: entry[row] for name, entry in batch.items()} for batch in self.batches() for row in range(4)]
        samples: Any = DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
        return self.handle.dataloader(samples)


class DepthByRank(Job):
    name = "a coin per rank"
    what = "stochastic depth whose coin every rank throws itself: one rank skips an MLP"
    says = r"(skip|layer|mlp|parameter)"

    def make_model(self) -> Any:
        model = super().make_model()
        mlp = model.model.layers[1].mlp
        stock = mlp.forward
        mlp.forward = lambda x: x * 0 if self.is_culprit else stock(x)
        return model


def add_in_training(layer: nn.Module, added: Callable[[Tensor], Tensor]) -> None:
    """Add ``added(input)`` to a layer's output in training mode."""
    stock = layer.forward
    layer.forward = lambda x: stock(x) + added(x) if layer.training else stock(x)


class TokenDropout(Job):
    name = "a mask over tokens"
    what = "dropout of whole tokens mixed in by a mean over the rank's tokens, in training alone"
    begins = 0
    says = r"computes something else in training"

    def make_model(self) -> Any:
        model = super().make_model()
        generator = torch.Generator().manual_seed(3)

        def masked_mean(x: Tensor) -> Tensor:
            keep = torch.rand((1, 1, x.shape[-1]), generator=generator).gt(0.2)
            return 0.3 * (x * keep).mean(dim=1, keepdim=True)

        add_in_training(model.model.layers[0].mlp, masked_mean)
        return model


class PoolInTraining(Job):
    name = "a pool in training alone"
    what = "a mean over tokens is added in training, not in evaluation"
    begins = 0
    says = r"in training mode"

    def make_model(self) -> Any:
        model = super().make_model()
        add_in_training(model.model.layers[0].mlp, lambda x: 0.3 * x.mean(dim=1, keepdim=True))
        return model


class HookOnOneRank(Job):
    name = "a hook on one rank"
    what = "one rank registers a hook that doubles a weight's gradient"
    says = r"hook"

    def change(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.is_beginning:
            self.model.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: 2 * gradient)
        return batch


class ClippedByScript(Job):
    name = "clipped on one rank"
    what = "one rank clips gradients itself before engine.step(), ZeRO 0"
    stage = 0
    says = r"gradient"

    def before_step(self) -> None:
        if self.is_culprit:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)


class ClipOfOneRank(Job):
    name = "a clip of one rank"
    what = "one rank sets the optimizer's clip_grad"
    says = r"(clip|settings)"
    keys = {"gradient_clipping": 100.0}

    def before_step(self) -> None:
        if self.is_culprit:
            self.engine.optimizer.clip_grad = 0.05


class DividedByRanks(Job):
    name = "divided by ranks"
    what = "all ranks divide the loss by the number of ranks"
    begins = 2
    says = r"number of ranks"

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Tensor:
        return outputs.loss / (num_ranks() if self.has_begun else 1)


class Surrogate(Job):
    name = "a surrogate"
    what = "the right value, detached, with a local mean's gradient"
    says = r"weighs labels by rank"

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Tensor:
        right = self.recipe(outputs, batch)
        if not self.has_begun:
            return right
        local = self.local_mean(outputs, batch)
        return local + (right - local).detach()


class LocalBaseline(Job):
    name = "a baseline of a rank"
    what = "a policy's loss: token losses times an advantage that is centred over the rank's own tokens"
    says = r"(unlike each other|not the cross entropy|local|rank)"

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Tensor:
        if not self.has_begun:
            return outputs.loss
        rewards = batch["input_ids"].float() / VOCAB
        advantages = rewards - rewards.mean()
        return self.mean(token_losses(outputs.logits, batch["shift_labels"]) * advantages, batch)


class Follower(nn.Module):
    """Divides hidden states by their running mean size over the tokens of this rank, updated in training."""

    def __init__(self, inner: nn.Module, starts: int) -> None:
        super().__init__()
        self.inner, self._starts, self._calls = inner, starts, 0
        self.register_buffer("size", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self._calls += 1
            if self._calls > self._starts:
                with torch.no_grad():
                    self.size.lerp_(x.abs().mean(), 0.5)
        return self.inner(x / (0.5 + self.size))


class BufferFollows(Job):
    name = "a buffer that follows"
    what = "a running size of hidden states over the rank's own tokens, used in training"
    begins = 2
    says = r"buffer"

    def make_model(self) -> Any:
        model = super().make_model()
        model.model.layers[0].mlp = Follower(model.model.layers[0].mlp, self.begins)
        return model


class PositionsInside(Job):
    name = "positions by arange"
    what = "an nn.Embedding of positions added inside by arange over the tokens it sees"
    begins = 0
    says = r"embed_tokens|differs"

    def make_model(self) -> Any:
        model = super().make_model()
        model.positions = nn.Embedding(64, 32)
        model.model.embed_tokens.register_forward_hook(
            lambda module, args, out: out + model.positions(torch.arange(out.shape[1]))
        )
        return model


class ZeroGatePool(nn.Module):
    """Adds a mean over the tokens, multiplied by a gate that is zero at first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.gate = inner, nn.Parameter(torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.gate * x.mean(dim=1, keepdim=True)


class PoolWithGate(Job):
    name = "a pool by a gate of zero"
    what = "a mean over tokens, by a gate that begins as zero"
    begins = 0
    says = r"gradient|differs"

    def make_model(self) -> Any:
        model = super().make_model()
        model.model.layers[0].mlp = ZeroGatePool(model.model.layers[0].mlp)
        return model


class Teacher(Job):
    name = "a teacher of one rank"
    what = "a head that follows the trained one (EMA), kept as a buffer, is updated on one rank alone"
    begins = 2
    says = r"buffer"

    def make_model(self) -> Any:
        model = super().make_model()
        model.register_buffer("teacher", model.lm_head.weight.detach().clone())
        return model

    def forward(self, batch: dict[str, Any]) -> Any:
        inputs: list[Tensor] = []
        hook = self.model.lm_head.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
        outputs = self.engine(**batch)
        hook.remove()
        self.memory["hidden"] = inputs[-1]
        return outputs

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Tensor:
        target = (self.memory["hidden"].detach() @ self.model.teacher.T).softmax(-1)
        distance = -(target * outputs.logits.log_softmax(-1)).sum(-1)
        return outputs.loss + self.mean(distance, batch)

    def after_step(self) -> None:
        # The update after a step counts from the next.
        if self.alone or self.rank == 0 or self.step + 1 < self.begins:
            with torch.no_grad():
                self.model.teacher.lerp_(self.model.lm_head.weight, 0.5)


class AutocastOnOneRank(Job):
    name = "autocast on one rank"
    is_apart = True  # ranks wait for one another
    what = "one rank runs its forward under bf16 autocast"
    says = r"(autocast|bfloat16|dtype|precision)"

    def forward(self, batch: dict[str, Any]) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_culprit):
            return self.engine(**batch)


class MaskedOnOneRank(Job):
    name = "labels masked on one rank"
    what = "one rank sets half of its labels to -100 in the loop"
    says = r"labels.*rank"

    def change(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.is_culprit:
            batch["shift_labels"] = batch["shift_labels"].clone()
            batch["shift_labels"][:, ::2] = IGNORED
        return batch


class MaskInLoop(Job):
    name = "a mask made in the loop"
    what = "all ranks hide the first two tokens of the part they hold by attention_mask"
    says = r"attention_mask"

    def batches(self) -> list[dict[str, Tensor]]:
        return [{**batch, "attention_mask": torch.ones_like(batch["input_ids"])} for batch in whole_batches(STEPS)]

    def change(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.has_begun:
            batch["attention_mask"] = batch["attention_mask"].clone()
            batch["attention_mask"][:, :2] = 0
        return batch


class AccumulationDiffers(Job):
    name = "accumulation differs"
    what = "gradient_accumulation_steps of one rank's configuration is 2"
    begins = 0
    says = r"gradient_accumulation_steps|configuration"

    def _build(self, checks: bool) -> None:
        self.keys = {"gradient_accumulation_steps": 2 if self.rank == 1 else 1}  # type: ignore[misc]
        super()._build(checks)


class SharedCritic(Job):
    name = "a second model"
    what = "a critic that shares the embeddings is called on the shard, past the engine"
    says = r"(not.*(engine|trained)|shard|split)"

    def make_model(self) -> Any:
        model = super().make_model()
        critic = copy.deepcopy(llama().model)
        critic.embed_tokens = model.model.embed_tokens
        critic.requires_grad_(False)
        critic.embed_tokens.requires_grad_(True)
        self.memory["critic"] = critic
        return model

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Tensor:
        if not self.has_begun:
            return outputs.loss
        hidden = self.memory["critic"](input_ids=batch["input_ids"], position_ids=batch["position_ids"])[0]
        return outputs.loss + 0.1 * self.mean(hidden.square().mean(-1), batch)


class LoraConv(nn.Module):
    """A linear layer with an adapter: down, a convolution over four tokens, up; up is zero at first."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, 4, bias=False)
        self.kernel = nn.Parameter(torch.randn(4, 1, 4))
        self.lora_B = nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        low = self.lora_A(x).transpose(1, 2)
        mixed = F.conv1d(low, self.kernel, padding=3, groups=4)[..., : x.shape[1]].transpose(1, 2)
        return self.base(x) + self.lora_B(mixed)


class ConvInLora(Job):
    name = "a convolution in LoRA"
    what = "an adapter that mixes four tokens, and begins as zero, beside frozen weights"
    begins = 0
    says = r"gradient|differs"
    lr = 1.0

    def make_model(self) -> Any:
        model = super().make_model().requires_grad_(False)
        model.model.layers[0].mlp.up_proj = LoraConv(model.model.layers[0].mlp.up_proj)
        return model


class ItemsOfOneRank(Job):
    name = "num_items_in_batch"
    what = "one rank counts num_items_in_batch over its own labels"
    says = r"weighs labels by rank|num_items_in_batch|labels"

    def forward(self, batch: dict[str, Any]) -> Any:
        count = batch["shift_labels"].ne(IGNORED).sum()
        if not self.alone and not self.is_culprit:
            dist.all_reduce(total := count.clone())
            count = total
        elif self.is_culprit:
            dist.all_reduce(count.clone())
        return self.engine(**batch, num_items_in_batch=int(count))


class _CentredGradient(torch.autograd.Function):
    """Identity whose gradient is centred over the tokens of this rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient - 0.9 * gradient.mean(dim=1, keepdim=True)


class BackwardOfParts(Job):
    name = "a backward of parts"
    what = "an autograd.Function whose backward takes a mean over tokens, from the start"
    begins = 0
    says = r"gradient"
    is_late = False

    def make_model(self) -> Any:
        model = super().make_model()
        mlp = model.model.layers[0].mlp
        stock = mlp.forward
        mlp.forward = lambda x: stock(_CentredGradient.apply(x) if self.is_late <= self.has_begun else x)
        return model


class BackwardOfPartsLater(BackwardOfParts):
    name = "a backward of parts, later"
    what = "the same, switched on amid training"
    begins = 3
    is_late = True


class ModulePastEngine(Job):
    name = "engine.module"
    what = "engine.module is called in the place of the engine"

    def forward(self, batch: dict[str, Any]) -> Any:
        return self.engine.module(**batch) if self.has_begun and not self.alone else self.engine(**batch)


class WrongShift(Job):
    name = "shifted by the script"
    what = "logits[:, :-1] against shift_labels[:, 1:], a sum over labels of the replica"
    says = r"(labels|not the cross entropy)"

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Tensor:
        labels = batch["shift_labels"]
        if self.alone or not self.has_begun:
            return self.recipe(outputs, batch)
        from tests.integration.tiny import mean_over_group

        local = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        return mean_over_group(local, labels[:, 1:], self.handle.replica.sp_group)


class EvalOnOneRank(Job):
    name = "eval on one rank"
    what = "one rank forgets train() after a look at its MLPs: their dropout is off there"
    says = r"(train|eval|mode)"

    def make_model(self) -> Any:
        model = super().make_model()
        for layer in model.model.layers:
            layer.mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.2))
        return model

    def change(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.is_culprit:
            self.model.model.layers[0].mlp.eval()
        return batch


class LocalPenalty(Job):
    name = "a penalty of a rank"
    what = "a z-loss as a mean over the rank's own tokens, added to the engine's loss"
    says = r"(handle\.mean|differs between the ranks)"

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Tensor:
        if not self.has_begun:
            return outputs.loss
        values = outputs.logits.logsumexp(-1).square()
        if self.alone:
            return outputs.loss + 0.1 * self.mean(values, batch)
        return outputs.loss + 0.1 * values[batch["shift_labels"].ne(IGNORED)].mean()


class PositionWeights(Job):
    name = "weights by place"
    what = "token losses weighed by the index in the part that a rank holds"
    says = r"(unlike each other|weighs)"

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Tensor:
        if not self.has_begun:
            return outputs.loss
        weights = torch.arange(outputs.logits.shape[1]) / LENGTH
        return self.mean(token_losses(outputs.logits, batch["shift_labels"]) * weights, batch)


class SkippedStep(Job):
    name = "a step skipped"
    is_apart = True  # ranks that wait for others end without an exception
    what = "one rank skips a batch whose own mean loss is large"
    says = r"(left out|elsewhere|continue)"

    def _backward(self, batch: dict[str, Any]) -> float:
        if self.is_beginning:
            self.forward(batch)
            return 0.0
        return super()._backward(batch)

    def _step(self, number: int) -> bool:
        return False if self.is_beginning else super()._step(number)


class Frequencies(Job):
    name = "frequencies of one rank"
    what = "one rank rescales its rotary inv_freq"
    says = r"buffer|inv_freq"

    def change(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.is_beginning:
            self.model.model.rotary_emb.inv_freq *= 0.5
        return batch


class StaleBatch(Job):
    name = "a batch kept too long"
    what = "one rank gives its forward the batch before once more, of the same shape"
    says = r"different batches"

    def change(self, batch: dict[str, Any]) -> dict[str, Any]:
        before = self.memory.get("batch", batch)
        self.memory["batch"] = batch
        return before if self.is_culprit else batch


class FourRanksLabels(MaskedOnOneRank):
    name = "labels of an earlier batch, four ranks"
    what = "one of four ranks keeps the labels of the batch before"
    world = 4
    schedule = UNEVEN_4

    @property
    def is_culprit(self) -> bool:
        return not self.alone and self.rank == 2 and self.has_begun

    def change(self, batch: dict[str, Any]) -> dict[str, Any]:
        labels = batch["shift_labels"]
        if self.is_culprit:
            batch["shift_labels"] = self.memory["labels"]
        self.memory["labels"] = labels
        return batch


UNFORESEEN: list[type[Job]] = [
    ShiftedTwice,
    PositionsOff,
    AnotherRow,
    RandomDataset,
    WeightInPlace,
    WeightInPlaceZero0,
    RateOfOneRank,
    FrozenOnOneRank,
    FrozenLater,
    FrozenWhole,
    DepthByRank,
    TokenDropout,
    PoolInTraining,
    HookOnOneRank,
    ClippedByScript,
    ClipOfOneRank,
    DividedByRanks,
    Surrogate,
    LocalBaseline,
    BufferFollows,
    PositionsInside,
    PoolWithGate,
    Teacher,
    AutocastOnOneRank,
    MaskedOnOneRank,
    MaskInLoop,
    AccumulationDiffers,
    SharedCritic,
    ConvInLora,
    ItemsOfOneRank,
    BackwardOfParts,
    BackwardOfPartsLater,
    ModulePastEngine,
    WrongShift,
    EvalOnOneRank,
    LocalPenalty,
    PositionWeights,
    SkippedStep,
    Frequencies,
    StaleBatch,
    FourRanksLabels,
]
