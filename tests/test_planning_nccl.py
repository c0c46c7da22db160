"""NCCL's tuning model against values computed from its formulas, and its choices against logs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.foreign import foreign
from topo_ar.data.published_nccl import choices, measurements, scaling, systems
from topo_ar.errors import PlanError
from topo_ar.planning.level_bounds import all_reduce_lower_bound
from topo_ar.planning.nccl_machine import changed, nccl_machine_of
from topo_ar.planning.nccl_search import NcclMachine, nccl_job, nvlink_bytes_per_s
from topo_ar.planning.nccl_tuning import (
    Algorithm,
    Channels,
    Generation,
    NcclJob,
    Protocol,
    choice,
    estimates,
)
from topo_ar.planning.plan import Family
from topo_ar.planning.planner import plan
from topo_ar.planning.runtime import NCCL_RUNTIME
from topo_ar.topology.levels import Levels, levels
from topo_ar.topology.model import Figure, Source
from topo_ar.topology.presets import preset
from topo_ar.topology.readers import read

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def channels(count, rate):
    return Channels(count, rate * 1e9, rate * 1e9)


def job(nodes, ranks, capability, count, rate, **options):
    both = channels(count, rate)
    return NcclJob(nodes, ranks, capability, both, both, **options)


JOBS = {
    "8 A100": job(1, 8, 80, 12, 20),
    "8 H100": job(1, 8, 90, 16, 20),
    "8 PCIe": job(1, 8, 80, 2, 12, nvlink=False, ll128=False),
    "2x8 A100": job(2, 8, 80, 8, 24, cpu="amd"),
    "4x8 A100": job(4, 8, 80, 8, 24, cpu="amd"),
    "4x8 H100": job(4, 8, 90, 16, 24),
    "8x1 A100": job(8, 1, 80, 1, 12),
}

# Microseconds and GB/s: ring LL, LL128, Simple, then tree; the PCIe row has no LL128.
ANCHORS = {
    "8 A100": "15.0/50.1 40.6/126.2 56.0/137.1 15.2/29.1 31.5/85.9 64.4/110.4",
    "8 H100": "15.0/80.6 40.6/168.2 56.0/182.9 15.2/38.7 31.5/114.5 64.4/147.2",
    "8 PCIe": "20.6/6.9 - 88.2/13.7 20.8/2.9 - 64.4/11.0",
    "2x8 A100": "68.0/12.0 78.0/85.3 204.4/102.4 25.2/11.2 48.5/80.0 92.4/88.3",
    "4x8 A100": "134.8/9.8 150.0/82.6 428.4/99.1 35.2/9.5 65.5/66.8 120.4/71.2",
    "4x8 H100": "78.8/10.5 144.4/182.3 282.8/198.2 35.2/10.2 65.5/165.6 120.4/176.6",
    "8x1 A100": "76.6/3.4 133.0/6.3 204.4/6.9 36.8/1.5 65.0/5.2 92.4/5.5",
}


@pytest.mark.parametrize("name", ANCHORS)
def test_latency_and_bandwidth_of_the_anchors(name):
    found = {(e.algorithm, e.protocol): e for e in estimates(JOBS[name], MIB)}
    cells = iter(ANCHORS[name].split())
    for algorithm in (Algorithm.RING, Algorithm.TREE):
        for protocol in Protocol:
            cell = next(cells)
            if cell == "-":
                assert (algorithm, protocol) not in found
                continue
            latency, algbw = map(float, cell.split("/"))
            estimate = found[algorithm, protocol]
            assert estimate.latency * 1e6 == pytest.approx(latency, abs=0.0501)
            assert estimate.algbw / 1e9 == pytest.approx(algbw, abs=0.0501)


# Who wins, and after how many microseconds.
WINNERS = {
    "8 A100": "ring ll 15.0|ring ll 16.3|ring ll 35.9|ring ll128 173.6|ring simple 545.3"
    "|ring simple 7885.4",
    "2x8 A100": "tree ll 25.3|tree ll 34.9|tree ll128 70.3|ring ll128 274.6|ring ll128 864.4"
    "|ring simple 10771.9",
    "4x8 A100": "tree ll 35.3|tree ll 46.7|tree ll128 91.7|tree ll128 344.8|ring ll128 962.6"
    "|ring simple 11435.0",
    "8 PCIe": "ring ll 20.7|ring ll 30.2|ring simple 164.7|ring simple 1311.5|ring simple 4981.6"
    "|ring simple 78381.9",
}


@pytest.mark.parametrize("name", WINNERS)
def test_the_winner_and_its_time(name):
    sizes = (KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, GIB)
    for nbytes, expected in zip(sizes, WINNERS[name].split("|"), strict=True):
        algorithm, protocol, microseconds = expected.split()
        best = choice(JOBS[name], nbytes)
        assert (best.algorithm, best.protocol) == (algorithm, protocol)
        assert best.seconds * 1e6 == pytest.approx(float(microseconds), abs=0.0501)


@pytest.mark.parametrize(
    ("machine", "ring", "nvls"),
    [
        # NCCL's own log on four A100 with four links between each pair.
        (NcclMachine(1, 4, 80, 240e9), (12, 20e9), None),
        # HGX B200: 16 ring channels, 8 NVLS channels.
        (NcclMachine(1, 8, 100, 721.8e9, nvls=True), (16, 45e9), (8, 90e9)),
        (NcclMachine(2, 8, 80, 240e9, [25e9] * 8), (8, 24e9), None),
        (NcclMachine(2, 2, 80, 24e9, [1.25e9], nvlink=False), (1, 1.2e9), None),
    ],
)
def test_channels_that_the_search_finds(machine, ring, nvls):
    found = nccl_job(machine)
    assert (found.ring.count, found.ring.intra) == ring
    assert (found.nvls and (found.nvls.count, found.nvls.intra)) == nvls


def test_a_tree_on_two_nodes_runs_faster_inside():
    found = nccl_job(NcclMachine(2, 8, 80, 240e9, [12.5e9] * 4))
    assert (found.tree.count, found.tree.intra, found.tree.inter) == (4, 24e9, 12e9)


def test_links_and_rows_by_generation():
    assert [nvlink_bytes_per_s(cc) / 1e9 for cc in (60, 70, 80, 86, 90, 103, 50)] == [
        18, 20, 20, 12, 20.6, 40.1, 20
    ]  # fmt: skip
    assert [Generation.of(cc).name for cc in (70, 86, 90, 103)] == [
        "VOLTA", "AMPERE", "HOPPER", "BLACKWELL"
    ]  # fmt: skip


@given(
    st.integers(1, 64),
    st.integers(1, 8),
    st.sampled_from([70, 80, 90, 100]),
    st.integers(0, 1 << 34),
)
def test_more_bytes_never_take_less_and_rates_bound_the_time(nodes, ranks, capability, nbytes):
    if nodes * ranks < 2:
        return
    machine = NcclMachine(nodes, ranks, capability, 240e9, [25e9] * ranks, nvls=True)
    made = nccl_job(machine)
    for less, more in zip(estimates(made, nbytes), estimates(made, 2 * nbytes), strict=True):
        assert less.seconds >= less.latency + nbytes / less.algbw * (1 - 1e-9)
        if less.algorithm is not Algorithm.TREE:  # its correction rises and falls with the size
            assert more.seconds >= less.seconds
    assert choice(made, nbytes).seconds == min(e.seconds for e in estimates(made, nbytes))


def test_what_makes_no_sense_is_refused():
    with pytest.raises(PlanError, match="two ranks, not 1 x 1"):
        choice(job(1, 1, 80, 12, 20), MIB)
    with pytest.raises(PlanError, match="-1 bytes"):
        choice(JOBS["8 A100"], -1)
    with pytest.raises(PlanError, match="ring channels .* rates must be positive"):
        choice(job(1, 8, 80, 0, 20), MIB)
    with pytest.raises(PlanError, match="cpu is 'm68k'"):
        choice(job(2, 8, 80, 8, 24, cpu="m68k"), MIB)
    with pytest.raises(PlanError, match="without a NIC"):
        nccl_job(NcclMachine(2, 8, 80, 240e9))
    with pytest.raises(PlanError, match="slowest channel"):
        nccl_job(NcclMachine(2, 8, 80, 240e9, [1e6]))


def test_published_tables_are_read_whole():
    rows = measurements()
    assert (len(systems()), len(rows), len(choices()), len(scaling())) == (14, 225, 22, 121)
    assert {row.system for row in rows} == set(systems())
    for row in rows:
        if row.busbw > 1e9:
            n = row.num_ranks
            assert row.nbytes / row.seconds * 2 * (n - 1) / n == pytest.approx(row.busbw, rel=0.01)


def test_nvls_is_expected_where_it_was_chosen():
    # H200: NVLS from five GPUs on, a ring on four; a ring on four nodes.
    def machine(nodes, ranks, nics=()):
        return NcclMachine(nodes, ranks, 90, 370.8e9, nics, nvls=True)

    chosen = [choice(nccl_job(machine(1, g)), 8 * GIB).algorithm for g in (4, 5, 6, 7, 8)]
    assert chosen == ["ring", "nvls", "nvls", "nvls", "nvls"]
    assert choice(nccl_job(machine(4, 8, [25e9] * 16)), 4 * GIB).algorithm == "ring"
    assert choice(nccl_job(machine(2, 8, [50e9] * 8)), 16 * GIB).algorithm == "nvls_tree"


# --- what the planner makes of it ---


def test_the_flat_all_reduce_of_gpus_is_what_nccl_would_choose():
    topology = preset("dgx-h100", nodes=4)
    machine = nccl_machine_of(topology)
    for nbytes in (64 * KIB, 100_000_000):
        made = plan(levels(topology), nbytes, runtime=NCCL_RUNTIME, nccl=machine)
        [flat] = [a for a in made.alternatives if a.family is Family.FLAT_RING]
        expected = choice(nccl_job(machine), nbytes)
        assert flat.seconds == expected.seconds
        assert f"its {expected.algorithm} with" in made.reason
    assert nccl_machine_of(preset("cpu-host", nodes=2)) is None


def test_switches_that_add_have_a_bound_of_their_own():
    topology = preset("dgx-h100")
    machine = nccl_machine_of(topology)
    made = plan(levels(topology), GIB, runtime=NCCL_RUNTIME, nccl=machine)
    assert made.bound_seconds == pytest.approx(GIB / 450e9)
    assert "multicasting and adding" in made.reason
    assert "WARNING" not in made.reason
    assert made.predicted_seconds > made.bound_seconds
    pair = levels(preset("dgx-h100", nodes=2))
    exact = all_reduce_lower_bound(pair, GIB, nvls=True)
    assert exact.seconds == pytest.approx(GIB / 400e9)


def test_a_degraded_node_slows_nccl_too():
    topology = preset("dgx-h100", nodes=4)
    machine = nccl_machine_of(topology)
    both = levels(topology)
    slow = replace(
        both.nodes[0],
        nics=tuple(replace(nic, nominal=nic.nominal / 2) for nic in both.nodes[0].nics),
    )
    there = changed(machine, both, Levels((slow, *both.nodes[1:])))
    assert list(there.nic_bytes_per_s) == [25e9] * 8
    assert choice(nccl_job(there), GIB).seconds > choice(nccl_job(machine), GIB).seconds
    alone = changed(machine, both, Levels(both.nodes[:1]))
    assert (alone.num_nodes, alone.nic_bytes_per_s) == (1, ())


def test_amd_gpus_are_not_taken_for_what_rccl_writes_under_sm():
    topology = read(foreign("nccl-xml/rccl-3x-mi210-pcie-1nic.xml"))
    assert nccl_machine_of(topology) is None


def test_a_machine_too_slow_for_nccls_tables_is_planned_without_them():
    slow = replace_all(preset("ws-2x5090"), 20e9)
    machine = nccl_machine_of(slow)
    assert machine is not None
    before = levels(slow)
    assert changed(machine, before, levels(replace_all(slow, 10e9))) is None
    assert "at half rate" in plan(before, 25_000_000, nccl=machine, advice=True).reason


def replace_all(topology, rate):
    """Return `topology` with all links at one rate."""
    figure = Figure(rate, Source.FILE)
    links = tuple(structs.replace(e, nominal=figure, effective=figure) for e in topology.links)
    return structs.replace(topology, links=links)
