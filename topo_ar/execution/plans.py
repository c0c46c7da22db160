"""The plans of a job's tensors and this rank's part of them, made once for each size and dtype."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist

from topo_ar.errors import PlanError
from topo_ar.execution.fingerprint import fingerprint
from topo_ar.execution.fixed_order import FixedOrder
from topo_ar.execution.kernels import Kernel
from topo_ar.execution.line import is_straight
from topo_ar.execution.nics import with_nics
from topo_ar.execution.program import ChunkProgram, compile_program
from topo_ar.execution.reach import Reach, is_equal
from topo_ar.planning.equal_shares import with_equal_shares
from topo_ar.planning.lowering import lower
from topo_ar.planning.nccl_machine import nccl_machine_of
from topo_ar.planning.plan import Family, Plan
from topo_ar.planning.planner import plan as make_plan
from topo_ar.planning.runtime import CPU_RUNTIME, NCCL_RUNTIME, Runtime
from topo_ar.topology.levels import levels
from topo_ar.topology.model import Topology, topology_hash

logger = logging.getLogger("topo_ar")

# Plans that are asked for by name: the choice of the planner, no hierarchy, the best hierarchy,
# equal shares whatever the NICs carry, or a family.
MODES = ("auto", "flat", "hierarchical", "equal", *sorted(CPU_RUNTIME.families))
# Their sums are passed on from rank to rank, in an order that depends on the nodes.
_ROUND_BY_ROUND = frozenset(
    {Family.HIERARCHICAL_RING, Family.HIERARCHICAL_HALVING, Family.HIERARCHICAL_DOUBLING}
)
_MOST_KEPT = 1024


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is kept for one (number of elements, dtype, device): the plan and this rank's program.

    `program` is None where the plain path is taken; `fingerprint` tells collectives apart that
    ranks must not mix, up to their operation; `straight` says that `Straight` can run the program.
    """

    plan: Plan
    program: tuple[ChunkProgram, ...] | None
    fingerprint: int
    straight: bool = False


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
        One of `MODES`, or a `Plan` for tensors of its size; its family serves other sizes.
    plain_reason : str or None
        Why everything takes the plain path, if it does.
    slot_nbytes : int
        The largest chunk that the shared memory can hold.
    reproducible : bool
        Whether floats are added in an order that does not depend on `nodes`, nor on the plan: the
        plain path, whose order is another, is then refused.
    nics : sequence of str
        The NIC that each rank's flows use, as from `nics.own_nics`; empty for what the topology
        says.

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
        reproducible: bool = False,
        nics: Sequence[str] = (),
    ) -> None:
        self._levels = levels(topology)
        # NCCL chooses its NICs itself.
        self._levels_of_flows = with_nics(self._levels, nics) if nics else self._levels
        _require_fit("topology", [node.ranks for node in self._levels.nodes], nodes)
        if isinstance(mode, Plan):
            _require_fit("plan", mode.nodes, nodes)
        self._topology_hash = topology_hash(topology)
        self._nccl = nccl_machine_of(topology, self._levels)
        self._rank = rank
        self._mode = mode
        self._plain_reason = plain_reason
        self._slot_nbytes = slot_nbytes
        self._reproducible = reproducible
        self._nodes = nodes
        self._reach = Reach(nodes)
        self._kept: dict[tuple[int, torch.dtype, str], Prepared] = {}
        self._said: set[tuple[str, str]] = set()
        self._world_size = sum(map(len, nodes))
        self._kernels: dict[tuple[torch.dtype, dist.ReduceOp.RedOpType], Kernel] = {}

    @property
    def nics_per_node(self) -> int:
        """The number of NICs of the node that has the fewest."""
        return min(len(node.nics) for node in self._levels.nodes)

    def plan_for(self, nbytes: int, itemsize: int, device: str) -> Plan:
        """Return the plan that runs for `nbytes` bytes on a device of type `device`.

        Raises
        ------
        PlanError
            If no plan can be made, or the one that is asked for cannot run.
        """
        if device == "cuda" and (missing := self._missing_inline()):
            return self._flat_instead(nbytes, itemsize, device, self._family or "stages", missing)
        plan = self._asked(nbytes, itemsize, device)
        missing = self._reach.missing(plan, itemsize) if device == "cpu" else ""
        if not missing:
            return plan
        if plan is self._mode:
            raise PlanError(f"the plan cannot run: {missing}")
        return self._flat_instead(nbytes, itemsize, device, plan.family, missing)

    def _missing_inline(self) -> str:
        """Return what NCCL's stages lack for what is asked for; empty if there is nothing."""
        family = self._family
        if family is Family.FLAT_RING:
            return ""
        if not is_equal(self._nodes):
            return "NCCL's stages need equal numbers of ranks on all nodes"
        # The stages' shares are equal without being asked.
        if family is None or family in NCCL_RUNTIME.families or self._mode == "equal":
            return ""
        return "NCCL's stages give all ranks equal shares and have no leaders"

    def _flat_instead(
        self, nbytes: int, itemsize: int, device: str, asked: str, missing: str
    ) -> Plan:
        if self._rank == 0 and (asked, missing) not in self._said:  # equal on all ranks
            self._said.add((asked, missing))
            logger.warning("plain all-reduce instead of %s: %s", asked, missing)
        flat = self._plan(nbytes, itemsize, device, Family.FLAT_RING)
        reason = f"{Family.FLAT_RING} instead of {asked}: {missing}."
        return msgspec.structs.replace(flat, reason=reason)

    def _asked(self, nbytes: int, itemsize: int, device: str) -> Plan:
        """Return the plan that is asked for, whether its flows exist or not."""
        mode, family = self._mode, self._family
        inline = device == "cuda"
        if self._plain_reason is not None and not inline:
            family = Family.FLAT_RING
        if mode == "equal" and inline:
            mode, family = "hierarchical", None
        if isinstance(mode, Plan) and mode.family is family and mode.nbytes == nbytes:
            return mode
        plan = self._plan(nbytes, itemsize, device, family)
        if mode == "equal" and plan.family is Family.HIERARCHICAL_WEIGHTED:
            return with_equal_shares(plan, self._levels_of_flows, CPU_RUNTIME)
        staged_only = mode == "hierarchical" or self._reproducible
        if staged_only and plan.family is Family.FLAT_RING and family is None:
            staged = [
                a for a in plan.alternatives if not a.excluded and a.family is not plan.family
            ]
            if staged:
                best = min(staged, key=lambda alternative: alternative.seconds)
                plan = self._plan(nbytes, itemsize, device, best.family)
        return plan

    @property
    def _family(self) -> Family | None:
        """The family that is asked for; None where the planner chooses."""
        if isinstance(self._mode, Plan):
            return self._mode.family
        asked = {"flat": Family.FLAT_RING, "equal": Family.HIERARCHICAL_WEIGHTED}
        return asked.get(self._mode) or (
            Family(self._mode) if self._mode in CPU_RUNTIME.families else None
        )

    def _plan(self, nbytes: int, itemsize: int, device: str, family: Family | None) -> Plan:
        families = _runtime(device).families
        if self._reproducible and family is None:
            families -= _ROUND_BY_ROUND
        return make_plan(
            self._levels if device == "cuda" else self._levels_of_flows,
            nbytes,
            topology_hash=self._topology_hash,
            itemsize=itemsize,
            family=family,
            families=families,
            runtime=_runtime(device),
            nccl=self._nccl if device == "cuda" else None,
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

    def kernel(self, dtype: torch.dtype, op: "dist.ReduceOp.RedOpType") -> Kernel:
        """Return what reduces tensors of `dtype` by `op`."""
        key = (dtype, op)
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = self._make_kernel(dtype.to_real(), op)
        return kernel

    def _make_kernel(self, dtype: torch.dtype, op: "dist.ReduceOp.RedOpType") -> Kernel:
        in_any_order = not dtype.is_floating_point or op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX)
        if self._reproducible and not in_any_order:
            return FixedOrder(dtype, op, self._nodes, self._rank)
        return Kernel(dtype, op, self._world_size)

    def _prepare(self, tensor: torch.Tensor) -> Prepared:
        plan = self.plan_for(tensor.nbytes, tensor.itemsize, tensor.device.type)
        program = None
        if tensor.device.type == "cpu":
            if self._rank == 0:  # equal on all ranks
                logger.info("plan for %d bytes: %s", tensor.nbytes, plan.reason)
            program = self._program(plan, tensor)
        facts = f"{plan.hash} {tensor.dtype} {self._reproducible}"
        straight = program is not None and is_straight(program)
        return Prepared(plan, program, fingerprint(facts.encode()), straight)

    def _program(self, plan: Plan, tensor: torch.Tensor) -> tuple[ChunkProgram, ...] | None:
        schedule = lower(plan, tensor.numel(), tensor.itemsize)
        program = compile_program(schedule, self._rank, self._slot_nbytes)
        # The same on ranks that have no part in it.
        relays = plan.family in _ROUND_BY_ROUND or (
            program is not None and any(chunk.relay is not None for chunk in program)
        )
        if self._reproducible and (program is None or relays):
            why = self._plain_reason or plan.reason
            if relays:
                why = "sums of some nodes are passed on"
            raise PlanError(
                f"{plan.family} does not add in a fixed order ({why}); ask for another plan or for "
                "reproducible=False"
            )
        return program


def _runtime(device: str) -> Runtime:
    return NCCL_RUNTIME if device == "cuda" else CPU_RUNTIME


def _require_fit(
    what: str, placed: "list[tuple[int, ...]] | tuple[tuple[int, ...], ...]", nodes: object
) -> None:
    theirs = tuple(sorted(tuple(sorted(node)) for node in placed))
    if theirs != nodes:
        raise PlanError(
            f"the {what} places the ranks on nodes as {theirs}, the job runs them as {nodes}; "
            "probe the job's own topology or place the ranks as described"
        )
