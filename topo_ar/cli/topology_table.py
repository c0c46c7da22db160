"""A topology for a person: devices, links, each make of node, the network, and what is unknown."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from topo_ar.cli.table import WIDTH, counted, print_folded, print_item, print_table
from topo_ar.units import format_rate, format_seconds

if TYPE_CHECKING:
    from topo_ar.topology.model import Figure, Link, Topology
    from topo_ar.topology.shapes import Alike

_MAX_MAKES = 4
_MAX_NOTES = 30
_MAX_ROWS = 16
_WORDS = {"cpu": "CPU", "gpu": "GPU", "nic": "NIC", "nvswitch": "NVSwitch", "host": "host"}


def print_topology(topology: "Topology", name: str) -> None:
    """Print a topology in at most 100 columns; of nodes that are alike one is shown."""
    from topo_ar.topology.shapes import alike_nodes
    from topo_ar.topology.summary import summarize

    summary = summarize(topology, name)
    size = [
        counted(len(summary["nodes"]), "node"),
        counted(len(topology.devices), "device"),
        counted(len(topology.links), "link"),
        counted(len(topology.ranks), "rank"),
    ]
    print_folded(f"{topology.name} ({name}): {', '.join(size)}", 0)
    print("\nDevices")
    kinds = Counter(device.kind.value for device in topology.devices)
    print_table([(str(count), kind) for kind, count in kinds.items()])
    if topology.links:
        print("\nLinks, one way")
        heading = ("", "kind", "nominal", "effective", "latency", "source")
        print_table([heading, *_link_rows(topology)])
    groups = alike_nodes(topology)
    # Makes that have ranks come first, the others by how many nodes they are.
    places = set(topology.ranks)
    makes = sorted(groups, key=lambda g: (-_num_ranks(g, places), -len(g.nodes)))
    for group in makes[:_MAX_MAKES]:
        _print_make(group, summary, topology)
    if len(makes) > _MAX_MAKES:
        left = sum(len(group.nodes) for group in makes[_MAX_MAKES:])
        others = counted(len(makes) - _MAX_MAKES, "other make")
        print(f"\n{counted(left, 'more node')} of {others}; --json lists all")
    _print_network(topology)
    _print_notes(summary["notes"])


def _num_ranks(group: "Alike", places: set[str]) -> int:
    return sum(device.id in places for device in group.devices[0])


def _link_rows(topology: "Topology") -> Iterator[tuple[str, ...]]:
    alike: Counter[tuple[str, ...]] = Counter(_link_row(link) for link in topology.links)
    for row, count in alike.items():
        yield (str(count), *row)


def _link_row(link: "Link") -> tuple[str, ...]:
    lanes = f" x{link.count}" if link.count > 1 else ""
    figures = [figure for figure in (link.effective, link.nominal, link.latency) if figure]
    return (
        f"{link.kind.value}{lanes}",
        _figure(link.nominal),
        _figure(link.effective),
        "-" if link.latency is None else format_seconds(link.latency.value),
        figures[0].source.value if figures else "not known",
    )


def _figure(figure: "Figure | None") -> str:
    return "-" if figure is None else format_rate(figure.value)


def _print_make(group: "Alike", summary: dict[str, Any], topology: "Topology") -> None:
    first = group.nodes[0]
    node = next(node for node in summary["nodes"] if node["name"] == first)
    like = ""
    if len(group.nodes) > 1:
        like = f" and {len(group.nodes) - 1} like it, to {group.nodes[-1]}"
    parts = ", ".join(
        counted(n, _WORDS.get(kind, kind.replace("_", " "))) for kind, n in node["devices"].items()
    )
    print()
    print_folded(f"{first}{like}: {parts}", 0)
    if node["ranks"]:
        port = node["intra"]
        rate = _rate(port) if port else "not known" if len(node["ranks"]) > 1 else "not needed"
        print_folded(f"{counted(len(node['ranks']), 'rank')}, port of a rank {rate}")
    for line, count in Counter(_rate(nic) for nic in node["nics"] if nic).items():
        each = ", each" if count > 1 else ","
        print_folded(f"{counted(count, 'NIC')}{each} {line}")
    _print_ranks(node["ranks"], summary, topology)
    inside = {device.id for device in group.devices[0]}
    pairs = [pair for pair in summary["gpu_pairs"] if pair["a"] in inside]
    if pairs:
        _print_matrix(pairs)
        _print_kinds(pairs)


def _rate(rate: dict[str, Any]) -> str:
    return (
        f"{format_rate(rate['nominal'])} nominal, {format_rate(rate['payload'])} payload "
        f"({rate['source']})"
    )


def _print_ranks(ranks: Sequence[int], summary: dict[str, Any], topology: "Topology") -> None:
    devices = {device.id: device for device in topology.devices}
    nearest = {found["rank"]: found for found in summary["nearest_nics"]}
    rows = [("rank", "device", "numa", "nvidia-smi", "NCCL", "rate one way", "nearest NICs")]
    for rank in ranks:
        found = nearest[rank]
        device = devices[found["device"]]
        names = [str(devices[nic].attributes.get("name", _short(nic))) for nic in found["nics"]]
        rows.append(
            (
                str(rank),
                _short(device.id),
                "-" if device.numa is None else str(device.numa),
                (found["nvidia_class"] or "-") if names else "-",
                found["path_class"] if names else "-",
                _way(found),
                ", ".join(names) or "none",
            )
        )
    if len(rows) > 1:
        print_table(rows[: _MAX_ROWS + 1])
    if len(rows) > _MAX_ROWS + 1:
        print(f"  {len(rows) - 1 - _MAX_ROWS} more ranks; --json lists all")


def _way(found: dict[str, Any]) -> str:
    """Return the rate of a way with the kind of link that makes it so narrow."""
    if found["bandwidth"] is None:
        return "not known"
    link = found["narrowest_link"]
    rate = format_rate(found["bandwidth"])
    if link is None:
        return rate
    return f"{rate} {link['kind']}" + (f" x{link['count']}" if link["count"] > 1 else "")


def _print_matrix(pairs: Sequence[dict[str, Any]]) -> None:
    """Print the class of each pair, as many columns at a time as there is room for."""
    gpus = list(dict.fromkeys(gpu for pair in pairs for gpu in (pair["a"], pair["b"])))
    if len(gpus) > _MAX_ROWS:
        print_folded(f"{len(pairs)} pairs of GPUs; --json lists all")
        return
    words = {}
    for pair in pairs:
        word = f"{_nvidia(pair)}/{pair['path_class'] or '-'}"
        words[pair["a"], pair["b"]] = words[pair["b"], pair["a"]] = word
    names = [_short(gpu) for gpu in gpus]
    width = max(map(len, [*names, *words.values()])) + 2
    step = max(1, (WIDTH - 2 - max(map(len, names)) - 2) // width)
    print("\n  Pairs of GPUs, nvidia-smi's word / NCCL's")
    for start in range(0, len(gpus), step):
        shown = gpus[start : start + step]
        rows = [("", *names[start : start + step])]
        rows += [(_short(a), *("X" if a == b else words[a, b] for b in shown)) for a in gpus]
        print_table(rows)
    if any("?" in word for word in words.values()):
        print_folded("PHB?: PHB or NODE, the host bridges of the two are not known")


def _nvidia(pair: dict[str, Any]) -> str:
    word = pair["nvidia_class"] or "-"
    return "PHB?" if word == "PHB or NODE" else word


def _print_kinds(pairs: Sequence[dict[str, Any]]) -> None:
    """Print the kinds of pairs, each with its links, peer access and rate."""
    kinds = Counter(
        (
            "not described" if pair["link_count"] is None else str(pair["link_count"]),
            pair["p2p"] or "not known",
            _nvidia(pair),
            pair["path_class"] or "-",
            _way(pair),
        )
        for pair in pairs
    )
    heading = ("pairs", "NVLink/XGMI", "P2P", "nvidia-smi", "NCCL", "narrowest link, one way")
    print()
    print_table([heading, *((str(count), *row) for row, count in kinds.items())])


def _print_network(topology: "Topology") -> None:
    from topo_ar.topology.tiers import switch_tiers

    tiers = switch_tiers(topology)
    if sum(map(len, tiers)) < 2:
        return
    print("\nNetwork, from the nodes up")
    tier_of = {switch: i for i, tier in enumerate(tiers) for switch in tier}
    links: dict[tuple[int, int], list[Link]] = {}
    for link in topology.links:
        a, b = tier_of.get(link.a, -1), tier_of.get(link.b, -1)
        if max(a, b) >= 0:
            links.setdefault((min(a, b), max(a, b)), []).append(link)
    rows = []
    for number, tier in enumerate(tiers):
        names = tier[0] if len(tier) == 1 else f"{tier[0]} .. {tier[-1]}"
        down = sum(link.count for link in links.get((number - 1, number), ()))
        rates = Counter(_figure(link.nominal) for link in links.get((number - 1, number), ()))
        shown = ", ".join(rate for rate, _ in rates.most_common(3) if rate != "-")
        each = f" of {shown} a pair" if shown else ", rate not known"
        below = "to the nodes" if number == 0 else "to the tier below"
        text = f"{counted(down, 'link')} {below}{each}" if down else "no link to a node"
        rows.append((counted(len(tier), "switch"), names, text))
    print_table(rows)


def _print_notes(notes: Sequence[str]) -> None:
    if notes:
        print("\nNotes")
    for note in notes[:_MAX_NOTES]:
        print_item(note)
    if len(notes) > _MAX_NOTES:
        print(f"  {len(notes) - _MAX_NOTES} more; --json lists all")


def _short(device_id: str) -> str:
    return device_id.partition("/")[2] or device_id
