"""Islands, nearest NICs and racks: what lies between a rank and the whole job."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.foreign import foreign
from topo_ar.topology.levels import Levels, levels
from topo_ar.topology.model import Device, DeviceKind, Figure, Link, LinkKind, Source, Topology
from topo_ar.topology.readers import read


def figure(value: float) -> Figure:
    return Figure(value, Source.FILE)


def machine(*links: Link, gpus: int = 4, cpus: int = 2) -> Topology:
    """GPUs dealt evenly to the CPUs over PCIe gen4, and some more links."""
    devices = [Device(f"gpu{i}", DeviceKind.GPU, "n") for i in range(gpus)]
    devices += [Device(f"cpu{i}", DeviceKind.CPU, "n") for i in range(cpus)]
    buses = [
        Link(f"gpu{i}", f"cpu{i * cpus // gpus}", LinkKind.PCIE, figure(31.5e9), figure(24e9))
        for i in range(gpus)
    ]
    return Topology("m", tuple(devices), (*buses, *links), tuple(f"gpu{i}" for i in range(gpus)))


def nvlink(a: int, b: int) -> Link:
    return Link(f"gpu{a}", f"gpu{b}", LinkKind.NVLINK, figure(100e9), figure(80e9), count=4)


def test_bridged_pairs_are_islands() -> None:
    [node] = levels(machine(nvlink(0, 1), nvlink(2, 3))).nodes
    assert node.islands == ((0, 1), (2, 3))
    assert node.island is not None
    assert (node.island.nominal, node.island.payload) == (100e9, 80e9)
    assert (node.intra.nominal, node.intra.payload) == (100e9, 24e9)


def test_one_pair_of_three_leaves_the_third_alone() -> None:
    [node] = levels(machine(nvlink(0, 1), gpus=3, cpus=1)).nodes
    assert node.islands == ((0, 1), (2,))
    assert node.island is not None
    assert node.island.payload == 80e9
    assert node.intra.payload == 24e9


def test_a_node_that_nvlink_joins_is_one_island() -> None:
    [node] = levels(machine(nvlink(0, 1), nvlink(1, 2), nvlink(2, 3))).nodes
    assert (node.islands, node.island) == ((), None)
    assert node.intra.payload == 80e9


@pytest.mark.parametrize(
    ("upi", "islands", "across"),
    [(10e9, ((0, 1), (2, 3)), 5e9), (40e9, (), 24e9), (None, (), 24e9)],
)
def test_sockets_are_islands_where_what_joins_them_is_slower(upi, islands, across) -> None:
    rate = figure(upi) if upi else None
    [node] = levels(machine(Link("cpu0", "cpu1", LinkKind.UPI, effective=rate))).nodes
    assert node.islands == islands
    assert node.intra.payload == across
    if islands:
        assert node.island is not None
        assert node.island.payload == 24e9


def test_islands_name_global_ranks() -> None:
    base = machine(nvlink(0, 1), nvlink(2, 3))
    shuffled = msgspec.structs.replace(base, ranks=("gpu2", "gpu0", "gpu3", "gpu1"))
    assert levels(shuffled).nodes[0].islands == ((0, 2), (1, 3))


def test_two_hives_of_a_captured_machine() -> None:
    [node] = levels(read(foreign("nccl-xml/rccl-8x-gfx908-2hives-1nic.xml"))).nodes
    assert node.islands == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert node.island is not None
    assert node.island.payload > node.intra.payload


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("perlmutter-4x-a100-4-slingshot", ["nic3", "nic2", "nic1", "nic0"]),
        ("rccl-8x-vega20-pcie-2nic", ["nic0"] * 4 + ["nic1"] * 4),
        ("rccl-8x-mi300x-8nic", [f"nic{i}" for i in range(8)]),
    ],
)
def test_nearest_nics_of_captured_machines(name: str, nearest: list[str]) -> None:
    topology = read(foreign(f"nccl-xml/{name}.xml"))
    [node] = levels(topology).nodes
    names = [d.id.partition("/")[2] for d in topology.devices if d.kind is DeviceKind.NIC]
    assert [[names[i] for i in own] for own in node.rank_nics] == [[name] for name in nearest]


def test_one_nic_or_none_is_near_to_all_alike() -> None:
    assert levels(machine()).nodes[0].rank_nics == ()
    assert levels(read(foreign("nccl-xml/rccl-3x-mi210-pcie-1nic.xml"))).nodes[0].rank_nics == ()


def fabric(
    leaves: list[list[str]], uplinks: dict[str, list[float | None]], extra: tuple[Link, ...] = ()
) -> Topology:
    """Nodes of one CPU rank with a NIC to each of their leaves; leaves hang on one spine."""
    devices = [Device("spine", DeviceKind.SWITCH)]
    devices += [Device(leaf, DeviceKind.SWITCH) for leaf in uplinks]
    links = list(extra)
    for node, own in enumerate(leaves):
        devices.append(Device(f"c{node}", DeviceKind.CPU, f"node{node}"))
        for i, leaf in enumerate(own):
            devices.append(Device(f"nic{node}.{i}", DeviceKind.NIC, f"node{node}"))
            links.append(Link(f"nic{node}.{i}", leaf, LinkKind.INFINIBAND, figure(50e9)))
    for leaf, rates in uplinks.items():
        for rate in rates:
            nominal = figure(rate) if rate else None
            links.append(Link(leaf, "spine", LinkKind.INFINIBAND, nominal))
    return Topology(
        "f", tuple(devices), tuple(links), tuple(f"c{node}" for node in range(len(leaves)))
    )


def racks(found: Levels) -> list[tuple[str, tuple[int, ...], float]]:
    return [(rack.name, rack.nodes, rack.uplink.payload) for rack in found.racks]


def test_racks_are_the_nodes_behind_a_leaf_switch() -> None:
    topology = fabric([["l1"], ["l0"], ["l1"]], {"l0": [50e9], "l1": [50e9, 25e9]})
    assert racks(levels(topology)) == [("l1", (0, 2), 75e9), ("l0", (1,), 50e9)]


def test_rails_of_one_group_count_as_one_rack() -> None:
    leaves = [["a0", "a1"], ["a0", "a1"], ["b0", "b1"], ["b0", "b1"]]
    topology = fabric(leaves, {name: [100e9] for name in ("a0", "a1", "b0", "b1")})
    assert racks(levels(topology)) == [("a0 to a1", (0, 1), 200e9), ("b0 to b1", (2, 3), 200e9)]


def test_no_racks_where_a_rate_is_unknown_or_all_share_a_switch() -> None:
    assert levels(fabric([["l0"], ["l1"]], {"l0": [50e9], "l1": [50e9, None]})).racks == ()
    assert levels(fabric([["l0"], ["l0"]], {"l0": [50e9], "l1": [50e9]})).racks == ()
    assert levels(fabric([["l0"], ["l1"]], {"l0": [50e9], "l1": []})).racks == ()


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=8))
def test_racks_hold_each_node_once(homes: list[list[int]]) -> None:
    uplinks: dict[str, list[float | None]] = {f"l{i}": [1e9] for i in range(6)}
    found = levels(fabric([[f"l{i}" for i in own] for own in homes], uplinks))
    inside = [node for rack in found.racks for node in rack.nodes]
    assert sorted(inside) == (list(range(len(homes))) if found.racks else [])
    for rack in found.racks:
        own = {leaf for node in rack.nodes for leaf in homes[node]}
        others = {leaf for node in set(range(len(homes))) - set(rack.nodes) for leaf in homes[node]}
        assert not own & others
        assert rack.uplink.payload == len(own) * 1e9
