"""Outcomes of the recipes' jobs, and the lists of them in docs/evidence/framework-recipes.md."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.recipes.jobs import Job, job_of, replaced
from tests.recipes.reading import Facts
from tests.support import ROOT
from tests.sweep_table import folded

FACTS = Path(__file__).with_name("facts.json")
OUTCOMES = Path(__file__).with_name("outcomes.json")
PAGE = ROOT / "docs" / "evidence" / "framework-recipes.md"
NAMES = {"axolotl": "Axolotl", "ms-swift": "ms-swift", "llama-factory": "LLaMA-Factory", "trl": "TRL"}
KINDS = ("exact", "refused", "wrong", "not run", "another method", "trains nothing")


def load_facts() -> dict[str, dict[str, Any]]:
    """By framework: its commit, and the facts of its recipes."""
    return dict(json.loads(FACTS.read_text()))


def save_facts(frameworks: dict[str, dict[str, Any]]) -> None:
    """A recipe a line."""
    parts = []
    for name, entry in sorted(frameworks.items()):
        rows = ",\n".join(json.dumps(facts, ensure_ascii=False) for facts in entry["recipes"])
        parts.append(f'{json.dumps(name)}: {{"commit": {json.dumps(entry["commit"])}, "recipes": [\n{rows}\n]}}')
    FACTS.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def load_outcomes() -> dict[str, dict[str, list[str]]]:
    """By job, and by what was shared: kind and reason."""
    return dict(json.loads(OUTCOMES.read_text())) if OUTCOMES.exists() else {}


def save_outcomes(found: dict[str, dict[str, list[str]]]) -> None:
    """A job a line."""
    lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(found.items()))
    OUTCOMES.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def all_jobs() -> dict[Job, int]:
    """Distinct jobs and how many recipes become each, the most frequent first."""
    made = (job_of(facts) for entry in load_facts().values() for facts in entry["recipes"])
    return dict(Counter(job for job in made if isinstance(job, Job)).most_common())


def outcome_of(facts: Facts, outcomes: dict[str, dict[str, list[str]]]) -> tuple[str, str]:
    """Kind, of `KINDS`, and reason of a recipe."""
    job = job_of(facts)
    if isinstance(job, str):
        kind, _, why = job.partition(": ")
        return (kind, why) if kind in KINDS else ("not run", job)
    entry = outcomes.get(str(job))
    if entry is None:
        return "not run", "its job was not run"
    kinds = {sharing: tuple(outcome) for sharing, outcome in entry.items()}
    bad = [why for kind, why in kinds.values() if kind in ("wrong", "obscure")]
    if bad:
        return "wrong", bad[0]
    exact = [sharing for sharing, (kind, _) in kinds.items() if kind == "exact"]
    if exact:
        in_64_bits = ", judged in 64 bits" if any(why for kind, why in kinds.values() if kind == "exact") else ""
        return "exact", ("tokens and batches" if len(exact) == 2 else f"{exact[0]} alone") + in_64_bits
    refused = [why for kind, why in kinds.values() if kind == "refused"]
    return ("refused", _brief(refused[0])) if refused else ("not run", _brief(next(why for _, why in kinds.values())))


def _brief(why: str) -> str:
    """The reason of a refusal without names of classes and remedies."""
    if "computes something else when it is split" in why:
        return "by the self-check, at the first batch"
    if "Sequence parallelism does not support attention layers of type ['linear_attention']" in why:
        return "by accelerate: sequence parallelism with linear-attention layers"
    first = why.partition(" cannot be split over the sequence: - ")[2] or why
    first = re.split(r" - |;|, where|\. ", first)[0].rstrip(".")
    first = re.sub(r"^layers? of type .*", "layers of a type that is not supported", first)
    first = re.sub(r"\blayer \S+( \(\w+\))?", "a layer", first)
    return re.sub(r"\b[A-Z]\w+(Model|Decoder|CausalLM|Generation|Classification)(\.forward)?\b", "the model", first)[
        :200
    ].replace("|", "/")


MIN_LISTED = 3  # recipes with one reason; rarer reasons are not on the page, but those of refusals are


def render(*, with_names: bool = False) -> str:
    """Return the counts and the reasons of outcomes; ``with_names`` adds rare reasons, and every recipe by name."""
    frameworks, outcomes = load_facts(), load_outcomes()
    counts: Counter[tuple[str, str]] = Counter()
    reasons: Counter[tuple[str, str]] = Counter()
    listed: dict[str, dict[tuple[str, str], list[str]]] = {name: defaultdict(list) for name in NAMES}
    other_form: Counter[str] = Counter()
    for name in NAMES:
        for facts in frameworks[name]["recipes"]:
            kind, why = outcome_of(facts, outcomes)
            why = why.replace("the framework's own", f"{NAMES[name]}'s own")
            counts[name, kind] += 1
            reasons[kind, why] += kind != "trains nothing"
            listed[name][kind, why].append(_short(facts["path"]))
            if kind == "exact":
                other_form.update(set(replaced(facts)))
    lines = ["| framework | commit | " + " | ".join(KINDS) + " | all |", "|---" * (len(KINDS) + 3) + "|"]
    for name, words in NAMES.items():
        of_kind = [counts[name, kind] for kind in KINDS]
        cells = [words, f"`{frameworks[name]['commit'][:9]}`", *map(str, of_kind), str(sum(of_kind))]
        lines.append(f"| {' | '.join(cells)} |")
    totals = [sum(counts[name, kind] for name in NAMES) for kind in KINDS]
    lines.append(f"| all | | {' | '.join(map(str, [*totals, sum(totals)]))} |")
    reason_list: list[str] = []
    for kind in KINDS:
        of_kind = sorted(((n, why) for (k, why), n in reasons.items() if k == kind and n), reverse=True)
        all_of_kind = with_names or kind in ("exact", "refused", "wrong")
        shown = [(number, why) for number, why in of_kind if all_of_kind or number >= MIN_LISTED]
        reason_list += [f"* {number} {kind}: {why}" for number, why in shown]
        if num_others := sum(number for number, _ in of_kind) - sum(number for number, _ in shown):
            reason_list.append(f"* {num_others} {kind}: other reasons")
    lines += ["", f"The recipes become {len(all_jobs())} distinct jobs."]
    lines += ["", folded("Outcomes by reason", "\n".join(["", "", *reason_list, "", ""]))]
    replacements = f"Replaced in exact recipes: {_counted(other_form)}."
    lines += ["", folded("Replaced settings", f"\n\n{replacements}\n\n")]
    for name, words in NAMES.items() if with_names else ():
        rows = [
            f"* **{f'{kind}: {why}' if why else kind}**: {', '.join(sorted(paths))}"
            for (kind, why), paths in sorted(listed[name].items(), key=lambda entry: KINDS.index(entry[0][0]))
        ]
        lines += ["", folded(f"The recipes of {words}", "\n".join(["", "", *rows, "", ""]))]
    return "\n".join(lines)


def with_lists(page: str) -> str:
    """The page with its counts and lists of recipes replaced."""
    place = r"(<!-- begin recipes -->\n).*?(<!-- end recipes -->)"
    text, count = re.subn(place, lambda match: f"{match[1]}{render()}\n{match[2]}", page, flags=re.DOTALL)
    assert count == 1, f"{PAGE.name} has {count} places for the recipes"
    return text


def _short(path: str) -> str:
    return path.removeprefix("examples/").replace("|", "/").replace("_", r"\_")


def _counted(counter: Counter[str]) -> str:
    return (
        ", ".join(
            f"{name} ({number})" for name, number in sorted(counter.items(), key=lambda item: (-item[1], item[0]))
        )
        or "none"
    )


def unsaid(outcomes: Iterable[str]) -> set[str]:
    """Outcomes of jobs that no recipe becomes any more."""
    return {*outcomes} - {str(job) for job in all_jobs()}
