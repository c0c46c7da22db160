"""``topo-ar emulate``: a command on every rank of a cluster of real hosts on this machine."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from topo_ar.errors import ConfigError

if TYPE_CHECKING:
    from topo_ar.emulation.check import EmulationReport
    from topo_ar.emulation.launch import Results
    from topo_ar.emulation.spec import ClusterSpec

_INTERRUPTED = 130


def emulate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SPEC] -- COMMAND...",
            help="A cluster spec (TOML; none with --grid) and the command; without one the links "
            "are checked and that is all.",
        ),
    ] = None,
    grid: Annotated[
        str | None, typer.Option("--grid", help="Equal nodes instead of a spec: NODESxRANKS.")
    ] = None,
    nic: Annotated[
        str | None, typer.Option("--nic", help="Each node's NICs with --grid (default 1gbit).")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the commands as a script; needs no rights.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Check the links' rates before the command.")
    ] = True,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0, help="Seconds for the command; then 124.")
    ] = None,
    grace: Annotated[
        float, typer.Option("--grace", min=0, help="Seconds to report once a rank has failed.")
    ] = 10.0,
    prefix: Annotated[
        bool, typer.Option("--prefix", help="Begin each line of output with its rank.")
    ] = False,
    keep: Annotated[
        list[Path] | None,
        typer.Option("--keep", help="A path below /tmp that the hosts shall see (repeatable)."),
    ] = None,
    loopback: Annotated[
        bool, typer.Option("--loopback", help="No hosts: plain processes, nothing shaped.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the check and the exit codes to a file.")
    ] = None,
) -> None:
    """Run a command on every rank of emulated hosts, with torchrun's environment.

    Exits with the worst code of the ranks. The hosts end with this command, however it ends.

    Example: topo-ar emulate --grid 2x4 --nic 1gbit -- python train.py
    """
    from topo_ar.emulation.check import report
    from topo_ar.emulation.keep import command_paths
    from topo_ar.emulation.launch import launch
    from topo_ar.emulation.loopback import open_cluster

    spec, command = _read_words(words or [], grid, nic)
    if dry_run:
        print(_script(spec, [*(keep or []), *command_paths(command)]), end="")
        return
    try:
        kept = [*(keep or []), *command_paths(command)]
        with open_cluster(spec, keep=kept, loopback=loopback) as cluster:
            checked = report(cluster, measure=check)
            _say(checked)
            results = None
            if command:
                show = _print_line if prefix else None
                results = launch(cluster, command, timeout_s=timeout, grace_s=grace, on_line=show)
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    if json_file is not None:
        _write(json_file, checked, results)
    if results is not None:
        raise typer.Exit(results.exit_code)


def _read_words(
    words: list[str], grid: str | None, nic: str | None
) -> tuple["ClusterSpec", list[str]]:
    from topo_ar.emulation.spec import ClusterSpec, parse_grid, read_spec

    if grid is not None:
        nodes, ranks = parse_grid(grid)
        return ClusterSpec.uniform(nodes, ranks, (nic or "1gbit").split(",")), words
    if not words:
        raise ConfigError("no cluster is given; name a spec file, or write --grid 2x4")
    if nic is not None:
        raise ConfigError(f"--nic {nic} goes with --grid; in a spec every node lists its nics")
    return read_spec(words[0]), words[1:]


def _script(spec: "ClusterSpec", keep: list[Path]) -> str:
    from topo_ar.emulation.keep import kept_paths
    from topo_ar.emulation.layout import lay_out
    from topo_ar.emulation.steps import build_steps, shell_script

    steps = build_steps(spec, lay_out(spec), keep=kept_paths(keep), python=sys.executable)
    return shell_script(steps, rootless=os.geteuid() != 0)


def _say(report: "EmulationReport") -> None:
    """One line on stderr: stdout belongs to the command."""
    from topo_ar.units import format_rate, format_seconds

    ranks = sum(len(host) for host in report.ranks)
    lines = [f"{len(report.ranks)} hosts, {ranks} ranks"]
    if not report.emulated:
        lines[0] += f", NOT emulated: all on the loopback device, unshaped ({report.reason})"
    for pair in report.pairs:
        lines.append(
            f"{pair.a} - {pair.b} {pair.nic}: {format_rate(pair.forward)} and "
            f"{format_rate(pair.backward)} of {format_rate(pair.expected)} payload, round trip "
            f"{format_seconds(pair.round_trip)}, {pair.congestion_control}"
            f"{'' if pair.held else ', NOT HELD'}"
        )
    for line in lines:
        print(f"topo-ar emulate: {line}", file=sys.stderr)


def _print_line(rank: int, line: bytes) -> None:
    sys.stdout.buffer.write(
        b"[rank %d] %s" % (rank, line if line.endswith(b"\n") else line + b"\n")
    )
    sys.stdout.buffer.flush()


def _write(path: Path, report: "EmulationReport", results: "Results | None") -> None:
    import msgspec

    content: dict[str, object] = {"emulation": report}
    if results is not None:
        content |= {
            "returncodes": results.returncodes,
            "stopped": sorted(results.stopped),
            "timed_out": results.timed_out,
            "seconds": results.seconds,
            "exit_code": results.exit_code,
        }
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
