"""GraphML, for Gephi, yEd and networkx: one vertex a device, one undirected edge a link."""

from topo_ar.topology.model import Figure, Topology
from topo_ar.topology.writers.written import Written

FORMAT = "graphml"
SUFFIXES: tuple[str, ...] = (".graphml",)


def write_text(topology: Topology) -> Written:
    """Return `topology` as GraphML; rates in bytes/s and one way, latencies in seconds.

    Vertices carry ``kind``, ``node``, ``numa``, ``rank`` and the device's attributes, those with
    ``attribute_`` before their names; edges carry ``kind``, ``count`` and, where known,
    ``nominal``, ``effective`` and ``latency``, each with its ``..._source`` and ``..._note``.
    """
    import networkx as nx

    graph: nx.MultiGraph[str] = nx.MultiGraph(name=topology.name, notes="\n".join(topology.notes))
    ranks = {device: rank for rank, device in enumerate(topology.ranks)}
    for device in topology.devices:
        known = {"node": device.node, "numa": device.numa, "rank": ranks.get(device.id)}
        graph.add_node(
            device.id,
            kind=device.kind.value,
            **{key: value for key, value in known.items() if value is not None},
            **{f"attribute_{key}": value for key, value in device.attributes.items()},
        )
    for link in topology.links:
        graph.add_edge(
            link.a,
            link.b,
            kind=link.kind.value,
            count=link.count,
            **_figure("nominal", link.nominal),
            **_figure("effective", link.effective),
            **_figure("latency", link.latency),
        )
    return Written("\n".join(nx.generate_graphml(graph)) + "\n")


def _figure(name: str, figure: Figure | None) -> dict[str, str | float]:
    if figure is None:
        return {}
    found: dict[str, str | float] = {name: figure.value, f"{name}_source": figure.source.value}
    return found | ({f"{name}_note": figure.note} if figure.note else {})
