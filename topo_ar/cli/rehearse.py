"""A breach of targets rehearsed on emulated hosts: ``topo-ar doctor --rehearse``."""

import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topo_ar.errors import EmulationError
from topo_ar.telemetry.incidents import read_incident

_NODES, _RANKS, _NIC = 2, 2, "400mbit"
_CUT = 10
_SECONDS = 150.0
# After a breach can be seen in the figures of a step.
_MOST_STEPS = 3


@dataclass(slots=True)
class Rehearsal:
    """What happened: by check, whether it is as it should be, and in which words."""

    checks: dict[str, tuple[bool, str]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether all is as it should be."""
        return all(good for good, _ in self.checks.values())


def rehearse(directory: Path | None = None) -> Rehearsal:
    """Train on two emulated hosts, cut a NIC to a tenth, and see what becomes of the job.

    Parameters
    ----------
    directory : Path, optional
        Where telemetry and the incident are kept; a temporary one when left out.

    Raises
    ------
    EmulationError
        If hosts cannot be emulated here, or the ranks fail.
    """
    if directory is None:
        with tempfile.TemporaryDirectory(prefix="topo-ar-rehearsal-") as made:
            return _rehearsed(Path(made))
    directory.mkdir(parents=True, exist_ok=True)
    return _rehearsed(directory)


def _rehearsed(directory: Path) -> Rehearsal:
    from topo_ar.emulation.cluster import Cluster
    from topo_ar.emulation.launch import start
    from topo_ar.emulation.spec import ClusterSpec

    rows: list[dict[str, Any]] = []
    said: list[str] = []
    spec = ClusterSpec.uniform(_NODES, _RANKS, [_NIC])
    with Cluster(spec, keep=[directory.resolve()]) as cluster:

        def on_line(rank: int, line: bytes) -> None:
            said.append(line.decode(errors="replace"))
            if not line.startswith(b"{"):
                return
            rows.append(json.loads(line))
            if rows[-1]["event"] == "armed":
                host, nic = "host1", cluster.interfaces("host1")[0]
                cluster.set_rate(host, nic, cluster.rate(host, nic) / _CUT)
                print(
                    f"step {rows[-1]['step']}: the NIC of host1 is cut to a tenth",
                    file=sys.stderr,
                )

        print(f"training on {_NODES} emulated hosts of {_RANKS} ranks ...", file=sys.stderr)
        command = [sys.executable, "-m", "topo_ar.cli.rehearse_worker", str(directory.resolve())]
        done = start(cluster, command, on_line=on_line).wait(_SECONDS)
    if done.exit_code != 0:
        raise EmulationError(
            f"the rehearsal's ranks ended with {done.exit_code}: {''.join(said[-5:]).strip()}"
        )
    return judge([row for row in rows if row["event"] == "end"], directory)


def judge(ends: list[dict[str, Any]], directory: Path) -> Rehearsal:
    """Return what the last words of all ranks and the incident record say.

    Parameters
    ----------
    ends : list of dict
        What each rank said at its end, see `rehearse_worker`.
    directory : Path
        Where the incident record should be.
    """
    found = Rehearsal()
    incidents = ends[0]["incidents"]
    if not incidents:
        found.checks["detected"] = (False, f"no breach in {ends[0]['steps']} steps")
        return found
    first, acted, action, before, after = incidents[0]
    # The first long step can be seen when it has ended.
    took = acted - (first + 1)
    found.checks["detected"] = (
        took <= _MOST_STEPS,
        f"step {first} was the first to miss its target; {took} steps after that could be seen, "
        f"from step {acted} on: {action} ({before} to {after})",
    )
    found.checks["acted"] = (
        not action.startswith("warned"),
        "the job was planned anew or rolled back"
        if not action.startswith("warned")
        else f"nothing was done: {action}",
    )
    same = all(row["incidents"] == incidents for row in ends)
    found.checks["together"] = (same, "all ranks in the same step" if same else "ranks differ")
    equal = len({row["weights"] for row in ends}) == 1
    wrong = sum(row["wrong"] for row in ends)
    found.checks["no divergence"] = (
        equal and not wrong,
        f"weights {'equal' if equal else 'differ'} on {len(ends)} ranks, {wrong} wrong gradients",
    )
    files = sorted(directory.glob("incident-*.json"))
    complete = bool(files) and read_incident(files[0]).complete
    found.checks["incident record"] = (
        complete,
        f"{files[0].name} has the traces of all ranks" if complete else "missing or incomplete",
    )
    return found
