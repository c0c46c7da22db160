"""Where namespaces are not to be had: the same ranks, unshaped, on the loopback device."""

import logging
import os
import shutil
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from topo_ar.emulation.cluster import Cluster
from topo_ar.emulation.layout import lay_out
from topo_ar.emulation.preflight import preflight
from topo_ar.emulation.spec import ClusterSpec
from topo_ar.errors import EmulationError

_log = logging.getLogger("topo_ar")


class LoopbackCluster:
    """Stands in for `Cluster` without hosts: all ranks are plain processes of this machine.

    Nothing is shaped and nothing is isolated, so its timings say nothing about a network; records
    and reports carry ``emulated = false`` and the `reason`.
    """

    emulated = False
    interface = "lo"

    def __init__(self, spec: ClusterSpec, reason: str = "asked for") -> None:
        self.spec = spec
        self.layout = lay_out(spec)
        self.reason = reason
        self._jobs: list[subprocess.Popen[Any]] = []

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts that would be emulated."""
        return tuple(host.name for host in self.layout.hosts)

    def interfaces(self, host: str) -> tuple[str, ...]:
        """Return the loopback device, whatever the host."""
        return (self.interface,)

    def address(self, host: str) -> str:
        """Return the loopback address, whatever the host."""
        return "127.0.0.1"

    def free_port(self) -> int:
        """Return a TCP port that is free on the loopback device now."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            return int(server.getsockname()[1])

    @property
    def directory(self) -> str:
        """The directory in which commands start that name none: this process's."""
        return os.getcwd()

    def popen(
        self,
        host: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        **options: Any,
    ) -> "subprocess.Popen[Any]":
        """Start a command as `Cluster.popen` does; it dies with the thread that started it."""
        leash = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        environment = dict(os.environ if env is None else env)
        job = subprocess.Popen(
            [*leash, *argv], env=environment, cwd=cwd, process_group=0, **options
        )
        self._jobs.append(job)
        return job

    def close(self) -> None:
        """Kill what still runs."""
        for job in self._jobs:
            if job.poll() is None:
                os.killpg(job.pid, 9)
                job.wait()
        self._jobs.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_cluster(
    spec: ClusterSpec, *, keep: Iterable[str | Path] = (), loopback: bool = False
) -> Cluster | LoopbackCluster:
    """Return hosts for `spec`, to be used in a ``with``: emulated ones where the kernel lets us.

    A kernel or container that refuses namespaces gives a `LoopbackCluster`, and a warning in the
    log; so does `loopback`. A missing program is worth installing, hence an error.

    Raises
    ------
    EmulationError
        If a program is missing; the message says which package has it.
    """
    if loopback:
        return LoopbackCluster(spec)
    missing = preflight()
    if not missing:
        return Cluster(spec, keep=keep)
    if missing[0].kind == "program":
        raise EmulationError(missing[0].sentence)
    _log.warning(
        "no hosts can be emulated here: %s. Running unshaped on the loopback device instead; "
        "timings say nothing about a network",
        missing[0].sentence,
    )
    return LoopbackCluster(spec, missing[0].sentence)
