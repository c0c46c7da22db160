"""Files that are too large, too deep, too odd: one message or a few notes, in little time."""

import re
import time

import pytest

from topo_ar.errors import TopologyError
from topo_ar.topology.readers import describe, read
from topo_ar.topology.wording import some


def quickly(text):
    """Return the topology of `text` or the message of the refusal; fail where either is slow."""
    start = time.process_time()
    try:
        found = read(text)
    except TopologyError as error:
        found = str(error)
    assert time.process_time() - start < 2
    return found


def nccl(body, version="1"):
    return f'<system version="{version}">\n{body}\n</system>'


def hwloc(attributes="", rest=""):
    return (
        '<topology version="2.0">\n<object type="Machine" cpuset="0x1" nodeset="0x1">'
        f'<object type="NUMANode" gp_index="1" os_index="0" {attributes}/></object>\n'
        f"{rest}</topology>"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (nccl('<cpu numaid="0"/>' * 100_001), "text:2: more than 100000 elements"),
        (nccl("".join(f'<cpu numaid="{i}"/>\n' for i in range(1100))), "text:1026: more than 1024"),
        (
            nccl('<cpu numaid="0"/>\n<cpu numaid="0"/>'),
            "text:3: node0/numa0 is described in line 2 already",
        ),
        (
            nccl('<cpu numaid="0"><pci busid="0000:01:00.0"/>\n<pci busid="0000:01:00.0"/></cpu>'),
            "text:3: node0/pci-0000:01:00.0 is described in line 2 already",
        ),
        (hwloc(f'cpuset="{"0xffffffff," * 5000}0x1"'), "text:2: cpuset=.*is no bitmap"),
        (
            "- topology: a\n  tree:\n" + "    - a\n" * 300_000,
            "text:.*nested too deeply, or too long",
        ),
    ],
)
def test_refused_with_file_and_line(text, message):
    found = quickly(text)
    assert isinstance(found, str)
    assert re.match(message, found)


@pytest.mark.parametrize("model", ["9" * 5000, "²", "-1", ""])
def test_a_cpu_model_that_is_no_number_is_unknown(model):
    body = '<object type="NUMANode" gp_index="2" os_index="1" cpuset="0x2" nodeset="0x2"/>'
    text = hwloc('cpuset="0x1"').replace("</object>", f"{body}</object>")
    info = '<info name="CPUVendor" value="GenuineIntel"/>'
    info += f'<info name="CPUModelNumber" value="{model}"/>'
    topology = quickly(text.replace("</topology>", f"{info}</topology>"))
    assert [link.effective.source for link in topology.links] == ["assumed"]


@pytest.mark.parametrize("value", ["9" * 5000, "²", "-1", "1e3"])
def test_a_matrix_of_no_numbers_is_not_known(value):
    matrix = (
        '<distances2hetero name="NVLinkBandwidth" nbobjs="1"><indexes>NUMANode:1</indexes>'
        f"<u64values>{value}</u64values></distances2hetero>"
    )
    topology = quickly(hwloc('cpuset="0x1"', matrix))
    assert any("NVLink is not known" in note for note in topology.notes)


@pytest.mark.parametrize("speed", ["9" * 400 + " GT/s", "99999 GT/s", "nan", "-8 GT/s"])
def test_a_speed_that_is_none_is_assumed_and_said(speed):
    body = (
        '<cpu numaid="0"><pci busid="0000:01:00.0" class="0x020000" '
        f'link_speed="{speed}" link_width="16"/></cpu>'
    )
    topology = quickly(nccl(body))
    assert topology.links[0].effective.value == 12e9
    assert any("8 GT/s x16 assumed" in note for note in topology.notes)


def test_notes_are_few_and_each_is_there_once():
    names = [f"GPU{i}" for i in range(256)]
    words = ("PIX", "SYS", "NV4", "PHB", "NODE", "NV2", "PXB")
    rows = [
        "\t".join(
            [own, *("X" if i == j else words[(7 * i + 3 * j + i * j) % 7] for j in range(256))]
        )
        for i, own in enumerate(names)
    ]
    text = "\n".join(["\t" + "\t".join(names), *rows, ""])
    notes = quickly(text).notes
    assert len(set(notes)) == len(notes) < 50
    unknown = nccl('<cpu numaid="0"/>' + "\n<foo/>" * 5000)
    assert "line 3, 4, 5, 6, 7, 8, 9, 10 and 4992 more: element <foo> is not known; left out" in (
        quickly(unknown).notes
    )
    odd = "SwitchName=s Nodes=n[1-4]\n" + "".join(f"key{i}=1\n" for i in range(5000))
    notes = describe(odd).topology.notes
    assert len(notes) == 101
    assert notes[-1].endswith("more notes are not shown")


def test_lines_of_many_blanks_take_no_time():
    line = " Link 0: x" + " " * 280 + "x\n"
    topology = quickly("GPU 0: A (UUID: GPU-1)\n" + line * 30_000)
    assert len(topology.ranks) == 1


def test_many_switches_of_one_name_take_no_time():
    text = "".join(f'Switch 65 "S-{i}" # "sw{i % 3}"\n\n' for i in range(20_000))
    assert len(quickly(text).devices) == 20_000


def test_a_switch_named_like_the_id_of_another_stays_another():
    topology = quickly('Switch 8 "S1" # "S2"\n\nSwitch 8 "S2" # ""\n\n')
    assert [device.id for device in topology.devices] == ["S1", "S2"]


def test_some_names():
    assert some(["a", "b"]) == "a, b"
    assert some(["a", "b", "c"], 2) == "a, b and 1 more"
