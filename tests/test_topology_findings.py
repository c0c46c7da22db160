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
from topo_ar.topology.presets import PRESETS, preset
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
    assert "only through a CPU (PHB: node0/gpu0, node0/gpu1, node0/gpu2, node0/gpu3)" in found.text
    assert "NCCL_NET_GDR_LEVEL=PHB" in found.remedy
    one = read(foreign("nccl-xml/rccl-8x-gfx908-2hives-1nic.xml"))
    assert "(PHB: node0/gpu4, node0/gpu5; SYS: node0/gpu0, " in about(one)["gpudirect"].text
    assert "GDR_LEVEL=SYS" in about(one)["gpudirect"].remedy
    h200 = preset("dgx-h100", ranks_per_node=6)
    gpus = [d for d in h200.devices if d.kind is DeviceKind.GPU]
    assert len(gpus) == 8
    assert "node0/nic6, node0/nic7" in about(h200)["idle nics"].text


def test_numa_that_is_not_known():
    found = about(read(foreign("hwloc-xml/aws-p3dn.24xl.xml")))["numa"]
    assert "node0/gpu0" in found.text
    assert "node0/gpu7 and 1 more" in found.text
    assert "numactl" in found.remedy
    # nvidia-smi prints no NUMA node of NICs, but where they hang.
    assert "numa" not in about(read(foreign("nvidia-smi-topo/hgx-h200-8gpu-12nic.txt")))


def test_a_nic_behind_a_coherent_cpu_and_one_without_rdma_are_as_they_should_be():
    assert findings(preset("gb200-nvl72")) == []
    assert "gpudirect" not in about(read(foreign("nccl-xml/azure-ncv4.xml")))
    assert "gpudirect" not in about(read(foreign("nccl-xml/rccl-8x-gfx90a-xgmi-nonic.xml")))


ODD = {"azure-ndv2", "azure-ncv4", "aws-p3dn", "aws-g5.48xl", "perlmutter", "pcie-4", "pcie-8"}


@pytest.mark.parametrize("name", sorted(set(PRESETS) - ODD))
def test_healthy_machines_have_no_findings(name):
    assert findings(preset(name)) == []


@pytest.mark.parametrize("name", sorted(ODD))
def test_flat_machines_have_one_finding_with_a_remedy(name):
    [found] = findings(preset(name))
    assert found.about == "gpudirect"
    assert "NCCL_NET_GDR_LEVEL=" in found.remedy


# --- the command ---


def test_doctor_of_a_file(tmp_path):
    path = foreign("nccl-xml/perlmutter-4x-a100-4-slingshot.xml")
    done = CliRunner().invoke(app, ["doctor", str(path), "--json"])
    assert done.exit_code == 0
    rows = json.loads(done.output)
    assert rows[0]["text"].endswith("4 GPUs and 4 NICs")
    assert any(row["check"] == "gpudirect" and row["remedy"] for row in rows)
    text = CliRunner().invoke(app, ["doctor", str(path)]).output
    assert "remedy: measure what NCCL_NET_GDR_LEVEL=PHB" in text
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


def test_the_users_settings_come_before_those_of_the_system(tmp_path):
    system = tmp_path / "nccl.conf"
    system.write_text("NCCL_ALGO=Ring\nNCCL_PROTO=LL\nNCCL_IB_DISABLE=0\n")
    (tmp_path / ".nccl.conf").write_text("NCCL_ALGO=Tree\n")
    environment = {"HOME": str(tmp_path), "NCCL_PROTO": "Simple", "NCCL_P2P_DISABLE": "0"}
    texts = [found.text for found in _nccl_settings(environment, system)]
    assert [text.partition(":")[0] for text in texts] == [
        "NCCL_PROTO=Simple",
        f"NCCL_ALGO=Tree (in {tmp_path}/.nccl.conf)",
    ]
