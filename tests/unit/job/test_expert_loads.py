"""Ranks whose experts get more rows than planned are named, with shares that balance them."""

from __future__ import annotations

from ds_hetero.job.expert_loads import ExpertLoads, ReplicaShares

EVEN = [[[10, 10], [10, 10]], [[10], [10]]]  # by rank, layer and expert of the rank
HOT = [[[10, 10], [10, 10]], [[40], [20]]]
EQUAL = (1.0, 1.0)


def loads(weights: tuple[float, ...] = (2.0, 1.0)) -> ExpertLoads:
    return ExpertLoads(list, [ReplicaShares((0, 1), (2, 1), weights)])


def test_a_rank_is_named_after_two_observations_and_no_more_after_two() -> None:
    observer = loads()
    assert [observer.observe(step, HOT) for step in (1,)] == [[]]
    (line,) = observer.observe(2, HOT)
    assert line == (
        "step 2: the experts of rank 1 compute 60% of all rows, planned were 33%; expert 2 alone gets 60%. "
        '"heterogeneity": {"experts": [3, 0]} would save 17% of the experts\' time, where the memory of the ranks '
        "takes them; resume a checkpoint with it."
    )
    assert observer.observe(3, HOT) == [] and observer.observe(4, EVEN) == []
    assert observer.observe(5, EVEN) == [
        "step 5: the experts of rank 1 get about the rows that were planned again",
    ]
    assert observer.to_dict() == {
        "experts": [2, 1],
        "planned_share": [2 / 3, 1 / 3],
        "share": [200 / 420, 220 / 420],
        "rows": [[50, 50, 140], [50, 50, 80]],
    }


def test_loads_as_planned_are_not_named() -> None:
    observer = loads()
    assert [observer.observe(step, EVEN) for step in range(5)] == [[]] * 5


def test_a_single_expert_that_no_share_balances_is_named_with_the_coefficient_of_the_router() -> None:
    observer = ExpertLoads(list, [ReplicaShares((0, 1), (1, 1), EQUAL)])
    hot = [[[10]], [[90]]]
    observer.observe(1, hot)
    (line,) = observer.observe(2, hot)
    assert "expert 1 alone gets 90%. No other shares save 10% of the experts' time. A larger router_aux_loss" in line


def test_replicas_are_judged_each_by_itself_and_keep_the_shares_of_the_others() -> None:
    """Ranks 0 and 2 are one replica, ranks 1 and 3 the other."""
    replicas = [ReplicaShares((0, 2), (2, 2), EQUAL), ReplicaShares((1, 3), (3, 1), (3.0, 1.0))]
    observer = ExpertLoads(list, replicas)
    rows = [[[60, 20]], [[10, 10, 10]], [[10, 10]], [[10]]]
    assert observer.observe(1, rows) == []
    (line,) = observer.observe(2, rows)
    assert '{"experts": [1, 3, 3, 1]} would save 25%' in line
    assert observer.to_dict()["share"] == [0.8, 0.75, 0.2, 0.25]
