"""Topologies written in other people's formats: nothing is lost that the format can say."""

from pathlib import Path

import networkx as nx
import pytest
from defusedxml import ElementTree

from tests.foreign import all_foreign, foreign
from topo_ar.errors import ConfigError, TopologyError
from topo_ar.topology.model import (
    Device,
    DeviceKind,
    Figure,
    Link,
    LinkKind,
    Source,
    Topology,
    from_json,
)
from topo_ar.topology.paths import Paths
from topo_ar.topology.presets import PRESETS, preset
from topo_ar.topology.readers import describe, read
from topo_ar.topology.writers import dot, graphml, nccl_xml, write

NCCL = [
    name
    for name in all_foreign()
    if name.startswith("nccl-xml/") and not name.endswith("graph.xml")
]


def elements(text):
    return list(ElementTree.fromstring(text).iter())


@pytest.mark.parametrize("name", NCCL)
def test_nccl_files_come_back_as_they_were(name):
    before = read(foreign(name))
    written = nccl_xml.write_text(before)
    after = read(written.text)
    assert after.devices == before.devices
    assert after.links == before.links
    assert after.ranks == before.ranks
    assert nccl_xml.write_text(after).text == written.text


@pytest.mark.parametrize("name", NCCL)
def test_nccl_can_parse_what_is_written(name):
    text = nccl_xml.write_text(read(foreign(name))).text
    found = elements(text)
    assert len(found) <= 256
    assert "&" not in text
    for element in found:
        assert len(element.attrib) <= 16
        assert len(element) <= 640
        assert all(len(value) <= 255 for value in element.attrib.values())


def test_every_fact_of_one_row_of_each_kind():
    text = (
        '<system version="1"><cpu numaid="0" arch="x86_64" vendor="GenuineIntel" familyid="6" '
        'modelid="143" affinity="ffff">'
        '<pci busid="0000:10:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">'
        '<pcilink target="0000:20:00.0"/>'
        '<pci busid="0000:11:00.0" class="0x030200" link_speed="5.0 GT/s PCIe" link_width="8">'
        '<gpu dev="0" sm="100" rank="0" gdr="1"><c2c bw="44712" count="5"/>'
        '<nvlink target="ffffffff:ff:ff.0" count="18" tclass="0x068000"/></gpu></pci></pci>'
        '<pci busid="0000:20:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">'
        '<pcilink target="0000:10:00.0"/>'
        '<pci busid="0000:21:00.0" class="0x020700" link_speed="" link_width="8"><nic>'
        '<net name="a" dev="0" speed="200000" port="1" guid="0x1" latency="1.5" maxconn="64" '
        'gdr="1" coll="1" rail="3"/>'
        '<net name="b" dev="1" speed="100000" port="2" guid="0x2" latency="1.5" maxconn="64" '
        'gdr="1" rail="4"/></nic></pci></pci></cpu></system>'
    )
    before = read(text)
    after = read(nccl_xml.write_text(before).text)
    assert (after.devices, set(map(repr, after.links))) == (
        before.devices,
        set(map(repr, before.links)),
    )
    nic = next(device for device in after.devices if device.kind is DeviceKind.NIC)
    assert nic.attributes["guid"] == "0x1,0x2"
    assert nic.attributes["rail"] == "3,4"
    assert nic.attributes["coll"] == "1,"
    cable = next(link for link in after.links if link.kind is LinkKind.INFINIBAND)
    assert cable.nominal is not None
    assert (cable.nominal.value, cable.count) == (37.5e9, 2)
    assert cable.latency is not None
    assert cable.latency.value == pytest.approx(0.75e-6)


@pytest.mark.parametrize(("name", "nodes"), [("dgx-h100", 1), ("dgx-h100", 2), ("dgx-a100", 1)])
def test_presets_keep_their_shape(name, nodes):
    before = preset(name, nodes=nodes)
    written = nccl_xml.write_text(before)
    after = read(written.text)
    assert after.ranks == before.ranks
    assert len(after.devices) == len(before.devices)
    assert len(after.links) == len(before.links)
    ours, theirs = Paths(before), Paths(after)
    for rank in before.ranks[:8]:
        assert ours.nearest_nics(rank) == theirs.nearest_nics(rank)
        for other in before.ranks[:8]:
            assert ours.between(rank, other).path_class is theirs.between(rank, other).path_class
    said = " ".join(written.left_out)
    assert "made up" in said
    assert "rates of nvlink, upi are left out" in said
    assert ("NCCL_TOPO_FILE takes the own node only" in said) == (nodes > 1)
    speeds = [e.attrib["link_speed"] for e in elements(written.text) if e.tag == "pci"]
    assert set(speeds) == {"32.0 GT/s PCIe" if "h100" in name else "16.0 GT/s PCIe"}


@pytest.mark.parametrize(
    "name", [*(n for n in all_foreign() if not n.startswith("nccl-xml/")), *PRESETS]
)
def test_whatever_is_known_is_written_and_read_again(name):
    before = preset(name) if name in PRESETS else read(foreign(name))
    if name in ("gb200-nvl72", "gb300-nvl72"):
        with pytest.raises(TopologyError, match="has 542 parts; NCCL reads at most 256"):
            nccl_xml.write_text(before)
        return
    text = nccl_xml.write_text(before).text
    after = read(text)
    kinds = (DeviceKind.GPU, DeviceKind.NIC)
    assert sum(d.kind in kinds for d in after.devices) == sum(
        d.kind in kinds for d in before.devices
    )
    fast = (LinkKind.NVLINK, LinkKind.XGMI)
    assert sum(link.count for link in after.links if link.kind in fast) == sum(
        link.count for link in before.links if link.kind in fast
    )


def test_what_nccl_has_no_place_for_is_said():
    said = nccl_xml.write_text(preset("cpu-host", nodes=1)).left_out
    assert "4 ranks without a GPU are left out" in said
    assert "effective rates of the network are left out" in said
    odd = Topology(
        "odd",
        (
            Device("n/numa0", DeviceKind.CPU, "n", 0, {"arch": "a<b", "vendor": "v" * 300}),
            Device("n/gpu0", DeviceKind.GPU, "n", 0, {"sm": "80"}),
            Device("n/gpu1", DeviceKind.GPU, "n"),
            Device("n/nic0", DeviceKind.NIC, "n", 0, {"data": False}),
        ),
        (
            Link("n/gpu0", "n/numa0", LinkKind.PCIE, Figure(7e9, Source.MEASURED)),
            Link("n/nic0", "n/numa0", LinkKind.PCIE),
        ),
    )
    written = nccl_xml.write_text(odd)
    said = " ".join(written.left_out)
    assert "arch of <cpu> is left out: NCCL cannot read 'a<b'" in said
    assert "vendor of <cpu> is left out" in said
    assert "7 GB/s of n/gpu0 fits no PCIe generation and width" in said
    assert "no PCIe path is known for n/gpu1" in said
    assert "n/nic0 should not be used: set NCCL_IB_HCA" in said
    assert len(read(written.text).devices) == 5


def test_what_has_no_node_or_too_many_parts_is_refused():
    with pytest.raises(TopologyError, match="has no node, and NCCL's XML"):
        nccl_xml.write_text(Topology("net", (Device("s", DeviceKind.SWITCH),), ()))
    devices = [Device("n/numa0", DeviceKind.CPU, "n", 0)]
    devices += [Device(f"n/gpu{i}", DeviceKind.GPU, "n", 0) for i in range(150)]
    links = [Link(d.id, "n/numa0", LinkKind.PCIE) for d in devices[1:]]
    with pytest.raises(TopologyError, match="has 302 parts; NCCL reads at most 256"):
        nccl_xml.write_text(Topology("big", tuple(devices), tuple(links)))


def test_graphml_keeps_figures_with_their_sources():
    topology = preset("dgx-h100", nodes=2)
    graph = nx.parse_graphml(graphml.write_text(topology).text, force_multigraph=True)
    assert graph.number_of_nodes() == len(topology.devices)
    assert graph.number_of_edges() == len(topology.links)
    assert graph.nodes["node1/gpu0"]["rank"] == 8
    assert graph.nodes["node0/nic1"]["attribute_name"] == "mlx5_3"
    [edge] = graph.get_edge_data("node0/gpu0", "node0/nvswitch").values()
    assert edge["kind"] == "nvlink"
    assert edge["nominal"] == 450e9
    assert edge["effective"] == pytest.approx(370.8e9)
    assert edge["nominal_source"] == "preset"


def test_dot_holds_every_device_and_link():
    topology = preset("cpu-host", nodes=2)
    text = dot.write_text(topology).text
    assert text.startswith('graph "cpu-host" {')
    assert text.count("subgraph cluster_") == 2
    assert text.count(" -- ") == len(topology.links)
    assert sum(f'"{device.id}" [label=' in text for device in topology.devices) == 13
    assert "style=dotted" in text
    assert text.count("{") == text.count("}")
    odd = Topology('a"b\\c', (Device('x"\ny', DeviceKind.HOST),), ())
    assert 'graph "a\\"b\\\\c" {' in dot.write_text(odd).text


@pytest.mark.parametrize("suffix", ["json", "xml", "graphml", "dot", "gv"])
def test_write_goes_by_the_suffix(tmp_path: Path, suffix):
    topology = read(foreign("nccl-xml/perlmutter-4x-a100-4-slingshot.xml"))
    path = tmp_path / f"out.{suffix}"
    left_out = write(topology, path)
    assert path.stat().st_size > 1000
    if suffix == "json":
        assert from_json(path.read_bytes()) == topology
        assert left_out == ()
    if suffix == "xml":
        assert describe(path).format == "nccl-xml"
    named = tmp_path / "named.txt"
    write(topology, named, format="dot")
    assert named.read_text().startswith("graph")


def test_unknown_formats_and_bad_places_are_named(tmp_path: Path):
    topology = preset("cpu-host")
    with pytest.raises(ConfigError, match=r"ends in '.txt' is not known; formats are topo-ar, nc"):
        write(topology, tmp_path / "x.txt")
    with pytest.raises(ConfigError, match="format 'yaml' is not known"):
        write(topology, tmp_path / "x.json", format="yaml")
    with pytest.raises(ConfigError, match="cannot write .*No such file"):
        write(topology, tmp_path / "no" / "x.json")
