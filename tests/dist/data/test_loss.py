"""Loss and gradients of tokens spread over ranks equal those of one process, averaged as DeepSpeed does it."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor.debug import CommDebugMode

from ds_hetero.engine.model_calls import ModelCalls
from ds_hetero.runtime.data.shards import read_batch
from ds_hetero.runtime.loss import count_items, cross_entropy_sum, sequence_parallel_loss
from ds_hetero.runtime.replica import make_replica
from ds_hetero.values.placement import stream_placement
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Group, Schedule
from tests.support import run_ranks

VOCABULARY = 13
ONE_REPLICA = [((0, 3), (1, 2), (2, 4))]  # ranks and their token weights
EQUAL_REPLICAS = [((0, 2), (1, 1)), ((2, 1), (3, 1))]
UNEQUAL_REPLICAS = [((0, 3), (1, 0), (2, 1)), ((3, 1),)]


class SumOverReplica(torch.autograd.Function):
    """What attention does to gradients, in short: every rank's output depends on every rank's input."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Model(torch.nn.Module):
    """Logits from each token and from the sum over the sequence."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(VOCABULARY, 6, dtype=torch.float64)
        self.head = torch.nn.Linear(6, VOCABULARY, dtype=torch.float64)

    def forward(self, input_ids, length, group=None):
        x = self.embed(input_ids)
        total = x.sum(dim=1, keepdim=True)
        if group is not None:
            total = SumOverReplica.apply(total, group)
        return self.head(torch.tanh(x + total / length))


def make_schedules(replicas):
    return [
        Schedule(
            num_heads=4,
            num_kv_heads=4,
            groups=tuple(Group(ranks=(rank,), tokens=(weight,), heads=(4,)) for rank, weight in ranks),
        )
        for ranks in replicas
    ]


def make_batch(replica, micro_batch, valid_from=0):
    """Lengths and numbers of valid labels differ between replicas and micro-batches."""
    generator = torch.Generator().manual_seed(10 * replica + micro_batch)
    length = 9 + 5 * replica + 3 * micro_batch
    ids = torch.randint(VOCABULARY, (2, length), generator=generator)
    labels = ids.clone()
    labels[:, :valid_from] = -100
    labels[1, : length // (2 + micro_batch)] = -100
    return {"input_ids": ids, "labels": labels}


def whole_loss(model, batch):
    """Sum over tokens and their number, in one process."""
    logits = model(batch["input_ids"], batch["input_ids"].shape[1])[:, :-1]
    labels = batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), labels.ne(-100).sum()


def shard_loss(model, batch, replica, reduction="sum"):
    whole = read_batch(batch)
    shard = whole.shard(stream_placement(replica.schedule, whole.length).intervals(replica.rank))
    logits = model(shard["input_ids"], whole.length, replica.sp_group)
    num_tokens = shard["shift_labels"].ne(-100).sum()
    if reduction == "sum":
        return cross_entropy_sum(logits, shard["shift_labels"]), num_tokens
    return F.cross_entropy(logits.flatten(0, 1), shard["shift_labels"].flatten()), num_tokens


def average_gradients(model):
    """DeepSpeed's reduction, where it is shown no sequence parallelism."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def assert_same_gradients(model, reference):
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-12, atol=1e-14)


# --- against one process ---------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [ONE_REPLICA, EQUAL_REPLICAS, UNEQUAL_REPLICAS], ids=["one", "equal", "unequal"])
def test_loss_and_gradients_equal_one_process(replicas):
    run_ranks(_check_loss, sum(map(len, replicas)), replicas)


def _check_loss(rank, replicas):
    replica = make_replica(Plan.of_replicas(make_schedules(replicas)))
    _check_token_mean(replica, micro_batches=3)
    _check_mean_over_replicas(replica)
    _check_without_labels(replica)


def _check_token_mean(replica, micro_batches):
    """Accumulated over micro-batches of unequal token counts, weighed by tokens."""
    model, reference = Model(), Model()
    mine = [make_batch(replica.replica_id, m) for m in range(micro_batches)]
    num_items = count_items(sum(shard_loss(model, batch, replica)[1] for batch in mine), torch.device("cpu"))
    shown = torch.zeros((), dtype=torch.float64)
    for batch in mine:
        loss_sum, num_tokens = shard_loss(model, batch, replica)
        with CommDebugMode() as comms:
            loss = sequence_parallel_loss(loss_sum, num_tokens, replica, num_items)
        assert comms.get_total_counts() == 1
        loss.backward()
        shown += loss.detach()
    average_gradients(model)
    dist.all_reduce(shown)

    everything = [make_batch(r, m) for r in range(replica.num_replicas) for m in range(micro_batches)]
    sums, counts = zip(*(whole_loss(reference, batch) for batch in everything), strict=True)
    assert num_items == sum(counts)
    expected = sum(sums) / sum(counts)
    expected.backward()
    torch.testing.assert_close(shown / dist.get_world_size(), expected.detach(), rtol=1e-13, atol=0)
    assert_same_gradients(model, reference)


def _check_mean_over_replicas(replica):
    """Without num_items every replica weighs the same; a rank without valid labels, whose mean is NaN, counts as 0."""
    model, reference = Model(), Model()
    loss_mean, num_tokens = shard_loss(model, make_batch(replica.replica_id, 0, valid_from=6), replica, "mean")
    counts = [torch.zeros_like(num_tokens) for _ in range(replica.sp_size)]
    dist.all_gather(counts, num_tokens, group=replica.sp_group)
    if replica.sp_size > 2:
        assert 0 in counts
    assert loss_mean.isnan() == (num_tokens == 0)
    loss = sequence_parallel_loss(loss_mean * num_tokens, num_tokens, replica)
    loss.backward()
    average_gradients(model)

    means = []
    for r in range(replica.num_replicas):
        total, count = whole_loss(reference, make_batch(r, 0, valid_from=6))
        means.append(total / count)
    torch.testing.assert_close(loss.detach(), means[replica.replica_id].detach(), rtol=1e-13, atol=0)
    (sum(means) / len(means)).backward()
    assert_same_gradients(model, reference)


def _check_without_labels(replica):
    """Replica 0 has nothing to learn: loss 0, and only the others' gradients."""
    model, reference = Model(), Model()
    batches = [make_batch(r, 0, valid_from=99 if r == 0 else 0) for r in range(replica.num_replicas)]
    loss_sum, num_tokens = shard_loss(model, batches[replica.replica_id], replica)
    loss = sequence_parallel_loss(loss_sum, num_tokens, replica)
    loss.backward()
    average_gradients(model)
    assert loss.item() == 0 if replica.replica_id == 0 else loss.item() > 0

    means = [total / count.clamp(min=1) for total, count in (whole_loss(reference, batch) for batch in batches)]
    (sum(means) / len(means)).backward()
    assert_same_gradients(model, reference)
    num_items = count_items(num_tokens, torch.device("cpu"))
    assert torch.isfinite(sequence_parallel_loss(loss_sum.detach(), num_tokens, replica, num_items))


def test_half_precision_losses_are_added_in_double_and_equal_on_every_rank():
    values = run_ranks(_half_precision, 3)
    assert values[0] == values[1] == values[2] == ("torch.float32", pytest.approx(2.5, rel=1e-7))


def _half_precision(rank):
    replica = make_replica(Plan.of_replicas(make_schedules([((0, 1), (1, 1), (2, 1))])))
    many = 2**24 + 1  # not a float32
    loss = sequence_parallel_loss(torch.tensor(2.5 * many), many, replica)
    return str(loss.dtype), loss.item()


def test_terms_of_a_whole_model_add_up_over_micro_batches_as_its_loss_does():
    run_ranks(_check_terms_of_a_whole_model, 2)


def _check_terms_of_a_whole_model(rank):
    """Every rank runs its own batches whole: `handle.mean` with ``num_items`` is of all tokens of the step."""
    model, reference = Model(), Model()
    calls = ModelCalls(model)
    micro_batches = 2
    num_items = count_items(
        sum(calls.count_labels(make_batch(rank, m)) for m in range(micro_batches)), torch.device("cpu")
    )
    for m in range(micro_batches):
        batch = make_batch(rank, m)
        calls.mean(_log_normalizers(model, batch), batch, None, num_items).backward()
    average_gradients(model)

    total = 0.0
    for r in range(2):
        for m in range(micro_batches):
            batch = make_batch(r, m)
            is_counted = F.pad(batch["labels"][:, 1:], (0, 1), value=-100).ne(-100)
            total = total + _log_normalizers(reference, batch)[is_counted].sum()
    (total / num_items).backward()
    assert_same_gradients(model, reference)


def _log_normalizers(model, batch):
    """[B, s], what a z-loss is the mean of."""
    return model(batch["input_ids"], batch["input_ids"].shape[1]).logsumexp(-1)
