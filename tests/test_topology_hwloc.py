"""hwloc XML files of real machines; the right answers are in data/hwloc-xml/SOURCES.md."""

from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topo_ar.errors import TopologyError
from topo_ar.topology.levels import levels
from topo_ar.topology.model import (
    Device,
    DeviceKind,
    LinkKind,
    Source,
    Topology,
    from_json,
    to_json,
)
from topo_ar.topology.paths import PathClass, Paths
from topo_ar.topology.ports import carries_data
from topo_ar.topology.readers import describe, read

DATA = Path(__file__).parent / "data" / "hwloc-xml"
ALL = sorted(path.name for path in DATA.glob("*.xml"))
AWS_GPUS = ["10:1c", "10:1d", "20:1c", "20:1d", "90:1c", "90:1d", "a0:1c", "a0:1d"]


def load(name: str) -> Topology:
    return read(DATA / name)


def devices(topology: Topology, kind: DeviceKind) -> list[Device]:
    return [device for device in topology.devices if device.kind is kind]


def data_nics(topology: Topology) -> list[Device]:
    return [nic for nic in devices(topology, DeviceKind.NIC) if carries_data(nic)]


def bus(device: Device) -> str:
    """Bus and device number of the bus id, ``10:1c`` of ``0000:10:1c.0``."""
    return str(device.attributes["busid"])[5:10]


def uplink(topology: Topology, device: str) -> float | None:
    [link] = [x for x in topology.links if x.a == device and x.kind is LinkKind.PCIE]
    return None if link.nominal is None else link.nominal.value


def nearest(topology: Topology) -> dict[str, set[str]]:
    """The bus of each GPU and those of its nearest NICs."""
    by_id = {device.id: device for device in topology.devices}
    paths = Paths(topology)
    return {
        bus(by_id[rank])[:2]: {bus(by_id[nic])[:2] for nic in paths.nearest_nics(rank).nics}
        for rank in topology.ranks
    }


def said(topology: Topology, *words: str) -> list[str]:
    return [note for note in topology.notes if all(word in note for word in words)]


@pytest.mark.parametrize("name", ALL)
def test_every_file_is_sound_and_goes_through_json(name: str) -> None:
    found = describe(DATA / name)
    assert found.format == "hwloc-xml"
    assert from_json(to_json(found.topology)) == found.topology
    assert {x.source for link in found.topology.links for x in (link.nominal, link.effective) if x}
    for link in found.topology.links:
        for figure in (link.nominal, link.effective):
            assert figure is None or figure.source in (Source.FILE, Source.ASSUMED)


def test_dgx2_is_one_domain_of_sixteen() -> None:
    topology = load("nvidia-dgx2.xml")
    assert len(topology.ranks) == 16
    gpus = devices(topology, DeviceKind.GPU)
    assert {gpu.attributes["device"] for gpu in gpus} == {"0x1db8"}
    assert [gpu.attributes["index"] for gpu in gpus] == list(range(16))
    assert Counter(gpu.numa for gpu in gpus) == {0: 8, 1: 8}
    assert {uplink(topology, gpu.id) for gpu in gpus} == {15.753846e9}
    assert gpus[0].attributes["uuid"] == "GPU-d3977428-7a30-086b-2e20-5c1eeed647c6"
    [switch] = devices(topology, DeviceKind.NVSWITCH)
    assert switch.attributes["switches"] == 12
    assert said(topology, "12 NVSwitches (6 at NUMA node 0, 6 at NUMA node 1)")
    nvlinks = [link for link in topology.links if link.kind is LinkKind.NVLINK]
    assert {(link.count, link.nominal and link.nominal.value) for link in nvlinks} == {(6, 150e9)}
    [node] = levels(topology).nodes
    assert node.islands == ()
    assert (node.intra.nominal, node.intra.payload) == (150e9, 120e9)
    paths = Paths(topology)
    assert {paths.between(a, b).path_class for a, b in combinations(topology.ranks, 2)} == {
        PathClass.NVL
    }


def test_power8_has_pairs_and_nvlink_to_its_cpus() -> None:
    topology = load("power8-4x-p100.xml")
    domains = [str(gpu.attributes["busid"])[:4] for gpu in devices(topology, DeviceKind.GPU)]
    assert domains == ["0002", "0003", "000a", "000b"]
    found = {
        (link.a.removeprefix("node0/"), link.b.removeprefix("node0/")): (
            link.count,
            link.nominal and link.nominal.value,
        )
        for link in topology.links
        if link.kind is LinkKind.NVLINK
    }
    assert found == dict.fromkeys(
        [
            ("gpu0", "gpu1"),
            ("gpu2", "gpu3"),
            *((f"gpu{i}", f"numa{i // 2}") for i in range(4)),
        ],
        (2, 40e9),
    )
    assert levels(topology).nodes[0].islands == ((0, 1), (2, 3))
    paths = Paths(topology)
    assert paths.between("node0/gpu0", "node0/numa0").path_class is PathClass.C2C
    assert paths.between("node0/gpu0", "node0/gpu2").path_class is PathClass.SYS
    [joint] = [link for link in topology.links if link.kind is LinkKind.UPI]
    assert joint.effective is not None
    assert joint.effective.value == 32e9


def test_sandybridge_displays_are_no_gpus_and_the_bus_does_not_tell_the_socket() -> None:
    topology = load("2x-sandybridge-gpus-ib.xml")
    gpus = devices(topology, DeviceKind.GPU)
    assert [(bus(gpu), gpu.numa) for gpu in gpus] == [("03:00", 0), ("83:00", 1), ("84:00", 1)]
    assert {(gpu.attributes["vendor"], gpu.attributes["device"]) for gpu in gpus} == {
        ("0x10de", "0x1094")
    }
    [left_out] = said(topology, "display, no GPU")
    assert "102b:0532" in left_out
    assert "1002:6798" in left_out
    [hca] = data_nics(topology)
    assert (hca.attributes["name"], bus(hca), hca.numa) == ("mlx5_0", "04:00", 1)
    assert hca.attributes["guid"] == "248a0703001e39fe"
    names = {nic.attributes["name"]: carries_data(nic) for nic in devices(topology, DeviceKind.NIC)}
    assert names == {"mlx5_0": True, "eth0": False, "eth1": False}
    assert all(x.nominal is None for x in topology.links if x.kind is LinkKind.PCIE)
    assert said(topology, "PCIe speed not in the file", "node0/gpu0")
    assert said(topology, "rate of the port not in the file", "mlx5_0")


@pytest.mark.parametrize(
    ("name", "model", "efa"),
    [("aws-p3dn.24xl.xml", "0x1db5", "0xefa0"), ("aws-g5.48xl.xml", "0x2237", "0xefa0")],
)
def test_devices_of_the_whole_machine_have_no_known_place(name: str, model: str, efa: str) -> None:
    topology = load(name)
    gpus = devices(topology, DeviceKind.GPU)
    assert [gpu.attributes["device"] for gpu in gpus] == [model] * 8
    assert {device.numa for device in (*gpus, *devices(topology, DeviceKind.NIC))} == {None}
    assert [cpu.numa for cpu in devices(topology, DeviceKind.CPU)] == [0, 1]
    assert said(topology, "NUMA node not known", "node0/gpu7", "node0/nic0")
    assert said(topology, "display, no GPU", "1d0f:1111")
    [nic] = data_nics(topology)
    assert (nic.attributes["device"], nic.attributes["name"]) == (efa, "rdmap0s21")
    assert said(topology, "not RDMA", "ens5")
    [port] = [link for link in topology.links if link.b == "fabric"]
    assert port.nominal is not None
    assert port.nominal.value == 100e9 / 8
    assert said(topology, "NVLink is not described")


def test_an_idle_link_is_not_the_capability() -> None:
    topology = load("aws-g5.48xl.xml")
    pcie = [link for link in topology.links if link.a.startswith("node0/gpu") and link.nominal]
    assert {link.nominal.value for link in pcie if link.nominal} == {2e9}
    assert {link.nominal.note for link in pcie if link.nominal} == {"current speed, may be idle"}


def test_aws_p4d() -> None:
    topology = load("aws-p4d.24xl.xml")
    gpus = devices(topology, DeviceKind.GPU)
    assert [bus(gpu) for gpu in gpus] == AWS_GPUS
    assert {gpu.attributes["device"] for gpu in gpus} == {"0x20b0"}
    assert {uplink(topology, gpu.id) for gpu in gpus} == {31.507692e9}
    assert [bus(nic) for nic in data_nics(topology)] == ["10:1b", "20:1b", "90:1b", "a0:1b"]
    assert [gpu.numa for gpu in gpus] == [0] * 4 + [1] * 4
    assert [nic.numa for nic in data_nics(topology)] == [0, 0, 1, 1]
    together: dict[object, set[str]] = {}
    for device in (*gpus, *data_nics(topology)):
        together.setdefault(device.attributes["host_bridge"], set()).add(bus(device))
    assert together == {
        f"0000:{b}": {f"{b}:1b", f"{b}:1c", f"{b}:1d"} for b in ("10", "20", "90", "a0")
    }
    others = [nic for nic in devices(topology, DeviceKind.NIC) if not carries_data(nic)]
    assert [nic.attributes["device"] for nic in others] == ["0xec20"] * 4
    assert [cpu.numa for cpu in devices(topology, DeviceKind.CPU)] == [0, 1]


def test_aws_p5_has_four_nics_for_each_gpu() -> None:
    topology = load("aws-p5.48xl.xml")
    gpus = devices(topology, DeviceKind.GPU)
    assert {gpu.attributes["device"] for gpu in gpus} == {"0x2330"}
    assert {uplink(topology, gpu.id) for gpu in gpus} == {63.015385e9}
    groups = {
        0x53: range(0x4F, 0x53),
        0x64: range(0x60, 0x64),
        0x75: range(0x71, 0x75),
        0x86: range(0x82, 0x86),
        0x97: range(0x93, 0x97),
        0xA8: range(0xA4, 0xA8),
        0xB9: range(0xB5, 0xB9),
        0xCA: range(0xC6, 0xCA),
    }
    assert nearest(topology) == {
        f"{gpu:02x}": {f"{nic:02x}" for nic in nics} for gpu, nics in groups.items()
    }
    paths = Paths(topology)
    assert {paths.nearest_nics(rank).path_class for rank in topology.ranks} == {PathClass.PIX}
    nics = data_nics(topology)
    assert {nic.attributes["device"] for nic in nics} == {"0xefa1"}
    assert {uplink(topology, nic.id) for nic in nics} == {15.753846e9}
    assert len(devices(topology, DeviceKind.NIC)) == 64
    [node] = levels(topology).nodes
    assert [nic.nominal for nic in node.nics] == [12.5e9] * 32
    assert said(topology, "emulated bridge", "15.8 GB/s above a device at 63.0")


def test_aws_p6_leaves_the_nvswitch_managers_out() -> None:
    topology = load("aws-p6-b200.48xl.xml")
    gpus = devices(topology, DeviceKind.GPU)
    assert {gpu.attributes["device"] for gpu in gpus} == {"0x2901"}
    assert nearest(topology) == {
        "51": {"4f", "50"},
        "52": {"4f", "50"},
        "62": {"60", "61"},
        "63": {"60", "61"},
        "75": {"71", "72"},
        "76": {"71", "72"},
        "86": {"84", "85"},
        "87": {"84", "85"},
    }
    assert {nic.attributes["device"] for nic in data_nics(topology)} == {"0xefa3"}
    assert [nic.nominal for nic in levels(topology).nodes[0].nics] == [50e9] * 8
    managers = [
        nic for nic in devices(topology, DeviceKind.NIC) if nic.attributes["vendor"] == "0x15b3"
    ]
    assert [(bus(nic), carries_data(nic)) for nic in managers] == [
        ("73:00", False),
        ("74:00", False),
    ]
    assert said(topology, "3.9 GB/s beside an RDMA card at 63.0", "a management function")


# --- what no captured file shows --------------------------------------------------------------

MACHINE = """<?xml version="1.0" encoding="UTF-8"?>
<topology version="2.0"><object type="Machine" nodeset="0x3">
<object type="Package" nodeset="0x3" gp_index="1">
<object type="NUMANode" os_index="0" cpuset="0xf" nodeset="0x1" gp_index="2"/>
<object type="NUMANode" os_index="1" cpuset="{second}" nodeset="0x2" gp_index="3"/>
{inside}</object></object>{after}</topology>"""
GPU = (
    '<object type="PCIDev" gp_index="1{i}" pci_busid="0000:0{i}:00.0" '
    'pci_type="{pci_class} [{ids}] [0000:0000] a1" pci_link_speed="31.507692">{inner}</object>'
)


def machine(inside: str = "", second: str = "0xf0", after: str = "") -> str:
    return MACHINE.format(inside=inside, second=second, after=after)


def gpu(i: int, pci_class: str = "0302", ids: str = "10de:20b0", inner: str = "") -> str:
    return GPU.format(i=i, pci_class=pci_class, ids=ids, inner=inner)


def test_a_package_of_two_numa_nodes_leaves_open_which() -> None:
    topology = read(machine(gpu(1)))
    assert topology.devices[-1].kind is DeviceKind.HOST
    assert said(topology, "NUMA node not known", "node0/gpu0")
    lone = read(machine(gpu(1), second="0x0"))
    assert [d.numa for d in lone.devices] == [0, 0]
    assert said(lone, "NUMA node without CPUs", "1")


def test_a_card_with_a_screen_computes_where_the_driver_says_so_or_says_nothing() -> None:
    cards = gpu(1, "0300", "10de:2204") + gpu(2, "0300", "10de:2204")
    assert len(read(machine(cards)).ranks) == 2
    told = '<object type="OSDev" name="nvml0" osdev_type="5"/>'
    cards = gpu(1, "0300", "10de:2204", told) + gpu(2, "0300", "10de:1eb8")
    topology = read(machine(cards))
    assert [d.attributes["busid"] for d in devices(topology, DeviceKind.GPU)] == ["0000:01:00.0"]
    cards = gpu(1, "1200", "1002:74a1") + gpu(2, "0380", "1002:740f") + gpu(3, "0300", "1002:744c")
    assert len(read(machine(cards)).ranks) == 2


def test_the_drivers_numbers_are_the_gpus_numbers() -> None:
    cards = "".join(
        gpu(i, inner=f'<object type="OSDev" name="nvml{2 - i}" osdev_type="5"/>') for i in (1, 2)
    )
    topology = read(machine(cards))
    assert [(d.id, bus(d)) for d in devices(topology, DeviceKind.GPU)] == [
        ("node0/gpu0", "02:00"),
        ("node0/gpu1", "01:00"),
    ]


def matrix(values: str, names: str = "PCIDev:11 PCIDev:12") -> str:
    return (
        f'<distances2hetero nbobjs="2" name="NVLinkBandwidth"><indexes>{names}</indexes>'
        f"<u64values>{values}</u64values></distances2hetero>"
    )


def test_directions_that_differ_and_matrices_that_are_cut() -> None:
    cards = gpu(1) + gpu(2)
    topology = read(machine(cards, after=matrix("0 100000 75000 0")))
    [link] = [link for link in topology.links if link.kind is LinkKind.NVLINK]
    assert (link.count, link.nominal and link.nominal.value) == (3, 75e9)
    assert said(topology, "100000 MB/s one way, 75000 the other; the smaller counts")
    cut = read(machine(cards, after=matrix("0 100000 100000")))
    assert not any(link.kind is LinkKind.NVLINK for link in cut.links)
    assert said(cut, "3 values for 2 objects", "NVLink is not known")
    odd = read(machine(cards, after=matrix("0 33333 33333 0")))
    assert said(odd, "33333 MB/s", "cannot be told")
    unknown = read(machine(cards, after=matrix("0 1 1 0", "PCIDev:11 PCIDev:77")))
    assert said(unknown, "PCIDev:77, which is no GPU, NVSwitch or CPU")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<topology><object/></topology>", "text:1: version of <topology> is not given"),
        ('<topology version="2.0"/>', "text:1: holds no object of type Machine"),
        (machine().replace('os_index="1"', 'os_index="0"'), "text:5: there are two NUMA nodes 0"),
        (machine(gpu(1).replace("0302", "zz")), "text:6: a PCIDev needs pci_busid and pci_type"),
        (machine(second="0xgg"), "text:5: cpuset='0xgg' is no bitmap"),
        (machine().replace("</topology>", ""), "text:6: not well-formed"),
    ],
)
def test_what_cannot_be_read_is_one_message_with_the_line(text: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        read(text)


BOMB = '<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">'


@pytest.mark.parametrize(
    "doctype",
    [
        f"<!DOCTYPE topology [{BOMB}]>",
        '<!DOCTYPE topology [<!ENTITY x SYSTEM "file:///etc/hostname">]>',
        '<!DOCTYPE topology SYSTEM "file:///etc/hostname">',
        '<!DOCTYPE topology SYSTEM "http://127.0.0.1:1/hwloc2.dtd">',
        f'<!DOCTYPE topology SYSTEM "hwloc2.dtd" [{BOMB}]>',
    ],
)
def test_entities_and_foreign_grammars_are_refused(doctype: str) -> None:
    with pytest.raises(TopologyError, match="text: XML that cannot be read safely"):
        read(machine().replace("<topology", f"{doctype}<topology"))


def test_hwlocs_own_grammar_is_not_fetched_and_not_refused() -> None:
    named = '<!DOCTYPE topology SYSTEM "hwloc2.dtd"><topology'
    assert read(machine().replace("<topology", named)).devices == read(machine()).devices


@pytest.mark.parametrize("encoding", ["utf-8", "UTF-16", "UTF-9", "cp1252", "big5", "idna"])
def test_the_declared_encoding_is_that_of_the_file_not_of_its_text(encoding: str) -> None:
    assert read(machine().replace("UTF-8", encoding)) == read(machine())


@pytest.mark.parametrize("name", ALL)
def test_cut_files_are_one_message(name: str) -> None:
    lines = (DATA / name).read_text().splitlines(keepends=True)
    for end in range(0, len(lines), 10):
        with pytest.raises(TopologyError, match=r"text|is empty"):
            read("".join(lines[:end]) + "\n")


@settings(max_examples=60)
@given(st.sampled_from(ALL), st.data())
def test_flipped_bytes_are_a_topology_or_one_message(name: str, data: st.DataObject) -> None:
    raw = bytearray((DATA / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place] = data.draw(st.integers(0, 255))
    text = raw.decode("utf-8", "replace")
    try:
        topology = read(text)
    except TopologyError:
        with pytest.raises(TopologyError, match="text"):
            read(text)
    else:
        assert from_json(to_json(topology)) == topology
