"""Ranks dealt out round-robin or unevenly: nodes found, results exact, bytes sent as planned."""

import json
import sys
from pathlib import Path

import pytest

from tests.hosts import skip_without_hosts
from topo_ar.emulation.cluster import Cluster
from topo_ar.emulation.launch import launch
from topo_ar.emulation.spec import parse_spec
from topo_ar.planning.lowering import lower
from topo_ar.planning.plan import Plan
from topo_ar.planning.traffic import bytes_sent

SPECS = Path(__file__).parent.parent / "experiments" / "specs"
NUM_CALLS = 5
NODE = '[[node]]\nranks = {}\nnics = ["2.5gbit"]\nrank_ids = {}\n'
ROUND_ROBIN = NODE.format(2, [0, 2]) + NODE.format(2, [1, 3])
UNEVEN = NODE.format(2, [0, 2]) + NODE.format(1, [1])
RANK = """
import json, sys
import torch
import torch.distributed as dist
import topo_ar

numel, calls = int(sys.argv[1]) // 4, int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo")
communicator = topo_ar.Communicator(timeout_s=30)
rank, size = dist.get_rank(), dist.get_world_size()
pattern = torch.arange(numel) % 1000
exact = 0
for call in range(calls):
    tensor = (pattern + rank * (call + 1)).float()
    communicator.all_reduce(tensor).wait()
    exact += torch.equal(tensor, (pattern * size + sum(range(size)) * (call + 1)).float())
plan = communicator.plan_for(numel * 4)
found = {"exact": exact, "nodes": plan.nodes, "family": plan.family}
if rank == 0:
    found["plan"] = plan.to_json().decode()
print(json.dumps(found), flush=True)
communicator.close()
dist.destroy_process_group()
"""


def reduce_on(spec, nbytes, num_calls):
    """Return what each rank found and the bytes each host sent."""
    lines = {}
    with Cluster(parse_spec(spec)) as cluster:
        before = {host: cluster.counters(host)["eth0"] for host in cluster.hosts}
        results = launch(
            cluster,
            [sys.executable, "-c", RANK, str(nbytes), str(num_calls)],
            timeout_s=45,
            on_line=lambda rank, line: lines.setdefault(rank, []).append(line),
        )
        sent = [cluster.counters(host)["eth0"] - before[host] for host in cluster.hosts]
    assert results.exit_code == 0, lines
    found = [json.loads(lines[rank][-1]) for rank in sorted(lines)]
    return found, Plan.from_json(found[0].pop("plan")), sent


@pytest.mark.netns
def test_round_robin_ranks_send_a_buffer_out_of_each_host():
    skip_without_hosts()
    found, _, sent = reduce_on(ROUND_ROBIN, 25_000_000, NUM_CALLS)
    assert (
        found
        == [{"exact": NUM_CALLS, "nodes": [[0, 2], [1, 3]], "family": "hierarchical_pipelined"}] * 4
    )
    # A flat ring would send 37.5 MB in good order, 75 MB in rank order; 50 MB means that
    # neighbours were taken for node mates.
    for nbytes in sent:
        assert 25.0e6 <= nbytes / NUM_CALLS <= 25.0e6 * 1.06


@pytest.mark.netns
def test_uneven_nodes_give_the_exact_result():
    skip_without_hosts()
    found, _, _ = reduce_on(UNEVEN, 1_000_000, NUM_CALLS)
    assert [(rank["exact"], rank["nodes"]) for rank in found] == [(NUM_CALLS, [[0, 2], [1]])] * 3


@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "roots"), [("uneven_4_2_2", (1, 0, 0)), ("slow_nic_4x2", (1, 1, 1, 0))]
)
def test_nodes_with_slow_nics_send_as_little_as_planned(spec, roots):
    skip_without_hosts()
    found, plan, sent = reduce_on((SPECS / f"{spec}.toml").read_text(), 25_000_000, NUM_CALLS)
    assert {(rank["exact"], rank["family"]) for rank in found} == {
        (NUM_CALLS, "hierarchical_weighted")
    }
    assert tuple(weight > 0 for weight in plan.shards.nodes) == tuple(map(bool, roots))
    planned = bytes_sent(lower(plan, 6_250_000, 4), plan.nodes).node_sent
    # A node that sums up nothing sends its buffer once, the least that is possible.
    assert planned[-1] == 25_000_000
    for nbytes, expected in zip(sent, planned, strict=True):
        assert 1.0 <= nbytes / NUM_CALLS / expected <= 1.06
