"""Topologies whose links are the ports of the planner's levels, so that both can be compared."""

from hypothesis import strategies as st

from topo_ar.topology.model import (
    Device,
    DeviceKind,
    Figure,
    Link,
    LinkKind,
    Source,
    Topology,
    validate,
)


def figure(value):
    return Figure(float(value), Source.ASSUMED)


def star(sizes, port, nics, *, port_seconds=0.0, nic_seconds=0.0):
    """GPUs on a switch, each NIC on the same fabric; `nics` are rates of a node's NICs.

    NICs hang on the CPU, to which GPUs have links of unknown rate: nothing else limits.
    Latencies are of a link, of which a message crosses two.
    """
    devices, links, ranks = [Device("fabric", DeviceKind.SWITCH)], [], []
    per_node = nics if isinstance(nics[0], list | tuple) else [nics] * len(sizes)
    for i, (size, rates) in enumerate(zip(sizes, per_node, strict=True)):
        node = f"node{i}"
        devices += [
            Device(f"{node}/cpu", DeviceKind.CPU, node),
            Device(f"{node}/nvswitch", DeviceKind.NVSWITCH, node),
        ]
        for k in range(size):
            gpu = f"{node}/gpu{k}"
            devices.append(Device(gpu, DeviceKind.GPU, node))
            ranks.append(gpu)
            links += [
                Link(
                    gpu,
                    f"{node}/nvswitch",
                    LinkKind.NVLINK,
                    nominal=figure(port),
                    latency=figure(port_seconds),
                ),
                Link(gpu, f"{node}/cpu", LinkKind.PCIE),
            ]
        for k, rate in enumerate(rates):
            nic = f"{node}/nic{k}"
            devices.append(Device(nic, DeviceKind.NIC, node))
            links += [
                Link(nic, f"{node}/cpu", LinkKind.PCIE),
                Link(
                    nic,
                    "fabric",
                    LinkKind.INFINIBAND,
                    nominal=figure(rate),
                    latency=figure(nic_seconds),
                ),
            ]
    return validate(Topology("star", tuple(devices), tuple(links), tuple(ranks)))


_RATES = st.integers(1, 400)


@st.composite
def even_stars(draw):
    """Equal nodes with one NIC each, and their number and size."""
    n, g = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    topology = star(
        [g] * n,
        draw(_RATES),
        [draw(_RATES)],
        port_seconds=draw(st.sampled_from([0.0, 0.5, 2.0])),
        nic_seconds=draw(st.sampled_from([0.0, 1.5, 8.0])),
    )
    return topology, n, g


@st.composite
def any_star(draw, sizes):
    """Nodes of these sizes, with one or two NICs of any rates."""
    nics = [draw(st.lists(_RATES, min_size=1, max_size=2)) for _ in sizes]
    return star(
        sizes,
        draw(_RATES),
        nics,
        port_seconds=draw(st.sampled_from([0.0, 0.5])),
        nic_seconds=draw(st.sampled_from([0.0, 8.0])),
    )
