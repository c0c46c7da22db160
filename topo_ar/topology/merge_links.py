"""The links of several descriptions of one machine, each kind from whom knows it best.

A device's way to its CPU comes from one description whole, so that it has no second way. NVLinks
come from the most trusted description that has any; a GPU that has none there keeps those of
another, because a link that does not answer is unknown, not absent.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence

from topo_ar.topology.merge_devices import Entry, Matched, is_of_unknown_kind
from topo_ar.topology.model import DeviceKind, Figure, Link, LinkKind, Source
from topo_ar.topology.ports import FAST_KINDS, NETWORK_KINDS
from topo_ar.topology.readers import Description
from topo_ar.topology.trust import Claim, Conflicts, choose_figures

_FAST = FAST_KINDS | {LinkKind.C2C}
_ROOTS = (DeviceKind.CPU, DeviceKind.HOST)
_Pair = tuple[str, str]


class LinkMerger:
    """Links by the ids of the merged devices; `descriptions` are the most trusted first."""

    def __init__(
        self, descriptions: Sequence[Description], matched: Matched, conflicts: Conflicts
    ) -> None:
        self._descriptions = descriptions
        self._entries = {entry.id: entry for entry in matched.entries}
        self._conflicts = conflicts
        self._links = [
            [
                Link(
                    matched.of[i][link.a].id,
                    matched.of[i][link.b].id,
                    link.kind,
                    link.nominal,
                    link.effective,
                    link.latency,
                    link.count,
                )
                for link in description.topology.links
            ]
            for i, description in enumerate(descriptions)
        ]

    def links(self) -> list[Link]:
        """Return all links of the machine."""
        network = self._first_of_each(lambda link: link.kind in NETWORK_KINDS, DeviceKind.NIC)
        return [
            *self._ways_up(),
            *self._fast(),
            *self._first_that_has(LinkKind.UPI),
            *self._first_that_has(LinkKind.SHM),
            *network,
        ]

    def _ways_up(self) -> Iterator[Link]:
        parents = [self._parents(links) for links in self._links]
        joined = set[str]()
        for entry in self._entries.values():
            if entry.kind not in (DeviceKind.GPU, DeviceKind.NIC) and not is_of_unknown_kind(entry):
                continue
            knowing = [i for i, above in enumerate(parents) if entry.id in above]
            # A host's memory stands for a place that is not known.
            knowing.sort(key=lambda i: self._top(entry.id, parents[i]) is DeviceKind.HOST)
            here = entry.id
            while knowing and here in (above := parents[knowing[0]]) and here not in joined:
                joined.add(here)
                parent, _ = above[here]
                claims = [
                    Claim(self._descriptions[i], parents[i][here][1])
                    for i in range(len(parents))
                    if here in parents[i]
                ]
                chosen = choose_figures(claims, here, self._conflicts)
                yield Link(
                    here, parent, LinkKind.PCIE, chosen.nominal, chosen.effective, chosen.latency
                )
                here = parent

    def _parents(self, links: Sequence[Link]) -> dict[str, tuple[str, Link]]:
        """Return for each device the next one on its PCIe way to a CPU, nearest CPUs first."""
        near: dict[str, list[tuple[str, Link]]] = {}
        for link in links:
            if link.kind is LinkKind.PCIE:
                near.setdefault(link.a, []).append((link.b, link))
                near.setdefault(link.b, []).append((link.a, link))
        reached = [name for name in near if self._entries[name].kind in _ROOTS]
        parents: dict[str, tuple[str, Link]] = {}
        roots = set(reached)
        for here in reached:
            for far, link in near[here]:
                if far not in parents and far not in roots:
                    parents[far] = (here, link)
                    reached.append(far)
        return parents

    def _top(self, device: str, parents: dict[str, tuple[str, Link]]) -> DeviceKind:
        while device in parents:
            device = parents[device][0]
        return self._entries[device].kind

    def _fast(self) -> Iterator[Link]:
        """Yield NVLinks and the like, and say where the others differ."""
        said = [_by_pair(links, lambda link: link.kind in _FAST) for links in self._links]
        first = next((i for i, pairs in enumerate(said) if pairs), None)
        if first is None:
            return
        taken = dict.fromkeys(said[first], first)
        silent = {e.id for e in self._entries.values() if e.kind is DeviceKind.GPU} - {
            end for pair in said[first] for end in pair
        }
        for i in range(first + 1, len(said)):
            extra = [pair for pair in said[i] if pair not in taken]
            for pair in extra:
                if silent & set(pair) and self._in_structure(pair, taken):
                    taken[pair] = i
                    who = sorted(silent & set(pair))
                    self._conflicts.add(
                        ", ".join(who),
                        f"no NVLink in {self._name(first)}, but in {self._name(i)}; that one is "
                        "taken, because a link that does not answer is not known to be absent",
                    )
            self._compare(said, first, i, silent)
        self._compare_counted(said, taken)
        per_link = self._per_link(said)
        for pair, i in taken.items():
            model = said[i][pair]
            claims = [
                Claim(self._descriptions[j], pairs[pair])
                for j, pairs in enumerate(said)
                if pair in pairs and pairs[pair].count == model.count
            ]
            chosen = choose_figures(claims, " - ".join(pair), self._conflicts)
            nominal, effective = chosen.nominal, chosen.effective
            if nominal is None and effective is None:
                nominal, effective = (_times(f, model.count) for f in per_link(pair))
            yield Link(
                model.a, model.b, model.kind, nominal, effective, chosen.latency, model.count
            )

    def _in_structure(self, pair: _Pair, taken: dict[_Pair, int]) -> bool:
        """Return whether both say alike that GPUs are joined directly, or over a switch."""
        return self._switched(pair) == any(self._switched(other) for other in taken)

    def _switched(self, pair: _Pair) -> bool:
        return any(self._entries[end].kind is DeviceKind.NVSWITCH for end in pair)

    def _compare(
        self, said: Sequence[dict[_Pair, Link]], first: int, other: int, silent: set[str]
    ) -> None:
        mine, theirs = said[first], said[other]
        a, b = self._name(first), self._name(other)
        if not theirs:
            return
        if any(map(self._switched, mine)) != any(map(self._switched, theirs)):
            ours, others = _totals(mine), _totals(theirs)
            for gpu in sorted(set(ours) & set(others)):
                if self._entries[gpu].kind is DeviceKind.GPU and ours[gpu] != others[gpu]:
                    self._conflicts.add(
                        gpu, f"{ours[gpu]} NVLinks in {a}, {others[gpu]} in {b}; {a} is taken"
                    )
            return
        for pair in sorted(set(mine) | set(theirs)):
            counts = [pairs[pair].count if pair in pairs else 0 for pairs in (mine, theirs)]
            if counts[0] != counts[1] and not (counts[0] == 0 and silent & set(pair)):
                self._conflicts.add(
                    " - ".join(pair),
                    f"{counts[0]} {(mine.get(pair) or theirs[pair]).kind.value} links in {a}, "
                    f"{counts[1]} in {b}; {a} is taken",
                )

    def _compare_counted(self, said: Sequence[dict[_Pair, Link]], taken: dict[_Pair, int]) -> None:
        """Say where a description counts a GPU's links, whose far ends it does not know, anew."""
        totals = _totals({pair: said[i][pair] for pair, i in taken.items()})
        origin = {end: self._name(i) for pair, i in taken.items() for end in pair}
        for entry in self._entries.values():
            for i, device in entry.said.items():
                counted, total = device.attributes.get("nvlinks"), totals[entry.id]
                if isinstance(counted, int) and counted != total:
                    mine = origin.get(entry.id, "the others")
                    self._conflicts.add(
                        entry.id,
                        f"{total} NVLinks in {mine}, {counted} in {self._name(i)}; {mine} is taken",
                    )

    def _per_link(
        self, said: Sequence[dict[_Pair, Link]]
    ) -> Callable[[_Pair], tuple[Figure | None, Figure | None]]:
        """Return what one link of a pair carries as any description has it for one of its ends."""
        known: dict[str, tuple[Figure | None, Figure | None]] = {}
        for pairs in said:
            for pair, link in pairs.items():
                if link.nominal or link.effective:
                    one = (
                        _times(link.nominal, 1 / link.count),
                        _times(link.effective, 1 / link.count),
                    )
                    for end in pair:
                        known.setdefault(end, one)
        for entry in self._entries.values():
            for device in entry.said.values():
                rate = device.attributes.get("nvlink_bytes_per_s")
                if isinstance(rate, float):
                    note = f"{rate / 1e9:g} GB/s a link"
                    known.setdefault(entry.id, (Figure(rate, Source.FILE, note), None))
        return lambda pair: next((known[end] for end in pair if end in known), (None, None))

    def _first_that_has(self, kind: LinkKind) -> list[Link]:
        """Return the links of a kind from the most trusted description that has any."""
        said = [_by_pair(links, lambda link: link.kind is kind) for links in self._links]
        first = next((pairs for pairs in said if pairs), {})
        return [self._with_figures(pair, link, said) for pair, link in first.items()]

    def _first_of_each(self, wanted: Callable[[Link], bool], kind: DeviceKind) -> list[Link]:
        """Return for each device of a kind the links of the most trusted that has any for it."""
        said = [_by_pair(links, wanted) for links in self._links]
        owner: dict[str, int] = {}
        found: dict[_Pair, Link] = {}
        for i, pairs in enumerate(said):
            for pair, link in pairs.items():
                ends = [end for end in pair if self._entries[end].kind is kind]
                if all(owner.setdefault(end, i) == i for end in ends):
                    found[pair] = link
        return [self._with_figures(pair, link, said) for pair, link in found.items()]

    def _with_figures(self, pair: _Pair, link: Link, said: Sequence[dict[_Pair, Link]]) -> Link:
        claims = [
            Claim(self._descriptions[i], pairs[pair])
            for i, pairs in enumerate(said)
            if pair in pairs
        ]
        chosen = choose_figures(claims, " - ".join(pair), self._conflicts)
        return Link(
            link.a,
            link.b,
            link.kind,
            chosen.nominal,
            chosen.effective,
            chosen.latency,
            link.count,
        )

    def _name(self, index: int) -> str:
        return self._descriptions[index].topology.name


def _by_pair(links: Sequence[Link], wanted: Callable[[Link], bool]) -> dict[_Pair, Link]:
    return {
        (min(link.a, link.b), max(link.a, link.b)): link
        for link in links
        if wanted(link) and link.a != link.b
    }


def _totals(pairs: dict[_Pair, Link]) -> Counter[str]:
    totals = Counter[str]()
    for pair, link in pairs.items():
        for end in pair:
            totals[end] += link.count
    return totals


def _times(figure: Figure | None, factor: float) -> Figure | None:
    if figure is None:
        return None
    return Figure(figure.value * factor, figure.source, figure.note)


def is_used(entry: Entry, linked: Container[str], ranks: Container[str]) -> bool:
    """Return whether a device belongs in the result: part of the machine, or linked to it."""
    if entry.kind in (DeviceKind.GPU, DeviceKind.NIC) or entry.id in ranks:
        return True
    if entry.kind is DeviceKind.CPU and any(d.numa is not None for d in entry.said.values()):
        return True
    return entry.id in linked
