"""All-reduces of `topo-ar bench` on emulated hosts, as a part of an experiment."""

from collections.abc import Sequence
from pathlib import Path

from topo_ar.cli.bench import run_emulated
from topo_ar.cli.bench_report import Report
from topo_ar.emulation.spec import ClusterSpec
from topo_ar.errors import ExecutionError
from topo_ar.telemetry.records import Record, read_records


def bench(
    path: Path, spec: ClusterSpec, sizes: Sequence[int], iterations: int, against: Sequence[str]
) -> list[Record]:
    """Measure the planned all-reduce beside others in turns; return the rows, kept in `path`.

    The file is there when it is whole, and not before.

    Raises
    ------
    ExecutionError
        If ranks failed or a result was wrong.
    """
    settings = {"sizes": list(sizes), "iterations": iterations, "against": list(against)}
    partial = path.with_suffix(".partial")
    for old in (partial, partial.with_suffix(".predictions.jsonl")):
        old.unlink(missing_ok=True)
    with Report(str(partial), None) as report:
        run_emulated(settings, spec, report)
    if report.exit_code(None):
        raise ExecutionError(f"{path.stem}: ranks failed, or a result was wrong")
    partial.rename(path)
    return read_records(path)


def bench_rows(
    folder: Path, spec: ClusterSpec, nbytes: int, iterations: int, against: Sequence[str]
) -> list[Record]:
    """Return the rows of `bench` for one size, without keeping a file of them."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "bench.tmp.jsonl"
    try:
        return bench(path, spec, [nbytes], iterations, against)
    finally:
        for each in folder.glob("bench.tmp*"):
            each.unlink()
