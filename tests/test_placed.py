"""Ranks dealt out over hosts in any order: who shares a host is found out, not assumed (R06)."""

import pytest

from tests.hosts import rows_of_ranks, skip_without_hosts
from topo_ar.emulation.spec import parse_spec


def _run(hosts: list[list[int]]) -> list[dict[str, object]]:
    spec = "".join(
        f'[[node]]\nranks = {len(ranks)}\nnics = ["1gbit"]\nrank_ids = {ranks}\n' for ranks in hosts
    )
    return rows_of_ranks(parse_spec(spec), "tests.placed_worker")


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.parametrize("hosts", [[[0, 2], [1, 3]], [[0, 2], [1]]], ids=str)
def test_a_host_sends_the_buffer_once_however_ranks_are_dealt_out(hosts) -> None:
    """Where neighbours are taken for node mates, a host of two ranks sends 50 MB."""
    skip_without_hosts()
    rows = _run(hosts)
    assert len(rows) == sum(map(len, hosts))
    for row in rows:
        assert row["wrong"] == 0
        assert sorted(map(sorted, row["nodes"])) == hosts
        assert sorted(map(sorted, row["groups"])) == hosts
        assert 25e6 <= row["nic"] <= 25e6 * 1.06
