"""Machines known by name: the figures of their documents."""

import networkx as nx
import pytest

from topo_ar.errors import ConfigError
from topo_ar.topology.graph import to_networkx
from topo_ar.topology.levels import levels
from topo_ar.topology.model import DeviceKind, from_json, to_json
from topo_ar.topology.presets import PRESETS, preset


@pytest.mark.parametrize(
    ("name", "intra", "nic"),
    [
        ("dgx-a100", (300e9, 240e9), (25e9, 24e9)),
        ("dgx-h100", (450e9, 370.8e9), (50e9, 48e9)),
    ],
)
def test_dgx_figures(name: str, intra: tuple[float, float], nic: tuple[float, float]) -> None:
    topology = preset(name, nodes=2)
    assert from_json(to_json(topology)) == topology
    found = levels(topology)
    assert [node.ranks for node in found.nodes] == [tuple(range(8)), tuple(range(8, 16))]
    for node in found.nodes:
        assert (node.intra.nominal, node.intra.payload) == pytest.approx(intra)
        assert [(r.nominal, r.payload) for r in node.nics] == [pytest.approx(nic)] * 8
        assert node.intra.latency == pytest.approx(3.4e-6)
        assert node.nics[0].latency == pytest.approx(14e-6)
    for link in topology.links:
        for figure in (link.nominal, link.effective, link.latency):
            assert figure is None or (figure.source == "preset" and figure.note)


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


def test_4096_gpus() -> None:
    topology = preset("dgx-h100", nodes=512)
    assert len([d for d in topology.devices if d.kind is DeviceKind.GPU]) == 4096
    assert levels(topology).world_size == 4096


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
