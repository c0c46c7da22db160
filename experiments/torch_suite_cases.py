"""Run cases of torch's own distributed_test.py, one after the other: a part of torch_suite.py.

The module is imported once and every rank is forked from here, which saves each case the seconds
that importing torch takes. What cases print goes to a log; stdout gets a JSON line for each case.
"""

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
import unittest
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
GLOO, HOOK, BACKEND = "gloo", "hook", "backend"
_REASON_LENGTH = 400
_END_S = 5.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a case ended.

    `engaged` counts, over all ranks, DDPs that got our hook or groups that reduced by plan.
    """

    case: str
    outcome: str
    seconds: float
    engaged: int = 0
    reason: str = ""


def environment(world_size: int, deadline_s: int) -> dict[str, str]:
    """Return what the process that runs cases needs: torch's module reads it when imported."""
    return {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(world_size),
        "GLOO_SOCKET_IFNAME": "lo",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(deadline_s),
        # Ranks are forked, so that no library may have threads.
        **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    }


class _LikeGloo(str):
    """The name of a backend of which the suite shall ask whatever it asks of gloo."""

    def __eq__(self, other: object) -> bool:
        return str(self) == other or other == GLOO

    def __hash__(self) -> int:
        return hash(GLOO)


def make_case_class(mode: str, nodes: int) -> Any:
    """Return the suite as a class whose ranks run in `mode`, on `nodes` pretended hosts.

    Attribute ``engaged`` counts in memory that the ranks share.
    """
    from experiments.torch_suite_on_cpu import lift_limits, name_cpu_for_gpus

    lift_limits()
    from torch.testing._internal.distributed import distributed_test

    from topo_ar.execution.transports.segment import HOST_ID_ENV
    from topo_ar.torch_backend import NAME, register_backend

    register_backend()
    context = multiprocessing.get_context("fork")

    class TestTorch(
        distributed_test.TestDistBackend,
        distributed_test.DistributedTest._DistTestBase,
    ):
        engaged = context.Value("i", 0)

        def setUp(self) -> None:
            super().setUp()  # type: ignore[no-untyped-call]
            self._start_processes(context.Process)

        def tearDown(self) -> None:
            processes = list(self.processes)
            super().tearDown()  # type: ignore[no-untyped-call]
            for process in processes:
                process.join(_END_S)
                process.kill()
            with contextlib.suppress(OSError):
                os.remove(self.file_name)

        @classmethod
        def _run(cls, rank: int, *args: Any, **named: Any) -> None:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.environ[HOST_ID_ENV] = str(rank * nodes // int(os.environ["WORLD_SIZE"]))
            name_cpu_for_gpus()
            if mode == HOOK:
                _hook_each_ddp(partial(_add_one, cls.engaged))
            if mode == BACKEND:
                distributed_test.BACKEND = _LikeGloo(NAME)
                _count_engaged_groups(partial(_add_one, cls.engaged))
            super()._run(rank, *args, **named)  # type: ignore[no-untyped-call]

    return TestTorch


def _add_one(number: Any) -> None:
    with number.get_lock():
        number.value += 1


def _hook_each_ddp(hooked: Any) -> None:
    """Let each DDP without a hook get ours at its first forward that a backward may follow."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import topo_ar

    real = DistributedDataParallel._pre_forward

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # where a compiled function is the first to call the DDP
    def hook(ddp: Any) -> None:
        if torch.is_grad_enabled() and not ddp._comm_hooks and not ddp.__dict__.get("_refused"):
            try:
                topo_ar.attach(ddp)
                hooked()
            except topo_ar.ConfigError as error:  # what the hook says that it cannot serve
                ddp._refused = str(error)

    def pre_forward(self: Any, *inputs: Any, **named: Any) -> Any:
        hook(self)
        return real(self, *inputs, **named)  # type: ignore[no-untyped-call]

    DistributedDataParallel._pre_forward = pre_forward  # type: ignore[method-assign]


def _count_engaged_groups(engaged: Any) -> None:
    from topo_ar.integrations.backend import TopoGroup

    real = TopoGroup._make

    def make(self: Any) -> Any:
        engaged()
        return real(self)

    TopoGroup._make = make  # type: ignore[method-assign]


def run_case(case_class: Any, name: str) -> Outcome:
    """Run one case and tell how it ended."""
    case_class.engaged.value = 0
    result = unittest.TestResult()
    begin = time.monotonic()
    case_class(name).run(result)
    seconds = round(time.monotonic() - begin, 2)
    troubles = [text for _, text in result.errors + result.failures]
    if troubles:
        return Outcome(name, FAILED, seconds, case_class.engaged.value, _gist(troubles[0]))
    if result.skipped:
        return Outcome(name, SKIPPED, seconds, 0, result.skipped[0][1])
    return Outcome(name, PASSED, seconds, case_class.engaged.value)


def _gist(trace: str) -> str:
    """Return the line of a trace that says what went wrong."""
    lines = [line for line in trace.splitlines() if line and not line.startswith(" ")]
    said = [line for line in lines if "Error" in line.split(":")[0] and "exited with" not in line]
    return (said or lines or [""])[-1 if not said else 0][:_REASON_LENGTH]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases that are named, or all of the suite."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("cases", nargs="*")
    options = parser.parse_args(arguments)
    reports = os.fdopen(os.dup(1), "w")
    log = os.open(options.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    case_class = make_case_class(options.mode, options.nodes)
    known = unittest.defaultTestLoader.getTestCaseNames(case_class)
    if not options.cases:
        print(json.dumps(list(known)), file=reports, flush=True)
        return 0
    for name in options.cases:
        print(f"\n=== {options.mode} {name}", flush=True)
        outcome = run_case(case_class, name)
        print(json.dumps(asdict(outcome)), file=reports, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
