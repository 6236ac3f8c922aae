"""One stage of a transformers model: keep its parts on this rank, and run micro-batches through them.

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

from ds_hetero.engine.forward_mode import sharding
from ds_hetero.errors import BatchError
from ds_hetero.frameworks.transformers.model.model_checks import pretrained_of
from ds_hetero.frameworks.transformers.model.sharded_model import ShardedModel
from ds_hetero.frameworks.transformers.model.tiles import Tiles
from ds_hetero.frameworks.transformers.stages.adapter_files import write_adapters
from ds_hetero.frameworks.transformers.stages.meta import fill_parameters
from ds_hetero.frameworks.transformers.stages.parallel_regions import partial_in_regions
from ds_hetero.frameworks.transformers.stages.parts import Absent, parts_of, with_memory, without_memory
from ds_hetero.frameworks.transformers.stages.stage_weights import write_stages
from ds_hetero.frameworks.transformers.stages.tensor_cut import TensorCut, may_share_tokens, partial_parameters
from ds_hetero.runtime.data.shards import Entries, PlacedBatch, model_inputs
from ds_hetero.runtime.loss import cross_entropy_sum, measure_tokens
from ds_hetero.runtime.parallel_dropout import same_draws
from ds_hetero.runtime.pipeline.batches import StageBatch
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_clock import UNTIMED, Clock, StepClock
from ds_hetero.runtime.vocabulary import VocabularyPart
from ds_hetero.values.placement import stream_placement
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Schedule
from ds_hetero.values.section import RingGradients

_LABELS = "shift_labels"


class StageModel:
    """A model of which this rank keeps one stage. Implements `ds_hetero.runtime.pipeline.runner.StageCompute`.

    Args:
        model: a PreTrainedModel, or a module around one, which `check_stages` has accepted. Parts of other stages are
            removed from it and freed.
        plan: of the pipelines; a rank that is idle in it keeps no part.
        tile_tokens: tokens of a sequence in a tile of MLPs and logits, see `Tiles`; None for no tiles.

    Attributes:
        measures: sums that the last stage accumulates besides the loss, see `measure_tokens`; None for none.
        is_writer: True on the rank that writes this stage's weights: the first rank of a stage of the first pipeline.
    """

    def __init__(self, model: nn.Module, plan: Plan, rank: int, tile_tokens: int | None = None) -> None:
        assert plan.model is not None
        place, num_layers = plan.place_of(rank), plan.model.num_layers
        stage = plan.stage_of(rank)
        self.model, self.plan, self._stage, self._rank = model, plan, stage, rank
        first_pipeline = plan.pipelines[0]
        self.is_writer = stage is not None and stage in first_pipeline.stages and rank == stage.ranks[0]
        # (index of the stage, number of stages) on a rank that writes, for `write_stages`.
        self._written_stage = (place[1], len(first_pipeline.stages)) if self.is_writer and place is not None else None
        self._pretrained = pretrained_of(model)
        self._decoder = self._pretrained.base_model
        self.dtype: torch.dtype = self._pretrained.dtype  # of the parameters and of the activations between stages
        self.width: int = self._pretrained.config.get_text_config().to_dict()["hidden_size"]  # H
        self._names = _names_of_whole_model(model)
        layers = (0, 0) if stage is None or stage.layers is None else stage.layers
        self.is_first, self.is_last = stage is not None and layers[0] == 0, layers[1] == num_layers
        # Before layers are removed, so that layers which a later plan moves here are computed in tiles, too.
        self._tiles = None if tile_tokens is None else Tiles(self._pretrained, self._decoder, tile_tokens)
        self._absent_layers: dict[int, nn.Module] = {}  # of other stages, without memory, by index
        self._remove_other_parts(layers)
        self._clock: Clock = UNTIMED
        self._timers: list[RemovableHandle] = []  # hooks that time the layers
        self._is_running = False
        self.measures: Tensor | None = None
        self._pretrained.register_forward_pre_hook(self._expect_pipeline)
        self._decoder.register_forward_pre_hook(self._expect_pipeline)
        self._sharded: ShardedModel | None = None
        self._cut: TensorCut | None = None

    def shard_sequences(self, replica: Replica, kernel: str | None, ring_gradients: RingGradients) -> None:
        """Switch a ``"sequence"`` stage to the attention of its schedule; see `ShardedModel` for the arguments."""
        self._sharded = ShardedModel(self.model, replica, kernel)
        self._sharded.ring_gradients = ring_gradients

    def cut_by_tensor_parallelism(self, mesh: DeviceMesh) -> None:
        """Shard a ``"tensor"`` stage, or one with tensor groups, whose model is on its device already."""
        shares_tokens = self._schedule is not None and may_share_tokens(self.model)
        self._cut = TensorCut(self._pretrained, mesh, shares_tokens=shares_tokens)

    def fill(self, device: torch.device) -> None:
        """Give the parameters of a model built without weights memory and values. Raises `ModelError`."""
        fill_parameters(self.model, self._names, device)

    def time_layers(self, clock: StepClock) -> None:
        """Let ``clock`` measure the phases of the stage, and the time of its layers."""
        self._clock = clock
        if self._sharded is not None:
            self._sharded.clock = clock
        self._time_layers()

    def _time_layers(self) -> None:
        """Move the hooks of the clock to the first and the last layer of this stage."""
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
                self._free_layer(index)
            elif index in self._absent_layers:
                layer = self._absent_layers.pop(index)
                if self._cut is not None:
                    self._cut.cut_layer(layer, f"{parts_of(self._pretrained).layers}.{index}")
                layers[index] = with_memory(layer, device).train(self._decoder.training)
        if self._cut is not None:
            self._cut.share_tokens_in(layers)
        self._time_layers()

    @property
    def configuration(self) -> Entries:
        """The content of the uncut model's config.json."""
        content: Entries = json.loads(self._pretrained.config.to_json_string(use_diff=False))
        return {**content, "architectures": [type(self._pretrained).__name__]}

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters by name in the uncut model; a tied parameter by the first of its names."""
        named = self.model.named_parameters(remove_duplicate=False)
        return {self._names[name]: parameter for name, parameter in named}

    def partial_parameters(self) -> frozenset[str]:
        """Return the names of the parameters whose gradients must be summed over ranks that hold the same tokens."""
        if self._stage is None or not self._stage.is_tensor_parallel:
            return frozenset()
        partial_in_decoder = partial_parameters(self._pretrained)
        ids = {id(parameter) for name, parameter in self._decoder.named_parameters() if name in partial_in_decoder}
        if self._cut is not None and self._cut.regions is not None:
            ids.update(id(parameter) for layer in self._layers for parameter in partial_in_regions(layer))
        return frozenset(name for name, parameter in self.parameters().items() if id(parameter) in ids)

    def save_pretrained(self, folder: str) -> None:
        """Write the weights of all stages, and the configuration, for ``from_pretrained`` of transformers.

        Of a model with adapters these alone are written, as PEFT does.

        Args:
            folder: a path that every rank can access.

        Caller: every rank of the world.

        Raises:
            CheckpointError: on every rank; a rank could not write.
        """
        if getattr(self.model, "peft_config", None):
            stage = None if self._written_stage is None else self._written_stage[0]
            write_adapters(self.model, self.parameters(), stage, Path(folder))
            return
        write_stages(self.parameters(), self._written_stage, Path(folder))
        if dist.get_rank() == 0:
            self._pretrained.config.save_pretrained(folder)
            if (generation := getattr(self._pretrained, "generation_config", None)) is not None:
                generation.save_pretrained(folder)

    def __call__(self, batch: StageBatch, hidden: Tensor | None) -> Tensor:
        """Run the forward of a micro-batch.

        A rank of a ``"sequence"`` stage that has no tokens runs one dummy token, so that it takes part in collectives.
        For that, a column of zeros is appended to its empty hidden states, and removed from the output.

        Args:
            hidden: hidden states [b, s, H] of the stage before; None on the first stage.

        Returns:
            Hidden states [b, s, H]; on the last stage this rank's summand of the loss.

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
                    raise BatchError(
                        "the last stage computes the loss of labels, but the batch has none. Add labels to it."
                    )
                return self._loss_sum(inputs, labels) * batch.scale
            output: Tensor = self._decoder(**inputs, use_cache=False).last_hidden_state
        tokens = output.shape[1] if hidden is None else hidden.shape[1]
        return output[:, : self._num_tokens(batch.length, tokens)]

    def _loss_sum(self, inputs: Entries, labels: Tensor) -> Tensor:
        """Return the sum of this rank's token losses, and add the sums of `measure_tokens` to `measures`."""

        def sums_of(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
            loss_sum = cross_entropy_sum(logits, labels, part=self._words)
            if self.measures is None:
                return (loss_sum,)
            return loss_sum, measure_tokens(logits, labels, self._words)

        if self._tiles is None:
            loss_sum, *measures = sums_of(self._pretrained(**inputs, use_cache=False).logits, labels)  # type: ignore[operator]
        else:
            decoder_output = self._decoder(**inputs, use_cache=False)
            batch = {**inputs, _LABELS: labels}
            loss_sum, *measures = self._tiles.sums(self._pretrained.forward, decoder_output, batch, sums_of)
        if self.measures is not None:
            self.measures += measures[0]
        return loss_sum

    def _rank_tokens(self, length: int) -> tuple[int, ...]:
        """Return the number of tokens of a sequence on every rank that shares it."""
        if self._schedule is None:
            return (length,)
        return stream_placement(self._schedule, length).rank_tokens

    def _num_tokens(self, length: int, unshared: int) -> int:
        """Return how many tokens of a sequence of ``length`` tokens this rank has; 0 if it runs only a dummy token.

        Args:
            unshared: returned if each rank of the stage runs whole sequences.
        """
        if self._schedule is None:
            return unshared
        return stream_placement(self._schedule, length).tokens(self._rank)

    def _inputs(self, batch: StageBatch) -> Entries:
        """Return the inputs of a forward on the model's device: the micro-batch, or this rank's shard of it."""
        device = next(iter(self.model.parameters())).device
        if self._schedule is None:
            return {name: tensor.to(device) for name, tensor in batch.batch.sequences.items()}
        placed = PlacedBatch(batch.batch, stream_placement(self._schedule, batch.length))
        return model_inputs(placed.shard(self._rank), device)

    @property
    def _schedule(self) -> Schedule | None:
        """Schedule over which this rank shares sequences; None if it runs whole ones."""
        return None if self._stage is None else self._stage.schedule_of(self._rank)

    @contextlib.contextmanager
    def _forward_of_stage(self) -> Iterator[None]:
        """Inside the context, allow forwards of the stage, which `_expect_pipeline` refuses outside.

        They run on shards in a ``"sequence"`` stage, and with the same dropout on ranks that hold the same tokens.
        """
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
        """The vocabulary entries whose logits this rank computes; None if all."""
        return None if self._cut is None else self._cut.words

    def _expect_pipeline(self, *_: object) -> None:
        """Refuse a forward outside of the engine, which would run this stage only."""
        if not self._is_running:
            raise BatchError(
                f"{type(self._pretrained).__name__} is cut into pipeline stages, of which this rank has one. Call "
                "engine(**batch) on every rank. Generation and other uses of the model are not supported."
            )

    def _remove_other_parts(self, layers: tuple[int, int]) -> None:
        """Replace the parts of other stages by `Absent`.

        Args:
            layers: (first, end) of this stage's layers, without the end.
        """
        parts = parts_of(self._pretrained)
        first, end = layers
        for index in range(len(self._layers)):
            if not first <= index < end:
                self._free_layer(index)
        absent_parts: list[str] = []
        if not self.is_first:
            absent_parts += parts.before
        if not self.is_last:
            absent_parts += parts.after
        for name in absent_parts:
            setattr(self._decoder, name, Absent())
        if not self.is_last:
            head = self._pretrained.get_output_embeddings()
            name = next(name for name, module in self._pretrained.named_modules() if module is head)
            setattr(self._pretrained, name, Absent())

    @property
    def _layers(self) -> nn.ModuleList:
        """All layers of the decoder; those of other stages are `Absent`."""
        layers: nn.ModuleList = getattr(self._decoder, parts_of(self._pretrained).layers)
        return layers

    def _free_layer(self, index: int) -> None:
        """Free the memory of a layer. Its module is kept, so that a later plan can move the layer back here."""
        layer = self._layers[index]
        if not isinstance(layer, Absent):
            self._absent_layers[index] = without_memory(layer)
            self._layers[index] = Absent()


def outputs_with(loss: Tensor, measures: Tensor | None = None) -> Any:
    """Return outputs of a transformers model.

    Args:
        loss: of the global batch.
        measures: sums for TRL's metrics, see `measure_tokens`; None for none.
    """
    from transformers.modeling_outputs import CausalLMOutput

    outputs = CausalLMOutput(loss=loss)
    if measures is not None:
        outputs.label_mask, outputs.entropy, outputs.is_top1 = measures.unbind()
    return outputs


def _names_of_whole_model(model: nn.Module) -> Mapping[str, str]:
    """Map each name of a parameter to the first of its names; a tied parameter has several names."""
    first_name_by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    all_names = model.named_parameters(remove_duplicate=False)
    return {name: first_name_by_id[id(parameter)] for name, parameter in all_names}
