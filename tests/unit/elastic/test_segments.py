import zlib

import pytest

from ds_hetero.elastic.segments import Header, Save, SegmentFile, is_undamaged, parse_header, read_header


def _header(content: bytes, step: int = 7) -> Header:
    save = Save(step=step, start="0001-ab", world_size=3)
    return Header(
        job="job", model="m", save=save, rank=1, end_bytes=len(content), crc32=zlib.crc32(content), index_bytes=0
    )


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
    assert read_header(file.path) == header and is_undamaged(file.path, header)


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
    again.begin(6000).release()
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
    assert read_header(file.path) == header and not is_undamaged(file.path, header)
    file.path.write_bytes(raw[:-1])
    assert read_header(file.path) is None  # shorter than it says


@pytest.mark.parametrize("change", [{"rank": 3}, {"rank": True}, {"end_bytes": -1}, {"job": 5}, {"index_bytes": 100}])
def test_nonsense_behind_a_right_checksum_is_refused(change):
    fields = {name: getattr(_header(b"abcdef"), name) for name in Header.__slots__}
    assert parse_header(Header(**{**fields, **change}).to_bytes()) is None


def test_no_room_is_an_error_and_not_the_end_of_the_process(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space"):
        SegmentFile(tmp_path / "own-a-A.seg").begin(10)
