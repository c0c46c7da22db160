"""What NVML answered on one machine, as plain data: recorded once, concluded from anywhere.

An answer is a value, a `Failure`, or None where the question was not asked. Numbers are NVML's own;
their meaning is read out in ``nvml.py``.
"""

from pathlib import Path
from typing import Annotated

import msgspec

from topo_ar.errors import TopologyError
from topo_ar.topology.text_file import read_text_file

SCHEMA_VERSION = 1

_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]
_Busid = Annotated[
    str, msgspec.Meta(pattern=r"^[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]$")
]
_Cluster = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Fa-f]*$", max_length=64)]


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="failure"):
    """A call that failed: its name, NVML's error number and text."""

    call: str
    error: int
    text: str = ""

    def __str__(self) -> str:
        return f"{self.call} failed ({self.text or f'error {self.error}'})"


class FabricAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="fabric"):
    """Where a GPU belongs in an NVLink fabric; `health` is None below version 2."""

    cluster: _Cluster
    clique: _Number
    state: _Number
    health: _Number | None = None


class LinkAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One NVLink of a GPU. `speed` is NVML's field in Mbyte/s, `remote_type` NVML's device type."""

    link: _Number
    state: _Number | Failure
    p2p: _Number | Failure | None = None
    version: _Number | Failure | None = None
    remote_type: _Number | Failure | None = None
    remote_busid: _Busid | Failure | None = None
    speed: _Number | Failure | None = None


class GpuAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One GPU. `links_end` says why no further link was asked; `memory_numa` lists NUMA nodes."""

    index: _Number
    busid: _Busid | Failure
    uuid: str | Failure | None = None
    name: str | Failure | None = None
    capability: tuple[_Number, _Number] | Failure | None = None
    mig: _Number | Failure | None = None
    memory_numa: tuple[_Number, ...] | Failure | None = None
    pcie_generation: _Number | Failure | None = None
    pcie_width: _Number | Failure | None = None
    c2c_links: _Number | Failure | None = None
    c2c_megabytes_per_s: _Number | Failure | None = None
    fabric: FabricAnswer | Failure | None = None
    links: tuple[LinkAnswer, ...] = ()
    links_end: Failure | None = None


class PairAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Two GPUs, by index: how near they are, and whether one may read and write the other."""

    a: _Number
    b: _Number
    ancestor: _Number | Failure | None = None
    p2p_read: _Number | Failure | None = None
    p2p_write: _Number | Failure | None = None


class NvmlAnswers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Everything that was asked of one machine.

    `absent` says why NVML could not be asked at all; `visible` and `order` are CUDA_VISIBLE_DEVICES
    and CUDA_DEVICE_ORDER, None where they are not set.
    """

    gpus: tuple[GpuAnswer, ...] = ()
    pairs: tuple[PairAnswer, ...] = ()
    absent: Failure | None = None
    count: _Number | Failure | None = None
    driver: str | Failure | None = None
    visible: str | None = None
    order: str | None = None
    schema: int = SCHEMA_VERSION


def write_answers(answers: NvmlAnswers, path: Path) -> None:
    """Write the answers as JSON.

    Raises
    ------
    TopologyError
        If the file cannot be written.
    """
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(answers)) + b"\n")
    except OSError as error:
        raise TopologyError(f"cannot write {path}: {error.strerror}") from None


def read_answers(path: Path) -> NvmlAnswers:
    """Read recorded answers.

    Raises
    ------
    TopologyError
        If the file cannot be read or holds no recording of this version, or a GPU twice; the
        message names it.
    """
    try:
        answers = msgspec.json.decode(read_text_file(path), type=NvmlAnswers)
    except msgspec.DecodeError as error:
        raise TopologyError(
            f"{path}: not a recording of NVML: {error}; make one with "
            "`topo-ar probe --record-nvml FILE`"
        ) from None
    if answers.schema != SCHEMA_VERSION:
        raise TopologyError(
            f"{path}: recording of schema {answers.schema}; this version reads {SCHEMA_VERSION}"
        )
    if len({gpu.index for gpu in answers.gpus}) < len(answers.gpus):
        raise TopologyError(f"{path}: two GPUs have the same index; each is there once")
    return answers
