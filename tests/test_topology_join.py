"""Machines joined through the fabric that a file describes."""

import pytest

from tests.foreign import foreign
from topo_ar.errors import TopologyError
from topo_ar.topology.join_fabric import join_fabric
from topo_ar.topology.levels import levels
from topo_ar.topology.merge import combine, is_fabric
from topo_ar.topology.model import (
    Device,
    DeviceKind,
    Figure,
    Link,
    LinkKind,
    Source,
    Topology,
    from_json,
    to_json,
)
from topo_ar.topology.paths import PathClass, Paths
from topo_ar.topology.presets import preset
from topo_ar.topology.readers import Description, describe

FABRIC = "ibnetdiscover/quantum2-dgx-582ca.txt"


def said(topology: Topology, *words: str) -> list[str]:
    return [note for note in topology.notes if all(word in note for word in words)]


def tree(hosts: dict[str, str], uplink: float | None = 100e9, name: str = "tree") -> Topology:
    """Hosts, each by its leaf switch, and one root above the leaves; no NICs, as in Slurm."""
    leaves = list(dict.fromkeys(hosts.values()))
    figure = Figure(uplink, Source.FILE) if uplink else None
    devices = [Device(switch, DeviceKind.SWITCH) for switch in (*leaves, "root")]
    devices += [Device(f"{host}/host", DeviceKind.HOST, host) for host in hosts]
    links = [Link(leaf, "root", LinkKind.ETHERNET, figure) for leaf in leaves]
    links += [Link(f"{host}/host", leaf, LinkKind.ETHERNET) for host, leaf in hosts.items()]
    return Topology(name, tuple(devices), tuple(links))


def test_one_dgx_stands_for_all_hosts_of_a_real_fabric() -> None:
    fabric = describe(foreign(FABRIC))
    topology = combine([fabric, Description("topo-ar", preset("dgx-h100"))])
    assert from_json(to_json(topology)) == topology
    found = levels(topology)
    # 119 DGX and one fabric manager; the 74 adapters without a host are no machines.
    assert len(found.nodes) == 120
    assert len(topology.ranks) == 120 * 8
    assert {len(node.nics) for node in found.nodes} == {2, 3, 4}
    assert {nic.nominal for node in found.nodes for nic in node.nics} == {50e9}
    # Rails: the four NICs of a host hang on four leaves, which count as one rack.
    assert len(found.racks) == 8
    assert sum(len(rack.nodes) for rack in found.racks) == 120
    first = found.racks[0]
    assert first.name == "A09-P1-IBLEAF-01-04 to A09-P1-IBLEAF-04-04"
    assert len(first.nodes) == 17
    assert first.uplink.nominal % 50e9 == 0
    assert said(topology, "74 hosts of quantum2-dgx-582ca.txt have no description", "66 more")
    assert said(topology, "matched to the fabric's in order")
    assert said(topology, "4 NICs of a host are not in the fabric")
    assert not said(topology, "non-blocking")
    ends = [f"a08-p1-dgx-04-c{i:02}/gpu0" for i in (1, 2)]
    path = Paths(topology).between(*ends)
    assert path.path_class is PathClass.NET
    assert any("IBLEAF" in device for device in path.devices)


def test_nics_go_by_guid_then_by_name() -> None:
    fabric = describe(foreign(FABRIC)).topology
    host = "a08-p1-dgx-04-c01"
    nics = sorted(
        (d for d in fabric.devices if d.node == host and d.kind is DeviceKind.NIC),
        key=lambda nic: nic.id,
    )
    assert len(nics) == 4
    leaf = {link.a: link.b for link in fabric.links if link.kind is LinkKind.INFINIBAND}
    gpu = Device("node0/gpu0", DeviceKind.GPU, "node0")
    cpu = Device("node0/numa0", DeviceKind.CPU, "node0", 0)
    mine = [
        Device("node0/nic0", DeviceKind.NIC, "node0", 0, {"name": nics[3].attributes["name"]}),
        Device(
            "node0/nic1",
            DeviceKind.NIC,
            "node0",
            0,
            {"name": nics[3].attributes["name"], "guid": nics[1].attributes["guid"]},
        ),
    ]
    machine = Topology(
        "m",
        (gpu, cpu, *mine),
        tuple(Link(d.id, cpu.id, LinkKind.PCIE) for d in (gpu, *mine)),
        (gpu.id,),
    )
    topology = join_fabric({host: machine}, fabric)
    cables = {link.a: link.b for link in topology.links if link.kind is LinkKind.INFINIBAND}
    assert cables[f"{host}/nic0"] == leaf[nics[3].id]
    assert cables[f"{host}/nic1"] == leaf[nics[1].id]
    assert said(topology, "2 NICs of the fabric are not in the description", host)
    assert not said(topology, "in order")


def test_a_tree_without_nics_keeps_the_rates_of_the_machines() -> None:
    hosts = {f"n{i}": f"leaf{i // 2}" for i in range(4)}
    machine = preset("cpu-host", nic=[125e6, 250e6])
    topology = join_fabric({"n*": machine}, tree(hosts))
    found = levels(topology)
    assert [node.name for node in found.nodes] == ["n0", "n1", "n2", "n3"]
    assert [nic.nominal for nic in found.nodes[0].nics] == [125e6, 250e6]
    assert [rack.nodes for rack in found.racks] == [(0, 1), (2, 3)]
    assert {rack.uplink.nominal for rack in found.racks} == {100e9}
    [alone] = levels(preset("cpu-host", nic=[125e6, 250e6])).nodes
    assert (found.nodes[0].intra, found.nodes[0].nics) == (alone.intra, alone.nics)


def test_hosts_in_only_one_of_the_two_are_listed() -> None:
    hosts = {"n0": "leaf0", "n1.cluster": "leaf0", "n2": "leaf1"}
    machine = preset("cpu-host")
    topology = join_fabric({"n1": machine, "N0": machine, "stray": machine}, tree(hosts))
    assert [node.name for node in levels(topology).nodes] == ["n0", "n1.cluster"]
    assert said(topology, "1 hosts of tree have no description and are left out: n2")
    assert said(topology, "1 machines are no hosts of tree and are left out: stray")
    with pytest.raises(TopologyError, match=r"no host of 'tree' \(n0, n1.cluster, n2\) .* \(x\)"):
        join_fabric({"x": machine}, tree(hosts))


def test_rates_between_switches_that_are_not_known_are_said() -> None:
    topology = join_fabric({"*": preset("cpu-host")}, tree({"a": "l0", "b": "l1"}, uplink=None))
    assert said(topology, "rates between switches are not known", "non-blocking")
    assert levels(topology).racks == ()


def test_the_fabric_knows_the_active_rate_of_a_port() -> None:
    fabric = tree({"a": "l0", "b": "l0"})
    rate = Figure(62.5e6, Source.FILE)
    links = [
        Link(x.a, x.b, x.kind, rate if x.a.endswith("host") else x.nominal) for x in fabric.links
    ]
    slow = Topology("slow", fabric.devices, tuple(links))
    topology = join_fabric({"*": preset("cpu-host")}, slow)
    assert {nic.nominal for node in levels(topology).nodes for nic in node.nics} == {62.5e6}
    assert said(topology, "a port is 0.5 Gbit/s in the fabric, 1 in the description", "a/nic0")


def test_combine_decides() -> None:
    machine = Description("topo-ar", preset("cpu-host"))
    fabric = Description("slurm", tree({"a": "l0", "node0": "l1"}))
    assert is_fabric(fabric.topology)
    assert not is_fabric(machine.topology)
    assert combine([machine]) == machine.topology
    assert combine([fabric]) == fabric.topology
    # node0 is a host of this fabric, so the description is that host's alone.
    assert [node.name for node in levels(combine([machine, fabric])).nodes] == ["node0"]
    with pytest.raises(TopologyError, match="tree, tree each describe a whole network"):
        combine([fabric, fabric, machine])
    with pytest.raises(TopologyError, match="nothing to merge"):
        combine([])


def test_ten_thousand_nodes() -> None:
    fabric = tree({f"n{i}": f"leaf{i // 20}" for i in range(10_000)})
    topology = join_fabric({"*": preset("cpu-host", ranks_per_node=1)}, fabric)
    assert topology.ranks[-1] == "n9999/cpu0"
    racks = levels(topology).racks
    assert (len(racks), racks[-1].nodes[-1]) == (500, 9999)


def test_ten_thousand_nodes_of_a_slurm_file() -> None:
    fabric = describe(foreign("slurm/slurm-test1-4level-10000nodes.conf"))
    topology = combine([fabric, Description("topo-ar", preset("cpu-host", ranks_per_node=1))])
    assert len(topology.ranks) == 10_000
    assert sum(device.kind is DeviceKind.SWITCH for device in topology.devices) == 529
    assert [nic.nominal for nic in levels(topology).nodes[0].nics] == [125e6]
    assert said(topology, "rates between switches are not known")
