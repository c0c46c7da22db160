"""The published NCCL all-reduce measurements, typed. Rates in bytes/s, times in seconds."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files

_GB = 1e9


@dataclass(frozen=True, slots=True)
class System:
    """A system that was measured; what its source does not say is None."""

    name: str
    gpu: str
    num_nodes: int
    gpus_per_node: int
    nvlink_bytes_per_s: float | None
    nics_per_node: int
    nic_bytes_per_s: float | None
    fabric: str
    source: str
    note: str


@dataclass(frozen=True, slots=True)
class Measurement:
    """One all-reduce: seconds for a buffer of `nbytes`, and the bus bandwidth printed beside it."""

    system: str
    num_ranks: int
    nbytes: int
    seconds: float
    busbw: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The bus bandwidth of an algorithm, and whether NCCL chose it by default."""

    system: str
    num_gpus: int
    num_nodes: int
    nbytes: int
    algorithm: str
    busbw: float
    chosen: bool
    source: str


@dataclass(frozen=True, slots=True)
class Scaling:
    """A point read off a chart, with its reading error in bytes/s."""

    system: str
    num_nodes: int
    num_gpus: int
    algorithm: str
    nbytes: int
    busbw: float
    reading_error: float
    source: str


def systems() -> dict[str, System]:
    """Return the systems of ``nccl_systems.csv`` by name."""
    return {
        row["system"]: System(
            row["system"],
            row["gpu"],
            int(row["nodes"]),
            int(row["gpus_per_node"]),
            _scaled(row["nvlink_GBps_per_gpu"], _GB),
            int(row["nics_per_node"] or 0),
            _scaled(row["nic_Gbps_each"], _GB / 8),
            row["fabric"],
            row["source"],
            row["note"],
        )
        for row in _rows("nccl_systems.csv")
    }


def measurements() -> list[Measurement]:
    """Return the rows of ``nccl_allreduce.csv``."""
    return [
        Measurement(
            row["system"],
            int(row["ranks"]),
            int(row["size_bytes"]),
            float(row["time_us"]) * 1e-6,
            float(row["busbw_GBps"]) * _GB,
        )
        for row in _rows("nccl_allreduce.csv")
    ]


def choices() -> list[Choice]:
    """Return the rows of ``nccl_algorithm_choice.csv``."""
    return [
        Choice(
            row["system"],
            int(row["gpus"]),
            int(row["nodes"]),
            int(row["size_bytes"]),
            row["algorithm"],
            float(row["busbw_GBps"]) * _GB,
            row["chosen_by_default"] == "1",
            row["source"],
        )
        for row in _rows("nccl_algorithm_choice.csv")
    ]


def scaling() -> list[Scaling]:
    """Return the rows of ``nccl_scale_digitised.csv``."""
    return [
        Scaling(
            row["system"],
            int(row["nodes"]),
            int(row["gpus"]),
            row["algorithm"],
            int(row["size_bytes"]),
            float(row["busbw_GBps"]) * _GB,
            float(row["reading_error_GBps"]) * _GB,
            row["source"],
        )
        for row in _rows("nccl_scale_digitised.csv")
    ]


def _rows(name: str) -> Iterator[dict[str, str]]:
    text = files("topo_ar.data").joinpath("published", name).read_text(encoding="utf-8")
    return csv.DictReader(text.splitlines())


def _scaled(text: str, unit: float) -> float | None:
    return float(text) * unit if text else None
