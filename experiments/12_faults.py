"""What does a training do when a rank, a host or a link fails, and what does it cost?

Command: python -m experiments.12_faults --out results/
Minutes: 5 on two cores (2 hosts of 2 ranks with NICs of 500 Mbit/s); --quick leaves out the slow
ones.

The vision workload trains through the hook with a checkpoint after every epoch, and in the second
epoch something happens. Where the job ends, all survivors must say which ranks failed; it is
started anew and goes on from the checkpoint. Where it does not, it must end by itself. Either way
the weights at the end must be, bit for bit, those of a job that nothing happened to.

Writes faults.jsonl, a row a fault: ``experiment`` "faults", ``fault``, ``expected`` ("ends" or
"goes on"), ``ended`` (whether the job did), ``detected_seconds`` (until the last survivor had
raised; null where the job went on), ``named`` (share of survivors whose message names a failed rank
or host), ``recovered_seconds`` (from the new start to the first step beyond the last one; includes
starting the processes), ``steps_lost``, ``fallbacks``, ``equal`` (weights, bit for bit),
``deadline_seconds``, ``message``, ``passed``, ``manifest``. Faults that are there already are not
repeated.
"""

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from experiments.jobs import ROOT, SETTINGS_ENV, process_group, write_whole
from experiments.training_runs import HOOK, RunSettings, train
from topo_ar.cli.bench_events import EventReader, write_event
from topo_ar.cli.script import exit_code_of
from topo_ar.emulation.check import report
from topo_ar.emulation.cluster import Cluster
from topo_ar.emulation.launch import Job, start
from topo_ar.emulation.loopback import LoopbackCluster, open_cluster
from topo_ar.emulation.spec import ClusterSpec
from topo_ar.errors import EmulationError
from topo_ar.telemetry.records import Record, manifest, read_records

SCRIPT = "experiments.12_faults"
NODES, RANKS, NIC = 2, 2, "500mbit"
DEADLINE_S = 5.0
_JOB_DEADLINE_S = 240.0
_VICTIM, _VICTIM_HOST = 3, "host1"
_EPOCHS, _STEPS = 3, 6

Act = Callable[[Cluster | LoopbackCluster, Job], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens, whether the job survives it, and how it is known who failed."""

    name: str
    act: Act
    ends: bool
    words: tuple[str, ...] = ()
    slow: bool = False


def _signal(number: signal.Signals, cluster: object, job: Job) -> None:
    os.killpg(job.pid(_VICTIM), number)


def _pause(cluster: object, job: Job) -> None:
    os.killpg(job.pid(_VICTIM), signal.SIGSTOP)
    time.sleep(DEADLINE_S / 3)
    os.killpg(job.pid(_VICTIM), signal.SIGCONT)


def _crash(cluster: Cluster | LoopbackCluster, job: Job) -> None:
    _emulated(cluster).kill_jobs(_VICTIM_HOST)


def _cable(seconds: float | None, cluster: Cluster | LoopbackCluster, job: Job) -> None:
    host = _emulated(cluster)
    host.link(_VICTIM_HOST, "eth0", up=False)
    if seconds is not None:
        time.sleep(seconds)
        host.link(_VICTIM_HOST, "eth0", up=True)


def _slower(cluster: Cluster | LoopbackCluster, job: Job) -> None:
    _emulated(cluster).set_rate(_VICTIM_HOST, "eth0", "50mbit")


def _emulated(cluster: Cluster | LoopbackCluster) -> Cluster:
    if not isinstance(cluster, Cluster):
        raise EmulationError("hosts and links can fail only where they are emulated")
    return cluster


FAULTS = (
    Fault("rank killed", partial(_signal, signal.SIGKILL), True, (f"rank {_VICTIM}",)),
    Fault("rank stopped", partial(_signal, signal.SIGSTOP), True, (f"rank {_VICTIM}",), slow=True),
    Fault("rank stopped for a while", _pause, False),
    Fault("host killed", _crash, True, ("rank 2", f"rank {_VICTIM}", "ranks 2")),
    Fault(
        "cable pulled",
        partial(_cable, None),
        True,
        # Either side sees the other as silent.
        ("rank 0", "rank 1", "rank 2", "rank 3", "ranks 0", "ranks 2"),
        slow=True,
    ),
    Fault("cable pulled for a second", partial(_cable, 1.0), False),
    Fault("NIC at a tenth of its rate", _slower, False),
)


@dataclass(slots=True)
class Watched:
    """What the ranks of a job have said: steps done, errors with their time, the digest."""

    steps: int = 0
    first_step_at: float | None = None
    errors: dict[int, tuple[float, str]] = field(default_factory=dict)
    digest: str | None = None
    fallbacks: int = 0
    changed: threading.Event = field(default_factory=threading.Event)

    def event(self, rank: int, row: Record) -> None:
        """Take what a rank says."""
        if row["record"] == "step" and rank == 0:
            self.steps = row["done"]
            self.first_step_at = self.first_step_at or time.monotonic()
            self.changed.set()
        elif row["record"] == "error":
            self.errors[rank] = time.monotonic(), row["message"]
        elif row["record"] == "weights" and rank == 0:
            self.digest = row["digest"]
        elif row["record"] == "training" and rank == 0:
            self.fallbacks = row["fallbacks"]


def run_job(
    cluster: Cluster | LoopbackCluster, checkpoint: Path, act: Act | None
) -> tuple[Watched, float | None, float, int]:
    """Train on `cluster`; return what was said, when `act` was called and the start, and the code.

    `act` is called when the first step of the second epoch is done.
    """
    settings = RunSettings(
        workload="vision",
        candidates=(HOOK,),
        epochs=_EPOCHS,
        steps=_STEPS,
        timeout_s=DEADLINE_S,
        checkpoint=str(checkpoint),
        each_step=True,
    )
    seen = Watched()
    readers: dict[int, EventReader] = {}

    def on_line(rank: int, line: bytes) -> None:
        if rank not in readers:
            readers[rank] = EventReader(lambda _, row: seen.event(rank, row), lambda _: None)
        readers[rank].feed(line)

    begun = time.monotonic()
    job = start(
        cluster,
        [sys.executable, "-m", SCRIPT],
        env={SETTINGS_ENV: msgspec.json.encode(settings).decode()},
        cwd=ROOT,
        on_line=on_line,
        grace_s=4 * DEADLINE_S,
    )
    at = None
    try:
        while act is not None and seen.steps <= _STEPS:
            if not seen.changed.wait(_JOB_DEADLINE_S):
                break
            seen.changed.clear()
        if act is not None:
            at = time.monotonic()
            act(cluster, job)
    finally:
        ended = job.wait(_JOB_DEADLINE_S)
    return seen, at, begun, ended.exit_code


def measure_fault(fault: Fault | None) -> Iterator[Record]:
    """Yield the row of a fault; of None, that of a job that nothing happens to."""
    with TemporaryDirectory(prefix="topo-ar-") as folder:
        keep = [ROOT, Path(folder)]
        spec = ClusterSpec.uniform(NODES, RANKS, NIC)
        checkpoint = Path(folder, "job.checkpoint")
        with open_cluster(spec, keep=keep) as cluster:
            links = report(cluster)
            seen, at, _, code = run_job(cluster, checkpoint, fault.act if fault else None)
        row: Record = {
            "experiment": "faults",
            "fault": fault.name if fault else "none",
            "expected": "ends" if fault and fault.ends else "goes on",
            "ended": code != 0,
            "deadline_seconds": DEADLINE_S,
            "fallbacks": seen.fallbacks,
            **_detection(seen, at, fault),
        }
        lost, recovered = 0, None
        if code != 0:
            with open_cluster(spec, keep=keep) as cluster:
                again, _, begun, code = run_job(cluster, checkpoint, None)
            lost = max(0, seen.steps - _STEPS * (seen.steps // _STEPS))
            recovered = again.first_step_at and again.first_step_at - begun
            seen = again
        yield {
            **row,
            "recovered_seconds": recovered,
            "steps_lost": lost,
            "digest": seen.digest,
            "exit_code": code,
            "manifest": {
                **manifest("namespaces" if links.emulated else "loopback"),
                "links": msgspec.to_builtins(links),
            },
        }


def _detection(seen: Watched, at: float | None, fault: Fault | None) -> Record:
    if fault is None or at is None or not seen.errors:
        return {"detected_seconds": None, "named": None, "message": None}
    last = max(when for when, _ in seen.errors.values())
    texts = [text for _, text in seen.errors.values()]
    named = sum(any(word in text for word in fault.words) for text in texts) / len(texts)
    return {"detected_seconds": last - at, "named": named, "message": texts[0]}


def judged(row: Record, right: str) -> Record:
    """Return a row with whether its weights are the right ones, and whether all is as it must be.

    A job that has to end must have been named by all survivors; one that goes on must not end.
    """
    ends = row["expected"] == "ends"
    equal = row["digest"] is not None and row["digest"] == right
    as_expected = row["ended"] and row["named"] == 1 if ends else not row["ended"]
    return {**row, "equal": equal, "passed": bool(equal and as_expected)}


def run_rank() -> int:
    """Do one rank's part; whoever fails says why, and ends without waiting for the others."""
    settings = msgspec.json.decode(os.environ[SETTINGS_ENV], type=RunSettings)
    with process_group() as rank:
        try:
            for row in train(settings):
                if rank == 0:
                    write_event(sys.stdout, "row", row)
        except RuntimeError as error:  # torch's reducer passes on the text alone
            write_event(sys.stdout, "row", {"record": "error", "message": str(error)})
            os._exit(1)
    return 0


def run(out: Path, *, quick: bool) -> int:
    """Do the faults that are not in the records yet; return 1 where one did not end as it must."""
    path = out / f"faults{'.quick' if quick else ''}.jsonl"
    done = {row["fault"]: row for row in (read_records(path) if path.exists() else ())}
    left = [fault for fault in FAULTS if fault.name not in done and not (quick and fault.slow)]
    if "none" not in done and left:
        print("== none: what the weights must be", flush=True)
        (done["none"],) = measure_fault(None)
    for number, fault in enumerate(left):
        minutes = 0.5 * (len(left) - number)
        print(
            f"== {fault.name}: {number + 1} of {len(left)}, about {minutes:g} min left", flush=True
        )
        (row,) = measure_fault(fault)
        done[fault.name] = judged(row, done["none"]["digest"])
        write_whole(path, done.values())
    for row in done.values():
        if row["fault"] != "none":
            print(line(row))
    return int(not all(row["passed"] for row in done.values() if row["fault"] != "none"))


def line(row: Record) -> str:
    """Return what is to be said of a fault."""
    text = "went on by itself"
    if row["ended"]:
        text = "ended"
    if row["detected_seconds"] is not None:
        text += f", all knew after {row['detected_seconds']:.1f} s, {row['named']:.0%} named it"
    if row["recovered_seconds"] is not None:
        text += f", {row['steps_lost']} steps lost, trained again after "
        text += f"{row['recovered_seconds']:.1f} s"
    same = "the same weights" if row["equal"] else "OTHER WEIGHTS"
    return f"{row['fault']:28} {text}; {same}: {'PASS' if row['passed'] else 'MISS'}"


def main() -> int:
    """Read the command line."""
    if SETTINGS_ENV in os.environ:
        return run_rank()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="without those that wait long")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for records")
    options = parser.parse_args()
    return exit_code_of(
        lambda: run(options.out, quick=options.quick), "interrupted; whole faults are kept"
    )


if __name__ == "__main__":
    sys.exit(main())
