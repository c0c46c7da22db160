"""What compression sends, counted by the NICs of emulated hosts."""

import pytest

from tests.hosts import rows_of_ranks, skip_without_hosts
from topo_ar.emulation.spec import ClusterSpec


def _sent(*arguments: str) -> list[dict[str, object]]:
    return rows_of_ranks(ClusterSpec.uniform(2, 1, ["1gbit"]), "tests.wire_worker", *arguments)


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.timeout(180)
def test_the_wire_carries_what_a_codec_promises() -> None:
    """R03: a hook that sent single precision where half was asked for."""
    skip_without_hosts()
    plain = _sent("linear", "none")
    for row in plain:
        assert row["nic"] == pytest.approx(4e6, rel=0.06)
    for codec, low, high in (("fp16", 0.48, 0.52), ("bf16", 0.48, 0.52), ("int8", 0.25, 0.27)):
        for row, dense in zip(_sent("linear", codec), plain, strict=True):
            assert low <= row["nic"] / dense["nic"] <= high, codec
            assert row["own"] == pytest.approx(row["nic"], rel=0.06)
            assert row["dtype"] == "torch.float32"


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.timeout(180)
def test_the_wire_carries_a_hundredth_whatever_rank_stands_beside() -> None:
    """R04: the number of kept entries was computed from another option."""
    skip_without_hosts()
    for other in ("none", "powersgd:1", "powersgd:4", "powersgd:64"):
        for row in _sent("ramp", "topk:0.01", other):
            assert row["places"] == list(range(9900, 10000))
            assert row["values"] == [float(value) for value in range(9901, 10001)]
            assert row["residual"] == 49_009_950
            assert row["five"] == [1.0] * 5
            # Pairs of value and index, the five, and whether the step is finite.
            assert row["own"] == 100 * 8 + 5 * 4 + 4
            # One message of each is a packet or two, whose headers the NIC counts, as it does
            # acknowledgements and what the job says beside gradients; dense would be 40 kB.
            assert row["own"] <= row["nic"] <= row["own"] + 1500
