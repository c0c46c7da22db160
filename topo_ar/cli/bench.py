"""``topo-ar bench``: all-reduce times as nccl-tests prints them, with limit, share and prediction.

Under torchrun (or any launcher that sets RANK) each rank runs the measurement and rank 0 prints.
With ``--emulate`` the command builds the hosts, starts `bench_worker` on every rank, and prints
what rank 0 reports.
"""

import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from topo_ar.cli.bench_events import EventReader
from topo_ar.cli.bench_peers import OPENMPI, Peers, require_peers
from topo_ar.cli.bench_worker import CONFIG_ENV
from topo_ar.errors import ConfigError
from topo_ar.units import parse_size

if TYPE_CHECKING:
    from topo_ar.cli.bench_report import Report
    from topo_ar.emulation.spec import ClusterSpec

_MAX_SIZES = 64


def bench(
    min_bytes: Annotated[
        str | None,
        typer.Option("-b", "--minbytes", help="Smallest size (64K is binary; default 4K)."),
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option("-e", "--maxbytes", help="Largest size (default 64M).")
    ] = None,
    factor: Annotated[int, typer.Option("-f", "--stepfactor", help="Factor of sizes.")] = 4,
    sizes: Annotated[
        str | None,
        typer.Option(
            "-s",
            "--sizes",
            help="Exact sizes, such as 25MB,100MB (decimal): alone, or on top of -b to -e.",
        ),
    ] = None,
    iterations: Annotated[int, typer.Option("-n", "--iters", help="Timed samples.")] = 20,
    warmup: Annotated[int, typer.Option("-w", "--warmup_iters", help="Untimed calls.")] = 1,
    check: Annotated[int, typer.Option("-c", "--check", help="1: check results, 0: do not.")] = 1,
    dtype: Annotated[
        str, typer.Option("-d", "--datatype", help="float32, float64, float16, bfloat16, int32 ...")
    ] = "float32",
    op: Annotated[str, typer.Option("-o", "--op", help="sum or avg.")] = "sum",
    plan: Annotated[str, typer.Option("--plan", help="auto, flat or hierarchical.")] = "auto",
    against: Annotated[
        str,
        typer.Option(
            "--against",
            help="Beside gloo, separated by commas: plan:equal (equal shares), plan:zero-copy "
            "(buffers in shared memory), plan:no-shared-memory (every rank a node), plan:FAMILY, "
            "openmpi, openmpi-han (these need --emulate, Open MPI 4 and the extra mpi).",
        ),
    ] = "gloo",
    emulate: Annotated[
        str | None,
        typer.Option("--emulate", help="A grid such as 2x4 or a cluster spec (TOML)."),
    ] = None,
    nic: Annotated[
        str, typer.Option("--nic", help="NICs of each host of a grid, such as 1gbit.")
    ] = "1gbit",
    json_file: Annotated[
        str | None,
        typer.Option("--json", help="Write rows as JSON lines to this file; - for stdout alone."),
    ] = None,
    min_fraction: Annotated[
        float | None,
        typer.Option("--min-fraction", help="Exit with 1 when a plan row is below this share."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Write a Perfetto trace of one planned all-reduce here."),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds a collective may stand still.")
    ] = 120.0,
) -> None:
    """Time planned against flat all-reduce, interleaved, with checked results.

    busbw is nccl-tests' figure (algbw x 2(n-1)/n); it is not the rate of a NIC.

    Example: topo-ar bench --emulate 2x4 --nic 1gbit -s 25MB -n 20 --json rows.jsonl

    Example: torchrun --nproc-per-node 4 -m topo_ar bench -b 1M -e 64M
    """
    from topo_ar.cli.bench_report import Report

    config: dict[str, Any] = {
        "sizes": _sizes(min_bytes, max_bytes, factor, sizes, dtype),
        "iterations": _at_least("-n", iterations, 1),
        "warmup": _at_least("-w", warmup, 0),
        "check": bool(check),
        "dtype": dtype,
        "op": op,
        "against": _peers(against),
        "plan": plan,
        "timeout_s": timeout_s,
        "trace_nbytes": None,
    }
    if trace is not None:
        config["trace_nbytes"] = max(config["sizes"])
    if not timeout_s > 0:
        raise ConfigError(f"--timeout {timeout_s:g} must be above 0 seconds")
    if plan not in ("auto", "flat", "hierarchical"):
        raise ConfigError(f"--plan {plan!r} is not auto, flat or hierarchical")
    if op not in ("sum", "avg"):
        raise ConfigError(f"-o {op!r} is not sum or avg")
    if op == "avg" and dtype in ("int32", "int64"):
        raise ConfigError(f"-o avg of {dtype} is not defined; use -o sum or a floating-point -d")
    if emulate is None:
        require_peers(config["against"], dtype, emulated=False)
        _in_job(config, json_file, trace, min_fraction)
        return
    spec = cluster_spec(emulate, nic)
    require_peers(config["against"], dtype, emulated=True)
    with Report(json_file, trace) as report:
        run_emulated(config, spec, report)
    raise typer.Exit(report.exit_code(min_fraction))


def cluster_spec(emulate: str, nic: str) -> "ClusterSpec":
    """Return the cluster of a grid such as ``2x4`` or of a TOML file."""
    from topo_ar.emulation.spec import ClusterSpec, parse_grid, read_spec

    if Path(emulate).is_file() or emulate.endswith(".toml"):
        return read_spec(emulate)
    nodes, ranks = parse_grid(emulate)
    return ClusterSpec.uniform(nodes, ranks, nic.split(","))


def _sizes(
    min_bytes: str | None, max_bytes: str | None, factor: int, sizes: str | None, dtype: str
) -> list[int]:
    itemsize = _itemsize(dtype)
    exact = [] if sizes is None else [parse_size(text) for text in sizes.split(",")]
    steps = []
    if sizes is None or min_bytes is not None or max_bytes is not None:
        steps = _steps(min_bytes or "4K", max_bytes or "64M", factor)
    chosen = sorted({*exact, *steps})
    if len(chosen) > _MAX_SIZES:
        raise ConfigError(f"{len(chosen)} sizes are too many; at most {_MAX_SIZES}")
    for nbytes in chosen:
        if nbytes % itemsize:
            raise ConfigError(f"{nbytes} bytes are not a whole number of {dtype} elements")
    return chosen


def _steps(min_bytes: str, max_bytes: str, factor: int) -> list[int]:
    low, high = parse_size(min_bytes), parse_size(max_bytes)
    if low < 1 or high < low:
        raise ConfigError(f"-b {min_bytes} must be positive and not above -e {max_bytes}")
    steps = [low]
    while steps[-1] * _at_least("-f", factor, 2) <= high:
        steps.append(steps[-1] * factor)
    return steps


def _itemsize(dtype: str) -> int:
    sizes = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2}
    if dtype not in sizes:
        raise ConfigError(f"-d {dtype!r} is not one of {', '.join(sizes)}")
    return sizes[dtype]


def _at_least(flag: str, value: int, least: int) -> int:
    if value < least:
        raise ConfigError(f"{flag} {value} must be at least {least}")
    return value


def _peers(text: str) -> list[str]:
    known: tuple[str, ...] = ("gloo", *OPENMPI)
    peers = [peer for peer in text.split(",") if peer]
    if any(peer.startswith("plan:") for peer in peers):
        from topo_ar.execution.benchmark import SEPARATE, ZERO_COPY
        from topo_ar.execution.plans import MODES

        known += (*(f"plan:{mode}" for mode in MODES), ZERO_COPY, SEPARATE)
    for peer in peers:
        if peer not in known:
            raise ConfigError(f"--against {peer!r} is not one of {', '.join(known)}")
    return list(dict.fromkeys(["gloo", *peers]))


def _in_job(
    config: dict[str, Any], json_file: str | None, trace: Path | None, min_fraction: float | None
) -> None:
    from topo_ar.cli.bench_report import Report
    from topo_ar.cli.bench_worker import measure

    if "RANK" not in os.environ:
        raise ConfigError(
            "bench needs ranks: start it with torchrun, or pass --emulate 2x4 --nic 1gbit"
        )
    if os.environ["RANK"] != "0":
        measure(config, lambda event, data: None)
        return
    with Report(json_file, trace) as report:
        report.begin()
        measure(config, report.event)
    raise typer.Exit(report.exit_code(min_fraction))


def run_emulated(config: dict[str, Any], spec: "ClusterSpec", report: "Report") -> None:
    """Build the hosts of `spec`, measure what `config` says on them, and fill `report`.

    Raises
    ------
    ConfigError
        If a library to measure against is not installed.
    """
    from topo_ar.emulation.check import report as check_links
    from topo_ar.emulation.launch import start
    from topo_ar.emulation.loopback import open_cluster

    against = config.get("against", ())
    openmpi = require_peers(against, config.get("dtype", "float32"), emulated=True)
    with open_cluster(spec) as cluster:
        links = check_links(cluster)
        report.begin(links, openmpi=openmpi)
        with Peers(cluster, against) as peers:
            config = {
                **config,
                "burst_nbytes": links.burst if links.emulated else None,
                "peers": peers.places,
            }
            readers: dict[int, EventReader] = defaultdict(
                lambda: EventReader(report.event, sys.stderr.write)
            )
            job = start(
                cluster,
                [sys.executable, "-m", "topo_ar.cli.bench_worker"],
                env={CONFIG_ENV: msgspec.json.encode(config).decode()},
                on_line=lambda rank, line: readers[rank].feed(line),
            )
            results = job.wait()
        for name in report.lost:
            for line in peers.last_words(name):
                print(f"mpirun ({name}): {line}", file=sys.stderr)
    report.ranks_ended(results.exit_code)
