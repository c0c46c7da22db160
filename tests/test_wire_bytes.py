"""Bytes between nodes: what the sockets were given is what the plan says, and the simulation."""

import pytest
import torch

from tests.jobs import blocks, communicator
from topo_ar.planning.lowering import lower
from topo_ar.planning.plan import Family
from topo_ar.planning.planner import plan
from topo_ar.planning.traffic import bytes_sent
from topo_ar.simulation.collective import simulate
from topo_ar.topology.levels import levels
from topo_ar.topology.presets import preset

SIZES = (48, 4 * 4096, 4 * 300_000)


def _sent(rank: int, world_size: int, hosts: list[int]) -> list[tuple[int, int]]:
    found = []
    with communicator(rank, hosts, plan="hierarchical") as made:
        for nbytes in SIZES:
            before = made.nbytes_sent_between
            made.all_reduce(torch.ones(nbytes // 4)).wait()
            # A barrier of the control plane: everything queued has left by then.
            made.gather(b"")
            schedule = lower(made.plan_for(nbytes), nbytes // 4, 4)
            planned = bytes_sent(schedule, made.nodes).sent_between[rank]
            found.append((made.nbytes_sent_between - before, planned))
    return found


@pytest.mark.parametrize("shape", [(2, 2), (3, 2)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_counted_bytes_are_the_planned_ones(ranks, shape) -> None:
    for own in ranks.run(_sent, shape[0] * shape[1], blocks(*shape)):
        for counted, planned in own:
            assert counted == planned
        assert any(planned for _, planned in own)


def test_simulated_bytes_are_the_planned_ones_too() -> None:
    topology = preset("cpu-host", 3, 2)
    made = plan(levels(topology), SIZES[-1], family=Family.HIERARCHICAL_PIPELINED)
    schedule = lower(made, SIZES[-1] // 4, 4)
    planned = bytes_sent(schedule, made.nodes).sent_between
    assert simulate(schedule, topology).sent_between == pytest.approx(planned, rel=1e-12)
