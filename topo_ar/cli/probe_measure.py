"""``topo-ar probe --measure``: what the ranks of a job measure of their network."""

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topo_ar.errors import ConfigError, ExecutionError
from topo_ar.units import format_rate, format_seconds

if TYPE_CHECKING:
    from topo_ar.topology.model import Topology
    from topo_ar.topology.pair_times import Measurement

_JOB_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MEETING_S = 60.0


def measure_job(
    budget_s: float,
    output: Path | None,
    times: Path | None,
    against: str | None,
    *,
    as_json: bool,
) -> None:
    """Measure as one rank of a job; rank 0 prints and writes.

    Raises
    ------
    ConfigError
        If this process is no rank of a job, or a file cannot be written.
    ExecutionError
        If the ranks do not meet, or one is lost on the way.
    """
    missing = [name for name in _JOB_VARIABLES if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"--measure needs a job, and the environment lacks {', '.join(missing)}; start it on "
            "every rank: "
            "torchrun --nproc-per-node 4 --no-python topo-ar probe --measure, or topo-ar emulate "
            "SPEC -- topo-ar probe --measure"
        )
    import torch
    import torch.distributed as dist

    from topo_ar.cli.topology_source import load_topology
    from topo_ar.execution.bootstrap import Bootstrap
    from topo_ar.execution.gather import Channel
    from topo_ar.execution.pingpong import measure_pairs

    declared = None if against is None else load_topology(against)
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=_MEETING_S))
    except (RuntimeError, ValueError) as error:
        raise ExecutionError(f"the ranks of the job did not meet: {error}") from None
    try:
        channel = Channel(Bootstrap(None), _MEETING_S)
        first = channel.rank == 0
        measurement = measure_pairs(channel, budget_s, _say if first else None)
        channel.close()
    finally:
        dist.destroy_process_group()
    if first:
        _report(measurement, declared, output, times, as_json=as_json)


def _say(phase: str, done: int, total: int) -> None:
    """Show progress on stderr: in place at a terminal, else one line a phase."""
    if sys.stderr.isatty():
        print(f"\rtopo-ar probe: {phase}, round {done + 1} of {total}  ", end="", file=sys.stderr)
    elif done == 0:
        print(f"topo-ar probe: {phase}, {total} rounds", file=sys.stderr, flush=True)


def _report(
    measurement: "Measurement",
    declared: "Topology | None",
    output: Path | None,
    times: Path | None,
    *,
    as_json: bool,
) -> None:
    import msgspec

    from topo_ar.topology.measured import disagreements, findings, measured_topology
    from topo_ar.topology.model import to_json
    from topo_ar.topology.pair_times import measurement_to_json

    topology = measured_topology(measurement)
    against = () if declared is None else disagreements(measurement, declared)
    if output is not None:
        _write(output, to_json(topology))
    if times is not None:
        _write(times, measurement_to_json(measurement))
    if as_json:
        content: dict[str, Any] = {
            "measurement": measurement,
            "topology": topology,
            "findings": findings(measurement),
            "disagreements": against,
        }
        print(msgspec.json.encode(content).decode())
        return
    if sys.stderr.isatty():
        print(file=sys.stderr)
    _print_hosts(measurement)
    for sentence in (*findings(measurement), *measurement.notes, *against):
        print(f"- {sentence}")
    for path in (output, times):
        if path is not None:
            print(f"wrote {path}")


def _print_hosts(measurement: "Measurement") -> None:
    from topo_ar.topology.clustering import nic_rates

    print(f"{len(measurement.groups)} hosts, {measurement.ranks.size} ranks, as measured")
    for host, (ranks, rates) in enumerate(
        zip(measurement.groups, nic_rates(measurement.hosts), strict=True)
    ):
        out, into = ("-" if rate is None else format_rate(rate) for rate in rates)
        latencies = [
            value
            for other, value in enumerate(measurement.hosts.latency[host])
            if value is not None and other != host
        ]
        nearest = format_seconds(min(latencies)) if latencies else "-"
        print(
            f"  node{host}  ranks {', '.join(map(str, ranks))}  sends {out}, receives {into}, "
            f"latency {nearest}"
        )


def _write(path: Path, text: bytes) -> None:
    try:
        path.write_bytes(text + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
