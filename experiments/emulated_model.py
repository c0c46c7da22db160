"""The simulator's model of the emulated hosts: 08's, fitted to the committed all-reduces."""

import importlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from topo_ar.emulation.spec import ClusterSpec
from topo_ar.planning.buckets import Backward, Bucket, backward_of
from topo_ar.planning.codecs import parse_codec
from topo_ar.planning.equal_shares import with_equal_shares
from topo_ar.planning.lowering import lower
from topo_ar.planning.plan import Family
from topo_ar.planning.planner import plan
from topo_ar.planning.runtime import CPU_RUNTIME, Runtime
from topo_ar.simulation.collective import simulate
from topo_ar.simulation.compute import Compute
from topo_ar.simulation.step import StepSimulator
from topo_ar.simulation.step_result import SimulatedStep
from topo_ar.telemetry.bucket_trace import BucketCall, BucketTrace, StepTrace
from topo_ar.telemetry.records import Record
from topo_ar.topology.levels import levels
from topo_ar.topology.model import Topology

RESULTS = Path(__file__).parent / "results"


@cache
def host() -> Any:
    """Return the fitted host of `experiments.08_predicted_measured`."""
    predicted = importlib.import_module("experiments.08_predicted_measured")
    rows = [
        row
        for name, row in predicted.read(RESULTS)
        if name in predicted.CALIBRATED_ON and predicted.in_scope(row)
    ]
    return predicted.calibrate(rows)


def runtime() -> Runtime:
    """Return what runs on such hosts."""
    found: Runtime = host().runtime
    return found


def topology_of(spec: ClusterSpec) -> Topology:
    """Return emulated hosts as the simulator sees them."""
    predicted = importlib.import_module("experiments.08_predicted_measured")
    links = {
        "mtu": spec.mtu,
        "latency": spec.latency,
        "ranks": [node.ranks for node in spec.nodes],
        "nics": [node.nics for node in spec.nodes],
    }
    found: Topology = predicted.topology_of({"manifest": {"links": links}}, host())
    return found


def step(
    spec: ClusterSpec, buckets: Sequence[Bucket], compute: Compute, mode: str, codec: str = "none"
) -> SimulatedStep:
    """Return a simulated training step on emulated hosts."""
    return StepSimulator(
        topology_of(spec),
        buckets,
        compute,
        mode=mode,
        codecs=parse_codec(codec),
        runtime=runtime(),
    ).run()


def backward_alone(hook: Record, seconds: float) -> Backward:
    """Return the backward of a hook's trace, made as long as it is without communication.

    The trace is of a step that communicated, which took longer than one that did not.
    """
    calls = msgspec.convert(hook["buckets"], list[BucketCall])
    found = backward_of(BucketTrace(hook["world_size"], (StepTrace(0, calls),)))
    scale = seconds / found.seconds
    ready = tuple(each * scale for each in found.ready_seconds)
    return replace(found, ready_seconds=ready, seconds=seconds)


def all_reduce(
    spec: ClusterSpec, nbytes: int, family: Family | None = None, *, equal: bool = False
) -> float:
    """Return the simulated seconds of an all-reduce on emulated hosts.

    By the planner's choice, or by `family`; with `equal` shards as large on all nodes.
    """
    topology = topology_of(spec)
    known = levels(topology)
    made = plan(known, nbytes, family=family, runtime=CPU_RUNTIME)
    if equal:
        made = with_equal_shares(made, known, CPU_RUNTIME)
    schedule = lower(made, nbytes // 4, 4)
    return simulate(schedule, topology, runtime=runtime()).seconds
