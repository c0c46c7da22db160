"""Which figures a folder of results gives: one place for the report, the paper and plots/all.py."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from topo_ar.errors import ConfigError
from topo_ar.figures.accuracy import accuracy_over_bytes
from topo_ar.figures.bandwidth import busbw_over_size
from topo_ar.figures.bucket_cap import step_over_bucket_cap
from topo_ar.figures.codec_speedup import codec_speedup
from topo_ar.figures.graph import topology_graph
from topo_ar.figures.kernels import kernel_throughput
from topo_ar.figures.prediction import predicted_measured
from topo_ar.figures.published import published_share
from topo_ar.figures.ratio import comm_compute_ratio
from topo_ar.figures.scaling import scaling_efficiency
from topo_ar.figures.style import Record
from topo_ar.figures.time_to_accuracy import quality_over_time
from topo_ar.figures.training import step_time, training_parity
from topo_ar.figures.wire_share import wire_share
from topo_ar.telemetry.records import read_records

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[Record]


@dataclass(frozen=True, slots=True)
class Entry:
    """A figure, the files that it is drawn from (a pattern of names), and how."""

    name: str
    title: str
    pattern: str
    draw: Callable[[list[Record]], "Figure"]

    def files(self, results: Path) -> list[Path]:
        """Return the files in `results` that this figure is drawn from; none: it cannot be."""
        found = results.glob(self.pattern)
        return sorted(path for path in found if ".predictions." not in path.name)

    def figure(self, results: Path) -> "Figure":
        """Draw the figure from the files in `results`.

        Raises
        ------
        ConfigError
            If the files cannot be read, do not hold what the figure shows, or matplotlib is not
            installed.
        """
        files = self.files(results)
        try:
            return self.draw([row for path in files for row in _read(path)])
        except KeyError as error:
            names = ", ".join(path.name for path in files)
            raise ConfigError(f"{names}: a record has no {error.args[0]!r}") from error


def _read(path: Path) -> Iterator[Record]:
    if path.suffix == ".json":
        try:
            yield json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
    else:
        yield from read_records(path)


def _timings(draw: Callable[[list[Record]], "Figure"]) -> Callable[[list[Record]], "Figure"]:
    return lambda rows: draw([row for row in rows if "candidate" in row])


ENTRIES: tuple[Entry, ...] = (
    Entry("topology", "The machine", "topology.json", lambda rows: topology_graph(rows[0])),
    Entry("busbw", "All-reduce over size", "allreduce_size.jsonl", _timings(busbw_over_size)),
    Entry("wire_share", "Share of the wire limit", "wire_*.jsonl", _timings(wire_share)),
    Entry(
        "predicted",
        "Predictions made before the run",
        "allreduce_size.jsonl",
        _timings(predicted_measured),
    ),
    Entry(
        "simulated",
        "Simulated and measured",
        "predicted_measured.jsonl",
        _timings(predicted_measured),
    ),
    Entry("step_time", "Training step", "ddp_parity.jsonl", step_time),
    Entry("parity", "Distance from plain DDP", "ddp_parity.jsonl", training_parity),
    Entry("accuracy", "Accuracy over bytes", "compression_accuracy.jsonl", accuracy_over_bytes),
    Entry("codec_speedup", "Speed-up by codec", "compression_ddp*.jsonl", codec_speedup),
    Entry("kernels", "Kernels of codecs", "compression_kernels*.jsonl", kernel_throughput),
    Entry(
        "comm_compute_ratio",
        "Communication over computation",
        "comm_compute_ratio_*.jsonl",
        comm_compute_ratio,
    ),
    Entry("bucket_cap", "Bucket cap", "bucket_cap.jsonl", step_over_bucket_cap),
    Entry("scaling_weak", "Weak scaling", "scaling.jsonl", scaling_efficiency),
    Entry(
        "scaling_strong",
        "Strong scaling",
        "scaling.jsonl",
        partial(scaling_efficiency, kind="strong"),
    ),
    Entry("time_to_accuracy", "Time to accuracy", "time_to_accuracy_*.jsonl", quality_over_time),
    Entry("published", "Published NCCL peaks", "published.jsonl", published_share),
)
