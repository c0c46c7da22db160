"""What the doctor finds in topologies, and the settings that it warns of."""

import json

import msgspec
import pytest
from typer.testing import CliRunner

from tests.foreign import foreign
from topo_ar.cli.doctor import _nccl_settings
from topo_ar.cli.main import app
from topo_ar.topology.findings import findings
from topo_ar.topology.model import DeviceKind, LinkKind
from topo_ar.topology.presets import preset
from topo_ar.topology.readers import read


def about(topology):
    return {finding.about: finding for finding in findings(topology)}


def change_links(topology, wanted, **changes):
    links = tuple(
        msgspec.structs.replace(link, **changes) if wanted(link) else link
        for link in topology.links
    )
    return msgspec.structs.replace(topology, links=links)


def halve(figure):
    return msgspec.structs.replace(figure, value=figure.value / 2)


PAIR = preset("dgx-h100", nodes=2)


def test_a_healthy_cluster_has_no_findings():
    assert findings(PAIR) == []
    assert findings(preset("cpu-host", nodes=3)) == []


def test_a_gpu_with_fewer_nvlinks_is_named():
    lame = change_links(
        PAIR, lambda link: link.kind is LinkKind.NVLINK and link.a == "node1/gpu5", count=17
    )
    found = about(lame)["nvlink"]
    assert "fewer NVLinks than the 18 of the other GPUs of node1: node1/gpu5 (17)" in found.text
    assert "nvlink -s" in found.remedy


def test_a_slow_cable_and_a_narrow_slot_are_named():
    cable = next(link for link in PAIR.links if link.kind is LinkKind.INFINIBAND)
    slow = change_links(PAIR, lambda link: link is cable, nominal=halve(cable.nominal))
    found = about(slow)["cable"]
    assert found.text == "cable slower than the usual 50 GB/s: node0/nic0 (25 GB/s)"
    slot = next(
        link for link in PAIR.links if link.kind is LinkKind.PCIE and link.a == "node1/gpu2"
    )
    narrow = change_links(PAIR, lambda link: link is slot, nominal=halve(slot.nominal))
    assert "node1/gpu2 (31.51 GB/s)" in about(narrow)["pcie"].text
    assert "LnkSta" in about(narrow)["pcie"].remedy


def test_nodes_that_differ_are_named():
    three = preset("dgx-h100", nodes=3)
    odd = msgspec.structs.replace(
        three,
        devices=tuple(d for d in three.devices if d.id != "node1/nic7"),
        links=tuple(link for link in three.links if "node1/nic7" not in (link.a, link.b)),
    )
    found = about(odd)["unequal nodes"]
    assert "most nodes have 8 ranks and 8 NICs" in found.text
    assert "different: node1 (8 ranks, 7 NICs, 350 GB/s)" in found.text
    assert "weighted shards" in found.remedy


def test_ranks_dealt_out_round_robin():
    cluster = preset("cpu-host", nodes=2, ranks_per_node=2)
    dealt = msgspec.structs.replace(
        cluster, ranks=("node0/cpu0", "node1/cpu0", "node0/cpu1", "node1/cpu1")
    )
    found = about(dealt)["rank order"]
    assert "leaves a node 4 times where 2 would do" in found.text
    assert "--map-by slot" in found.remedy


def test_nics_beyond_a_cpu_and_nics_near_nobody():
    perlmutter = read(foreign("nccl-xml/perlmutter-4x-a100-4-slingshot.xml"))
    found = about(perlmutter)["gpudirect"]
    assert "only through a CPU (PHB)" in found.text
    assert "NCCL_NET_GDR_LEVEL=PHB" in found.remedy
    one = read(foreign("nccl-xml/rccl-8x-gfx908-2hives-1nic.xml"))
    assert "SYS" in about(one)["gpudirect"].text
    h200 = preset("dgx-h100", ranks_per_node=6)
    gpus = [d for d in h200.devices if d.kind is DeviceKind.GPU]
    assert len(gpus) == 8
    assert "node0/nic6, node0/nic7" in about(h200)["idle nics"].text


def test_numa_that_is_not_known():
    cluster = read(foreign("nccl-xml/azure-ndv4.xml"))
    devices = tuple(
        msgspec.structs.replace(d, numa=None) if d.kind is DeviceKind.NIC else d
        for d in cluster.devices
    )
    lost = msgspec.structs.replace(cluster, devices=devices)
    assert "numactl" in about(lost)["numa"].remedy


# --- the command ---


def test_doctor_of_a_file(tmp_path):
    path = foreign("nccl-xml/perlmutter-4x-a100-4-slingshot.xml")
    done = CliRunner().invoke(app, ["doctor", str(path), "--json"])
    assert done.exit_code == 0
    rows = json.loads(done.output)
    assert rows[0]["text"].endswith("4 GPUs and 4 NICs")
    assert any(row["check"] == "gpudirect" and row["remedy"] for row in rows)
    text = CliRunner().invoke(app, ["doctor", str(path)]).output
    assert "remedy: move NIC and GPU" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("name", ["NCCL_GRAPH_FILE", "NCCL_P2P_DISABLE"])
def test_settings_that_bind_nccl(name, tmp_path):
    config = tmp_path / "nccl.conf"
    config.write_text(f"# old\n{name} = /opt/x\nNCCL_DEBUG=INFO\n")
    [found] = _nccl_settings({}, config)
    assert found.text.startswith(f"{name}=/opt/x (in {config})")
    assert found.remedy.startswith("remove it unless")
    [found] = _nccl_settings({name: "1", "PATH": "x"}, tmp_path / "none")
    assert found.text.startswith(f"{name}=1: ")
