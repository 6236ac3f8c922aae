"""A module's docstring has one title: the file has one subject.

The title is the first paragraph. Later paragraphs explain it, in sentences. A paragraph that begins with a noun phrase
("Adapters beside frozen weights.") or with a clause without a head ("Which ranks trade.") is a second title: such a
file was glued from two, and is to be taken apart, not to be reworded. A second "Dimension key:" is a sign of the same.
"""

from __future__ import annotations

import ast
import re

import pytest

from tests.unit.test_package import TREES

# Modules that still have two subjects. The list only shrinks: who takes a module apart removes its line.
TWO_SUBJECTS: frozenset[str] = frozenset()

# Finite verbs that docstrings of modules use. A sentence whose verb is missing here is taken for a title: add the verb.
_VERBS = """
    is are was were has have had do does did can cannot may might must will would could should add adds agree agrees
    align aligns announce announces apply ask asks assume assumes become becomes begin begins belong belongs bring
    brings call calls carry carries come comes compute computes consists contain contains copies crosses decide
    decides depend depends die dies differ differs divide divides exist exists expect expects express fall falls
    find finds fills fits flatten flattens follow follows gather gathers get gets give gives go goes grow grows hides
    hold holds imply implies import imports iterate judge judges keep keeps know knows lack lacks lay lays learn learns
    leave leaves let lets lie lies make makes mean means meet meets merge merges own owns pack packs pay pays
    predict predicts propose proposes prove put puts raise raises reach reaches read reads refuse refuses rely
    relies remove removes replace replaces return returns say says search searches see sees send sends separate
    separates serve serves shards skip skips solve solves stay stays take takes tell tells tie ties train trains travel
    travels use uses walk walks want wants weigh weighs write writes
"""
VERBS = frozenset(_VERBS.split())
# Verbs that are nouns, too: they count where no word of the second list stands before them.
_VERBS_AND_NOUNS = """
    answer answers change changes cost costs count counts cut cuts draw draws end ends fill fit group groups list
    lists load loads look looks mark marks move moves name names need needs number numbers pass passes post posts
    round rounds run runs save saves set sets share shares show shows split splits stand stands start starts step
    steps stop stops store stores sum sums touch touches trade trades turn turns wait waits work works
"""
VERBS_AND_NOUNS = frozenset(_VERBS_AND_NOUNS.split())
_BEFORE_NOUNS = """
    a all an and any are as at be by each every for from has have in is its next no of on one or over same than the
    their these this to two was were with
"""
BEFORE_NOUNS = frozenset(_BEFORE_NOUNS.split())
# Words that begin a clause, which has a verb that is not the sentence's.
_CLAUSES = "because before how if that what whatever when where whether which while who whoever whom whose why"
CLAUSES = frozenset(_CLAUSES.split())
EXPLAINS = (" ", "* ", "- ", "```", "Example:", "Dimension key:", "Source:", "Sources:", "Format:")


@pytest.mark.parametrize(
    "text", ["Adapters beside frozen weights (LoRA), and weights in few bits.", "Which ranks trade."]
)
def test_a_noun_phrase_and_a_clause_without_a_head_are_titles(text):
    assert _is_title(text)


@pytest.mark.parametrize(
    "text", ["A list says the samples of every rank.", "A term that has parameters alone is the same on all ranks."]
)
def test_a_sentence_is_none(text):
    assert not _is_title(text)


def test_a_module_has_one_title() -> None:
    found = {module for module, tree in TREES.items() if len(_titles(tree)) > 1}
    second = {module: _titles(TREES[module])[1:] for module in sorted(found - TWO_SUBJECTS)}
    assert second == {}, "one subject a file: give the second a file of its own"


def test_a_module_has_one_dimension_key() -> None:
    found = {module for module, tree in TREES.items() if _paragraphs(tree, "Dimension key:") > 1}
    assert found - TWO_SUBJECTS == set()


def test_the_list_of_modules_with_two_subjects_shrinks() -> None:
    mended = {
        module
        for module in TWO_SUBJECTS
        if module not in TREES
        or (len(_titles(TREES[module])) == 1 and _paragraphs(TREES[module], "Dimension key:") <= 1)
    }
    assert mended == set(), "remove these from TWO_SUBJECTS"


def _titles(tree: ast.Module) -> list[str]:
    """The title of a module, and what looks like further ones."""
    first, *later = (ast.get_docstring(tree) or "").split("\n\n")
    return [first, *(text for text in later if _is_title(text))]


def _paragraphs(tree: ast.Module, start: str) -> int:
    return sum(text.startswith(start) for text in (ast.get_docstring(tree) or "").split("\n\n"))


def _is_title(paragraph: str) -> bool:
    """Whether a paragraph begins with a sentence that has no verb of its own."""
    is_prose = not paragraph.startswith(EXPLAINS) and not re.match(r"\S+ {2,}", paragraph)
    # What stands in parentheses or is code says nothing of the sentence.
    text = re.sub(r"``.*?``|`.*?`", "X", re.sub(r"\([^()]*\)", "", " ".join(paragraph.split())))
    first = re.split(r"(?<=\.)(?<!Eq\.)(?<!Eqs\.)\s", text)[0]
    head = re.split(r":\s", first)[0]  # "Verdicts: what a check says of one rank."
    words = re.findall(r"[a-z'-]+", head.lower())
    continues = text[:1].islower()  # the sentence before a formula or an example
    if not is_prose or continues or paragraph.endswith(":") or not words:
        return False
    verbs = [_is_verb(word, before) for word, before in zip(words, ["a", *words], strict=False)]
    first_clause = next((place for place, word in enumerate(words) if word in CLAUSES), len(words))
    clauses = sum(word in CLAUSES for word in words)
    return sum(verbs) <= clauses and not any(verbs[:first_clause])


def _is_verb(word: str, before: str) -> bool:
    return word in VERBS or (word in VERBS_AND_NOUNS and before not in BEFORE_NOUNS)
