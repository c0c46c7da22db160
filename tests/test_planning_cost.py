"""Costs against the oracle tables of the planning notes, exact where they are."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning_cases import EQUAL, any_levels, cluster, equal
from topo_ar.errors import TopologyError
from topo_ar.planning import cost
from topo_ar.planning.calibration import Calibration, predict_seconds
from topo_ar.planning.cost import CostParameters
from topo_ar.planning.pipelines import end_of_chunks
from topo_ar.planning.plan import Family

# algbw in GB/s without latency: flat ring, sequential, pipelined limit, leader with one NIC.
TABLE = {
    "2x4 rails": (57.143, 66.667, 100, 21.429),
    "2x4 one nic": (14.286, 22.222, 25, 21.429),
    "4x4 rails": (53.333, 50.0, 66.667, 15.0),
    "4x4 one nic": (13.333, 15.385, 16.667, 15.0),
    "2x8 A100": (106.667, 92.308, 171.429, 21.429),
    "4x8 A100": (103.226, 75.0, 133.333, 15.0),
    "2x8 H100": (213.333, 156.522, 257.143, 40.909),
    "2x4 10GbE": (0.714, 1.081, 1.250, 1.034),
}
# Exact seconds per unit of a pipeline of c equal chunks, reduce-scatters first.
CHUNKS = [
    ("2x8 A100", {1: (13, 1200), 2: (19, 2400), 4: (31, 4800), 8: (7, 1200), 32: (7, 1200)}),
    ("4x8 A100", {1: (1, 75), 2: (1, 96), 4: (43, 4800), 8: (79, 9600), 32: (59, 7680)}),
    ("2x4 rails", {1: (3, 200), 2: (1, 80), 4: (9, 800), 8: (17, 1600), 32: (13, 1280)}),
]
# Ranks per node with 25 GB/s of NIC for each; algbw of the flat ring.
FLAT_UNEQUAL = [((4, 2), 30.0), ((4, 2, 2), 28.571), ((4, 4, 2), 27.778), ((8, 8, 8, 4), 51.852)]


def parts(total, count):
    return [Fraction(total, count)] * count


@pytest.mark.parametrize("name", EQUAL)
def test_table_of_families(name):
    p = CostParameters.from_levels(equal(name))
    flat, sequential, pipelined, leader = TABLE[name]
    assert 1 / cost.flat_ring(p, 1) == pytest.approx(flat, abs=6e-4)
    assert 1 / cost.rails(p).seconds([1]) == pytest.approx(sequential, abs=6e-4)
    assert 1 / max(p.intra_slope, p.inter_slope) == pytest.approx(pipelined, abs=6e-4)
    assert 1 / cost.leaders(p, direct=False).seconds([1]) == pytest.approx(leader, abs=6e-4)
    if p.num_nodes == 2:
        assert cost.leaders(p).seconds([1]) == cost.leaders(p, direct=False).seconds([1])
    limit = max(p.intra_slope, p.inter_slope)
    assert limit <= cost.rails(p).seconds(parts(1, 1000)) <= limit * Fraction(1002, 1000)


@pytest.mark.parametrize(
    ("name", "count", "exact"),
    [(name, count, Fraction(*exact)) for name, row in CHUNKS for count, exact in row.items()],
)
def test_chunks_overlap_exactly(name, count, exact):
    p = CostParameters.from_levels(equal(name))
    assert cost.rails(p).seconds(parts(1, count)) == exact


@pytest.mark.parametrize(("sizes", "expected"), FLAT_UNEQUAL)
def test_flat_ring_on_unequal_nodes_has_the_nics_that_all_have(sizes, expected):
    p = CostParameters.from_levels(cluster(sizes, 300, [[25] * size for size in sizes]))
    assert 1 / cost.flat_ring(p, 1) == pytest.approx(expected, abs=6e-4)


def test_latencies_of_the_formulas():
    levels = cluster([4, 4], 10, [1], intra_latency=Fraction(1), nic_latency=Fraction(100))
    p = CostParameters.from_levels(levels)
    # 14 steps, 2 of them over the network; 2 (g-1) a1 + 2 (n-1) a2; leader: in, across, out.
    assert cost.flat_ring(p, 0) == 2 * 100 + 12 * 1
    assert cost.rails(p).seconds([0]) == 6 * 1 + 2 * 100
    assert cost.leaders(p).seconds([0]) == 2 * 1 + 100


def test_ranks_dealt_round_robin_make_the_ring_cross_at_every_hop():
    good = cluster([2, 2], 10**6, [1])
    nodes = good.nodes
    dealt = type(good)(
        (
            type(nodes[0])("node0", (0, 2), nodes[0].intra, nodes[0].nics),
            type(nodes[0])("node1", (1, 3), nodes[1].intra, nodes[1].nics),
        )
    )
    in_order, round_robin = map(CostParameters.from_levels, (good, dealt))
    assert (in_order.crossings, round_robin.crossings) == (2, 4)
    assert cost.flat_ring(round_robin, 1) == 2 * cost.flat_ring(in_order, 1)
    assert cost.rails(round_robin).seconds([1]) == cost.rails(in_order).seconds([1])


@st.composite
def stages(draw):
    numbers = st.fractions(0, 50)
    return [draw(numbers) for _ in range(4)], draw(st.integers(1, 30))


@given(stages())
def test_pipeline_against_the_closed_formulas(case):
    (a_intra, k_intra, a_inter, k_inter), count = case
    local, remote = a_intra + k_intra / count, a_inter + k_inter / count
    seconds = end_of_chunks([[local] * count], [remote] * count, [[local] * count], [0] * count)
    if remote >= 2 * local:
        assert seconds == 2 * local + count * remote
    # K S / c + A + (c - 1) (a_m + k_m S / c) is safe: stages in one lockstep.
    lockstep = max(2 * local, remote)
    assert max(2 * local * count, remote * count) <= seconds
    assert seconds <= 2 * local + remote + (count - 1) * lockstep


@given(any_levels(even=True))
def test_more_chunks_never_hurt_without_latency(levels):
    p = CostParameters.from_levels(levels)
    times = [cost.rails(p).seconds(parts(1, 2**k)) for k in range(6)]
    assert times == sorted(times, reverse=True)
    assert float(times[0]) == pytest.approx(float(p.intra_slope + p.inter_slope))


@pytest.mark.parametrize("nbytes", [10**4, 10**6, 10**8])
def test_optimal_chunk_count_minimises_the_safe_formula(nbytes):
    p = CostParameters.from_levels(
        cluster([4, 4], 5 * 10**9, [10**9], intra_latency=1e-6, nic_latency=2e-5)
    )
    total, slowest = p.intra_slope + p.inter_slope, max(p.intra_slope, p.inter_slope)

    def safe(count):
        return total * nbytes / count + (count - 1) * (4e-5 + slowest * nbytes / count)

    best = min(range(1, 400), key=safe)
    assert abs(cost.rails(p).best_chunk_count(nbytes) - best) <= 1
    assert cost.rails(CostParameters.from_levels(cluster([1, 1], 1, [1]))).best_chunk_count(99) == 1


def test_calibration_predicts_within_its_reach():
    line = tuple((size, 1e-3 + 8e-9 * size) for size in (10**5, 10**6, 10**7))
    calibration = Calibration({Family.FLAT_RING: line})
    assert calibration.predict(Family.FLAT_RING, 3 * 10**6) == pytest.approx(25e-3)
    assert calibration.predict(Family.FLAT_RING, 8 * 10**7) == pytest.approx(641e-3)
    assert calibration.predict(Family.FLAT_RING, 10**8) is None
    assert calibration.predict(Family.FLAT_RING, 10**4) is None
    assert calibration.predict(Family.HIERARCHICAL_LEADER, 10**6) is None


def test_calibration_takes_medians_and_follows_a_bend():
    bent = ((10**4, 0.017), (10**6, 0.018), (10**6, 0.9), (10**6, 0.017), (25 * 10**6, 0.37))
    calibration = Calibration({Family.FLAT_RING: bent})
    assert calibration.predict(Family.FLAT_RING, 10**6) == 0.018
    halfway = calibration.predict(Family.FLAT_RING, 13 * 10**6)
    assert halfway == pytest.approx((0.018 + 0.37) / 2)
    beyond = calibration.predict(Family.FLAT_RING, 50 * 10**6)
    assert beyond == pytest.approx(0.37 + (0.37 - 0.018) * 25 / 24)
    assert math.isclose(calibration.predict(Family.FLAT_RING, 5000), 0.017, rel_tol=1e-3)


def test_samples_that_predict_nothing():
    assert predict_seconds([], 10) is None
    assert predict_seconds([(10, 1.0), (10, 2.0)], 10) is None
    with pytest.raises(TopologyError, match="no measurement"):
        predict_seconds([(10, 1.0), (20, 0.0)], 10)
