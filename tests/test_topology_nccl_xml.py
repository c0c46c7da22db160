"""NCCL topology files of real machines; the right answers are in data/nccl-xml/SOURCES.md."""

import time
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
from topo_ar.topology.rates import interconnect_rate
from topo_ar.topology.readers import describe, read

DATA = Path(__file__).parent / "data" / "nccl-xml"
ALL = sorted(path.name for path in DATA.glob("*.xml") if "graph" not in path.name)


def load(name: str) -> Topology:
    return read(DATA / name)


def devices(topology: Topology, kind: DeviceKind) -> list[Device]:
    return [device for device in topology.devices if device.kind is kind]


def kinds(topology: Topology) -> Counter[str]:
    return Counter(device.kind.value for device in topology.devices)


def short(device_id: str) -> str:
    return device_id.removeprefix("node0/")


def nearest(topology: Topology) -> dict[str, tuple[str, set[str]]]:
    """The class and the nearest NICs of each GPU, NICs by name where the file names them."""
    paths = Paths(topology)
    names = {
        nic.id: str(nic.attributes.get("name") or nic.attributes["busid"])
        for nic in devices(topology, DeviceKind.NIC)
    }
    found = {}
    for rank in topology.ranks:
        nics = paths.nearest_nics(rank)
        found[short(rank)] = (nics.path_class.name, {names[nic] for nic in nics.nics})
    return found


def fast_pairs(topology: Topology, kind: LinkKind) -> dict[tuple[int, int], int]:
    """The number of links of each pair of GPUs that has any, by ``dev``."""
    return {
        (min(pair), max(pair)): link.count
        for link in topology.links
        if link.kind is kind
        for pair in [(int(link.a.split("gpu")[1]), int(link.b.split("gpu")[1]))]
    }


def numa(topology: Topology) -> list[int | None]:
    by_id = {device.id: device.numa for device in topology.devices}
    return [by_id[rank] for rank in topology.ranks]


def by_busid(topology: Topology, busid: str) -> str:
    [found] = [d.id for d in topology.devices if d.attributes.get("busid") == busid]
    return found


@pytest.mark.parametrize("name", ALL)
def test_every_file_is_sound_and_goes_through_json(name: str) -> None:
    found = describe(DATA / name)
    assert found.format == "nccl-xml"
    assert from_json(to_json(found.topology)) == found.topology
    assert read(to_json(found.topology).decode()) == found.topology
    for link in found.topology.links:
        for figure in (link.nominal, link.effective):
            assert figure is None or figure.source in (Source.FILE, Source.ASSUMED)


@pytest.mark.parametrize("name", [name for name in ALL if "g5" not in name])
def test_paths_are_the_same_in_both_directions(name: str) -> None:
    topology = load(name)
    paths = Paths(topology)
    nics = [nic.id for nic in devices(topology, DeviceKind.NIC)]
    for a, b in combinations([*topology.ranks, *nics], 2):
        there, back = paths.between(a, b), paths.between(b, a)
        assert there.path_class is back.path_class
        assert there.bandwidth == back.bandwidth


def test_perlmutter() -> None:
    topology = load("perlmutter-4x-a100-4-slingshot.xml")
    assert kinds(topology) == {"cpu": 4, "gpu": 4, "nic": 4, "switch": 1}
    assert [cpu.numa for cpu in devices(topology, DeviceKind.CPU)] == [3, 0, 1, 2]
    assert [short(rank) for rank in topology.ranks] == ["gpu0", "gpu1", "gpu2", "gpu3"]
    attributes = {d.id: d.attributes for d in topology.devices}
    assert [attributes[rank]["busid"][5:7] for rank in topology.ranks] == ["03", "41", "82", "c1"]
    assert {attributes[rank]["sm"] for rank in topology.ranks} == {"80"}
    assert numa(topology) == [3, 2, 1, 0]
    nics = sorted(devices(topology, DeviceKind.NIC), key=lambda nic: nic.id)
    assert [(nic.attributes["name"], nic.numa) for nic in nics] == [
        ("cxi0", 0),
        ("cxi1", 1),
        ("cxi2", 2),
        ("cxi3", 3),
    ]
    assert fast_pairs(topology, LinkKind.NVLINK) == dict.fromkeys(combinations(range(4), 2), 4)
    assert nearest(topology) == {f"gpu{i}": ("PHB", {f"cxi{3 - i}"}) for i in range(4)}
    [node] = levels(topology).nodes
    assert node.intra.payload == pytest.approx(240e9)
    assert node.intra.nominal == pytest.approx(300e9)
    assert [(nic.nominal, nic.payload) for nic in node.nics] == [(25e9, 24e9)] * 4
    pair = Paths(topology).between("node0/gpu0", "node0/gpu3")
    assert (pair.path_class, pair.bandwidth) == (PathClass.NVL, 80e9)
    cpu_pair = Paths(topology).between("node0/numa0", "node0/numa3")
    assert (cpu_pair.path_class, cpu_pair.bandwidth) == (PathClass.SYS, 16e9)


def test_aws_p4d_hint_file() -> None:
    topology = load("aws-p4d-24xl.xml")
    assert kinds(topology) == {"cpu": 2, "pcie_switch": 4, "gpu": 8, "nic": 4}
    assert len(topology.ranks) == 8
    assert not any(link.kind is LinkKind.NVLINK for link in topology.links)
    assert any("8 GPU-class" in n and "NVLink is not described" in n for n in topology.notes)
    paths = Paths(topology)
    for bus in ("10", "20", "90", "a0"):
        nic = by_busid(topology, f"0000:{bus}:1b.0")
        for function in ("1c", "1d"):
            gpu = by_busid(topology, f"0000:{bus}:{function}.0")
            assert paths.nearest_nics(gpu).nics == (nic,)
            path = paths.between(gpu, nic)
            assert (path.path_class, path.bandwidth) == (PathClass.PIX, 12e9)
    assert paths.between("node0/gpu0", "node0/gpu2").path_class is PathClass.PHB
    assert paths.between("node0/gpu0", "node0/gpu7").path_class is PathClass.SYS


def test_aws_g5_says_nothing_about_kinds() -> None:
    topology = load("aws-g5-48xl.xml")
    assert kinds(topology) == {"cpu": 2, "pcie_switch": 9}
    assert topology.ranks == ()
    assert any("without a class" in note and "0000:00:15.0" in note for note in topology.notes)
    assert any("arch, vendor not in the file" in note for note in topology.notes)
    with pytest.raises(TopologyError, match="has no ranks"):
        levels(topology)


def test_azure_ndv2() -> None:
    topology = load("azure-ndv2.xml")
    assert kinds(topology) == {"cpu": 2, "gpu": 8, "nic": 1}
    found = nearest(topology)
    assert found == {f"gpu{i}": ("PHB" if i < 4 else "SYS", {"0101:00:00.0"}) for i in range(8)}
    assert by_busid(topology, "0005:00:00.0") == "node0/gpu4"
    pcie = next(link for link in topology.links if link.a == "node0/gpu0")
    assert pcie.effective is not None
    assert pcie.effective.value == 24e9


def test_azure_ndv4_has_ties_and_file_order_is_not_gpu_order() -> None:
    topology = load("azure-ndv4.xml")
    assert kinds(topology) == {"cpu": 4, "pcie_switch": 4, "gpu": 8, "nic": 8}
    in_file = [d.attributes["busid"][:4] for d in devices(topology, DeviceKind.GPU)]
    assert in_file == ["0003", "0004", "0001", "0002", "000d", "000e", "000b", "000c"]
    attributes = {d.id: d.attributes for d in topology.devices}
    ranks = [attributes[rank]["busid"][:4] for rank in topology.ranks]
    assert ranks == ["0001", "0002", "0003", "0004", "000b", "000c", "000d", "000e"]
    for gpu, (path_class, nics) in nearest(topology).items():
        first = 1 + int(gpu.removeprefix("gpu")) // 2 * 2
        assert path_class == "PIX"
        assert nics == {f"010{first}:00:00.0", f"010{first + 1}:00:00.0"}


def test_azure_ndv5() -> None:
    topology = load("azure-ndv5.xml")
    assert kinds(topology) == {"cpu": 2, "pcie_switch": 8, "gpu": 8, "nic": 8}
    gpus = ["0001", "0002", "0003", "0008", "0009", "000a", "000b", "000c"]
    paths = Paths(topology)
    for i, domain in enumerate(gpus):
        gpu = by_busid(topology, f"{domain}:00:00.0")
        nic = by_busid(topology, f"010{i + 1}:00:00.0")
        assert gpu == f"node0/gpu{i}"
        assert paths.nearest_nics(gpu).nics == (nic,)
        path = paths.between(gpu, nic)
        assert (path.path_class, path.bandwidth) == (PathClass.PIX, 48e9)


def test_azure_ncv4_self_targets_are_no_nvlink() -> None:
    topology = load("azure-ncv4.xml")
    assert kinds(topology) == {"cpu": 4, "gpu": 4, "nic": 1, "switch": 1}
    assert not any(link.kind is LinkKind.NVLINK for link in topology.links)
    assert sum("GPU itself" in note for note in topology.notes) == 4
    paths = Paths(topology)
    assert {paths.between(a, b).path_class for a, b in combinations(topology.ranks, 2)} == {
        PathClass.SYS
    }
    assert nearest(topology)["gpu0"] == ("PHB", {"eth0"})
    assert nearest(topology)["gpu3"] == ("SYS", {"eth0"})
    [node] = levels(topology).nodes
    assert (node.intra.payload, node.intra.source) == (12e9, Source.ASSUMED)
    assert [nic.nominal for nic in node.nics] == [12.5e9]
    [nic] = devices(topology, DeviceKind.NIC)
    assert nic.attributes["gdr"] == "0"


def test_graphs_file_is_refused_by_name() -> None:
    with pytest.raises(TopologyError, match=r"azure-ncv4-graph.xml:1: <graphs>.*NCCL_TOPO_DUMP"):
        load("azure-ncv4-graph.xml")


def test_rccl_vega20_ring() -> None:
    topology = load("rccl-4x-vega20-ring-1nic.xml")
    assert [d.attributes["gcn"] for d in devices(topology, DeviceKind.GPU)] == ["906"] * 4
    # dev 0..3 are busids 1d, 20, 23, 26; the ring is 1d-20-26-23-1d.
    assert fast_pairs(topology, LinkKind.XGMI) == {(0, 1): 1, (1, 3): 1, (2, 3): 1, (0, 2): 1}
    paths = Paths(topology)
    assert paths.between("node0/gpu0", "node0/gpu1").bandwidth == 24e9
    for a, b in ((0, 3), (1, 2)):
        far = paths.between(f"node0/gpu{a}", f"node0/gpu{b}")
        assert (far.path_class, far.bandwidth) == (PathClass.NVB, 24e9)
        assert len(far.devices) == 3
    assert nearest(topology) == {f"gpu{i}": ("PXB", {"mlx5_0"}) for i in range(4)}
    [node] = levels(topology).nodes
    assert [(nic.nominal, nic.payload) for nic in node.nics] == [(12.5e9, 12e9)]


def test_rccl_vega20_two_pci_trees() -> None:
    topology = load("rccl-8x-vega20-pcie-2nic.xml")
    assert not any(link.kind is LinkKind.XGMI for link in topology.links)
    assert len(devices(topology, DeviceKind.CPU)) == 1
    assert nearest(topology) == {
        f"gpu{i}": ("PXB", {"mlx5_0" if i < 4 else "mlx5_1"}) for i in range(8)
    }
    paths = Paths(topology)
    assert paths.between("node0/gpu0", "node0/gpu7").path_class is PathClass.PHB
    assert paths.between("node0/gpu0", "node0/gpu3").path_class is PathClass.PXB
    # The GPUs are gen4, the lone bridge above each is gen3.
    assert levels(topology).nodes[0].intra.payload == 12e9
    assert [nic.nominal for nic in levels(topology).nodes[0].nics] == [12.5e9] * 2


def test_rccl_two_hives() -> None:
    topology = load("rccl-8x-gfx908-2hives-1nic.xml")
    hives = [*combinations(range(4), 2), *combinations(range(4, 8), 2)]
    assert fast_pairs(topology, LinkKind.XGMI) == dict.fromkeys(hives, 1)
    assert Counter(numa(topology)) == {0: 1, 1: 3, 2: 2, 3: 2}
    assert nearest(topology) == {
        f"gpu{i}": ("PHB" if i in (4, 5) else "SYS", {"mlx5_0"}) for i in range(8)
    }
    assert Paths(topology).between("node0/gpu0", "node0/gpu4").path_class > PathClass.PXB
    [node] = levels(topology).nodes
    assert node.intra.payload == 24e9
    assert node.nics[0].nominal == 25e9


def test_rccl_four_nics() -> None:
    topology = load("rccl-8x-gfx908-4nic.xml")
    assert Counter(numa(topology)) == {0: 2, 1: 2, 2: 2, 3: 2}
    nics = sorted(devices(topology, DeviceKind.NIC), key=lambda nic: nic.id)
    assert [nic.attributes["name"] for nic in nics] == ["mlx5_1", "mlx5_3", "mlx5_5", "mlx5_7"]
    assert [short(nic.id) for nic in nics] == ["nic0", "nic1", "nic2", "nic3"]
    assert nearest(topology) == {f"gpu{i}": ("PXB", {f"mlx5_{i // 2 * 2 + 1}"}) for i in range(8)}


def test_rccl_gfx90a_without_rdma() -> None:
    topology = load("rccl-8x-gfx90a-xgmi-nonic.xml")
    pairs = fast_pairs(topology, LinkKind.XGMI)
    assert len(pairs) == 12
    degree = Counter(gpu for pair in pairs for gpu in pair)
    assert degree == dict.fromkeys(range(8), 3)
    assert numa(topology) == [3, 3, 1, 1, 0, 0, 0, 0]
    assert sorted(cpu.numa or 0 for cpu in devices(topology, DeviceKind.CPU)) == [0, 1, 3]
    [nic] = devices(topology, DeviceKind.NIC)
    assert (nic.attributes["name"], nic.attributes["gdr"]) == ("bond0", "0")
    [node] = levels(topology).nodes
    # All are joined by XGMI though not all pairs are, so the port is three links of MI200.
    assert (node.intra.nominal, node.intra.payload) == (150e9, 108e9)
    assert node.nics[0].nominal == 125e6


def test_rccl_mi250x() -> None:
    topology = load("rccl-16gcd-mi250x-8nic.xml")
    assert kinds(topology)["gpu"] == 16
    pairs = fast_pairs(topology, LinkKind.XGMI)
    assert {pair for pair, count in pairs.items() if count == 4} == {
        (i, i + 1) for i in range(0, 16, 2)
    }
    assert set(pairs.values()) == {1, 2, 4}
    assert not any("end" in note for note in topology.notes)
    nics = sorted(devices(topology, DeviceKind.NIC), key=lambda nic: nic.id)
    names = [f"mlx5_{i}" for i in (0, 1, 2, 3, 4, 5, 7, 8)]
    assert [nic.attributes["name"] for nic in nics] == names
    assert nearest(topology) == {
        f"gpu{i}": ("PXB", {names[i // 4 * 2], names[i // 4 * 2 + 1]}) for i in range(16)
    }


def test_rccl_mi210() -> None:
    topology = load("rccl-3x-mi210-pcie-1nic.xml")
    assert numa(topology) == [0, 1, 1]
    assert not any(link.kind is LinkKind.XGMI for link in topology.links)
    assert nearest(topology) == {f"gpu{i}": ("SYS" if i else "PHB", {"mlx5_0"}) for i in range(3)}


def test_rccl_mi300x() -> None:
    topology = load("rccl-8x-mi300x-8nic.xml")
    gpus = devices(topology, DeviceKind.GPU)
    assert {(gpu.attributes["gcn"], gpu.attributes["class"]) for gpu in gpus} == {
        ("gfx942", "0x120000")
    }
    assert fast_pairs(topology, LinkKind.XGMI) == dict.fromkeys(combinations(range(8), 2), 1)
    assert numa(topology) == [0] * 4 + [1] * 4
    assert nearest(topology) == {f"gpu{i}": ("PXB", {f"mlx5_{i}"}) for i in range(8)}
    [node] = levels(topology).nodes
    assert (node.intra.nominal, node.intra.payload) == pytest.approx((448e9, 336e9))
    assert [nic.nominal for nic in node.nics] == [50e9] * 8


# --- what no captured file shows --------------------------------------------------------------

GPU = (
    '<pci busid="0000:0{i}:00.0" class="0x030200" link_speed="{speed}" link_width="16">'
    "{inner}</pci>"
)


def system(*gpus: str, version: str = "1", tail: str = "") -> str:
    pci = "".join(
        GPU.format(
            i=i, speed="32.0 GT/s PCIe", inner=f'<gpu dev="{i}" sm="90" rank="{i}">{gpu}</gpu>'
        )
        for i, gpu in enumerate(gpus)
    )
    cpu = '<cpu numaid="0" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">'
    return f'\n<system version="{version}">\n{cpu}{pci}</cpu>{tail}\n</system>'


def row(target: str, count: int, tclass: str = "0x068000") -> str:
    return f'<nvlink target="{target}" count="{count}" tclass="{tclass}"/>'


def test_nvswitches_are_one_device_and_their_links_add_up() -> None:
    rows = "".join(row(f"0000:c{i}:00.0", n) for i, n in enumerate((4, 5, 5, 4)))
    topology = read(system(rows, rows))
    assert kinds(topology) == {"cpu": 1, "gpu": 2, "nvswitch": 1}
    pair = Paths(topology).between(*topology.ranks)
    assert (pair.path_class, pair.bandwidth) == (PathClass.NVL, pytest.approx(370.8e9))
    assert pair.devices == ("node0/gpu0", "node0/nvswitch", "node0/gpu1")


@pytest.mark.parametrize("sentinel", ["ffffffff:ff:ff.0", "fffffff:ff:ff.0"])
def test_a_hidden_far_end_is_a_switch_never_a_peer(sentinel: str) -> None:
    topology = read(system(row(sentinel.upper(), 18, "0xffffff"), row(sentinel, 18, "")))
    assert kinds(topology) == {"cpu": 1, "gpu": 2, "nvswitch": 1}
    assert sum("taken to be an NVSwitch" in note for note in topology.notes) == 2


def test_a_gpu_without_links_beside_gpus_with_links_is_named() -> None:
    topology = read(system(row("0000:c0:00.0", 18), row("0000:c0:00.0", 18), ""))
    assert any("gpu2: shows 0 NVLink" in note and "node 18" in note for note in topology.notes)
    [node] = levels(topology).nodes
    assert node.intra.payload == 48e9


def test_ends_that_disagree_count_the_fewer_and_are_named() -> None:
    gpu = "0x030200"
    topology = read(system(row("0000:01:00.0", 4, gpu), row("0000:00:00.0", 3, gpu)))
    assert fast_pairs(topology, LinkKind.NVLINK) == {(0, 1): 3}
    assert any("4 nvlink links from one end, 3 from the other" in n for n in topology.notes)
    topology = read(system(row("0000:01:00.0", 4, gpu), ""))
    assert fast_pairs(topology, LinkKind.NVLINK) == {(0, 1): 4}
    assert any("reported by node0/gpu0 only" in note for note in topology.notes)
    topology = read(system(row("0000:77:00.0", 4, gpu), ""))
    assert not any(link.kind is LinkKind.NVLINK for link in topology.links)
    assert any("0000:77:00.0, which the file lacks" in note for note in topology.notes)


def test_c2c_and_unknown_parts() -> None:
    text = system('<c2c bw="44712" count="5"/>').replace("<cpu ", '<cpu colour="blue" ')
    topology = read(text.replace("</cpu>", "<magic/></cpu>"))
    path = Paths(topology).between("node0/gpu0", "node0/numa0")
    assert (path.path_class, path.bandwidth) == (PathClass.C2C, pytest.approx(223.56e9))
    assert any("unknown colour" in note for note in topology.notes)
    assert any("<magic> is not known" in note for note in topology.notes)


def test_a_hand_trimmed_file() -> None:
    text = """<system version="1">
      <cpu numaid="0" arch="x86_64" vendor="AuthenticAMD" familyid="175" modelid="1">
        <pci busid="0000:01:00.0" class="0x030200" link_speed="16 GT/s" link_width="16">
          <gpu dev="0" sm="80" rank="0" gdr="1"/></pci></cpu>
      <cpu numaid="1">
        <pci busid="0000:81:00.0" class="0x020000" link_speed="16 GT/s" link_width="16">
          <nic><net name="mlx5_0" dev="0" speed="100000" port="1" gdr="1"/></nic></pci></cpu>
    </system>"""
    topology = read(text)
    assert kinds(topology) == {"cpu": 2, "gpu": 1, "nic": 1, "switch": 1}
    assert "cpu 1: arch, vendor not in the file" in topology.notes
    path = Paths(topology).between("node0/gpu0", "node0/nic0")
    assert path.path_class is PathClass.SYS
    assert {"node0/numa0", "node0/numa1"} < set(path.devices)
    [joint] = [link for link in topology.links if link.kind is LinkKind.UPI]
    assert joint.effective is not None
    assert joint.effective.source is Source.ASSUMED
    with pytest.raises(TopologyError, match="text:1: attribute version .*found 2, known is 1"):
        read(text.replace('version="1"', 'version="2"'))
    with pytest.raises(TopologyError, match="text:8: not well-formed"):
        read(text.replace("</system>", ""))


def test_a_nic_of_unknown_numa_is_equally_far() -> None:
    nic = '<nic><net name="eth0" dev="0" speed="0"/></nic>'
    text = system("", "").replace("</system>", f'<cpu numaid="-1">{nic}</cpu></system>')
    topology = read(text)
    [device] = devices(topology, DeviceKind.NIC)
    assert device.numa is None
    assert nearest(topology) == {"gpu0": ("SYS", {"eth0"}), "gpu1": ("SYS", {"eth0"})}
    assert levels(topology).nodes[0].nics[0].nominal == 1.25e9
    assert levels(topology).nodes[0].nics[0].source is Source.ASSUMED


def test_several_hosts_in_one_file() -> None:
    cpu = '<cpu host_hash="{h}" numaid="0">' + GPU.format(
        i=1, speed="16 GT/s", inner='<gpu dev="0" sm="80" rank="{r}"/>'
    )
    text = "".join(cpu.format(h=h, r=r) + "</cpu>" for h, r in (("0xa", 1), ("0xb", 0)))
    topology = read(f'<system version="1">{text}</system>')
    assert topology.ranks == ("node1/gpu0", "node0/gpu0")
    assert Paths(topology).between(*topology.ranks).path_class is PathClass.DIS


def test_one_pci_device_with_several_gpus() -> None:
    parts = (
        f'<gpu dev="{dev}" sm="100" rank="{dev}" mlopart="{dev}">{row("0000:c0:00.0", 18)}</gpu>'
        for dev in range(2)
    )
    pci = GPU.format(i=0, speed="32.0 GT/s PCIe", inner="".join(parts))
    topology = read(f'<system version="1"><cpu numaid="0">{pci}</cpu></system>')
    assert [short(rank) for rank in topology.ranks] == ["gpu0", "gpu1"]
    gpus = devices(topology, DeviceKind.GPU)
    assert [gpu.attributes["mlopart"] for gpu in gpus] == ["0", "1"]
    assert any("several GPUs (MLOPart)" in note for note in topology.notes)


def test_switches_that_are_peers() -> None:
    bridge = (
        '<pci busid="0000:{a}:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">'
        '<pcilink target="0000:{b}:00.0"/>{inner}</pci>'
    )
    gpu = GPU.format(i=1, speed="32.0 GT/s PCIe", inner='<gpu dev="0" sm="90" rank="0"/>')
    nic = '<pci busid="0000:02:00.0" class="0x020700"/>'
    pci = bridge.format(a="10", b="20", inner=gpu) + bridge.format(a="20", b="10", inner=nic)
    topology = read(f'<system version="1"><cpu numaid="0">{pci}</cpu></system>')
    path = Paths(topology).between("node0/gpu0", "node0/nic0")
    assert (path.path_class, path.bandwidth) == (PathClass.PXB, None)
    assert any("rate between PCIe switches that are peers" in note for note in topology.notes)
    alone = bridge.format(a="10", b="99", inner=gpu)
    topology = read(f'<system version="1"><cpu numaid="0">{alone}</cpu></system>')
    assert any("peer of a PCIe switch that the file lacks" in note for note in topology.notes)


def test_gpus_of_a_hint_file_say_that_their_links_are_not_described() -> None:
    for name, known in (("azure-ndv4.xml", False), ("azure-ncv4.xml", None)):
        gpus = devices(load(name), DeviceKind.GPU)
        assert {gpu.attributes.get("links_known") for gpu in gpus} == {known}


def test_the_same_bus_id_on_two_hosts() -> None:
    gpus = "".join(
        GPU.format(i=i, speed="16 GT/s", inner=f'<gpu dev="{i}" sm="80">{nvlink}</gpu>')
        for i, nvlink in enumerate(
            (row("0000:01:00.0", 4, "0x0302"), row("0000:00:00.0", 4, "0x0302"))
        )
    )
    cpus = "".join(f'<cpu host_hash="{h}" numaid="0">{gpus}</cpu>' for h in ("0x1", "0x2"))
    topology = read(f'<system version="1">{cpus}</system>')
    links = {frozenset((link.a, link.b)) for link in topology.links if link.kind == "nvlink"}
    assert links == {frozenset((f"node{n}/gpu0", f"node{n}/gpu1")) for n in range(2)}


def read_or_refuse(text: str) -> None:
    """A topology, or one TopologyError in one line; never anything else, never a hang."""
    start = time.monotonic()
    said = ""
    try:
        topology = read(text if "\n" in text else text + "\n")
    except TopologyError as error:
        said = str(error)
    else:
        assert from_json(to_json(topology)) == topology
    assert "\n" not in said
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("name", ALL)
def test_files_cut_off_anywhere(name: str) -> None:
    lines = (DATA / name).read_text().splitlines(keepends=True)
    for end in range(0, len(lines), 10):
        read_or_refuse("".join(lines[:end]))


@settings(max_examples=150)
@given(
    name=st.sampled_from(ALL),
    flips=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8
    ),
)
def test_files_with_wrong_bytes(name: str, flips: list[tuple[float, int]]) -> None:
    raw = bytearray((DATA / name).read_bytes())
    for where, byte in flips:
        raw[int(where * len(raw))] = byte
    read_or_refuse(raw.decode("utf-8", "replace"))


@settings(max_examples=150)
@given(
    name=st.sampled_from(ALL),
    where=st.floats(0, 1, exclude_max=True),
    value=st.sampled_from(["-1", "0", "9" * 400, "1e308", "nan", "inf", "x", "", "0x1", "1.5"]),
)
def test_files_with_wrong_values(name: str, where: float, value: str) -> None:
    parts = (DATA / name).read_text().split('"')
    parts[2 * int(where * (len(parts) // 2)) + 1] = value
    read_or_refuse('"'.join(parts))


BOMB = (
    "<!DOCTYPE s [<!ENTITY a0 'x'>"
    + "".join(f"<!ENTITY a{i} '{f'&a{i - 1};' * 10}'>" for i in range(1, 12))
    + "]><system version='1'>&a11;</system>"
)


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        "<!DOCTYPE s [<!ENTITY x SYSTEM 'file:///etc/passwd'>]><system version='1'>&x;</system>",
        "<!DOCTYPE s SYSTEM 'http://localhost:1/x.dtd'><system version='1'><cpu/></system>",
    ],
)
def test_entities_are_never_followed(text: str) -> None:
    with pytest.raises(TopologyError, match="safely|no known root|not well-formed|holds no"):
        read(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<system version='1'></system>", "text:1: <system> holds no <cpu>"),
        ("<system><cpu/></system>", "text:1: attribute version of <system>: found none"),
        ("\n\n<system version='7'><cpu/></system>", "text:3: .*found 7, known is 1"),
        ("<tree version='2.0'/>", "<tree> is no known root"),
        ("<system version='1'><cpu numaid='0'><pci/></cpu></system>", "no busid"),
        ("<system version='1'>\n<cpu numaid='x'/></system>", "text:2: numaid='x' of <cpu>"),
        ("<system", "text:1: not well-formed"),
        ("<!DOCTYPE s [<!ENTITY a 'b'>]><system>&a;</system>", "safely"),
        ("<a>" * 300, "nested deeper than 256"),
        ("{", "text: not a topology"),
        ("two\nlines", "in no known format .*starts with 'two'"),
        ("\n", "is empty"),
    ],
)
def test_what_is_no_topology_is_refused(text: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        read(text)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="nowhere.xml: cannot be read: No such file"):
        read(tmp_path / "nowhere.xml")
    binary = tmp_path / "binary.xml"
    binary.write_bytes(b"<system \xff>")
    with pytest.raises(TopologyError, match="binary.xml: is not text"):
        read(str(binary))


def test_a_cpu_model_below_zero_is_not_known() -> None:
    rate = interconnect_rate("x86_64", "GenuineIntel", -5, Source.FILE)
    assert (rate.value, rate.source) == (6e9, Source.ASSUMED)
