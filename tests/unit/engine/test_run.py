"""`python -m ds_hetero.run` runs scripts, modules and installed commands as Python does, and names what it cannot."""

import json
import sys
from pathlib import Path

import pytest

import ds_hetero
from ds_hetero.run import main

SHOW = """
import json, sys
from pathlib import Path
assert __name__ == "__main__"
Path("shown.json").write_text(json.dumps([sys.argv, sys.path[0]]))
"""


@pytest.fixture
def registered(monkeypatch, tmp_path):
    """The times that the engine was registered, in a folder of its own."""
    calls = []
    monkeypatch.setattr(ds_hetero, "register", lambda: calls.append(1))
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(tmp_path)
    return calls


def shown(monkeypatch, *arguments):
    """What a program sees that is run with ``arguments``."""
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    main()
    return json.loads(Path("shown.json").read_text())


def test_a_script_sees_its_arguments_and_its_folder(registered, monkeypatch, tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "train.py").write_text(SHOW)
    argv, first = shown(monkeypatch, "--local_rank=1", "inner/train.py", "--lr", "1")
    assert argv == ["inner/train.py", "--local_rank=1", "--lr", "1"]
    assert first == str(tmp_path / "inner") and registered == [1]


def test_a_module_is_found_from_the_working_directory(registered, monkeypatch, tmp_path):
    (tmp_path / "shows_arguments").mkdir()
    (tmp_path / "shows_arguments" / "__init__.py").touch()
    (tmp_path / "shows_arguments" / "train.py").write_text(SHOW)
    argv, first = shown(monkeypatch, "-m", "shows_arguments.train", "--lr", "1")
    assert argv == [str(tmp_path / "shows_arguments" / "train.py"), "--lr", "1"]
    assert first == str(tmp_path) and registered == [1]


def test_an_installed_command_is_run_as_a_script(registered, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "shows-arguments"
    command.write_text(f"#!{sys.executable}\n{SHOW}")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    argv, _ = shown(monkeypatch, "shows-arguments", "sft")
    assert argv == [str(command), "sft"] and registered == [1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no script was given"),
        (["absent.py"], "'absent.py' is neither a file nor an installed command"),
        (["-m"], "-m has no module after it"),
        (["-m", "absent.inner"], "'absent.inner' is not a module"),
        (["tool"], "is not a Python script"),
    ],
)
def test_what_cannot_be_run_is_named(registered, monkeypatch, tmp_path, capsys, arguments, says):
    (tmp_path / "tool").write_bytes(b"\x7fELF")
    (tmp_path / "tool").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir("/")
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2 and says in capsys.readouterr().err and not registered
