"""What jobs leave in shared memory, and small files where it is full."""

import errno
import json
import os
import subprocess
import sys

import pytest

from ds_hetero.common.text import unlike_bytes_texts
from ds_hetero.elastic.node import place as place_module
from ds_hetero.elastic.node.leftovers import leftovers, lock_as_alive, sweep
from ds_hetero.elastic.node.place import NodePlace
from ds_hetero.elastic.segments import Header, Save, SegmentFile, signed
from ds_hetero.errors import ConfigError

HOLD = """
import sys, time
from ds_hetero.elastic.node.leftovers import lock_as_alive
from ds_hetero.elastic.node.place import NodePlace
lock_as_alive(NodePlace.of(sys.argv[1], "n0"))
print("holds", flush=True)
sys.stdin.read()
"""


def _owner(job):
    """A process of a node that lives until it is killed."""
    owner = subprocess.Popen([sys.executable, "-c", HOLD, job], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout.readline() == b"holds\n"
    return owner


@pytest.fixture
def node(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_HETERO_ELASTIC_SHM", str(tmp_path))

    def make(job, *, has_saves=False, has_ended_well=False):
        """A node whose processes have ended."""
        with _owner(job) as owner:
            place = NodePlace.of(job, "n0")
            if has_saves:
                file = SegmentFile(place.folder / "own-n0-0-A.seg")
                with file.begin(7) as room:
                    room[:] = b"content"
                    save = Save(step=1, start="1", world_size=1)
                    header = Header(job=job, model="m", save=save, rank=0, end_bytes=7, index_bytes=0)
                    file.finish(signed(header, room, b"t" * 32))
                file.close()
            if has_ended_well:
                place.write("done-n0-0.json", {"step": 3})
            owner.kill()
        return place

    return make


def test_of_jobs_that_have_ended_what_nobody_needs_is_deleted_and_the_rest_when_room_is_needed(node):
    gone, well, kept = node("gone"), node("well", has_saves=True, has_ended_well=True), node("kept", has_saves=True)
    own = NodePlace.of("own", "n0")
    lock_as_alive(own)
    assert {one.job for one in sweep(own)} == {"gone", "well"}
    assert not gone.folder.parent.exists() and not well.folder.parent.exists() and kept.folder.exists()
    (left,) = leftovers(own)
    assert (left.job, left.has_saves) == ("kept", True) and left.num_bytes >= 65536
    assert [one.job for one in sweep(own, with_saves=True)] == ["kept"]
    assert own.folder.exists() and leftovers(own) == []


def test_nothing_of_a_job_that_lives_is_deleted_nor_of_this_ones_other_nodes(node, tmp_path):
    other = node("own", has_saves=True)
    own = NodePlace.of("own", "n1")
    lock_as_alive(own)
    with _owner("alive") as owner:
        assert sweep(own, with_saves=True) == []
        assert NodePlace.of("alive", "n0").folder.exists()
        owner.kill()
    assert other.folder.exists()
    (tmp_path / f"ds_hetero-{os.geteuid()}" / "old" / "n0").mkdir(parents=True)  # of an earlier release: no lock
    assert [one.job for one in sweep(own, with_saves=True)] == ["alive"]


def test_small_files_of_a_job_that_has_ended_do_not_speak_to_the_next(tmp_path):
    place = NodePlace(job="job", node="n", folder=tmp_path)
    names = ["broken-3.json", "beat-n-0-0.json", "end-n-0-0.json", "done-n-0.json", "rendezvous-n-0.json"]
    for name in names:
        place.write(name, {})
    (tmp_path / ".beat-n-0-0.json.77.abcd").touch()
    (tmp_path / "own-n-0-0-A.seg").touch()
    place.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["own-n-0-0-A.seg"]


@pytest.fixture
def full(tmp_path, monkeypatch):
    """A node whose shared memory is full after it was made."""
    place = NodePlace(job="job", node="n", folder=tmp_path / "n")
    place.make()
    place.write("beat-n-0-0.json", {"pid": 1})

    def refuse(path, text):
        path.touch()  # a name takes no page
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(place_module, "_write_new", refuse)
    return place


def test_small_files_are_written_when_the_shared_memory_is_full(full):
    for number in range(100):  # again and again, in the pages that are there
        full.write("beat-n-0-0.json", {"pid": number})
        assert full.read("beat-n-0-0.json") == {"pid": number}
    full.write("end-n-0-0.json", {"error": "x" * 3000})
    full.write("broken-4.json", {"reason": "y"})
    assert len(full.read("end-n-0-0.json")["error"]) == 3000 and full.read("broken-4.json") == {"reason": "y"}
    assert not list(full.folder.glob(".*.json.*"))


def test_where_no_page_is_left_the_error_says_so(full):
    for number in range(8):
        full.write(f"end-{number}.json", {})
    with pytest.raises(OSError, match="no page is left in shared memory, which is full"):
        full.write("end-9.json", {})
    with pytest.raises(OSError, match=r"no room for 5,0.. bytes"):
        full.write("end-9.json", {"error": "x" * 5000})
    assert json.loads((full.folder / "end-7.json").read_text()) == {}


@pytest.mark.parametrize(
    ("sizes", "texts"),
    [
        ((3 * 2**30, 5 * 2**30), ("3.00 GiB", "5.00 GiB")),
        ((10_485_760, 10_700_000), ("10.00 MiB", "10.20 MiB")),
        ((10_485_760, 10_485_761), ("10,485,760 bytes", "10,485,761 bytes")),
        ((0, 245_966), ("0 bytes", "245,966 bytes")),
    ],
)
def test_sizes_are_printed_in_a_unit_in_which_they_differ(sizes, texts):
    assert unlike_bytes_texts(*sizes) == texts


def test_a_folder_that_was_swept_amid_the_start_is_made_again(tmp_path, monkeypatch):
    place = NodePlace(job="job", node="n", folder=tmp_path / "again")
    lock_as_alive(place)
    assert (place.folder / ".owner").exists()
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked").chmod(0o777)
    with pytest.raises(ConfigError):
        lock_as_alive(NodePlace(job="job", node="n", folder=tmp_path / "locked"))
