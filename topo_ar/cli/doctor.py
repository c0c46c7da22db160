"""``topo-ar doctor``: what on this host would keep a job from running well, and the remedy."""

import importlib.util
import json
import os
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from topo_ar.cli.doctor_job import is_launched, job_findings

if TYPE_CHECKING:
    from topo_ar.topology.model import Topology

_WIDTH = 100


class Verdict(StrEnum):
    """How a finding is meant."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at, and the remedy where there is one."""

    check: str
    verdict: Verdict
    text: str
    remedy: str = ""


def doctor(
    topology: Annotated[
        str | None, typer.Argument(help="A topology file or preset instead of this host.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse", help="Train on emulated hosts, cut a NIC, and see the job give way."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Keep the rehearsal's telemetry and incident here.")
    ] = None,
) -> None:
    """Check this host: interfaces, TCP, shared memory, cores, NUMA, torch, topology, emulation.

    Started on every rank of a job, by torchrun -m topo_ar doctor or srun, it looks at each host and
    compares the versions of all ranks.

    With a topology, look for what is slow or odd in it. Every finding that asks for one has a
    remedy. Exits with 1 when something would keep a job from running.

    Example: topo-ar doctor

    Example: topo-ar doctor cluster.json

    Example: torchrun --nproc-per-node 4 -m topo_ar doctor

    Example: topo-ar doctor --rehearse --out rehearsal
    """
    if rehearse:
        if topology is not None:
            raise typer.BadParameter("--rehearse takes no topology")
        findings = _rehearsed(out)
    elif topology is not None:
        from topo_ar.cli.topology_source import load_topology

        findings = _topology(load_topology(topology))
    elif is_launched():
        found = job_findings(_this_host)
        if found is None:
            return
        findings = found
    else:
        findings = _this_host()
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        for finding in findings:
            _print(finding)
    if any(finding.verdict is Verdict.PROBLEM for finding in findings):
        raise typer.Exit(1)


def _this_host() -> list[Finding]:
    return [
        _interface(),
        _congestion_control(),
        _stores(),
        _torch(),
        *_settings(),
        *_nccl_settings(),
        *_topology(_probed()),
        _emulation(),
    ]


def _settings() -> list[Finding]:
    from topo_ar.integrations.model_checks import host_findings

    return [Finding(x.about, Verdict.NOTE, x.text, x.remedy) for x in host_findings()]


def _rehearsed(out: Path | None) -> list[Finding]:
    from topo_ar.cli.rehearse import rehearse

    remedy = "look at the incident and the log of the ranks (--out DIR, TOPO_AR_LOG=info)"
    return [
        Finding(name, Verdict.OK if good else Verdict.PROBLEM, text, "" if good else remedy)
        for name, (good, text) in rehearse(out).checks.items()
    ]


def _print(finding: Finding) -> None:
    indent = " " * 10
    for label, text in ((f"{finding.check}: ", finding.text), ("remedy: ", finding.remedy)):
        if text:
            first = f"{finding.verdict:>8}  " if label != "remedy: " else indent
            lines = textwrap.wrap(
                label + text, _WIDTH, initial_indent=first, subsequent_indent=indent + "  "
            )
            print("\n".join(lines))


def _interface() -> Finding:
    from topo_ar.errors import ConfigError
    from topo_ar.execution.network import local_nics

    try:
        addresses = " and ".join(nic.address for nic in local_nics(0))
        return Finding("interface", Verdict.OK, f"flows between nodes use {addresses}")
    except ConfigError as error:
        return Finding("interface", Verdict.PROBLEM, str(error))


def _congestion_control() -> Finding:
    import socket

    with socket.socket() as sock:
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        except OSError:
            verdict = Verdict.OK if name == "cubic" else Verdict.NOTE
            return Finding(
                "tcp",
                verdict,
                f"congestion control is {name} and cubic is refused; with bbr "
                "parallel flows share a NIC unequally",
            )
    return Finding("tcp", Verdict.OK, f"congestion control is {name}; our flows use cubic")


def _stores() -> Finding:
    import platform

    from topo_ar.execution.transports.shm import ordered_stores

    if ordered_stores():
        return Finding("shared memory", Verdict.OK, "co-located ranks share memory")
    return Finding(
        "shared memory",
        Verdict.NOTE,
        f"{platform.machine()} does not keep the order of stores: everything takes the plain path",
    )


def _torch() -> Finding:
    from importlib.metadata import version

    if importlib.util.find_spec("torch") is None:
        return Finding("torch", Verdict.PROBLEM, "not installed", "pip install torch")
    import torch.distributed as dist

    backends = [name for name in ("gloo", "nccl") if getattr(dist, f"is_{name}_available")()]
    if "gloo" not in backends:
        return Finding(
            "torch",
            Verdict.PROBLEM,
            f"torch {version('torch')} was built without gloo",
            "install a build that has it, such as those of PyPI",
        )
    return Finding("torch", Verdict.OK, f"{version('torch')} with {', '.join(backends)}")


def _nccl_settings(
    environment: Mapping[str, str] = os.environ, system: Path = Path("/etc/nccl.conf")
) -> list[Finding]:
    """Say which settings bind NCCL here, since a forgotten one slows every job of the host.

    The environment counts first, then the user's file, then that of the system.
    """
    found = {name: (value, "") for name, value in environment.items() if name in _NCCL_SETTINGS}
    home = Path(environment.get("HOME", "/"), ".nccl.conf")
    for config in (Path(environment.get("NCCL_CONF_FILE") or home), system):
        try:
            lines = config.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition("=")
            if name.strip() in _NCCL_SETTINGS:
                found.setdefault(name.strip(), (value.strip(), f" (in {config})"))
    return [
        Finding("nccl", Verdict.NOTE, f"{name}={value}{where}: {_NCCL_SETTINGS[name]}", _UNSET)
        for name, (value, where) in found.items()
        if not (name.endswith("_DISABLE") and value == "0")
    ]


_UNSET = "remove it unless it is meant for the machines and the number of GPUs of this job"
_NCCL_SETTINGS = {
    "NCCL_GRAPH_FILE": "rings and trees are taken from the file; other GPU counts break or crawl",
    "NCCL_TOPO_FILE": "the file is believed instead of this machine",
    "NCCL_P2P_DISABLE": "GPUs of a node meet in host memory",
    "NCCL_P2P_LEVEL": "decides how near GPUs must be to reach each other directly",
    "NCCL_IB_DISABLE": "InfiniBand and RoCE are not used; TCP sockets are",
    "NCCL_SHM_DISABLE": "shared memory is not used",
    "NCCL_ALGO": "one algorithm is forced for all sizes",
    "NCCL_PROTO": "one protocol is forced for all sizes",
    "NCCL_NVLS_ENABLE": "switches NVLink SHARP",
}


def _probed() -> "Topology":
    from topo_ar.topology.probe import probe

    return probe()


def _topology(topology: "Topology") -> list[Finding]:
    from topo_ar.topology.findings import findings
    from topo_ar.topology.model import DeviceKind

    counts = Counter(device.kind for device in topology.devices)
    gpus, nics = (
        f"{counts[kind]} {name}{'' if counts[kind] == 1 else 's'}"
        for kind, name in ((DeviceKind.GPU, "GPU"), (DeviceKind.NIC, "NIC"))
    )
    nodes = len({device.node for device in topology.devices if device.node})
    where = f" on {nodes} nodes" if nodes > 1 else ""
    return [
        Finding("topology", Verdict.OK, f"{topology.name}: {gpus} and {nics}{where}"),
        *(Finding("topology", Verdict.NOTE, note) for note in topology.notes),
        *(Finding(each.about, Verdict.NOTE, each.text, each.remedy) for each in findings(topology)),
    ]


def _emulation() -> Finding:
    from topo_ar.emulation.preflight import preflight

    missing = preflight()
    if missing:
        return Finding("emulation", Verdict.NOTE, missing[0].sentence)
    return Finding("emulation", Verdict.OK, "hosts can be emulated here")
