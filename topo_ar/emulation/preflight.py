"""What this machine lacks for emulated hosts, one sentence per thing."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Literal

from topo_ar.emulation.namespaces import tool_environment
from topo_ar.errors import EmulationError

_PROGRAMS = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
    "ip": "iproute2",
    "tc": "iproute2",
    "env": "coreutils",
}
_PROBE = """
echo mount; mount -t proc proc /proc
echo veth; ip link add probe0 type veth peer name probe1
echo bridge; ip link add probe2 type bridge
echo tbf; tc qdisc add dev probe0 root tbf rate 1gbit burst 131072 latency 50ms
echo done
"""
_REFUSALS = {
    "": "the kernel refuses new namespaces ({said}); run as root, or allow user namespaces: sysctl "
    "user.max_user_namespaces, kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0, or the container's seccomp profile",
    "mount": "a new /proc cannot be mounted in a pid namespace ({said}); containers that mask "
    "/proc refuse it, run the container with an unmasked /proc",
    "veth": "the kernel cannot make veth devices ({said}); load the module veth",
    "bridge": "the kernel cannot make bridges ({said}); load the module bridge",
    "tbf": "the kernel cannot shape with tbf ({said}); load the module sch_tbf",
}
_LOOPBACK = "or run unshaped on the loopback device with --loopback"


@dataclass(frozen=True, slots=True)
class Missing:
    """One thing that is missing: a ``program`` to install, or something the ``kernel`` refuses."""

    kind: Literal["program", "kernel"]
    sentence: str


def preflight() -> tuple[Missing, ...]:
    """Return everything that keeps this machine from emulating hosts; empty when nothing does.

    Programs are looked up; then one short-lived set of namespaces is made to try the rest. The
    kernel is not asked while programs are missing.
    """
    path = tool_environment()["PATH"]
    absent = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    missing = [
        Missing(
            "program",
            f"the program {name!r} is missing; install the package {_PROGRAMS[name]}, {_LOOPBACK}",
        )
        for name in absent
    ]
    ignoring = None if "env" in absent else _run(["env", "--ignore-signal=CHLD", "env"])
    if ignoring is not None and ignoring.returncode != 0:
        missing.append(
            Missing(
                "program",
                f"'env' cannot ignore signals; install GNU coreutils 9.1 or newer, {_LOOPBACK}",
            )
        )
    if missing:
        return tuple(missing)
    refused = _ask_kernel()
    return () if refused is None else (Missing("kernel", refused),)


def require() -> None:
    """Raise EmulationError with the first missing thing's sentence, if anything is missing."""
    missing = preflight()
    if missing:
        raise EmulationError(missing[0].sentence)


def _ask_kernel() -> str | None:
    user = ["-U", "-r"] if os.geteuid() != 0 else []
    command = ["unshare", *user, "-n", "-m", "-u", "-i", "-p", "-f", "--kill-child"]
    shell = ["--propagation", "private", "sh", "-ec", _PROBE]
    result = _run([*command, *shell])
    if result is None:
        return _REFUSALS[""].format(said="no answer")
    reached = result.stdout.split()
    if reached[-1:] == ["done"]:
        return None
    said = (result.stderr.strip().splitlines() or ["no reason given"])[0]
    return _REFUSALS[reached[-1] if reached else ""].format(said=said)


def _run(command: list[str]) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=tool_environment(),
            stdin=subprocess.DEVNULL,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
