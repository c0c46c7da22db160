"""Spans of time on ranks, and their file for Perfetto (https://ui.perfetto.dev)."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topo_ar.errors import ConfigError

Argument = str | int | float | bool | None
_MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class Span:
    """Something a rank did from `begin_seconds` to `end_seconds`, on a clock all spans share.

    `lane` groups what cannot happen at once, such as ``intra`` or ``inter``.
    """

    name: str
    rank: int
    lane: str
    begin_seconds: float
    end_seconds: float
    args: dict[str, Argument] = field(default_factory=dict)


def write_trace(spans: Iterable[Span], path: str | os.PathLike[str]) -> None:
    """Write `spans` as a trace that Perfetto and Chrome open: ranks as processes, lanes as threads.

    Time 0 is the earliest begin. Format: "Trace Event Format", complete events (``X``) in
    microseconds.

    Raises
    ------
    ConfigError
        If there are no spans, one ends before it begins, or `path` cannot be written.
    """
    spans = sorted(spans, key=lambda span: (span.rank, span.begin_seconds))
    if not spans:
        raise ConfigError("a trace needs at least one span; was anything recorded?")
    for span in spans:
        if not span.begin_seconds <= span.end_seconds:
            raise ConfigError(
                f"span {span.name!r} of rank {span.rank} ends at {span.end_seconds} s, "
                f"before it begins at {span.begin_seconds} s"
            )
    lanes = {lane: index for index, lane in enumerate(dict.fromkeys(s.lane for s in spans))}
    origin = min(span.begin_seconds for span in spans)
    events = [label for rank in sorted({s.rank for s in spans}) for label in _process(rank)]
    threads = sorted({(span.rank, lanes[span.lane], span.lane) for span in spans})
    events += [label for rank, index, lane in threads for label in _thread(rank, index, lane)]
    events += [_event(span, lanes[span.lane], origin) for span in spans]
    document = {"traceEvents": events, "displayTimeUnit": "ms"}
    try:
        Path(path).write_text(json.dumps(document, allow_nan=False) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write a trace to {path}: {error.strerror}") from error


def read_trace(path: str | os.PathLike[str]) -> list[Span]:
    """Return the spans of a file that :func:`write_trace` made, by rank and begin.

    Raises
    ------
    ConfigError
        If the file cannot be read or is not such a trace.
    """
    try:
        events = json.loads(Path(path).read_bytes())["traceEvents"]
        return [_span(event) for event in events if event["ph"] == "X"]
    except OSError as error:
        raise ConfigError(f"cannot read a trace from {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a trace of topo-ar: {error!r}") from error


def _event(span: Span, lane: int, origin: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.lane,
        "pid": span.rank,
        "tid": lane,
        "ts": round((span.begin_seconds - origin) * _MICROSECONDS, 3),
        "dur": round((span.end_seconds - span.begin_seconds) * _MICROSECONDS, 3),
        "args": span.args,
    }


def _span(event: dict[str, Any]) -> Span:
    begin, end = event["ts"] / _MICROSECONDS, (event["ts"] + event["dur"]) / _MICROSECONDS
    return Span(event["name"], event["pid"], event["cat"], begin, end, event["args"])


def _process(rank: int) -> list[dict[str, Any]]:
    place = {"ph": "M", "pid": rank, "tid": 0}
    return [
        {**place, "name": "process_name", "args": {"name": f"rank {rank}"}},
        {**place, "name": "process_sort_index", "args": {"sort_index": rank}},
    ]


def _thread(rank: int, index: int, lane: str) -> list[dict[str, Any]]:
    place = {"ph": "M", "pid": rank, "tid": index}
    return [
        {**place, "name": "thread_name", "args": {"name": lane}},
        {**place, "name": "thread_sort_index", "args": {"sort_index": index}},
    ]
