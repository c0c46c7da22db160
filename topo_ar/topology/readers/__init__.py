"""Descriptions of machines in other people's formats, one format a module.

A reader is a module with ``FORMAT`` (a name), ``matches(text)`` (is this content mine?) and
``read_text(text, name)`` (the topology). The content decides, never the file's name.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from topo_ar.errors import TopologyError
from topo_ar.topology.model import Topology
from topo_ar.topology.readers import (
    hwloc_xml,
    ibnetdiscover,
    nccl_xml,
    nvidia_nvlink,
    nvidia_p2p,
    nvidia_topo,
    rocm_topo,
    slurm_conf,
    slurm_yaml,
    topology_json,
)
from topo_ar.topology.text_file import read_text_file


class _Reader(Protocol):
    FORMAT: str

    def matches(self, text: str) -> bool: ...

    def read_text(self, text: str, name: str) -> Topology: ...


_READERS: tuple[_Reader, ...] = (
    topology_json,
    hwloc_xml,
    nccl_xml,
    ibnetdiscover,
    slurm_conf,
    slurm_yaml,
    rocm_topo,
    nvidia_p2p,
    nvidia_nvlink,
    nvidia_topo,
)

_MOST_NOTES = 100


@dataclass(frozen=True, slots=True)
class Description:
    """A topology and the format it was found in."""

    format: str
    topology: Topology


def read(path_or_text: str | Path) -> Topology:
    """Return the topology that a file, or a text itself, describes.

    Parameters
    ----------
    path_or_text : str or Path
        A path; a string that starts with ``<`` or ``{`` or has several lines is the text itself.

    Raises
    ------
    TopologyError
        If it cannot be read or holds no description that is known; the message names the file and,
        where it can, the line.
    """
    return describe(path_or_text).topology


def describe(path_or_text: str | Path) -> Description:
    """Return the topology as `read` does, together with the name of the format."""
    text, name = _load(path_or_text)
    known = ", ".join(reader.FORMAT for reader in _READERS)
    if not text.strip():
        raise TopologyError(
            f"{name}: is empty, so the command that wrote it failed; known formats are {known}"
        )
    for reader in _READERS:
        if reader.matches(text):
            topology = reader.read_text(text, name)
            ours = reader is topology_json
            return Description(reader.FORMAT, topology if ours else _readable(topology))
    raise TopologyError(
        f"{name}: the content is in no known format ({known}); "
        f"it starts with {text.strip().splitlines()[0][:60]!r}"
    )


def _readable(topology: Topology) -> Topology:
    """Return `topology` with each note once, and no more of them than a person would read."""
    notes = tuple(dict.fromkeys(topology.notes))
    if len(notes) > _MOST_NOTES:
        notes = (*notes[:_MOST_NOTES], f"{len(notes) - _MOST_NOTES} more notes are not shown")
    return topology if notes == topology.notes else replace(topology, notes=notes)


def _load(path_or_text: str | Path) -> tuple[str, str]:
    if isinstance(path_or_text, str):
        if path_or_text.lstrip()[:1] in ("<", "{") or "\n" in path_or_text:
            return path_or_text, "text"
        path_or_text = Path(path_or_text)
    return read_text_file(path_or_text), path_or_text.name
