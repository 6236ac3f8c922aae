"""The mode of forwards: contexts and hooks that end in another order than they began leave each other alone."""

from __future__ import annotations

from ds_hetero.engine.forward_mode import (
    Wanted,
    change_mode,
    forward_mode,
    sharded_calls,
    sharding,
    wanted_results,
)


def test_a_hook_that_ends_inside_of_a_later_context_leaves_what_that_says():
    end_whole_forward = change_mode(is_whole=True)
    with sharding(True):
        end_whole_forward()
        assert forward_mode().takes_shards and not forward_mode().is_whole
        end_compared = change_mode(is_compared=True)
    assert forward_mode().takes_shards is None and forward_mode().is_compared
    end_compared()
    assert not forward_mode().is_compared


def test_a_context_for_shards_takes_the_place_of_a_sharded_call():
    wanted = Wanted(own_outputs=True, logits=False)
    with sharded_calls(wanted):
        assert wanted_results() is wanted
        with sharding(False):
            assert wanted_results() is None
        assert wanted_results() is wanted
    assert wanted_results() is None
