"""The topology as data: validation, JSON, levels, graph."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topo_ar.errors import TopologyError
from topo_ar.topology.graph import to_networkx
from topo_ar.topology.levels import levels
from topo_ar.topology.model import (
    Device,
    DeviceKind,
    Figure,
    Link,
    LinkKind,
    Source,
    Topology,
    from_json,
    to_json,
    topology_hash,
    validate,
)


def figure(value: float) -> Figure:
    return Figure(value, Source.FILE)


def gpu(i: int, node: str | None = "n") -> Device:
    return Device(f"gpu{i}", DeviceKind.GPU, node)


def pair(**changes: object) -> Topology:
    """Two GPUs with four NVLinks between them and one PCIe link each to a CPU."""
    topology = Topology(
        "pair",
        (gpu(0), gpu(1), Device("cpu", DeviceKind.CPU, "n")),
        (
            Link("gpu0", "gpu1", LinkKind.NVLINK, figure(100e9), figure(80e9), count=4),
            Link("gpu0", "cpu", LinkKind.PCIE, figure(31.5e9), figure(24e9)),
            Link("gpu1", "cpu", LinkKind.PCIE, figure(31.5e9), figure(24e9)),
        ),
        ("gpu0", "gpu1"),
    )
    return msgspec.structs.replace(topology, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": (gpu(0), gpu(0))}, "two devices are called 'gpu0'"),
        ({"devices": (Device("", DeviceKind.NIC),)}, "a nic device has an empty id"),
        ({"links": (Link("gpu0", "gpu7", LinkKind.PCIE),)}, "'gpu7' is no device"),
        ({"links": (Link("gpu0", "gpu0", LinkKind.NVLINK),)}, "two different devices"),
        ({"links": (Link("gpu0", "gpu1", LinkKind.NVLINK, count=0),)}, "count is 0"),
        ({"links": (Link("gpu0", "gpu1", LinkKind.NVLINK, figure(0.0)),)}, "nominal is 0.0"),
        (
            {"links": (Link("gpu0", "gpu1", LinkKind.NVLINK, None, figure(float("inf"))),)},
            "effective is inf",
        ),
        (
            {"links": (Link("gpu0", "gpu1", LinkKind.NVLINK, figure(float("nan"))),)},
            "nominal is nan",
        ),
        (
            {"links": (Link("gpu0", "gpu1", LinkKind.NVLINK, latency=figure(-1e-6)),)},
            "latency is -1e-06",
        ),
        ({"ranks": ("gpu0", "gpu9")}, "rank 1 sits on 'gpu9'"),
        ({"ranks": ("gpu0", "gpu0")}, "ranks 0 and 1 both sit on 'gpu0'"),
    ],
)
def test_a_fault_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        validate(pair(**changes))


def test_json_round_trip_is_stable() -> None:
    topology = pair(notes=("a note",))
    text = to_json(topology)
    assert from_json(text) == topology
    assert to_json(from_json(text)) == text
    assert topology_hash(topology) == topology_hash(from_json(text.decode()))
    assert len(topology_hash(topology)) == 16
    assert topology_hash(topology) != topology_hash(pair())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"name": 3}', r"\$.name"),
        (b"{", "not a topology"),
        (b"\xff", "not a topology"),
        (to_json(pair()).replace(b'"schema":1', b'"schema":2'), "schema 2 is not known"),
        (to_json(pair()).replace(b'"kind":"gpu"', b'"kind":"tpu"'), r"devices\[0\].kind"),
        (to_json(pair()).replace(b'"notes"', b'"remarks"'), "remarks"),
        (to_json(pair()).replace(b'"gpu1"]', b'"gpu4"]'), "rank 1 sits on 'gpu4'"),
    ],
)
def test_json_that_is_no_topology_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        from_json(text)


def test_graph_has_two_edges_a_link_and_adds_parallel_links() -> None:
    topology = pair()
    topology = msgspec.structs.replace(
        topology,
        links=(
            *topology.links,
            Link("gpu1", "gpu0", LinkKind.NVLINK, figure(50e9), latency=figure(1e-6)),
            Link("cpu", "gpu0", LinkKind.C2C),
        ),
    )
    graph = to_networkx(topology)
    assert graph.number_of_edges() == 6
    for a, b in (("gpu0", "gpu1"), ("gpu1", "gpu0")):
        edge = graph.edges[a, b]
        assert edge["bandwidth"] == 150e9
        assert edge["latency"] == 1e-6
        assert edge["kind"] == "nvlink"
        assert edge["count"] == 5
        assert edge["source"] == "file"
    assert to_networkx(topology, "effective").edges["gpu0", "gpu1"]["bandwidth"] == 130e9
    assert graph.nodes["cpu"]["kind"] == "cpu"
    assert "bandwidth" not in graph.edges["gpu0", "cpu"]
    assert graph.edges["gpu0", "cpu"]["kind"] == "c2c"
    assert graph.graph["unknown"] == (("cpu", "gpu0"),)


@given(st.integers(1, 6), st.integers(1, 6), st.randoms(use_true_random=False))
def test_levels_hold_each_rank_once(nodes: int, ranks: int, random) -> None:
    devices = [Device(f"h{n}", DeviceKind.HOST, f"node{n}") for n in range(nodes)]
    cpus = [
        Device(f"c{n}.{r}", DeviceKind.CPU, f"node{n}") for n in range(nodes) for r in range(ranks)
    ]
    nics = [Device(f"nic{n}", DeviceKind.NIC, f"node{n}") for n in range(nodes)]
    links = [Link(c.id, f"h{c.node[4:]}", LinkKind.SHM, figure(4e9)) for c in cpus if c.node]
    links += [Link(nic.id, "switch", LinkKind.ETHERNET, figure(125e6)) for nic in nics]
    order = random.sample(cpus, len(cpus))
    topology = validate(
        Topology(
            "t",
            (*devices, *cpus, *nics, Device("switch", DeviceKind.SWITCH)),
            tuple(links),
            tuple(device.id for device in order),
        )
    )
    found = levels(topology)
    assert sorted(r for node in found.nodes for r in node.ranks) == list(range(nodes * ranks))
    assert [node.ranks[0] for node in found.nodes] == sorted(node.ranks[0] for node in found.nodes)
    for node in found.nodes:
        assert list(node.ranks) == sorted(node.ranks)
        assert {order[r].node for r in node.ranks} == {node.name}
        assert [nic.payload for nic in node.nics] == [125e6]


def test_intra_port_is_the_sum_of_nvlinks_else_pcie() -> None:
    [node] = levels(pair()).nodes
    assert (node.intra.nominal, node.intra.payload, node.intra.source) == (100e9, 80e9, "file")
    assert node.nics == ()
    [node] = levels(pair(links=pair().links[1:])).nodes
    assert (node.intra.nominal, node.intra.payload) == (31.5e9, 24e9)


def test_nvlink_that_does_not_join_all_ranks_leaves_the_payload_to_pcie() -> None:
    base = pair()
    hives = msgspec.structs.replace(
        base,
        devices=(*base.devices, gpu(2), gpu(3)),
        links=(
            *base.links,
            Link("gpu2", "gpu3", LinkKind.NVLINK, figure(100e9), figure(80e9)),
            Link("gpu2", "cpu", LinkKind.PCIE, figure(31.5e9), figure(24e9)),
            Link("gpu3", "cpu", LinkKind.PCIE, figure(31.5e9), figure(24e9)),
        ),
        ranks=("gpu0", "gpu1", "gpu2", "gpu3"),
    )
    [node] = levels(hives).nodes
    assert (node.intra.nominal, node.intra.payload) == (100e9, 24e9)


def test_nic_is_as_fast_as_the_slower_of_cable_and_bus() -> None:
    base = pair()
    nics = [
        Device("slow-bus", DeviceKind.NIC, "n"),
        Device("slow-cable", DeviceKind.NIC, "n"),
        Device("management", DeviceKind.NIC, "n", attributes={"data": False}),
    ]
    topology = msgspec.structs.replace(
        base,
        devices=(*base.devices, *nics, Device("s", DeviceKind.SWITCH)),
        links=(
            *base.links,
            Link("slow-bus", "cpu", LinkKind.PCIE, figure(8e9), figure(6e9)),
            Link("slow-bus", "s", LinkKind.INFINIBAND, figure(25e9), latency=figure(1e-6)),
            Link("slow-cable", "cpu", LinkKind.PCIE, figure(8e9), figure(6e9)),
            Link("slow-cable", "s", LinkKind.ETHERNET, figure(1.25e9), figure(1.2e9)),
            Link("management", "s", LinkKind.ETHERNET, figure(1e8)),
        ),
    )
    [node] = levels(topology).nodes
    assert [(nic.nominal, nic.payload) for nic in node.nics] == [(8e9, 6e9), (1.25e9, 1.2e9)]
    assert node.nics[0].latency == 2e-6


def test_what_has_no_levels_is_refused_by_name() -> None:
    with pytest.raises(TopologyError, match="'pair' has no ranks"):
        levels(pair(ranks=()))
    with pytest.raises(TopologyError, match="'gpu0', which belongs to no node"):
        levels(pair(devices=(gpu(0, None), gpu(1), pair().devices[2])))
    with pytest.raises(TopologyError, match="'gpu0' holds a rank but no link"):
        levels(pair(links=(Link("gpu0", "gpu1", LinkKind.NVLINK),)))
