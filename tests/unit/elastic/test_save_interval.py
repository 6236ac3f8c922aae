from ds_hetero.elastic.save_interval import SaveInterval


def _train(interval, cycles, quiet, busy_s, save_s):
    for _ in range(cycles):
        for number, seconds in enumerate(busy_s):
            interval.add_step(seconds, begins=number == 0, is_busy=True)
        interval.save_s = save_s
        for _ in range(quiet):
            interval.add_step(1.0, begins=False, is_busy=False)
    return interval.needed_steps()


def test_the_first_save_comes_at_once():
    assert SaveInterval().needed_steps() == 1


def test_saves_that_delay_nothing_follow_one_another():
    assert _train(SaveInterval(), cycles=3, quiet=2, busy_s=[1.0, 1.0], save_s=1.7) == 2


def test_a_save_that_delays_steps_is_spread_over_so_many_that_it_costs_two_percent():
    # 0.25 s and 0.125 s more than a quiet step: 0.375 s are 2 % of 18.75 s
    assert _train(SaveInterval(), cycles=3, quiet=2, busy_s=[1.25, 1.125], save_s=1.7) == 19


def test_without_a_quiet_step_the_length_of_a_save_decides():
    assert _train(SaveInterval(), cycles=2, quiet=0, busy_s=[2.0], save_s=5.0) == 3


def test_saves_shorter_than_a_step_are_looked_at_before_they_follow_one_another():
    interval = SaveInterval()
    interval.save_s = 0.3  # after each step, which it delays by half
    for _ in range(4):
        interval.add_step(1.5, begins=True, is_busy=True)
    assert interval.needed_steps() == 3  # of which one shows what a step takes
    for _ in range(3):
        interval.add_step(1.5, begins=True, is_busy=True)
        interval.add_step(1.0, begins=False, is_busy=False)
        interval.add_step(1.0, begins=False, is_busy=False)
    assert interval.needed_steps() == 25


def test_saves_that_follow_one_another_are_looked_at_again_in_a_while():
    interval = SaveInterval()
    assert _train(interval, cycles=3, quiet=2, busy_s=[1.0], save_s=0.5) == 1
    for _ in range(99):
        interval.add_step(1.2, begins=True, is_busy=True)
    assert interval.needed_steps() == 1
    interval.add_step(1.2, begins=True, is_busy=True)
    assert interval.needed_steps() == 3
    interval.add_step(1.0, begins=False, is_busy=False)
    assert interval.needed_steps() == 1  # one such run among three does not count
    for _ in range(2):
        for _ in range(100):
            interval.add_step(1.3, begins=True, is_busy=True)
        interval.add_step(1.0, begins=False, is_busy=False)
    assert interval.needed_steps() == 11  # the median of 0, 0, 0.2, 0.3 and 0.3 s


def test_one_slow_step_does_not_count_and_five_minutes_are_the_most():
    interval = SaveInterval()
    _train(interval, cycles=4, quiet=2, busy_s=[1.0], save_s=0.5)
    _train(interval, cycles=1, quiet=2, busy_s=[40.0], save_s=0.5)
    assert interval.needed_steps() == 1
    assert _train(interval, cycles=5, quiet=2, busy_s=[40.0], save_s=0.5) == 300
