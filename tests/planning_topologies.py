"""Graphs of the planning notes: (graph, ranks), bandwidths in GB/s as whole numbers."""

import xml.etree.ElementTree as ET
from pathlib import Path

import networkx as nx

FABRIC = "fabric"
MI250X = Path(__file__).parent / "data/nccl-xml/rccl-16gcd-mi250x-8nic.xml"


def both_ways(graph, a, b, bandwidth):
    graph.add_edge(a, b, bandwidth=bandwidth)
    graph.add_edge(b, a, bandwidth=bandwidth)


def nvswitches(graph):
    return [name for name in graph if str(name).endswith("/nvswitch")]


def nvswitch_cluster(sizes, port, nic, *, one_nic=False, attributes=True):
    """GPUs on the NVSwitch of their node; a NIC each, or one on the switch."""
    graph, ranks = nx.DiGraph(), []
    for node, size in enumerate(sizes):
        about = {"node": f"node{node}"} if attributes else {}
        switch = f"node{node}/nvswitch"
        gpus = [f"node{node}/gpu{k}" for k in range(size)]
        graph.add_nodes_from([*gpus, switch], **about)
        for gpu in gpus:
            both_ways(graph, gpu, switch, port)
            if len(sizes) > 1 and not one_nic:
                both_ways(graph, gpu, FABRIC, nic)
        if one_nic:
            both_ways(graph, switch, FABRIC, nic)
        ranks += gpus
    return graph, ranks


def a100(nodes, **options):
    return nvswitch_cluster([8] * nodes, 300, 25, **options)


def h100(nodes, **options):
    return nvswitch_cluster([8] * nodes, 450, 50, **options)


def mi250(nodes=1):
    """GCDs joined by 50 GB/s for each link that RCCL's captured topology counts; 16 to a fabric."""
    counts = {}
    for pci in ET.parse(MI250X).iter("pci"):
        for gpu in pci.findall("gpu"):
            for link in gpu.findall("xgmi"):
                counts[pci.get("busid"), link.get("target")] = int(link.get("count"))
    graph, ranks = nx.DiGraph(), []
    for node in range(nodes):
        gcds = sorted({a for a, _ in counts})
        ranks += [(node, gcd) for gcd in gcds]
        for (a, b), count in counts.items():
            graph.add_edge((node, a), (node, b), bandwidth=50 * count)
        if nodes > 1:
            for gcd in gcds:
                both_ways(graph, (node, gcd), FABRIC, 16)
    return graph, ranks


def dgx1v():
    """NVLink 2 hybrid cube mesh: how many links of 25 GB/s join which GPUs."""
    half = {(0, 1): 1, (0, 2): 1, (0, 3): 2, (1, 2): 2, (1, 3): 1, (2, 3): 1}
    graph = nx.DiGraph()
    for (a, b), count in half.items():
        both_ways(graph, a, b, 25 * count)
        both_ways(graph, a + 4, b + 4, 25 * count)
    for gpu in range(4):
        both_ways(graph, gpu, gpu + 4, 50)
    return graph, list(range(8))


def ring(size, bandwidth):
    graph = nx.DiGraph()
    for rank in range(size):
        both_ways(graph, rank, (rank + 1) % size, bandwidth)
    return graph, list(range(size))


def mesh(rows, columns, bandwidth):
    graph = nx.DiGraph()
    for a, b in nx.grid_2d_graph(rows, columns).edges:
        both_ways(graph, a, b, bandwidth)
    return graph, list(graph)


def mesh_and_rails():
    """2 nodes of 4 GPUs, 100 GB/s between each two in a node, 25 GB/s along each rail."""
    graph, ranks = nx.DiGraph(), []
    for node in range(2):
        for a in range(4):
            ranks.append((node, a))
            for b in range(a):
                both_ways(graph, (node, a), (node, b), 100)
    for k in range(4):
        both_ways(graph, (0, k), (1, k), 25)
    return graph, ranks
