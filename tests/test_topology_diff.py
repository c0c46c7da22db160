"""What differs between topologies and between nodes."""

import json
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.foreign import all_foreign, foreign
from topo_ar.cli import main as cli
from topo_ar.errors import TopologyError
from topo_ar.topology.diff import compare, compare_nodes, odd_nodes
from topo_ar.topology.merge import merge_hosts
from topo_ar.topology.model import Device, DeviceKind, Figure, LinkKind, Source, Topology, to_json
from topo_ar.topology.presets import preset
from topo_ar.topology.readers import describe, read
from topo_ar.topology.tiers import switch_tiers

READABLE = [n for n in all_foreign() if not n.endswith(("graph.xml", ".yaml"))]


def without(topology: Topology, *names: str) -> Topology:
    """`topology` after these devices broke; ranks on them are gone."""
    return msgspec.structs.replace(
        topology,
        devices=tuple(device for device in topology.devices if device.id not in names),
        links=tuple(link for link in topology.links if not {link.a, link.b} & {*names}),
        ranks=tuple(rank for rank in topology.ranks if rank not in names),
    )


def with_rate(topology: Topology, name: str, kind: LinkKind, rate: float) -> Topology:
    figure = Figure(rate, Source.FILE)
    return msgspec.structs.replace(
        topology,
        links=tuple(
            msgspec.structs.replace(link, nominal=figure)
            if name in (link.a, link.b) and link.kind is kind
            else link
            for link in topology.links
        ),
    )


def said(differences) -> list[str]:
    return [difference.says for difference in differences]


@pytest.mark.parametrize("name", READABLE)
def test_a_topology_does_not_differ_from_itself(name):
    try:
        topology = describe(foreign(name)).topology
    except TopologyError:
        pytest.skip(f"{name} is one that must be refused")
    assert compare(topology, topology) == ()
    mixed = msgspec.structs.replace(
        topology, name="mixed", devices=topology.devices[::-1], links=topology.links[::-1]
    )
    assert compare(topology, mixed) == ()


def test_a_node_with_one_nic_less():
    cluster = without(preset("dgx-h100", nodes=32), "node17/nic3")
    alike, found = odd_nodes(cluster)
    assert len(alike) == 31
    assert "node17" not in alike
    assert {difference.nodes for difference in found} == {("node17",)}
    assert said(found)[0] == "node17 has one NIC less than node0: 7, not 8"
    assert ("devices", ("NIC",), 8, 7) in [(d.what, d.items, d.a, d.b) for d in found]
    assert said(compare_nodes(cluster, "node3", "node17"))[0] == (
        "node17 has one NIC less than node3: 7, not 8"
    )
    assert compare_nodes(cluster, "node3", "node4") == ()
    assert said(compare_nodes(cluster, "node17", "node3"))[0] == (
        "node3 has one NIC more than node17: 8, not 7"
    )


def test_a_slow_nic_is_a_rate_and_not_a_device():
    cluster = with_rate(preset("cpu-host", nodes=4), "node2/nic0", LinkKind.ETHERNET, 31.25e6)
    alike, found = odd_nodes(cluster)
    assert alike == ("node0", "node1", "node3")
    [slow] = found
    assert (slow.what, slow.items, slow.nodes) == ("rates", ("ethernet",), ("node2",))
    assert "1 at 31.25 MB/s nominal" in slow.says
    assert "1 at 125 MB/s nominal" in slow.says


def test_fewer_links_numa_and_ways():
    whole = read(foreign("nccl-xml/perlmutter-4x-a100-4-slingshot.xml"))
    links = tuple(link for link in whole.links if {link.a, link.b} != {"node0/gpu0", "node0/gpu1"})
    devices = tuple(
        msgspec.structs.replace(device, numa=2) if device.id == "node0/gpu0" else device
        for device in whole.devices
    )
    broken = msgspec.structs.replace(whole, name="broken", links=links, devices=devices)
    found = {difference.what: difference for difference in compare(whole, broken)}
    assert set(found) == {"links", "numa", "paths"}
    assert (found["links"].items, found["links"].a, found["links"].b) == (("nvlink x4",), 6, 5)
    assert (found["numa"].items, found["numa"].a, found["numa"].b) == (("gpu0",), 3, 2)
    assert found["paths"].items == ("gpu0 - gpu1",)
    assert found["paths"].says == (
        "way gpu0 - gpu1: SYS (NCCL NVB) in broken, "
        "NV4 (NCCL NVL) in perlmutter-4x-a100-4-slingshot.xml"
    )


def test_nodes_and_ranks():
    small, large = preset("dgx-a100", nodes=2), preset("dgx-a100", nodes=6)
    found = compare(small, large)
    assert said(found) == [
        "2 nodes in dgx-a100, 6 in dgx-a100; without a partner: node2, node3, node4, node5",
        "16 ranks in dgx-a100, 48 in dgx-a100",
    ]
    moved = msgspec.structs.replace(small, ranks=(*small.ranks[8:], *small.ranks[:8]))
    [first, *others] = compare(small, moved)
    assert first.says == "rank 0 is on node1 in dgx-a100, on node0 in dgx-a100"
    assert len(others) == 15


def test_hosts_of_other_names_are_matched_in_order():
    host = preset("cpu-host")
    cluster = merge_hosts([host] * 2, [range(4), range(4, 8)])
    text = to_json(cluster).replace(b"node0", b"x-1").replace(b"node1", b"x-2")
    found = compare(cluster, msgspec.json.decode(text, type=Topology))
    assert found == ()


def test_networks_are_compared_by_tiers():
    fabric = read(foreign("ibnetdiscover/quantum2-dgx-582ca.txt"))
    assert [len(tier) for tier in switch_tiers(fabric)] == [31, 9]
    spine = switch_tiers(fabric)[1][0]
    found = compare(fabric, without(fabric, spine))
    assert {difference.what for difference in found} == {"network"}
    assert (found[0].items, found[0].a, found[0].b) == (("switches of tier 2",), 9, 8)
    assert any("infiniband x2 100 GB/s nominal between tiers 1 and 2" in d.says for d in found)


@settings(max_examples=40)
@given(data=st.data(), nodes=st.integers(3, 6))
def test_whatever_breaks_is_found_and_only_there(data, nodes):
    cluster = preset("dgx-a100", nodes=nodes)
    node = f"node{data.draw(st.integers(0, nodes - 1))}"
    parts = [d.id for d in cluster.devices if d.node == node]
    broken = without(cluster, *data.draw(st.sets(st.sampled_from(parts), min_size=1, max_size=4)))
    alike, found = odd_nodes(broken)
    assert {difference.nodes for difference in found} == {(node,)}
    assert len(alike) == nodes - 1
    assert compare(cluster, broken) != ()


def test_what_cannot_be_compared_is_named():
    with pytest.raises(TopologyError, match="has no node 'node9'; its nodes are node0, node1"):
        compare_nodes(preset("cpu-host", nodes=2), "node0", "node9")
    with pytest.raises(TopologyError, match="has no node, so there is nothing to compare"):
        odd_nodes(Topology("net", (Device("s", DeviceKind.SWITCH),), ()))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["topo-ar", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_the_verb(monkeypatch, capsys, tmp_path: Path):
    path = tmp_path / "cluster.json"
    path.write_bytes(to_json(without(preset("dgx-h100", nodes=8), "node5/nic3")))
    assert run(monkeypatch, "diff", str(path)) == 1
    out = capsys.readouterr().out
    assert out.startswith("7 of 8 nodes of")
    assert "node5 has one NIC less than node0: 7, not 8" in out
    assert run(monkeypatch, "diff", str(path), "--nodes", "node1", "node5", "--json") == 1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["equal"], shown["a"], shown["b"]) == (False, "node1", "node5")
    assert shown["differences"][0] == {
        "nodes": ["node5"],
        "what": "devices",
        "items": ["NIC"],
        "a": 8,
        "b": 7,
        "says": "node5 has one NIC less than node1: 7, not 8",
    }
    assert run(monkeypatch, "diff", str(path), "--nodes", "node1", "node2") == 0
    assert "no difference" in capsys.readouterr().out
    assert run(monkeypatch, "diff", "dgx-h100", "dgx-a100") == 1
    assert "dgx-a100 has 2 CPUs more than dgx-h100: 4, not 2" in capsys.readouterr().out
    assert run(monkeypatch, "diff", "dgx-h100", "dgx-h100", "--json") == 0
    assert json.loads(capsys.readouterr().out)["equal"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nosuch",), "neither a file nor a preset"),
        (("cpu-host", "nosuch"), "neither a file nor a preset"),
        (
            ("cpu-host", "cpu-host", "cpu-host"),
            "diff compares one or two topologies, or two sets of results, not 3",
        ),
        (("cpu-host", "dgx-h100", "--nodes", "a", "b"), "--nodes compares two nodes of one"),
        (("cpu-host", "--nodes", "node0", "x"), "has no node 'x'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(monkeypatch, capsys, arguments, message):
    assert run(monkeypatch, "diff", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
