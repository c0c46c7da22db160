"""Several descriptions of one machine made one, and what they contradict."""

from collections import Counter
from itertools import permutations

import pytest

from tests.foreign import all_foreign, foreign
from topo_ar.errors import TopologyError
from topo_ar.topology.levels import levels
from topo_ar.topology.merge import combine
from topo_ar.topology.merge_machine import merge_machine
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
)
from topo_ar.topology.paths import PathClass, Paths
from topo_ar.topology.presets import preset
from topo_ar.topology.readers import Description, describe
from topo_ar.topology.trust import by_trust

NCCL_P4D = "nccl-xml/aws-p4d-24xl.xml"
HWLOC_P4D = "hwloc-xml/aws-p4d.24xl.xml"


def found(*names: str) -> list[Description]:
    return [describe(foreign(name)) for name in names]


def kinds(topology: Topology) -> Counter[str]:
    return Counter(device.kind.value for device in topology.devices)


def said(topology: Topology, *words: str) -> list[str]:
    return [note for note in topology.notes if all(word in note for word in words)]


def gb(value: float, source: Source = Source.FILE) -> Figure:
    return Figure(value * 1e9, source)


def machine(
    name: str,
    nvlinks: dict[tuple[int, int], int],
    *,
    style: str = "nvidia-smi-topo",
    rate: float | None = None,
    pcie: Figure | None = None,
    num_gpus: int = 4,
    attributes: dict[int, dict[str, str | int | float | bool]] | None = None,
) -> Description:
    """A host of GPUs under one CPU, with these NVLinks."""
    devices = [Device("node0/numa0", DeviceKind.CPU, "node0", 0)]
    links = []
    for i in range(num_gpus):
        own = {"index": i, **(attributes or {}).get(i, {})}
        devices.append(Device(f"node0/gpu{i}", DeviceKind.GPU, "node0", 0, own))
        links.append(Link(f"node0/gpu{i}", "node0/numa0", LinkKind.PCIE, pcie))
    for (a, b), count in nvlinks.items():
        nominal = gb(rate * count) if rate else None
        ends = (f"node0/gpu{a}", f"node0/gpu{b}")
        links.append(Link(*ends, LinkKind.NVLINK, nominal, count=count))
    ranks = tuple(f"node0/gpu{i}" for i in range(num_gpus))
    return Description(style, Topology(name, tuple(devices), tuple(links), ranks))


def nvlinks(topology: Topology) -> dict[tuple[str, str], int]:
    return {
        (link.a[-1], link.b[-1]): link.count
        for link in topology.links
        if link.kind is LinkKind.NVLINK
    }


# --- real machines ----------------------------------------------------------------------------


def test_aws_p4d_hint_file_and_hwloc() -> None:
    topology = merge_machine(found(NCCL_P4D, HWLOC_P4D))
    assert kinds(topology) == {"gpu": 8, "nic": 8, "pcie_switch": 4, "cpu": 2, "switch": 1}
    assert from_json(to_json(topology)) == topology
    # The hint file knows the switches, hwloc the speed, the names and the port.
    paths = Paths(topology, "nominal")
    by_id = {device.id: device for device in topology.devices}
    for rank in topology.ranks:
        near = paths.nearest_nics(rank)
        assert near.path_class is PathClass.PIX
        [nic] = near.nics
        bus = str(by_id[rank].attributes["busid"])[:7]
        assert by_id[nic].attributes["busid"] == f"{bus}:1b.0"
        assert str(by_id[nic].attributes["name"]).startswith("rdmap")
    gpu = [link for link in topology.links if link.a == "node0/gpu0"]
    assert [link.nominal and link.nominal.value for link in gpu] == [31.507692e9]
    assert said(topology, "node0/gpu7", "pcie 15.75 GB/s in aws-p4d-24xl.xml, 31.51 in", "faster")
    assert [nic.nominal for nic in levels(topology).nodes[0].nics] == [12.5e9] * 4
    assert said(topology, "aws-p4d.24xl.xml: ", "1d0f:1111")


@pytest.mark.parametrize("order", list(permutations(range(2))))
def test_the_order_of_the_files_does_not_matter(order: tuple[int, ...]) -> None:
    both = found(NCCL_P4D, HWLOC_P4D)
    assert merge_machine([both[i] for i in order]) == merge_machine(both)


def test_perlmutter_in_three_texts() -> None:
    topology = combine(
        found(
            "nvidia-smi-topo/perlmutter-4x-a100.txt",
            "nvlink-p2p/perlmutter-4x-a100-nvlink-s.txt",
            "nccl-xml/perlmutter-4x-a100-4-slingshot.xml",
        )
    )
    assert kinds(topology) == {"cpu": 4, "gpu": 4, "nic": 4, "switch": 1}
    assert set(nvlinks(topology).values()) == {4}
    gpus = [device for device in topology.devices if device.kind is DeviceKind.GPU]
    gpus.sort(key=lambda gpu: gpu.id)
    assert [gpu.numa for gpu in gpus] == [3, 2, 1, 0]
    assert [str(gpu.attributes["uuid"])[-1] for gpu in gpus] == ["0", "1", "2", "3"]
    assert [str(gpu.attributes["busid"])[5:7] for gpu in gpus] == ["03", "41", "82", "c1"]
    [node] = levels(topology).nodes
    assert (node.intra.nominal, node.intra.payload) == (300e9, 240e9)
    assert not said(topology, "is taken")


def test_the_matrix_counts_links_and_nvlink_s_gives_their_rate() -> None:
    topology = combine(
        found(
            "nvidia-smi-topo/perlmutter-4x-a100.txt", "nvlink-p2p/perlmutter-4x-a100-nvlink-s.txt"
        )
    )
    [node] = levels(topology).nodes
    assert node.intra.nominal == 300e9
    assert not said(topology, "is taken")


def test_an_idle_current_speed_does_not_beat_a_declared_one() -> None:
    [hwloc] = found("hwloc-xml/aws-g5.48xl.xml")
    gpus = [d for d in hwloc.topology.devices if d.kind is DeviceKind.GPU]
    links = [Link(gpu.id, "node0/numa0", LinkKind.PCIE, gb(15.75)) for gpu in gpus]
    cpu = Device("node0/numa0", DeviceKind.CPU, "node0", 0)
    declared = Topology("declared.xml", (cpu, *gpus), tuple(links))
    topology = merge_machine([hwloc, Description("nccl-xml", declared)])
    [pcie] = [x for x in topology.links if x.a == "node0/gpu0" and x.kind is LinkKind.PCIE]
    assert pcie.nominal is not None
    assert pcie.nominal.value == 15.75e9
    assert said(topology, "pcie 2 GB/s in aws-g5.48xl.xml, 15.75 in declared.xml; declared.xml is")


def test_a_hint_file_of_unknown_devices_places_the_gpus_of_another() -> None:
    topology = merge_machine(found("nccl-xml/aws-g5-48xl.xml", "hwloc-xml/aws-g5.48xl.xml"))
    by_id = {device.id: device for device in topology.devices}
    assert [by_id[rank].numa for rank in topology.ranks] == [0] * 4 + [1] * 4
    assert by_id["node0/nic0"].numa == 1
    assert not kinds(topology)["pcie_switch"]
    paths = Paths(topology)
    assert [paths.nearest_nics(rank).path_class.name for rank in topology.ranks] == [
        *["SYS"] * 4,
        *["PHB"] * 4,
    ]


def test_unknown_devices_take_nothing_from_gpus_that_are_known() -> None:
    [hint] = found("nccl-xml/aws-g5-48xl.xml")
    [hwloc] = found("hwloc-xml/aws-g5.48xl.xml")
    trusted = Description("nccl-xml", hwloc.topology)
    topology = merge_machine([trusted, hint])
    assert kinds(topology)["gpu"] == 8
    assert not kinds(topology)["pcie_switch"]
    assert topology.ranks == hwloc.topology.ranks
    assert [device.numa for device in topology.devices if device.kind is DeviceKind.GPU] == [
        *[0] * 4,
        *[1] * 4,
    ]


def test_a_nic_that_only_the_less_trusted_calls_unfit_is_said() -> None:
    nic = Device("node0/nic0", DeviceKind.NIC, "node0", 0, {"name": "mlx5_0"})
    unfit = Device(nic.id, nic.kind, "node0", 0, {"name": "mlx5_0", "data": False})
    a = Description("nccl-xml", Topology("a", (nic,), ()))
    b = Description("hwloc-xml", Topology("b", (unfit,), ()))
    topology = merge_machine([a, b])
    assert "data" not in topology.devices[0].attributes
    assert said(topology, "node0/nic0: carries no data in b, which a does not say; a is taken")


def parts(topology: Topology) -> tuple[Counter[str], Counter[str]]:
    """Devices and links without their order and direction."""
    turned = (
        Link(
            *sorted((link.a, link.b)),
            link.kind,
            link.nominal,
            link.effective,
            link.latency,
            link.count,
        )
        for link in topology.links
    )
    return Counter(map(str, topology.devices)), Counter(map(str, turned))


@pytest.mark.parametrize(
    "name", [name for name in all_foreign() if name.startswith(("nccl-xml/", "hwloc-xml/"))]
)
def test_a_description_merged_with_itself_is_itself(name: str) -> None:
    if "graph" in name:
        pytest.skip("no topology")
    [once] = found(name)
    twice = merge_machine([once, once])
    assert parts(twice) == parts(once.topology)
    assert twice.ranks == once.topology.ranks
    own = len(once.topology.notes)
    assert len(twice.notes) == 1 + 2 * own


# --- trust, conflicts, silence ----------------------------------------------------------------


def test_the_order_of_trust() -> None:
    probed = machine("probed", {}, style="topo-ar", pcie=gb(1, Source.SYSFS))
    texts = [machine(style, {}, style=style) for style in ("nvidia-smi-topo", "nccl-xml")]
    ours = Description("topo-ar", preset("dgx-a100"))
    hwloc = machine("hwloc", {}, style="hwloc-xml")
    order = by_trust([ours, *texts, hwloc, probed])
    assert [d.topology.name for d in order] == [
        "probed",
        "nccl-xml",
        "hwloc",
        "nvidia-smi-topo",
        "dgx-a100",
    ]


def test_a_measured_figure_beats_any_description() -> None:
    measured = machine("m", {}, pcie=gb(20, Source.MEASURED))
    topology = merge_machine([machine("x", {}, style="nccl-xml", pcie=gb(24)), measured])
    assert {x.nominal and x.nominal.value for x in topology.links} == {20e9}
    assert said(topology, "pcie 24 GB/s in x, 20 in m; m is taken")
    assumed = machine("a", {}, style="nccl-xml", pcie=gb(24, Source.ASSUMED))
    topology = merge_machine([assumed, machine("b", {}, pcie=gb(16))])
    assert {x.nominal and x.nominal.value for x in topology.links} == {16e9}
    assert not said(topology, "is taken")


def test_counts_that_differ_are_named() -> None:
    a = machine("a", {(0, 1): 4, (2, 3): 4}, style="nccl-xml", rate=25)
    b = machine("b", {(0, 1): 3, (2, 3): 4, (1, 2): 2})
    topology = merge_machine([b, a])
    assert nvlinks(topology) == {("0", "1"): 4, ("2", "3"): 4}
    assert said(topology, "node0/gpu0 - node0/gpu1: 4 nvlink links in a, 3 in b; a is taken")
    assert said(topology, "node0/gpu1 - node0/gpu2: 0 nvlink links in a, 2 in b; a is taken")


def test_a_gpu_without_an_answer_keeps_the_links_of_another_description() -> None:
    full = {(0, 1): 4, (0, 2): 4, (0, 3): 4, (1, 2): 4, (1, 3): 4, (2, 3): 4}
    lost = {pair: count for pair, count in full.items() if 3 not in pair}
    topology = merge_machine(
        [machine("dump", lost, style="nccl-xml", rate=25), machine("matrix", full)]
    )
    assert nvlinks(topology) == {(str(a), str(b)): count for (a, b), count in full.items()}
    assert said(topology, "node0/gpu3: no NVLink in dump, but in matrix", "not known to be absent")
    assert levels(topology).nodes[0].intra.nominal == 300e9


def test_counted_links_and_pairs_that_differ() -> None:
    counted = machine("s", {}, attributes={i: {"nvlinks": 11 if i == 3 else 4} for i in range(4)})
    topology = merge_machine([machine("a", {(0, 1): 4, (2, 3): 4}), counted])
    assert said(topology, "node0/gpu3: 4 NVLinks in a, 11 in s; a is taken")
    assert not said(topology, "node0/gpu0", "is taken")


def test_switch_against_pairs() -> None:
    switch = Device("node0/nvswitch", DeviceKind.NVSWITCH, "node0")
    base = machine("switched", {}, style="nccl-xml").topology
    over = [Link(gpu, switch.id, LinkKind.NVLINK, count=12) for gpu in base.ranks]
    switched = Topology("switched", (*base.devices, switch), (*base.links, *over), base.ranks)
    topology = merge_machine([Description("nccl-xml", switched), machine("p", {(0, 1): 11})])
    assert len([x for x in topology.links if x.kind is LinkKind.NVLINK]) == 4
    assert said(topology, "node0/gpu0, node0/gpu1: 12 NVLinks in switched, 11 in p")


def test_bus_ids_match_whatever_their_spelling_and_number() -> None:
    a = machine("a", {}, num_gpus=2, attributes={0: {"busid": "0000:41:00.0"}})
    b = machine("b", {}, num_gpus=2, attributes={1: {"busid": "00000000:41:00.0", "uuid": "GPU-x"}})
    topology = merge_machine([a, b])
    by_id = {device.id: device.attributes for device in topology.devices}
    assert by_id["node0/gpu0"]["uuid"] == "GPU-x"
    assert said(topology, "node0/gpu0: index is 0 in a, 1 in b; a is taken")


def test_a_place_that_is_known_beats_one_that_is_not() -> None:
    [hwloc] = found("hwloc-xml/aws-p3dn.24xl.xml")
    known = machine("matrix", {}, num_gpus=8)
    topology = merge_machine([hwloc, known])
    by_id = {device.id: device for device in topology.devices}
    assert {by_id[rank].numa for rank in topology.ranks} == {0}
    paths = Paths(topology)
    assert paths.between("node0/gpu0", "node0/numa0").devices == ("node0/gpu0", "node0/numa0")


def test_numa_nodes_that_differ_are_named() -> None:
    one, other = machine("one", {}, style="nccl-xml"), machine("two", {}).topology
    cpu = Device("node0/numa1", DeviceKind.CPU, "node0", 1)
    moved = [Device(d.id, d.kind, d.node, 1, d.attributes) for d in other.devices[1:]]
    links = [Link(rank, cpu.id, LinkKind.PCIE) for rank in other.ranks]
    two = Topology("two", (cpu, *moved), tuple(links), other.ranks)
    topology = merge_machine([one, Description("nvidia-smi-topo", two)])
    assert said(topology, "node0/gpu0, node0/gpu1", "numa is 0 in one, 1 in two; one is taken")


def test_what_cannot_be_merged() -> None:
    with pytest.raises(TopologyError, match="nothing to merge"):
        merge_machine([])
    with pytest.raises(TopologyError, match="'dgx-a100' describes 2 nodes"):
        merge_machine([machine("a", {}), Description("topo-ar", preset("dgx-a100", nodes=2))])
    base = machine("b", {}).topology
    named = tuple(
        Device(d.id.replace("node0", host), d.kind, host, d.numa)
        for host in ("alpha", "beta")
        for d in base.devices
    )
    half = len(named) // 2
    hosts = [Description("x", Topology("h", d, ())) for d in (named[:half], named[half:])]
    with pytest.raises(TopologyError, match=r"different hosts \(alpha, beta\)"):
        merge_machine(hosts)


@pytest.mark.parametrize(
    "names",
    [
        [
            "nvidia-smi-topo/perlmutter-4x-a100.txt",
            "nvlink-p2p/perlmutter-4x-a100-nvlink-s.txt",
            "nvlink-p2p/perlmutter-4x-a100-p2p-n.txt",
            "nccl-xml/perlmutter-4x-a100-4-slingshot.xml",
        ],
        [
            "nvidia-smi-topo/workstation-3x-a6000-one-pair.txt",
            "nvlink-p2p/workstation-3x-a6000-nvlink-s-inactive.txt",
        ],
        [
            "nvidia-smi-topo/hgx-h200-8gpu-12nic.txt",
            "hwloc-xml/aws-p5.48xl.xml",
            "nccl-xml/azure-ndv5.xml",
        ],
    ],
)
def test_any_order_of_files_of_different_formats_gives_the_same_bytes(names):
    found = [describe(foreign(name)) for name in names]
    merged = {to_json(combine(order)) for order in permutations(found)}
    assert len(merged) == 1
