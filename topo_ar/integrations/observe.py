"""Looks at the steps of an unchanged script under plain DDP, and says what would make them shorter.

No ``from __future__ import annotations`` here: torch compares the hook's annotations as objects.
"""

import os
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from topo_ar.errors import TopoError
from topo_ar.execution.communicator import Communicator
from topo_ar.execution.network import local_nics
from topo_ar.execution.torch_private import (
    GradBucket,
    bucket_cap_mib,
    registered_hooks,
    uncompiled,
)
from topo_ar.integrations.bucket_cap import advice
from topo_ar.integrations.injection import say
from topo_ar.integrations.run_options import RunOptions
from topo_ar.integrations.trace import Recorder
from topo_ar.planning.job_advice import Interface, Observed, advise
from topo_ar.planning.policy import parse_policy
from topo_ar.telemetry.bucket_trace import StepTrace
from topo_ar.topology.host_findings import core_findings, launched
from topo_ar.topology.interfaces import Kernel, find_interfaces

# DDP rebuilds its buckets after the first step or the second, and the first steps are no measure.
_FIRST = 5
_POLICY = "lossy:1"


class Observation:
    """Watches one DDP through a hook that does what DDP does without one.

    Parameters
    ----------
    ddp : DistributedDataParallel
        Without a hook when it runs its first forward pass; else nothing is observed.
    options : RunOptions
        After how many steps to look, where to write, and whether the script goes on.
    """

    def __init__(self, ddp: DistributedDataParallel, options: RunOptions) -> None:
        names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        self._recorder = Recorder(names, num_steps=options.observe_steps + _FIRST)
        self._options = options
        self._begun: list[float] = []
        self._group = ddp.process_group
        self._before = ddp.register_forward_pre_hook(self.before_forward)
        self._registered = False
        ddp.register_forward_hook(self._recorder.forward_done)

    def hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket as DDP does, and note when."""
        call = self._recorder.called(bucket, bucket.buffer())
        if bucket.index() == 0:
            self._begun.append(time.monotonic())
        averaged = allreduce_hook(self._group, bucket)
        return averaged.then(partial(self._done, call))

    def _done(self, call, future):  # type: ignore[no-untyped-def]
        self._recorder.done(call)
        return future.value()

    @uncompiled
    def before_forward(self, ddp: nn.Module, inputs: object) -> None:
        """Register the hook at first; look at what was seen when enough was."""
        if not isinstance(ddp, DistributedDataParallel):
            return
        if not self._registered:
            self._registered = True
            why = _why_not(ddp)
            if why is not None:
                self._before.remove()
                say(f"nothing is observed: {why}")
                return
            ddp.register_comm_hook(None, self.hook)
        elif len(self._begun) > self._options.observe_steps + _FIRST:
            self._before.remove()
            self._look(ddp)

    def _look(self, ddp: DistributedDataParallel) -> None:
        """Probe the links, let rank 0 say what it found, and end the script. Collective."""
        try:
            with Communicator(
                self._group, measure=True, timeout_s=self._options.timeout_s
            ) as communicator:
                self._report(ddp, communicator)
                communicator.gather(b"")  # nobody leaves before rank 0 has written
        except TopoError as error:
            say(f"no advice: {error}")
            if not self._options.keep_running:
                self._end(1)
        if not self._options.keep_running:
            self._end(0)

    def _report(self, ddp: DistributedDataParallel, communicator: Communicator) -> None:
        steps = self._steps()
        begun = self._begun[_FIRST : _FIRST + len(steps) + 1]
        mine = {
            "step": [after - before for before, after in pairwise(begun)],
            "first": [_took(step, 0) for step in steps],
            "exposed": [_took(step, -1) for step in steps],
        }
        rows = [
            msgspec.json.decode(row, type=dict[str, list[float]])
            for row in communicator.gather(msgspec.json.encode(mine))
        ]
        if communicator.rank != 0:
            return
        cap = bucket_cap_mib(ddp)
        trace = self._recorder.snapshot(communicator.world_size)
        devices = {p.device.type for p in ddp.parameters() if p.requires_grad}
        observed = Observed(
            [row["step"] for row in rows],
            [row["first"] for row in rows],
            [row["exposed"] for row in rows],
            cap,
            _interfaces(communicator.rank),
            _cautions(),
        )
        flat, planned = (
            advice(trace, communicator, plan, cap, devices, parse_policy(policy))
            for plan, policy in (("flat", "exact"), ("auto", _POLICY))
        )
        found = advise(observed, flat, planned)
        text = msgspec.json.format(msgspec.json.encode(found), indent=2)
        Path(self._options.report).write_bytes(text + b"\n")

    def _steps(self) -> list[StepTrace]:
        whole = self._recorder.snapshot(0).steps
        kept = [step for step in whole if _FIRST <= step.step < len(self._begun) - 1]
        return kept[: self._options.observe_steps]

    @staticmethod
    def _end(code: int) -> None:
        """End the process here: what the script would do at its end, it has not come to."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def __getstate__(self) -> dict[str, object]:
        return {}


def _why_not(ddp: DistributedDataParallel) -> str | None:
    if registered_hooks(ddp):
        return "the script has a communication hook of its own"
    if any(p.is_cuda for p in ddp.parameters()):
        return (
            "on GPUs a bucket's future does not tell when it is reduced; CPU trainings only so far"
        )
    return None


def _took(step: StepTrace, position: int) -> float:
    """Return the seconds of the first bucket, or from the last call to the last average."""
    call = step.buckets[position]
    done = [each.done_seconds or each.call_seconds for each in step.buckets]
    return (done[0] if position == 0 else max(done)) - call.call_seconds


def _interfaces(rank: int) -> list[Interface]:
    used = {nic.name for nic in local_nics(rank)}
    return [
        Interface(nic.name, (nic.payload or nic.rate).value, nic.name in used)
        for nic in find_interfaces(Path("/sys"), Kernel()).nics
        if not nic.is_rdma
    ]


def _cautions() -> list[str]:
    ranks = launched(os.environ)
    if ranks is None:
        return []
    found = core_findings(*ranks, len(os.sched_getaffinity(0)))
    return [f"{each.about}: {each.text}; {each.remedy}" for each in found]
