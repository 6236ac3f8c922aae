import numpy as np
import pytest
import torch
from torch import nn

from ds_hetero.elastic.content import Content, read_content
from ds_hetero.elastic.segments import Header, Save, SegmentFile
from ds_hetero.errors import CheckpointError


def _through(tmp_path, content):
    file = SegmentFile(tmp_path / "own-a-A.seg")
    room = file.begin(content.num_bytes)
    content.write_now(room)
    assert content.write_deferred(room)
    room.release()
    save = Save(step=1, start="1", world_size=1)
    sizes = {"end_bytes": content.num_bytes, "index_bytes": content.index_bytes}
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


@pytest.mark.parametrize("has_room", [True, False], ids=["pages in use", "no pages yet"])
def test_whatever_is_not_held_may_change_as_soon_as_control_is_back(tmp_path, has_room):
    state = {
        "tensor": torch.zeros(5000),
        "view": torch.zeros(2, 5000)[1],
        "parameter": nn.Parameter(torch.zeros(5000)),
        "small": torch.zeros(3),
        "list": [1, [2]],
        "array": np.zeros(5000),
        "bytes": bytearray(5000),
    }
    held = torch.zeros(5000)
    content = Content({**state, "held": held}, {held.data_ptr()})
    file = SegmentFile(tmp_path / "own-a-A.seg")
    if has_room:
        with file.begin(content.num_bytes) as room:
            content.write_now(room)
    else:
        content.copy_to_host_now()
    for one in (state["tensor"], state["view"], state["parameter"].data, state["small"], state["array"]):
        one += 1
    state["list"][1][0], state["bytes"][7] = 9, 9
    back, _, _ = _through(tmp_path, content)
    for name in ("tensor", "view", "parameter", "small", "held"):
        assert torch.count_nonzero(back[name]) == 0, name
    assert back["list"] == [1, [2]] and not back["array"].any() and not any(back["bytes"])


@pytest.mark.parametrize("change", [lambda x: x.add_(1), lambda x: x[3:5].fill_(1), lambda x: x.copy_(x + 1)])
def test_a_copy_of_what_was_held_and_changed_all_the_same_does_not_count(change):
    weights, moments, changed = nn.Parameter(torch.zeros(5000)), torch.zeros(5000), set()
    held = {weights.data_ptr(), moments.data_ptr()}
    content = Content({"weights": weights, "moments": moments}, held, changed.update)
    with torch.no_grad():
        change(weights)
    assert not content.write_deferred(memoryview(bytearray(content.num_bytes)))
    assert changed == {weights.data_ptr()}


def test_other_bytes_are_an_error_that_names_the_file(tmp_path):
    _, path, header = _through(tmp_path, Content({"x": 1}))
    path.write_bytes(path.read_bytes()[:4096] + bytes(header.end_bytes))
    with pytest.raises(CheckpointError, match=r"own-a-A.seg cannot be read"):
        read_content(path, header)
