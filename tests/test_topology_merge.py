"""Descriptions of hosts joined into one cluster."""

import msgspec
import pytest

from topo_ar.errors import TopologyError
from topo_ar.topology.levels import levels
from topo_ar.topology.merge import merge_hosts
from topo_ar.topology.model import Topology, from_json, to_json
from topo_ar.topology.paths import PathClass, Paths
from topo_ar.topology.presets import preset


def host(ranks: int, rate: float = 125e6) -> Topology:
    return preset("cpu-host", ranks_per_node=ranks, nic=rate)


def test_ranks_dealt_out_round_robin() -> None:
    cluster = merge_hosts([host(2), host(2)], [(0, 2), (1, 3)])
    assert cluster.ranks == ("node0/cpu0", "node1/cpu0", "node0/cpu1", "node1/cpu1")
    found = levels(cluster)
    assert [(node.name, node.ranks) for node in found.nodes] == [
        ("node0", (0, 2)),
        ("node1", (1, 3)),
    ]
    assert from_json(to_json(cluster)) == cluster
    paths = Paths(cluster)
    assert paths.between(cluster.ranks[0], cluster.ranks[2]).path_class is PathClass.PHB
    assert paths.between(cluster.ranks[0], cluster.ranks[1]).path_class is PathClass.NET
    assert paths.between("node0/nic0", "node1/nic0").devices == (
        "node0/nic0",
        "fabric",
        "node1/nic0",
    )


def test_uneven_hosts_keep_their_figures() -> None:
    cluster = merge_hosts([host(2), host(1, 25e6)], [(0, 2), (1,)])
    assert [[nic.nominal for nic in node.nics] for node in levels(cluster).nodes] == [
        [125e6],
        [25e6],
    ]


def test_merging_equals_the_preset_of_two_nodes() -> None:
    merged = merge_hosts([preset("dgx-a100")] * 2, [range(8), range(8, 16)])
    assert levels(merged) == levels(preset("dgx-a100", nodes=2))


def test_notes_name_their_nodes() -> None:
    one = msgspec.structs.replace(host(1), notes=("both", "mine"))
    other = msgspec.structs.replace(host(1), notes=("both",))
    notes = merge_hosts([one, other], [(0,), (1,)]).notes
    assert notes[:2] == ("all nodes: both", "node0: mine")
    assert "non-blocking" in notes[2]


def test_more_places_than_ranks_is_fine_fewer_are_not() -> None:
    cluster = merge_hosts([host(4)], [(0, 1)])
    assert cluster.ranks == ("node0/cpu0", "node0/cpu1")
    with pytest.raises(TopologyError, match="node0 runs 4 ranks but .* places for 2"):
        merge_hosts([host(2)], [(0, 1, 2, 3)])


def test_what_does_not_fit() -> None:
    with pytest.raises(TopologyError, match="1 hosts and 2 groups"):
        merge_hosts([host(1)], [(0,), (1,)])
    with pytest.raises(TopologyError, match=r"ranks \[0, 0\]"):
        merge_hosts([host(1), host(1)], [(0,), (0,)])
    with pytest.raises(TopologyError, match=r"describes 2 nodes \(node0, node1\)"):
        merge_hosts([preset("cpu-host", nodes=2)], [range(8)])
