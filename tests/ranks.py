"""Rank processes for tests: a pool that lives as long as the session, and fresh ones for faults.

A test sends a module-level function ``fn(rank, world_size, *args)`` to the first `world_size`
processes and gets one result per rank. The processes are forked from a server that has torch
loaded and no thread running, so that a pool starts in a moment. Every run has its own rendezvous
and the environment that torchrun would give it.
"""

import ctypes
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import Any

import torch.distributed as dist

MAX_RANKS = 8
PRELOAD = [
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch._dynamo",  # DistributedDataParallel imports it
    "hypothesis",
    "pytest",
]
GRACE_S = 3.0  # what the other ranks get to come back after one of them failed
_PR_SET_PDEATHSIG = 1
_SINGLE_THREADED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_tell: Callable[[object], None] | None = None


class RanksFailedError(AssertionError):
    """Ranks of a run failed, died or hung; the message holds every rank's traceback.

    Attributes
    ----------
    failures : dict of int to str
        What each rank at fault said, or where it hung.
    hung : tuple of int
        The ranks that had not come back at the deadline.
    """

    def __init__(self, failures: dict[int, str], hung: tuple[int, ...], deadline_s: float) -> None:
        self.failures = failures
        self.hung = hung
        head = f"ranks {sorted(failures)} failed"
        if hung:
            head += f"; ranks {list(hung)} hung (deadline {deadline_s:g} s, stacks below)"
        body = [f"--- rank {rank} ---\n{text.rstrip()}" for rank, text in sorted(failures.items())]
        super().__init__("\n".join([head, *body]))


@dataclass(frozen=True, slots=True)
class _Job:
    call: bytes
    rank: int
    world_size: int
    store: str | None
    fresh: bool
    deadline_s: float
    env: dict[str, str]
    sys_path: list[str]


@dataclass(slots=True)
class Outcome:
    """How one fresh rank ended: exit code (negative: signal), its result, or its traceback."""

    rank: int
    exitcode: int | None = None
    result: Any = None
    error: str | None = None
    hung: bool = False


@dataclass(slots=True)
class _Rank:
    """One rank process as its parent sees it."""

    process: Any
    pipe: Any
    stacks: Path
    outcome: Outcome = field(default_factory=lambda: Outcome(-1))
    settled: bool = False


@dataclass(frozen=True, slots=True)
class FreshRun:
    """The running fresh ranks, as a callback sees them."""

    pids: tuple[int, ...]

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """Send a signal to a rank."""
        os.kill(self.pids[rank], signum)


def tell(message: object) -> None:
    """Send `message` from inside a rank to the `on_message` callback of the test."""
    assert _tell is not None, "tell() works inside a rank only"
    _tell(message)


class RankPool:
    """Up to eight rank processes, started when first needed and rebuilt after a failure."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._ranks: list[_Rank] = []
        self._directory = tempfile.TemporaryDirectory(prefix="topo-ar-ranks-")
        self._store: dist.TCPStore | None = None
        self._names = itertools.count()

    def run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        deadline_s: float = 20.0,
        env: dict[str, str] | None = None,
        init: bool = True,
    ) -> list[Any]:
        """Return what ``fn(rank, world_size, *args)`` returned on each rank, in rank order.

        Parameters
        ----------
        fn : callable
            A module-level function; it is sent by name.
        deadline_s : float
            Seconds after which the pool is killed and the test fails with every rank's stacks.
        env : dict, optional
            Environment variables for this run only.
        init : bool
            Whether torch.distributed is initialised with gloo before, and destroyed after.

        Raises
        ------
        RanksFailedError
            If any rank raised, died or missed the deadline.
        """
        __tracebackhide__ = True
        while len(self._ranks) < world_size:
            self._ranks.append(self._start())
        ranks = self._ranks[:world_size]
        try:
            self._send(ranks, fn, args, init=init, fresh=False, deadline_s=deadline_s, env=env)
            self._collect(ranks, deadline_s)
            failures, hung = _faults(ranks)
            if failures:
                raise RanksFailedError(failures, hung, deadline_s)
            results = [rank.outcome.result for rank in ranks]
            self._release(ranks, deadline_s)
        except BaseException:
            self._discard()
            raise
        return results

    def fresh(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        deadline_s: float = 20.0,
        env: dict[str, str] | None = None,
        init: bool = True,
        on_message: Callable[[FreshRun, int, Any], None] | None = None,
    ) -> list[Outcome]:
        """Run `fn` in new processes and return how each of them ended, without judging.

        A rank that raises exits with 1, one that returns with 0; ranks that miss the deadline
        are killed and marked ``hung`` with their stacks as the error. `on_message` is called
        with the run, the rank and the message for each :func:`tell` inside a rank, and may kill
        ranks. The other parameters are those of :meth:`run`.
        """
        ranks = [self._start() for _ in range(world_size)]
        run = FreshRun(tuple(rank.process.pid for rank in ranks))
        try:
            self._send(ranks, fn, args, init=init, fresh=True, deadline_s=deadline_s, env=env)
            self._collect(
                ranks, deadline_s, lambda rank, text: on_message and on_message(run, rank, text)
            )
            for rank in ranks:
                rank.process.join(0 if rank.outcome.hung else 1)
        finally:
            _end(ranks)
        for rank in ranks:
            rank.outcome.exitcode = rank.process.exitcode
        return [rank.outcome for rank in ranks]

    def close(self) -> None:
        """End every process of the pool, and the servers that multiprocessing started for it."""
        self._discard()
        self._store = None
        self._directory.cleanup()
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]

    def _start(self) -> _Rank:
        stacks = Path(self._directory.name) / f"stacks-{next(self._names)}"
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there, str(stacks)), daemon=True)
        before = {name: os.environ.get(name) for name in _SINGLE_THREADED}
        os.environ.update(dict.fromkeys(_SINGLE_THREADED, "1"))
        try:
            forkserver.set_forkserver_preload(PRELOAD)
            process.start()
        finally:
            _restore(before)
        there.close()
        return _Rank(process, here, stacks)

    def _send(
        self,
        ranks: list[_Rank],
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        init: bool,
        fresh: bool,
        deadline_s: float,
        env: dict[str, str] | None,
    ) -> None:
        shared = {
            "WORLD_SIZE": str(len(ranks)),
            "LOCAL_WORLD_SIZE": str(len(ranks)),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        if not init:
            shared |= self._host_store()
        store = str(Path(self._directory.name) / f"store-{next(self._names)}")
        call = pickle.dumps((fn, args))
        for index, rank in enumerate(ranks):
            names = {"RANK": str(index), "LOCAL_RANK": str(index)}
            environment = shared | names | (env or {})
            job = _Job(
                call,
                index,
                len(ranks),
                store if init else None,
                fresh,
                deadline_s,
                environment,
                list(sys.path),
            )
            rank.outcome, rank.settled = Outcome(index), False
            rank.pipe.send_bytes(pickle.dumps(job))

    def _collect(
        self,
        ranks: list[_Rank],
        deadline_s: float,
        on_message: Callable[[int, Any], object] | None = None,
    ) -> None:
        end = time.monotonic() + deadline_s
        while waiting := [rank for rank in ranks if not rank.settled]:
            ready = connection.wait([rank.pipe for rank in waiting], max(0, end - time.monotonic()))
            if not ready:
                _dump_stacks(waiting)
                return
            for rank in [rank for rank in waiting if rank.pipe in ready]:
                message = _settle(rank)
                if message is not None and on_message is not None:
                    on_message(rank.outcome.rank, message[0])
                if on_message is None and rank.settled and rank.outcome.error:
                    end = min(end, time.monotonic() + GRACE_S)

    def _release(self, ranks: list[_Rank], deadline_s: float) -> None:
        """Let the ranks destroy their groups, now that all of them are through."""
        __tracebackhide__ = True
        for rank in ranks:
            rank.settled = False
            rank.pipe.send_bytes(b"")
        self._collect(ranks, deadline_s)
        failures, hung = _faults(ranks)
        if failures:
            raise RanksFailedError(failures, hung, deadline_s)

    def _host_store(self) -> dict[str, str]:
        """Start a store for ``env://``, which as under torchrun belongs to no rank."""
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            # TCPStore asks DNS for the name of ::ffff:127.0.0.1; no answer costs five seconds.
            "RES_OPTIONS": "timeout:1",
        }

    def _discard(self) -> None:
        _end(self._ranks)
        self._ranks = []


def _settle(rank: _Rank) -> tuple[object] | None:
    """Take one report from a rank; return it in a tuple if it is a message to the test."""
    try:
        kind, value = pickle.loads(rank.pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        rank.process.join(1.0)
        rank.outcome.exitcode = rank.process.exitcode
        if rank.outcome.error is None and rank.outcome.exitcode != 0:
            rank.outcome.error = f"process ended with exit code {rank.outcome.exitcode}"
        rank.settled = True
        return None
    if kind == "message":
        return (value,)
    if kind == "error":
        rank.outcome.error = value
    elif kind == "result":
        rank.outcome.result = value
    rank.settled = True
    return None


def _dump_stacks(ranks: list[_Rank]) -> None:
    """Mark `ranks` as hung and note where their threads are."""
    for rank in ranks:
        rank.settled = rank.outcome.hung = True
        os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(0.3)
    for rank in ranks:
        stacks = rank.stacks.read_text() if rank.stacks.exists() else ""
        rank.outcome.error = f"hung here:\n{stacks or 'no stacks: it never came to Python'}"


def _faults(ranks: list[_Rank]) -> tuple[dict[int, str], tuple[int, ...]]:
    outcomes = [rank.outcome for rank in ranks]
    failures = {outcome.rank: outcome.error for outcome in outcomes if outcome.error is not None}
    return failures, tuple(outcome.rank for outcome in outcomes if outcome.hung)


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        rank.process.kill()
        rank.pipe.close()
    for rank in ranks:
        rank.process.join(5.0)


def _restore(environment: dict[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _serve(pipe: Any, stacks: str) -> None:
    """Work through jobs until the parent closes the pipe; this is the life of a rank process."""
    import faulthandler

    import torch

    # The fork server stays for as long as any of its children holds this descriptor open, and
    # its death is what ends a rank that is busy when the session dies.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        torch.set_num_threads(1)
        while True:
            try:
                job: _Job = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                return
            if job.fresh:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            before = {name: os.environ.get(name) for name in job.env}
            os.environ.update(job.env)
            try:
                ok = _perform(job, pipe)
            except BrokenPipeError:  # the test is over
                return
            _restore(before)
            if job.fresh:
                sys.exit(0 if ok else 1)


def _init_gloo(job: _Job, path: str) -> None:
    """Initialise the default group over a file: no port, no name look-up, no owner."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(path, job.world_size),
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.deadline_s),
    )


def _perform(job: _Job, pipe: Any) -> bool:
    """Do one job and report; return whether it went well."""
    global _tell
    import torch

    def report(kind: str, value: object) -> None:
        pipe.send_bytes(pickle.dumps((kind, value)))

    sys.path[:] = job.sys_path
    _tell = lambda message: report("message", message)  # noqa: E731
    torch.manual_seed(0)
    torch.set_num_threads(1)
    try:
        fn, args = pickle.loads(job.call)
        if job.store:
            _init_gloo(job, job.store)
        result = fn(job.rank, job.world_size, *args)
        if not job.fresh:
            report("result", result)
            pipe.recv_bytes()
        if job.store and dist.is_initialized():
            dist.destroy_process_group()
        report("result", result)
    except BaseException:
        report("error", traceback.format_exc())
        return False
    return True
