"""Topologies in other people's formats, one format a module.

A writer is a module with ``FORMAT`` (a name), ``SUFFIXES`` and ``write_text(topology)``, which
returns the text and, in sentences, what the format cannot say.
"""

import os
from pathlib import Path
from typing import Protocol

from topo_ar.errors import ConfigError
from topo_ar.topology.model import Topology, to_json
from topo_ar.topology.writers import dot, graphml, nccl_xml
from topo_ar.topology.writers.written import Written


class _Writer(Protocol):
    FORMAT: str
    SUFFIXES: tuple[str, ...]

    def write_text(self, topology: Topology) -> Written: ...


class _Json:
    """The package's own format; it says everything."""

    FORMAT = "topo-ar"
    SUFFIXES: tuple[str, ...] = (".json",)

    def write_text(self, topology: Topology) -> Written:
        return Written(to_json(topology).decode() + "\n")


_WRITERS: tuple[_Writer, ...] = (_Json(), nccl_xml, graphml, dot)
FORMATS = tuple(writer.FORMAT for writer in _WRITERS)
SUFFIXES = tuple(suffix for writer in _WRITERS for suffix in writer.SUFFIXES)


def write(
    topology: Topology,
    path: str | os.PathLike[str],
    format: str | None = None,  # noqa: A002
) -> tuple[str, ...]:
    """Write `topology` to `path` and return, in sentences, what the format cannot say.

    Parameters
    ----------
    topology : Topology
        A sound topology.
    path : path-like
        The file to write.
    format : str, optional
        One of `FORMATS`; by the suffix of `path` when left out: ``.json``, ``.xml`` (NCCL),
        ``.graphml``, ``.dot`` or ``.gv``.

    Raises
    ------
    ConfigError
        If the format is not known or the file cannot be written.
    TopologyError
        If the format has no room for this topology.
    """
    suffix = Path(path).suffix.lower()
    for writer in _WRITERS:
        if format == writer.FORMAT or (format is None and suffix in writer.SUFFIXES):
            written = writer.write_text(topology)
            break
    else:
        asked = f"format {format!r}" if format else f"a file that ends in {suffix!r}"
        raise ConfigError(
            f"{path}: {asked} is not known; formats are {', '.join(FORMATS)}, "
            f"endings {', '.join(SUFFIXES)}"
        )
    try:
        Path(path).write_text(written.text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    return written.left_out
