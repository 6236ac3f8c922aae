"""The start of a job of pipelines: rank 0 reads the plan or searches for it, and all ranks have it."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ds_hetero.config import HeterogeneitySection
from ds_hetero.job.decide_pipelines import (
    PipelineFacts,
    SearchedPipelines,
    check_pipeline_section,
    check_pipelines_searchable,
    search_pipelines,
    wants_search,
)
from ds_hetero.job.pipeline_report import pipelines_text, searched_text
from ds_hetero.job.plan_files import pipelines_in_file
from ds_hetero.job.report import announce
from ds_hetero.job.start import MeasuredClusters, World, agree_on_facts
from ds_hetero.plans import Plan
from ds_hetero.profiler.cache import cache_folder
from ds_hetero.runtime.devices import default_device
from ds_hetero.runtime.peers.waiting import waiting_for_peers

__all__ = ["agree_on_pipelines", "search_at_start", "trains_pipelines"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Asked:
    """What the section asks for.

    Args:
        searches: pipelines are to be searched for.
        plan: the plan of pipelines in the section's file, where it names one.
    """

    searches: bool
    plan: Plan | None


def trains_pipelines(world: World, read: Callable[[], HeterogeneitySection | None]) -> bool:
    """Whether the section asks for pipelines; see `agree_on_pipelines`."""
    asked = _ask(world, read)
    return asked.searches or asked.plan is not None


def agree_on_pipelines(
    world: World, read: Callable[[], HeterogeneitySection | None], search: Callable[[], Plan]
) -> Plan | None:
    """Return the plan of pipelines that the section names or has searched for; None if it asks for anything else.

    Args:
        world: the ranks of the job.
        read: returns the section; what it raises on any rank is raised on all.
        search: called on every rank, where the section asks for a search; see `search_at_start`.

    Caller: every rank of the world.
    Collectives: one `on_all_ranks`, and those of ``search``.

    Raises:
        HeteroError: on every rank, when the section is wrong, the plan does not fit the world, or nothing fits.
    """
    asked = _ask(world, read)
    if asked.searches:
        return search()
    if asked.plan is not None and world.rank == 0:
        announce(f"on, {pipelines_text(asked.plan)}")
    return asked.plan


def _ask(world: World, read: Callable[[], HeterogeneitySection | None]) -> _Asked:
    def of_rank_0() -> _Asked | None:
        section = read()
        if world.rank > 0:
            return None
        if section is None:
            return _Asked(searches=False, plan=None)
        plan = pipelines_in_file(section, world.size)
        if plan is not None:
            check_pipeline_section(section)
        return _Asked(searches=wants_search(section), plan=plan)

    asked = world.on_all_ranks(of_rank_0)[0]
    assert asked is not None
    return asked


@waiting_for_peers("searching for pipelines")
def search_at_start(world: World, read: Callable[[], PipelineFacts], clusters: MeasuredClusters) -> Plan:
    """Have rank 0 search for the pipelines of a job, say what it found, and hand it to all ranks.

    The plan is kept as a file, whose path is announced: a later job may name it as its schedule.

    Args:
        world: the ranks of the job.
        read: returns this rank's facts; what it raises on any rank is raised on all.
        clusters: measured so far; used where the section says ``"cluster": "measure"``, and added to.

    Caller: every rank of the world.
    Collectives: those of `agree_on_facts` and of `MeasuredClusters.of`, one `on_all_ranks`.

    Raises:
        HeteroError: the same one on every rank; see `search_pipelines`.
    """
    own: list[PipelineFacts] = []

    def read_own() -> PipelineFacts:
        own.append(read())
        check_pipelines_searchable(own[0].job)
        return own[0]

    job = agree_on_facts(world, lambda: read_own().job)
    measured = clusters.of(world, job) if job.section.cluster == "measure" else None
    searched: SearchedPipelines | None = None
    on_host = default_device().type == "cpu"

    def on_rank_0() -> Plan | None:
        nonlocal searched
        if world.rank > 0:
            return None
        searched = search_pipelines(own[0], world.size, measured=measured, on_host=on_host)
        return searched.plan

    plan = world.on_all_ranks(on_rank_0)[0]
    assert plan is not None
    if searched is not None:
        announce(f"on, {pipelines_text(plan)}\n{searched_text(searched)}\n{_kept_text(_keep_plan(plan))}")
    return plan


def _keep_plan(plan: Plan) -> Path | None:
    """Write a plan into the user's cache folder, completely or not at all; None where that cannot be done."""
    folder = cache_folder()
    if folder is None:
        return None
    path = folder / "plans" / f"{plan.fingerprint:016x}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            json.dump(plan.to_dict(), file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("cannot keep the plan in %s: %s", path, error)
        return None
    return path


def _kept_text(path: Path | None) -> str:
    if path is None:
        return "kept:       nowhere; handle.plan.to_dict() is the content of its file"
    return f'kept:       in {path}; beside "parallel": "full", "schedule": "{path}" runs it again without a search'
