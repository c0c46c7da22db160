"""What codecs cost is measured on whatever machine this is."""

import pytest

from topo_ar.compression.calibration import measure_costs
from topo_ar.planning.codecs import BUILT_IN, NONE


@pytest.mark.parametrize("num_nodes", [2, 3, 8, 100])
def test_every_codec_has_a_cost_for_any_number_of_nodes(num_nodes):
    found = measure_costs([NONE, *BUILT_IN], num_nodes)
    assert list(found) == [str(codec) for codec in BUILT_IN]
    # Nothing encodes a terabyte a second, and nothing takes a second to begin.
    assert all(cost.seconds_per_byte > 1e-12 for cost in found.values())
    assert all(0 < cost.launch_seconds < 1 for cost in found.values())
