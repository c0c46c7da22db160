"""``nvidia-smi topo -m``: captured matrices, each trap of the format, and broken input."""

import re
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.broken_input import damaged, survives, survives_every_cut
from tests.foreign import all_foreign, foreign
from topo_ar.errors import TopologyError
from topo_ar.topology.levels import levels
from topo_ar.topology.model import DeviceKind, LinkKind, from_json, to_json
from topo_ar.topology.paths import PathClass, Paths
from topo_ar.topology.presets import preset
from topo_ar.topology.readers import describe, read
from topo_ar.topology.readers.inferred_tree import Leaf, SmiClass, infer_tree

FILES = [name for name in all_foreign() if name.startswith("nvidia-smi-topo/")]
NCCL = {"PIX": "PIX", "PXB": "PXB", "PHB": "PHB", "NODE": "PHB", "SYS": "SYS"}


def load(name):
    return read(foreign(f"nvidia-smi-topo/{name}"))


def matrix(*rows, header="\tGPU0\tGPU1\tGPU2\tGPU3"):
    return "\n".join((header, *rows)) + "\n"


def classes(topology, devices=None):
    paths = Paths(topology)
    devices = devices or [f"node0/gpu{i}" for i in range(len(topology.ranks))]
    return [[paths.nvidia_class(a, b) for b in devices] for a in devices]


def said(topology, pattern):
    return [note for note in topology.notes if re.search(pattern, note)]


def numa(topology):
    by_id = {device.id: device.numa for device in topology.devices}
    return [by_id[rank] for rank in topology.ranks]


def attribute(topology, kind, name):
    return [d.attributes.get(name) for d in topology.devices if d.kind is kind]


def kinds(topology):
    return Counter(device.kind.value for device in topology.devices)


def printed(path):
    """The cells of a file by pair of names, read without the code under test."""
    text = re.sub(r"\x1b\[\d*m", "", path.read_text())
    lines = [line.split() for line in text.splitlines()]
    names = [word for word in lines[0] if re.match(r"GPU\d|NIC\d|mlx", word)]
    rows = {line[0]: line[1:] for line in lines[1:] if line and line[0] in names}
    return {(a, b): cell for a, row in rows.items() for b, cell in zip(names, row, strict=False)}


@pytest.mark.parametrize("name", FILES)
def test_the_paths_are_the_matrix(name):
    path = foreign(name)
    found = describe(path)
    assert found.format == "nvidia-smi-topo"
    topology = found.topology
    assert from_json(to_json(topology)) == topology
    paths = Paths(topology)
    cells = printed(path)
    names = list(dict.fromkeys(a for a, _ in cells))
    nics = [name for name in names if not name.startswith("GPU")]
    ids = {n: f"node0/{n.lower()}" if n[:3] in ("GPU", "NIC") else None for n in names}
    ids |= {n: f"node0/nic{nics.index(n)}" for n in nics if ids[n] is None}
    assert len(cells) == len(names) ** 2
    for (a, b), cell in cells.items():
        cell = cell.replace("SOC", "SYS")
        assert paths.nvidia_class(ids[a], ids[b]) == cell
        if a == b:
            continue
        found_class = paths.between(ids[a], ids[b]).path_class
        wanted = "NVL" if cell.startswith("NV") else NCCL[cell]
        # NCCL goes over a third GPU where two NVLinks lead there.
        assert found_class.name == wanted or (found_class is PathClass.NVB and cell == "SYS")


def test_perlmutter():
    topology = load("perlmutter-4x-a100.txt")
    assert kinds(topology) == {"gpu": 4, "cpu": 4}
    assert numa(topology) == [3, 2, 1, 0]
    cpus = ["48-63,112-127", "32-47,96-111", "16-31,80-95", "0-15,64-79"]
    assert attribute(topology, DeviceKind.GPU, "cpus") == cpus
    nvlinks = [link for link in topology.links if link.kind is LinkKind.NVLINK]
    assert [link.count for link in nvlinks] == [4] * 6
    assert all(link.nominal is link.effective is None for link in topology.links)
    assert said(topology, "counts NVLinks without a rate")
    assert said(topology, "names no NIC")
    with pytest.raises(TopologyError, match="no link with a known rate"):
        levels(topology)


def test_dgx1_wiring():
    topology = load("dlperf-8x-v100-1nic.txt")
    counts = {
        (int(link.a[-1]), int(link.b[-1])): link.count
        for link in topology.links
        if link.kind is LinkKind.NVLINK
    }
    two = {(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)}
    one = {(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)}
    assert counts == dict.fromkeys(two, 2) | dict.fromkeys(one, 1)
    assert all(sum(count for pair, count in counts.items() if gpu in pair) == 6 for gpu in range(8))
    paths = Paths(topology)
    nic = [paths.nvidia_class(gpu, "node0/nic0") for gpu in topology.ranks]
    assert nic == ["NODE", "NODE", "PIX", "PIX", "SYS", "SYS", "SYS", "SYS"]
    assert attribute(topology, DeviceKind.NIC, "name") == ["mlx5_0"]
    assert numa(topology) == [None] * 8
    assert kinds(topology)["cpu"] == 2
    assert attribute(topology, DeviceKind.CPU, "cpus") == ["0-11,24-35", "12-23,36-47"]
    over = paths.between("node0/gpu0", "node0/gpu5")
    assert over.path_class is PathClass.NVB


def test_aws_p3_has_one_cpu_without_a_number():
    topology = load("aws-p3-8xlarge-4x-v100.txt")
    assert classes(topology)[0] == ["X", "NV1", "NV1", "NV2"]
    assert numa(topology) == [None] * 4
    assert attribute(topology, DeviceKind.GPU, "cpus") == ["0-31"] * 4
    assert kinds(topology) == {"gpu": 4, "cpu": 1}


def test_an_old_driver_says_soc():
    topology = load("tf-gdr-4x-k40m-soc.txt")
    assert [row[:2] for row in classes(topology)] == [
        ["X", "PHB"],
        ["PHB", "X"],
        ["SYS", "SYS"],
        ["SYS", "SYS"],
    ]
    paths = Paths(topology)
    assert [paths.nvidia_class(gpu, "node0/nic0") for gpu in topology.ranks[2:]] == ["PHB", "PHB"]
    assert attribute(topology, DeviceKind.NIC, "name") == ["mlx4_0"]
    assert numa(topology) == [None] * 4


def test_polaris_header_without_tabs():
    topology = load("polaris-4x-a100-2nic.txt")
    assert numa(topology) == [3, 2, 1, 0]
    paths = Paths(topology)
    assert [paths.nearest_nics(gpu).path_class.name for gpu in topology.ranks] == [
        "SYS",
        "PHB",
        "SYS",
        "PHB",
    ]
    assert paths.nearest_nics("node0/gpu3").nics == ("node0/nic0",)
    assert paths.nearest_nics("node0/gpu1").nics == ("node0/nic1",)
    assert attribute(topology, DeviceKind.NIC, "name") == ["mlx5_0", "mlx5_1"]


def test_six_gpus_under_an_underlined_header():
    topology = load("pcie-6gpu-ansi-header.txt")
    assert kinds(topology) == {"gpu": 6, "pcie_switch": 3, "cpu": 2}
    assert numa(topology) == [0] * 4 + [1] * 2
    rows = classes(topology)
    assert rows[0] == ["X", "PIX", "NODE", "NODE", "SYS", "SYS"]
    assert rows[4] == ["SYS"] * 4 + ["X", "PIX"]
    assert said(topology, "no pair has NVLink")


def test_uneven_sockets():
    topology = load("pcie-8x-rtx4090-uneven-sockets.txt")
    assert numa(topology) == [0] * 6 + [1] * 2
    assert kinds(topology) == {"gpu": 8, "cpu": 2}
    rows = classes(topology)
    assert [(a, b) for a, b in combinations(range(8), 2) if rows[a][b] == "PHB"] == [
        (0, 1),
        (2, 3),
        (4, 5),
        (6, 7),
    ]


def test_two_and_three_gpus_with_one_bridge():
    topology = load("workstation-2x-rtx3090-nvlink.txt")
    assert classes(topology) == [["X", "NV4"], ["NV4", "X"]]
    assert kinds(topology) == {"gpu": 2, "cpu": 1}
    topology = load("workstation-3x-a6000-one-pair.txt")
    assert classes(topology) == [["X", "NV4", "NODE"], ["NV4", "X", "NODE"], ["NODE", "NODE", "X"]]
    assert numa(topology) == [0, 0, 0]


def test_hgx_h200():
    topology = load("hgx-h200-8gpu-12nic.txt")
    counts = kinds(topology)
    assert (counts["gpu"], counts["nic"], counts["nvswitch"], counts["cpu"]) == (8, 12, 1, 2)
    nvlinks = [link for link in topology.links if link.kind is LinkKind.NVLINK]
    assert [(link.b, link.count) for link in nvlinks] == [("node0/nvswitch", 18)] * 8
    paths = Paths(topology)
    nearest = [paths.nearest_nics(gpu) for gpu in topology.ranks]
    assert [found.nics for found in nearest] == [
        (f"node0/nic{i}",) for i in (0, 3, 4, 5, 6, 9, 10, 11)
    ]
    assert {found.path_class for found in nearest} == {PathClass.PXB}
    assert paths.nvidia_class("node0/nic1", "node0/nic2") == "PIX"
    assert paths.nvidia_class("node0/nic7", "node0/nic8") == "PIX"
    assert attribute(topology, DeviceKind.NIC, "name") == [f"mlx5_{i}" for i in range(12)]
    assert not said(topology, "possibly cut off")


# --- traps that no captured file shows --------------------------------------------------------


def test_a_glued_header_and_single_blanks():
    topology = read(
        "GPU0GPU1mlx5_0mlx5_1CPU AffinityNUMA Affinity\n"
        "GPU0 X NV4 PIX SYS 0-7 0\nGPU1 NV4 X SYS PIX 8-15 1\n"
        "mlx5_0 PIX SYS X SYS\nmlx5_1 SYS PIX SYS X\n"
    )
    assert numa(topology) == [0, 1]
    assert attribute(topology, DeviceKind.NIC, "name") == ["mlx5_0", "mlx5_1"]
    assert Paths(topology).nearest_nics("node0/gpu1").nics == ("node0/nic1",)


def test_other_names_of_nics():
    topology = read("\tGPU0\tmlx5_bond_0\trocep1s0f0\tCPU Affinity\nGPU0\t X \tPHB\tSYS\t0-7\n")
    assert attribute(topology, DeviceKind.NIC, "name") == ["mlx5_bond_0", "rocep1s0f0"]
    assert said(topology, "rows missing: mlx5_bond_0, rocep1s0f0")
    assert Paths(topology).nearest_nics("node0/gpu0").nics == ("node0/nic0",)


def test_nics_without_a_legend_or_with_a_part_of_it():
    text = "\tGPU0\tNIC0\tNIC1\nGPU0\t X \tPIX\tSYS\nNIC0\tPIX\t X \tSYS\nNIC1\tSYS\tSYS\t X \n"
    topology = read(text)
    assert attribute(topology, DeviceKind.NIC, "name") == [None, None]
    assert said(topology, "names not in the legend: node0/nic0, node0/nic1")
    topology = read(text + "\nNIC Legend:\n\n  NIC1: mlx5_3\n")
    assert attribute(topology, DeviceKind.NIC, "name") == [None, "mlx5_3"]


def test_affinity_that_is_empty_not_available_or_a_list():
    topology = read(
        "\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
        "GPU0\t X \tNV18\tNV18\tNV18\t\t\t\tN/A\n"
        "GPU1\tNV18\t X \tNV18\tNV18\t0-71\tN/A\t\t2\n"
        "GPU2\tNV18\tNV18\t X \tNV18\t0-143\t0-1\t\t10\n"
        "GPU3\tNV18\tNV18\tNV18\t X \t72-143\t1\t\t18\n"
    )
    assert numa(topology) == [None, None, None, 1]
    assert attribute(topology, DeviceKind.GPU, "gpu_numa") == [None, 2, 10, 18]
    assert attribute(topology, DeviceKind.GPU, "numa_affinity") == [None, None, "0-1", None]
    assert said(topology, "place on PCIe not known: node0/gpu0")
    assert not any(link.kind is LinkKind.PCIE and link.a == "node0/gpu0" for link in topology.links)
    assert classes(topology)[0] == ["X", "NV18", "NV18", "NV18"]


def test_a_long_list_of_cpus_is_suspect():
    listed = "0,2,4,6,8,10,12,14,16"
    topology = read(f"\tGPU0\tCPU Affinity\nGPU0\t X \t{listed}\n")
    assert said(topology, "gpu0: CPU list .* possibly cut off")
    assert not said(read("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15,64-79\n"), "possibly cut off")


def test_cut_off_rows_are_named_and_their_pairs_unknown():
    topology = read(matrix("GPU0\t X \tPIX\tSYS\tSYS", "GPU1\tPIX\t X \tSYS\tNO"))
    assert said(topology, "rows missing: GPU2, GPU3")
    assert said(topology, "'NO' is no class: GPU1 - GPU3; unknown")
    assert said(topology, "no class is printed: GPU2 - GPU3; unknown")
    paths = Paths(topology)
    assert paths.nvidia_class("node0/gpu0", "node0/gpu1") == "PIX"
    # Nothing says that the two are near each other.
    assert paths.between("node0/gpu2", "node0/gpu3").path_class is PathClass.SYS
    topology = read(matrix("GPU0\t X \tPIX"))
    assert said(topology, "line 2: the row has 2 of 4 cells")


def test_an_asymmetric_cell_counts_as_the_worse():
    header = "\tGPU0\tGPU1\tGPU2"
    topology = read(
        matrix("GPU0\t X \tPIX\tNV4", "GPU1\tSYS\t X \tNV2", "GPU2\tNV3\tPHB\t X ", header=header)
    )
    assert classes(topology) == [["X", "SYS", "NV3"], ["SYS", "X", "PHB"], ["NV3", "PHB", "X"]]
    assert len(said(topology, "the worse counts")) == 3
    assert "GPU0 - GPU1: PIX one way, SYS the other; the worse counts" in topology.notes


def test_classes_that_fit_no_tree_are_kept_worse_and_named():
    header = "\tGPU0\tGPU1\tGPU2"
    topology = read(
        matrix("GPU0\t X \tPIX\tSYS", "GPU1\tPIX\t X \tPIX", "GPU2\tSYS\tPIX\t X ", header=header)
    )
    assert classes(topology) == [["X", "PIX", "SYS"], ["PIX", "X", "SYS"], ["SYS", "SYS", "X"]]
    assert said(topology, "GPU1 - GPU2: PIX is printed, which fits no tree .* SYS is kept")


def test_an_nvswitch_with_one_poor_gpu():
    rows = [
        f"GPU{a}\t"
        + "\t".join("X" if a == b else "NV16" if 3 in (a, b) else "NV18" for b in range(4))
        for a in range(4)
    ]
    topology = read(matrix(*rows))
    assert {link.a[-1]: link.count for link in topology.links if link.kind is LinkKind.NVLINK} == {
        "0": 18,
        "1": 18,
        "2": 18,
        "3": 16,
    }
    assert classes(topology)[3] == ["NV16", "NV16", "NV16", "X"]
    broken = [row.replace("NV18", "SYS", 1) if row.startswith("GPU0") else row for row in rows]
    assert said(read(matrix(*broken)), "gpu0 - node0/gpu1: 0 NVLinks are printed, 18 follow")


def test_a_mesh_that_may_be_a_switch_is_said():
    assert said(load("perlmutter-4x-a100.txt"), "12 a GPU; behind an NVSwitch each .* 4 in all")


def test_rows_and_columns_that_do_not_belong():
    topology = read(
        "\tGPU0\tGPU1\nGPU0\tX\tPIX\nGPU1\tPIX\tX\nGPU1\tSYS\tX\nGPU7\tSYS\tX\n"
        "\tGPU0\tGPU1\nGPU0\tX\tSYS\n"
    )
    assert classes(topology) == [["X", "PIX"], ["PIX", "X"]]
    assert said(topology, "line 4: a second row of GPU1")
    assert said(topology, "line 5: row GPU7 has no column")
    assert said(topology, "line 6: a second matrix starts here")
    with pytest.raises(TopologyError, match="text:1: column GPU0 is there twice"):
        read("\tGPU0\tGPU0\nGPU0\tX\tX\n")
    with pytest.raises(TopologyError, match="same device"):
        read("\tGPU0\tGPU00\nGPU0\tX\tSYS\n")
    many = "\t".join(f"GPU{i}" for i in range(300))
    with pytest.raises(TopologyError, match="text:1: 300 columns"):
        read(f"\t{many}\nGPU0\tX\n")


def test_words_for_descriptions_of_other_kinds():
    paths = Paths(read(foreign("nccl-xml/perlmutter-4x-a100-4-slingshot.xml")))
    assert paths.nvidia_class("node0/gpu0", "node0/gpu1") == "NV4"
    # NCCL does not tell host bridges apart.
    assert paths.nvidia_class("node0/gpu0", "node0/nic3") == "PHB or NODE"
    assert paths.nvidia_class("node0/gpu0", "node0/nic0") == "SYS"
    cluster = preset("dgx-h100", nodes=2)
    paths = Paths(cluster)
    assert paths.nvidia_class(cluster.ranks[0], cluster.ranks[7]) == "NV18"
    assert paths.nvidia_class(cluster.ranks[0], cluster.ranks[8]) is None
    with pytest.raises(TopologyError, match="is no device"):
        paths.nvidia_class(cluster.ranks[0], "gpu99")


# --- R08: the tool failed ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "Failed to run topology matrix\n",
            "holds no matrix.*'Failed to run topology matrix'.*NCCL",
        ),
        (
            "Failed to run topology matrix",
            "holds no matrix.*'Failed to run topology matrix'.*probe",
        ),
        ("No devices were found\n", "holds no matrix.*'No devices were found'"),
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
            "holds no matrix.*driver",
        ),
        (
            "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n",
            "no matrix.*'Legend:'",
        ),
        ("\tGPU0\tGPU1\tCPU Affinity\n\nLegend:\n", "holds no matrix: no row follows"),
        ("", "is empty.*the command that wrote it failed"),
        ("\n \n", "is empty"),
    ],
)
def test_a_file_without_a_matrix_is_refused(tmp_path, content, message):
    path = tmp_path / "topo.txt"
    path.write_text(content)
    with pytest.raises(TopologyError, match=rf"^topo\.txt.*{message}"):
        read(path)


# --- broken input -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_every_file_cut_off(name):
    survives_every_cut(name)


@settings(max_examples=60)
@given(damaged(FILES))
def test_every_file_with_bytes_flipped(text):
    survives(text)


CELLS = st.sampled_from(["X", "PIX", "PXB", "PHB", "NODE", "SYS", "NV1", "NV18", "", "N/A"])


@settings(max_examples=60)
@given(n=st.integers(1, 6), data=st.data())
def test_any_cells(n, data):
    rows = [
        f"GPU{i}\t" + "\t".join(data.draw(st.lists(CELLS, min_size=n, max_size=n)))
        for i in range(n)
    ]
    survives(matrix(*rows, header="\t" + "\t".join(f"GPU{i}" for i in range(n)) + "\tCPU Affinity"))


@settings(max_examples=80)
@given(n=st.integers(2, 7), data=st.data())
def test_a_tree_is_never_nearer_than_printed(n, data):
    pairs = list(combinations(range(n), 2))
    classes_of = {pair: data.draw(st.sampled_from(SmiClass)) for pair in pairs}
    leaves = [Leaf(f"node0/gpu{i}") for i in range(n)]
    tree = infer_tree("node0", leaves, classes_of)
    farther = dict(tree.farther)
    assert all(farther[pair] > classes_of[pair] for pair in farther)
    assert all(
        classes_of[a, c] <= max(classes_of[a, b], classes_of[b, c])
        or {(a, b), (b, c), (a, c)} & farther.keys()
        for a, b, c in combinations(range(n), 3)
    )
