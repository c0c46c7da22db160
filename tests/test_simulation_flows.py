"""Max-min fairness as laws, and the engine against times that are known exactly."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topo_ar.errors import PlanError
from topo_ar.simulation.engine import Task, run
from topo_ar.simulation.flows import Network, max_min_rates


@st.composite
def networks(draw):
    """Capacities, and flows over some of the links with coefficients; exact."""
    count = draw(st.integers(1, 6))
    capacities = {i: Fraction(draw(st.integers(1, 60))) for i in range(count)}
    flows = {}
    for flow in range(draw(st.integers(1, 8))):
        links = draw(st.sets(st.integers(0, count - 1), min_size=1))
        flows[flow] = tuple((link, draw(st.integers(1, 3))) for link in sorted(links))
    return capacities, flows


def load(flows, rates, link):
    return sum(c * rates[flow] for flow, uses in flows.items() for at, c in uses if at == link)


@given(networks())
def test_no_link_carries_more_than_it_can_and_every_flow_has_a_bottleneck(network):
    capacities, flows = network
    rates = max_min_rates(capacities, flows)
    assert rates.keys() == flows.keys()
    for link, capacity in capacities.items():
        assert load(flows, rates, link) <= capacity
    for flow, uses in flows.items():
        assert rates[flow] > 0
        assert any(
            load(flows, rates, link) == capacities[link]
            and rates[flow] == max(rates[f] for f, other in flows.items() if link in dict(other))
            for link, _ in uses
        )


@given(networks(), st.integers(2, 5))
def test_faster_links_of_all_kinds_make_all_flows_faster_by_as_much(network, factor):
    capacities, flows = network
    faster = {link: capacity * factor for link, capacity in capacities.items()}
    rates = max_min_rates(capacities, flows)
    assert max_min_rates(faster, flows) == {flow: rate * factor for flow, rate in rates.items()}


@given(networks(), st.data())
def test_the_slowest_flow_never_gains_by_a_narrower_link_or_one_more_flow(network, data):
    capacities, flows = network
    least = min(max_min_rates(capacities, flows).values())
    link = data.draw(st.sampled_from(sorted(capacities)))
    narrower = {**capacities, link: capacities[link] / 2}
    assert min(max_min_rates(narrower, flows).values()) <= least
    more = {**flows, len(flows): ((link, 1),)}
    assert min(max_min_rates(capacities, more).values()) <= least


@given(networks())
def test_a_flow_that_stands_for_several_gets_what_each_would(network):
    capacities, flows = network
    unfolded, members = {}, {}
    for flow, uses in flows.items():
        # Copies of a flow over the same links, each with coefficient 1.
        copies = 2
        members[flow] = [len(unfolded) + k for k in range(copies)]
        unfolded |= {m: tuple((link, 1) for link, _ in uses) for m in members[flow]}
    folded = {flow: tuple((link, 2) for link, _ in uses) for flow, uses in flows.items()}
    each, rates = max_min_rates(capacities, unfolded), max_min_rates(capacities, folded)
    for flow, own in members.items():
        assert {each[m] for m in own} == {rates[flow]}


def test_two_flows_share_a_link_and_the_third_takes_what_they_leave():
    # The textbook case: 0 on both links, 1 on the first, 2 on the second and wider one.
    uses = {0: ((0, 1), (1, 1)), 1: ((0, 1),), 2: ((1, 1),)}
    assert max_min_rates({0: Fraction(1), 1: Fraction(2)}, uses) == {
        0: Fraction(1, 2),
        1: Fraction(1, 2),
        2: Fraction(3, 2),
    }


def test_only_flows_that_can_be_affected_are_looked_at_again():
    network = Network([10, 10])
    network.add(0, ((0, 1),), 100, 0)
    network.add(1, ((1, 1),), 100, 0)
    network.settle(0)
    network.add(2, ((0, 1),), 10, 4)
    network.settle(4)  # flow 0: 60 left at 5 a second, until flow 2 ends
    assert network.next_end() == 6
    assert list(network.ended(6)) == [2]
    network.settle(6)
    assert network.next_end() == 10  # flow 1 has its link alone
    assert list(network.ended(10)) == [1]
    assert network.next_end() == 11
    assert list(network.ended(11)) == [0]
    assert network.carried == [110, 100]


@given(networks(), st.lists(st.integers(1, 50), min_size=8, max_size=8), st.data())
def test_every_byte_is_carried_whenever_flows_begin(network, sizes, data):
    capacities, flows = network
    begins = [Fraction(data.draw(st.integers(0, 4))) for _ in flows]
    tasks = [Task(((sizes[flow], uses),), earliest=begins[flow]) for flow, uses in flows.items()]
    timeline = run([capacities[i] for i in range(len(capacities))], tasks)
    for link, capacity in capacities.items():
        expected = sum(
            c * sizes[flow] for flow, uses in flows.items() for at, c in uses if at == link
        )
        assert timeline.carried[link] == expected
        assert expected <= capacity * timeline.seconds
    for task, time, begin in zip(tasks, timeline.tasks, begins, strict=True):
        nbytes, uses = task.flows[0]
        assert time.start == begin
        assert time.done - begin >= max(c * nbytes / capacities[link] for link, c in uses)


# Four buckets ready at 10, 20, 30, 40; reduce-scatter and all-gather take 4, the wire 12.
def test_two_queues_end_as_the_notes_say():
    tasks, lanes = [], {}
    for bucket in range(4):
        for stage, seconds in (("scatter", 4), ("wire", 12), ("gather", 4)):
            link = 1 if stage == "wire" else 0
            tasks.append(
                Task(
                    ((Fraction(seconds), ((link, 1),)),),
                    after=(len(tasks) - 1,) if stage != "scatter" else (),
                    behind=(lanes[stage],) if stage in lanes else (),
                    earliest=Fraction(10 * (bucket + 1)),
                )
            )
            lanes[stage] = len(tasks) - 1
    assert run([Fraction(1), Fraction(1)], tasks).seconds == 66


def test_busy_seconds_hold_the_lane_and_a_lag_does_not():
    tasks = [
        Task(((10, ((0, 1),)),), before=1, added=2, lag=5),
        Task(((10, ((0, 1),)),), behind=(0,)),
        Task(after=(0,)),
    ]
    times = run([10], tasks).tasks
    assert (times[0].start, times[0].moved, times[0].released, times[0].done) == (0, 2, 4, 9)
    assert (times[1].start, times[1].done) == (4, 5)
    assert times[2].start == times[2].done == 9


def test_tasks_that_wait_for_themselves_are_refused():
    with pytest.raises(PlanError, match="waits for itself"):
        run([1], [Task(after=(1,)), Task(after=(0,))])
