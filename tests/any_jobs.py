"""Random jobs on a fixed set of rank processes: which ranks, on which hosts, reducing what."""

import hashlib
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import strategies as st

from tests.jobs import communicator, lag
from tests.reductions import (
    AVG,
    MAX,
    MIN,
    PRODUCT,
    SUM,
    in_fixed_order,
    reference,
    whole_numbers,
)
from topo_ar.planning.plan import Family
from topo_ar.planning.runtime import CPU_RUNTIME

NUM_RANKS = 8
FLOATS = ["float32", "float64", "float16", "bfloat16"]
INTEGERS = ["int32", "int64", "int8", "uint8"]
OPS = {str(op): op for op in (SUM, AVG, PRODUCT, MIN, MAX)}
BITS = {str(op): op for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)}
SIZES = [0, 1, 2, 3, 7, 8, 9, 513, 4096, 65_537, 70_000, 262_144, 1_100_003]


@dataclass(frozen=True, slots=True)
class Call:
    """One all-reduce: whole numbers with a known result, or any floats whose order shows."""

    dtype: str
    op: str
    numel: int
    seed: int
    any_floats: bool
    sync: bool


@dataclass(frozen=True, slots=True)
class Job:
    """A communicator of some of the ranks and what it reduces.

    `late` ranks lag behind; what `shared` ranks reduce is read where it lies.
    """

    members: tuple[int, ...]
    hosts: tuple[int, ...]
    plan: str
    reproducible: bool
    calls: tuple[Call, ...]
    late: int
    shared: int
    debug: bool
    seed: int


@st.composite
def _calls(draw):
    dtype = draw(st.sampled_from([*FLOATS, *FLOATS, *INTEGERS, "bool", "complex64"]))
    ops = {"complex64": [SUM, AVG], "bool": [SUM, PRODUCT, MIN, MAX]}.get(dtype)
    if ops is None:
        ops = list(OPS.values())
    if dtype in INTEGERS:
        ops = [op for op in [*ops, *BITS.values()] if op != AVG]
    numel = draw(st.one_of(st.sampled_from(SIZES), st.integers(0, 3000)))
    any_floats = dtype in FLOATS and draw(st.booleans())
    op = str(draw(st.sampled_from(ops)))
    return Call(dtype, op, numel, draw(st.integers(0, 999)), any_floats, draw(st.booleans()))


def _nbytes(call: Call) -> int:
    return call.numel * getattr(torch, call.dtype).itemsize


@st.composite
def jobs(draw):
    """Any job of up to eight ranks."""
    count = draw(st.integers(1, NUM_RANKS))
    members = tuple(sorted(draw(st.permutations(range(NUM_RANKS)))[:count]))
    most = draw(st.integers(1, count))
    hosts = tuple(draw(st.lists(st.integers(0, most - 1), min_size=count, max_size=count)))
    plans = ["auto", "hierarchical"]
    if len(set(hosts)) > 1:
        plans += ["equal", "hierarchical_weighted"]
    if len({hosts.count(host) for host in hosts}) == 1:
        kinds = ("sequential", "pipelined", "leader") if len(set(hosts)) > 1 else ("pipelined",)
        plans += [f"hierarchical_{kind}" for kind in kinds]
    calls = tuple(draw(st.lists(_calls(), min_size=1, max_size=5)))
    if any(_nbytes(call) > CPU_RUNTIME.max_chunk_nbytes for call in calls):
        plans = [plan for plan in plans if plan != Family.HIERARCHICAL_SEQUENTIAL]  # one chunk
    reproducible = draw(st.booleans())
    plan = draw(st.sampled_from(plans if reproducible else [*plans, "flat"]))
    seed = draw(st.integers(0, 2**32 - 1))
    late, shared = draw(st.integers(0, 2)), draw(st.sampled_from([0, 0, 1, count]))
    debug = draw(st.sampled_from([False, False, False, True]))
    return Job(members, hosts, plan, reproducible, calls, late, shared, debug, seed)


def run_waves(rank: int, world_size: int, waves: list[list[Job]]) -> list[list[str]]:
    """Run the jobs of each wave at once; return for each what this rank saw of its results."""
    groups: dict[tuple[int, ...], object] = {}
    for job in (job for wave in waves for job in wave):
        if job.members not in groups:  # torch wants all ranks there
            groups[job.members] = dist.new_group(list(job.members))
    seen = []
    for wave in waves:
        own = {at: job for at, job in enumerate(wave) if rank in job.members}
        found: list[list[str]] = [[] for _ in wave]
        with ExitStack() as stack:
            running = [
                (found[at], _calls_of(job, job.members.index(rank), groups[job.members], stack))
                for at, job in own.items()
            ]
            pending = [(into, settle) for into, calls in running for settle in calls]
            for into, settle in pending:
                into.append(settle())
        seen += found
    return seen


def _calls_of(job: Job, rank: int, group: object, stack: ExitStack) -> list[Callable[[], str]]:
    """Make the calls of a job and return what settles each of them."""
    world_size = len(job.members)
    own = random.Random(f"{job.seed} {rank}")
    made = stack.enter_context(
        communicator(
            rank,
            job.hosts,
            group=group,
            plan=job.plan,
            reproducible=job.reproducible,
            debug=job.debug,
        )
    )
    if rank < job.late:
        lag(made)
    settles = []
    inputs = [_input(call, rank, world_size) for call in job.calls]
    for tensor in inputs if job.shared else []:
        made.share(tensor if rank < job.shared else torch.empty(1)).wait()
    for call, tensor in zip(job.calls, inputs, strict=True):
        if own.random() < 0.2:
            time.sleep(own.random() * 0.003)
        op = OPS.get(call.op) or BITS[call.op]
        wait = (lambda done: lambda: done)(tensor)
        if call.sync:
            made.all_reduce_sync(tensor, op)
        else:
            wait = made.all_reduce(tensor, op).wait

        def settle(call: Call = call, wait: Callable[[], torch.Tensor] = wait) -> str:
            result = wait()
            if rank == 0 and not _right(call, world_size, job.reproducible, result):
                return f"wrong: {call}"
            return hashlib.sha256(_bytes(result).numpy().tobytes()).hexdigest()

        settles.append(settle)
    return settles


def _input(call: Call, rank: int, world_size: int) -> torch.Tensor:
    dtype = getattr(torch, call.dtype)
    if call.any_floats:
        drawn = np.random.default_rng((call.seed, rank))
        if call.op == str(PRODUCT):  # no partial product may overflow or underflow
            values = drawn.uniform(0.5, 2.0, call.numel) * drawn.choice([-1, 1], call.numel)
        else:
            values = np.ldexp(drawn.standard_normal(call.numel), drawn.integers(-6, 6, call.numel))
        values[drawn.random(call.numel) < 0.001] = drawn.choice([np.nan, np.inf, -np.inf, -0.0])
        return torch.from_numpy(values).to(dtype)
    if call.dtype == "complex64":
        parts = [
            whole_numbers(rank + at, world_size, call.numel, torch.float32, OPS[call.op])
            for at in range(2)
        ]
        return torch.complex(*parts)
    op = OPS.get(call.op, PRODUCT)
    return whole_numbers(rank + call.seed, world_size, call.numel, dtype, op)


def _right(call: Call, world_size: int, reproducible: bool, result: torch.Tensor) -> bool:
    parts = [_input(call, rank, world_size) for rank in range(world_size)]
    if world_size == 1:
        return torch.equal(_bytes(result), _bytes(parts[0]))
    if call.op in BITS:
        combine = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
        expected = parts[0]
        for part in parts[1:]:
            expected = combine[call.op.rpartition(".")[2]](expected, part)
        return torch.equal(result, expected)
    op = OPS[call.op]
    if call.dtype == "complex64":
        expected = reference([torch.view_as_real(part) for part in parts], op)
        return torch.equal(torch.view_as_real(result), expected)
    if not call.any_floats:
        return torch.equal(_bytes(result), _bytes(reference(parts, op)))
    if reproducible and op in (SUM, AVG, PRODUCT):
        expected = in_fixed_order(parts, op)
        nan = expected.isnan()
        same = torch.equal(_bytes(result[~nan]), _bytes(expected[~nan]))
        return same and bool(result[nan].isnan().all())
    return _near(parts, op, result)


def _near(parts: list[torch.Tensor], op: object, result: torch.Tensor) -> bool:
    """Whether rounding alone explains the difference to the reduction in fp64."""
    stacked = torch.stack([part.double() for part in parts])
    if op in (MIN, MAX):
        expected = stacked.amin(0) if op == MIN else stacked.amax(0)
        return torch.equal(result.double().nan_to_num(7.5), expected.nan_to_num(7.5))
    if op == PRODUCT:
        expected, size = stacked.prod(0), stacked.abs().prod(0)
    else:
        divisor = len(parts) if op == AVG else 1
        expected, size = stacked.sum(0) / divisor, stacked.abs().sum(0) / divisor
    limits = torch.finfo(result.dtype)
    finite = size < limits.max / 4  # what lies beyond may overflow on the way
    bound = (len(parts) + 1) * (limits.eps * size + limits.smallest_normal)
    return bool(((result.double() - expected).abs() <= bound)[finite].all())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.reshape(-1).view(torch.uint8)
