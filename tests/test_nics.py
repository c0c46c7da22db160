"""Flows that use every NIC of a host: which rank takes which, and what the wire then carries."""

import json
import sys
from itertools import product

import pytest

from tests.hosts import skip_without_hosts
from topo_ar.emulation.cluster import Cluster
from topo_ar.emulation.launch import launch
from topo_ar.emulation.spec import ClusterSpec, parse_spec
from topo_ar.execution.network import Nic, kept_apart
from topo_ar.execution.nics import Endpoint, in_order_of_use, own_nics, way, with_nics
from topo_ar.execution.plans import Plans
from topo_ar.execution.transports.rendezvous import Way
from topo_ar.planning.plan import Family
from topo_ar.topology.levels import Levels, NodeLevel, Rate
from topo_ar.topology.merge import merge_hosts
from topo_ar.topology.model import Device, DeviceKind, Figure, Link, LinkKind, Source, Topology

LEFT, RIGHT = Nic("eth0", "10.0.0.1", "10.0.0.0/24"), Nic("eth1", "10.0.1.1", "10.0.1.0/24")


def far(nic: Nic, host: int) -> Nic:
    return Nic(nic.name, nic.address[:-1] + str(host), nic.network)


def at(*nics: Nic) -> list[Endpoint]:
    return [Endpoint(nic, 4000 + i) for i, nic in enumerate(nics)]


def test_a_flow_takes_the_own_nics_of_both_ends_or_a_subnet_that_they_share() -> None:
    there = (far(LEFT, 2), far(RIGHT, 2))
    assert way(at(LEFT, RIGHT), at(*there)) == Way("10.0.0.2", 4000, LEFT)
    assert way(at(RIGHT, LEFT), at(*there[::-1])) == Way("10.0.1.2", 4000, RIGHT)
    assert way(at(RIGHT, LEFT), at(there[0])) == Way("10.0.0.2", 4000, LEFT)
    # Different own NICs: that of the caller.
    assert way(at(RIGHT, LEFT), at(*there)) == Way("10.0.1.2", 4001, RIGHT)
    # Without a subnet in common, and where a host has one NIC, the system's routes decide.
    assert way(at(LEFT), at(there[1])) == Way("10.0.1.2", 4000)
    assert way(at(Nic("eth0", "10.0.0.1")), at(Nic("eth0", "10.0.0.2"))) == Way("10.0.0.2", 4000)


def level(ranks, rank_nics=(), names=("eth0", "eth1")) -> NodeLevel:
    rates = tuple(Rate(1e8, 1e8, 1e-5, Source.ASSUMED) for _ in names)
    inside = Rate(1e10, 1e10, 1e-6, Source.ASSUMED)
    return NodeLevel("node0", ranks, inside, rates, rank_nics, nic_names=names)


def test_ranks_take_the_nics_near_them_or_turns() -> None:
    nics = (LEFT, RIGHT)
    turns = [in_order_of_use(nics, level((4, 5, 6)), 4 + i, i)[0] for i in range(3)]
    assert turns == [LEFT, RIGHT, LEFT]
    near = level((4, 5, 6), ((1,), (1,), (0,)))
    assert [in_order_of_use(nics, near, 4 + i, i)[0] for i in range(3)] == [RIGHT, RIGHT, LEFT]
    # What the topology calls otherwise, such as RDMA devices, says nothing of interfaces.
    other = level((4, 5, 6), ((1,), (1,), (0,)), ("mlx5_0", "mlx5_1"))
    assert in_order_of_use(nics, other, 5, 1) == (RIGHT, LEFT)
    assert in_order_of_use(nics, None, 9, 0) == nics


def test_a_nic_that_reaches_nobody_is_nobodys_own() -> None:
    nodes = ((0, 1), (2, 3))
    both = {rank: at(*in_order_of_use((LEFT, RIGHT), None, rank, rank % 2)) for rank in range(4)}
    assert own_nics(nodes, both) == ("eth0", "eth1", "eth0", "eth1")
    one = {**both, 2: at(far(LEFT, 2)), 3: at(far(LEFT, 2))}
    assert own_nics(nodes, one) == ("eth0",) * 4
    assert own_nics(((0, 1),), {0: both[0], 1: both[1]}) == ("eth0", "eth1")


def test_levels_know_the_nics_that_flows_use() -> None:
    found = with_nics(Levels((level((0, 1, 2)),)), ["eth1", "eth0", "eth1"])
    assert found.nodes[0].rank_nics == ((1,), (0,), (1,))
    single = Levels((level((0, 1), names=("eth0",)),))
    renamed = Levels((level((0, 1), names=("mlx5_0", "mlx5_1")),))
    for same in (single, renamed):
        assert with_nics(same, ["eth0", "eth0"]) == same


@pytest.mark.parametrize("why", ["", "it is mixed up"])
def test_nics_of_one_subnet_count_where_the_system_keeps_them_apart(why) -> None:
    twin = Nic("eth2", "10.0.0.7", LEFT.network)
    usable, reasons = kept_apart([LEFT, RIGHT, twin], lambda name: why and f"{why} ({name})")
    if why:
        assert usable == (LEFT, RIGHT)
        assert reasons == (
            "flows do not use eth2: like eth0 it leads to 10.0.0.0/24, and it is mixed up (eth0)",
        )
    else:
        bound = [Nic(nic.name, nic.address, nic.network, True) for nic in (LEFT, twin)]
        assert usable == (bound[0], RIGHT, bound[1])
        assert reasons == ()


def host(nics: dict[str, float], ranks: int) -> Topology:
    def rate(value: float) -> Figure:
        return Figure(value, Source.SYSFS)

    devices = [Device("node/host", DeviceKind.HOST, "node")]
    links = []
    for rank in range(ranks):
        devices.append(Device(f"node/cpu{rank}", DeviceKind.CPU, "node"))
        links.append(Link(f"node/cpu{rank}", "node/host", LinkKind.SHM, rate(1e10), rate(1e10)))
    devices.append(Device("fabric", DeviceKind.SWITCH))
    for name, value in nics.items():
        devices.append(Device(f"node/{name}", DeviceKind.NIC, "node"))
        links.append(Link(f"node/{name}", "fabric", LinkKind.ETHERNET, rate(value), rate(value)))
        links.append(Link(f"node/{name}", "node/host", LinkKind.PCIE, rate(1e10), rate(1e10)))
    return Topology(
        "host", tuple(devices), tuple(links), tuple(f"node/cpu{r}" for r in range(ranks))
    )


def test_shares_follow_the_nics_that_ranks_have_for_themselves() -> None:
    nodes = ((0, 1), (2, 3))
    cluster = merge_hosts([host({"eth0": 100e6, "eth1": 50e6}, 2)] * 2, nodes)
    plans = Plans(cluster, nodes, 0, "auto", None, 2 << 20, nics=("eth0", "eth1") * 2)
    plan = plans.plan_for(25_000_000, 4, "cpu")
    assert (plan.family, plan.shards.ranks) == (Family.HIERARCHICAL_WEIGHTED, ((2, 1), (2, 1)))
    alone = Plans(cluster, nodes, 0, "auto", None, 2 << 20, nics=("eth0",) * 4)
    # One of the two NICs: half as fast again would need the other.
    slower = alone.plan_for(25_000_000, 4, "cpu").predicted_seconds
    assert slower == pytest.approx(1.5 * plan.predicted_seconds, rel=0.05)


RANK = """
import json, sys
import torch
import torch.distributed as dist
import topo_ar

numel, calls = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo")
communicator = topo_ar.Communicator(timeout_s=30, plan="hierarchical")
rank, size = dist.get_rank(), dist.get_world_size()
pattern = torch.arange(numel) % 1000
exact = 0
for call in range(calls):
    tensor = (pattern + rank * (call + 1)).float()
    communicator.all_reduce(tensor).wait()
    exact += torch.equal(tensor, (pattern * size + sum(range(size)) * (call + 1)).float())
print(json.dumps([exact, communicator.plan_for(numel * 4).shards.ranks]), flush=True)
communicator.close()
dist.destroy_process_group()
"""


def reduce_on(spec: ClusterSpec, one_subnet: bool = False, numel=6_250_000, num_calls=3):
    """Return what each rank found, and the bytes that each NIC of each host sent for one call."""
    skip_without_hosts()
    lines: dict[int, list[bytes]] = {}
    with Cluster(spec) as cluster:
        if one_subnet:
            for number, name in enumerate(cluster.hosts):
                moved = "ip addr flush dev eth1; ip addr add 10.77.0.{}/24 dev eth1"
                cluster.run(name, ["sh", "-ec", moved.format(101 + number)])
        before = [cluster.counters(name) for name in cluster.hosts]
        results = launch(
            cluster,
            [sys.executable, "-c", RANK, str(numel), str(num_calls)],
            timeout_s=45,
            on_line=lambda rank, line: lines.setdefault(rank, []).append(line),
        )
        after = [cluster.counters(name) for name in cluster.hosts]
    assert results.exit_code == 0, lines
    found = [json.loads(lines[rank][-1]) for rank in sorted(lines)]
    sent = [
        {nic: (now[nic] - then[nic]) / num_calls for nic in now}
        for then, now in zip(before, after, strict=True)
    ]
    return found, sent


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.parametrize("one_subnet", [False, True], ids=["a subnet each", "one subnet"])
def test_two_nics_of_a_host_carry_half_each(one_subnet) -> None:
    found, sent = reduce_on(ClusterSpec.uniform(2, 2, ["500mbit", "500mbit"]), one_subnet)
    assert found == [[3, [[1, 1], [1, 1]]]] * 4
    for host_sent, nic in product(sent, ("eth0", "eth1")):
        assert 12.5e6 <= host_sent[nic] <= 12.5e6 * 1.06


@pytest.mark.slow
@pytest.mark.netns
def test_a_slower_nic_carries_less() -> None:
    found, sent = reduce_on(ClusterSpec.uniform(2, 2, ["500mbit", "250mbit"]))
    assert found == [[3, [[2, 1], [2, 1]]]] * 4
    for each in sent:
        assert 25e6 * 2 / 3 <= each["eth0"] <= 25e6 * 2 / 3 * 1.06
        assert 25e6 / 3 <= each["eth1"] <= 25e6 / 3 * 1.06


@pytest.mark.slow
@pytest.mark.netns
def test_a_nic_without_a_counterpart_is_left_alone() -> None:
    nodes = (
        '[[node]]\nranks = 2\nnics = ["1gbit", "1gbit"]\n[[node]]\nranks = 2\nnics = ["1gbit"]\n'
    )
    found, sent = reduce_on(parse_spec(nodes))
    assert [exact for exact, _ in found] == [3] * 4
    for each in sent:
        assert 25e6 <= each["eth0"] <= 25e6 * 1.06
    assert sent[0]["eth1"] < 1e5
