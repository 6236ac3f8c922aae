"""The jobs of this benchmark: models of real size on clusters of unequal GPUs, with planned schedules."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from benchmarks.fake_gpu.step import IMAGE_SIZE, IMAGE_TOKEN, PATCH_SIZE, Job
from ds_hetero.cluster.files import load_cluster
from ds_hetero.common.reading import config_dir
from ds_hetero.cost import CostModel, make_cost_model
from ds_hetero.cost.workload import Buffers, Workload
from ds_hetero.errors import PlanError
from ds_hetero.models import model_from_config
from ds_hetero.planner import plan, strategy
from ds_hetero.planner.memory import stacks
from ds_hetero.values.schedule import Schedule

FAMILY = "family:"  # before a model type of transformers
_LAYERS_OF_FAMILY = {"gemma3_text": 6}  # of which the last sees the whole sequence; of others four layers run
_WORDS_OF_FAMILY = 8_192


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model on a cluster.

    Args:
        model: name of a preset; or `FAMILY` and a model type of transformers, for a small number of its layers.
        cluster: file of ds_configs/clusters.
        length: tokens of a sequence.
        zero_stage: of DeepSpeed.
        documents: shares of the packed documents in the sequence; empty for one document.
        images: number before the text, each of 576 positions (CLIP-L at 336 pixels), as in LLaVA.
        tile_tokens: tokens of a tile of MLPs and loss.
        checkpointing: whether every layer is recomputed.
        keep_attention: whether the recomputation takes attention from the forward.
    """

    model: str
    cluster: str
    length: int
    zero_stage: int = 3
    documents: tuple[int, ...] = ()
    images: int = 0
    tile_tokens: int | None = 4096
    checkpointing: bool = True
    keep_attention: bool = False

    @property
    def name(self) -> str:
        """Name for people."""
        packed = f" in {len(self.documents)} documents" if self.documents else ""
        images = f" with {self.images} images" if self.images else ""
        return f"{self.model}, {self.cluster}, {self.length:,} tokens{packed}{images}, ZeRO-{self.zero_stage}"

    @property
    def title(self) -> str:
        """Name with the settings that save memory."""
        savers = ", ".join(self.workload.memory_savers)
        return f"{self.name}{', ' if savers else ''}{savers}"

    @property
    def workload(self) -> Workload:
        """The workload of the cost model."""
        return Workload(
            seq_len=self.length,
            zero_stage=self.zero_stage,
            activation_checkpointing=self.checkpointing,
            keep_attention=self.keep_attention,
            tiled_logits=self.tile_tokens is not None,
            tiled_mlp=self.tile_tokens is not None,
            tile_tokens=self.tile_tokens,
            buffers=Buffers(),
        )

    def schedule(self) -> Schedule:
        """The planned schedule; if no schedule fits into memory, one in proportion to the ranks' speeds."""
        return _schedule(self)

    def cost_model(self, layers: int | None = None) -> CostModel:
        """Return the calibrated cost model of all layers, or of the first ``layers``."""
        model = model_from_config(config_of(self.model, layers, self.length), self.model)
        return make_cost_model("calibrated", load_cluster(self.cluster), model, self.workload)

    def fit_bytes(self, rank: int, layers: int | None = None) -> float:
        """Return the peak of a rank by ``ds-hetero fit``, without the memory of the GPU's driver."""
        stack = stacks(self.cost_model(layers), self.schedule())[rank]
        return stack.tensors

    def job(self, layers: int | None = None) -> Job:
        """Return the job with all its layers, or with the first ``layers``."""
        documents = tuple(self.length * share // sum(self.documents) for share in self.documents)
        if documents:
            documents = (*documents[:-1], self.length - sum(documents[:-1]))
        config = config_of(self.model, layers, self.length)
        return Job(
            name=self.name,
            config=_with_images(config) if self.images else config,
            schedule=self.schedule(),
            length=self.length,
            documents=documents,
            images=self.images,
            zero_stage=self.zero_stage,
            checkpointing=self.checkpointing,
            tile_tokens=self.tile_tokens,
            keep_attention=self.keep_attention,
        )


SETTINGS = (
    Setting(model="llama-3.1-8b", cluster="cloud-l40s-a10g", length=65_536),
    Setting(model="llama-3.1-8b", cluster="hexiseq-setting-1", length=131_072, zero_stage=1),
    Setting(model="llama-3.1-8b", cluster="hexiseq-setting-1", length=131_072, documents=(8, 4, 2, 1, 1)),
    Setting(model="llama-3.1-70b", cluster="hexiseq-setting-3", length=262_144),
    Setting(model="qwen3-30b-a3b", cluster="hexiseq-setting-1", length=65_536, tile_tokens=None),
    Setting(model="qwen3-next-80b-a3b", cluster="hexiseq-setting-3", length=131_072, tile_tokens=None),
    Setting(model="bamba-9b", cluster="a100-80-40", length=131_072),
    Setting(model="llama-2-7b", cluster="hexiseq-setting-1", length=65_536, images=32, tile_tokens=None),
    Setting(model="llama-3.1-8b", cluster="hexiseq-simulation-2", length=1_048_576),
)


@lru_cache(maxsize=64)
def _schedule(setting: Setting) -> Schedule:
    cluster = load_cluster(setting.cluster)
    model = model_from_config(config_of(setting.model, None, setting.length), setting.model)
    try:
        return plan(cluster, model, setting.workload).schedule
    except PlanError:
        return strategy("proportional", make_cost_model("calibrated", cluster, model, setting.workload))


def config_of(model: str, layers: int | None, length: int) -> dict[str, Any]:
    """Return the config.json of a preset or of a family.

    Args:
        model: see `Setting`.
        layers: number of first layers to keep; None for all.
        length: tokens of the longest sequence.
    """
    if model.startswith(FAMILY):
        return _config_of_family(model.removeprefix(FAMILY), length)
    config: dict[str, Any] = json.loads((config_dir() / "models" / f"{model}.json").read_text())
    config |= {"use_cache": False, "max_position_embeddings": max(length, config.get("max_position_embeddings", 0))}
    if layers is not None:
        config["num_hidden_layers"] = layers
        if "attn_layer_indices" in config:
            config["attn_layer_indices"] = [i for i in config["attn_layer_indices"] if i < layers]
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:layers]
    return config


def _config_of_family(model_type: str, length: int) -> dict[str, Any]:
    """Return transformers' own configuration of a family, with few layers and a small vocabulary."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        model_type,
        num_hidden_layers=_LAYERS_OF_FAMILY.get(model_type, 4),
        vocab_size=_WORDS_OF_FAMILY,
        max_position_embeddings=max(length, 131_072),
        use_cache=False,
        pad_token_id=None,
    )
    return json.loads(config.to_json_string(use_diff=False))  # type: ignore[no-any-return]


def _with_images(text: dict[str, Any]) -> dict[str, Any]:
    """Return LLaVA 1.5 around a text model: CLIP-L's tower for images of 336 pixels, and its projector."""
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    sizes = {"image_size": IMAGE_SIZE, "patch_size": PATCH_SIZE, "projection_dim": 768}
    return {
        "model_type": "llava",
        "text_config": text | {"vocab_size": text["vocab_size"] + 64},
        "vision_config": {"model_type": "clip_vision_model", **vision, **sizes},
        "image_token_index": IMAGE_TOKEN,
    }
