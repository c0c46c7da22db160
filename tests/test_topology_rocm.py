"""``rocm-smi --showtopo``: a captured output, missing blocks, and broken input."""

import re
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.broken_input import survives
from tests.foreign import foreign
from topo_ar.errors import TopologyError
from topo_ar.topology.model import DeviceKind, LinkKind, from_json, to_json
from topo_ar.topology.paths import PathClass, Paths
from topo_ar.topology.readers import describe, read

ARCHER2 = "rocm-smi/archer2-4x-mi210-xgmi.txt"


def said(topology, pattern):
    return [note for note in topology.notes if re.search(pattern, note)]


def table(title, cells):
    n = len(cells)
    rows = [f"GPU{i}   " + "   ".join(row) for i, row in enumerate(cells)]
    return "\n".join([f"==== {title} between two GPUs ====", " ".join(_names(n)), *rows, ""])


def _names(n):
    return [f"GPU{i}" for i in range(n)]


def test_archer2():
    found = describe(foreign(ARCHER2))
    assert found.format == "rocm-smi-topo"
    topology = found.topology
    assert from_json(to_json(topology)) == topology
    assert topology.ranks == tuple(f"node0/gpu{i}" for i in range(4))
    gpus = [d for d in topology.devices if d.kind is DeviceKind.GPU]
    assert [gpu.numa for gpu in gpus] == [0, 1, 2, 3]
    xgmi = {(link.a[-1], link.b[-1]) for link in topology.links if link.kind is LinkKind.XGMI}
    assert xgmi == {(str(a), str(b)) for a, b in combinations(range(4), 2)}
    assert all(link.nominal is link.effective is None for link in topology.links)
    paths = Paths(topology)
    assert paths.between("node0/gpu0", "node0/gpu3").path_class is PathClass.NVL
    assert paths.nvidia_class("node0/gpu0", "node0/gpu3") == "XGMI"
    assert said(topology, "how many XGMI links join a pair is not in this output")
    assert not said(topology, "missing")


def test_pcie_pairs_and_newer_numa_lines():
    kinds = [["0", "XGMI", "PCIE"], ["XGMI", "0", "PCIE"], ["PCIE", "PCIE", "0"]]
    numa = "".join(
        f"GPU[{i}]\t\t: (Topology) Numa Node: {n}\nGPU[{i}]\t\t: (Topology) Numa Affinity: 7\n"
        for i, n in enumerate((0, 1, 1))
    )
    topology = read(table("Link Type", kinds) + "==== Numa Nodes ====\n" + numa)
    gpus = [d for d in topology.devices if d.kind is DeviceKind.GPU]
    assert [gpu.numa for gpu in gpus] == [0, 1, 1]
    paths = Paths(topology)
    assert paths.nvidia_class("node0/gpu0", "node0/gpu2") == "SYS"
    assert paths.nvidia_class("node0/gpu1", "node0/gpu2") == "PHB or NODE"
    assert said(topology, "GPU0 - GPU1: hops not printed; taken to be joined directly")
    assert said(topology, "the block 'Weight' is missing")
    assert said(topology, "the block 'Hops' is missing")


def test_pairs_of_several_hops_have_no_link_of_their_own():
    kinds = [["0", "XGMI", "XGMI"], ["XGMI", "0", "XGMI"], ["XGMI", "XGMI", "0"]]
    hops = [["0", "1", "2"], ["1", "0", "1"], ["2", "1", "0"]]
    topology = read(table("Hops", hops) + table("Link Type", kinds))
    assert len([link for link in topology.links if link.kind is LinkKind.XGMI]) == 2
    assert said(topology, "GPU0 - GPU2: XGMI of more than one hop")
    assert Paths(topology).between("node0/gpu0", "node0/gpu2").path_class is PathClass.NVB
    assert said(topology, "place on PCIe not known: node0/gpu0, node0/gpu1, node0/gpu2")


def test_without_the_kind_of_link_nothing_is_guessed():
    topology = read(table("Weight", [["0", "15"], ["15", "0"]]))
    assert topology.links == ()
    assert said(topology, "GPU0 - GPU1: kind of link not printed; unknown")
    topology = read("==== Numa Nodes ====\nGPU[0] : (Topology) Numa Node: -1\n")
    assert said(topology, "NUMA node not known: node0/gpu0")


def test_ends_that_disagree_count_as_pcie():
    topology = read(table("Link Type", [["0", "XGMI"], ["PCIE", "0"]]))
    assert not any(link.kind is LinkKind.XGMI for link in topology.links)
    assert said(topology, "PCIE one way, XGMI the other; PCIe counts")


def test_other_output_of_rocm_smi_is_refused():
    with pytest.raises(TopologyError, match="0 GPUs in the blocks of `rocm-smi --showtopo`"):
        read("==== ROCm System Management Interface ====\n==== Concise Info ====\n0  45.0C\n")


def test_the_file_cut_off():
    text = foreign(ARCHER2).read_text()
    lines = text.splitlines(keepends=True)
    for end in range(0, len(lines), 10):
        survives("".join(lines[:end]))
    for end in range(1, len(text), 25):
        survives(text[:end])
    topology = read("".join(lines[:20]))
    assert said(topology, "NUMA node not known")


@settings(max_examples=100)
@given(data=st.data())
def test_the_file_with_bytes_flipped(data):
    raw = bytearray(foreign(ARCHER2).read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    survives(raw.decode(errors="replace"))


def test_pcie_pairs_without_numa_nodes_are_not_said_to_be_far():
    text = table("Link Type", [["0", "PCIE"], ["PCIE", "0"]])
    for numa in ("", "GPU[0] : (Topology) Numa Node: -1\nGPU[1] : (Topology) Numa Node: 0\n"):
        topology = read(text + numa)
        assert Paths(topology).between("node0/gpu0", "node0/gpu1").path_class is PathClass.DIS
        assert said(topology, "GPU0 - GPU1: PCIe, but how near is unknown")
