"""What a topology says, as one JSON object with stable keys."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from topo_ar.errors import TopologyError
from topo_ar.topology.levels import NodeLevel, Rate, levels
from topo_ar.topology.model import Topology
from topo_ar.topology.shapes import alike_nodes, translation
from topo_ar.topology.ways import Ways

Json = dict[str, Any]


def summarize(topology: Topology, name: str) -> Json:
    """Return the JSON object of ``topo-ar show``: rates in bytes/s one way, latencies in seconds.

    Parameters
    ----------
    topology : Topology
        What to describe.
    name : str
        The format it was found in.

    Returns
    -------
    dict
        ``format``
            The name of the format.
        ``nodes``
            One object a node: ``name``; ``devices``, how many of each kind; ``ranks``; ``intra``,
            one rank's port inside the node, and ``nics``, its data NICs, each with ``nominal``,
            ``payload``, ``latency`` and ``source`` (null and empty where not known).
        ``devices``, ``links``
            As in the topology's own JSON.
        ``gpu_pairs``
            One object for two GPUs of a node, each pair once: ``a``, ``b``; ``link_count``, NVLinks
            or XGMI links that join them, also over a switch, null where not described;
            ``path_class`` in NCCL's words, null where not known, and ``nvidia_class`` in
            nvidia-smi's, null where it has none; ``p2p``, the status of peer access, null where not
            known; ``bandwidth`` of the narrowest link, null where not known; ``narrowest_link``
            with ``a``, ``b``, ``kind`` and ``count``; ``devices`` on the way.
        ``nearest_nics``
            One object a rank: ``rank``, ``device``, ``nics`` (all that tie), ``path_class``,
            ``nvidia_class``, and ``bandwidth`` and ``narrowest_link`` to the first of them.
        ``notes``
            What is unknown, guessed or left out.

    Notes
    -----
    Nodes that are alike are searched once, so time grows with the nodes and not with their square.
    """
    known, notes = _levels(topology)
    groups = alike_nodes(topology)
    ways = Ways(topology, [group.nodes[0] for group in groups])
    pairs: list[Json] = []
    nearest: dict[str, Json] = {}
    for group in groups:
        own_pairs = ways.gpu_pairs(group.devices[0])
        own_nearest = ways.nearest_nics(group.devices[0])
        for position in range(len(group.nodes)):
            names = translation(group, position)
            pairs += [_renamed(pair, names) for pair in own_pairs]
            nearest |= {
                names[device]: _renamed(found, names) for device, found in own_nearest.items()
            }
    node_order = {device.node: place for place, device in enumerate(topology.devices)}
    node_of = {device.id: device.node for device in topology.devices}
    pairs.sort(key=lambda pair: node_order[node_of[pair["a"]]])
    return {
        "format": name,
        "nodes": _nodes(topology, known),
        "devices": topology.devices,
        "links": topology.links,
        "gpu_pairs": pairs,
        "nearest_nics": [
            {"rank": rank, "device": device, **nearest[device]}
            for rank, device in enumerate(topology.ranks)
            if device in nearest
        ],
        "notes": [*topology.notes, *notes],
    }


def _levels(topology: Topology) -> tuple[dict[str, NodeLevel], list[str]]:
    """Return the level of each node with ranks, and a note where they cannot be told."""
    if not topology.ranks:
        return {}, []
    try:
        return {node.name: node for node in levels(topology).nodes}, []
    except TopologyError as error:
        return {}, [f"rates of ranks and NICs are not known: {error}"]


def _nodes(topology: Topology, known: dict[str, NodeLevel]) -> list[Json]:
    kinds: dict[str, Counter[str]] = {}
    ranks: dict[str, list[int]] = {}
    node_of = {device.id: device.node for device in topology.devices}
    for device in topology.devices:
        if device.node is not None:
            kinds.setdefault(device.node, Counter())[device.kind.value] += 1
    for rank, place in enumerate(topology.ranks):
        ranks.setdefault(node_of[place] or "", []).append(rank)
    # Nodes with ranks come first, in the order of their lowest one.
    names = dict.fromkeys([*known, *kinds])
    return [
        {
            "name": name,
            "devices": kinds[name],
            "ranks": ranks.get(name, []),
            "intra": _rate(known[name].intra) if name in known else None,
            "nics": [_rate(nic) for nic in known[name].nics] if name in known else [],
        }
        for name in names
    ]


def _rate(rate: Rate) -> Json | None:
    """Return a rate as an object; a lone rank moves nothing inside its node and has none."""
    if math.isinf(rate.nominal):
        return None
    return {
        "nominal": rate.nominal,
        "payload": rate.payload,
        "latency": rate.latency,
        "source": rate.source.value,
    }


def _renamed(found: Json, names: Mapping[str, str]) -> Json:
    """Return `found` with the ids of another node; what lies outside keeps its name."""
    new = {
        key: names.get(value, value)
        if isinstance(value, str)
        else [names.get(v, v) for v in value]
        if isinstance(value, list)
        else value
        for key, value in found.items()
    }
    narrowest = found.get("narrowest_link")
    if narrowest is not None:
        ends = {end: names.get(narrowest[end], narrowest[end]) for end in ("a", "b")}
        new["narrowest_link"] = narrowest | ends
    return new
