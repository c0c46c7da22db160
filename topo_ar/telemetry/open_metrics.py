"""The last window of a job as OpenMetrics text, for the textfile collector of a node exporter.

Format: OpenMetrics 1.0 (https://github.com/prometheus/OpenMetrics, specification/OpenMetrics.md):
names of units as suffixes, one block a family, and ``# EOF`` at the end.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from topo_ar.telemetry.job_windows import Window

Labels = dict[str, str]
Sample = tuple[Labels, float]


def open_metrics(window: Window, job: str = "") -> str:
    """Return the text.

    Parameters
    ----------
    window : Window
        The last one.
    job : str
        The value of the label ``job``, left out if empty.
    """
    base = {"job": job} if job else {}
    lines: list[str] = []
    for name, unit, kind, text, samples in _families(window):
        lines.append(f"# TYPE {name} {kind}")
        if unit:
            lines.append(f"# UNIT {name} {unit}")
        lines.append(f"# HELP {name} {_escaped(text)}")
        sample = f"{name}_total" if kind == "counter" else name
        lines += [f"{sample}{_labels({**base, **labels})} {value!r}" for labels, value in samples]
    return "\n".join([*lines, "# EOF", ""])


def write_open_metrics(window: Window, path: Path) -> None:
    """Replace `path` by the text at once, so that a scraper sees all of it or what was before.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    beside = path.with_name(f"{path.name}.tmp")
    try:
        beside.write_text(open_metrics(window))
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise


def _families(window: Window) -> Iterator[tuple[str, str, str, str, list[Sample]]]:
    def gauge(
        name: str, unit: str, text: str, *samples: Sample
    ) -> tuple[str, str, str, str, list[Sample]]:
        return f"topo_ar_{name}", unit, "gauge", text, list(samples)

    yield gauge(
        "step_seconds", "seconds", "Median step of the last window.", ({}, window.step_seconds)
    )
    yield gauge(
        "exposed_seconds",
        "seconds",
        "Part of a step that waits for communication.",
        ({}, window.exposed_seconds),
    )
    yield gauge(
        "step_bytes",
        "bytes",
        "Bytes of a step by class of link, by the schedule, all ranks together.",
        ({"link": "inside_node"}, float(window.nbytes_inside)),
        ({"link": "between_nodes"}, float(window.nbytes_between)),
    )
    if window.nbytes_sent_between is not None:
        yield gauge(
            "step_sent_bytes",
            "bytes",
            "Bytes of a step that flows between nodes were counted to carry.",
            ({"link": "between_nodes"}, float(window.nbytes_sent_between)),
        )
    for name, text in (
        ("compute", "Step of a rank without exposed communication."),
        ("wait", "Spent per step waiting for the last rank."),
        ("late", "How much later per step than half of the ranks a rank came."),
    ):
        values = getattr(window.ranks, f"{name}_seconds")
        rows = [({"rank": str(rank)}, float(value)) for rank, value in enumerate(values)]
        yield gauge(f"rank_{name}_seconds", "seconds", text, *rows)
    shares = enumerate(window.ranks.last_share)
    yield gauge(
        "rank_last_ratio",
        "ratio",
        "Share of steps in which a rank was waited for longest.",
        *[({"rank": str(rank)}, float(value)) for rank, value in shares],
    )
    labelled = [({"bucket": str(b.index), "path": b.path}, b) for b in window.buckets]
    for name, text in (
        ("queue", "The bucket before was not yet reduced."),
        ("wait", "Waiting for the last rank."),
        ("transfer", "Transfer of a bucket."),
    ):
        yield gauge(
            f"bucket_{name}_seconds",
            "seconds",
            text,
            *[(labels, float(getattr(b, f"{name}_seconds"))) for labels, b in labelled],
        )
    predicted = [(x, b.predicted_seconds) for x, b in labelled if b.predicted_seconds is not None]
    if predicted:
        yield gauge(
            "bucket_predicted_seconds",
            "seconds",
            "What the plan says of a bucket's transfer.",
            *predicted,
        )
    yield gauge(
        "bucket_busbw_bytes_per_second",
        "bytes_per_second",
        "Bus bandwidth of a bucket's transfer.",
        *[(labels, b.busbw) for labels, b in labelled],
    )
    yield gauge(
        "planned",
        "",
        "1 where steps go as planned, 0 where they take plain all-reduce.",
        ({}, float(window.path == "planned")),
    )
    causes = [
        ({"about": c.about, "ranks": " ".join(map(str, c.ranks))}, 1.0) for c in window.causes
    ]
    if causes:
        yield gauge("cause", "", "What makes steps longer than they need be.", *causes)
    yield gauge("own_ratio", "ratio", "Share of a step spent in telemetry.", ({}, window.own_share))
    for name, text, count in (
        ("steps", "Synchronised steps.", window.last_step + 1),
        ("fallbacks", "Failures that made the job leave the fast path.", window.fallbacks),
        ("replans", "How often the network was measured anew.", window.replans),
        ("incidents", "Incident records written.", window.incidents),
    ):
        yield f"topo_ar_{name}", "", "counter", text, [({}, float(count))]


def _labels(labels: Labels) -> str:
    body = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{body}}}" if body else ""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
