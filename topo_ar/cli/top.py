"""``topo-ar top``: what a running job says of itself, live."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from topo_ar.telemetry.job_windows import JobStart, Window

_MOST_ROWS = 16


def top(
    path: Annotated[
        Path, typer.Argument(help="The directory or .jsonl file of attach(..., telemetry=...).")
    ],
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the last record as JSON and end.")
    ] = False,
    seconds: Annotated[
        float, typer.Option("--seconds", "-n", min=0.1, help="How often to look.")
    ] = 1.0,
) -> None:
    """Show a running job: steps, exposed communication, buckets, who waits for whom, incidents.

    Reads the records that a job writes with topo_ar.attach(ddp, telemetry=PATH), and follows them
    until Ctrl-C. Exits with 2 when nothing is there, or no window is complete yet with --once.

    Example: topo-ar top runs/job

    Example: topo-ar top runs/job --once
    """
    from topo_ar.errors import ConfigError
    from topo_ar.telemetry.job_windows import records_in

    found = records_in(path)
    if once or as_json:
        start, window = _last(found)
        if window is None:
            raise ConfigError(f"{found} has no complete window yet; look again in a few seconds")
        _print(start, window, found, as_json=as_json)
        return
    _follow(found, seconds)


def _last(found: Path) -> "tuple[JobStart | None, Window | None]":
    from topo_ar.telemetry.job_windows import read_last

    start, window = read_last(found)
    before = found.with_suffix(f".1{found.suffix}")
    if window is None and before.is_file():  # the file has just been begun anew
        window = read_last(before)[1]
    return start, window


def _print(start: "JobStart | None", window: "Window", found: Path, *, as_json: bool) -> None:
    import msgspec
    from rich.console import Console

    if as_json:
        print(msgspec.json.encode(window).decode())
    else:
        Console().print(frame(start, window, found.parent))


def _follow(found: Path, seconds: float) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(Text(f"waiting for the first window of {found}"), screen=False) as live:
        while True:
            start, window = _last(found)
            if window is not None:
                live.update(frame(start, window, found.parent))
            time.sleep(seconds)


def frame(start: "JobStart | None", window: "Window", directory: Path) -> Any:
    """Return what is shown of a window, for rich to print."""
    from rich.console import Group

    parts = [_head(start, window), _buckets(window), _ranks(start, window)]
    parts += [_notes(window, directory)]
    return Group(*parts)


def _head(start: "JobStart | None", window: "Window") -> Any:
    from rich.text import Text

    from topo_ar.units import format_seconds, format_size

    nodes = start.nodes if start is not None else ()
    where = f"{sum(map(len, nodes))} ranks on {len(nodes)} nodes" if nodes else "ranks unknown"
    age = max(0.0, time.time() - window.unix_seconds)
    sent = (
        ""
        if window.nbytes_sent_between is None
        else f" ({format_size(window.nbytes_sent_between)} counted)"
    )
    lines = [
        f"{where}, steps {window.first_step} - {window.last_step}, {age:.0f} s ago",
        f"step {format_seconds(window.step_seconds)} "
        f"(longest {format_seconds(window.step_seconds_max)}), "
        f"exposed {window.exposed_share:.1%}, {window.path}",
        f"a step sends {format_size(window.nbytes_inside)} inside nodes and "
        f"{format_size(window.nbytes_between)} between them{sent}",
    ]
    if window.compression:
        lines.append(f"compression: {window.compression}")
    if window.device != "cpu":
        lines.append(f"{window.device}: times are those at which work was enqueued")
    return Text("\n".join(lines))


def _buckets(window: "Window") -> Any:
    from rich.table import Table

    from topo_ar.units import format_rate, format_seconds, format_size

    table = Table(box=None, pad_edge=False)
    for name in ("bucket", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("path", overflow="fold")
    for name in ("queue", "wait", "transfer", "predicted", "off by", "busbw", "last"):
        table.add_column(name, justify="right", no_wrap=True)
    for bucket in window.buckets[:_MOST_ROWS]:
        predicted, transfer = bucket.predicted_seconds, bucket.transfer_seconds
        table.add_row(
            str(bucket.index),
            format_size(bucket.nbytes),
            bucket.path,
            format_seconds(bucket.queue_seconds),
            format_seconds(bucket.wait_seconds),
            format_seconds(transfer),
            "-" if predicted is None else format_seconds(predicted),
            "-" if not predicted else f"{transfer / predicted - 1:+.0%}",
            format_rate(bucket.busbw),
            "-" if bucket.last_rank is None else f"{bucket.last_rank} ({bucket.last_share:.0%})",
        )
    if len(window.buckets) > _MOST_ROWS:
        table.add_row("...", f"{len(window.buckets) - _MOST_ROWS} more")
    return table


def _ranks(start: "JobStart | None", window: "Window") -> Any:
    """Show the ranks that are waited for most; of few ranks, all."""
    from rich.table import Table

    from topo_ar.units import format_seconds

    nodes = start.nodes if start is not None else ()
    node_of = {rank: i for i, node in enumerate(nodes) for rank in node}
    ranks = window.ranks
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "node", "computes", "waits", "late", "last in"):
        table.add_column(name, justify="right", no_wrap=True)
    order = range(len(ranks.compute_seconds))
    shown = sorted(order, key=lambda rank: -ranks.late_seconds[rank])[:_MOST_ROWS]
    for rank in sorted(shown):
        table.add_row(
            str(rank),
            str(node_of.get(rank, "-")),
            format_seconds(ranks.compute_seconds[rank]),
            format_seconds(ranks.wait_seconds[rank]),
            format_seconds(ranks.late_seconds[rank]),
            f"{ranks.last_share[rank]:.0%}",
        )
    if len(order) > _MOST_ROWS:
        table.add_row("...", f"{len(order) - _MOST_ROWS} more, less late")
    return table


def _notes(window: "Window", directory: Path) -> Any:
    from rich.text import Text

    from topo_ar.units import format_seconds

    lines = [f"{cause.about}: {cause.text}" for cause in window.causes]
    lines.append(
        f"fallbacks {window.fallbacks}, planned anew {window.replans}, incidents "
        f"{window.incidents}; telemetry itself takes {window.own_share:.2%} of a step and "
        f"{format_seconds(window.own_seconds_per_bucket)} a bucket"
    )
    lines += [f"incident: {each}" for each in sorted(directory.glob("incident-*.json"))[-3:]]
    return Text("\n".join(lines))
