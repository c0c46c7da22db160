"""InfiniBand fabrics; the right answers are in data/ibnetdiscover/SOURCES.md."""

import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topo_ar.errors import TopologyError
from topo_ar.topology.model import Device, DeviceKind, Link, LinkKind, Topology, from_json, to_json
from topo_ar.topology.readers import describe, read

DATA = Path(__file__).parent / "data" / "ibnetdiscover"
ALL = sorted(path.name for path in DATA.iterdir() if path.suffix in (".txt", ".net"))
DGX = re.compile(r"[ab]\d\d-p\d-dgx-\d\d-c\d\d")


def load(name: str) -> Topology:
    return read(DATA / name)


def devices(topology: Topology, kind: DeviceKind) -> list[Device]:
    return [device for device in topology.devices if device.kind is kind]


def cables(topology: Topology) -> list[Link]:
    return [link for link in topology.links if link.kind is LinkKind.INFINIBAND]


def switch_pairs(topology: Topology) -> list[Link]:
    switches = {switch.id for switch in devices(topology, DeviceKind.SWITCH)}
    return [link for link in cables(topology) if {link.a, link.b} <= switches]


@pytest.mark.parametrize("name", ALL)
def test_every_file_is_sound_and_goes_through_json(name: str) -> None:
    found = describe(DATA / name)
    assert found.format == "ibnetdiscover"
    assert found.topology.ranks == ()
    assert from_json(to_json(found.topology)) == found.topology


def test_quantum2_switches() -> None:
    topology = load("quantum2-dgx-582ca.txt")
    switches = devices(topology, DeviceKind.SWITCH)
    assert len(switches) == 40
    assert {switch.attributes["ports"] for switch in switches} == {65}
    assert Counter(
        (switch.attributes["tier"], "SPINE" in switch.id, "LEAF" in switch.id)
        for switch in switches
    ) == {(1, False, True): 31, (2, True, False): 9}
    assert all(switch.attributes["sharp"] is True for switch in switches)
    by_id = {switch.id: switch.attributes for switch in switches}
    assert by_id["A09-P1-IBLEAF-04-04"]["guid"] == "2c5eab0300b87b40"
    assert Counter(link.count for link in switch_pairs(topology)) == {2: 263, 1: 6}
    for link in cables(topology):
        assert link.nominal is not None
        assert link.nominal.value == link.count * 400e9 / 8
    # 1114 links, 40 of which lead to aggregation nodes.
    assert sum(link.count for link in cables(topology)) == 1114 - 40
    assert topology.notes[0] == (
        "40 switches, 542 channel adapters, 1074 links; 40 aggregation nodes (SHARP) in switches, "
        "which are no hosts"
    )
    assert not any("lacks" in note or "one end" in note for note in topology.notes)


def test_quantum2_hosts() -> None:
    topology = load("quantum2-dgx-582ca.txt")
    nics = devices(topology, DeviceKind.NIC)
    assert len(nics) == 582 - 40
    adapters = Counter(nic.node for nic in nics if nic.node and DGX.fullmatch(nic.node))
    assert Counter(adapters.values()) == {4: 109, 3: 10}
    hosts = {host.node: host for host in devices(topology, DeviceKind.HOST)}
    assert {nic.node for nic in nics} == set(hosts)
    assert adapters["a08-p1-dgx-04-c01"] == 4
    nameless = [nic for nic in nics if hosts[nic.node].attributes.get("named") is False]
    assert Counter(re.sub(r"\d+", "N", str(nic.attributes["name"])) for nic in nameless) == {
        "MTN ConnectXN Mellanox Technologies": 69,
        "HCA-N": 3,
        "mlxN_N": 2,
    }
    for words in ("69 channel adapters called 'MT4129", "3 .* 'localhost'", "2 .* 'ubuntu'"):
        assert any(re.match(words, note) for note in topology.notes)
    ports = Counter(link.a for link in cables(topology))
    assert all(ports[nic.id] == 1 for nic in nics)


def test_a_discovery_that_found_nothing_says_so() -> None:
    topology = load("truncated-single-ca.txt")
    assert [device.id for device in topology.devices] == [
        "dgx-gb200-n01-c1/host",
        "dgx-gb200-n01-c1/HCA-1",
    ]
    assert any("0 switches, 1 channel adapters, 0 links" in note for note in topology.notes)


def test_ibsim_one_switch() -> None:
    topology = load("ibsim-net-1switch.net")
    assert [switch.id for switch in devices(topology, DeviceKind.SWITCH)] == ["Switch1"]
    assert [host.node for host in devices(topology, DeviceKind.HOST)] == ["Hca1", "Hca2"]
    assert {(link.a, link.b) for link in cables(topology)} == {
        ("Hca1/hca", "Switch1"),
        ("Hca2/hca", "Switch1"),
    }
    assert all(link.nominal is None for link in cables(topology))
    assert "2 links have no rate in the file" in topology.notes


def test_ibsim_two_switches() -> None:
    topology = load("ibsim-net-2switch.net")
    assert [s.attributes["tier"] for s in devices(topology, DeviceKind.SWITCH)] == [1, 2]
    assert {(link.a, link.b, link.count) for link in cables(topology)} == {
        ("Hca1/hca", "Switch1", 1),
        ("Hca2/hca", "Switch1", 1),
        ("Switch1", "Switch2", 2),
    }


# --- what no captured file shows --------------------------------------------------------------

SWITCH = 'Switch\t2 "S-00000000000000aa"\t# "leaf" enhanced port 0 lid 1 lmc 0\n'


def fabric(*adapters: tuple[str, str, str], there: str = "4xNDR", back: str = "4xNDR") -> str:
    """One switch and these adapters, each a GUID's last digits, a name and a system's."""
    text = SWITCH
    for port, (guid, name, _) in enumerate(adapters, start=1):
        text += f'[{port}]\t"H-{guid:0>16}"[1]({guid:0>16})\t# "{name}" lid 2 {there}\n'
    for port, (guid, name, system) in enumerate(adapters, start=1):
        text += f"\nsysimgguid=0x{system:0>16}\ncaguid=0x{guid:0>16}\n"
        text += f'Ca\t1 "H-{guid:0>16}"\t# "{name}"\n'
        text += (
            f'[1]({guid:0>16})\t"S-00000000000000aa"[{port}]\t# lid 2 lmc 0 "leaf" lid 1 {back}\n'
        )
    return text


@pytest.mark.parametrize(
    ("rate", "gigabits"),
    [
        ("1xSDR", 2.5),
        ("4xQDR", 40),
        ("4xFDR10", 40),
        ("4xFDR", 56),
        ("4xEDR", 100),
        ("4xHDR", 200),
        ("2xHDR", 100),
        ("4xNDR", 400),
        ("4xXDR", 800),
    ],
)
def test_rates(rate: str, gigabits: float) -> None:
    [link] = cables(read(fabric(("1", "a mlx5_0", "1"), there=rate, back=rate)))
    assert link.nominal is not None
    assert link.nominal.value == gigabits * 1e9 / 8
    assert rate in link.nominal.note


def test_the_slower_side_counts_and_an_unknown_rate_stays_unknown() -> None:
    topology = read(fabric(("1", "a mlx5_0", "1"), there="4xNDR", back="2xHDR"))
    assert [link.nominal and link.nominal.value for link in cables(topology)] == [12.5e9]
    assert any("1 links are told with different rates" in note for note in topology.notes)
    topology = read(fabric(("1", "a mlx5_0", "1"), there="4x??", back="9xABC"))
    assert [link.nominal for link in cables(topology)] == [None]


def test_adapters_of_one_name_are_grouped_only_by_their_system() -> None:
    topology = read(
        fabric(
            ("1", "node1 mlx5_0", "1"),
            ("2", "node1 mlx5_1", "2"),
            ("3", "twin mlx5_0", "7"),
            ("4", "twin mlx5_0", "7"),
            ("5", "twin mlx5_0", "8"),
        )
    )
    nodes = {nic.attributes["guid"]: nic.node for nic in devices(topology, DeviceKind.NIC)}
    assert list(nodes.values()) == [
        "node1",
        "node1",
        "guid-0000000000000007",
        "guid-0000000000000007",
        "guid-0000000000000008",
    ]
    assert any(note.startswith("3 channel adapters called 'twin'") for note in topology.notes)


def test_half_a_fabric_is_read_and_said() -> None:
    text = fabric(("1", "a mlx5_0", "1"), ("2", "b mlx5_0", "2"))
    cut = read(text[: text.index("Ca\t1", text.index("Ca\t1") + 1)])
    assert any("1 ports lead to nodes the file lacks" in note for note in cut.notes)
    topology = read(text + "\n[7] gibberish\n" + text.replace("[1]", "[3]"))
    assert any("1 lines could not be read" in n and "[7] gibberish" in n for n in topology.notes)
    assert any("3 nodes are there twice" in note for note in topology.notes)
    one_end = read(re.sub(r'\n\[1\].*"S-0.*', "", text))
    assert "2 links are told by one end only" in one_end.notes


@pytest.mark.parametrize("name", ALL)
def test_cut_files_are_read_with_notes(name: str) -> None:
    lines = (DATA / name).read_text().splitlines(keepends=True)
    # Of the large file, every tenth line of the first 50 in each 400: all would take too long.
    ends = [end for end in range(0, len(lines), 10) if len(lines) < 500 or end % 400 < 50]
    for end in ends:
        text = "".join(lines[:end]) + "\n"
        if '"' not in re.sub(r"#.*", "", text):
            with pytest.raises(TopologyError, match=r"text: .*(no known format|is empty)"):
                read(text)
        else:
            assert any(" links" in note for note in read(text).notes)


@settings(max_examples=40)
@given(st.sampled_from(ALL), st.data())
def test_flipped_bytes_are_a_topology_or_one_message(name: str, data: st.DataObject) -> None:
    raw = bytearray((DATA / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 20))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    text = raw.decode("utf-8", "replace")
    try:
        topology = read(text)
    except TopologyError:
        with pytest.raises(TopologyError, match="text"):
            read(text)
    else:
        assert from_json(to_json(topology)) == topology
