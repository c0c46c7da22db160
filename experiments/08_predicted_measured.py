"""Does the simulator predict what emulated hosts measured, on runs that it was not calibrated on?

Command: python -m experiments.08_predicted_measured experiments/results --out results/
Minutes: 1.

Reads the rows of wire_*.jsonl and allreduce_size.jsonl. Five figures of the hosts that no link
tells are fitted to the runs `large`, `one-node` and `sweep` alone: latency and rate of shared
memory, the cost of a chunk, what gloo's ring adds to each hop, and what a hop takes at least,
however small.
All other runs are scored: from 1 MiB, NICs up to 1 Gbit/s and CPU below 90 % the median error shall
be at most 7 % and 95 % of the errors at most 20 %; below 1 MiB a prediction shall be within a
factor of 2. Rows are calls made back to back, so the credit of the emulated NICs' token buckets,
which the manifest states, counts. Misses and what lies out of scope are listed.
Writes predicted_measured.jsonl, of which plots/predicted.py makes the figure; exits with 1 when a
target is missed.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import median, quantiles

from topo_ar.cli.script import exit_code_of
from topo_ar.emulation.links import payload_fraction
from topo_ar.errors import ConfigError
from topo_ar.planning.equal_shares import with_equal_shares
from topo_ar.planning.lowering import lower
from topo_ar.planning.plan import Family
from topo_ar.planning.planner import plan
from topo_ar.planning.runtime import CPU_RUNTIME, Runtime
from topo_ar.simulation.collective import Simulated, simulate
from topo_ar.telemetry.metrics import speedup_interval
from topo_ar.telemetry.records import Record, RecordWriter, manifest, read_records
from topo_ar.topology.levels import levels
from topo_ar.topology.model import (
    Device,
    DeviceKind,
    Figure,
    Link,
    LinkKind,
    Source,
    Topology,
    validate,
)

CALIBRATED_ON = ("large", "one-node", "sweep")
_MIB = 1 << 20
_GBIT = 125e6
_BUSY = 0.9
_MEDIAN, _P95, _FACTOR = 0.07, 0.20, 2.0


@dataclass(frozen=True, slots=True)
class Host:
    """What is fitted: seconds and bytes/s of shared memory, seconds of a chunk and of gloo's hops.

    A hop of gloo's ring waits for a process to be woken, for at least `wait_seconds`; while bytes
    flow for longer than that, it adds `hop_seconds`.
    """

    shm_seconds: float = 1e-5
    shm_bytes_per_s: float = 1.4e9
    chunk_seconds: float = 5e-5
    hop_seconds: float = 1e-4
    wait_seconds: float = 0.0

    @property
    def runtime(self) -> Runtime:
        """The runtime on such a host."""
        return replace(
            CPU_RUNTIME, chunk_seconds=self.chunk_seconds, flat_hop_seconds=self.hop_seconds
        )


def run_of(path: Path) -> str:
    """Return the name of the run in a file."""
    return path.stem.removeprefix("wire_")


def read(folder: Path) -> Iterator[tuple[str, Record]]:
    """Yield the rows of our own candidates and of gloo, with the name of their run.

    Raises
    ------
    ConfigError
        If the folder holds no such rows.
    """
    found = False
    for path in (*sorted(folder.glob("wire_*.jsonl")), folder / "allreduce_size.jsonl"):
        if path.name.endswith((".predictions.jsonl", ".quick.jsonl")) or not path.exists():
            continue
        for row in read_records(path):
            if row.get("family") in set(Family) and "links" in row["manifest"]:
                found = True
                yield run_of(path), row
    if not found:
        raise ConfigError(
            f"{folder} holds no rows of `topo-ar bench`; measure some with "
            "`python -m experiments.02_limits --out FOLDER`"
        )


def topology_of(row: Record, host: Host) -> Topology:
    """Return the emulated hosts that a row was measured on."""
    links_of = row["manifest"]["links"]
    share = payload_fraction(links_of["mtu"])
    devices, links = [Device("fabric", DeviceKind.SWITCH)], []
    seats: dict[int, str] = {}

    def figure(value: float) -> Figure:
        return Figure(value, Source.FILE)

    for i, (ranks, nics) in enumerate(zip(links_of["ranks"], links_of["nics"], strict=True)):
        node = f"node{i}"
        devices.append(Device(f"{node}/host", DeviceKind.HOST, node))
        for k, rank in enumerate(ranks):
            seats[rank] = f"{node}/cpu{k}"
            devices.append(Device(seats[rank], DeviceKind.CPU, node))
            links.append(
                Link(
                    seats[rank],
                    f"{node}/host",
                    LinkKind.SHM,
                    nominal=figure(25.6e9),
                    effective=figure(host.shm_bytes_per_s),
                    latency=figure(host.shm_seconds / 2),
                )
            )
        for k, rate in enumerate(nics):
            nic = f"{node}/nic{k}"
            devices.append(Device(nic, DeviceKind.NIC, node))
            links.append(Link(nic, f"{node}/host", LinkKind.PCIE))
            links.append(
                Link(
                    nic,
                    "fabric",
                    LinkKind.ETHERNET,
                    nominal=figure(rate),
                    effective=figure(rate * share),
                    latency=figure(links_of["latency"] + 2.5e-5),
                )
            )
    return validate(
        Topology(
            "emulated hosts",
            tuple(devices),
            tuple(links),
            tuple(seats[rank] for rank in range(len(seats))),
        )
    )


def predict(row: Record, host: Host) -> float:
    """Return the simulated seconds of what a row measured."""
    topology = topology_of(row, host)
    known = levels(topology)
    family = Family(row["family"])
    made = plan(known, row["nbytes"], family=family, runtime=CPU_RUNTIME)
    if row["candidate"] == "plan:equal":
        made = with_equal_shares(made, known, CPU_RUNTIME)
    found = simulate(lower(made, row["nbytes"] // 4, 4), topology, runtime=host.runtime)
    seconds = with_credit(found, row["manifest"]["links"])
    hops = 2 * (row["world_size"] - 1)
    return max(seconds, hops * host.wait_seconds if family is Family.FLAT_RING else 0)


def with_credit(found: Simulated, links_of: Record) -> float:
    """Return the seconds of one of many calls made back to back over token buckets, as rows are.

    While nothing is sent a bucket saves up what its NIC could have sent, at most its burst, and the
    next call sends that at once. A call still takes what the busiest NIC needs for its bytes.
    """
    wires = [use for use in found.links if use.between_nodes and use.busy]
    if not wires:
        return found.seconds
    busiest = max(wires, key=lambda use: use.busy)
    needed = busiest.busy * found.seconds
    payload: float = links_of["burst"] * payload_fraction(links_of["mtu"])
    saved = needed * min(1.0, payload / busiest.nbytes)
    return max(needed, found.seconds - saved)


def cpu_share(row: Record) -> float:
    """Return the share of the cores that was busy."""
    if row.get("machine_cpu_share") is not None:
        return float(row["machine_cpu_share"])
    cores = row["manifest"]["cpu_count"]
    return float(row["cpu_seconds"] * row["world_size"] / (row["median_seconds"] * cores))


def in_scope(row: Record) -> bool:
    """Return whether a target holds for a row: slow NICs, and cores that are not the limit."""
    rates = [rate for nics in row["manifest"]["links"]["nics"] for rate in nics]
    return max(rates) <= _GBIT and cpu_share(row) < _BUSY


def calibrate(rows: Sequence[Record]) -> Host:
    """Return the host that fits rows best, in the logarithms of their times.

    The least time of a hop is that of gloo's rows below 1 MiB, everything else of all other rows.
    """
    from scipy.optimize import least_squares

    waits = [
        row["median_seconds"] / 2 / (row["world_size"] - 1)
        for row in rows
        if row["nbytes"] < _MIB and row["family"] == Family.FLAT_RING
    ]
    rows = [row for row in rows if row["nbytes"] >= _MIB or row["family"] != Family.FLAT_RING]
    start = Host()
    first = [
        log(value)
        for value in (
            start.shm_seconds,
            start.shm_bytes_per_s,
            start.chunk_seconds,
            start.hop_seconds,
        )
    ]

    def errors(values: Sequence[float]) -> list[float]:
        host = Host(*map(exp, values))
        return [log(predict(row, host) / row["median_seconds"]) for row in rows]

    found = least_squares(errors, first, loss="soft_l1", f_scale=0.05, max_nfev=60, diff_step=0.05)
    return replace(Host(*map(exp, found.x)), wait_seconds=median(waits) if waits else 0.0)


def run(folder: Path, out: Path) -> int:
    """Calibrate, predict, write and print; return 1 when a target is missed."""
    rows = list(read(folder))
    fitted_on = [row for name, row in rows if name in CALIBRATED_ON and in_scope(row)]
    if not any(row["nbytes"] >= _MIB for row in fitted_on):
        raise ConfigError(
            f"{folder} lacks the runs {' and '.join(CALIBRATED_ON)}, which the rest is predicted "
            "from; measure them with experiments.02_limits"
        )
    host = calibrate(fitted_on)
    print(
        f"fitted to {len(fitted_on)} rows: shared memory {host.shm_seconds * 1e6:.0f} us and "
        f"{host.shm_bytes_per_s / 1e9:.2f} GB/s, chunk {host.chunk_seconds * 1e6:.0f} us, "
        f"hop of gloo {host.hop_seconds * 1e6:.0f} us, at least {host.wait_seconds * 1e6:.0f} us"
    )
    path = out / "predicted_measured.jsonl"
    path.unlink(missing_ok=True)
    scored = []
    about = manifest()
    with RecordWriter(path) as writer:
        for name, row in rows:
            made = _row(name, row, host)
            writer.write({**made, "manifest": about})
            scored.append(made)
    print_rows(scored)
    verdicts = list(judge(scored))
    with RecordWriter(path) as writer:
        for verdict in verdicts:
            writer.write(verdict)
    print(f"written: {path}")
    return int(not all(verdict["passed"] for verdict in verdicts))


def _row(name: str, row: Record, host: Host) -> Record:
    seconds = predict(row, host)
    samples = row["seconds"]
    interval = speedup_interval(samples, [seconds] * len(samples))
    return {
        "experiment": "predicted_measured",
        "run": name,
        "candidate": row["candidate"],
        "family": row["family"],
        "nbytes": row["nbytes"],
        "world_size": row["world_size"],
        "hosts": row["hosts"],
        "seconds": samples,
        "median_seconds": row["median_seconds"],
        "low_seconds": interval.low * seconds,
        "high_seconds": interval.high * seconds,
        "predicted_seconds": seconds,
        "error": seconds / row["median_seconds"] - 1,
        "cpu_share": cpu_share(row),
        "calibrated": name in CALIBRATED_ON,
        "in_scope": in_scope(row),
        "measured_commit": row["manifest"]["commit"],
    }


def judge(rows: Sequence[Record]) -> Iterator[Record]:
    """Yield a record for each target: what was asked, what came out, of how many rows."""
    judged = [row for row in rows if row["in_scope"] and not row["calibrated"]]
    large = [abs(row["error"]) for row in judged if row["nbytes"] >= _MIB]
    small = [
        max(1 + row["error"], 1 / (1 + row["error"])) for row in judged if row["nbytes"] < _MIB
    ]
    for what, found, limit in (
        ("median error from 1 MiB", median(large) if large else None, _MEDIAN),
        ("95th percentile of errors from 1 MiB", _percentile(large), _P95),
        ("largest factor below 1 MiB", max(small, default=None), _FACTOR),
    ):
        yield {
            "experiment": "predicted_measured",
            "target": what,
            "limit": limit,
            "value": found,
            "num_rows": len(small if "factor" in what else large),
            "passed": found is not None and found <= limit,
        }


def _percentile(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    return quantiles(values, n=20, method="inclusive")[-1]


def print_rows(rows: Sequence[Record]) -> None:
    """Print every prediction, and what the targets say."""
    print(
        f"{'run':15} {'candidate':28} {'size':>10} {'measured ms':>12} "
        f"{'95 % interval':>19} {'predicted':>10} {'error':>8}"
    )
    for row in rows:
        marks = ("fitted " if row["calibrated"] else "") + (
            "" if row["in_scope"] else "out of scope"
        )
        line = (
            f"{row['run']:15} {row['candidate']:28} {row['nbytes']:>10} "
            f"{row['median_seconds'] * 1e3:>12.2f} "
            f"[{row['low_seconds'] * 1e3:8.2f}, {row['high_seconds'] * 1e3:7.2f}] "
            f"{row['predicted_seconds'] * 1e3:>10.2f} {row['error']:>+8.1%} {marks}"
        )
        print(line.rstrip())
    for verdict in judge(rows):
        value = "none" if verdict["value"] is None else f"{verdict['value']:.3f}"
        print(
            f"{verdict['target']}: {value} of {verdict['num_rows']} rows, limit "
            f"{verdict['limit']:g}: {'PASS' if verdict['passed'] else 'MISS'}"
        )


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="results of 01_allreduce_size and 02_limits")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    return exit_code_of(lambda: run(options.folder, options.out))


if __name__ == "__main__":
    sys.exit(main())
