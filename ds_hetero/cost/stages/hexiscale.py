"""HexiScale's cost model of pipelines (arXiv:2409.01143, appendix A, Eqs. 3-11).

    layer       96 b S H^2 (1 + S / 6H) / (c n)  +  12 max_d sum_{d' != d} (alpha + b S H P / (n B))  72 and 8 where
                activations are kept instead of computed again
    hop         2 (alpha + b S H P / B  +  (n - 1) (alpha + b S H P / (n B_in)))             to the leader, broadcast
    pipeline    sum of layers and hops  +  (m - 1) max_j (stage_j + hop_j)                                      Eq. 9
    gradients   max_d sum over its layers and peers  2 (alpha + 12 H^2 P / (n R B))
    memory      48 H^2 P / n per layer, of which 8 bytes a parameter are meant, and b S H P                  Eq. 11

With ``code_constants=False`` the equations are those of the print, also where it is hardly meant: the maximum of Eq. 9
leaves out the first stage (j = 2, ..., D_pp), so that only the first micro-batch sees it, and Eq. 11 counts the input
of a layer whole on each of the n devices and neither embedding nor head. A pipeline of one stage, for which the
maximum is over nothing, repeats that stage.

Its public code computes something else in places, and only with that do the printed figures come out
(``code_constants``): peaks in 2^40 and links in 2^30; no latency; a barrier per step of the pipeline in place of Eq. 9;
a vocabulary term in the layer; the input of a layer divided among the n devices; memory of embedding, head and
workspace; 1.8 x the slowest pipeline + 1.65 x the gradients.

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

CODE_PEAK_TFLOPS = {"RTX-3090": 80.0, "RTX-3080Ti": 56.9}  # where the code's table differs from the datasheet
TFLOPS_OF_CODE = 2**40 / 1e12
GB_OF_CODE = 2**30 / 1e9
PIPELINE_SCALE = 1.8
GRADIENT_SCALE = 1.1 * 1.5  # the second where parameters are partitioned, too
ELEMENT_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class _PublishedMemory(StageMemory):
    """Eq. 11: one sum for all phases."""

    states_bytes: float
    kept_bytes: float
    working_bytes: float
    first_bytes: float
    last_bytes: float

    @property
    def layer_bytes(self) -> float:
        """Model states of a layer."""
        return self.states_bytes

    def peak_bytes(
        self, layers: Bytes, first: bool, last: bool, in_flight: Bytes, micro_batches: int | None = None
    ) -> Floats:
        """See `StageMemory.peak_bytes`."""
        fixed = self.working_bytes + first * self.first_bytes + last * self.last_bytes
        return np.asarray(fixed + layers * (self.states_bytes + in_flight * self.kept_bytes))


class HexiScaleStageCosts(StageCosts):
    """Cost model of the paper, or of its code.

    Args:
        model: its layers count as 12 H^2 parameters, as the paper's do.
        code_constants: those of the public code, named ``hexiscale``; False for the print, named ``hexiscale-paper``.
        recomputation: activations are computed again in the backward.
        parameter_bytes: model states per parameter; the code's 8 leave no room for Adam's, which takes 16.
        stash: inputs of all micro-batches in flight count in memory, which the paper leaves out.
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
        self.name = "hexiscale" if code_constants else "hexiscale-paper"
        self._code, self._stash = code_constants, stash
        self._parameter_bytes = parameter_bytes
        scale = GB_OF_CODE if code_constants else 1.0
        self._s_per_byte = [1 / (link.bytes_per_s * scale) for link in cluster.link_classes]
        self._latency_s = [0.0 if code_constants else link.latency_s for link in cluster.link_classes]
        self._inner = [cluster.link_classes.index(kind.link) for kind in self.pools.kinds]
        self._flops_per_s = [self._peak(kind.device.name, kind.device.peak_flops_per_s) for kind in self.pools.kinds]

    def _peak(self, name: str, datasheet: float) -> float:
        if not self._code:
            return datasheet
        return CODE_PEAK_TFLOPS.get(name, datasheet / 1e12) * 1e12 * TFLOPS_OF_CODE

    def _layer_flops(self, samples: int) -> float:
        """Operations of one layer for ``samples`` sequences, forward and backward."""
        hidden, seq_len, model = self.model.hidden_size, self.seq_len, self.model
        per_token = 96 if self.activation_checkpointing else 72
        vocabulary = model.vocab_size / (16 * model.num_layers * hidden) if self._code else 0.0
        return per_token * samples * seq_len * hidden**2 * (1 + seq_len / (6 * hidden) + vocabulary)

    def _activation_bytes(self, samples: int) -> float:
        return float(samples * self.seq_len * self.model.hidden_size * ELEMENT_BYTES)

    def stage(self, kind: int, size: int, inner: str, micro_batch_size: int, pipelines: int) -> StageOption | None:
        """Tensor parallelism only; see `StageCosts.stage`."""
        if inner == "sequence" or self.model.num_heads % size:
            return None
        device = self.pools.kinds[kind].device
        volume, link = self._activation_bytes(micro_batch_size), self._inner[kind]
        all_reduce_s = (size - 1) * (self._latency_s[link] + volume / size * self._s_per_byte[link])
        layer_s = self._layer_flops(micro_batch_size) / (self._flops_per_s[kind] * size)
        layer_s += (12 if self.activation_checkpointing else 8) * all_reduce_s
        return StageOption(
            forward_s=layer_s / 4,
            backward_s=layer_s * 3 / 4,
            capacity_bytes=device.memory_bytes,
            memory=self._memory(size, volume),
        )

    def _memory(self, size: int, volume: float) -> _PublishedMemory:
        """Eq. 11 of one of ``size`` devices, with ``volume`` bytes in the input of a layer."""
        hidden, vocab, own = self.model.hidden_size, self.model.vocab_size, self._parameter_bytes
        return _PublishedMemory(
            num_layers=self.model.num_layers,
            states_bytes=12 * hidden**2 / size * own,
            kept_bytes=volume / size if self._code else volume,
            working_bytes=2 * volume if self._code else 0.0,
            first_bytes=hidden * (vocab + self.seq_len) * own if self._code else 0.0,
            last_bytes=hidden * (vocab + 1) * own if self._code else 0.0,
        )

    def hop_s(self, link: int, source: DeviceBlock, target: DeviceBlock, micro_batch_size: int) -> float:
        """Both directions of a hop: leader to leader, then a broadcast among the target's devices."""
        volume, inside = self._activation_bytes(micro_batch_size), self._inner[target.kind]
        broadcast_s = (target.size - 1) * (self._latency_s[inside] + volume / target.size * self._s_per_byte[inside])
        return 2 * (self._latency_s[link] + volume * self._s_per_byte[link] + broadcast_s)

    def kept_in_flight(self, in_flight: int) -> int:
        """One, as printed; with ``stash``, all."""
        return in_flight if self._stash else 1

    # --- pipelines

    def pipeline_times(self, forward_s: Floats, backward_s: Floats, hop_s: Floats) -> PipelineTimes:
        """Eq. 9, or with the code's barrier the sum over its steps; see `StageCosts.pipeline_times`."""
        step_CS = _steps(forward_s, backward_s, hop_s)
        if not self._code:
            fill_C = step_CS.sum(axis=1)
            return PipelineTimes(fill_C, step_CS[:, _from_second(step_CS.shape[1]) :].max(axis=1), fill_C)
        period_C = step_CS.max(axis=1)
        filling_C = np.maximum.accumulate(step_CS[:, :-1], axis=1).sum(axis=1)
        draining_C = np.maximum.accumulate(step_CS[:, :0:-1], axis=1).sum(axis=1)
        fill_C = filling_C + draining_C - (step_CS.shape[1] - 2) * period_C
        return PipelineTimes(fill_C, period_C, fill_C)

    def pipeline_s(
        self,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        hop_s: Sequence[float],
        micro_batches: int,
        in_flight: Sequence[int] | None = None,
    ) -> float:
        """Time of one pipeline, also where it has fewer micro-batches than stages; see `StageCosts.pipeline_s`."""
        arrays = np.array([forward_s]), np.array([backward_s]), np.array(hop_s)
        step_S = _steps(*arrays)[0]
        stages = len(step_S)
        if not self._code:
            return float(step_S.sum() + (micro_batches - 1) * step_S[_from_second(stages) :].max())
        if micro_batches >= stages:
            return float(self.pipeline_times(*arrays).of(micro_batches)[0])
        windows = range(micro_batches + stages - 1)
        return float(sum(step_S[max(0, j - micro_batches + 1) : j + 1].max() for j in windows))

    def sync_times(self, pipelines: Sequence[PlacedPipeline]) -> SyncTimes:
        """Eqs. 4 and 7: every device exchanges its part of a layer with one device of every other pipeline."""
        count, num_layers = len(pipelines), self.model.num_layers
        if count == 1:
            return NO_SYNC
        link_class = self.cluster.link_class
        s_per_byte_NN = np.array(self._s_per_byte)[link_class]
        latency_NN = np.array(self._latency_s)[link_class]
        node_PL = np.stack([np.repeat([b.node for b in p.blocks], p.layers) for p in pipelines])
        size_PL = np.stack([np.repeat([b.size for b in p.blocks], p.layers) for p in pipelines])
        count_NL = np.zeros((len(link_class), num_layers))
        layer_PL = np.broadcast_to(np.arange(num_layers), node_PL.shape)
        np.add.at(count_NL, (node_PL, layer_PL), 1)
        part_PL = 12 * self.model.hidden_size**2 * ELEMENT_BYTES / size_PL / count

        def over_peers(per_pair_NN: Floats) -> Floats:
            everywhere_NL = np.einsum("pq,ql->pl", per_pair_NN, count_NL)
            return np.asarray(everywhere_NL[node_PL, layer_PL] - per_pair_NN.diagonal()[node_PL])

        seconds_PL = 2 * (over_peers(latency_NN) + part_PL * over_peers(s_per_byte_NN))
        starts = [np.concatenate([[0], np.cumsum(pipeline.layers)[:-1]]) for pipeline in pipelines]
        stage_s = (np.add.reduceat(row, at).max() for row, at in zip(seconds_PL, starts, strict=True))
        return SyncTimes(0.0, float(max(stage_s)))

    def step_s(self, pipelines_s: float, sync: SyncTimes, overlap_s: float) -> float:
        """The slowest pipeline and then the gradients."""
        if not self._code:
            return pipelines_s + sync.total_s
        return PIPELINE_SCALE * pipelines_s + GRADIENT_SCALE * sync.total_s

    def utilization(self, step_s: float, global_batch: int) -> float:
        """Return what the paper's tables call MFU, in which recomputation counts as work."""
        return (
            self._layer_flops(global_batch)
            * self.model.num_layers
            / step_s
            / sum(self._flops_per_s[pool.kind] * len(pool.ranks) for pool in self.pools.pools)
        )


def _steps(forward_s: Floats, backward_s: Floats, hop_s: Floats) -> Floats:
    """Every stage with the hop behind it, ``[C, S]``."""
    step_CS = forward_s + backward_s
    step_CS[:, : len(hop_s)] += hop_s
    return step_CS


def _from_second(stages: int) -> int:
    """First index of the maximum of Eq. 9, which is over j = 2, ..., D_pp; over the only stage where there is one."""
    return min(1, stages - 1)


STAGE_COSTS = ("calibrated", "hexiscale", "hexiscale-paper")


def make_stage_costs(
    name: str, cluster: Cluster, model: ModelSpec, workload: Workload, find: FindSchedule | None = None
) -> StageCosts:
    """Return the cost model ``name`` for one cluster, model and workload. Raises `PlanError`: the name is unknown.

    Args:
        name: one of `STAGE_COSTS`; ``hexiscale`` is its public code, ``hexiscale-paper`` its equations as printed.
        workload: HexiScale's take its length and whether activations are computed again.
        find: schedules for stages of unlike devices, for ``calibrated``.
    """
    if name == "calibrated":
        return CalibratedStageCosts(cluster, model, workload, find=find)
    if name in STAGE_COSTS:
        code, recomputation = name == "hexiscale", workload.activation_checkpointing
        return HexiScaleStageCosts(cluster, model, workload.seq_len, code_constants=code, recomputation=recomputation)
    raise PlanError(f"cost model {shortened(name)} is unknown for pipelines; it is one of {', '.join(STAGE_COSTS)}.")
