"""Slurm's host lists: ``node[01-04,7],login1`` is six names."""

import re
from itertools import product

from topo_ar.errors import TopologyError

MOST_NAMES = 100_000

_RANGE = re.compile(r"([0-9]{1,15})(?:-([0-9]{1,15}))?", re.ASCII)


class HostLists:
    """The host lists of one file, which together may name `MOST_NAMES` nodes or switches."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._room = MOST_NAMES

    def expand(self, hostlist: str, line: int) -> list[str]:
        """Return the names of a list that stands in `line`; see `expand`."""
        names = expand(hostlist, f"{self._file}:{line}", self._room)
        self._room -= len(names)
        return names


def expand(hostlist: str, place: str, room: int = MOST_NAMES) -> list[str]:
    """Return the names of a host list in their order; zeros in front of numbers are kept.

    Parameters
    ----------
    hostlist : str
        Names separated by commas; each may have ranges in brackets, also several times.
    place : str
        File and line, for messages.
    room : int
        How many names there may be.

    Raises
    ------
    TopologyError
        If a bracket is not closed or holds no range, or there are too many names.

    Examples
    --------
    >>> expand("cn[001,003-004],x7", "topology.conf:1")
    ['cn001', 'cn003', 'cn004', 'x7']
    """
    names: list[str] = []
    for item in _split(hostlist, place):
        parts = re.split(r"\[([^\[\]]*)\]", item)
        choices, count = [], 1
        for i, part in enumerate(parts):
            choices.append(_numbers(part, item, place) if i % 2 else [part])
            count *= len(choices[-1])
            if len(names) + count > room:
                raise _too_many(place)
        names += ["".join(name) for name in product(*choices)]
    return names


def _split(hostlist: str, place: str) -> list[str]:
    """Return the items of a list, split at the commas outside of brackets."""
    items, start, is_open = [], 0, False
    for i, letter in enumerate(hostlist):
        if (letter == "[" and is_open) or (letter == "]" and not is_open):
            raise _broken(hostlist, place)
        if letter in "[]":
            is_open = letter == "["
        elif letter == "," and not is_open:
            items.append(hostlist[start:i])
            start = i + 1
    if is_open:
        raise _broken(hostlist, place)
    return [item for item in (*items, hostlist[start:]) if item]


def _numbers(ranges: str, item: str, place: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        found = _RANGE.fullmatch(part.strip())
        first = int(found[1]) if found else 1
        last = int(found[2] or found[1]) if found else 0
        if found is None or last < first:
            raise TopologyError(
                f"{place}: {part[:40]!r} in {item[:80]!r} is no range; expected numbers such as "
                "01-16, the smaller first"
            )
        if len(numbers) + last - first >= MOST_NAMES:
            raise _too_many(place)
        numbers += [str(number).zfill(len(found[1])) for number in range(first, last + 1)]
    return numbers


def _broken(hostlist: str, place: str) -> TopologyError:
    return TopologyError(
        f"{place}: brackets of {hostlist[:80]!r} are not closed; a host list reads node[01-04,7]"
    )


def _too_many(place: str) -> TopologyError:
    return TopologyError(f"{place}: more than {MOST_NAMES} names in the file; check the ranges")
