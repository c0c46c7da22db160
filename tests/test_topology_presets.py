"""Machines known by name: the figures of their documents."""

import networkx as nx
import pytest

from tests.foreign import foreign
from topo_ar.cli.topology_source import load_several, load_topology
from topo_ar.errors import ConfigError
from topo_ar.topology.graph import to_networkx
from topo_ar.topology.levels import levels
from topo_ar.topology.model import DeviceKind, LinkKind, Source, from_json, to_json
from topo_ar.topology.paths import PathClass, Paths
from topo_ar.topology.presets import FABRICS, PRESETS, preset
from topo_ar.topology.readers import read

# GB/s one way: NVLink or XGMI of a GPU nominal and by NCCL's constants (PCIe where there is none),
# NICs and the nominal rate of each, GT/s of PCIe; from the data sheets that the presets name.
TABLE = {
    "dgx1-p100": (8, 80, 72, 4, 12.5, 8),
    "dgx1-v100": (8, 150, 120, 4, 12.5, 8),
    "dgx2": (16, 150, 120, 8, 12.5, 8),
    "dgx-a100": (8, 300, 240, 8, 25, 16),
    "a800": (8, 200, 160, 8, 25, 16),
    "dgx-h100": (8, 450, 370.8, 8, 50, 32),
    "dgx-h200": (8, 450, 370.8, 8, 50, 32),
    "hgx-b200": (8, 900, 721.8, 8, 50, 32),
    "gb200-nvl72": (72, 900, 721.8, 72, 50, 32),
    "gb300-nvl72": (72, 900, 721.8, 72, 100, 64),
    "aws-p3dn": (8, 150, 120, 1, 12.5, 8),
    "aws-p4d": (8, 300, 240, 4, 12.5, 16),
    "aws-p4de": (8, 300, 240, 4, 12.5, 16),
    "aws-p5": (8, 450, 370.8, 32, 12.5, 32),
    "aws-p5en": (8, 450, 370.8, 16, 25, 32),
    "aws-p6-b200": (8, 900, 721.8, 8, 50, 32),
    "aws-g5.48xl": (8, 15.754, 12, 1, 12.5, 16),
    "azure-ndv2": (8, 150, 120, 1, 12.5, 8),
    "azure-ndv4": (8, 300, 240, 8, 25, 16),
    "azure-ndv5": (8, 450, 370.8, 8, 50, 32),
    "azure-ncv4": (4, 31.508, 24, 1, 12.5, 16),
    "azure-gb200-v6": (4, 900, 721.8, 4, 50, 32),
    "azure-mi300x-v5": (8, 448, 336, 8, 50, 32),
    "gcp-a3-high": (8, 450, 370.8, 4, 25, 32),
    "gcp-a3-mega": (8, 450, 370.8, 8, 25, 32),
    "gcp-a3-ultra": (8, 450, 370.8, 8, 50, 32),
    "gcp-a4": (8, 900, 721.8, 8, 50, 32),
    "gcp-a4x": (4, 900, 721.8, 4, 50, 32),
    "gcp-a4x-max": (4, 900, 721.8, 4, 100, 64),
    "frontier": (8, 300, 216, 4, 25, 16),
    "mi250x-16gcd": (16, 350, 252, 8, 25, 16),
    "mi300x": (8, 448, 336, 8, 50, 32),
    "mi210-4": (4, 150, 126.6, 0, 0, 16),
    "perlmutter": (4, 300, 240, 4, 25, 16),
    # Two sockets: what a GPU gets across them is a quarter of the 16 GB/s that NCCL assumes.
    "pcie-8": (8, 31.508, 4, 2, 12.5, 16),
    "pcie-4": (4, 31.508, 24, 1, 12.5, 16),
    "ws-2x3090": (2, 56.25, 48, 0, 0, 16),
    "ws-2x5090": (2, 31.508, 24, 0, 0, 32),
    "cpu-host": (4, 25.6, 4, 1, 0.125, None),
    "laptop": (2, 25.6, 4, 0, 0, None),
}
ALONE = [name for name, row in TABLE.items() if row[3] == 0]


def test_the_table_is_of_all_presets() -> None:
    assert set(TABLE) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_figures_of_the_table(name: str) -> None:
    num_gpus, nominal, effective, num_nics, nic, pcie = TABLE[name]
    topology = preset(name)
    assert from_json(to_json(topology)) == topology
    [node] = levels(topology).nodes
    assert len(node.ranks) == num_gpus
    assert node.intra.nominal / 1e9 == pytest.approx(nominal, rel=1e-3)
    assert node.intra.payload / 1e9 == pytest.approx(effective, rel=1e-3)
    assert [rate.nominal / 1e9 for rate in node.nics] == [nic] * num_nics
    for link in topology.links:
        for figure in (link.nominal, link.effective, link.latency):
            assert figure is None or figure.note
            assert figure is None or figure.source in (Source.PRESET, Source.ASSUMED)
        if link.kind is LinkKind.PCIE and link.nominal and pcie is not None:
            assert f": PCIe {pcie:g} GT/s x" in link.nominal.note


@pytest.mark.parametrize("name", sorted(set(PRESETS) - set(ALONE)))
def test_every_machine_with_a_nic_makes_a_cluster(name: str) -> None:
    found = levels(preset(name, nodes=3))
    assert [node.name for node in found.nodes] == ["node0", "node1", "node2"]
    first, *others = found.nodes
    for other in others:
        assert (other.intra, other.nics, other.rank_nics) == (
            first.intra,
            first.nics,
            first.rank_nics,
        )
    assert found.racks == ()


@pytest.mark.parametrize("name", ALONE)
def test_a_machine_without_a_nic_takes_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} has no NIC"):
        preset(name, nodes=2)
    found = levels(preset(name, nodes=2, nic=1.25e9))
    assert [[nic.nominal for nic in node.nics] for node in found.nodes] == [[1.25e9]] * 2


def nearest(name: str) -> list[list[str]]:
    topology = preset(name)
    paths = Paths(topology)
    names = {d.id: str(d.attributes.get("name", d.id.partition("/")[2])) for d in topology.devices}
    return [[names[nic] for nic in paths.nearest_nics(gpu).nics] for gpu in topology.ranks]


def nics(*groups: tuple[int, ...]) -> list[list[str]]:
    return [[f"nic{i}" for i in group] for group in groups]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        # DGX H100 user guide, table 6.
        ("dgx-h100", [[f"mlx5_{i}"] for i in (0, 3, 4, 5, 6, 9, 10, 11)]),
        ("dgx-a100", nics((0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5), (6, 7), (6, 7))),
        ("azure-ndv4", nics((0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5), (6, 7), (6, 7))),
        ("azure-ndv5", nics(*((i,) for i in range(8)))),
        ("azure-ndv2", nics(*[(0,)] * 8)),
        ("aws-p4d", nics((0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,))),
        ("aws-p5", nics(*(tuple(range(4 * i, 4 * i + 4)) for i in range(8)))),
        ("aws-p5en", nics(*((2 * i, 2 * i + 1) for i in range(8)))),
        ("aws-p6-b200", nics((0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5), (6, 7), (6, 7))),
        ("dgx1-v100", nics((0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,))),
        ("mi250x-16gcd", nics(*((2 * (i // 4), 2 * (i // 4) + 1) for i in range(16)))),
        ("mi300x", nics(*((i,) for i in range(8)))),
        ("perlmutter", nics((3,), (2,), (1,), (0,))),
    ],
)
def test_nearest_nics_of_documents(name: str, wanted: list[list[str]]) -> None:
    assert nearest(name) == wanted


@pytest.mark.parametrize(
    ("name", "a", "b", "wanted"),
    [
        ("azure-ndv2", "gpu0", "nic0", PathClass.PHB),
        ("azure-ndv2", "gpu4", "nic0", PathClass.SYS),
        ("aws-p4d", "gpu0", "nic0", PathClass.PIX),
        ("dgx-h100", "gpu1", "nic1", PathClass.PXB),
        ("dgx1-v100", "gpu0", "gpu3", PathClass.NVL),
        ("dgx1-v100", "gpu0", "gpu5", PathClass.NVB),
        ("gb200-nvl72", "gpu0", "gpu71", PathClass.NVL),
        ("pcie-8", "gpu0", "gpu1", PathClass.PHB),
        ("pcie-8", "gpu0", "gpu7", PathClass.SYS),
        ("azure-ncv4", "gpu0", "gpu1", PathClass.SYS),
    ],
)
def test_path_classes_of_documents(name: str, a: str, b: str, wanted: PathClass) -> None:
    assert Paths(preset(name)).between(f"node0/{a}", f"node0/{b}").path_class is wanted


def fast_pairs(name: str) -> dict[tuple[int, int], int]:
    return {
        (int(link.a.rpartition("gpu")[2]), int(link.b.rpartition("gpu")[2])): link.count
        for link in preset(name).links
        if link.kind in (LinkKind.NVLINK, LinkKind.XGMI)
    }


def test_direct_links_of_documents() -> None:
    p100 = fast_pairs("dgx1-p100")
    assert (len(p100), set(p100.values())) == (16, {1})
    v100 = fast_pairs("dgx1-v100")
    assert (len(v100), sum(v100.values())) == (16, 24)
    assert {pair for pair, count in v100.items() if count == 2} == {
        *((0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7))
    }
    assert fast_pairs("perlmutter") == {(a, b): 4 for a in range(4) for b in range(a + 1, 4)}
    assert len(fast_pairs("mi300x")) == 28


def test_mi250x_is_wired_as_in_the_captured_model() -> None:
    captured = read(foreign("nccl-xml/rccl-16gcd-mi250x-8nic.xml"))
    wanted = {}
    for link in captured.links:
        if link.kind is LinkKind.XGMI:
            a, b = sorted(int(end.rpartition("gpu")[2]) for end in (link.a, link.b))
            wanted[a, b] = link.count
    assert fast_pairs("mi250x-16gcd") == wanted


def test_an_nvlink_domain_is_one_node_and_says_so() -> None:
    topology = preset("gb200-nvl72", nodes=2)
    assert [len(node.ranks) for node in levels(topology).nodes] == [72, 72]
    assert any("one NVLink domain" in note for note in topology.notes)
    trays = {d.attributes.get("tray") for d in topology.devices if d.kind is DeviceKind.GPU}
    assert trays == set(range(18))


def test_rails_have_a_leaf_switch_each_and_groups_are_racks() -> None:
    topology = preset(
        "dgx-h100", nodes=4, fabric="rail-optimised", oversubscription=2, nodes_per_leaf=2
    )
    found = levels(topology)
    assert [(rack.name, rack.nodes) for rack in found.racks] == [
        ("leaf0-rail0 to leaf0-rail7", (0, 1)),
        ("leaf1-rail0 to leaf1-rail7", (2, 3)),
    ]
    assert [rack.uplink.nominal for rack in found.racks] == [2 * 8 * 50e9 / 2] * 2
    paths = Paths(topology)
    assert paths.between("node0/nic3", "node1/nic3").devices == (
        *("node0/nic3", "leaf0-rail3", "node1/nic3"),
    )
    assert "an oversubscription of 2" in topology.notes[0]


def test_a_leaf_switch_takes_all_nics_of_its_nodes() -> None:
    found = levels(preset("cpu-host", nodes=5, fabric="leaf-spine", nodes_per_leaf=2))
    assert [rack.nodes for rack in found.racks] == [(0, 1), (2, 3), (4,)]
    assert [rack.uplink.nominal for rack in found.racks] == [250e6, 250e6, 125e6]
    assert found.racks[0].uplink.payload == pytest.approx(2 * found.nodes[0].nics[0].payload)
    # The lower half of a switch with 64 ports holds 4 nodes of 8 NICs.
    found = levels(preset("dgx-h100", nodes=8, fabric="leaf-spine"))
    assert [rack.nodes for rack in found.racks] == [(0, 1, 2, 3), (4, 5, 6, 7)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fabric": "torus"}, "no fabric 'torus'.*leaf-spine"),
        ({"oversubscription": 2.0}, "shape a fabric of several switches"),
        ({"nodes_per_leaf": 2}, "shape a fabric of several switches"),
        ({"fabric": "leaf-spine", "oversubscription": 0.5}, "oversubscription of 0.5"),
        ({"fabric": "leaf-spine", "nodes_per_leaf": 0}, "0 nodes per leaf"),
    ],
)
def test_fabrics_that_cannot_be(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        preset("dgx-h100", nodes=2, **options)


def test_cpu_host_takes_ranks_and_nics() -> None:
    [node] = levels(preset("cpu-host")).nodes
    assert node.ranks == (0, 1, 2, 3)
    assert [nic.nominal for nic in node.nics] == [125e6]
    assert node.nics[0].payload == pytest.approx(0.9564 * 125e6, rel=1e-4)
    found = levels(preset("cpu-host", nodes=3, ranks_per_node=2, nic=[125e6, 250e6]))
    assert found.world_size == 6
    assert [[nic.nominal for nic in node.nics] for node in found.nodes] == [[125e6, 250e6]] * 3


def test_flow_between_dgx_nodes_is_all_nics() -> None:
    for name, rate in (("dgx-a100", 200e9), ("dgx-h100", 400e9)):
        graph = to_networkx(preset(name, nodes=2))
        for node in ("node0", "node1"):
            for i in range(8):
                graph.add_edge(
                    *((node, f"{node}/gpu{i}") if node == "node0" else (f"{node}/gpu{i}", node))
                )
        assert nx.maximum_flow_value(graph, "node0", "node1", "bandwidth") == pytest.approx(rate)


@pytest.mark.parametrize("fabric", FABRICS)
def test_4096_gpus(fabric: str) -> None:
    topology = preset("dgx-h100", nodes=512, fabric=fabric)
    assert len([d for d in topology.devices if d.kind is DeviceKind.GPU]) == 4096
    found = levels(topology)
    assert found.world_size == 4096
    assert len(found.racks) == {"non-blocking": 0, "rail-optimised": 16, "leaf-spine": 128}[fabric]


def test_bad_requests_are_named() -> None:
    with pytest.raises(ConfigError, match=f"'dgx-z'.*{', '.join(PRESETS)}"):
        preset("dgx-z")
    with pytest.raises(ConfigError, match="nodes is 0"):
        preset("cpu-host", nodes=0)
    with pytest.raises(ConfigError, match="9 ranks do not fit"):
        preset("dgx-a100", ranks_per_node=9)
    with pytest.raises(ConfigError, match="-1"):
        preset("cpu-host", nic=-1.0)
    with pytest.raises(ConfigError, match="0 ranks"):
        preset("cpu-host", ranks_per_node=0)
    with pytest.raises(ConfigError, match="9 NICs"):
        preset("dgx-h100", nic=[1e9] * 9)


def test_fabric_options_of_the_command_line() -> None:
    options = (None, None, "leaf-spine", 2.0, 2)
    topology = load_topology("cpu-host", 4, *options)
    assert topology == preset(
        "cpu-host", nodes=4, fabric="leaf-spine", oversubscription=2, nodes_per_leaf=2
    )
    assert load_several(["cpu-host"], 4, *options) == (topology, "preset")
    with pytest.raises(ConfigError, match="--fabric.*shape a preset"):
        load_topology(str(foreign("nccl-xml/azure-ndv4.xml")), fabric="leaf-spine")
