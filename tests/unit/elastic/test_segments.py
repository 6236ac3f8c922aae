from dataclasses import replace

import pytest

from ds_hetero.elastic.segments import (
    Header,
    Save,
    SegmentFile,
    is_genuine,
    is_undamaged,
    parse_header,
    read_header,
    signed,
)

TOKEN = b"t" * 32


def _header(content: bytes, step: int = 7) -> Header:
    save = Save(step=step, start="0001-ab", world_size=3)
    header = Header(job="job", model="m", save=save, rank=1, end_bytes=len(content), index_bytes=0)
    return signed(header, memoryview(content), TOKEN)


def _write(file: SegmentFile, content: bytes, step: int = 7) -> Header:
    room = file.begin(len(content))
    room[:] = content
    room.release()
    header = _header(content, step)
    file.finish(header)
    return header


def test_a_segment_is_whole_from_its_header_on(tmp_path):
    file = SegmentFile(tmp_path / "own-a-A.seg")
    room = file.begin(100)
    assert read_header(file.path) is None
    room[:] = bytes(range(100))
    room.release()
    assert read_header(file.path) is None
    header = _header(bytes(range(100)))
    file.finish(header)
    assert read_header(file.path) == header and is_undamaged(file.path, header, TOKEN)


def test_writing_again_makes_it_dirty_first_and_reuses_its_pages(tmp_path):
    file = SegmentFile(tmp_path / "own-a-A.seg")
    _write(file, bytes(5000))
    size = file.path.stat().st_size
    file.begin(300).release()
    assert read_header(file.path) is None
    header = _write(file, b"x" * 300, step=9)
    assert read_header(file.path) == header and file.path.stat().st_size == size
    file.close()
    again = SegmentFile(file.path)  # of the next process
    assert read_header(file.path) == header
    again.begin(70_000).release()
    assert read_header(file.path) is None and file.path.stat().st_size > size


@pytest.mark.parametrize("before", [b"", _header(b"old", step=3).to_bytes(), _header(b"z" * 400, 999_999).to_bytes()])
def test_a_header_torn_at_every_byte_is_refused(before):
    whole = _header(b"new").to_bytes()
    behind = before[8:] + bytes(4096 - 8 - len(before[8:]))
    for cut in range(8, len(whole)):  # the text is written first, behind eight zeros
        assert parse_header(bytes(8) + whole[8:cut] + behind[cut - 8 :]) is None
    done = whole[8:] + behind[len(whole) - 8 :]
    for cut in range(8):  # then its length and checksum
        torn = whole[:cut] + bytes(8 - cut)
        assert torn == whole[:8] or parse_header(torn + done) is None
    assert parse_header(whole[:8] + done) == _header(b"new")


def test_damage_is_seen(tmp_path):
    file = SegmentFile(tmp_path / "own-a-A.seg")
    header = _write(file, b"content")
    raw = bytearray(file.path.read_bytes())
    raw[4098] ^= 1
    file.path.write_bytes(raw)
    assert read_header(file.path) == header and not is_undamaged(file.path, header, TOKEN)
    file.path.write_bytes(raw[: 4096 + 6])
    assert read_header(file.path) is None  # shorter than it says


@pytest.mark.parametrize(
    "change", [{"rank": 3}, {"rank": True}, {"end_bytes": -1}, {"job": 5}, {"mac": 5}, {"index_bytes": 100}]
)
def test_nonsense_behind_a_right_checksum_is_refused(change):
    fields = {name: getattr(_header(b"abcdef"), name) for name in Header.__slots__}
    assert parse_header(Header(**{**fields, **change}).to_bytes()) is None


def test_no_room_is_an_error_and_not_the_end_of_the_process(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space"):
        SegmentFile(tmp_path / "own-a-A.seg").begin(10)


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 0},
        {"index_bytes": 1},
        {"model": "n"},
        {"job": "b"},
        {"save": Save(step=8, start="0001-ab", world_size=3)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_header_that_was_changed_does_not_have_its_hmac(tmp_path, change):
    header = replace(_header(b"abcdef"), **change)
    assert not is_genuine(header, memoryview(b"abcdef"), TOKEN)


@pytest.mark.parametrize("size", [0, 1, 4 << 20, (4 << 20) + 1, 9 << 20])
def test_each_byte_of_a_content_and_the_token_count(size):
    content = bytearray(size)
    header = signed(_header(content), memoryview(content), TOKEN)
    assert is_genuine(header, memoryview(content), TOKEN)
    assert not is_genuine(header, memoryview(content), b"x" * 32)
    assert not is_genuine(header, memoryview(content + b"0"), TOKEN)
    for place in {0, size // 2, size - 1} if size else ():
        content[place] ^= 1
        assert not is_genuine(header, memoryview(content), TOKEN)
        content[place] ^= 1


def test_chunks_in_another_order_are_another_content():
    one, two = bytes(4 << 20), b"1" * (4 << 20)
    assert not is_genuine(signed(_header(one + two), memoryview(one + two), TOKEN), memoryview(two + one), TOKEN)
