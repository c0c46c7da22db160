"""Experiments whose ranks run on emulated hosts, or where torchrun or srun has started them.

A script gives `measure` what its ranks do. Called on a workstation, hosts are emulated and the
script is started anew on each rank; called by torchrun, by srun with torchrun's variables set, the
process is a rank of the real job and does its part at once. Either way rank 0's rows come back,
with the manifest of how they were measured.
"""

import contextlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import msgspec

from topo_ar.cli.bench_events import EventReader, write_event
from topo_ar.emulation.check import report
from topo_ar.emulation.launch import start
from topo_ar.emulation.loopback import open_cluster
from topo_ar.emulation.spec import ClusterSpec
from topo_ar.errors import ExecutionError
from topo_ar.telemetry.records import Record, RecordWriter, manifest

ROOT = Path(__file__).resolve().parent.parent
SETTINGS_ENV = "TOPO_AR_EXPERIMENT"
DEADLINE_S = 1200.0
_GLOO_S = 300.0

S = TypeVar("S", bound=msgspec.Struct)
Rows = Iterable[Record]
OnRow = Callable[[Record], None]


def under_torchrun() -> bool:
    """Return whether this process is a rank that torchrun or srun has started."""
    return "RANK" in os.environ and SETTINGS_ENV not in os.environ


def first_rank() -> bool:
    """Return whether this process is the one to print: no later rank of a real job."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def as_rank(kind: type[S], work: Callable[[S], Rows]) -> bool:
    """Do one rank's part if this process is a rank of an emulated host; return whether it was."""
    if SETTINGS_ENV not in os.environ:
        return False
    settings = msgspec.json.decode(os.environ[SETTINGS_ENV], type=kind)
    with process_group() as rank:
        for row in work(settings):
            if rank == 0:
                write_event(sys.stdout, "row", row)
    return True


@contextlib.contextmanager
def process_group() -> Iterator[int]:
    """Join the job's default process group over gloo, with one thread a rank; gives the rank.

    Inside another one it is that.
    """
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        yield dist.get_rank()
        return
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo", timeout=timedelta(seconds=_GLOO_S))
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def measure(
    spec: ClusterSpec,
    script: str,
    settings: S,
    work: Callable[[S], Rows],
    *,
    keep: Sequence[Path] = (),
    on_row: OnRow | None = None,
    deadline_s: float = DEADLINE_S,
) -> list[Record]:
    """Run `work` on every rank and return rank 0's rows, each with its manifest.

    ``load_before`` in it is the machine's load average before emulated hosts came up: well above 0
    it was busy with something else, and times are longer than they should be.

    Parameters
    ----------
    spec : ClusterSpec
        Hosts to emulate; under torchrun the job is what it is.
    script : str
        The module to start on each emulated rank, which has to call `as_rank`.
    settings : Struct
        For `work`; equal on all ranks.
    work : callable
        Collective; yields records, which are rank 0's.
    keep : sequence of path
        What emulated hosts must see beside the repository.
    on_row : callable, optional
        Called with each row as it comes, on rank 0 under torchrun.

    Raises
    ------
    ExecutionError
        If a rank failed or was late, or no row came.
    """
    rows: list[Record] = []

    def take(row: Record) -> None:
        rows.append(row)
        if on_row is not None:
            on_row(row)

    if under_torchrun():
        with process_group() as rank:
            for row in work(settings):
                if rank == 0:
                    take(row)
        about = {**manifest(), "links": None}
        return [{**row, "manifest": about} for row in rows]
    readers: defaultdict[int, EventReader] = defaultdict(
        lambda: EventReader(lambda _, row: take(row), sys.stderr.write)
    )
    load = os.getloadavg()[0]
    with open_cluster(spec, keep=[ROOT, *keep]) as cluster:
        links = report(cluster)
        job = start(
            cluster,
            [sys.executable, "-m", script],
            env={SETTINGS_ENV: msgspec.json.encode(settings).decode()},
            cwd=ROOT,
            on_line=lambda rank, line: readers[rank].feed(line),
        )
        ended = job.wait(deadline_s)
    if ended.exit_code or not rows:
        late = f" after {deadline_s:g} s" if ended.timed_out else ""
        raise ExecutionError(f"{script}: ranks ended with {ended.returncodes}{late}")
    about = {
        **manifest("namespaces" if links.emulated else "loopback"),
        "links": msgspec.to_builtins(links),
        "load_before": load,
    }
    return [{**row, "manifest": about} for row in rows]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an experiment that is kept when it is whole: a file of records.

    `minutes` is what it takes on two cores.
    """

    name: str
    minutes: float
    make: Callable[[], Rows]


def run_parts(parts: Sequence[Part], path_of: Callable[[str], Path]) -> None:
    """Make the parts whose files are not there yet, and say how long the rest may take.

    On the ranks of a real job the first one writes, and its files count.
    """
    with process_group() if under_torchrun() else contextlib.nullcontext(0) as rank:
        left = _agreed([part for part in parts if not path_of(part.name).exists()], parts)
        for number, part in enumerate(left):
            minutes = sum(later.minutes for later in left[number:])
            begun = time.monotonic()
            if rank == 0:
                text = f"== {part.name}: {number + 1} of {len(left)}, about {minutes:g} min left"
                print(text, flush=True)
                write_whole(path_of(part.name), part.make())
                print(f"== {part.name}: {(time.monotonic() - begun) / 60:.1f} min", flush=True)
            else:
                for _ in part.make():
                    pass


def _agreed(left: list[Part], parts: Sequence[Part]) -> list[Part]:
    """Return what the first rank of a real job has left to do; its own list elsewhere."""
    if not under_torchrun():
        return left
    import torch.distributed as dist

    names = [[part.name for part in left]]
    dist.broadcast_object_list(names)
    return [part for part in parts if part.name in names[0]]


def write_whole(path: Path, rows: Rows) -> None:
    """Write a file of records that is there when it is whole, and not before."""
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with RecordWriter(partial) as writer:
        for row in rows:
            writer.write(row)
    partial.rename(path)
