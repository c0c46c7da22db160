"""``topo_ar.init_mesh``: which rank gets which place, and that they train there."""

from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard

import topo_ar
from tests.compressed_training import on_hosts
from topo_ar.errors import ConfigError, TopologyError
from topo_ar.topology.levels import levels
from topo_ar.topology.mesh_order import mesh_order, mesh_shape
from topo_ar.topology.racks import Rack

NAMES = ("pp", "replicate", "shard", "tp")


def _cluster(name, nodes, **options):
    return topo_ar.preset(name, nodes=nodes, **options)


def _dealt(topology, order):
    """Return the cluster with rank i where rank order[i] was."""
    ranks = tuple(topology.ranks[i] for i in order)
    return msgspec.structs.replace(topology, ranks=ranks)


CLUSTERS = [
    _cluster("dgx-h100", 4),
    _cluster("cpu-host", 6, ranks_per_node=4),
    _cluster("frontier", 3),
    _cluster("dgx-h100", 1),
]


@settings(max_examples=40)
@given(st.data())
def test_inner_dimensions_stay_inside_however_ranks_are_dealt_out(data) -> None:
    topology = data.draw(st.sampled_from(CLUSTERS))
    size = len(topology.ranks)
    dealt = _dealt(topology, data.draw(st.permutations(range(size))))
    both = levels(dealt)
    local = len(both.nodes[0].ranks)
    inner = data.draw(st.sampled_from([n for n in range(1, local + 1) if local % n == 0]))
    middle = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % (inner * n) == 0]))
    try:
        shape = mesh_shape(both, (-1, middle, inner), NAMES[1:])
    except ConfigError:
        assert local % (middle * inner)
        assert (middle * inner) % local
        return
    mesh = torch.tensor(mesh_order(dealt, both)).view(shape)
    assert sorted(mesh.flatten().tolist()) == list(range(size))
    node_of = {rank: at for at, node in enumerate(both.nodes) for rank in node.ranks}
    place_of = {rank: dealt.ranks[rank].partition("/")[2] for rank in range(size)}
    for row in mesh.view(-1, inner).tolist():
        assert len({node_of[rank] for rank in row}) == 1
    for block in mesh.view(shape[0], -1).tolist():
        held = len({node_of[rank] for rank in block})
        assert held == max(1, middle * inner // local)
    if middle * inner >= local:
        # Replicas have the same place in their nodes, and so the same NIC.
        for column in mesh.view(shape[0], -1).t().tolist():
            assert len({place_of[rank] for rank in column}) == 1


def test_islands_and_racks_are_filled_one_after_the_other() -> None:
    topology = _cluster("cpu-host", 3, ranks_per_node=4)
    known = levels(topology)
    first = replace(known.nodes[0], islands=((0, 2), (1, 3)))
    racks = (Rack("a", (0, 2), first.intra), Rack("b", (1,), first.intra))
    known = replace(known, nodes=(first, *known.nodes[1:]), racks=racks)
    assert mesh_order(topology, known) == (0, 2, 1, 3, 8, 9, 10, 11, 4, 5, 6, 7)


@pytest.mark.parametrize(
    ("nodes", "shape", "names", "made"),
    [
        ([4, 4], None, NAMES[1:3], (2, 4)),
        ([4, 2], None, NAMES[1:3], (3, 2)),
        ([3, 3], (-1, 1), NAMES[1:3], (6, 1)),
        ([4, 4, 4, 4], (2, 4, 2), NAMES[1:], (2, 4, 2)),
        ([4, 4, 4, 4], (1, -1, 2, 4), NAMES, (1, 2, 2, 4)),
        (
            [6, 2],
            (-1, 4),
            NAMES[1:3],
            "shard=4, has to stay inside nodes, but node 'node0' has 6 ranks",
        ),
        ([4, 4], (1, 8), NAMES[1:3], "sizes that fit are 1, 2, 4. torch's init_device_mesh"),
        ([6, 6], (1, 6, 2), NAMES[1:], (1, 6, 2)),
        ([6, 6], (1, 4, 3), NAMES[1:], (1, 4, 3)),
        ([6, 6, 6, 6], (3, 4, 2), NAMES[1:], "shard=4 x tp=2 are 8 ranks, which neither divide"),
        ([4, 4], (3, 2), NAMES[1:3], "replicate=3, shard=2 does not make up the 8 ranks"),
        ([4, 4], (-1, -1), NAMES[1:3], "sizes are 1 or more, and one may be -1"),
        ([4, 4], (0, 4), NAMES[1:3], "sizes are 1 or more"),
        ([4, 4], (2, 4), ("a", "a"), "needs 2 different names, not a, a"),
        ([4, 4], (2, 4), NAMES[1:], "needs 2 different names"),
        ([4, 4], None, NAMES[1:], "3 dimensions .* needs a shape"),
    ],
)
def test_shapes(nodes, shape, names, made) -> None:
    known = levels(_cluster("cpu-host", 1, ranks_per_node=sum(nodes)))
    ranks = iter(range(sum(nodes)))
    parts = [tuple(next(ranks) for _ in range(n)) for n in nodes]
    known = replace(known, nodes=tuple(replace(known.nodes[0], ranks=part) for part in parts))
    if isinstance(made, tuple):
        assert mesh_shape(known, shape, names) == made
        return
    with pytest.raises(ConfigError, match=made):
        mesh_shape(known, shape, names)


def _trains(rank, world_size):
    """Four ranks dealt out over two hosts; what trains is the whole job (R15)."""
    on_hosts(rank, [0, 1, 0, 1])
    mesh = topo_ar.init_mesh("cpu", backend_override={"shard": "gloo"})
    model = nn.Linear(4, 4, bias=False)
    nn.init.zeros_(model.weight)
    fully_shard(model, mesh=mesh)
    with topo_ar.attach(model, timeout_s=20.0) as handle:
        model(torch.ones(1, 4) * (rank + 1)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        nodes = handle.communicator.nodes
    return mesh.mesh.tolist(), mesh.mesh_dim_names, nodes, model.weight.to_local().unique().tolist()


def test_replicas_are_on_different_hosts(ranks) -> None:
    for mesh, names, nodes, weights in ranks.run(_trains, 4):
        assert mesh == [[0, 2], [1, 3]]
        assert names == ("replicate", "shard")
        assert nodes == ((0,), (1,))
        assert weights == [-2.5]


def _disagrees(rank, world_size):
    with pytest.raises(ConfigError) as caught:
        topo_ar.init_mesh("cpu", (2, 1) if rank else (1, 2))
    other = topo_ar.preset("cpu-host", ranks_per_node=3)
    with pytest.raises(TopologyError, match="has 3 ranks, the job 2"):
        topo_ar.init_mesh("cpu", topology=other)
    return str(caught.value)


def test_ranks_that_ask_for_different_meshes_are_told(ranks) -> None:
    for said in ranks.run(_disagrees, 2):
        assert said.startswith("shape is (")
