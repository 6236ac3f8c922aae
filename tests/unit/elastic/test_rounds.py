from ds_hetero.elastic.node.rounds import RoundRules, Rounds

NEW = {"number": 0, "members": []}


class Agent:
    def __init__(self, rounds, name, terms=None):
        self.rounds, self.name, self.heard, self.round_ = rounds, name, [], NEW
        self.info = {"node": name, "address": "here", "terms": terms or {"release": "1"}}
        self.tell = self.heard.append

    def join(self, now_s, **last):
        self.rounds.join(self.name, self.info, last, self.round_, self.tell, now_s)
        self._note()
        return self

    def attach(self, now_s):
        self.rounds.attach(self.name, self.info, self.round_, self.tell, now_s)
        return self

    def leave(self, now_s, **how):
        self.rounds.drop(self.name, self.tell, now_s, **how)

    def _note(self):
        rounds = [message["round"] for message in self.heard if "round" in message]
        self.round_ = rounds[-1] if rounds else NEW

    def last(self):
        self._note()
        return self.heard[-1] if self.heard else None


def _three(rules=None):
    rounds = Rounds(rules or RoundRules(min_agents=2, agents_at_start=3))
    agents = [Agent(rounds, name) for name in "bac"]
    for agent in agents:
        agent.join(0.0)
    for agent in agents:
        agent.last()
    return rounds, *agents


def test_the_first_round_begins_with_all_in_order_of_names():
    rounds = Rounds(RoundRules(min_agents=2, agents_at_start=3))
    first, second = Agent(rounds, "b").join(0.0), Agent(rounds, "a").join(1.0)
    assert first.heard == second.heard == []
    third = Agent(rounds, "c").join(2.0)
    assert [one.last()["round"]["rank"] for one in (second, first, third)] == [0, 1, 2]
    assert third.last()["round"]["members"] == ["a", "b", "c"]


def test_the_first_round_begins_with_the_least_after_a_while():
    rounds = Rounds(RoundRules(min_agents=2, agents_at_start=3, patience_s=30))
    first, _ = Agent(rounds, "a").join(0.0), Agent(rounds, "b").join(1.0)
    rounds.tick(29.0)
    assert first.heard == []
    rounds.tick(31.0)
    assert first.last()["round"]["members"] == ["a", "b"]


def test_a_lost_agent_breaks_the_round_and_the_rest_meets_at_once():
    _, b, a, c = _three()
    c.leave(5.0)
    assert "broken" in a.last() and "broken" in b.last()
    a.join(6.0)
    assert "round" not in a.last()  # b is connected and has not come
    b.join(6.5)
    assert a.last()["round"] == {**b.last()["round"], "rank": 0} and a.last()["round"]["members"] == ["a", "b"]


def test_workers_that_ended_break_the_round_for_all():
    _, b, a, c = _three()
    b.join(5.0)
    assert "broken" in a.last() and "broken" in c.last() and "broken" not in b.last()
    c.join(5.1)
    a.join(5.2)
    assert b.last()["round"]["number"] == 2


def test_a_newcomer_waits_until_the_round_is_broken():
    rounds, b, a, c = _three()
    d = Agent(rounds, "d")
    d.info["card"] = "NVIDIA GeForce RTX 3090"
    d.join(4.0)
    assert d.heard == [] and rounds.newcomers == ["d"]
    assert rounds.newcomer_cards == {"d": ["NVIDIA GeForce RTX 3090"]}
    for agent in (a, b, c):  # they leave at a commit
        agent.join(5.0)
    assert d.last()["round"]["members"] == ["a", "b", "c", "d"] and rounds.newcomers == []


def test_a_newcomer_with_other_terms_is_refused_and_disturbs_nobody():
    rounds, b, a, c = _three()
    d = Agent(rounds, "d", {"release": "2"}).join(4.0)
    assert "'2'" in d.last()["closed"] and "release" in d.last()["closed"]
    assert rounds.closed is None and all("closed" not in agent.last() for agent in (a, b, c))


def test_who_comes_back_on_another_connection_is_not_dropped_with_the_old_one():
    rounds, b, *_ = _three()
    old = b.tell
    b.heard, b.tell = [], lambda message: b.heard.append(message)
    b.attach(3.0)
    rounds.drop("b", old, 3.1)
    assert not rounds.is_broken


def test_too_few_wait_and_then_the_job_ends_with_the_reason():
    rounds, b, a, c = _three(RoundRules(min_agents=2, agents_at_start=3, wait_s=100))
    a.leave(1.0)
    b.leave(1.0)
    c.join(2.0)
    rounds.tick(50.0)
    assert "closed" not in c.last()
    rounds.tick(103.0)
    assert "only 1 agents waited for a round, which needs 2" in c.last()["closed"] and "memory" in c.last()["closed"]


def test_the_least_may_be_raised_while_a_round_runs():
    rounds, _, a, _ = _three()
    rounds.demand(4, 5.0)
    assert "min_ranks 4" in a.last()["broken"]


def test_a_member_that_does_not_come_is_left_behind():
    rounds, b, a, c = _three(RoundRules(min_agents=1, agents_at_start=3, needs_majority=False, rejoin_s=45))
    c.leave(1.0)
    a.join(2.0)
    rounds.tick(40.0)
    assert "round" not in a.last()
    rounds.tick(47.0)
    assert a.last()["round"]["members"] == ["a"] and "closed" in b.last()


def test_a_refusal_ends_the_job_for_all():
    _, b, a, c = _three()
    b.join(3.0, error="ConfigError: no", is_refusal=True, step=-1)
    assert all(agent.last() == {"closed": "ConfigError: no"} for agent in (a, b, c))


def test_one_error_twice_without_a_step_ends_the_job_and_errors_of_one_round_count_once():
    _, b, a, c = _three()
    for agent in (a, b, c):
        agent.join(3.0, error="ValueError: x", step=7)
    assert a.last()["round"]["number"] == 2
    for agent in (b, c):
        agent.last()
    a.join(9.0, error="ValueError: x", step=7)
    assert "twice at step 7" in c.last()["closed"]


def _rounds_lost_to_peers(agents, count, **last):
    for _ in range(count):
        for agent in agents:
            agent.last()
            agent.join(3.0, error="PeerError: rank 1 cannot be reached", is_of_peer=True, **last)
    return [agent.last() for agent in agents]


def test_rounds_that_only_end_in_errors_of_peers_end_the_job():
    _, *agents = _three()
    assert all("round" in said for said in _rounds_lost_to_peers(agents, 9))
    for said in _rounds_lost_to_peers(agents, 1):
        assert "10 rounds" in said["closed"] and "rank 1 cannot be reached" in said["closed"]


def test_rounds_that_end_after_a_step_do_not():
    _, *agents = _three()
    for said in _rounds_lost_to_peers(agents, 25, has_stepped=True):
        assert said["round"]["number"] == 26


def test_rounds_of_other_members_do_not():
    rounds, *agents = _three()
    _rounds_lost_to_peers(agents, 9)
    newcomer = Agent(rounds, "d").join(4.0)
    _rounds_lost_to_peers(agents, 1)
    for said in _rounds_lost_to_peers([*agents, newcomer], 9):
        assert "round" in said


def test_one_error_again_after_further_steps_does_not():
    _, b, a, c = _three()
    for step in (7, 9, 12):
        for agent in (a, b, c):
            agent.join(3.0, error="ValueError: x", step=step)
        for agent in (a, b, c):
            assert "round" in agent.last()


def test_after_a_good_end_nobody_begins_again():
    _, b, a, c = _three()
    a.leave(9.0, is_done=True)
    assert "broken" not in b.last()
    c.join(9.5)
    assert c.last() == {"closed": "the job has ended well"}


def _taken_over(rules, *, num_lost=1):
    _, b, a, c = _three(RoundRules(min_agents=1, agents_at_start=3))
    other = Rounds(rules)
    left = [a, b, c][num_lost:]
    for agent in left:
        agent.rounds, agent.heard = other, [{"round": agent.round_}]
        agent.tell = agent.heard.append
    return other, left


def test_another_server_goes_on_with_a_round_that_agents_bring():
    other, (b, c) = _taken_over(RoundRules(min_agents=1, attach_s=6))
    b.attach(10.0)
    c.attach(11.0)
    other.tick(12.0)
    assert not other.is_broken
    other.tick(17.0)
    assert "a has not come back" in b.last()["broken"] and "broken" in c.last()
    c.join(18.0)
    b.join(18.1)
    assert b.last()["round"]["members"] == ["b", "c"] and b.last()["round"]["number"] == 2


def test_another_server_waits_for_members_that_may_still_come():
    other, (b, c) = _taken_over(RoundRules(min_agents=1, attach_s=6))
    b.join(10.0)
    assert "round" not in b.heard[1:] and other.number == 1
    c.join(12.0)
    other.tick(15.0)
    assert len(b.heard) == 1  # a may be about to come
    other.tick(17.0)
    assert b.last()["round"]["members"] == ["b", "c"]


def test_less_than_half_does_not_go_on_at_another_server_unless_it_was_allowed():
    other, (c,) = _taken_over(RoundRules(min_agents=1, wait_s=50), num_lost=2)
    c.join(10.0)
    other.tick(17.0)
    assert len(c.heard) == 1
    other.tick(61.0)
    assert "only 1 agents waited for a round, which needs 2" in c.last()["closed"]
    allowed, (c,) = _taken_over(RoundRules(needs_majority=False), num_lost=2)
    c.join(10.0)
    allowed.tick(17.0)
    assert c.last()["round"]["members"] == ["c"]


def _rejoin(rounds, agents, lost, now_s=5.0):
    for agent in lost:
        agent.leave(now_s)
    for agent in agents:
        agent.last()
        agent.join(now_s + 1)


def test_the_smaller_side_of_a_cut_waits_also_where_the_round_was_begun():
    rounds, b, a, c = _three(RoundRules(min_agents=1, agents_at_start=3, wait_s=50))
    _rejoin(rounds, [a], lost=[b, c])
    assert "round" not in a.last()
    d = Agent(rounds, "d").join(7.0)  # a newcomer is no witness of where the others are
    assert "round" not in a.last() and d.heard == []
    b.heard.clear()
    b.join(8.0)
    assert b.last()["round"]["members"] == ["a", "b", "d"]


def test_of_two_halves_the_one_where_the_round_was_begun_goes_on():
    rounds = Rounds(RoundRules(min_agents=1, agents_at_start=2))
    a, b = Agent(rounds, "a").join(0.0), Agent(rounds, "b").join(0.0)
    b.last()
    other = Rounds(RoundRules(min_agents=1, attach_s=6))
    _rejoin(rounds, [a], lost=[b])
    assert a.last()["round"]["members"] == ["a"]
    b.rounds, b.heard = other, [{"round": b.round_}]
    b.join(5.0)
    other.tick(20.0)
    assert len(b.heard) == 1


def test_no_round_begins_without_its_members_before_it_was_looked_for_them():
    rounds, b, a, c = _three(RoundRules(min_agents=1, agents_at_start=3, searches=True))
    _rejoin(rounds, [a, b], lost=[c])
    assert "round" not in b.last() and rounds.must_search
    rounds.note_search()
    rounds.tick(7.0)
    assert b.last()["round"]["members"] == ["a", "b"]
    a.join(9.0)  # nobody is missing now
    assert not rounds.must_search


def test_a_round_tells_the_node_servers_of_all_rounds_before():
    rounds, b, a, c = _three()
    for agent in (a, b, c):
        agent.info["node_server"] = [f"host-{agent.name}", 1]
        agent.join(3.0)
        agent.last()
    _rejoin(rounds, [a, b], lost=[c])
    assert rounds.absent_node_servers == {"c": ["host-c", 1]}
    other = Rounds(RoundRules())
    a.last()
    a.rounds, a.heard = other, [{"round": a.round_}]
    a.attach(9.0)
    assert other.absent_node_servers == {"b": ["host-b", 1], "c": ["host-c", 1]}


def test_rounds_with_more_of_the_members_stand_above_those_with_less_and_a_later_round_above_all():
    rounds, b, a, c = _three()
    running = rounds.epoch
    c.leave(5.0)
    assert rounds.epoch < running
    waiting = rounds.epoch
    b.leave(5.0)
    assert rounds.epoch < waiting
    b.join(6.0)
    a.last()
    a.join(6.0)
    assert rounds.epoch > running
