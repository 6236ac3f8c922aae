"""The surface of the frameworks: what is installed is what was recorded, and a planted change is seen."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from textwrap import dedent

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ds_hetero.engine.framework_source import ABSENT, Source, accepts_calls_of, differences, installed
from ds_hetero.engine.surface import expect_known_surface, nearest_release, read_record
from ds_hetero.errors import VersionError
from tests.framework_surface import (
    NAMES,
    TESTS,
    is_private,
    listed_names,
    names_of,
    of_torch,
    private_words,
    release_of,
    stand_for,
)
from tests.support import ROOT

FILES = {
    "__init__.py": "from .engine import *\nfrom . import comm\n",
    "comm.py": "def send(tensor, dst): ...\n",
    "base.py": '''
        class Base:
            def __init__(self, config):
                self._state = {}

            def step(self, closure: object = None) -> None:
                """A docstring."""
                return closure
    ''',
    "engine.py": """
        from other_package import outside
        from .base import Base

        class Engine(Base):
            def __reduce(self, *args, **kwargs):
                pass

            def setup(self):
                class Hook:
                    pass

        OldName = Engine
        OldName.extra = 1
        engine = Engine()
    """,
}


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return _write(tmp_path / "framework", FILES)


def _write(folder: Path, files: dict[str, str]) -> Source:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(dedent(text))
    return Source(folder)


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("framework.base:Base.step", "(self, closure=None)"),
        ("framework.engine:Engine.step", "(self, closure=None)"),  # of a base in another file
        ("framework:Engine.step", "(self, closure=None)"),  # by a star import
        ("framework.engine:OldName.step", "(self, closure=None)"),  # by another name
        ("framework.engine:engine.step", "(self, closure=None)"),  # of an object
        ("framework.engine:Engine._Engine__reduce", "(self, *args, **kwargs)"),  # as it is called from outside
        ("framework.comm:send", "(tensor, dst)"),
        ("framework.base:Base", "class(self, config)"),
    ],
)
def test_a_function_or_class_is_found_with_its_signature(source: Source, name: str, signature: str) -> None:
    assert source.surface([name])[name].startswith(signature)


@pytest.mark.parametrize(
    "name",
    [
        "framework.base:Base._state",  # set in a method
        "framework.engine:Engine.Hook",  # defined in a method
        "framework.engine:outside",  # of another package
        "framework:comm",  # a module
    ],
)
def test_what_has_no_signature_is_found(source: Source, name: str) -> None:
    assert source.surface([name])[name] != ABSENT


@pytest.mark.parametrize(
    "name",
    ["framework.base:Base.walk", "framework.base:send", "framework.nowhere:send", "framework:Engine.step.deeper"],
)
def test_what_does_not_exist_is_absent(source: Source, name: str) -> None:
    assert source.surface([name]) == {name: ABSENT}


def test_a_planted_change_is_named_and_comments_are_none(source: Source, tmp_path: Path) -> None:
    name = "framework.base:Base.step"
    base = dedent(FILES["base.py"])

    def changed(number: int, old: str, new: str) -> list[str]:
        assert old in base
        (tmp_path / str(number)).mkdir()
        other = _write(tmp_path / str(number) / "framework", {**FILES, "base.py": base.replace(old, new)})
        return differences(source.surface([name]), other.surface([name]))

    assert changed(0, "A docstring.", "Another one.") == []
    assert changed(1, "closure: object = None", "closure: int = None") == []
    assert changed(2, "return closure", "return None") == [f"{name}: body changed"]
    (line,) = changed(3, "closure: object = None", "closure, scale")
    assert line.startswith(f"{name}: (self, closure=None)") and "-> (self, closure, scale)" in line
    (line,) = changed(4, "def step", "def walk")
    assert line.endswith(f"-> {ABSENT}")


@pytest.mark.parametrize("package", NAMES)
def test_what_is_installed_is_what_was_recorded(package: str) -> None:
    pytest.importorskip(package)
    record, release = read_record()[package], release_of(package)
    assert release in record, f"run python -m tests.framework_surface --record {package}=={release}, and look at --diff"
    assert differences(record[release], installed(package).surface(names_of(package))) == []


@pytest.mark.parametrize("package", NAMES)
def test_releases_that_are_admitted_have_every_name(package: str) -> None:
    names = NAMES[package]
    listed = {name for name in names.PRIVATE_NAMES if re.match(rf"{package}[.:]", name)}
    for release, surface in read_record()[package].items():
        if Version(release) in SpecifierSet(names.WORKS):
            assert [name for name in listed if surface.get(name, ABSENT) == ABSENT] == [], release


@pytest.mark.parametrize(
    ("new", "is_accepted"),
    [
        ("(self, loss, scale=1)", True),
        ("(self, loss, scale=1, *, name=None, **kwargs)", True),
        ("(*args, **kwargs)", True),
        ("(self, loss, scale)", False),  # which had a default
        ("(self, scale=1, loss=None)", False),
        ("(self, loss)", False),
        ("(self, loss, scale=1, *, name)", False),
        ("value", False),
        ("absent", False),
    ],
)
def test_a_signature_that_takes_all_calls_is_told_from_one_that_does_not(new: str, is_accepted: bool) -> None:
    assert accepts_calls_of("(self, loss, scale=1)", new) is is_accepted


def test_a_release_that_nobody_tried_is_refused_by_what_changed(tmp_path: Path) -> None:
    """The installed DeepSpeed under a number that is not on record: as it is, and with a method changed."""
    folder = tmp_path / "deepspeed"
    shutil.copytree(installed("deepspeed").folder, folder, ignore=shutil.ignore_patterns("ops", "__pycache__"))
    file = folder / "runtime" / "engine.py"
    text, name = file.read_text(), "deepspeed.runtime.engine:DeepSpeedEngine.save_checkpoint"
    (parameters,) = re.findall(r"def save_checkpoint\(self, (.*)\):\n", text)

    def changed(to: str) -> tuple[str, ...]:
        file.write_text(text.replace(f"def save_checkpoint(self, {parameters})", to))
        return expect_known_surface("deepspeed", "999.0", Source(folder))

    assert changed(f"def save_checkpoint(self, {parameters})") == ()
    assert changed(f"def save_checkpoint(self, {parameters}, more=None)") == (name,)
    for to in (f"def save_checkpoint(self, more, {parameters})", "def save_all(self)"):
        with pytest.raises(VersionError, match=rf"999.0 was not tried, and differs .*\n  {re.escape(name)}: "):
            changed(to)


def test_a_release_on_record_that_was_not_tried_is_announced_by_what_changed() -> None:
    """transformers 5.24 calls ``past_key_values`` ``cache``."""
    changed = expect_known_surface("transformers", "5.24.0", tested=">=5.6,<5.24")
    assert "transformers.masking_utils:create_causal_mask" in changed
    assert "transformers.models.llama.modeling_llama:LlamaModel.forward" in changed
    assert expect_known_surface("transformers", "5.24.0", tested=">=5.6,<5.25") == ()


def test_the_nearest_release_is_the_newest_that_is_not_newer() -> None:
    record: dict[str, dict[str, str]] = {"0.18.9": {}, "0.19.10": {}, "0.19.2": {}}
    nearest = {
        release: nearest_release(record, release) for release in ("0.1", "0.19.1", "0.19.9", "0.19.10", "1.0rc1")
    }
    assert nearest == {
        "0.1": "0.18.9", "0.19.1": "0.18.9", "0.19.9": "0.19.2", "0.19.10": "0.19.10", "1.0rc1": "0.19.10"
    }  # fmt: skip


def test_tests_that_stand_for_names_exist() -> None:
    paths = {path for paths in TESTS.values() for path in paths}
    assert [path for path in paths if not (ROOT / path).exists()] == []
    for package in NAMES:
        assert all(map(stand_for, names_of(package)))


MAX_PRIVATE = 119  # none may be added without one that goes
OF_PYTHON = {"_asdict", "_current_frames", "_exit", "_fields", "_getframe"}  # documented, with their underscores
OF_OTHERS = {
    *("_run_exitfuncs", "_shutdown"),  # of Python: `ds_hetero.elastic.node.rendezvous.PRIVATE_NAMES`
    *(f"_flash_attn_{name}" for name in ("backward", "forward", "varlen_backward", "varlen_forward")),
    "_distributed",  # of datasets: `ds_hetero.engine.known_loaders`
}
ENDS_OF_WORDS = {"_RatioBackward", "_in_forward", "_into_tensor", "_s", "_single"}  # strings that name nothing private
# torch's notes on autograd document these attributes of nodes: https://docs.pytorch.org/docs/stable/notes/autograd.html
SAVED = ("_saved_", "_raw_saved_")


def test_every_private_name_in_the_source_is_listed() -> None:
    assert _unlisted(ROOT / "ds_hetero") == {}


def test_a_private_name_that_is_not_listed_is_found(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(
        "import torch\nfrom torch._inductor import config\n\n\n"
        "def step(engine, _own=0):\n"
        "    engine._step_applied = torch._running_mean(getattr(engine, '_gas'), engine._own)\n"
    )
    line = ["planted.py:6"]
    assert _unlisted(tmp_path) == {
        "_gas": line, "_inductor": ["planted.py:2"], "_running_mean": line, "_step_applied": line
    }  # fmt: skip


def _unlisted(package: Path) -> dict[str, list[str]]:
    listed = {part for name in (*listed_names(), *of_torch.IN_SOME_BUILDS) for part in re.split("[.:]", name)}
    mangled = tuple(part for part in listed if part.startswith("__") and not part.endswith("__"))
    known = listed | OF_PYTHON | OF_OTHERS | ENDS_OF_WORDS
    return {
        word: places
        for word, places in private_words(package).items()
        if word not in known
        and not word.startswith((*SAVED, "_ds_hetero_", "_parallel_"))
        and not word.endswith(mangled)
    }


def test_private_names_are_few() -> None:
    private = {name for name in listed_names() if is_private(name)}
    assert len(private) <= MAX_PRIVATE, len(private)
