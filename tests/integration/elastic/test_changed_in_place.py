"""A script that changes everything that is saved, in place, as soon as control is back: a save is of one step."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.elastic.small_model import make_model
from tests.integration.tiny import SMALL_BUCKETS
from tests.support import run_deepspeed

STEPS = 5


SLOW = pytest.mark.slow


@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=SLOW), pytest.param(3, marks=SLOW)])
def test_a_save_is_of_one_step_whatever_the_script_changes_after_it(stage):
    run_deepspeed(_check, 2, stage)


class _State:
    """A running statistic, a queue and a mean of weights, as scripts keep them."""

    def __init__(self):
        self.queue, self.mean = torch.zeros(300, 64), nn.Parameter(torch.zeros(5000))
        self.nested, self.count = {"sums": [torch.zeros(2000)]}, 0

    def tensors(self):
        return [self.queue, self.mean.data, self.nested["sums"][0]]

    def state_dict(self):
        return {"queue": self.queue, "mean": self.mean, "nested": self.nested, "count": self.count}

    def load_state_dict(self, state):
        raise AssertionError


def _check(rank, stage):
    import tempfile
    from pathlib import Path

    import deepspeed

    from ds_hetero.elastic.content import Content, read_content
    from ds_hetero.elastic.node.node_server import NodeServer
    from ds_hetero.elastic.node.place import NodePlace
    from ds_hetero.elastic.node.rounds import RoundRules
    from ds_hetero.elastic.resume import SavesInMemory
    from ds_hetero.elastic.segments import is_undamaged, read_header
    from ds_hetero.elastic.worker import Worker
    from ds_hetero.frameworks.deepspeed.elastic import ElasticEngine, saved_tensors
    from ds_hetero.frameworks.deepspeed.in_memory import parts_in_memory

    model = make_model(width=48)
    model.register_buffer("running", torch.zeros(3000))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, **SMALL_BUCKETS},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    with tempfile.TemporaryDirectory() as folder:
        place = NodePlace(job="job", node=f"n{rank}", folder=Path(folder) / "node")
        place.make()
        worker, end = _worker(Worker, NodeServer, RoundRules, place, rank)
        section = SimpleNamespace(
            elastic=SimpleNamespace(every_steps=1, copies=0, notice_s=25, min_ranks=None, memory_gib=None)
        )
        job = ElasticEngine(engine, worker, SimpleNamespace(section=section))
        job._say = lambda *_, **__: None
        state = _State()
        job.go_on({"state": state}, SavesInMemory(None, {}))
        stock = Content.write_deferred

        def late(content, room):
            time.sleep(0.1)  # as a thread that gets no core
            return stock(content, room)

        Content.write_deferred = late
        batch = torch.arange(32)[None]
        expected = {}
        for step in range(1, STEPS + 1):
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            job.around_step(engine.step)
            with parts_in_memory(engine) as parts:
                expected[step] = [one.clone() for one in saved_tensors(parts)] + [
                    one.clone() for one in state.tensors()
                ]
            job.after_step(step)
            with torch.no_grad(), parts_in_memory(engine) as parts:  # the script's turn
                for one in state.tensors():
                    one += 1
                model.running += 1
                state.count += 1
                if step == STEPS - 1:  # what the engine alone changes, as scripts are not expected to
                    for one in saved_tensors(parts):
                        one.mul_(1.5) if one.is_floating_point() else None
        job.snapshots.wait()
        Content.write_deferred = stock
        saved = {}
        for path in sorted(place.folder.glob("*.seg")):
            header = read_header(path)
            if header is not None:
                assert is_undamaged(path, header, worker.token)
                saved[header.save.step] = read_content(path, header)
        end()
    # Masters and moments were changed while they were copied: that save does not count. ZeRO-0 has none that are held.
    assert set(saved) == ({STEPS - 1, STEPS} if stage == 0 else {STEPS - 2, STEPS})
    for step, content in saved.items():
        parts = list(saved_tensors(content["parts"]))
        objects = list(saved_tensors(content["objects"]["state"]))
        assert content["objects"]["state"]["count"] == step - 1
        for one, other in zip([*parts, *objects], expected[step], strict=True):
            assert torch.equal(one, other), step


def _worker(kind, node_server_kind, rules_kind, place, rank):
    import os
    import socket
    import threading

    os.environ["DS_HETERO_ELASTIC_TOKEN"] = "t" * 32
    worker = kind(place=place, agent=place.node, local_rank=0, round_number=1)
    node_server = node_server_kind(place, worker.token, rules_kind())
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=node_server.serve, args=(listener,), daemon=True)
    thread.start()
    host, port = listener.getsockname()
    place.write("node_server.json", {"host": host, "port": port, "pid": os.getpid()})
    place.write(f"rendezvous-{place.node}.json", {"host": host, "port": port})

    def end():
        node_server.has_ended.set()
        thread.join(5)
        listener.close()
        del os.environ["DS_HETERO_ELASTIC_TOKEN"]

    return worker, end
