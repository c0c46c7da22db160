"""Runs the steps of a cluster and holds the pipes that keep its namespaces alive."""

import contextlib
import logging
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO

from topo_ar.emulation.steps import SWITCH, Step
from topo_ar.errors import EmulationError

_log = logging.getLogger("topo_ar")
_STEP_SECONDS = 30.0
_EXIT_SECONDS = 5.0


def tool_environment() -> dict[str, str]:
    """Return this process's environment with the ``sbin`` beside every ``bin`` on the path.

    Debian keeps ``tc`` there, out of sight of ordinary users.
    """
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    path += [f"{entry[:-3]}sbin" for entry in path if entry.endswith("/bin")]
    return {**os.environ, "PATH": os.pathsep.join(path), "LC_ALL": "C"}


def find_tool(name: str) -> str:
    """Return the path of a program, or its `name` where there is none."""
    return shutil.which(name, path=tool_environment()["PATH"]) or name


@dataclass(slots=True)
class _Holder:
    """A pid 1 (or a daemon) and the only write end of the pipe that keeps it alive."""

    process: subprocess.Popen[bytes]
    alive: int


class Namespaces:
    """The live namespaces of one cluster.

    They belong to this process: the kernel removes them when it ends, even by SIGKILL. A child made
    by a plain ``fork`` inherits the pipes and keeps them alive as well; use spawn or forkserver.
    """

    def __init__(self, rootless: bool) -> None:
        self.rootless = rootless
        self.pids: dict[str, int] = {}
        self._holders: dict[str, list[_Holder]] = {}
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115

    def build(self, stages: Iterable[tuple[Step, ...]]) -> None:
        """Run all steps, each stage at once; remove everything again if one fails.

        Raises
        ------
        EmulationError
            If a step fails or does not end in time, with what its tool said.
        """
        try:
            for stage in stages:
                self._run_stage(stage)
        except BaseException:
            self.close()
            raise

    def run(self, target: str, script: str) -> None:
        """Run a shell `script` in the network namespace of `target`; EmulationError if it fails."""
        self._run_stage((Step("run", target, script),))

    def enter(self, target: str, namespaces: Iterable[str]) -> list[str]:
        """Return the command prefix that enters the given namespaces (``n``, ``m``) of `target`."""
        user = ["-U", "--preserve-credentials"] if self.rootless else []
        flags = [f"-{namespace}" for namespace in namespaces]
        return [find_tool("nsenter"), "-t", str(self.pids[target]), *user, *flags, "--"]

    def drop(self, target: str) -> None:
        """End `target` and everything in it; nothing happens if it is gone already."""
        self.pids.pop(target, None)
        holders = self._holders.pop(target, [])
        for holder in holders:
            with contextlib.suppress(OSError):
                os.close(holder.alive)
        deadline = time.monotonic() + _EXIT_SECONDS
        for holder in holders:
            try:
                holder.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _log.warning("%s did not end by itself and is killed", target)
                holder.process.kill()
                holder.process.wait()
            if holder.process.stdout is not None:
                holder.process.stdout.close()

    def close(self) -> None:
        """End all hosts, then the switch."""
        for target in sorted(self._holders, key=lambda name: name == SWITCH):
            self.drop(target)
        self._errors.close()

    def _run_stage(self, stage: tuple[Step, ...]) -> None:
        deadline = time.monotonic() + _STEP_SECONDS
        scripts = [(step, self._start(step)) for step in stage if step.kind == "run"]
        holders = [(step, self._hold(step)) for step in stage if step.kind != "run"]
        failed = [step for step, process in scripts if not self._finish(process, deadline)]
        for step, holder in holders:
            line = _first_line(holder.process, deadline)
            if line is None:
                failed.append(step)
            elif step.kind == "spawn":
                self.pids[step.target] = int(line)
        if failed:
            raise EmulationError(f"{failed[0].target} could not be set up: {self._last_error()}")

    def _command(self, step: Step) -> list[str]:
        pids = {f"${name}": str(pid) for name, pid in self.pids.items()}
        return [pids.get(word, word) for word in step.argv(self.rootless)]

    def _start(self, step: Step) -> subprocess.Popen[bytes]:
        with tempfile.TemporaryFile() as script:
            script.write(step.script.encode())
            script.seek(0)
            return subprocess.Popen(
                self._command(step),
                stdin=script,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=tool_environment() | {name: str(pid) for name, pid in self.pids.items()},
            )

    def _hold(self, step: Step) -> _Holder:
        read_end, write_end = os.pipe()
        try:
            # A session of its own: Ctrl-C at the terminal must not end the hosts under a job that
            # is still reporting.
            process = subprocess.Popen(
                self._command(step),
                stdin=read_end,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=tool_environment(),
                start_new_session=True,
            )
        except OSError:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        holder = _Holder(process, write_end)
        self._holders.setdefault(step.target, []).append(holder)
        return holder

    def _finish(self, process: subprocess.Popen[bytes], deadline: float) -> bool:
        try:
            return process.wait(max(0.0, deadline - time.monotonic())) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return False
        except BaseException:
            process.send_signal(signal.SIGKILL)
            process.wait()
            raise

    def _last_error(self) -> str:
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        lines = [line for line in lines if not line.startswith("Command failed")]
        return lines[-1] if lines else f"no answer within {_STEP_SECONDS:.0f} s"


def _first_line(process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
    assert process.stdout is not None
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return None
            piece = os.read(process.stdout.fileno(), 4096)
            if not piece:
                return None
            line += piece
    return line
