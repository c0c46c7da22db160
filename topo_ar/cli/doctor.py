"""``topo-ar doctor``: what on this host would keep a job from running well, and the remedy."""

import importlib.util
import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Annotated

import typer


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


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this host: network interface, TCP, shared memory, torch, GPUs, emulation.

    Exits with 1 when something would keep a job from running.

    Example: topo-ar doctor
    """
    findings = [
        _interface(),
        _congestion_control(),
        _stores(),
        _torch(),
        _gpus(),
        _emulation(),
    ]
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        for finding in findings:
            print(f"{finding.verdict:>8}  {finding.check}: {finding.text}")
    if any(finding.verdict is Verdict.PROBLEM for finding in findings):
        raise typer.Exit(1)


def _interface() -> Finding:
    from topo_ar.errors import ConfigError
    from topo_ar.execution.network import local_address

    try:
        return Finding("interface", Verdict.OK, f"flows between nodes use {local_address(0)}")
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
        return Finding("torch", Verdict.PROBLEM, "not installed; pip install torch")
    import torch.distributed as dist

    backends = [name for name in ("gloo", "nccl") if getattr(dist, f"is_{name}_available")()]
    if "gloo" not in backends:
        return Finding("torch", Verdict.PROBLEM, f"torch {version('torch')} was built without gloo")
    return Finding("torch", Verdict.OK, f"{version('torch')} with {', '.join(backends)}")


def _gpus() -> Finding:
    from topo_ar.topology.model import DeviceKind
    from topo_ar.topology.probe import probe

    topology = probe()
    count = sum(device.kind is DeviceKind.GPU for device in topology.devices)
    notes = "; ".join(topology.notes)
    return Finding("topology", Verdict.OK, f"{count} GPUs" + (f" ({notes})" if notes else ""))


def _emulation() -> Finding:
    from topo_ar.emulation.preflight import preflight

    missing = preflight()
    if missing:
        return Finding("emulation", Verdict.NOTE, missing[0].sentence)
    return Finding("emulation", Verdict.OK, "hosts can be emulated here")
