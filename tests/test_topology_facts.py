"""Facts of captured files that the tests of the readers do not name; SOURCES.md lists them all."""

from collections import Counter

import pytest

from tests.foreign import foreign
from topo_ar.topology.levels import levels
from topo_ar.topology.model import DeviceKind, LinkKind
from topo_ar.topology.readers import read


def of(topology, kind, *names):
    return [
        tuple(d.attributes.get(name) for name in names) for d in topology.devices if d.kind is kind
    ]


def ports(topology):
    """Return the nominal rate of each NIC's port, by the NIC's name or bus id."""
    names = {
        d.id: d.attributes.get("name") or d.attributes["busid"]
        for d in topology.devices
        if d.kind is DeviceKind.NIC
    }
    network = (LinkKind.INFINIBAND, LinkKind.ETHERNET)
    return {names[link.a]: link.nominal.value for link in topology.links if link.kind in network}


def test_aws_hint_files():
    p4d = read(foreign("nccl-xml/aws-p4d-24xl.xml"))
    assert [busid for (busid,) in of(p4d, DeviceKind.PCIE_SWITCH, "busid")] == [
        f"ffff:ff:0{n}.0" for n in range(1, 5)
    ]
    assert {found[0][:6] for found in of(p4d, DeviceKind.GPU, "class")} == {"0x0302"}
    assert {found[0][:6] for found in of(p4d, DeviceKind.NIC, "class")} == {"0x0200"}
    g5 = read(foreign("nccl-xml/aws-g5-48xl.xml"))
    numas = {d.attributes["busid"]: d.numa for d in g5.devices if "busid" in d.attributes}
    assert Counter(numas.values()) == {0: 4, 1: 5}
    assert "0000:00:15.0" in numas


def test_azure_hint_files():
    v2 = read(foreign("nccl-xml/azure-ndv2.xml"))
    assert [d.numa for d in v2.devices if d.kind is DeviceKind.NIC] == [0]
    v4 = read(foreign("nccl-xml/azure-ndv4.xml"))
    assert {found[0][:6] for found in of(v4, DeviceKind.NIC, "class")} == {"0x0207"}
    gpus = [(d.numa, d.attributes["busid"][:4]) for d in v4.devices if d.kind is DeviceKind.GPU]
    assert gpus == list(
        zip(
            [0, 0, 1, 1, 2, 2, 3, 3],
            ["0003", "0004", "0001", "0002", "000d", "000e", "000b", "000c"],
            strict=True,
        )
    )


def test_amd_machines():
    four = read(foreign("nccl-xml/rccl-8x-gfx908-4nic.xml"))
    xgmi = {(x.a[-1], x.b[-1]) for x in four.links if x.kind is LinkKind.XGMI}
    assert {"".join(pair) for pair in xgmi} == {
        *("01", "02", "03", "12", "13", "23"),
        *("45", "46", "47", "56", "57", "67"),
    }
    assert ports(four) == dict.fromkeys([f"mlx5_{i}" for i in (1, 3, 5, 7)], 25e9)
    mi200 = read(foreign("nccl-xml/rccl-8x-gfx90a-xgmi-nonic.xml"))
    assert of(mi200, DeviceKind.GPU, "gcn") == [("910",)] * 8
    assert levels(mi200).nodes[0].islands == ()
    gcds = read(foreign("nccl-xml/rccl-16gcd-mi250x-8nic.xml"))
    assert {d.numa for d in gcds.devices if d.kind is DeviceKind.CPU} == {0, 1, 2, 3}
    assert of(gcds, DeviceKind.GPU, "gcn") == [("910",)] * 16
    names = [f"mlx5_{i}" for i in (0, 1, 2, 3, 4, 5, 7, 8)]
    assert dict(of(gcds, DeviceKind.NIC, "name", "dev")) == {n: str(i) for i, n in enumerate(names)}
    assert ports(gcds) == dict.fromkeys(names, 25e9)
    assert ports(read(foreign("nccl-xml/rccl-3x-mi210-pcie-1nic.xml"))) == {"mlx5_0": 25e9}


@pytest.mark.parametrize(
    ("name", "count", "gigabits"),
    [("p3dn", 1, 100), ("p4d", 4, 100), ("p5", 32, 100), ("p6-b200", 8, 400), ("g5", 1, 100)],
)
def test_nics_of_aws_and_their_speed(name, count, gigabits):
    size = "24xl" if name in ("p3dn", "p4d") else "48xl"
    found = ports(read(foreign(f"hwloc-xml/aws-{name}.{size}.xml")))
    assert list(found.values()) == [gigabits * 1e9 / 8] * count


def test_workstations_and_a_fabric():
    pair = read(foreign("nvidia-smi-topo/workstation-2x-rtx3090-nvlink.txt"))
    assert [d.numa for d in pair.devices] == [0, 0, 0]
    links = read(foreign("nvlink-p2p/perlmutter-4x-a100-nvlink-s.txt"))
    for count, rate in of(links, DeviceKind.GPU, "nvlinks", "nvlink_bytes_per_s"):
        assert count * rate == 300e9
    fabric = read(foreign("ibnetdiscover/quantum2-dgx-582ca.txt"))
    hosts = Counter(d.node for d in fabric.devices if d.kind is DeviceKind.NIC)
    unnamed = {d.node for d in fabric.devices if d.attributes.get("named") is False}
    others = {node: n for node, n in hosts.items() if node not in unnamed and "dgx" not in node}
    assert sum(others.values()) == 2
