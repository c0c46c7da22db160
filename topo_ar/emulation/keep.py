"""Which paths stay visible in hosts that have directories such as ``/tmp`` of their own."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import topo_ar
from topo_ar.emulation.steps import PRIVATE_ROOTS
from topo_ar.errors import EmulationError


def kept_paths(extra: Iterable[str | Path] = ()) -> tuple[str, ...]:
    """Return the paths that hosts must see although they lie where every host has its own.

    Raises
    ------
    EmulationError
        If `extra` names something that does not exist or lies below ``/run``.
    """
    wanted = [os.path.abspath(path) for path in extra]
    for path in wanted:
        if not os.path.exists(path):
            raise EmulationError(f"{path} shall be kept visible in the hosts but does not exist")
    package = os.path.dirname(os.path.dirname(os.path.abspath(topo_ar.__file__)))
    interpreter = os.path.dirname(os.path.realpath(sys.executable))
    wanted += [package, interpreter, sys.prefix, sys.base_prefix, os.getcwd()]
    for path in wanted:
        if _below(path, ("/run", "/var/run")):
            raise EmulationError(
                f"{path} lies below /run, of which every host has its own; move it elsewhere"
            )
    inside = sorted({path for path in wanted if _below(path, PRIVATE_ROOTS)})
    return tuple(path for path in inside if not _below(path, set(inside) - {path}))


def command_paths(argv: Iterable[str]) -> tuple[Path, ...]:
    """Return what of a command's files and directories must be kept for it to find them.

    A file brings its directory along, for what lies or is written beside it, unless that is
    ``/tmp`` itself. ``--out=/tmp/x/y`` is understood.
    """
    found = []
    for word in argv:
        path = os.path.abspath(word.partition("=")[2] if word.startswith("-") else word)
        directory = path if os.path.isdir(path) else os.path.dirname(path)
        if os.path.isdir(directory) and _below(directory, PRIVATE_ROOTS):
            found.append(Path(directory))
        elif os.path.isfile(path) and directory in PRIVATE_ROOTS:
            found.append(Path(path))
    return tuple(found)


def working_directory(kept: Iterable[str]) -> str:
    """Return this process's working directory, or ``/tmp`` where the hosts do not see it."""
    here = os.getcwd()
    hidden = here in PRIVATE_ROOTS or (_below(here, PRIVATE_ROOTS) and not _below(here, kept))
    return "/tmp" if hidden else here


def _below(path: str, roots: Iterable[str]) -> bool:
    return any(path == root or path.startswith(root + "/") for root in roots) and (
        path not in PRIVATE_ROOTS
    )
