"""Does everything that CPUs cannot show hold on a GPU: streams, NCCL, codecs' kernels, NVML?

Command: python -m experiments.gpu_checks --out gpu-results/
On another machine: make gpu-bundle here; there tar xf gpu-bundle.tar and gpu-bundle/run.
On all GPUs of several nodes: torchrun ... -m experiments.gpu_checks --out gpu-results/
Rehearsal without a GPU: python -m experiments.gpu_checks --device cpu --quick
Minutes: 8 at most.

The checks come in order of value, each in processes of its own with a deadline. On one GPU several
ranks share it: over gloo, and over NCCL that takes each for a host of its own. With as many GPUs as
ranks each has its own, and the figures by size mean something. Exit code 1 if a check fails.

Writes gpu_checks.jsonl, and for each check a folder with the output of its ranks.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.gpu.catalogue import CHECKS, Check
from experiments.gpu.ranks import FAIL, LEFT_OUT, ROOT, Settings, Verdict, run
from topo_ar.cli.script import exit_code_of
from topo_ar.errors import ConfigError
from topo_ar.telemetry.records import RecordWriter, manifest

_ASK = "import torch; print(torch.cuda.device_count(), torch.cuda.is_available())"
_COMMIT_ENV = "TOPO_AR_COMMIT"


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, help="default: as many as GPUs, 4 on one")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all checks together")
    parser.add_argument("--only", nargs="+", metavar="CHECK", help="checks whose name has this")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller of everything")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    options = parser.parse_args(arguments)
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    end = time.monotonic() + 60 * options.minutes
    checks = [c for c in CHECKS if not options.only or any(o in c.name for o in options.only)]
    if not checks:
        names = ", ".join(check.name for check in CHECKS)
        raise ConfigError(f"--only names no check; there are: {names}")
    num_devices = _num_devices() if options.device == "cuda" else 0
    if options.device == "cuda" and not num_devices:
        raise ConfigError("torch sees no CUDA device here; --device cpu rehearses without")
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    rank = int(os.environ["RANK"]) if launched else 0
    ranks = options.ranks or (num_devices if num_devices > 1 else 4)
    if launched:
        ranks = int(os.environ["WORLD_SIZE"])
    if rank == 0:
        where = f"{num_devices} CUDA devices" if num_devices else "CPU, a rehearsal"
        print(f"{ranks} ranks on {where}, {len(checks)} checks", flush=True)
    verdicts = []
    with tempfile.TemporaryDirectory() as stores:
        for check in checks:
            settings = _settings(check, options, num_devices, ranks, Path(stores), launched)
            verdict = _verdict(check, settings, end)
            verdicts.append(verdict)
            if rank == 0:
                _report(check, verdict, options, ranks, num_devices)
    failed = sum(verdict.status == FAIL for verdict in verdicts)
    left_out = sum(verdict.status == LEFT_OUT for verdict in verdicts)
    if rank == 0:
        passed = len(verdicts) - failed - left_out
        print(f"{passed} passed, {failed} failed, {left_out} left out", flush=True)
    return 1 if failed else 0


def _settings(
    check: Check,
    options: argparse.Namespace,
    num_devices: int,
    ranks: int,
    stores: Path,
    launched: bool,
) -> list[Settings]:
    """Return what the ranks to be started here are told; none where rank 0 alone has to do."""
    folder = options.out.resolve() / check.name.replace(" ", "-")
    alone = not check.backend or check.backend.endswith("one")

    def one(rank: int, local_rank: int) -> Settings:
        (folder / f"rank{rank}.json").unlink(missing_ok=True)
        return Settings(
            check=check.name,
            device=options.device,
            rank=rank,
            world_size=1 if alone else ranks,
            local_rank=local_rank,
            num_devices=num_devices,
            # Before the deadline, so that the ranks can say whom they waited for.
            timeout_s=check.deadline_s * 0.6,
            quick=options.quick,
            folder=str(folder),
            store=None if launched and not alone else str(stores / check.name.replace(" ", "-")),
        )

    if not launched:
        return [one(rank, rank) for rank in range(1 if alone else ranks)]
    rank = int(os.environ["RANK"])
    if alone and rank:
        return []
    return [one(rank, int(os.environ.get("LOCAL_RANK", "0")))]


def _verdict(check: Check, settings: list[Settings], end: float) -> Verdict:
    left_s = end - time.monotonic()
    if check.needs_cuda and settings and settings[0].device != "cuda":
        return Verdict(LEFT_OUT, 0.0, "there is nothing of it on CPU", {})
    if not settings:
        return Verdict(LEFT_OUT, 0.0, "rank 0 does it", {})
    if left_s < 1:
        return Verdict(FAIL, 0.0, "no time was left for it", {})
    return run(settings, min(check.deadline_s, left_s))


def _report(
    check: Check, verdict: Verdict, options: argparse.Namespace, ranks: int, num_devices: int
) -> None:
    figures = ", ".join(f"{name} {_short(value)}" for name, value in verdict.figures.items())
    print(f"{verdict.status:8} {check.name:15} {verdict.seconds:5.1f} s  {verdict.text or figures}")
    sys.stdout.flush()
    with RecordWriter(options.out / "gpu_checks.jsonl") as writer:
        writer.write(
            {
                "experiment": "gpu_checks",
                "check": check.name,
                "question": check.question,
                "status": verdict.status,
                "seconds": verdict.seconds,
                "text": verdict.text.replace(str(ROOT), "."),
                "figures": verdict.figures,
                "device": options.device,
                "num_devices": num_devices,
                "ranks": ranks,
                "quick": options.quick,
                "bundle_commit": os.environ.get(_COMMIT_ENV),
                "manifest": manifest(),
            }
        )


def _short(value: Any) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and value != int(value)
        else (f"{value:.0f}" if isinstance(value, float) else str(value))
    )


def _num_devices() -> int:
    """Ask a process of its own: this one must not hold a device, nor wait for one that hangs."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        raise ConfigError("torch did not find out in two minutes whether there is a GPU") from None
    words = done.stdout.split()
    return int(words[0]) if len(words) == 2 and words[1] == "True" else 0


if __name__ == "__main__":
    sys.exit(main())
