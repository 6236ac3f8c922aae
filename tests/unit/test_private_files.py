"""Folders and files that another user could have made; those of another user only where the tests run as root."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ds_hetero.common.private_files import expect_own_folders, make_cache_folder, make_own_folders, open_file, read_text
from ds_hetero.elastic.node.place import NodePlace, token_of
from ds_hetero.errors import ConfigError

NOBODY = 65534
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="plants files as another user: needs root and setpriv"
)


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "shm"
    path.mkdir()
    path.chmod(0o1777)  # as /dev/shm
    for parent in (tmp_path, *tmp_path.parents):  # pytest's are for their user alone; one more where tests run at once
        if parent == Path(tempfile.gettempdir()):
            break
        parent.chmod(parent.stat().st_mode | 0o011)
    return path


def _place(root, job="job"):
    return NodePlace.of(job, "n0", {"DS_HETERO_ELASTIC_SHM": str(root)})


def _own(root):
    return root / f"ds_hetero-{os.geteuid()}"


def _as_nobody(code, *arguments):
    command = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", sys.executable, "-S", "-c", code]
    done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode == 126 or ("Permission denied: " in done.stderr and "python" in done.stderr):
        pytest.skip("another user cannot run this Python")
    assert done.returncode == 0, done.stderr


def test_what_is_made_is_for_its_user_alone_whatever_the_umask(root):
    mask = os.umask(0)
    try:
        place = _place(root)
        place.make()
        place.write("node_server.json", {"host": "h", "port": 1})
    finally:
        os.umask(mask)
    for path in (_own(root), *_own(root).rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert place.address() == ("h", 1)


def _link(root):
    (root / "elsewhere").mkdir()
    _own(root).symlink_to(root / "elsewhere")


def _link_of_job(root):
    (root / "elsewhere").mkdir()
    _own(root).mkdir(0o700)
    (_own(root) / "job").symlink_to(root / "elsewhere")


def _writable(root):
    _own(root).mkdir()
    _own(root).chmod(0o770)


def _writable_job(root):
    _own(root).mkdir(0o700)
    (_own(root) / "job").mkdir()
    (_own(root) / "job").chmod(0o707)


def _plain_file(root):
    _own(root).mkdir(0o700)
    (_own(root) / "job").write_text("")


def _open_root(root):
    root.chmod(0o777)  # others may rename what is in it


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (_link, "is a symbolic link"),
        (_link_of_job, "is a symbolic link"),
        (_writable, "has mode 0770: others can write to it"),
        (_writable_job, "has mode 0707"),
        (_open_root, "other users can rename files in it"),
    ],
)
def test_folders_that_others_could_have_made_are_refused_by_name(root, plant, reason):
    plant(root)
    for call in (lambda: _place(root).make(), lambda: _place(root)):
        with pytest.raises(ConfigError, match=reason) as error:
            call()
        assert str(root) in str(error.value)


def test_a_file_in_place_of_a_folder_is_an_error(root):
    _plain_file(root)
    with pytest.raises(OSError, match="Not a directory"):
        _place(root).make()


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_a_folder_of_another_user_is_refused(root, mode):
    _as_nobody("import os, sys; os.mkdir(sys.argv[1]); os.chmod(sys.argv[1], int(sys.argv[2]))", _own(root), mode)
    with pytest.raises(ConfigError, match=f"is owned by user {NOBODY}, and this process is user 0"):
        _place(root).make()
    assert not (_own(root) / "job").exists()


@needs_root
def test_a_link_of_another_user_to_a_folder_of_this_one_is_refused(root, tmp_path):
    (tmp_path / "home").mkdir(0o700)
    _as_nobody("import os, sys; os.symlink(sys.argv[2], sys.argv[1])", _own(root), tmp_path / "home")
    with pytest.raises(ConfigError, match="symbolic link"):
        _place(root).make()
    assert list((tmp_path / "home").iterdir()) == []


@needs_root
def test_another_user_can_make_nothing_below_a_folder_of_ours(root):
    place = _place(root)
    place.make()
    code = """
import os, sys
for path in (sys.argv[1], os.path.dirname(sys.argv[1]), os.path.dirname(os.path.dirname(sys.argv[1]))):
    for act in (lambda: open(path + "/x.seg", "w"), lambda: os.rename(path, path + "-"), lambda: os.listdir(path)):
        try:
            act()
        except OSError:
            continue
        sys.exit(f"{path} is open")
"""
    _as_nobody(code, place.folder)


@pytest.mark.parametrize("kind", ["link", "hard", "pipe", "folder", "writable"])
def test_files_that_others_could_have_made_are_refused(tmp_path, kind):
    path, other = tmp_path / "own-a-A.seg", tmp_path / "other"
    other.write_bytes(b"x")
    if kind == "link":
        path.symlink_to(other)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "writable":
        path.touch()
        path.chmod(0o622)
    else:
        os.link(other, path)
        other.chmod(0o666)
    with pytest.raises(ConfigError, match=r"own-a-A.seg"):
        open_file(path)
    if kind != "folder":
        with pytest.raises(ConfigError):
            open_file(path, os.O_RDWR | os.O_CREAT)
    assert other.read_bytes() == b"x"


def test_a_missing_folder_is_made_and_checked_only_where_it_is_there(tmp_path):
    expect_own_folders(tmp_path / "none", "a", "b")
    make_own_folders(tmp_path, "a", "b")
    expect_own_folders(tmp_path, "a", "b", "c")
    make_cache_folder(tmp_path / "cache" / "ds_hetero")
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700


@pytest.mark.parametrize("what", ["link", "readable", "folder"])
def test_a_secret_that_others_could_have_read_or_made_is_refused(tmp_path, what):
    variables = {"XDG_CACHE_HOME": str(tmp_path)}
    token_of("job", variables)
    path = tmp_path / "ds_hetero" / "elastic-token"
    if what == "link":
        path.rename(tmp_path / "moved")
        path.symlink_to(tmp_path / "moved")
    elif what == "readable":
        path.chmod(0o640)
    else:
        path.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="DS_HETERO_ELASTIC_TOKEN"):
        token_of("job", variables)


def test_drafts_of_files_that_are_replaced_do_not_follow_links(tmp_path, monkeypatch):
    from ds_hetero.common import atomic_writing

    monkeypatch.setattr(atomic_writing.secrets, "token_hex", lambda _: "1")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f".run.json.{os.getpid()}.1").symlink_to(victim)
    with pytest.raises(FileExistsError):
        atomic_writing.write_whole(tmp_path / "run.json", "{}")
    assert victim.read_text() == "mine"


def test_the_text_of_a_small_file_comes_back(tmp_path):
    Path(tmp_path / "x").write_text("text")
    assert read_text(tmp_path / "x") == "text"
