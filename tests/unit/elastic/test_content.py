import zlib

import pytest
import torch
from torch import nn

from ds_hetero.elastic.content import Content, read_content
from ds_hetero.elastic.segments import Header, Save, SegmentFile
from ds_hetero.errors import CheckpointError


def _through(tmp_path, content):
    file = SegmentFile(tmp_path / "own-a-A.seg")
    room = file.begin(content.num_bytes)
    content.write_tensors(room)
    crc = content.write_rest(room)
    assert crc == zlib.crc32(room)
    room.release()
    save = Save(step=1, start="1", world_size=1)
    sizes = {"end_bytes": content.num_bytes, "crc32": crc, "index_bytes": content.index_bytes}
    header = Header(job="j", model="m", save=save, rank=0, **sizes)
    file.finish(header)
    return read_content(file.path, header), file.path, header


def test_a_state_comes_back_to_the_bit(tmp_path):
    big = torch.randn(70, 33)
    state = {
        "bf16": torch.randn(5000).bfloat16(),
        "double": torch.randn(999, dtype=torch.float64),
        "bool": torch.rand(9000) > 0.5,
        "transposed": big.t(),
        "parameter": nn.Parameter(big),
        "tied": big,
        "small": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "nested": [{"step": 3}, ("text", None)],
    }
    back, _, _ = _through(tmp_path, Content(state))
    for name in ("bf16", "double", "bool", "transposed", "tied", "small", "empty"):
        assert torch.equal(back[name], state[name]) and back[name].dtype == state[name].dtype, name
    assert torch.equal(back["parameter"], big) and back["nested"] == state["nested"]
    assert back["parameter"].data_ptr() == back["tied"].data_ptr()
    back["tied"].add_(1)  # it is this process's own


def test_what_may_change_at_once_is_copied_at_once(tmp_path):
    buffer, weights = torch.zeros(5000), torch.zeros(5000)
    content = Content({"buffer": buffer, "weights": weights}, {buffer.data_ptr()})
    buffer.fill_(1)
    weights.fill_(1)  # as a step that did not wait
    back, _, _ = _through(tmp_path, content)
    assert back["buffer"].sum() == 0 and back["weights"].sum() == 5000


def test_other_bytes_are_an_error_that_names_the_file(tmp_path):
    _, path, header = _through(tmp_path, Content({"x": 1}))
    path.write_bytes(path.read_bytes()[:4096] + bytes(header.end_bytes))
    with pytest.raises(CheckpointError, match=r"own-a-A.seg cannot be read"):
        read_content(path, header)
