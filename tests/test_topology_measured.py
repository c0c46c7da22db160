"""Levels told from measured pairs, and what measurements say against a declared topology."""

import math
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topo_ar.errors import TopologyError
from topo_ar.execution.pair_flow import rate_of
from topo_ar.execution.pingpong import tournament
from topo_ar.topology.clustering import (
    group_hosts,
    group_ranks,
    nic_rates,
    pairs_across,
    slow_hosts,
    uplinks_are_shared,
)
from topo_ar.topology.levels import levels
from topo_ar.topology.measured import disagreements, findings, measured_topology
from topo_ar.topology.model import Source
from topo_ar.topology.pair_times import (
    Measurement,
    PairTimes,
    Table,
    measurement_from_json,
    measurement_to_json,
)
from topo_ar.topology.presets import preset


def times(rate: list[list[float | None]], latency: float = 1e-5) -> PairTimes:
    table: Table = tuple(tuple(row) for row in rate)
    flat = tuple(tuple(latency for _ in row) for row in rate)
    return PairTimes(latency=flat, latency_spread=flat, rate=table, rate_spread=table)


def job(
    groups: list[list[int]],
    nics: list[float],
    racks: list[list[int]] | None = None,
    uplink: float = math.inf,
    noise: random.Random | None = None,
) -> Measurement:
    """What ideal hosts would show: a flow gets the slower NIC, two of a kind share an uplink."""
    shake = (lambda: noise.uniform(0.95, 1.0)) if noise else (lambda: 1.0)
    host_of = {rank: host for host, group in enumerate(groups) for rank in group}
    n = len(host_of)

    def flow(a: int, b: int) -> float:
        return min(nics[a], nics[b]) * shake()

    def shared(a: int, b: int) -> float:
        across = racks and not any({a, b} <= set(rack) for rack in racks)
        return (min(nics[a], nics[b], uplink / 2) if across else min(nics[a], nics[b])) * shake()

    ranks = times(
        [
            [
                3e9 * shake() if host_of[a] == host_of[b] else flow(host_of[a], host_of[b])
                for b in range(n)
            ]
            for a in range(n)
        ]
    )
    m = range(len(groups))
    hosts = times([[None if a == b else flow(a, b) for b in m] for a in m], 3e-5)
    loaded = tuple(tuple(None if a == b else shared(a, b) for b in m) for a in m)
    found = group_hosts(hosts, loaded)
    return Measurement(
        ranks=ranks,
        groups=group_ranks(ranks).groups,
        hosts=hosts,
        loaded=loaded,
        racks=found,
        uplinks=tuple(uplink for _ in found),
    )


@pytest.mark.parametrize("size", range(1, 12))
def test_a_tournament_is_rounds_of_disjoint_pairs_and_every_pair_once(size: int) -> None:
    rounds = tournament(size)
    for pairs in rounds:
        members = [member for pair in pairs for member in pair]
        assert len(members) == len(set(members)) == size - size % 2
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == [(a, b) for a in range(size) for b in range(a + 1, size)]


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(1, 3), st.randoms(use_true_random=False))
def test_hosts_of_shuffled_ranks_are_told(hosts: int, each: int, rng: random.Random) -> None:
    ranks = list(range(hosts * each))
    rng.shuffle(ranks)
    groups = sorted(sorted(ranks[i * each : (i + 1) * each]) for i in range(hosts))
    nics = [rng.choice([12e6, 48e6]) for _ in groups]
    assert job(groups, nics, noise=rng).groups == tuple(map(tuple, groups))


def test_latency_tells_hosts_where_the_network_is_as_fast_as_memory() -> None:
    near, far = 5e-6, 30e-6
    latency = tuple(tuple(near if a // 2 == b // 2 else far for b in range(4)) for a in range(4))
    flat = tuple(tuple(5e9 for _ in range(4)) for _ in range(4))
    cut = group_ranks(PairTimes(latency, latency, flat, flat))
    assert (cut.groups, cut.clean) == (((0, 1), (2, 3)), True)
    assert cut.gap == pytest.approx(6)


def test_without_a_gap_all_ranks_share_a_host_and_a_lone_rank_is_one() -> None:
    assert group_ranks(times([[3e9] * 4] * 4)).groups == ((0, 1, 2, 3),)
    assert group_ranks(times([[3e9]])).groups == ((0,),)


def test_a_slow_loopback_of_its_own_does_not_split_a_host() -> None:
    rates = [[1e9 if a == b else 4e9 for b in range(4)] for a in range(4)]
    assert group_ranks(times(rates)).groups == ((0, 1, 2, 3),)


def test_near_that_is_no_equivalence_is_not_clean() -> None:
    rates: list[list[float | None]] = [[3e9, 3e9, 1e8], [3e9, 3e9, 3e9], [1e8, 3e9, 3e9]]
    cut = group_ranks(times(rates))
    assert (cut.groups, cut.clean) == (((0, 1, 2),), False)


def test_pairs_that_were_not_measured_are_no_contradiction() -> None:
    rates: list[list[float | None]] = [[3e9, 3e9, None], [3e9, 3e9, 1e8], [None, 1e8, 3e9]]
    assert group_ranks(times(rates)).groups == ((0, 1), (2,))


@settings(max_examples=40)
@given(st.randoms(use_true_random=False), st.floats(0.3, 1.4))
def test_racks_are_told_where_their_uplink_is_shared(rng: random.Random, uplink: float) -> None:
    hosts = list(range(6))
    rng.shuffle(hosts)
    racks = sorted([sorted(hosts[:3]), sorted(hosts[3:])])
    measured = job([[h] for h in range(6)], [48e6] * 6, racks, uplink * 48e6, rng)
    assert measured.racks == tuple(map(tuple, racks))
    found = levels(measured_topology(measured))
    assert [rack.nodes for rack in found.racks] == list(map(tuple, racks))
    assert [rack.uplink.payload for rack in found.racks] == [uplink * 48e6] * 2


def test_no_racks_where_nothing_is_shared_or_nobody_is_nearer() -> None:
    assert job([[h] for h in range(4)], [48e6, 48e6, 12e6, 48e6]).racks == ()
    assert job([[0], [1]], [48e6, 48e6]).racks == ()
    alone = job([[h] for h in range(4)], [48e6] * 4, [[0], [1], [2], [3]], 40e6)
    assert alone.racks == ()


def test_racks_that_send_all_their_nics_carry_were_chance() -> None:
    measured = job([[h] for h in range(4)], [48e6] * 4)
    racks = ((0, 1), (2, 3))
    assert pairs_across(racks, 1) == [(2, 0), (3, 1)]
    assert not uplinks_are_shared(racks, (95e6, 94e6), measured.hosts)
    assert uplinks_are_shared(racks, (95e6, 60e6), measured.hosts)
    assert not uplinks_are_shared(racks, (None, None), measured.hosts)


def test_a_slow_nic_is_named_and_does_not_slow_its_partners() -> None:
    measured = job([[0, 3], [1, 5], [2, 4]], [48e6, 12e6, 48e6])
    assert nic_rates(measured.hosts) == [(48e6, 48e6), (12e6, 12e6), (48e6, 48e6)]
    assert slow_hosts(measured.hosts) == [(1, 12e6, 48e6)]
    [sentence] = findings(measured)
    assert sentence.startswith("node1 (ranks 1, 5): its NIC carries 12 MB/s, 0.25 of the 48 MB/s")


def test_a_nic_that_sends_faster_than_it_receives_is_named() -> None:
    base = job([[0], [1], [2]], [48e6] * 3)
    rate = tuple(
        tuple(None if a == b else 30e6 if b == 2 else 48e6 for b in range(3)) for a in range(3)
    )
    hosts = msgspec.structs.replace(base.hosts, rate=rate)
    [slow, uneven] = findings(msgspec.structs.replace(base, hosts=hosts))
    assert slow.startswith("node2 (rank 2): its NIC carries 30 MB/s")
    assert uneven.startswith("node2 (rank 2): sends 48 MB/s and receives 30 MB/s")


def test_the_measured_topology_is_what_levels_read_back() -> None:
    measured = job([[0, 3], [1, 2]], [48e6, 12e6])
    topology = measured_topology(measured)
    found = levels(topology)
    assert [node.ranks for node in found.nodes] == [(0, 3), (1, 2)]
    assert [node.nics[0].payload for node in found.nodes] == [12e6, 12e6]
    assert [node.intra.payload for node in found.nodes] == [3e9, 3e9]
    assert found.nodes[0].nics[0].latency == pytest.approx(3e-5)
    assert found.nodes[0].intra.latency == pytest.approx(1e-5)
    figures = [f for link in topology.links for f in (link.effective, link.latency) if f]
    assert {figure.source for figure in figures} == {Source.MEASURED}
    assert all(figure.note for figure in figures)
    one = levels(measured_topology(job([[0, 1]], [1.0])))
    assert (one.world_size, one.nodes[0].nics) == (2, ())


def test_what_agrees_is_not_reported() -> None:
    measured = job([[0, 1], [2, 3]], [119e6, 119e6])
    assert disagreements(measured, preset("cpu-host", nodes=2, ranks_per_node=2)) == ()


def test_ranks_on_other_hosts_than_declared_are_named() -> None:
    measured = job([[0, 2], [1, 3]], [119e6, 119e6])
    sentences = disagreements(measured, preset("cpu-host", nodes=2, ranks_per_node=2))
    assert sentences == (
        "ranks 0, 2 were measured to share a host, and are declared on node0 and node1",
        "ranks 1, 3 were measured to share a host, and are declared on node0 and node1",
        "node0 is declared with ranks 0, 1, which were measured on 2 hosts: rank 0 and rank 1",
        "node1 is declared with ranks 2, 3, which were measured on 2 hosts: rank 2 and rank 3",
    )


def test_a_rate_other_than_declared_is_named() -> None:
    measured = job([[0, 1], [2, 3]], [30e6, 30e6])
    first, _ = disagreements(measured, preset("cpu-host", nodes=2, ranks_per_node=2))
    assert first == (
        "node0 (ranks 0, 1): its NIC is declared with 119.6 MB/s of payload, and was measured to "
        "carry 30 MB/s"
    )


def test_another_number_of_ranks_is_said() -> None:
    measured = job([[0], [1]], [1e8, 1e8])
    [sentence] = disagreements(measured, preset("cpu-host", nodes=1))
    assert sentence == "2 ranks were measured but 'cpu-host' has 4"


def test_a_mislabelled_rack_is_named() -> None:
    declared = measured_topology(job([[h] for h in range(4)], [48e6] * 4, [[0, 1], [2, 3]], 48e6))
    measured = job([[h] for h in range(4)], [48e6] * 4, [[0, 2], [1, 3]], 48e6)
    assert disagreements(measured, declared) == (
        "node1 (rank 1) is declared in rack leaf0, and was measured in a rack with rank 3",
        "node3 (rank 3) is declared in rack leaf1, and was measured in a rack with rank 1",
    )


def test_measurement_round_trip_and_what_is_none() -> None:
    measured = job([[0, 1], [2, 3]], [48e6, 48e6])
    assert measurement_from_json(measurement_to_json(measured)) == measured
    with pytest.raises(TopologyError, match="not a measurement"):
        measurement_from_json(b"{}")
    text = measurement_to_json(msgspec.structs.replace(measured, groups=((0, 1),)))
    with pytest.raises(TopologyError, match="must be 2 x 2"):
        measurement_from_json(text)
    with pytest.raises(TopologyError, match="schema 9"):
        measurement_from_json(measurement_to_json(msgspec.structs.replace(measured, schema=9)))


def test_the_rate_of_a_flow_leaves_out_its_start() -> None:
    marks = [(0.0, 1 << 20)] + [(0.01 * i, (1 << 20) + i * 100_000) for i in range(1, 101)]
    assert rate_of(marks).value == pytest.approx(1e7)
    assert rate_of(marks).spread == pytest.approx(0, abs=1e5)
    assert rate_of([(1.0, 65536), (1.0, 131072)]).value > 1e9
