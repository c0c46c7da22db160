"""Does training through the hook end with the weights that plain DDP ends with?

Command: python experiments/02_ddp_parity.py --out results/
Minutes: 1 on two cores (2 hosts of 4 ranks, 1 Gbit/s NICs, 3 epochs of a small ResNet).

Exits with 1 when an oracle fails. Writes ddp_parity.jsonl: a row for the hook, one for plain DDP
(raw samples, losses, exposed communication) and one with the oracles; and ddp_parity.buckets.json,
the bucket trace of one step.
"""

import argparse
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from topo_ar.cli.script import exit_code_of
from topo_ar.emulation.check import EmulationReport, report
from topo_ar.emulation.launch import start
from topo_ar.emulation.loopback import open_cluster
from topo_ar.emulation.spec import ClusterSpec
from topo_ar.errors import ConfigError
from topo_ar.telemetry.metrics import exposed_seconds
from topo_ar.telemetry.records import Record, RecordWriter, manifest
from topo_ar.units import format_rate

ROOT = Path(__file__).resolve().parent.parent
MARK = "@ddp-parity "
SETTINGS_ENV = "DDP_PARITY_SETTINGS"
DEADLINE_S = 900.0
COMPARED = ("hook", "plain")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The emulated cluster, how long to train, and where records go."""

    nodes: int = 2
    ranks: int = 4
    nic: str = "1gbit"
    epochs: int = 3
    out: Path = Path("results")

    def __post_init__(self) -> None:
        if self.nodes * self.ranks < 2:
            raise ConfigError(f"{self.nodes}x{self.ranks} ranks have nothing to reduce; take 2")
        if self.epochs < 1:
            raise ConfigError(f"--epochs {self.epochs} trains nothing; take at least 1")

    @property
    def spec(self) -> ClusterSpec:
        """The cluster to emulate."""
        return ClusterSpec.uniform(self.nodes, self.ranks, self.nic.split(","))


@dataclass(slots=True)
class Results:
    """What rank 0 has announced so far."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    held_out: dict[str, list[Record]] = field(default_factory=dict)
    buckets: list[Record] = field(default_factory=list)
    oracles: list[Record] = field(default_factory=list)

    def event(self, name: str, data: Record) -> None:
        """Keep an event, and say how the run gets on."""
        if name == "step":
            for candidate, step in data["candidates"].items():
                self.seconds.setdefault(candidate, []).append(step["seconds"])
                self.losses.setdefault(candidate, []).append(step["loss"])
        elif name == "evaluation":
            candidate = data.pop("candidate")
            self.held_out.setdefault(candidate, []).append(data)
            loss, accuracy = f"loss {data['loss']:.4f}", f"accuracy {data['accuracy']:.3f}"
            print(f"epoch {data['epoch']} {candidate}: held-out {loss}, {accuracy}", flush=True)
        elif name == "bucket":
            self.buckets.append(data)
        elif name == "oracle":
            self.oracles.append(data)
            verdict = "holds" if data["passed"] else "FAILS"
            print(
                f"{verdict} {data['name']}: {data['value']:.3g}, at most {data['limit']:.3g} "
                f"({data['meaning']})",
                flush=True,
            )

    def rows(self) -> list[Record]:
        """Return the records of a run that came to its end."""
        rows = [self._candidate(name) for name in COMPARED]
        rows[0]["buckets"] = self.buckets
        passed = all(oracle["passed"] for oracle in self.oracles)
        return [*rows, {"record": "oracles", "passed": passed, "oracles": self.oracles}]

    def _candidate(self, name: str) -> Record:
        step, compute = median(self.seconds[name]), median(self.seconds["compute"])
        return {
            "record": "training",
            "candidate": name,
            "seconds": self.seconds[name],
            "median_seconds": step,
            "compute_seconds": self.seconds["compute"],
            "median_compute_seconds": compute,
            # Only the sum of forward, backward and optimizer was timed, and only it matters.
            "exposed_seconds": exposed_seconds(step, compute, 0.0, 0.0),
            "losses": self.losses[name],
            "held_out": self.held_out[name],
        }


def run(config: Config) -> int:
    """Train on emulated hosts, write the records and return the exit code."""
    results = Results()
    settings = {"epochs": config.epochs}
    with open_cluster(config.spec, keep=[ROOT]) as cluster:
        links = report(cluster)
        print(f"{config.nodes}x{config.ranks} ranks, {_network(links)}", flush=True)
        job = start(
            cluster,
            [sys.executable, "-m", "experiments.02_ddp_parity"],
            env={SETTINGS_ENV: json.dumps(settings)},
            cwd=ROOT,
            on_line=lambda rank, line: _take(results, line),
        )
        ended = job.wait(DEADLINE_S)
    if ended.exit_code:
        print(f"error: ranks ended with {ended.exit_code}", file=sys.stderr)
        return 1
    _write(config, results, links)
    return 0 if all(oracle["passed"] for oracle in results.oracles) else 1


def run_rank() -> None:
    """Do one rank's part under torchrun's environment; rank 0 writes a marked line an event."""
    import torch
    import torch.distributed as dist

    from experiments.parity import run
    from experiments.training import Settings

    def announce(name: str, data: dict[str, Any]) -> None:
        # A line each, below a pipe's atomic size: nothing gets written into the middle of one.
        if dist.get_rank() == 0:
            print(MARK + json.dumps([name, data], allow_nan=False), flush=True)

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        run(msgspec.json.decode(os.environ[SETTINGS_ENV], type=Settings), None, announce)
    finally:
        dist.destroy_process_group()


def _take(results: Results, line: bytes) -> None:
    text = line.decode(errors="replace")
    if text.startswith(MARK):
        results.event(*json.loads(text.removeprefix(MARK)))
    else:
        sys.stderr.write(text)


def _network(links: EmulationReport) -> str:
    if not links.emulated:
        return f"NOT emulated ({links.reason}): times say nothing about a network"
    rates = sorted({rate for nics in links.nics for rate in nics})
    return f"emulated hosts with NICs of {', '.join(map(format_rate, rates))}"


def _write(config: Config, results: Results, links: EmulationReport) -> None:
    world_size = config.nodes * config.ranks
    context = {
        "experiment": "ddp_parity",
        "world_size": world_size,
        "hosts": config.nodes,
        "epochs": config.epochs,
        "manifest": {
            **manifest("namespaces" if links.emulated else "loopback"),
            "links": msgspec.to_builtins(links),
        },
    }
    records, trace = config.out / "ddp_parity.jsonl", config.out / "ddp_parity.buckets.json"
    with RecordWriter(records) as writer:
        for row in results.rows():
            writer.write({**context, **row})
            if row["record"] == "training":
                times = ("median_seconds", "median_compute_seconds", "exposed_seconds")
                step, compute, exposed = (f"{row[name] * 1e3:.1f} ms" for name in times)
                print(f"{row['candidate']}: step {step}, compute {compute}, exposed {exposed}")
    num_steps = len(results.seconds["hook"])
    steps = [{"step": num_steps - 1, "buckets": results.buckets}]
    trace.write_text(json.dumps({"world_size": world_size, "steps": steps, "schema": 1}, indent=2))
    print(f"records: {records}, bucket trace: {trace}")


def main() -> int:
    """Read the command line."""
    if SETTINGS_ENV in os.environ:
        run_rank()
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = Config()
    parser.add_argument("--nodes", type=int, default=defaults.nodes)
    parser.add_argument("--ranks", type=int, default=defaults.ranks, help="ranks on each node")
    parser.add_argument("--nic", default=defaults.nic, help="NICs of each node")
    parser.add_argument("--epochs", type=int, default=defaults.epochs)
    parser.add_argument("--out", type=Path, default=defaults.out, help="folder for records")
    options = vars(parser.parse_args())
    return exit_code_of(lambda: run(Config(**options)))


if __name__ == "__main__":
    sys.exit(main())
