"""What ``topo-ar bench`` shows and keeps: the table, the JSON lines, the predictions."""

import sys
from pathlib import Path
from typing import Any, Self

import msgspec

from topo_ar.emulation.check import EmulationReport
from topo_ar.errors import ConfigError
from topo_ar.telemetry.records import RecordWriter, manifest
from topo_ar.telemetry.trace import Span, write_trace
from topo_ar.units import format_rate, format_size

_COLUMNS = (
    f"{'size':>12} {'count':>12} {'type':>8} {'redop':>6} {'candidate':>12} {'time':>10} "
    f"{'algbw':>8} {'busbw':>8} {'#wrong':>6} {'limit':>10} {'share':>6} {'predicted':>10}"
)
_UNITS = (
    f"{'(B)':>12} {'(elements)':>12} {'':>8} {'':>6} {'':>12} {'(ms)':>10} "
    f"{'(GB/s)':>8} {'(GB/s)':>8} {'':>6} {'(ms)':>10} {'':>6} {'(ms)':>10}"
)


class Report:
    """Receives the events of a run and writes each row as soon as it is there.

    Parameters
    ----------
    json_file : str or None
        Where rows go as JSON lines; ``-`` prints them on stdout and nothing else there.
    trace_file : Path or None
        Where the spans of one all-reduce go as a Perfetto trace.
    topology_file : Path or None
        Where the topology that the ranks probed and measured goes.

    Attributes
    ----------
    lost : list of str
        The peers that were given up.

    Raises
    ------
    ConfigError
        If a file cannot be written.
    """

    def __init__(
        self,
        json_file: str | None,
        trace_file: Path | None = None,
        topology_file: Path | None = None,
    ) -> None:
        self._quiet = json_file == "-"
        self._writer = RecordWriter(json_file) if json_file and not self._quiet else None
        self._path = Path(json_file) if json_file and not self._quiet else None
        for path in (trace_file, topology_file):
            if path is not None and not path.parent.is_dir():
                raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
        self._trace_file = trace_file
        self._topology_file = topology_file
        self._topology = ""
        self._spans: list[dict[str, Any]] = []
        self._rows: list[dict[str, Any]] = []
        self._manifest: dict[str, Any] = {}
        self._ranks_code = 0
        self.lost: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._trace_file is not None and self._spans:
            write_trace(map(_span, self._spans), self._trace_file)
        if self._topology_file is not None and self._topology:
            self._topology_file.write_text(self._topology + "\n")
        if self._rows and not self._quiet:
            self._print_foot()

    def begin(self, links: EmulationReport | None = None, openmpi: str | None = None) -> None:
        """Print the head.

        `links`, where hosts are emulated, and the version of Open MPI, where it is measured
        against, go into every row's manifest.
        """
        self._manifest = manifest()
        if links is not None:
            self._manifest = manifest("namespaces" if links.emulated else "loopback")
            self._manifest["links"] = msgspec.to_builtins(links)
            self._say(f"# {_describe(links)}")
        if openmpi is not None:
            self._manifest["openmpi"] = openmpi
        self._say(
            "# limit: the time nothing can beat at the measured payload rate of the bottleneck; "
            "share: limit / time; predicted: from this run's timings at other sizes, made before"
        )

    def event(self, name: str, data: dict[str, Any]) -> None:
        """Take an event of the measuring ranks."""
        if name == "row":
            self._row(data)
        elif name == "span":
            self._spans.append(data)
        elif name == "topology":
            self._topology = data["json"]
        elif name == "plan":
            first, _, _ = data["reason"].partition(". ")
            self._say(f"# {format_size(data['nbytes'])}: {first}")
        elif name == "lost":
            self.lost.append(data["candidate"])
            print(f"topo-ar: {data['candidate']} is left out: {data['reason']}", file=sys.stderr)
        elif name in ("calibration", "prediction") and self._path is not None:
            # Kept beside the rows and before them: a prediction must be older than its timing.
            with RecordWriter(self._path.with_suffix(".predictions.jsonl")) as predictions:
                predictions.write({"event": name, **data})

    def ranks_ended(self, exit_code: int) -> None:
        """Note the worst exit code of the measuring ranks."""
        self._ranks_code = exit_code

    def exit_code(self, min_fraction: float | None) -> int:
        """Return 0, or 1 when ranks failed, a result was wrong or a share below the floor."""
        wrong = any(row["wrong"] for row in self._rows)
        low = min_fraction is not None and any(
            row["fraction"] is not None and row["fraction"] < min_fraction
            for row in self._rows
            if row["candidate"] == "plan"
        )
        if self._ranks_code:
            print(f"topo-ar: error: ranks ended with {self._ranks_code}", file=sys.stderr)
        return int(bool(wrong or low or self._ranks_code or not self._rows))

    def _row(self, row: dict[str, Any]) -> None:
        row = {**row, "manifest": self._manifest}
        if not self._rows:
            self._say(_COLUMNS)
            self._say(_UNITS)
        self._rows.append(row)
        if self._writer is not None:
            self._writer.write(row)
        if self._quiet:
            print(msgspec.json.encode(row).decode(), flush=True)
        self._say(_format(row))

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(text, flush=True)

    def _print_foot(self) -> None:
        worlds = {(row["world_size"], row["hosts"]) for row in self._rows}
        world_size, hosts = max(worlds)
        print(
            "# busbw is algbw x 2(n-1)/n over all ranks, not the rate of a NIC; what a host's NICs "
            "carry is at most algbw x 2(k-1)/k for k hosts under a two-level plan"
        )
        fastest = max(self._rows, key=lambda row: float(row["slow_link_busbw"] or 0.0))
        if fastest["slow_link_busbw"]:
            print(
                f"# {world_size} ranks on {hosts} hosts; slow link at most "
                f"{format_rate(fastest['slow_link_busbw'])} ({fastest['candidate']}, "
                f"{format_size(fastest['nbytes'])})"
            )
        if any(row["marks"] for row in self._rows):
            print("# *: fewer bytes per NIC than 16 bursts of its token bucket: no share")
        if self._path is not None:
            print(f"# rows: {self._path}")


def _format(row: dict[str, Any]) -> str:
    itemsize = {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2}.get(row["dtype"], 4)
    share = "*" if row["marks"] else "-" if row["fraction"] is None else f"{row['fraction']:.3f}"
    predicted = row["predicted_seconds"]
    return (
        f"{row['nbytes']:>12} {row['nbytes'] // itemsize:>12} {row['dtype']:>8} "
        f"{row['redop']:>6} {row['candidate']:>12} {row['median_seconds'] * 1e3:>10.3f} "
        f"{row['algbw'] / 1e9:>8.4f} {row['busbw'] / 1e9:>8.4f} "
        f"{'-' if row['wrong'] is None else row['wrong']:>6} "
        f"{row['wire_limit_seconds'] * 1e3:>10.3f} {share:>6} "
        f"{'-' if predicted is None else format(predicted * 1e3, '.3f'):>10}"
    )


def _span(data: dict[str, Any]) -> Span:
    lane = data["stage"]
    if data["what"] == "wire":
        # Several chunks are on the wire at once; spans of one lane must not overlap.
        lane += f" wire {data['chunk'] % 4}"
    return Span(
        name=f"{data['what']} {data['chunk']}",
        rank=data["rank"],
        lane=lane,
        begin_seconds=data["begin_seconds"],
        end_seconds=data["end_seconds"],
        args={"chunk": data["chunk"], "stage": data["stage"], "what": data["what"]},
    )


def _describe(links: EmulationReport) -> str:
    if not links.emulated:
        return (
            f"NOT emulated ({links.reason}): unshaped loopback, times say nothing about a network"
        )
    carried = [rate for pair in links.pairs for rate in (pair.forward, pair.backward)]
    seen = f", seen to carry {format_rate(min(carried))} of payload" if carried else ""
    rates = sorted({rate for nics in links.nics for rate in nics})
    return (
        f"{len(links.ranks)} emulated hosts, NICs of {', '.join(map(format_rate, rates))}{seen}; "
        f"burst {format_size(links.burst)}, MTU {links.mtu}, {links.congestion_control}"
    )
