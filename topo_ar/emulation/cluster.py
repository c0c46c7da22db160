"""Several real hosts on this machine, as a context manager."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from topo_ar.emulation.keep import kept_paths, working_directory
from topo_ar.emulation.layout import Host, Nic, lay_out
from topo_ar.emulation.links import bucket
from topo_ar.emulation.namespaces import Namespaces, find_tool, tool_environment
from topo_ar.emulation.preflight import require
from topo_ar.emulation.spec import ClusterSpec
from topo_ar.emulation.steps import SWITCH, build_steps
from topo_ar.errors import ConfigError, EmulationError
from topo_ar.units import parse_rate

_log = logging.getLogger("topo_ar")
_SIGNALS = "INT,TERM,HUP,QUIT"
# A shell waits outside the host's pid namespace: nsenter, which could, stops itself for good with a
# command that is stopped, and hides of which signal it died.
_WAITER = '"$@"; exit $?'


class Cluster:
    """Hosts with namespaces of their own (net, uts, ipc, pid, mount) joined by shaped links.

    Works the same with and without root. Whatever happens to this process, the kernel removes the
    hosts, their processes and their links when it ends.

    Parameters
    ----------
    spec : ClusterSpec
        The hosts and links.
    keep : iterable of path
        Paths below ``/tmp``, ``/var/tmp`` or ``/dev/shm``, of which every host has its own, that
        the hosts shall see nevertheless. The interpreter, the package and the working directory are
        kept by themselves.

    Examples
    --------
    >>> with Cluster(ClusterSpec.uniform(2, 1)) as cluster:            # doctest: +SKIP
    ...     cluster.run("host0", ["hostname"])
    """

    emulated = True
    interface = "eth0"

    def __init__(self, spec: ClusterSpec, *, keep: Iterable[str | Path] = ()) -> None:
        self.spec = spec
        self.layout = lay_out(spec)
        self._keep = kept_paths(keep)
        self._namespaces: Namespaces | None = None
        self._rates: dict[tuple[str, str], float] = {}
        self._jobs: list[subprocess.Popen[Any]] = []

    def start(self) -> Self:
        """Build the hosts.

        Raises
        ------
        EmulationError
            If this machine lacks something, said in one sentence, or a step fails.
        """
        require()
        namespaces = Namespaces(rootless=os.geteuid() != 0)
        begun = time.monotonic()
        namespaces.build(
            build_steps(self.spec, self.layout, keep=self._keep, python=sys.executable)
        )
        self._namespaces = namespaces
        _log.debug("%d hosts up in %.3f s", len(self.layout.hosts), time.monotonic() - begun)
        return self

    def close(self) -> None:
        """End every process in every host and remove the hosts; harmless when closed already."""
        if self._namespaces is not None:
            self._namespaces.close()
            self._namespaces = None
        for job in self._jobs:
            if job.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        self._jobs.clear()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of all hosts, in the order of the spec's nodes."""
        return tuple(host.name for host in self.layout.hosts)

    def interfaces(self, host: str) -> tuple[str, ...]:
        """Return the names of a host's NICs."""
        return tuple(nic.name for nic in self._host(host).nics)

    def address(self, host: str) -> str:
        """Return the address of a host's first NIC."""
        return self._host(host).nics[0].address

    def free_port(self) -> int:
        """Return torchrun's default port: every host's ports are its own."""
        return 29500

    def pid(self, host: str) -> int:
        """Return the pid of the host's pid 1 as this machine counts; EmulationError if gone."""
        return self._live(host).pids[host]

    @property
    def directory(self) -> str:
        """The directory in which commands start that name none: this process's, if hosts see it."""
        return working_directory(self._keep)

    def entrance(self, host: str, namespaces: str) -> list[str]:
        """Return the command prefix that enters some namespaces of a host, in nsenter's letters.

        ``n`` alone gives a command the host's network, and this machine's files and processes. The
        hosts do not end such a command: tie it to its creator.
        """
        return self._live(host).enter(host, namespaces)

    def popen(
        self,
        host: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        **options: Any,
    ) -> "subprocess.Popen[Any]":
        """Start a command in a host and return its `subprocess.Popen`.

        Streams, environment and exit code are the command's own; the code is 128 + n for death by
        signal n, as in a shell. The command leads a process group of its own: signal
        the group, ``os.killpg(process.pid, SIGTERM)``. Stop it by `freeze` or from inside: a group
        that is stopped outlives this process if that is killed. `options` go to `subprocess.Popen`.
        """
        namespaces = self._live(host)
        directory = self.directory if cwd is None else str(cwd)
        command = [
            *(find_tool("env"), f"--ignore-signal={_SIGNALS}"),
            *namespaces.enter(host, "Fnuipm"),
            *(find_tool("env"), "-C", directory, "sh", "-c", _WAITER, "sh"),
            *(find_tool("env"), f"--default-signal={_SIGNALS}"),
            *(find_tool("setpriv"), "--pdeathsig", "KILL"),
            *argv,
        ]
        environment = dict(os.environ if env is None else env)
        # Not a session of its own: Linux groups tasks by session for scheduling, and a rank that
        # yields its core would then yield to none of the others.
        job = subprocess.Popen(command, env=environment, process_group=0, **options)
        # Without asking them: who polls reaps, and the caller may be about to open a pidfd.
        self._jobs = [old for old in self._jobs if old.returncode is None]
        self._jobs.append(job)
        return job

    def run(
        self,
        host: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        timeout_s: float = 30.0,
    ) -> str:
        """Run a command in a host to its end and return what it wrote to stdout.

        Raises
        ------
        EmulationError
            If it does not end with 0 within `timeout_s` seconds.
        """
        pipe = subprocess.PIPE
        job = self.popen(host, argv, env=env, cwd=cwd, stdout=pipe, stderr=pipe, text=True)
        try:
            output, errors = job.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()
            raise EmulationError(
                f"{argv[0]} on {host} did not end within {timeout_s:g} s"
            ) from error
        if job.returncode != 0:
            said = errors.strip().splitlines()[-1:] or ["no message"]
            raise EmulationError(f"{argv[0]} on {host} ended with {job.returncode}: {said[0]}")
        return str(output)

    def rate(self, host: str, nic: str) -> float:
        """Return the rate in bytes/s at which a NIC is shaped now."""
        return self._rates.get((host, nic), self._nic(host, nic).rate)

    def set_rate(self, host: str, nic: str, rate: str | float) -> None:
        """Shape a NIC anew, in both directions, while traffic flows.

        `rate` is bytes/s or text such as ``200mbit``. Takes a few milliseconds.
        """
        value = parse_rate(rate) if isinstance(rate, str) else rate
        if value <= 0:
            raise ConfigError(f"a link of {rate} bytes/s carries nothing; use link(up=False)")
        entry = self._nic(host, nic)
        self._rates[host, nic] = value
        for target, device in ((host, entry.name), (SWITCH, entry.port)):
            line = bucket(device, value, self.spec.burst)
            self._live(host).run(target, f"tc {line}\n")

    def link(self, host: str, nic: str, up: bool) -> None:
        """Pull the cable out of a NIC, or put it back; nothing else of the host changes."""
        state = "up" if up else "down"
        port = self._nic(host, nic).port
        self._live(host).run(SWITCH, f"ip link set {port} {state}\n")

    def freeze(self, host: str) -> None:
        """Stop all processes of a host. Its kernel still acknowledges what arrives."""
        self._signal_all(host, "STOP")

    def thaw(self, host: str) -> None:
        """Continue all processes of a frozen host."""
        self._signal_all(host, "CONT")

    def kill_jobs(self, host: str) -> None:
        """Kill every process of a host, also those that left their job's process group."""
        self._signal_all(host, "KILL")

    def crash(self, host: str) -> None:
        """Kill a host; its peers see their connections reset. For a power cut pull the cable first.

        The host stays gone.
        """
        self._live(host).drop(host)

    def counters(self, host: str) -> dict[str, int]:
        """Return the bytes each NIC of a host has sent so far, Ethernet headers included."""
        table = Path(f"/proc/{self.pid(host)}/net/dev").read_text().splitlines()
        rows = (line.partition(":") for line in table[2:])
        sent = {name.strip(): int(values.split()[8]) for name, _, values in rows}
        return {nic.name: sent[nic.name] for nic in self._host(host).nics}

    def _live(self, host: str) -> Namespaces:
        self._host(host)
        if self._namespaces is None or host not in self._namespaces.pids:
            raise EmulationError(f"{host} is not up; it was crashed, or the cluster is closed")
        return self._namespaces

    def _host(self, name: str) -> Host:
        try:
            return self.layout.host(name)
        except KeyError as error:
            raise ConfigError(str(error.args[0])) from error

    def _nic(self, host: str, nic: str) -> Nic:
        nics = {entry.name: entry for entry in self._host(host).nics}
        if nic not in nics:
            raise ConfigError(f"{host} has no NIC {nic!r}; it has {', '.join(nics)}")
        return nics[nic]

    def _signal_all(self, host: str, name: str) -> None:
        command = [*self._live(host).enter(host, "p"), "sh", "-c", f"kill -{name} -1"]
        subprocess.run(command, env=tool_environment(), stderr=subprocess.DEVNULL, check=False)
