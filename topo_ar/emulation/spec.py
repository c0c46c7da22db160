"""The cluster spec: which nodes to emulate, from a TOML file or from a grid such as ``2x4``.

::

    latency = "0.25ms"                # optional: delay of every rack switch, one way
    mtu = 1500                        # optional
    burst = "128K"                    # optional: credit of every token bucket
    congestion_control = "cubic"      # optional

    [[node]]
    ranks = 4
    nics = ["1gbit", "500mbit"]
    rack = "r0"                       # optional, one rack by default
    count = 2                         # optional: this many such nodes
    rank_ids = [0, 2, 4, 6]           # optional: global ranks in local-rank order

    [rack]
    uplink = "2gbit"                  # optional: every rack's link to the spine

    [rack.r0]
    uplink = "1gbit"                  # optional: this rack's link

Ranks are numbered in blocks, node by node, unless the nodes list theirs. A rack without an uplink
rate hangs on the spine unshaped.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Self, TypeVar

import msgspec
from msgspec import Meta

from topo_ar.errors import ConfigError
from topo_ar.units import parse_rate, parse_seconds, parse_size

_T = TypeVar("_T")
DEFAULT_RACK = "rack0"
MAX_NODES = 250
_GRID = re.compile(r"\s*(\d+)\s*[xX]\s*(\d+)\s*")
_RACK_NAME = re.compile(r"[A-Za-z0-9_.-]{1,32}")


class NodeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One node: its global ranks in local-rank order, its NICs' rates in bytes/s, its rack."""

    ranks: tuple[int, ...]
    nics: tuple[float, ...]
    rack: str = DEFAULT_RACK


class ClusterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cluster to emulate; all values in bytes, bytes/s and seconds.

    `uplinks` holds the rate of each shaped rack uplink, `burst` of ``None`` lets each link choose
    its own, `latency` is added by every rack switch a frame crosses, one way.
    """

    nodes: tuple[NodeSpec, ...]
    uplinks: dict[str, float] = {}
    latency: float = 0.0
    mtu: int = 1500
    burst: int | None = None
    congestion_control: str = "cubic"

    @classmethod
    def uniform(cls, nodes: int, ranks: int, nic: str | Iterable[str] = "1gbit") -> Self:
        """Return `nodes` equal nodes of `ranks` ranks, each with the NIC (or NICs) `nic`.

        Raises
        ------
        ConfigError
            If there is no node, no rank, or a rate is not one.
        """
        nics = [nic] if isinstance(nic, str) else list(nic)
        table = _NodeTable(ranks=ranks, nics=nics, count=nodes)
        if nodes < 1 or ranks < 1:
            raise ConfigError(
                f"a grid of {nodes}x{ranks} has no ranks; ask for at least 1 node and 1 rank"
            )
        return cls(nodes=_expand((table,), "grid"))

    @property
    def world_size(self) -> int:
        """The number of ranks over all nodes."""
        return sum(len(node.ranks) for node in self.nodes)


class _NodeTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ranks: Annotated[int, Meta(ge=1, le=256)]
    nics: Annotated[list[str], Meta(min_length=1, max_length=16)]
    rack: str = DEFAULT_RACK
    count: Annotated[int, Meta(ge=1, le=MAX_NODES)] = 1
    rank_ids: list[int] | None = None


class _RackTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    uplink: str


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node: Annotated[tuple[_NodeTable, ...], Meta(min_length=1)]
    rack: dict[str, str | _RackTable] = {}
    latency: str = "0s"
    mtu: Annotated[int, Meta(ge=576, le=65535)] = 1500
    burst: str | None = None
    congestion_control: Annotated[str, Meta(pattern="^[a-z0-9_]{1,15}$")] = "cubic"


def parse_grid(text: str) -> tuple[int, int]:
    """Return (nodes, ranks per node) for a grid such as ``2x4``.

    Raises
    ------
    ConfigError
        If `text` is not two positive whole numbers joined by ``x``.

    Examples
    --------
    >>> parse_grid("2x4")
    (2, 4)
    """
    match = _GRID.fullmatch(text)
    if match is None or int(match[1]) < 1 or int(match[2]) < 1:
        raise ConfigError(
            f"{text!r} is not a grid; write NODESxRANKS with at least one of each, such as 2x4"
        )
    return int(match[1]), int(match[2])


def read_spec(path: str | Path) -> ClusterSpec:
    """Return the cluster that the TOML file at `path` describes.

    Raises
    ------
    ConfigError
        If the file cannot be read or used; the message names the file and the field.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"cluster spec {str(path)!r} cannot be read: {reason}") from error
    return parse_spec(text, origin=str(path))


def parse_spec(text: str, origin: str = "spec") -> ClusterSpec:
    """Return the cluster that the TOML `text` describes; `origin` names it in messages.

    Raises
    ------
    ConfigError
        If `text` is not TOML, lacks a field, has an unknown one, or holds a value that no cluster
        can have.
    """
    try:
        file = msgspec.toml.decode(text, type=_File)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{origin}: {error}") from error
    nodes = _expand(file.node, origin)
    spec = ClusterSpec(
        nodes=nodes,
        uplinks=_uplinks(file.rack, tuple(dict.fromkeys(node.rack for node in nodes)), origin),
        latency=_field(origin, "latency", parse_seconds, file.latency),
        mtu=file.mtu,
        burst=None if file.burst is None else _field(origin, "burst", parse_size, file.burst),
        congestion_control=file.congestion_control,
    )
    if spec.burst is not None and spec.burst < spec.mtu + 14:
        raise ConfigError(
            f"{origin}: burst: {spec.burst} bytes are less than a frame of {spec.mtu + 14}; "
            "a token bucket must hold one, and holds its rate cheaply from 70K on"
        )
    return spec


def _expand(tables: tuple[_NodeTable, ...], origin: str) -> tuple[NodeSpec, ...]:
    listed = [table.rank_ids is not None for table in tables]
    if any(listed) and not all(listed):
        raise ConfigError(f"{origin}: rank_ids: either every node lists its ranks or none does")
    nodes: list[NodeSpec] = []
    first = 0
    for index, table in enumerate(tables):
        where = f"{origin}: node[{index}]"
        nics = tuple(_field(where, "nics", parse_rate, nic) for nic in table.nics)
        if not _RACK_NAME.fullmatch(table.rack) or table.rack == "uplink":
            raise ConfigError(f"{where}: rack: {table.rack!r} is not a name of letters and digits")
        for _ in range(table.count):
            nodes.append(NodeSpec(_rank_ids(table, first, where), nics, table.rack))
            first += table.ranks
    if len(nodes) > MAX_NODES:
        raise ConfigError(f"{origin}: node: {len(nodes)} nodes; at most {MAX_NODES} fit one subnet")
    ranks = sorted(rank for node in nodes for rank in node.ranks)
    if ranks != list(range(len(ranks))):
        raise ConfigError(
            f"{origin}: rank_ids: the nodes hold ranks {ranks}; "
            f"each of 0 to {len(ranks) - 1} must appear once"
        )
    return tuple(nodes)


def _rank_ids(table: _NodeTable, first: int, where: str) -> tuple[int, ...]:
    if table.rank_ids is None:
        return tuple(range(first, first + table.ranks))
    if len(table.rank_ids) != table.ranks or table.count != 1:
        raise ConfigError(
            f"{where}: rank_ids: lists {len(table.rank_ids)} ranks for {table.count} node(s) of "
            f"{table.ranks}; list one node's ranks, all of them"
        )
    return tuple(table.rank_ids)


def _uplinks(
    tables: dict[str, str | _RackTable], racks: tuple[str, ...], origin: str
) -> dict[str, float]:
    default = tables.get("uplink")
    named = {name: table for name, table in tables.items() if isinstance(table, _RackTable)}
    for name, value in tables.items():
        if isinstance(value, str) and name != "uplink":
            raise ConfigError(f"{origin}: rack: unknown field {name!r}; a rack has an uplink")
        if name != "uplink" and name not in racks:
            raise ConfigError(
                f"{origin}: rack.{name}: no node is in it; nodes are in {', '.join(racks)}"
            )
    if isinstance(default, _RackTable):
        raise ConfigError(f"{origin}: rack.uplink: must be a rate such as '1gbit'")
    missing = [name for name in racks if name not in named]
    if named and missing and default is None:
        raise ConfigError(
            f"{origin}: node: rack {missing[0]!r} is unknown; the file has {', '.join(named)}"
        )
    texts = {name: default for name in racks if default is not None}
    texts |= {name: table.uplink for name, table in named.items()}
    return {
        name: _field(f"{origin}: rack.{name}", "uplink", parse_rate, text)
        for name, text in texts.items()
    }


def _field(origin: str, name: str, parse: Callable[[str], _T], text: str) -> _T:
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {name}: {error}") from error
