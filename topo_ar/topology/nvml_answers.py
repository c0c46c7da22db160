"""What NVML answered on one machine, as plain data: recorded once, concluded from anywhere.

An answer is a value, a `Failure`, or None where the question was not asked. Numbers are NVML's own;
their meaning is read out in ``nvml.py``.
"""

from pathlib import Path

import msgspec

from topo_ar.errors import TopologyError
from topo_ar.topology.text_file import read_text_file

SCHEMA_VERSION = 1


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="failure"):
    """A call that failed: its name, NVML's error number and text."""

    call: str
    error: int
    text: str = ""

    def __str__(self) -> str:
        return f"{self.call} failed ({self.text or f'error {self.error}'})"


class FabricAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="fabric"):
    """Where a GPU belongs in an NVLink fabric; `health` is None below version 2."""

    cluster: str
    clique: int
    state: int
    health: int | None = None


class LinkAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One NVLink of a GPU. `speed` is NVML's field in Mbyte/s, `remote_type` NVML's device type."""

    link: int
    state: int | Failure
    p2p: int | Failure | None = None
    version: int | Failure | None = None
    remote_type: int | Failure | None = None
    remote_busid: str | Failure | None = None
    speed: int | Failure | None = None


class GpuAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One GPU. `links_end` says why no further link was asked; `memory_numa` lists NUMA nodes."""

    index: int
    busid: str | Failure
    uuid: str | Failure | None = None
    name: str | Failure | None = None
    capability: tuple[int, int] | Failure | None = None
    mig: int | Failure | None = None
    memory_numa: tuple[int, ...] | Failure | None = None
    pcie_generation: int | Failure | None = None
    pcie_width: int | Failure | None = None
    c2c_links: int | Failure | None = None
    c2c_megabytes_per_s: int | Failure | None = None
    fabric: FabricAnswer | Failure | None = None
    links: tuple[LinkAnswer, ...] = ()
    links_end: Failure | None = None


class PairAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Two GPUs, by index: how near they are, and whether one may read and write the other."""

    a: int
    b: int
    ancestor: int | Failure | None = None
    p2p_read: int | Failure | None = None
    p2p_write: int | Failure | None = None


class NvmlAnswers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Everything that was asked of one machine.

    `absent` says why NVML could not be asked at all; `visible` and `order` are CUDA_VISIBLE_DEVICES
    and CUDA_DEVICE_ORDER, None where they are not set.
    """

    gpus: tuple[GpuAnswer, ...] = ()
    pairs: tuple[PairAnswer, ...] = ()
    absent: Failure | None = None
    count: int | Failure | None = None
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
        If the file cannot be read or holds no recording of this version; the message names it.
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
    return answers
