"""One stage of a transformers model: its parts on this rank, and the forward of a micro-batch through them.

A stage is the model itself with placeholders (`Absent`) for the parts of other stages, which return their input:

    first stage     embed_tokens, layers 0 .. 3, Absent, Absent (norm, head)     tokens -> hidden states
    last stage      Absent, Absent, layers 4 .. 7, norm, head                    hidden states -> loss

Every stage computes masks and rotary embeddings from positions, so only hidden states are sent between stages.
Parameters keep the names that they have in the uncut model.

Dimension key: b rows of a micro-batch, L tokens of its sequences, s tokens of this rank, H hidden size.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from ds_hetero.engine.adapters import ElasticState
from ds_hetero.engine.forward_mode import sharding
from ds_hetero.errors import BatchError, ModelError
from ds_hetero.frameworks.transformers.model.model_checks import pretrained_of
from ds_hetero.frameworks.transformers.model.sharded_model import ShardedModel
from ds_hetero.frameworks.transformers.model.tiles import Tiles
from ds_hetero.frameworks.transformers.stages.meta import fill_parameters
from ds_hetero.frameworks.transformers.stages.parts import Absent, parts_of, with_memory, without_memory
from ds_hetero.frameworks.transformers.stages.stage_weights import write_stages
from ds_hetero.frameworks.transformers.stages.tensor_cut import TensorCut, partial_parameters
from ds_hetero.runtime.cut_dropout import same_draws
from ds_hetero.runtime.data.shards import Entries, PlacedBatch, model_inputs
from ds_hetero.runtime.loss import cross_entropy_sum, measure_tokens
from ds_hetero.runtime.pipeline.batches import StageBatch
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_clock import UNTIMED, Clock, StepClock
from ds_hetero.runtime.vocabulary import VocabularyPart
from ds_hetero.values.placement import stream_placement
from ds_hetero.values.plans import Plan

_LABELS = "shift_labels"


class StageModel:
    """A model of which this rank keeps one stage. Implements `ds_hetero.runtime.pipeline.runner.StageCompute`.

    Args:
        model: a PreTrainedModel, or a module around one, checked by `check_stages`. Parts of other stages are removed
            from it and freed.
        plan: of pipelines; a rank that is idle in it keeps no part.
        tile_tokens: tokens of a sequence in a tile of MLPs and logits, see `Tiles`; None for no tiles.

    Attributes:
        measures: sums that the last stage accumulates besides the loss, see `measure_tokens`; None for none.
        is_writer: True on the rank that writes this stage's weights: the first rank of a stage of the first pipeline.
        elastic: keeps the engine's state in memory; None in a job that is not elastic.
    """

    def __init__(self, model: nn.Module, plan: Plan, rank: int, tile_tokens: int | None = None) -> None:
        assert plan.model is not None
        place, num_layers = plan.place_of(rank), plan.model.num_layers
        stage = plan.stage_of(rank)
        self.model, self.plan, self._stage, self._rank = model, plan, stage, rank
        first_pipeline = plan.pipelines[0]
        self.is_writer = stage is not None and stage in first_pipeline.stages and rank == stage.ranks[0]
        # (index of the stage, number of stages), for `write_stages`.
        self._writes = (place[1], len(first_pipeline.stages)) if self.is_writer and place is not None else None
        self._pretrained = pretrained_of(model)
        self._decoder = self._pretrained.base_model
        self.dtype: torch.dtype = self._pretrained.dtype  # of the parameters and of the activations between stages
        self.width: int = self._pretrained.config.get_text_config().to_dict()["hidden_size"]  # H
        self._names = _names_of_whole_model(model)
        layers = (0, 0) if stage is None or stage.layers is None else stage.layers
        self.is_first, self.is_last = stage is not None and layers[0] == 0, layers[1] == num_layers
        # Before layers are removed: layers that a later plan moves here are computed in tiles, too.
        self._tiles = None if tile_tokens is None else Tiles(self._pretrained, self._decoder, tile_tokens)
        self._absent: dict[int, nn.Module] = {}
        self._take_out(layers)
        self._clock: Clock = UNTIMED
        self._timers: list[RemovableHandle] = []
        self._is_running = False
        self.measures: Tensor | None = None
        self.elastic: ElasticState | None = None
        self._guard = self._pretrained.register_forward_pre_hook(self._expect_pipeline)
        self._decoder_guard = self._decoder.register_forward_pre_hook(self._expect_pipeline)
        self._sharded: ShardedModel | None = None
        self._cut: TensorCut | None = None

    def shard_sequences(self, replica: Replica, kernel: str | None) -> None:
        """Switch a ``"sequence"`` stage to the attention of its schedule. ``kernel``: see `ShardedModel`."""
        self._sharded = ShardedModel(self.model, replica, kernel)

    def cut_by_tensor_parallelism(self, mesh: DeviceMesh) -> None:
        """Keep this rank's shards of a ``"tensor"`` stage; the model is on its device."""
        self._cut = TensorCut(self._pretrained, mesh)

    def fill(self, device: torch.device) -> None:
        """Give a model built without weights its memory and values here. Raises `ModelError`: its folder lacks them."""
        fill_parameters(self.model, self._names, device)

    def time_layers(self, clock: StepClock) -> None:
        """Let a clock measure the phases of the stage, and the time of its layers."""
        self._clock = clock
        if self._sharded is not None:
            self._sharded.clock = clock
        self._time_layers()

    def _time_layers(self) -> None:
        """Put hooks of the clock on the first and the last layer of this stage."""
        for timer in self._timers:
            timer.remove()
        clock = self._clock
        layers = [layer for layer in self._layers if not isinstance(layer, Absent)]
        if layers:
            self._timers = [
                layers[0].register_forward_pre_hook(lambda *_: clock.enter_layers(), prepend=True),
                layers[-1].register_forward_hook(lambda *_: clock.leave_layers()),
            ]

    def change_layers(self, plan: Plan, device: torch.device) -> None:
        """Switch to the layers of another plan with the same ranks and stages.

        Parameters of layers that move here get memory, but no values yet; those of layers that move away are freed.
        """
        self.plan = plan
        stage = plan.stage_of(self._rank)
        if stage is None or stage.layers is None:
            return
        self._stage = stage
        self.is_writer = stage in plan.pipelines[0].stages and self._rank == stage.ranks[0]
        layers = self._layers
        first, end = stage.layers
        for index in range(len(layers)):
            if not first <= index < end:
                self._put_away(index)
            elif index in self._absent:
                layer = self._absent.pop(index)
                if self._cut is not None:
                    self._cut.cut_layer(layer, f"{parts_of(self._pretrained).layers}.{index}")
                layers[index] = with_memory(layer, device).train(self._decoder.training)
        self._time_layers()

    @property
    def configuration(self) -> Entries:
        """Content of the uncut model's config.json."""
        content: Entries = json.loads(self._pretrained.config.to_json_string(use_diff=False))
        return {**content, "architectures": [type(self._pretrained).__name__]}

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters by their names in the uncut model; a tied one by the first of its names."""
        named = self.model.named_parameters(remove_duplicate=False)
        return {self._names[name]: parameter for name, parameter in named}

    def partial_parameters(self) -> frozenset[str]:
        """Return the names of parameters with partial gradients: each rank of a ``"tensor"`` stage has a summand."""
        if self._stage is None or self._stage.inner != "tensor":
            return frozenset()
        partial_in_decoder = partial_parameters(self._pretrained)
        ids = {id(parameter) for name, parameter in self._decoder.named_parameters() if name in partial_in_decoder}
        return frozenset(name for name, parameter in self.parameters().items() if id(parameter) in ids)

    def save_pretrained(self, folder: str) -> None:
        """Write the weights of all stages, and the configuration, as ``from_pretrained`` of transformers reads them.

        Args:
            folder: a path that every rank can see.

        Caller: every rank of the world.

        Raises:
            ModelError: the model has PEFT adapters, which a folder of ``from_pretrained`` cannot contain.
            CheckpointError: on every rank; a rank cannot write.
        """
        if getattr(self.model, "peft_config", None):
            raise ModelError(
                "a model with adapters cannot be saved as a folder of transformers while it is cut into stages; "
                "engine.save_checkpoint keeps the adapters."
            )
        write_stages(self.parameters(), self._writes, Path(folder))
        if dist.get_rank() == 0:
            self._pretrained.config.save_pretrained(folder)
            if (generation := getattr(self._pretrained, "generation_config", None)) is not None:
                generation.save_pretrained(folder)

    def __call__(self, batch: StageBatch, hidden: Tensor | None) -> Tensor:
        """Run the forward of a micro-batch.

        A rank of a ``"sequence"`` stage without tokens runs one dummy token, so that it takes part in collectives: a
        column of zeros is appended to its empty hidden states, and is cut off the output.

        Args:
            hidden: [b, s, H] from the stage before; None on the first stage.

        Returns:
            [b, s, H]; on the last stage this rank's summand of the loss.

        Raises:
            BatchError: the batch has entries that a stage cannot take, or the last stage gets no labels.
        """
        inputs = self._inputs(batch)
        if self._sharded is None:
            self._clock.count_batch(batch.rows, batch.length, batch.length)
        labels = inputs.pop(_LABELS, None)
        is_placeholder = hidden is not None and hidden.shape[1] == 0
        if hidden is not None:
            inputs.pop("input_ids")
            # [b, 0, H] -> [b, 1, H]
            inputs["inputs_embeds"] = nn.functional.pad(hidden, (0, 0, 0, 1)) if is_placeholder else hidden
        if self._tiles is not None:
            self._tiles.begin(self._rank_tokens(batch.length))
        with self._forward_of_stage():
            if self.is_last:
                if labels is None:
                    raise BatchError("a batch needs labels, of which the last stage computes the loss.")
                return self._loss_sum(inputs, labels) * batch.scale
            output: Tensor = self._decoder(**inputs, use_cache=False).last_hidden_state
        tokens = output.shape[1] if hidden is None else hidden.shape[1]
        return output[:, : self._tokens(batch.length, tokens)]

    def _loss_sum(self, inputs: Entries, labels: Tensor) -> Tensor:
        """Return the sum of this rank's token losses, and add to `measures`."""

        def of_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
            loss_sum = cross_entropy_sum(logits, labels, part=self._words)
            if self.measures is None:
                return (loss_sum,)
            return loss_sum, measure_tokens(logits, labels, self._words)

        if self._tiles is None:
            loss_sum, *measures = of_logits(self._pretrained(**inputs, use_cache=False).logits, labels)  # type: ignore[operator]
        else:
            decoder_output = self._decoder(**inputs, use_cache=False)
            batch = {**inputs, _LABELS: labels}
            loss_sum, *measures = self._tiles.sums(self._pretrained.forward, decoder_output, batch, of_logits)
        if self.measures is not None:
            self.measures += measures[0]
        return loss_sum

    def _rank_tokens(self, length: int) -> tuple[int, ...]:
        """Return the tokens of a sequence on every rank of this stage."""
        if self._stage is None or self._stage.schedule is None:
            return (length,)
        return stream_placement(self._stage.schedule, length).rank_tokens

    def _tokens(self, length: int, otherwise: int) -> int:
        """Return this rank's tokens, 0 if it runs a dummy token; ``otherwise`` if the stage shares no sequences."""
        if self._stage is None or self._stage.schedule is None:
            return otherwise
        return stream_placement(self._stage.schedule, length).tokens(self._rank)

    def _inputs(self, batch: StageBatch) -> Entries:
        """Return the inputs of a forward on the model's device: the micro-batch, or this rank's shard of it."""
        device = next(iter(self.model.parameters())).device
        assert self._stage is not None
        if self._stage.schedule is None:
            return {name: tensor.to(device) for name, tensor in batch.whole.sequences.items()}
        placed = PlacedBatch(batch.whole, stream_placement(self._stage.schedule, batch.length))
        return model_inputs(placed.shard(self._rank), device)

    @contextlib.contextmanager
    def _forward_of_stage(self) -> Iterator[None]:
        """Allow a forward inside, on shards in a ``"sequence"`` stage, with equal dropout in a ``"tensor"`` stage."""
        self._is_running = True
        cut = self._cut
        try:
            with contextlib.ExitStack() as stack:
                if self._sharded is not None:
                    stack.enter_context(sharding(True))
                if cut is not None and cut.draws and self._decoder.training:
                    stack.enter_context(same_draws(cut.group))
                yield
        finally:
            self._is_running = False

    @property
    def _words(self) -> VocabularyPart | None:
        """Words of the head on this rank of a ``"tensor"`` stage; None if it has all words."""
        return None if self._cut is None else self._cut.words

    def _expect_pipeline(self, *_: object) -> None:
        """Refuse a forward outside of the engine, which would run this stage only."""
        if not self._is_running:
            raise BatchError(
                f"{type(self._pretrained).__name__} is cut into pipeline stages, of which this rank has one: call "
                "engine(**batch) on every rank. Generation and other uses of the model are not supported."
            )

    def _take_out(self, layers: tuple[int, int]) -> None:
        """Replace the parts of other stages by `Absent`. ``layers``: of this stage, [first, end)."""
        parts = parts_of(self._pretrained)
        first, end = layers
        for index in range(len(self._layers)):
            if not first <= index < end:
                self._put_away(index)
        absent: list[str] = []
        if not self.is_first:
            absent += parts.before
        if not self.is_last:
            absent += parts.after
        for name in absent:
            setattr(self._decoder, name, Absent())
        if not self.is_last:
            head = self._pretrained.get_output_embeddings()
            name = next(name for name, module in self._pretrained.named_modules() if module is head)
            setattr(self._pretrained, name, Absent())

    @property
    def _layers(self) -> nn.ModuleList:
        """All layers of the decoder, `Absent` in the place of those of other stages."""
        layers: nn.ModuleList = getattr(self._decoder, parts_of(self._pretrained).layers)
        return layers

    def _put_away(self, index: int) -> None:
        """Free a layer. Its module is kept without memory, so that the layer can move back here."""
        layer = self._layers[index]
        if not isinstance(layer, Absent):
            self._absent[index] = without_memory(layer)
            self._layers[index] = Absent()


def outputs_with(loss: Tensor, measures: Tensor | None = None) -> Any:
    """Return outputs of a transformers model with the global loss, and TRL's sums, see `measure_tokens`."""
    from transformers.modeling_outputs import CausalLMOutput

    outputs = CausalLMOutput(loss=loss)
    if measures is not None:
        outputs.label_mask, outputs.entropy, outputs.is_top1 = measures.unbind()
    return outputs


def _names_of_whole_model(model: nn.Module) -> Mapping[str, str]:
    """Map every name of a parameter to the first of its names; tied parameters have several."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
