"""Open MPI ranks on the hosts of a cluster, placed as the cluster places its own.

``mpirun`` runs beside the hosts, in the network of the first one, and enters each through an agent
that stands where it would call ``ssh``. Its files are in a mount that ends with it, and the kernel
ends it with the process that started it.
"""

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Self

from topo_ar.emulation.cluster import Cluster
from topo_ar.emulation.loopback import LoopbackCluster
from topo_ar.emulation.namespaces import find_tool
from topo_ar.errors import ConfigError

_INSTALL = "install Open MPI 4.1 (Debian, Ubuntu: openmpi-bin) and `pip install 'topo-ar[mpi]'`"
_STOP_SECONDS = 2.0
# The creator may be gone before the leash is on: mpirun then has another parent.
_LEASH = 'exec setpriv --pdeathsig KILL sh -c \'[ "$PPID" = "$0" ] && exec "$@"\' "$@"\n'


def require_openmpi() -> str:
    """Return the version of the Open MPI that is installed, such as ``4.1.4``.

    Raises
    ------
    ConfigError
        If ``mpirun`` is missing or not Open MPI 4, or mpi4py is missing; says what to install.
    """
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        raise ConfigError(f"the peer openmpi needs the program 'mpirun'; {_INSTALL}")
    if importlib.util.find_spec("mpi4py") is None:
        raise ConfigError(f"the peer openmpi needs the package 'mpi4py'; {_INSTALL}")
    said = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, timeout=30, check=False
    ).stdout
    version = re.search(r"\(Open MPI\) (4\.[\w.]+)", said)
    if version is None:
        found = (said.strip().splitlines() or ["nothing"])[0]
        raise ConfigError(f"the peer openmpi needs Open MPI 4, but mpirun is {found!r}; {_INSTALL}")
    return version[1]


class MpiJob:
    """One running ``mpirun``; made by `start_mpi`, ended by `stop` or by leaving its ``with``."""

    def __init__(self, process: "subprocess.Popen[bytes]", output: IO[bytes]) -> None:
        self._process = process
        self._output = output

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(0.0)

    @property
    def pid(self) -> int:
        """The pid of mpirun, as this machine counts; it leads a process group."""
        return self._process.pid

    def stop(self, patience_s: float) -> int:
        """Give the job `patience_s` seconds to end by itself, then end it; return its exit code."""
        for number, seconds in (
            (None, patience_s),
            (signal.SIGTERM, _STOP_SECONDS),
            (signal.SIGKILL, None),
        ):
            if number is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(seconds)
        raise AssertionError("a killed process ends")

    def said(self) -> list[str]:
        """Return the lines that mpirun and the ranks wrote, without rules and empty ones."""
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()
        return [line.strip() for line in lines if line.strip(" -")]


def start_mpi(
    cluster: Cluster | LoopbackCluster,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    parameters: Mapping[str, str] | None = None,
) -> MpiJob:
    """Start `argv` under ``mpirun`` with one MPI rank for every rank of the cluster.

    MPI rank r runs on the host of rank r. The job ends with the thread that calls this.

    Parameters
    ----------
    cluster
        Hosts that are up.
    argv
        The command; a path in it must be visible in the hosts.
    env
        Variables on top of this process's own.
    parameters
        MCA parameters on top of those that the cluster needs.
    """
    output = tempfile.TemporaryFile()  # noqa: SIM115
    command = _command(cluster, argv, {**_parameters(cluster), **(parameters or {})})
    process = subprocess.Popen(
        command,
        env={"OMP_NUM_THREADS": "1", **os.environ, **(env or {})},
        cwd=cluster.directory,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return MpiJob(process, output)


def _command(
    cluster: Cluster | LoopbackCluster, argv: Sequence[str], parameters: Mapping[str, str]
) -> list[str]:
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    for name, value in parameters.items():
        options += ["--mca", name, value]
    if cluster.emulated:
        options += ["--hostfile", "/run/ranks", "--map-by", "seq"]
    program = ["mpirun", *options, "-np", str(cluster.layout.world_size), *argv]
    tail = [str(os.getpid()), *program]
    if isinstance(cluster, LoopbackCluster):
        return ["sh", "-ec", _LEASH, "sh", *tail]
    apart = ["unshare", "-m", "-u", "--propagation", "private"]
    entrance = cluster.entrance(cluster.hosts[0], "n")
    return [*entrance, *apart, "sh", "-ec", _script(cluster) + _LEASH, "sh", *tail]


def _parameters(cluster: Cluster | LoopbackCluster) -> dict[str, str]:
    everywhere = {"pml": "ob1", "btl": "self,vader,tcp", "mpi_yield_when_idle": "1"}
    if not cluster.emulated:
        return everywhere
    hosts = [[nic.name for nic in host.nics] for host in cluster.layout.hosts]
    shared = [name for name in hosts[0] if all(name in names for names in hosts)]
    return {
        **everywhere,
        "plm_rsh_agent": "sh /run/agent",
        "plm_rsh_no_tree_spawn": "1",
        "oob_tcp_if_include": shared[0],
        "btl_tcp_if_include": ",".join(shared),
    }


def _script(cluster: Cluster) -> str:
    ranks = range(cluster.layout.world_size)
    pids = " ".join(f"{host}) pid={cluster.pid(host)};;" for host in cluster.hosts)
    enter = f"{find_tool('nsenter')} -t $pid -n -u -i -p -m --"
    return "\n".join(
        [
            "mount -t tmpfs tmpfs /run",
            # mpirun must not take itself for one of the hosts.
            "hostname launcher",
            "export TMPDIR=/run",
            "cat >/run/ranks <<X",
            *(cluster.layout.host_of(rank).name for rank in ranks),
            "X",
            "cat >/run/agent <<'X'",
            "while :; do case $1 in -*) shift;; *) break;; esac; done",
            "host=$1; shift",
            f"case $host in {pids} esac",
            f'exec {enter} env -u TMPDIR -C {shlex.quote(cluster.directory)} sh -c "$*"',
            "X",
            "",
        ]
    )
