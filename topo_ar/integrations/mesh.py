"""A DeviceMesh that lies on the job's hierarchy: ``topo_ar.init_mesh``."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from topo_ar.errors import TopologyError
from topo_ar.execution.bootstrap import Bootstrap
from topo_ar.execution.communicator import SLOT_NBYTES
from topo_ar.execution.discover import discover_job
from topo_ar.execution.job import Job
from topo_ar.execution.options import require_equal
from topo_ar.execution.torch_private import mesh_backends
from topo_ar.topology.levels import levels
from topo_ar.topology.mesh_order import mesh_order, mesh_shape
from topo_ar.topology.model import Topology, topology_hash

_TIMEOUT_S = 60.0


def init_mesh(
    device_type: str,
    shape: Sequence[int] | None = None,
    *,
    mesh_dim_names: Sequence[str] = ("replicate", "shard"),
    topology: Topology | None = None,
    backend_override: Mapping[int | str, Any] | None = None,
) -> DeviceMesh:
    """Return a mesh of all ranks whose inner dimensions stay inside nodes. Collective over the job.

    Ranks that share a host are found out as for `attach`, however the launcher has dealt them out.
    The innermost dimension is inside a node; the others follow outwards, each inside a node or over
    whole nodes, those of one rack before those of the next. Ranks that differ in the outermost
    dimension alone have the same place in their nodes.

    Parameters
    ----------
    device_type : str
        ``cuda`` or ``cpu``.
    shape : sequence of int, optional
        Sizes, outermost first; one may be -1, for what is left. Without: as many ranks inside as
        nodes allow, replicated over the rest.
    mesh_dim_names : sequence of str
        Names of the dimensions.
    topology : Topology, optional
        The job's; probed when left out.
    backend_override : mapping, optional
        As for torch's ``init_device_mesh``.

    Raises
    ------
    ConfigError
        If the sizes do not fit the job and its nodes, or ranks ask for different meshes.
    TopologyError
        If `topology` is not that of the job.

    Examples
    --------
    ::

        mesh = topo_ar.init_mesh("cuda")  # on 4 nodes of 8: replicate=4, shard=8
        mesh = topo_ar.init_mesh("cuda", (2, 8, 4), mesh_dim_names=("replicate", "shard", "tp"))
    """
    bootstrap = Bootstrap(None)
    with bootstrap.all_or_none(), closing(Job(bootstrap, _TIMEOUT_S, SLOT_NBYTES)) as job:
        asked = {
            "shape": str(shape and tuple(shape)),
            "mesh_dim_names": str(tuple(mesh_dim_names)),
            "topology": topology_hash(topology) if topology else "probed",
        }
        require_equal(job.channel.all_gather, asked)
        found = topology or discover_job(job.channel, job.nodes)
        both = levels(found)
        if both.world_size != bootstrap.world_size:
            raise TopologyError(
                f"topology {found.name!r} has {both.world_size} ranks, the job "
                f"{bootstrap.world_size}"
            )
        sizes = mesh_shape(both, shape, mesh_dim_names)
    ranks = torch.tensor(mesh_order(found, both), dtype=torch.int).view(sizes)
    names = tuple(mesh_dim_names)
    backends = mesh_backends(backend_override, names) if backend_override else None
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, backend_override=backends)
