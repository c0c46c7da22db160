"""``nvidia-smi nvlink -s``, ``-R`` and ``topo -p2p``: captured output, and broken input."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.broken_input import damaged, survives, survives_every_cut
from tests.foreign import all_foreign, foreign
from topo_ar.errors import TopologyError
from topo_ar.topology.levels import levels
from topo_ar.topology.model import DeviceKind, from_json, to_json
from topo_ar.topology.readers import describe, read
from topo_ar.topology.summary import summarize

FILES = [name for name in all_foreign() if name.startswith("nvlink-p2p/")]


def load(name):
    return read(foreign(f"nvlink-p2p/{name}"))


def gpus(topology, name):
    return [d.attributes.get(name) for d in topology.devices if d.kind is DeviceKind.GPU]


def said(topology, pattern):
    return [note for note in topology.notes if re.search(pattern, note)]


def header(index):
    return f"GPU {index}: NVIDIA A100 (UUID: GPU-{index})\n"


def remote(index, *ends):
    lines = [
        f"\t Link {i}: Remote Device 00000000:{bus}:00.0: Link {k}\n"
        for i, (bus, k) in enumerate(ends)
    ]
    return header(index) + "".join(lines)


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_sound_and_goes_through_json(name):
    found = describe(foreign(name))
    assert found.format == ("nvidia-smi-p2p" if "p2p-n" in name else "nvidia-smi-nvlink")
    assert from_json(to_json(found.topology)) == found.topology
    assert found.topology.ranks == tuple(f"node0/gpu{i}" for i in range(len(found.topology.ranks)))


def test_perlmutter_links():
    topology = load("perlmutter-4x-a100-nvlink-s.txt")
    assert gpus(topology, "nvlinks") == [12] * 4
    assert gpus(topology, "nvlink_bytes_per_s") == [25e9] * 4
    assert gpus(topology, "name") == ["NVIDIA A100-SXM4-40GB"] * 4
    assert gpus(topology, "uuid")[3] == "GPU-00000000-0000-0000-0000-000000000003"
    assert topology.links == ()
    assert said(topology, "far ends .* nvlink -R")
    # What is not told is not "not connected".
    pairs = summarize(topology, "nvidia-smi-nvlink")["gpu_pairs"]
    assert {(pair["path_class"], pair["link_count"]) for pair in pairs} == {(None, None)}


def test_two_rtx_3090():
    topology = load("workstation-2x-rtx3090-nvlink-s.txt")
    assert gpus(topology, "nvlinks") == [4, 4]
    assert gpus(topology, "nvlink_bytes_per_s") == pytest.approx([14.062e9] * 2)
    assert 4 * gpus(topology, "nvlink_bytes_per_s")[0] == pytest.approx(56.2e9, rel=1e-3)


def test_links_that_are_all_inactive_are_none():
    topology = load("workstation-3x-a6000-nvlink-s-inactive.txt")
    assert gpus(topology, "nvlinks") == [4, 4, 0]
    assert gpus(topology, "nvlink_bytes_per_s")[2] is None
    assert "node0/gpu2: no NVLink is active" in topology.notes


def test_perlmutter_peer_access():
    topology = load("perlmutter-4x-a100-p2p-n.txt")
    assert gpus(topology, "p2p")[1] == "gpu0=OK,gpu2=OK,gpu3=OK"
    assert said(topology, "does not say which access")
    assert not said(topology, "access between")


def test_some_inactive_links_and_signalling_rates():
    text = header(0) + "\t Link 0: 53.125 GB/s\n\t Link 1: <inactive>\n\t Link 2: 53.125 GB/s\n"
    topology = read(text)
    assert gpus(topology, "nvlinks") == [2]
    assert gpus(topology, "nvlink_bytes_per_s") == [50e9]
    assert said(topology, r"53\.125 GB/s is the signalling rate of a link, 50 GB/s its payload")
    assert "node0/gpu0: 1 NVLinks are inactive" in topology.notes
    assert gpus(read(text.replace("53.125", "26.562")), "nvlink_bytes_per_s") == [25e9]
    assert gpus(read(text.replace("53.125", "25.781")), "nvlink_bytes_per_s") == [25e9]


def test_links_of_different_rates_count_as_the_slowest():
    topology = read(header(0) + "\t Link 0: 25 GB/s\n\t Link 1: 20 GB/s\n")
    assert gpus(topology, "nvlink_bytes_per_s") == [20e9]
    assert said(topology, "from 20 to 25 GB/s")


def test_a_gpu_of_which_nothing_is_printed_is_unknown_not_without_links():
    topology = read(header(0) + header(1) + "\t Link 0: 25 GB/s\n")
    assert gpus(topology, "nvlinks") == [None, 1]
    assert "node0/gpu0: nothing is printed of its links; they are unknown" in topology.notes


MESH = (
    remote(0, ("82", 0), ("41", 0), ("41", 1))
    + remote(1, ("03", 1), ("03", 2), ("82", 1))
    + remote(2, ("03", 0), ("41", 2))
)


def test_far_ends_that_both_sides_confirm_are_links():
    topology = read(MESH)
    assert gpus(topology, "busid") == ["0000:03:00.0", "0000:41:00.0", "0000:82:00.0"]
    assert {(link.a, link.b, link.count) for link in topology.links} == {
        ("node0/gpu0", "node0/gpu1", 2),
        ("node0/gpu0", "node0/gpu2", 1),
        ("node0/gpu1", "node0/gpu2", 1),
    }
    assert all(link.nominal is None for link in topology.links)


def test_rates_and_far_ends_in_one_file():
    rates = "".join(header(i) + "\t Link 0: 25 GB/s\n\t Link 1: 25 GB/s\n" for i in range(3))
    topology = read(rates + MESH)
    assert [link.nominal.value for link in topology.links if link.count == 2] == [50e9]
    [node] = levels(topology).nodes
    assert node.intra.nominal == 50e9


def test_far_ends_without_their_link_numbers():
    text = header(0) + " Link 0: 00000000:41:00.0\n" + header(1) + " Link 3: 00000000:03:00.0\n"
    topology = read(text)
    assert [(link.a, link.b, link.count) for link in topology.links] == [
        ("node0/gpu0", "node0/gpu1", 1)
    ]


def test_far_ends_of_all_gpus_alike_are_switches():
    ends = [("05", 8), ("06", 9), ("07", 1)]
    topology = read(remote(0, *ends) + remote(1, *[(bus, k + 2) for bus, k in ends]))
    assert [(link.a, link.b, link.count) for link in topology.links] == [
        ("node0/gpu0", "node0/nvswitch", 3),
        ("node0/gpu1", "node0/nvswitch", 3),
    ]
    assert said(topology, "taken to be NVSwitches")
    hidden = header(0) + "\t Link 0: Remote Device FFFFFFFF:FF:FF.0: Link 255\n"
    topology = read(hidden + hidden.replace("0: NV", "1: NV").replace("GPU-0", "GPU-1"))
    assert {link.b for link in topology.links} == {"node0/nvswitch"}
    assert said(topology, "are hidden; they are taken to be NVSwitches")


def test_far_ends_that_cannot_be_told_are_left_out():
    topology = read(remote(0, ("82", 0), ("41", 0)))
    assert topology.links == ()
    assert said(topology, "0000:41:00.0, 0000:82:00.0 are cannot be told")
    assert gpus(topology, "nvlinks") == [2]
    swapped = MESH.replace("03:00.0: Link 2", "82:00.0: Link 2")
    assert read(swapped).links == ()


def test_two_machines_in_one_file_are_refused():
    with pytest.raises(TopologyError, match="text:3: GPU 0 has another UUID than in line 1"):
        read(header(0) + "\t Link 0: 25 GB/s\n" + header(0).replace("GPU-0", "GPU-x"))
    with pytest.raises(TopologyError, match="text: lists links without the line of their GPU"):
        read("\t Link 0: 25 GB/s\n\t Link 1: 25 GB/s\n")


def test_lines_that_are_not_understood_are_noted():
    topology = read(header(0) + "\t Link 0: 25 GB/s\n\t Link 1: perhaps\nNVML: Unable to ask\n")
    assert said(topology, "line 3: 'Link 1: perhaps' is not .* left out, as are 1 other lines")


def test_pairs_without_access_are_named():
    topology = read(
        " \tGPU0\tGPU1\tGPU2\t\n GPU0\tX\tGNS\tOK\t\n GPU1\tGNS\tX\tOK\t\n GPU2\tTNS\tOK\tX\t\n"
    )
    assert "access between GPU0 - GPU1 is not supported by the GPU" in topology.notes
    assert "access GPU0 - GPU2: OK one way, TNS the other" in topology.notes
    assert gpus(topology, "p2p") == ["gpu1=GNS,gpu2=OK", "gpu0=GNS,gpu2=OK", "gpu0=TNS,gpu1=OK"]
    topology = read(" \tGPU0\tGPU1\t\n GPU0\tX\tDR\t\n")
    assert said(topology, "rows missing: GPU1")
    assert said(topology, "GPU0 - GPU1 is disabled by a registry key")


# --- broken input -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_every_file_cut_off(name):
    survives_every_cut(name)


@settings(max_examples=100)
@given(damaged(FILES))
def test_every_file_with_bytes_flipped(text):
    survives(text)


@settings(max_examples=100)
@given(
    ends=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 2), st.sampled_from(["03", "41", "ff"])),
        max_size=12,
    )
)
def test_any_far_ends(ends):
    survives("".join(remote(i, *[(bus, k)]) for i, k, bus in ends) + header(9))
