"""Run one rank's training step on a GPU that does not exist, by the real modules of the engine and DeepSpeed."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.fake_gpu.device import DEVICE_TYPE, device, fake_mode, rank_of
from benchmarks.fake_gpu.recorder import Record, Recorder, RecordingClock
from benchmarks.proof.recording import recording
from ds_hetero.frameworks.transformers.model.model_checks import pretrained_of
from ds_hetero.runtime.attention.local_batch import LocalBatch
from ds_hetero.runtime.data.shards import PlacedBatch, model_inputs, place, read_batch
from ds_hetero.runtime.model_switches import checksum_of_trained
from ds_hetero.values.placement import stream_placement
from ds_hetero.values.schedule import Schedule

DTYPE = torch.bfloat16
_STEPS = {
    3: 3
}  # by ZeRO stage, else 2; the last one counts: in the first two ZeRO-3 learns in which order parameters are used
IMAGE_SIZE, PATCH_SIZE, IMAGE_TOKEN = 336, 14, 32_000  # of CLIP-L in LLaVA 1.5
_PLACES = (IMAGE_SIZE // PATCH_SIZE) ** 2  # in the sequence, of an image
_PARTS = {"embed": "embedding", "norm": "norm", "mlp": "mlp", "attn": "attention module", "head": "head"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, a schedule and the settings of training.

    Args:
        name: for people.
        config: the model's config.json.
        schedule: of all ranks.
        length: tokens of a sequence.
        documents: lengths of the packed documents; empty for one document.
        images: number before the text.
        zero_stage: 0 to 3.
        checkpointing: whether every layer is recomputed.
        tile_tokens: as ``"tile_tokens"`` of the section.
        keep_attention: as ``"keep_attention"`` of the section.
    """

    name: str
    config: Mapping[str, Any] = field(repr=False)
    schedule: Schedule = field(repr=False)
    length: int
    documents: tuple[int, ...] = ()
    images: int = 0
    zero_stage: int = 3
    checkpointing: bool = True
    tile_tokens: int | None = None
    keep_attention: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.schedule.sp_size


@lru_cache(maxsize=1)
def the_mode() -> FakeTensorMode:
    """Return the fake mode of this process."""
    return fake_mode()


def run_step(job: Job, rank: int, messages: bool = False) -> Record:
    """Train two or three optimizer steps on one rank and record the last; once per process, which then is this rank.

    Args:
        job: to train.
        rank: whose step is recorded.
        messages: also record the messages and waits of the rank, with the ranks that take part.

    Raises:
        RuntimeError: the tensors of an operator were on several devices; the record has it, too.
    """
    use_device()
    with rank_of(rank, job.world_size), alone():
        recorder = Recorder(the_mode())
        posted = recording(recorder.record.events) if messages else contextlib.nullcontext()
        with the_mode(), recorder, posted:
            _train(job, rank, recorder)
    return recorder.record


def _train(job: Job, rank: int, recorder: Recorder) -> None:
    """Train the steps under the recorder."""
    engine, handle = _engine_of(job, recorder)
    placed = placed_batch(job)
    shard = model_inputs(placed.shard(rank), device())
    headers = [header_of(placed, of_rank, engine.module) for of_rank in job.schedule.ranks]
    for _ in range(_STEPS.get(job.zero_stage, 2)):
        recorder.begin_step()
        recorder.replies = headers
        with recorder.inside("model"):
            outputs = engine(**{name: entry for name, entry in shard.items() if name != "labels"})
        loss = outputs.loss
        del outputs
        recorder.backward = True
        with recorder.inside("backward"):
            engine.backward(loss)
        recorder.backward, recorder.layer = False, None
        del loss
        recorder.in_step = True
        with recorder.inside("step"):
            engine.step()
        recorder.in_step = False
    handle.undo()


def placed_batch(job: Job) -> PlacedBatch:
    """Return the batch and its placement."""
    ids = torch.zeros(1, job.length, dtype=torch.int64)
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
    if job.documents:
        batch["position_ids"] = torch.cat([torch.arange(length) for length in job.documents])[None]
    if job.images:
        ids[0, : job.images * _PLACES] = IMAGE_TOKEN
        batch["pixel_values"] = torch.zeros(job.images, 3, IMAGE_SIZE, IMAGE_SIZE, dtype=DTYPE)
    return place(stream_placement, job.schedule, read_batch(batch, keep_inputs=bool(job.images)))


def header_of(placed: PlacedBatch, rank: int, model: nn.Module) -> Tensor:
    """Return a rank's header of its shard in `ds_hetero.runtime.attention.local_batch`, in a forward of training."""
    shard = placed.shard(rank)
    local = LocalBatch(
        batch_size=1,
        tokens=shard["position_ids"].shape[1],
        dtype=DTYPE,
        position_ids=shard["position_ids"],
        placement=placed.placement,
        trained=checksum_of_trained(pretrained_of(model).parameters()),
    )
    return local.header(torch.device("cpu"))


def _engine_of(job: Job, recorder: Recorder) -> tuple[Any, Any]:
    with recorder.inside("states"):
        engine, handle = engine_of(job, device())
    watch_layers(engine.module, recorder)
    _sharded_models(engine, recorder)
    return engine, handle


def engine_of(job: Job, where: torch.device, fill: Callable[[nn.Module], None] | None = None) -> tuple[Any, Any]:
    """Return DeepSpeed's engine of this rank with the model on a device, and our handle; ``fill`` writes weights."""
    import deepspeed
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.initialization import no_init_weights

    import ds_hetero

    deepspeed.init_distributed("fake", verbose=False)
    handle = ds_hetero.register()
    section: dict[str, Any] = {"schedule": job.schedule.to_dict(), "checks": {"compare_every": "off"}}
    if job.tile_tokens is not None:
        section["tile_tokens"] = job.tile_tokens
    if job.keep_attention:
        section["keep_attention"] = True
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": job.zero_stage},
        "bf16": {"enabled": True},
        "sequence_parallel_size": job.world_size,
        "heterogeneity": section,
    }
    cut = deepspeed.zero.Init(config_dict_or_path=config) if job.zero_stage == 3 else contextlib.nullcontext()
    with torch.device(where), no_init_weights(), cut:
        of_class = AutoModelForImageTextToText if job.images else AutoModelForCausalLM
        model = of_class.from_config(AutoConfig.for_model(**job.config), dtype=DTYPE)
    model.tie_weights()
    model.train()
    if fill is not None:
        fill(model)
    if job.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine, handle


def _sharded_models(engine: Any, recorder: Recorder) -> None:
    from ds_hetero.frameworks.transformers.model.sharded_model import ShardedModel

    for sharded in gc.get_objects():
        if isinstance(sharded, ShardedModel) and sharded.model is engine.module:
            sharded.clock = RecordingClock(recorder)  # type: ignore[assignment]


def watch_layers(model: nn.Module, recorder: Recorder) -> None:
    """Tell the recorder which decoder layer runs, forward and backward, and which part of it."""
    layers = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(_enters(recorder, number), prepend=True)
        layer.register_forward_hook(_leaves(recorder, number))
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        cause = next((cause for part, cause in _PARTS.items() if part in last), None)
        if cause is not None:
            _name_part(module, cause, recorder)


def _enters(recorder: Recorder, number: int) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        recorder.layer, recorder.cause = number, "layer"

    return hook


def _leaves(recorder: Recorder, number: int) -> Callable[..., None]:
    def begin_backward(grad: Tensor) -> None:
        recorder.layer, recorder.cause = number, "layer"

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(begin_backward)
        if not recorder.backward:
            recorder.layer, recorder.cause = None, "model"

    return hook


def _name_part(module: nn.Module, cause: str, recorder: Recorder) -> None:
    """Set the cause of launches while a part of a layer runs."""
    before: list[str] = []

    def enter(*_: Any) -> None:
        before.append(recorder.cause)
        recorder.cause = cause

    def leave(*_: Any) -> None:
        recorder.cause = before.pop()

    module.register_forward_pre_hook(enter, prepend=True)
    module.register_forward_hook(leave)


def use_device() -> None:
    """Make the device DeepSpeed's accelerator."""
    from deepspeed.accelerator import real_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class Accelerator(CPU_Accelerator):  # type: ignore[misc]
        """The device in the form of DeepSpeed's accelerators."""

        def __init__(self) -> None:
            super().__init__()
            self._name, self._communication_backend_name = DEVICE_TYPE, "fake"

        def device_name(self, device_index: int | None = None) -> str:
            return DEVICE_TYPE if device_index is None else f"{DEVICE_TYPE}:{device_index}"

        def device(self, device_index: int | None = None) -> torch.device:
            return device()

        def current_device(self) -> int:
            return 0

        def current_device_name(self) -> str:
            return str(device())

        def device_count(self) -> int:
            return 1

        def on_accelerator(self, tensor: Tensor) -> bool:
            return tensor.device.type == DEVICE_TYPE

        def communication_backend_name(self) -> str:
            return "fake"

        def supported_dtypes(self) -> list[torch.dtype]:
            return [torch.float32, torch.float16, torch.bfloat16]

    real_accelerator.ds_accelerator = Accelerator()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let the start of a job wait for no other rank and decide as rank 0; undo it at the end."""
    from deepspeed.runtime.zero import utils as zero_utils

    from ds_hetero.engine import registered_ranks
    from ds_hetero.job.start import World

    size = torch.distributed.get_world_size()
    names = {"LOCAL_RANK": "0", "RANK": str(torch.distributed.get_rank()), "WORLD_SIZE": str(size)}
    with (
        mock.patch.dict(os.environ, names),
        mock.patch.object(registered_ranks, "_missing_ranks", lambda calls: []),
        mock.patch.object(World, "current", lambda: World(0, size)),
        mock.patch.object(zero_utils, "assert_ints_same_as_other_ranks", lambda ints: None),
        mock.patch.object(zero_utils, "assert_lst_len_same_as_other_ranks", lambda ints: None),
        mock.patch.object(zero_utils, "get_lst_from_rank0", lambda ints: ints),
        mock.patch.object(importlib.import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None),
    ):
        yield
