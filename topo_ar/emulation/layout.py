"""Names and addresses of everything in an emulated cluster, derived from its spec alone."""

from dataclasses import dataclass

from topo_ar.emulation.spec import ClusterSpec


@dataclass(frozen=True, slots=True)
class Nic:
    """A host's NIC: `port` is the other end of its cable, at the rack switch; rate in bytes/s."""

    name: str
    port: str
    address: str
    rate: float


@dataclass(frozen=True, slots=True)
class Host:
    """An emulated host; `ranks` are global ranks in local-rank order."""

    name: str
    index: int
    leaf: str
    ranks: tuple[int, ...]
    nics: tuple[Nic, ...]


@dataclass(frozen=True, slots=True)
class Trunk:
    """A rack's cable to the spine: its two devices and its rate in bytes/s, if shaped."""

    leaf: str
    leaf_port: str
    spine_port: str
    rate: float | None


@dataclass(frozen=True, slots=True)
class Layout:
    """All hosts, in the order of the spec's nodes, the rack switches and their trunks.

    One rack needs no spine, hence no trunk.
    """

    hosts: tuple[Host, ...]
    leaves: tuple[str, ...]
    trunks: tuple[Trunk, ...]

    def host(self, name: str) -> Host:
        """Return the host called `name`; KeyError if there is none."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise KeyError(f"no host {name!r}; there are {[host.name for host in self.hosts]}")

    def host_of(self, rank: int) -> Host:
        """Return the host on which global rank `rank` runs; KeyError if there is none."""
        for host in self.hosts:
            if rank in host.ranks:
                return host
        raise KeyError(f"no rank {rank}; there are {self.world_size}")

    @property
    def world_size(self) -> int:
        """The number of ranks over all hosts."""
        return sum(len(host.ranks) for host in self.hosts)


def subnet(nic_index: int) -> str:
    """Return the subnet of all NICs number `nic_index`: every rail has its own."""
    return f"10.77.{nic_index}.0/24"


def lay_out(spec: ClusterSpec) -> Layout:
    """Return the layout of `spec`: ``host0``, ``host1`` with NICs ``eth0``, ``eth1`` and so on."""
    racks = list(dict.fromkeys(node.rack for node in spec.nodes))
    leaves = {rack: f"leaf{index}" for index, rack in enumerate(racks)}
    hosts = tuple(
        Host(
            name=f"host{index}",
            index=index,
            leaf=leaves[node.rack],
            ranks=node.ranks,
            nics=tuple(
                Nic(f"eth{nic}", f"host{index}-eth{nic}", f"10.77.{nic}.{index + 1}", rate)
                for nic, rate in enumerate(node.nics)
            ),
        )
        for index, node in enumerate(spec.nodes)
    )
    trunks = tuple(
        Trunk(leaf, f"{leaf}-spine", f"spine-{leaf}", spec.uplinks.get(rack))
        for rack, leaf in leaves.items()
        if len(racks) > 1
    )
    return Layout(hosts, tuple(leaves.values()), trunks)
