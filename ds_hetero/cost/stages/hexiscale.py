"""HexiScale's cost model of pipelines (arXiv:2409.01143, appendix A, Eqs. 3-11).

    layer       96 b S H^2 (1 + S / 6H) / (c n)  +  12 max_d sum_{d' != d} (alpha + b S H P / (n B))
                with 72 in place of 96 and 8 in place of 12 without recomputation
    hop         2 (alpha + b S H P / B  +  (n - 1) (alpha + b S H P / (n B_in)))             to the leader, broadcast
    pipeline    sum of layers and hops  +  (m - 1) max_j (stage_j + hop_j)                                      Eq. 9
    gradients   max_d sum over its layers and peers  2 (alpha + 12 H^2 P / (n R B))
    memory      48 H^2 P / n per layer, which is 8 bytes per parameter, and b S H P                          Eq. 11

In the formulas a micro-batch has b sequences of S tokens, the hidden size is H, and an element has P bytes. A stage has
n devices of c FLOPs per second each; d and d' are devices. A link has latency alpha and bandwidth B (B_in inside a
stage). The plan has R pipelines, and a pipeline runs m micro-batches per step.

With ``code_constants=False`` the model uses the equations as printed, although two of them are hardly meant so. The
maximum of Eq. 9 leaves out the first stage (j = 2, ..., D_pp), so that only the first micro-batch pays for a slow first
stage; a pipeline of one stage would have a maximum over nothing, and this module takes its only stage. Eq. 11 counts
the full input of a layer on each of the n devices, and neither embedding nor head.

With ``code_constants=True`` the model follows the paper's public code, which reproduces the printed figures. The code
differs from the equations in these points:

    units       a TFLOPS is 2^40 FLOPs per second, a GB is 2^30 bytes
    links       have no latency
    pipeline    a barrier after every step of the pipeline, instead of Eq. 9
    layer       has a term for the vocabulary
    memory      a layer's input is divided among the n devices; embedding, head and workspace count
    step        1.8 x the slowest pipeline + 1.65 x the gradients

Dimension key: C candidates, S stages, P pipelines, L layers, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats
from ds_hetero.common.reading import shortened
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.cost.stages.pipeline_time import PipelineTimes
from ds_hetero.cost.stages.sequence import FindSchedule
from ds_hetero.cost.stages.stage import (
    NO_SYNC,
    DeviceBlock,
    PlacedPipeline,
    StageCosts,
    StageMemory,
    StageOption,
    SyncTimes,
)
from ds_hetero.cost.terms.memory_parts import Bytes
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.models.shapes import ModelSpec

CODE_PEAK_TFLOPS = {"RTX-3090": 80.0, "RTX-3080Ti": 56.9}  # peaks of the code's table that differ from the datasheet
CODE_TFLOPS = 2**40 / 1e12  # a TFLOPS as the code counts it, in 10^12 FLOPs per second
CODE_GB = 2**30 / 1e9  # a GB as the code counts it, in 10^9 bytes
PIPELINE_SCALE = 1.8  # of the code
GRADIENT_SCALE = 1.1 * 1.5  # of the code, whose second factor is for partitioned parameters
ELEMENT_BYTES = 2  # P of the formulas: half precision


@dataclass(frozen=True, kw_only=True)
class _PublishedMemory(StageMemory):
    """Memory of a device by Eq. 11, which has one sum for all phases."""

    states_bytes: float  # model states of one layer
    saved_bytes: float  # activations that a layer keeps for one micro-batch
    workspace_bytes: float  # temporaries of any layer
    embedding_bytes: float  # model states of the embedding
    head_bytes: float  # model states of the head

    @property
    def layer_bytes(self) -> float:
        """Bytes of the model states of one layer."""
        return self.states_bytes

    def peak_bytes(
        self, layers: Bytes, first: bool, last: bool, in_flight: Bytes, micro_batches: int | None = None
    ) -> Floats:
        """Return the peak memory by Eq. 11, see `StageMemory.peak_bytes`."""
        fixed_bytes = self.workspace_bytes + first * self.embedding_bytes + last * self.head_bytes
        return np.asarray(fixed_bytes + layers * (self.states_bytes + in_flight * self.saved_bytes))


class HexiScaleStageCosts(StageCosts):
    """HexiScale's cost model, as in the paper or as in its public code.

    Args:
        model: the model; a layer counts as 12 H^2 parameters, as in the paper.
        code_constants: follow the public code (name ``hexiscale``); False: the paper (name ``hexiscale-paper``).
        recomputation: whether activations are computed again in the backward.
        parameter_bytes: bytes of model states per parameter. The code's 8 are too few for Adam, which takes 16.
        stash: whether memory counts the activations of all micro-batches in flight; the paper counts one.
    """

    hop_in_step = True

    def __init__(
        self,
        cluster: Cluster,
        model: ModelSpec,
        seq_len: int,
        *,
        code_constants: bool = True,
        recomputation: bool = True,
        parameter_bytes: float = 8,
        stash: bool = False,
    ) -> None:
        super().__init__(cluster, model, seq_len, recomputation)
        if model.window_layers:
            raise PlanError(
                f"{model.name} has layers whose attention sees a window, which HexiScale's equations do not cover. "
                "Use --cost-model calibrated."
            )
        self.name = "hexiscale" if code_constants else "hexiscale-paper"
        self._follows_code, self._stash = code_constants, stash
        self._parameter_bytes = parameter_bytes
        scale = CODE_GB if code_constants else 1.0
        self._s_per_byte = [1 / (link.bytes_per_s * scale) for link in cluster.link_classes]  # by link class
        self._latency_s = [0.0 if code_constants else link.latency_s for link in cluster.link_classes]  # by link class
        self._inner_link = [cluster.link_classes.index(kind.link) for kind in self.pools.kinds]  # by kind of device
        self._flops_per_s = [self._peak(kind.device.name, kind.device.peak_flops_per_s) for kind in self.pools.kinds]

    def _peak(self, name: str, datasheet_flops_per_s: float) -> float:
        """Return the FLOPs per second of a device: from the datasheet as the paper does, or from the code's table."""
        if not self._follows_code:
            return datasheet_flops_per_s
        return CODE_PEAK_TFLOPS.get(name, datasheet_flops_per_s / 1e12) * 1e12 * CODE_TFLOPS

    def _layer_flops(self, samples: int) -> float:
        """Return the FLOPs of one layer for ``samples`` sequences: forward, backward, and recomputation if there is."""
        hidden, seq_len, model = self.model.hidden_size, self.seq_len, self.model
        per_token = 96 if self.activation_checkpointing else 72
        vocabulary = model.vocab_size / (16 * model.num_layers * hidden) if self._follows_code else 0.0
        return per_token * samples * seq_len * hidden**2 * (1 + seq_len / (6 * hidden) + vocabulary)

    def _activation_bytes(self, samples: int) -> float:
        """Return the bytes of the input of a layer for ``samples`` sequences."""
        return float(samples * self.seq_len * self.model.hidden_size * ELEMENT_BYTES)

    def stage(self, kind: int, size: int, inner: str, micro_batch_size: int, pipelines: int) -> StageOption | None:
        """Return the times and memory of a block with tensor parallelism; HexiScale has no other kind of stage."""
        if inner == "sequence" or self.model.num_heads % size:
            return None
        device = self.pools.kinds[kind].device
        input_bytes, link = self._activation_bytes(micro_batch_size), self._inner_link[kind]
        exchange_s = (size - 1) * (self._latency_s[link] + input_bytes / size * self._s_per_byte[link])
        layer_s = self._layer_flops(micro_batch_size) / (self._flops_per_s[kind] * size)
        layer_s += (12 if self.activation_checkpointing else 8) * exchange_s
        return StageOption(
            # A backward with recomputation takes as long as three forwards. The equations use only the sum of both.
            forward_s=layer_s / 4,
            backward_s=layer_s * 3 / 4,
            capacity_bytes=device.memory_bytes,
            memory=self._memory(size, input_bytes),
        )

    def _memory(self, size: int, input_bytes: float) -> _PublishedMemory:
        """Return the memory of one of ``size`` devices by Eq. 11, for a layer's input of ``input_bytes``."""
        hidden, vocab, per_parameter = self.model.hidden_size, self.model.vocab_size, self._parameter_bytes
        return _PublishedMemory(
            num_layers=self.model.num_layers,
            states_bytes=12 * hidden**2 / size * per_parameter,
            saved_bytes=input_bytes / size if self._follows_code else input_bytes,
            workspace_bytes=2 * input_bytes if self._follows_code else 0.0,
            embedding_bytes=hidden * (vocab + self.seq_len) * per_parameter if self._follows_code else 0.0,
            head_bytes=hidden * (vocab + 1) * per_parameter if self._follows_code else 0.0,
        )

    def hop_s(self, link: int, source: DeviceBlock, target: DeviceBlock, micro_batch_size: int) -> float:
        """Return the time of a hop in both directions: leader to leader, then a broadcast over the target's devices."""
        input_bytes, inner_link = self._activation_bytes(micro_batch_size), self._inner_link[target.kind]
        slice_s = self._latency_s[inner_link] + input_bytes / target.size * self._s_per_byte[inner_link]
        broadcast_s = (target.size - 1) * slice_s
        return 2 * (self._latency_s[link] + input_bytes * self._s_per_byte[link] + broadcast_s)

    def kept_in_flight(self, in_flight: int) -> int:
        """Return how many micro-batches' activations count as memory: 1 as printed, all in flight with ``stash``."""
        return in_flight if self._stash else 1

    # --- pipelines

    def pipeline_times(self, forward_s: Floats, backward_s: Floats, hop_s: Floats) -> PipelineTimes:
        """Return the times of candidate pipelines: by Eq. 9, or with barriers as in the code.

        With barriers, a step lasts as long as the slowest stage that works in it. Three stages of 1, 4 and 2 s and
        three micro-batches take 1, max(1, 4), max(1, 4, 2), max(4, 2) and 2 s, so 15 s.
        """
        stage_CS = _with_hops(forward_s, backward_s, hop_s)
        num_stages = stage_CS.shape[1]
        if not self._follows_code:
            fill_C = stage_CS.sum(axis=1)
            return PipelineTimes(fill_C, stage_CS[:, _first_of_eq_9(num_stages) :].max(axis=1), fill_C)
        # For m >= S micro-batches there are S - 1 steps while the pipeline fills, m - S + 1 steps of all stages, and
        # S - 1 steps while it drains. `PipelineTimes` adds m - 1 periods, hence S - 2 are taken away here.
        period_C = stage_CS.max(axis=1)
        filling_C = np.maximum.accumulate(stage_CS[:, :-1], axis=1).sum(axis=1)
        draining_C = np.maximum.accumulate(stage_CS[:, :0:-1], axis=1).sum(axis=1)
        fill_C = filling_C + draining_C - (num_stages - 2) * period_C
        return PipelineTimes(fill_C, period_C, fill_C)

    def pipeline_s(
        self,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        hop_s: Sequence[float],
        micro_batches: int,
        in_flight: Sequence[int] | None = None,
    ) -> float:
        """Return the time of one pipeline, also with fewer micro-batches than stages; see `StageCosts.pipeline_s`."""
        arrays = np.array([forward_s]), np.array([backward_s]), np.array(hop_s)
        stage_S = _with_hops(*arrays)[0]
        num_stages = len(stage_S)
        if not self._follows_code:
            return float(stage_S.sum() + (micro_batches - 1) * stage_S[_first_of_eq_9(num_stages) :].max())
        if micro_batches >= num_stages:
            return float(self.pipeline_times(*arrays).of(micro_batches)[0])
        # In step t the stages max(0, t - m + 1) to t have a micro-batch; a slice past the last stage ends there.
        steps = range(micro_batches + num_stages - 1)
        return float(sum(stage_S[max(0, t - micro_batches + 1) : t + 1].max() for t in steps))

    def sync_times(self, pipelines: Sequence[PlacedPipeline]) -> SyncTimes:
        """Return the time of gradients by Eqs. 4 and 7: a device exchanges layers with one device of each pipeline."""
        num_pipelines, num_layers = len(pipelines), self.model.num_layers
        if num_pipelines == 1:
            return NO_SYNC
        link_class = self.cluster.link_class
        s_per_byte_NN = np.array(self._s_per_byte)[link_class]
        latency_NN = np.array(self._latency_s)[link_class]
        node_PL = np.stack([np.repeat([b.node for b in p.blocks], p.layers) for p in pipelines])
        size_PL = np.stack([np.repeat([b.size for b in p.blocks], p.layers) for p in pipelines])
        num_holders_NL = np.zeros((len(link_class), num_layers))  # pipelines that hold a layer on a node
        layer_PL = np.broadcast_to(np.arange(num_layers), node_PL.shape)
        np.add.at(num_holders_NL, (node_PL, layer_PL), 1)
        message_bytes_PL = 12 * self.model.hidden_size**2 * ELEMENT_BYTES / size_PL / num_pipelines

        def sum_over_peers(value_NN: Floats) -> Floats:
            """Sum a value of node pairs over the nodes on which the other pipelines hold a layer, ``[P, L]``."""
            to_all_NL = np.einsum("pq,ql->pl", value_NN, num_holders_NL)
            return np.asarray(to_all_NL[node_PL, layer_PL] - value_NN.diagonal()[node_PL])

        layer_s_PL = 2 * (sum_over_peers(latency_NN) + message_bytes_PL * sum_over_peers(s_per_byte_NN))
        slowest_stage_s = 0.0
        for layer_s_L, pipeline in zip(layer_s_PL, pipelines, strict=True):
            first_layers = np.concatenate([[0], np.cumsum(pipeline.layers)[:-1]])  # of every stage
            slowest_stage_s = max(slowest_stage_s, float(np.add.reduceat(layer_s_L, first_layers).max()))
        return SyncTimes(0.0, slowest_stage_s)

    def step_s(self, slowest_pipeline_s: float, sync: SyncTimes, overlap_s: float) -> float:
        """Return the time of an optimizer step: the slowest pipeline, and then the gradients."""
        if not self._follows_code:
            return slowest_pipeline_s + sync.total_s
        return PIPELINE_SCALE * slowest_pipeline_s + GRADIENT_SCALE * sync.total_s

    def utilization(self, step_s: float, global_batch: int) -> float:
        """Return the model FLOPs utilization of the paper's tables, as a fraction; recomputation counts as work."""
        peak_flops_per_s = sum(self._flops_per_s[pool.kind] * len(pool.ranks) for pool in self.pools.pools)
        return self._layer_flops(global_batch) * self.model.num_layers / step_s / peak_flops_per_s


def _with_hops(forward_s: Floats, backward_s: Floats, hop_s: Floats) -> Floats:
    """Return the time of every stage with the hop to the next stage, ``[C, S]``."""
    stage_CS = forward_s + backward_s
    stage_CS[:, : len(hop_s)] += hop_s
    return stage_CS


def _first_of_eq_9(num_stages: int) -> int:
    """Return the index, from 0, of the first stage in Eq. 9's maximum over j = 2, ..., D_pp; 0 if there is only one."""
    return min(1, num_stages - 1)


STAGE_COSTS = ("calibrated", "hexiscale", "hexiscale-paper")


def make_stage_costs(
    name: str, cluster: Cluster, model: ModelSpec, workload: Workload, find: FindSchedule | None = None
) -> StageCosts:
    """Make the cost model ``name`` of pipeline stages for one cluster, model and workload.

    Args:
        name: one of `STAGE_COSTS`; ``hexiscale`` follows its public code, ``hexiscale-paper`` the printed equations.
        workload: HexiScale's models read only its sequence length and whether activations are recomputed.
        find: finds schedules for stages of several kinds of devices; only ``calibrated`` has such stages.

    Raises:
        PlanError: the name is unknown, or the cost model does not cover the model or the workload.
    """
    if name == "calibrated":
        return CalibratedStageCosts(cluster, model, workload, find=find)
    if name in STAGE_COSTS and workload.adapter_rank:
        raise PlanError(
            f"adapters have no cost in HexiScale's model of pipelines ({name}). Use --cost-model calibrated, or plan "
            "full training (--train full)."
        )
    if name in STAGE_COSTS:
        return HexiScaleStageCosts(
            cluster,
            model,
            workload.seq_len,
            code_constants=name == "hexiscale",
            recomputation=workload.activation_checkpointing,
        )
    raise PlanError(f"cost model {shortened(name)} is unknown for pipelines; it is one of {', '.join(STAGE_COSTS)}.")
