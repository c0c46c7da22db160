"""The plans of a job's tensors and this rank's part of them, made once for each size and dtype."""

import hashlib
import logging
from dataclasses import dataclass

import torch

from topo_ar.errors import PlanError
from topo_ar.execution.kernels import Kernel, supported
from topo_ar.execution.program import ChunkProgram, compile_program
from topo_ar.planning.lowering import lower
from topo_ar.planning.plan import Family, Plan
from topo_ar.planning.planner import plan as make_plan
from topo_ar.planning.runtime import CPU_RUNTIME, GPU_RUNTIME
from topo_ar.topology.levels import levels
from topo_ar.topology.model import Topology, topology_hash

logger = logging.getLogger("topo_ar")

# What `program` compiles; every other family is planned, but not yet run.
EXECUTABLE = frozenset(
    {
        Family.FLAT_RING,
        Family.HIERARCHICAL_SEQUENTIAL,
        Family.HIERARCHICAL_PIPELINED,
        Family.HIERARCHICAL_LEADER,
    }
)

MODES = ("auto", "flat", "hierarchical")
_MOST_KEPT = 1024


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is kept for one (number of elements, dtype, device): the plan and this rank's program.

    `program` and `kernel` are None where the plain path is taken; `fingerprint` tells collectives
    apart that ranks must not mix.
    """

    plan: Plan
    program: tuple[ChunkProgram, ...] | None
    kernel: Kernel | None
    fingerprint: int


class Plans:
    """Plans for one job; the same on every rank.

    Parameters
    ----------
    topology : Topology
        The job's cluster.
    nodes : tuple of tuple of int
        The ranks of each node as the job runs them.
    rank : int
        This rank.
    mode : str or Plan
        One of `MODES`, or a `Plan` for tensors of its size.
    plain_reason : str or None
        Why everything takes the plain path, if it does.
    slot_nbytes : int
        The largest chunk that the shared memory can hold.

    Raises
    ------
    PlanError
        If `topology` or a `Plan` places the ranks on other nodes.
    """

    def __init__(
        self,
        topology: Topology,
        nodes: tuple[tuple[int, ...], ...],
        rank: int,
        mode: str | Plan,
        plain_reason: str | None,
        slot_nbytes: int,
    ) -> None:
        self._levels = levels(topology)
        _require_fit("topology", [node.ranks for node in self._levels.nodes], nodes)
        if isinstance(mode, Plan):
            _require_fit("plan", mode.nodes, nodes)
        self._topology_hash = topology_hash(topology)
        self._rank = rank
        self._mode = mode
        self._plain_reason = plain_reason
        self._slot_nbytes = slot_nbytes
        self._kept: dict[tuple[int, torch.dtype, str], Prepared] = {}

    @property
    def nics_per_node(self) -> int:
        """The number of NICs of the node that has the fewest."""
        return min(len(node.nics) for node in self._levels.nodes)

    def plan_for(self, nbytes: int, itemsize: int, device: str) -> Plan:
        """Return the plan for a tensor of `nbytes` bytes on a device of type `device`.

        Raises
        ------
        PlanError
            If no plan can be made.
        """
        family: Family | None = None
        if self._plain_reason is not None or self._mode == "flat":
            family = Family.FLAT_RING
        elif isinstance(self._mode, Plan):
            if self._mode.nbytes == nbytes:
                return self._mode
            family = self._mode.family
        plan = self._plan(nbytes, itemsize, device, family)
        if self._mode == "hierarchical" and plan.family is Family.FLAT_RING and family is None:
            plan = self._plan(nbytes, itemsize, device, Family.HIERARCHICAL_PIPELINED)
        return plan

    def _plan(self, nbytes: int, itemsize: int, device: str, family: Family | None) -> Plan:
        return make_plan(
            self._levels,
            nbytes,
            topology_hash=self._topology_hash,
            itemsize=itemsize,
            family=family,
            families=EXECUTABLE,
            runtime=GPU_RUNTIME if device == "cuda" else CPU_RUNTIME,
            max_chunk_nbytes=None if device == "cuda" else self._slot_nbytes,
        )

    def prepared(self, tensor: torch.Tensor) -> Prepared:
        """Return plan and program for tensors like `tensor`.

        Raises
        ------
        PlanError
            If no plan can be made, or the `Plan` given does not fit the dtype.
        """
        key = (tensor.numel(), tensor.dtype, tensor.device.type)
        prepared = self._kept.get(key)
        if prepared is None:
            if len(self._kept) >= _MOST_KEPT:  # sizes that change all the time
                self._kept.clear()
            prepared = self._kept[key] = self._prepare(tensor)
        return prepared

    def _prepare(self, tensor: torch.Tensor) -> Prepared:
        plan = self.plan_for(tensor.nbytes, tensor.itemsize, tensor.device.type)
        program = kernel = None
        if tensor.device.type == "cpu":
            if self._rank == 0:  # equal on all ranks
                logger.info("plan for %d bytes: %s", tensor.nbytes, plan.reason)
            if supported(tensor.dtype):
                schedule = lower(plan, tensor.numel(), tensor.itemsize)
                program = compile_program(schedule, self._rank, self._slot_nbytes)
                kernel = Kernel(tensor.dtype)
            else:
                logger.info("plain all-reduce for %s", tensor.dtype)
        digest = hashlib.sha256(f"{plan.hash} {tensor.dtype}".encode()).digest()
        return Prepared(plan, program, kernel, int.from_bytes(digest[:8], "little", signed=True))


def _require_fit(
    what: str, placed: "list[tuple[int, ...]] | tuple[tuple[int, ...], ...]", nodes: object
) -> None:
    theirs = tuple(sorted(tuple(sorted(node)) for node in placed))
    if theirs != nodes:
        raise PlanError(
            f"the {what} places the ranks on nodes as {theirs}, the job runs them as {nodes}; "
            "probe the job's own topology or place the ranks as described"
        )
