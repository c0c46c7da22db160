"""The bound of a whole topology: which links matter, and the words for what limits."""

import re
from fractions import Fraction

import msgspec
import pytest

from tests.foreign import foreign
from topo_ar.errors import PlanError
from topo_ar.planning.flow_graph import flow_graph
from topo_ar.planning.level_bounds import all_reduce_lower_bound
from topo_ar.planning.topology_bound import topology_bound
from topo_ar.topology.levels import levels
from topo_ar.topology.model import Device, DeviceKind, Figure, Link, LinkKind, Source, Topology
from topo_ar.topology.presets import preset
from topo_ar.topology.readers import read

F = Fraction
GB = 10**9
BOTH = ("nvswitch", "switch")


@pytest.mark.parametrize(
    ("name", "nodes", "switches", "algbw", "bottleneck"),
    [
        ("dgx-a100", 1, (), F(1200, 7), "node0's NVLink ports (8 x 300 GB/s)"),
        (
            "dgx-a100",
            2,
            (),
            F(520, 3),
            "each node's NICs (8 x 25 GB/s) and NVLink ports (8 x 300 GB/s)",
        ),
        ("dgx-a100", 2, ("nvswitch",), 200, "each node's NICs (8 x 25 GB/s)"),
        ("dgx-a100", 4, (), F(400, 3), "each node's NICs (8 x 25 GB/s)"),
        ("dgx-a100", 4, BOTH, 200, "each node's NICs (8 x 25 GB/s)"),
        ("dgx-h100", 2, BOTH, 400, "each node's NICs (8 x 50 GB/s)"),
        ("cpu-host", 4, (), F(1, 12), "each node's NICs (1 x 125 MB/s)"),
        ("cpu-host", 4, ("fabric",), F(1, 8), "each node's NICs (1 x 125 MB/s)"),
    ],
)
def test_presets_give_the_notes_optima_in_words(name, nodes, switches, algbw, bottleneck):
    bound = topology_bound(preset(name, nodes), multicast=switches, reducing=switches)
    assert (bound.algbw, bound.tight) == (algbw * GB, True)
    assert bound.bottleneck == bottleneck
    assert bound.seconds(GB) == float(1 / F(algbw))


def degraded(topology, device, factor):
    """The topology with the cable of one NIC at a part of its rate."""
    links = [
        msgspec.structs.replace(
            link, nominal=Figure(link.nominal.value * factor, Source.FILE), effective=None
        )
        if link.kind in (LinkKind.INFINIBAND, LinkKind.ETHERNET) and device in (link.a, link.b)
        else link
        for link in topology.links
    ]
    return msgspec.structs.replace(topology, links=tuple(links))


def test_a_slow_nic_is_named():
    bound = topology_bound(degraded(preset("cpu-host", 4), "node3/nic0", 0.25))
    assert bound.algbw == F(125, 4) * 10**6
    assert bound.bottleneck == "node3's NICs (1 x 31.25 MB/s)"
    ranks = {f"node3/cpu{k}" for k in range(4)}
    assert ranks <= bound.cut or not ranks & bound.cut


def test_a_package_is_named():
    bound = topology_bound(read(foreign("nccl-xml/rccl-16gcd-mi250x-8nic.xml")))
    assert bound.algbw == F(1200, 7) * GB
    assert bound.bottleneck == (
        "the links of the package {gpu0, gpu1} of node0: xGMI links (4 x 50 GB/s + 1 x 100 GB/s)"
    )


def racks(uplink):
    """2 racks of 2 hosts of 2 ranks; hosts of 10 GB/s NICs."""
    base = preset("cpu-host", 4, 2, nic=10 * GB)
    switches = [Device(name, DeviceKind.SWITCH) for name in ("leaf0", "leaf1")]
    links = [
        msgspec.structs.replace(link, b=f"leaf{int(link.a[4]) // 2}")
        if link.b == "fabric"
        else link
        for link in base.links
    ]
    links += [
        Link(s.id, "fabric", LinkKind.ETHERNET, nominal=Figure(uplink * GB, Source.FILE))
        for s in switches
    ]
    return msgspec.structs.replace(base, devices=(*base.devices, *switches), links=tuple(links))


def test_uplinks_of_racks_are_named():
    bound = topology_bound(racks(4))
    assert bound.algbw == 4 * GB
    assert bound.bottleneck == "the links between switches (2 x 4 GB/s)"
    assert bound.kind == "all_reduce_lp_symmetric"
    assert topology_bound(racks(40)).bottleneck == "each node's NICs (1 x 10 GB/s)"


TOPOLOGIES = [
    *(preset(name, nodes) for name in ("dgx-a100", "dgx-h100", "cpu-host") for nodes in (1, 2, 3)),
    preset("cpu-host", 2, 4, nic=[GB, 2 * GB]),
    preset("dgx-a100", 3, 4, nic=25e9),
    degraded(preset("dgx-a100", 2), "node1/nic2", 0.5),
    racks(4),
    racks(40),
]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: f"{t.name}-{len(t.ranks)}")
def test_no_coarser_bound_is_above_the_program(topology):
    exact = topology_bound(topology)
    assert exact.kind.startswith("all_reduce_lp")
    coarse = topology_bound(topology, exact=False)
    assert coarse.kind == "all_reduce_cut"
    assert coarse.algbw >= exact.algbw
    level = all_reduce_lower_bound(levels(topology), GB).seconds
    assert level <= exact.seconds(GB) * (1 + 1e-12)
    assert topology_bound(topology, rate="effective").algbw <= exact.algbw


CAPTURED = [
    "azure-ncv4.xml",
    "perlmutter-4x-a100-4-slingshot.xml",
    "rccl-3x-mi210-pcie-1nic.xml",
    "rccl-4x-vega20-ring-1nic.xml",
    "rccl-8x-gfx908-2hives-1nic.xml",
    "rccl-8x-gfx908-4nic.xml",
    "rccl-8x-gfx90a-xgmi-nonic.xml",
    "rccl-8x-mi300x-8nic.xml",
]


@pytest.mark.parametrize("name", CAPTURED)
def test_captured_machines_have_a_bound_whose_rates_are_those_of_links(name):
    topology = read(foreign(f"nccl-xml/{name}"))
    bound = topology_bound(topology)
    assert bound.tight
    level = all_reduce_lower_bound(levels(topology), GB).seconds
    assert level <= bound.seconds(GB) * (1 + 1e-12)
    rates = re.findall(r"(\d+) x ([\d.]+) GB/s", bound.bottleneck)
    known = {float(f"{link.nominal.value / GB:.4g}") for link in topology.links if link.nominal}
    assert rates
    assert {float(rate) for _, rate in rates} <= known
    carried = sum(int(count) * float(rate) for count, rate in rates)
    assert carried <= sum(link.nominal.value for link in topology.links if link.nominal) / GB


def test_idle_devices_do_not_matter():
    base = preset("dgx-a100", 2, 4)
    graph = flow_graph(base)
    assert not any("gpu7" in vertex for vertex in graph.out)
    storage = Device("node0/storage", DeviceKind.NIC, "node0", attributes={"data": False})
    more = msgspec.structs.replace(
        base,
        devices=(*base.devices, storage),
        links=(
            *base.links,
            Link("node0/storage", "node0/pcie0", LinkKind.PCIE),
            Link("node0/storage", "fabric", LinkKind.ETHERNET),
        ),
    )
    assert topology_bound(more).algbw == topology_bound(base).algbw


def test_nonsense_is_refused_by_name():
    base = preset("cpu-host", 2, 1)
    cut_off = msgspec.structs.replace(
        base, links=tuple(link for link in base.links if "node1/nic0" not in (link.a, link.b))
    )
    unknown = msgspec.structs.replace(
        base,
        links=tuple(msgspec.structs.replace(link, nominal=None) for link in base.links),
    )
    for topology, complaint in [
        (Topology("empty", (), ()), "has no ranks"),
        (preset("cpu-host", 1, 1), "two ranks"),
        (cut_off, "'node1/cpu0' cannot be reached"),
        (unknown, "no bandwidth is known"),
    ]:
        with pytest.raises(PlanError, match=complaint):
            topology_bound(topology)
    with pytest.raises(PlanError, match="there is no switch 'node0/nic0x'"):
        topology_bound(base, multicast=["node0/nic0x"])


@pytest.mark.slow
def test_sixteen_thousand_gpus_fold():
    bound = topology_bound(preset("dgx-h100", 2048))
    assert bound.kind == "all_reduce_lp_symmetric"
    assert bound.algbw == F(2048 * 400, 2 * 2047) * GB
    assert bound.bottleneck == "each node's NICs (8 x 50 GB/s)"


def test_a_thousand_gpus_fold():
    assert topology_bound(preset("dgx-h100", 128)).algbw == F(128 * 400, 2 * 127) * GB
