"""Public recipes of Axolotl, ms-swift, LLaMA-Factory and TRL, shrunk, on unequal ranks as on one process.

`python -m tests.recipes run` trains every one; these are a few, and what the lists say.

Budget: 40 s.
"""

from __future__ import annotations

import pytest

from tests.recipes.__main__ import outcomes_of
from tests.recipes.jobs import Job, job_of
from tests.recipes.outcomes import NAMES, PAGE, all_jobs, load_facts, load_outcomes, unsaid, with_lists
from tests.recipes.reading import KEYS


def _frequent(count: int, **fields: object) -> list[Job]:
    """The most frequent jobs with these fields."""
    alike = [job for job in all_jobs() if all(getattr(job, name) == value for name, value in fields.items())]
    return alike[:count]


def test_the_table_has_the_recipes_that_were_counted() -> None:
    frameworks = load_facts()
    files = {name: {facts["path"].partition("#")[0] for facts in frameworks[name]["recipes"]} for name in NAMES}
    assert [len(files[name]) for name in ("axolotl", "ms-swift", "llama-factory")] == [252, 404, 95]
    for entry in frameworks.values():
        assert len(entry["commit"]) == 40
        assert all(facts.keys() <= KEYS.keys() for facts in entry["recipes"])


def test_no_recipe_is_wrong_and_the_page_says_what_became_of_each() -> None:
    outcomes = load_outcomes()
    assert not unsaid(outcomes)
    assert not {job for job, of in outcomes.items() if {"wrong", "obscure"} & {kind for kind, _ in of.values()}}
    assert PAGE.read_text() == with_lists(PAGE.read_text()), "run python -m tests.recipes write"


def test_equal_settings_become_one_job() -> None:
    facts = {"path": "a", "model": "Qwen/Qwen2.5-7B", "method": "sft", "adapter": "lora", "micro": 1, "length": 2048}
    other = {**facts, "path": "b", "model": "Qwen/Qwen2.5-0.5B", "micro": 8, "precision": "bf16"}
    assert job_of(facts) == job_of(other)
    assert job_of({**facts, "adapter": "", "parallel": ["zero3"]}) != job_of(other)
    assert (
        job_of({**facts, "extras": ["galore"]})
        == "galore: needs galore-torch, which projects whole gradients and knows no DeepSpeed"
    )


@pytest.mark.slow
def test_frequent_recipes_train_as_on_one_process() -> None:
    _hold(_frequent(2, method="sft", images=False, base=""))


@pytest.mark.slow
def test_the_most_frequent_preference_recipe_ends_as_recorded() -> None:
    _hold(_frequent(1, method="dpo"))


@pytest.mark.slow
def test_experts_have_the_loss_of_their_routers_as_on_one_process() -> None:
    """TRL adds it by itself, and makes it by the function of another model's file; ZeRO-3 hides where it came from."""
    _hold(_frequent(1, family="qwen3_moe", method="sft", packing="packed", adapter="", stage=3))


def _hold(jobs: list[Job]) -> None:
    recorded = load_outcomes()
    for job, by_sharing in outcomes_of(jobs).items():
        found = {sharing: outcome.kind for sharing, outcome in by_sharing.items()}
        assert found == {sharing: kind for sharing, (kind, _) in recorded[str(job)].items()}, by_sharing
