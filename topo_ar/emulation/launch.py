"""A command on every rank of a cluster, with the environment torchrun would give it."""

import contextlib
import logging
import math
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from topo_ar.emulation.cluster import Cluster
from topo_ar.emulation.loopback import LoopbackCluster

_log = logging.getLogger("topo_ar")
_STOP_SECONDS = 5.0
TIMED_OUT = 124
# What an outer launcher may have set and what does not hold inside.
_FOREIGN = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE")


@dataclass(frozen=True, slots=True)
class Results:
    """How the ranks ended, in rank order; a code of 128 + n is death by signal n.

    `stopped` holds the ranks that the launcher ended because another failed or time was up; their
    codes are not their own doing.
    """

    returncodes: tuple[int, ...]
    stopped: frozenset[int]
    timed_out: bool
    seconds: float

    @property
    def exit_code(self) -> int:
        """The worst code of the ranks that ended by themselves; 124 if time ran out."""
        if self.timed_out:
            return TIMED_OUT
        codes = enumerate(self.returncodes)
        return max((code for rank, code in codes if rank not in self.stopped), default=0)


class Job:
    """One command running on every rank; made by `start`, ended by `wait` or `stop`."""

    def __init__(
        self,
        ranks: Sequence["subprocess.Popen[bytes]"],
        grace_s: float,
        readers: Sequence[threading.Thread] = (),
    ) -> None:
        self._ranks = tuple(ranks)
        self._readers = tuple(readers)
        self._grace_s = grace_s
        self._begun = time.monotonic()
        self._stopped: set[int] = set()
        self._ended_at = self._begun
        self._timed_out = False
        self._running = set(range(len(ranks)))
        self._selector = selectors.DefaultSelector()
        for number, process in enumerate(ranks):
            self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, number)

    def pid(self, rank: int) -> int:
        """Return the process group of a rank, as this machine counts; ``os.killpg`` ends it."""
        return self._ranks[rank].pid

    def wait(self, timeout_s: float | None = None) -> Results:
        """Wait for all ranks and return how they ended.

        The rest is ended some time after one failed, or after `timeout_s`. An interrupt is passed
        on to the ranks, which have a few seconds to end, and then raised again.
        """
        limit = math.inf if timeout_s is None else time.monotonic() + timeout_s
        try:
            self._await(limit)
            self._timed_out |= bool(self._running) and time.monotonic() >= limit
            return self.stop()
        except BaseException:
            self._end(signal.SIGINT)
            raise

    def stop(self) -> Results:
        """End what still runs, by SIGTERM and some seconds later by SIGKILL; return the results."""
        self._end(signal.SIGTERM)
        codes = tuple(_shell_code(process) for process in self._ranks)
        seconds = self._ended_at - self._begun
        return Results(codes, frozenset(self._stopped), self._timed_out, seconds)

    def _await(self, limit: float) -> None:
        failed = False
        while self._running and time.monotonic() < limit:
            for rank in self._wait_once(limit):
                code = _shell_code(self._ranks[rank])
                if code != 0 and self._running and not failed:
                    failed = True
                    limit = min(limit, time.monotonic() + self._grace_s)
                    _log.warning(
                        "rank %d ended with %d; the others have %g s to end as well",
                        *(rank, code, self._grace_s),
                    )

    def _end(self, first: signal.Signals) -> None:
        for number, seconds in ((first, _STOP_SECONDS), (signal.SIGKILL, math.inf)):
            self._stopped |= self._running
            for rank in self._running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._ranks[rank].pid, number)
            limit = time.monotonic() + seconds
            while self._running and time.monotonic() < limit:
                self._wait_once(limit)
        self._selector.close()
        for reader in self._readers:  # a process that left the job may hold the pipe open
            reader.join(1.0)

    def _wait_once(self, limit: float) -> list[int]:
        """Wait for at least one rank to end, at most until `limit`; return those that did."""
        pause = None if limit == math.inf else max(0.0, limit - time.monotonic())
        ended: list[int] = []
        for key, _ in self._selector.select(pause):
            self._ranks[key.data].wait()
            self._selector.unregister(key.fd)
            os.close(key.fd)
            self._running.discard(key.data)
            ended.append(key.data)
            self._ended_at = time.monotonic()
        return ended


def _shell_code(process: "subprocess.Popen[bytes]") -> int:
    code = int(process.returncode)
    return code if code >= 0 else 128 - code


def rank_environment(
    cluster: Cluster | LoopbackCluster, rank: int, master_port: int
) -> dict[str, str]:
    """Return the variables that torchrun would set for `rank`, and the network's.

    ``TOPO_AR_EMULATION`` says ``namespaces`` or ``loopback``, for results to be labelled with.
    """
    layout = cluster.layout
    host = layout.host_of(rank)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(host.ranks.index(rank)),
        "GROUP_RANK": str(host.index),
        "NODE_RANK": str(host.index),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(layout.world_size),
        "LOCAL_WORLD_SIZE": str(len(host.ranks)),
        "GROUP_WORLD_SIZE": str(len(layout.hosts)),
        "ROLE_WORLD_SIZE": str(layout.world_size),
        "MASTER_ADDR": cluster.address(layout.host_of(0).name),
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "topo-ar",
        "GLOO_SOCKET_IFNAME": cluster.interface,
        "TOPO_AR_SOCKET_IFNAME": ",".join(cluster.interfaces(host.name)),
        "NCCL_SOCKET_IFNAME": cluster.interface,
        "TOPO_AR_EMULATION": "namespaces" if cluster.emulated else "loopback",
    }


def start(
    cluster: Cluster | LoopbackCluster,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    master_port: int | None = None,
    grace_s: float = 10.0,
    stdout: int | IO[bytes] | None = None,
    on_line: Callable[[int, bytes], None] | None = None,
) -> Job:
    """Start `argv` on every rank and return the job.

    Parameters
    ----------
    cluster
        Hosts that are up.
    argv
        The command; the same for all ranks.
    env
        Variables on top of this process's own and of `rank_environment`; they win.
    master_port
        For ``MASTER_PORT``, by default 29500, or any free one on the loopback device. Jobs that run
        at the same time need different ones.
    grace_s
        Seconds that the other ranks have to report once a rank has failed.
    stdout
        Where the ranks write, by default where this process does.
    on_line
        Called with the rank and each line it writes to stdout or stderr, one line at a time.
    """
    port = cluster.free_port() if master_port is None else master_port
    inherited = {key: text for key, text in os.environ.items() if key not in _FOREIGN}
    inherited.setdefault("OMP_NUM_THREADS", "1")
    # Hosts have no name service, and torch warns of that once for every connection.
    inherited.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    output: dict[str, Any] = {"stdout": stdout}
    if on_line is not None:
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(cluster.layout.world_size):
            process = cluster.popen(
                cluster.layout.host_of(rank).name,
                argv,
                env={**inherited, **rank_environment(cluster, rank, port), **(env or {})},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                **output,
            )
            ranks.append(process)
    except BaseException:
        for process in ranks:
            os.killpg(process.pid, signal.SIGKILL)
        raise
    return Job(ranks, grace_s, () if on_line is None else _follow(ranks, on_line))


def launch(
    cluster: Cluster | LoopbackCluster,
    argv: Sequence[str],
    *,
    timeout_s: float | None = None,
    **options: Any,
) -> Results:
    """Run `argv` on every rank to its end, at most `timeout_s` seconds; `options` as in `start`."""
    return start(cluster, argv, **options).wait(timeout_s)


def _follow(
    ranks: Sequence["subprocess.Popen[bytes]"], on_line: Callable[[int, bytes], None]
) -> list[threading.Thread]:
    one_at_a_time = threading.Lock()

    def read(number: int, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                with one_at_a_time:
                    on_line(number, line)

    readers = [
        threading.Thread(target=read, args=(number, process.stdout), daemon=True)
        for number, process in enumerate(ranks)
    ]
    for reader in readers:
        reader.start()
    return readers
