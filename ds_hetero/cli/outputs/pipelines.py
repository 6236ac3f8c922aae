"""Pipelines as a table, and how they are put together for it and for the picture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ds_hetero.cli.outputs.printing import print_table
from ds_hetero.common.text import bytes_text, time_text
from ds_hetero.cost.stages.stage import StageCosts
from ds_hetero.planner.pipeline_search.finish import Finished, memory_bytes

_COLUMNS = ("pipelines", "micro-batches", "stage", "devices", "layers", "time", "memory GiB", "of")


def print_pipelines(costs: StageCosts, finished: Finished) -> None:
    """One row per stage; pipelines of one makeup once."""
    print_table(_COLUMNS, _rows(costs, finished))


def makeups(finished: Finished) -> list[list[int]]:
    """Pipelines that are alike in kinds, layers and batches."""
    alike: dict[Any, list[int]] = {}
    for i, pipeline in enumerate(finished.candidate.placed):
        kinds = tuple((block.kind, block.size, block.inner, block.others) for block in pipeline.blocks)
        alike.setdefault((kinds, *pipeline[1:]), []).append(i)
    return list(alike.values())


def _rows(costs: StageCosts, finished: Finished) -> Iterator[tuple[str, ...] | None]:
    memory = memory_bytes(costs, finished)
    for members in makeups(finished):
        i = members[0]
        pipeline, cut = finished.candidate.placed[i], finished.candidate.cuts[i]
        head = (f"{len(members)} x", f"{pipeline.micro_batches} of {pipeline.micro_batch_size}")
        for j, block in enumerate(pipeline.blocks):
            devices = [costs.pools.kinds[part.kind].device for part in block.parts]
            names = [f"{part.size} {device.name}" for part, device in zip(block.parts, devices, strict=True)]
            yield (
                *(head if j == 0 else ("", "")),
                str(j),
                f"{' + '.join(names)}{'' if block.inner == 'one' else f' {block.inner}'}",
                f"{sum(cut.layers[:j])}-{sum(cut.layers[: j + 1])}",
                time_text(cut.forward_s[j] + cut.backward_s[j]),
                " + ".join(map(bytes_text, memory[i][j])),
                " + ".join(bytes_text(device.usable_bytes) for device in devices),
            )
        yield None
