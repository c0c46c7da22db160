"""The processes of a check: how they are started and ended, and what one of them does."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.gpu.catalogue import CHECKS, Check

SETTINGS_ENV = "TOPO_AR_GPU_CHECK"
ROOT = Path(__file__).parents[2]
PASS, FAIL, LEFT_OUT = "PASS", "FAIL", "LEFT OUT"
_POLL_S = 0.02
# What the others get to say after one has failed.
_GRACE_S = 3.0


@dataclass(frozen=True)
class Settings:
    """What the process of a rank is told."""

    check: str
    device: str
    rank: int
    world_size: int
    local_rank: int
    num_devices: int
    timeout_s: float
    quick: bool
    folder: str
    store: str | None


@dataclass(frozen=True)
class Verdict:
    """How a check ended.

    Attributes
    ----------
    status : str
        One of `PASS`, `FAIL` and `LEFT_OUT`.
    text : str
        Why, where it did not pass.
    figures : dict
        What rank 0 found.
    """

    status: str
    seconds: float
    text: str
    figures: dict[str, Any]


def run(settings: Sequence[Settings], deadline_s: float) -> Verdict:
    """Run a check in a process for each of `settings`, and end what is not done in time."""
    begin = time.monotonic()
    folder = Path(settings[0].folder)
    folder.mkdir(parents=True, exist_ok=True)
    processes = [_start(each, folder) for each in settings]
    try:
        end = begin + deadline_s
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            if any(process.poll() for process in processes):
                end = min(end, time.monotonic() + _GRACE_S)
            time.sleep(_POLL_S)
    finally:
        late = [process.poll() is None for process in processes]
        for process in processes:
            # A session of its own: what it started ends with it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - begin
    timed_out = seconds >= deadline_s
    found = [_found(each, folder, late[i] and timed_out) for i, each in enumerate(settings)]
    failed = [report for report in found if report["status"] == FAIL]
    if failed:
        # The others only say that they waited for the first.
        return Verdict(FAIL, seconds, min(failed, key=lambda report: report["at"])["text"], {})
    return Verdict(found[0]["status"], seconds, found[0]["text"], found[0]["figures"])


def _start(settings: Settings, folder: Path) -> "subprocess.Popen[bytes]":
    environment = dict(os.environ)
    environment[SETTINGS_ENV] = json.dumps(asdict(settings))
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), environment.get("PYTHONPATH")])
    )
    environment.setdefault("OMP_NUM_THREADS", "1")
    if settings.store is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        _share_devices(environment, settings)
    with (folder / f"rank{settings.rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "experiments.gpu.ranks"],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _share_devices(environment: dict[str, str], settings: Settings) -> None:
    """Make two hosts of the ranks; where they share a device, make NCCL take each for a host."""
    if settings.world_size % 2 == 0:
        environment["TOPO_AR_HOSTID"] = str(settings.rank // (settings.world_size // 2))
    if settings.num_devices < settings.world_size:
        # It refuses two ranks on one device of one host.
        environment["NCCL_HOSTID"] = f"rank{settings.rank}"
        environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
        environment.setdefault("NCCL_NET", "Socket")
        environment.setdefault("NCCL_MNNVL_ENABLE", "0")
        environment.setdefault("NCCL_MAX_NCHANNELS", "2")


def _found(settings: Settings, folder: Path, late: bool) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads((folder / f"rank{settings.rank}.json").read_text())
        return report
    except (OSError, ValueError):
        what = "was not done in time" if late else "ended without a report"
        lines = (folder / f"rank{settings.rank}.log").read_text(errors="replace").splitlines()
        last = f": {' | '.join(lines[-3:])}" if lines else ""
        text = f"rank {settings.rank} {what}{last}"
        return {"status": FAIL, "text": text, "figures": {}, "at": math.inf}


def serve(settings: Settings) -> int:
    """Do the part of one rank, and leave a report."""
    folder = Path(settings.folder)
    check = next(check for check in CHECKS if check.name == settings.check)
    from experiments.gpu.context import LeftOutError

    status, text, figures = PASS, "", {}
    try:
        figures = _checked(check, settings)
    except LeftOutError as error:
        status, text = LEFT_OUT, str(error)
    except BaseException as error:
        import traceback

        traceback.print_exc()
        status, text = FAIL, f"rank {settings.rank}: {type(error).__name__}: {error}"
    report = {"status": status, "text": text, "figures": figures, "at": time.monotonic()}
    path = folder / f"rank{settings.rank}.json"
    path.with_suffix(".part").write_text(json.dumps(report))
    path.with_suffix(".part").replace(path)
    # No farewells: a device or a peer that hangs would keep them waiting.
    sys.stdout.flush()
    os._exit(status == FAIL)


def _checked(check: Check, settings: Settings) -> dict[str, Any]:
    import torch

    from experiments.gpu.context import Context

    device = torch.device("cpu")
    if settings.device == "cuda":
        device = torch.device("cuda", settings.local_rank % settings.num_devices)
        torch.cuda.set_device(device)
    if settings.device == "cpu":
        torch.set_num_threads(1)
    context = Context(
        device, settings.rank, settings.world_size, settings.quick, settings.timeout_s
    )
    if not check.backend:
        return dict(check.run(context, Path(settings.folder)))
    _join(check, settings)
    if check.backend == "nccl" and 0 < settings.num_devices < settings.world_size:
        _try_nccl(settings)
    figures = dict(check.run(context, Path(settings.folder)))
    # Nobody leaves while another may still read its memory; by gloo, whatever reduces the rest.
    torch.distributed.all_reduce(torch.zeros(1))
    return figures


def _join(check: Check, settings: Settings) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    timeout = timedelta(seconds=settings.timeout_s)
    with_nccl = check.backend.startswith("nccl") and settings.device == "cuda"
    where: dict[str, Any] = {"init_method": f"file://{settings.store}"}
    if settings.store is None:  # under a launcher, which may span nodes
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=settings.rank == 0 and not agent, timeout=timeout
        )
        where = {"store": dist.PrefixStore(check.name, store)}  # type: ignore[attr-defined]
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if with_nccl else "gloo",
        rank=settings.rank,
        world_size=settings.world_size,
        timeout=timeout,
        **where,
    )


def _try_nccl(settings: Settings) -> None:
    """Leave the check out where NCCL itself, with nothing of ours, does not do it."""
    import torch
    import torch.distributed as dist

    from experiments.gpu.context import LeftOutError

    ones = torch.ones(1000, device=f"cuda:{torch.cuda.current_device()}")
    try:
        dist.all_reduce(ones)
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise LeftOutError(f"NCCL does not let ranks share a device: {error}") from error
    if not bool((ones == settings.world_size).all()):
        raise LeftOutError("NCCL's own all-reduce of ranks that share a device is wrong")


if __name__ == "__main__":
    sys.exit(serve(Settings(**json.loads(os.environ[SETTINGS_ENV]))))
