"""The alpha-beta fit and what it does to a topology."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topo_ar.errors import TopologyError
from topo_ar.topology.levels import levels
from topo_ar.topology.measure import AlphaBeta, fit_alpha_beta, with_measured
from topo_ar.topology.model import LinkKind, Source
from topo_ar.topology.presets import preset

SIZES = (8, 4096, 4 << 20, 16 << 20)


@given(st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-6))
def test_exact_times_are_fitted_exactly(alpha: float, beta: float) -> None:
    fit = fit_alpha_beta([(n, alpha + n * beta) for n in SIZES])
    assert fit.alpha_seconds == pytest.approx(alpha, rel=1e-6)
    assert fit.beta_seconds_per_byte == pytest.approx(beta, rel=1e-6)
    assert fit.relative_residual < 1e-6
    assert fit.num_samples == 4


@given(st.lists(st.tuples(st.integers(0, 1 << 28), st.floats(1e-7, 10)), min_size=2))
def test_never_negative(samples: list[tuple[int, float]]) -> None:
    if len({nbytes for nbytes, _ in samples}) < 2:
        return
    fit = fit_alpha_beta(samples)
    assert fit.alpha_seconds >= 0
    assert fit.beta_seconds_per_byte >= 0


def test_noise_of_two_percent_stays_two_percent() -> None:
    samples = [
        (n, (20e-6 + n / 1e9) * noise) for n in SIZES for noise in (0.98, 1.02, 1.0, 0.98, 1.02)
    ]
    fit = fit_alpha_beta(samples)
    assert fit.alpha_seconds == pytest.approx(20e-6, rel=0.02)
    assert fit.bytes_per_s == pytest.approx(1e9, rel=0.02)
    assert 0.005 < fit.relative_residual < 0.03


def test_falling_times_leave_the_rate_unknown() -> None:
    fit = fit_alpha_beta([(8, 2e-3), (1 << 20, 1e-3)])
    assert fit.bytes_per_s is None
    topology = preset("cpu-host", nodes=2)
    measured = with_measured(topology, "inter", fit)
    assert levels(measured).nodes[0].nics[0].nominal == 125e6
    assert "do not grow with the size" in measured.notes[-1]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "fewer than two sizes"),
        ([(8, 1e-3), (8, 2e-3)], "2 samples of fewer than two sizes"),
        ([(8, 0.0), (16, 1e-3)], "8 bytes in 0.0 s"),
        ([(-1, 1.0), (16, 1e-3)], "-1 bytes"),
    ],
)
def test_what_cannot_be_fitted(samples: list[tuple[int, float]], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        fit_alpha_beta(samples)


def fit(rate: float, alpha: float = 30e-6) -> AlphaBeta:
    return AlphaBeta(alpha, 1 / rate, 0.01, 20)


def test_inter_is_what_the_levels_then_say() -> None:
    topology = preset("cpu-host", nodes=2)
    found = levels(with_measured(topology, "inter", fit(118e6)))
    for node in found.nodes:
        [nic] = node.nics
        assert nic.payload == pytest.approx(118e6)
        assert (nic.nominal, nic.source) == (125e6, Source.MEASURED)
        assert nic.latency == pytest.approx(30e-6)
        assert node.intra == levels(topology).nodes[0].intra


def test_unequal_nics_keep_their_proportion_and_never_pass_nominal() -> None:
    topology = preset("cpu-host", nodes=2, nic=[125e6, 250e6])
    nics = levels(with_measured(topology, "inter", fit(100e6))).nodes[1].nics
    assert [nic.payload for nic in nics] == pytest.approx([100e6, 200e6])
    nics = levels(with_measured(topology, "inter", fit(130e6))).nodes[1].nics
    assert [nic.payload for nic in nics] == [125e6, 250e6]


def test_intra_of_shared_memory_and_of_nvlink() -> None:
    topology = preset("cpu-host")
    [node] = levels(with_measured(topology, "intra", fit(6e9))).nodes
    assert node.intra.payload == pytest.approx(6e9)
    assert node.intra.nominal == 25.6e9
    assert node.intra.latency == pytest.approx(30e-6)
    [node] = levels(with_measured(topology, "intra", fit(40e9))).nodes
    assert node.intra.payload == node.intra.nominal == pytest.approx(40e9)
    [node] = levels(with_measured(preset("dgx-h100"), "intra", fit(390e9))).nodes
    assert (node.intra.nominal, node.intra.payload) == pytest.approx((450e9, 390e9))
    dgx = with_measured(preset("dgx-h100"), "intra", fit(390e9))
    changed = [link for link in dgx.links if link.latency and link.latency.source == "measured"]
    assert {link.kind for link in changed} == {LinkKind.NVLINK}
