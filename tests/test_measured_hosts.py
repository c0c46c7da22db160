"""The planted layout of emulated hosts, recovered by real ranks from what they measure."""

import json
import os
import subprocess
import sys

import msgspec
import pytest

from tests.hosts import skip_without_hosts
from tests.ranks import RanksFailedError
from topo_ar.emulation.cluster import Cluster
from topo_ar.emulation.launch import launch
from topo_ar.emulation.links import payload_fraction
from topo_ar.emulation.spec import ClusterSpec, parse_spec
from topo_ar.errors import ExecutionError
from topo_ar.execution.bootstrap import Bootstrap
from topo_ar.execution.gather import Channel
from topo_ar.execution.pingpong import measure_pairs
from topo_ar.topology.clustering import nic_rates
from topo_ar.topology.levels import levels
from topo_ar.topology.model import Topology
from topo_ar.topology.pair_times import Measurement

ORDER = ([5, 2], [0, 7], [3, 6], [1, 4])
GROUPS = ((0, 7), (1, 4), (2, 5), (3, 6))
MBIT = 1e6 / 8


def cluster_of(nics: list[str], racks: str = "aaaa", uplink: str = "") -> ClusterSpec:
    nodes = [
        f'[[node]]\nranks = 2\nnics = ["{nic}"]\nrack = "{rack}"\nrank_ids = {ranks}\n'
        for nic, rack, ranks in zip(nics, racks, ORDER, strict=True)
    ]
    return parse_spec("".join(nodes) + (f'[rack]\nuplink = "{uplink}"\n' if uplink else ""))


def measure(spec: ClusterSpec, *options: str) -> tuple[Measurement, Topology, dict]:
    """Run the verb on every rank of emulated hosts; return rank 0's result and the whole of it."""
    skip_without_hosts()
    command = [sys.executable, "-m", "topo_ar", "probe", "--measure", "--json", *options]
    lines: list[tuple[int, bytes]] = []
    with Cluster(spec) as cluster:
        results = launch(
            cluster, command, timeout_s=50, on_line=lambda rank, line: lines.append((rank, line))
        )
    said = [line for _, line in lines]
    assert results.exit_code == 0, b"".join(said).decode()
    [(rank, text)] = [(rank, line) for rank, line in lines if line.startswith(b"{")]
    assert rank == 0
    assert any(b"pairs of hosts" in line for line in said)
    content = json.loads(text)
    measurement = msgspec.convert(content["measurement"], Measurement)
    return measurement, msgspec.convert(content["topology"], Topology), content


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.timeout(90)
def test_shuffled_ranks_and_a_nic_at_a_quarter_rate() -> None:
    spec = cluster_of(["400mbit", "400mbit", "100mbit", "400mbit"])
    measurement, topology, content = measure(spec, "--budget", "15s", "--against", "cpu-host")
    assert measurement.groups == GROUPS
    assert measurement.racks == ()
    payload = payload_fraction(1500) * MBIT
    expected = [400 * payload] * 3 + [100 * payload]
    for found, wanted in zip(nic_rates(measurement.hosts), expected, strict=True):
        assert found == pytest.approx((wanted, wanted), rel=0.10)
    found = levels(topology)
    assert [node.ranks for node in found.nodes] == list(GROUPS)
    assert [node.nics[0].payload for node in found.nodes] == pytest.approx(expected, rel=0.10)
    [slow] = [text for text in content["findings"] if "its NIC carries" in text]
    assert slow.startswith("node3 (ranks 3, 6)")
    assert content["disagreements"] == ["8 ranks were measured but 'cpu-host' has 4"]


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.timeout(90)
def test_two_planted_racks_and_the_rate_between_them() -> None:
    spec = cluster_of(["400mbit"] * 4, racks="abba", uplink="400mbit")
    measurement, topology, content = measure(spec, "--budget", "25s")
    assert measurement.groups == GROUPS
    payload = payload_fraction(1500) * MBIT
    # ORDER puts ranks 5, 2 and 1, 4 into rack a; hosts are counted by their lowest rank.
    assert measurement.racks == ((0, 3), (1, 2))
    found = levels(topology)
    assert [rack.nodes for rack in found.racks] == [(0, 3), (1, 2)]
    uplinks = [rack.uplink.payload for rack in found.racks]
    assert uplinks == pytest.approx([400 * payload] * 2, rel=0.15)
    assert [node.nics[0].payload for node in found.nodes] == pytest.approx(
        [400 * payload] * 4, rel=0.10
    )
    assert sum("share a rack, whose uplink carries" in text for text in content["findings"]) == 2


def _measure_here(rank: int, world_size: int, budget: float) -> tuple[Measurement, list[str]]:
    channel = Channel(Bootstrap(None), 20.0)
    phases: list[str] = []
    try:
        measured = measure_pairs(channel, budget, lambda phase, done, total: phases.append(phase))
    finally:
        channel.close()
    return measured, phases


def test_ranks_of_one_host_are_one_host(ranks) -> None:
    results = ranks.run(_measure_here, 4, 4.0)
    first, phases = results[0]
    assert all(measured == first for measured, _ in results)
    assert first.groups == ((0, 1, 2, 3),)
    assert (first.racks, first.hosts.rate) == ((), ((None,),))
    assert {"latencies", "pairs of ranks"} == set(phases)
    for row in first.ranks.rate + first.ranks.latency:
        assert all(value and value > 0 for value in row)


def test_little_time_is_said(ranks) -> None:
    [measured, *_] = [measured for measured, _ in ranks.run(_measure_here, 4, 0.02)]
    assert "1 of 3 rounds of ranks fitted into 0.02 s" in measured.notes[0]
    assert sum(value is None for row in measured.ranks.rate for value in row) == 8


def test_measuring_without_a_job_or_time_is_one_line() -> None:
    command = [sys.executable, "-m", "topo_ar", "probe", "--measure"]
    clean = {key: text for key, text in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    alone = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=30)
    assert (alone.returncode, alone.stdout) == (2, "")
    assert "--measure needs a job, and the environment lacks RANK, WORLD_SIZE" in alone.stderr
    assert len(alone.stderr.splitlines()) == 1


def test_no_time_is_refused(ranks) -> None:
    with pytest.raises(RanksFailedError, match="a budget of 0 s measures nothing"):
        ranks.run(_measure_here, 2, 0)


def _one_leaves(rank: int, world_size: int) -> str:
    channel = Channel(Bootstrap(None), 5.0)

    def leave(phase: str, done: int, total: int) -> None:
        if rank == 1 and done == 1:
            os._exit(3)

    try:
        measure_pairs(channel, 10.0, leave)
    except ExecutionError as error:
        return str(error)
    return "no error"


def test_survivors_of_a_lost_rank_say_so(ranks) -> None:
    outcomes = ranks.fresh(_one_leaves, 3, deadline_s=30.0)
    assert outcomes[1].exitcode == 3
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.result != "no error", outcome
        assert "rank" in outcome.result
