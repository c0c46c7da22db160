"""What compression sends, counted by the NICs of emulated hosts."""

import pytest

from tests.hosts import rows_of_ranks, skip_without_hosts
from topo_ar.emulation.spec import ClusterSpec


def _sent(codec: str) -> list[dict[str, object]]:
    return rows_of_ranks(ClusterSpec.uniform(2, 1, ["1gbit"]), "tests.wire_worker", codec)


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.timeout(180)
def test_the_wire_carries_what_a_codec_promises() -> None:
    """R03: a hook that sent single precision where half was asked for."""
    skip_without_hosts()
    plain = _sent("none")
    for row in plain:
        assert row["nic"] == pytest.approx(4e6, rel=0.06)
    for codec, low, high in (("fp16", 0.48, 0.52), ("bf16", 0.48, 0.52), ("int8", 0.25, 0.27)):
        for row, dense in zip(_sent(codec), plain, strict=True):
            assert low <= row["nic"] / dense["nic"] <= high, codec
            assert row["own"] == pytest.approx(row["nic"], rel=0.06)
            assert row["dtype"] == "torch.float32"
