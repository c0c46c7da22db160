"""The targets of accuracy and of kernels, set before anything was measured, beside the records."""

from collections.abc import Iterator, Sequence
from statistics import mean

from topo_ar.telemetry.metrics import RatioInterval, speedup_interval
from topo_ar.telemetry.records import Record

# How many times faster than torch; all others shall not be slower.
_KERNELS = {
    "topk:0.01": 10.0,
    "powersgd:4 step, bert-layer": 2.5,
    "powersgd:4 step, resnet18-tail": 1.8,
}
_LEAST_KERNEL = 1.0
# Points of accuracy.
_MOST_LOST = 1.5
_CLOSE = ("int8", "powersgd:2", "powersgd:4")
_LEAST_GAP = 8.0
_GAP_OF = ("mnist1d", "sgd")


def line(what: str, target: str, measured: str, passed: bool | None = None) -> str:
    """Return a line of a table of targets; without a verdict it is a comparison."""
    word = "" if passed is None else "PASS" if passed else "MISS"
    return f"{what:44} {target:>7} {measured:<24} {word}".rstrip()


def interval(found: RatioInterval) -> str:
    """Return a ratio with its 95 % interval."""
    return f"{found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]"


def kernel_lines(records: Sequence[Record]) -> Iterator[str]:
    """Yield torch's time over ours for each kernel; the last record of each counts."""
    yield "torch's time over ours"
    for name, row in {record["kernel"]: record for record in records}.items():
        found = speedup_interval(row["torch_seconds"], row["ours_seconds"])
        least = _KERNELS.get(name, _LEAST_KERNEL)
        yield line(name, f">= {least:g}", interval(found), found.ratio >= least)


def accuracy_lines(records: Sequence[Record]) -> Iterator[str]:
    """Yield what codecs with error feedback lose against no compression, in points."""
    yield "points of accuracy, means over seeds"
    found: dict[tuple[str, str, str, bool], list[float]] = {}
    for record in records:
        key = (record["task"], record["optimizer"], record["codec"], record["feedback"])
        # A training that is not finite has reached nothing.
        found.setdefault(key, []).append(100 * (record["accuracy"] or 0.0))
    means = {key: mean(each) for key, each in found.items()}
    for task, optimizer in dict.fromkeys(key[:2] for key in means):
        dense = means[task, optimizer, "none", False]
        for codec in _CLOSE:
            lost = dense - means[task, optimizer, codec, True]
            what = f"{task}, {optimizer}: lost by {codec}"
            yield line(what, f"<= {_MOST_LOST:g}", f"{lost:.2f}", lost <= _MOST_LOST)
        lost = dense - means[task, optimizer, "topk:0.01", True]
        yield line(f"{task}, {optimizer}: lost by topk:0.01", "-", f"{lost:.2f}")
        gap = means[task, optimizer, "topk:0.01", True] - means[task, optimizer, "topk:0.01", False]
        what = f"{task}, {optimizer}: feedback of topk:0.01"
        if (task, optimizer) == _GAP_OF:
            yield line(what, f">= {_LEAST_GAP:g}", f"{gap:.2f}", gap >= _LEAST_GAP)
        else:
            yield line(what, "-", f"{gap:.2f}")
