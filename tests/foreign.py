"""Descriptions of machines that other people captured, by name.

Those whose licence allows it lie under tests/data; the others are read from a folder beside the
checkout, or from the one that TOPO_AR_TOPOLOGIES names, and their tests skip where it is absent.
"""

import os
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"
_BESIDE = DATA.parents[2] / "shared" / "topologies"
ELSEWHERE = Path(os.environ.get("TOPO_AR_TOPOLOGIES", _BESIDE))

not_at_hand: set[str] = set()


def foreign(name):
    """Return the path of a file such as ``slurm/block-dra.conf``, or skip the test."""
    for folder in (DATA, ELSEWHERE):
        if (folder / name).is_file():
            return folder / name
    not_at_hand.add(name)
    pytest.skip(f"{name} is not at hand; its licence does not allow a copy here")
    raise AssertionError


def all_foreign():
    """Return the names of all files at hand, copies and others, sorted."""
    kinds = ("hwloc-xml", "ibnetdiscover", "nccl-xml", "nvidia-smi-topo", "nvlink-p2p")
    return sorted(
        {
            f"{kind}/{path.name}"
            for folder in (DATA, ELSEWHERE)
            for kind in (*kinds, "rocm-smi", "slurm")
            for path in (folder / kind).glob("*")
            if path.name != "SOURCES.md"
        }
    )
