"""The functions of the public page that join several rooms."""

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from topo_ar.errors import ConfigError
from topo_ar.planning.plan import Family, Plan
from topo_ar.topology.model import Topology

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from topo_ar.execution.communicator import Communicator

# A communicator goes with its group.
_by_group: "WeakKeyDictionary[dist.ProcessGroup, Communicator]" = WeakKeyDictionary()


def plan(topology: Topology, nbytes: int, *, family: Family | None = None) -> Plan:
    """Return the best plan for all-reducing `nbytes` bytes over the ranks of `topology`.

    Raises
    ------
    TopologyError
        If `topology` has no ranks or contradicts itself.
    PlanError
        If no plan can be made.

    Examples
    --------
    >>> import topo_ar
    >>> plan = topo_ar.plan(topo_ar.preset("cpu-host", nodes=2, ranks_per_node=4), 25_000_000)
    >>> plan.world_size, plan.family.value
    (8, 'hierarchical_pipelined')
    """
    from topo_ar.planning.nccl_machine import nccl_machine_of
    from topo_ar.planning.planner import plan as make_plan
    from topo_ar.planning.runtime import runtime_of
    from topo_ar.topology.levels import levels
    from topo_ar.topology.model import topology_hash

    runtime = runtime_of(topology)
    both = levels(topology)
    return make_plan(
        both,
        nbytes,
        topology_hash=topology_hash(topology),
        family=family,
        runtime=runtime,
        families=runtime.families,
        nccl=nccl_machine_of(topology, both),
    )


def discover(num_ranks: int = 1) -> Topology:
    """Return the topology of this host, or of the whole job once a process group exists.

    With a process group it is collective and the same on all ranks.

    Parameters
    ----------
    num_ranks : int
        How many ranks to place on a host without GPUs; a job knows better.
    """
    import sys

    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return communicator().topology
    from topo_ar.topology.probe import probe

    return probe(num_ranks=num_ranks)


def communicator(group: "dist.ProcessGroup | None" = None) -> "Communicator":
    """Return the communicator of `group`, made at the first call. Collective then."""
    import torch.distributed as dist

    from topo_ar.execution.communicator import Communicator

    key = group or dist.group.WORLD
    if not isinstance(key, dist.ProcessGroup):
        raise ConfigError(
            "this rank is not in the group, or no group exists yet; call init_process_group first"
        )
    made = _by_group.get(key)
    if made is None or made.closed:
        made = _by_group[key] = Communicator(group)
    return made


def all_reduce(
    tensor: "torch.Tensor",
    op: "dist.ReduceOp.RedOpType | None" = None,
    group: "dist.ProcessGroup | None" = None,
    *,
    async_op: bool = False,
) -> "torch.futures.Future[torch.Tensor] | torch.Tensor":
    """Reduce `tensor` in place over `group` and return it, or a future with ``async_op=True``.

    Parameters
    ----------
    tensor : Tensor
        Contiguous.
    op : ReduceOp, optional
        SUM when left out.

    Raises
    ------
    ValueError
        If the tensor or the operation cannot be reduced.
    ExecutionError
        If a rank failed.
    """
    import torch.distributed as dist

    made = communicator(group)
    op = dist.ReduceOp.SUM if op is None else op
    return made.all_reduce(tensor, op) if async_op else made.all_reduce_sync(tensor, op)
