"""The all-reduce engine of one process group: set-up, plans, and tickets.

``Communicator(group).all_reduce(tensor)`` is what the DDP hook and `topo_ar.all_reduce` call.
"""

import atexit
import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec
import torch
import torch.distributed as dist

from topo_ar.errors import ConfigError, ExecutionError, PlanError
from topo_ar.execution.discover import discover_job
from topo_ar.execution.flight import Collective, Span
from topo_ar.execution.gather import Channel, Colocation, agree_on_nonce, find_colocated
from topo_ar.execution.kernels import Kernel, supported
from topo_ar.execution.loop import Loop, Ticket
from topo_ar.execution.measure import measure_levels
from topo_ar.execution.network import local_address
from topo_ar.execution.pipeline import Pipeline
from topo_ar.execution.program import ChunkProgram, compile_program, node_program
from topo_ar.execution.transports.rendezvous import connect, listen
from topo_ar.execution.transports.segment import Owned
from topo_ar.execution.transports.shm import Node, ordered_stores
from topo_ar.execution.transports.stages import InlineStages, StageGroups
from topo_ar.execution.transports.tcp import Flow
from topo_ar.planning.lowering import lower
from topo_ar.planning.plan import Family, Plan
from topo_ar.planning.planner import plan as make_plan
from topo_ar.planning.runtime import CPU_RUNTIME, GPU_RUNTIME
from topo_ar.topology.levels import levels
from topo_ar.topology.model import Topology, topology_hash

logger = logging.getLogger("topo_ar")

SLOT_NBYTES = 2 << 20
DEFAULT_TIMEOUT_S = 600.0
_SETUP_TIMEOUT_S = 60.0
_MODES = ("auto", "flat", "hierarchical")


_live: "weakref.WeakSet[Communicator]" = weakref.WeakSet()


class _Prepared:
    """What is cached for one (number of elements, dtype): the plan and this rank's program.

    `fingerprint` tells collectives apart that ranks must not mix.
    """

    __slots__ = ("fingerprint", "kernel", "plan", "program")

    def __init__(
        self,
        plan: Plan,
        program: tuple[ChunkProgram, ...] | None,
        kernel: Kernel | None,
        dtype: torch.dtype,
    ) -> None:
        self.plan = plan
        self.program = program
        self.kernel = kernel
        digest = hashlib.sha256(f"{plan.hash} {dtype}".encode()).digest()
        self.fingerprint = int.from_bytes(digest[:8], "little", signed=True)


class Communicator:
    """All-reduces tensors over one process group by the plan that suits its topology.

    Creating one is collective: every rank of `group` does so, in the same order as its other
    communicators. Afterwards every rank calls `all_reduce` with equal shapes, dtypes and operations
    in equal order, as for torch.distributed.

    Parameters
    ----------
    group : ProcessGroup, optional
        The ranks to reduce over; the default group when left out.
    topology : Topology, optional
        The job's cluster, its ranks numbered as in `group`; probed when left out.
    plan : str or Plan
        ``"auto"`` lets the planner choose for every size, ``"flat"`` keeps to torch.distributed,
        ``"hierarchical"`` excludes it; a `Plan` is used for tensors of its size.
    measure : bool
        Measure latency and payload rate of both levels first, about a second, and plan with them.
    timeout_s : float
        How long a collective may stand still before it fails.

    Raises
    ------
    ConfigError
        If ``GLOO_SOCKET_IFNAME`` or `plan` is not usable.
    ExecutionError
        If ranks cannot reach each other.
    PlanError
        If `topology` or `plan` does not fit the job.
    """

    def __init__(
        self,
        group: "dist.ProcessGroup | None" = None,
        *,
        topology: Topology | None = None,
        plan: str | Plan = "auto",
        measure: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if isinstance(plan, str) and plan not in _MODES:
            raise ConfigError(f"plan={plan!r} is not one of {', '.join(_MODES)} or a Plan")
        address = local_address(dist.get_rank(group))
        self._mode = plan
        self._timeout_s = timeout_s
        self._channel = Channel(group, timeout_s)
        self.rank = self._channel.rank
        self.world_size = self._channel.world_size
        self._owned = Owned(SLOT_NBYTES)
        colocation = find_colocated(self._channel, self._owned)
        self.nodes = colocation.nodes
        self.plain_reason = self._why_plain()
        self._flows = self._connect(address, colocation)
        self._node = Node(self._node_of(self.rank), self.rank, self._owned, colocation.peers)
        pipeline = Pipeline(self._node, self.rank, self._flows, SLOT_NBYTES)
        self._loop = Loop(pipeline, timeout_s)
        self._stage_groups: StageGroups | None = None
        self._stages: dict[torch.device, InlineStages] = {}
        self._prepared: dict[tuple[int, torch.dtype, str], _Prepared] = {}
        self._lock = threading.Lock()
        self._next_ticket = 0
        self.topology = topology or discover_job(self._channel, colocation.nodes)
        if measure:
            self.topology = measure_levels(
                self._channel, self.nodes, self.topology, self._all_reduce_in_node
            )
        self._levels = levels(self.topology)
        self._topology_hash = topology_hash(self.topology)
        self._require_fit()
        self._closed = False
        _live.add(self)

    def _require_fit(self) -> None:
        theirs = tuple(sorted(tuple(node.ranks) for node in self._levels.nodes))
        if theirs != self.nodes:
            raise PlanError(
                f"the topology places the ranks on nodes as {theirs}, the job runs them as "
                f"{self.nodes}; probe the job's own topology or place the ranks as described"
            )

    def _why_plain(self) -> str | None:
        if self.world_size == 1:
            return "there is one rank"
        if len({len(node) for node in self.nodes}) > 1:
            return f"nodes hold {[len(node) for node in self.nodes]} ranks, not equally many"
        if not ordered_stores():
            return "this processor does not keep the order of stores that shared counters need"
        return None

    def _node_of(self, rank: int) -> tuple[int, ...]:
        return next(node for node in self.nodes if rank in node)

    def _connect(self, address: str, colocation: Colocation) -> dict[int, Flow]:
        mine = self._node_of(self.rank)
        at = mine.index(self.rank)
        if self.plain_reason is not None:
            logger.info("plain all-reduce for everything: %s", self.plain_reason)
            return {}
        rail = [node[at] for node in colocation.nodes if node != mine]
        nonce = agree_on_nonce(self._channel)
        with listen(address) as listener:
            announced = self._channel.all_gather(
                msgspec.json.encode((address, listener.getsockname()[1]))
            )
            addresses = {
                rank: msgspec.json.decode(announced[rank], type=tuple[str, int]) for rank in rail
            }
            return connect(listener, self.rank, rail, addresses, nonce, _SETUP_TIMEOUT_S)

    def plan_for(self, nbytes: int, itemsize: int = 4, device: str = "cpu") -> Plan:
        """Return the plan for a tensor of `nbytes` bytes; the same on every rank.

        `device` is the type of the tensor's device: CUDA tensors take NCCL's stages.

        Raises
        ------
        PlanError
            If no plan can be made.
        """
        family: Family | None = None
        if self.plain_reason is not None or self._mode == "flat":
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
            runtime=GPU_RUNTIME if device == "cuda" else CPU_RUNTIME,
            max_chunk_nbytes=None if device == "cuda" else SLOT_NBYTES,
        )

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: "dist.ReduceOp.RedOpType" = dist.ReduceOp.SUM,
        on_done: Callable[[], None] | None = None,
    ) -> "torch.futures.Future[torch.Tensor]":
        """Reduce `tensor` in place over all ranks and return a future of it.

        Every rank ends with the same bits. 16-bit types are added in fp32 and rounded once in the
        node and once between nodes. Operations and dtypes that the engine does not take go to
        torch.distributed, in the same order.

        Parameters
        ----------
        tensor : Tensor
            Contiguous, any shape, also empty.
        op : ReduceOp
            ``SUM``, ``AVG`` (floating point), or another operation of torch.distributed.
        on_done : callable, optional
            Called on the communication thread just before the future completes without error.

        Raises
        ------
        ValueError
            If `tensor` is not contiguous or `op` is AVG of integers; raised before anything is
            sent.
        """
        _check(tensor, op)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        if tensor.numel() == 0 or self.world_size == 1:
            if on_done is not None:
                on_done()
            future.set_result(tensor)
            return future
        prepared = self._prepare(tensor)
        if tensor.device.type != "cpu":
            return self._inline(tensor, op, prepared.plan, on_done)
        with self._lock:
            self._loop.submit(self._ticket(tensor, op, prepared, future, on_done))
        return future

    def all_reduce_sync(
        self, tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType" = dist.ReduceOp.SUM
    ) -> torch.Tensor:
        """Reduce `tensor` in place and return it when it is done; else as `all_reduce`.

        Where nothing else is in flight the calling thread does the work itself, which saves a small
        tensor two thread switches.

        Raises
        ------
        ValueError
            As `all_reduce`.
        ExecutionError
            If the collective failed.
        """
        if tensor.device.type != "cpu" or tensor.numel() == 0 or self.world_size == 1:
            return self.all_reduce(tensor, op).wait()
        _check(tensor, op)
        prepared = self._prepare(tensor)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        with self._lock:
            ticket = self._ticket(tensor, op, prepared, future, None)
            claimed = self._loop.claim(ticket)
        if claimed:
            self._loop.drive(ticket)
        return future.wait()

    def _ticket(
        self,
        tensor: torch.Tensor,
        op: "dist.ReduceOp.RedOpType",
        prepared: _Prepared,
        future: "torch.futures.Future[torch.Tensor]",
        on_done: Callable[[], None] | None,
    ) -> Ticket:
        number = self._next_ticket
        self._next_ticket += 1
        return Ticket(number, tensor, future, self._work(number, tensor, op, prepared), on_done)

    def _inline(
        self,
        tensor: torch.Tensor,
        op: "dist.ReduceOp.RedOpType",
        plan: Plan,
        on_done: Callable[[], None] | None,
    ) -> "torch.futures.Future[torch.Tensor]":
        stages = self._stages.get(tensor.device)
        if stages is None:
            # The first CUDA tensor makes the groups; all ranks meet it in the same order.
            if self._stage_groups is None:
                nodes = [tuple(self._channel.ranks[r] for r in node) for node in self.nodes]
                self._stage_groups = StageGroups(nodes, "nccl", self._timeout_s)
            stages = self._stages[tensor.device] = InlineStages(self._stage_groups, tensor.device)
        planned = op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) and (
            plan.family is not Family.FLAT_RING
        )
        future = stages.all_reduce(tensor, op, plan.chunk_nbytes if planned else None)
        if on_done is not None:
            on_done()
        return future

    def _work(
        self, number: int, tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType", prepared: _Prepared
    ) -> Collective | Callable[[], None]:
        fast = prepared.program is not None and op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        if not fast or prepared.kernel is None or prepared.program is None:
            return lambda: self._plain(tensor, op)
        average = op == dist.ReduceOp.AVG
        return Collective(
            number=number,
            fingerprint=prepared.fingerprint ^ average,
            program=prepared.program,
            kernel=prepared.kernel,
            buffer=prepared.kernel.view(tensor),
            divisor=self.world_size if average else 1,
        )

    def _all_reduce_in_node(self, tensor: torch.Tensor) -> None:
        num_local, at = len(self._node.ranks), self._node.local_rank
        kernel = Kernel(tensor.dtype)
        program = node_program(tensor.numel(), num_local, at, tensor.itemsize, SLOT_NBYTES)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        number = self._next_ticket
        self._next_ticket += 1
        work = Collective(number, tensor.numel(), program, kernel, kernel.view(tensor), 1)
        self._loop.submit(Ticket(number, tensor, future, work))
        future.wait()

    def _plain(self, tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType") -> None:
        dist.all_reduce(tensor, op=op, group=self._channel.group)

    def _prepare(self, tensor: torch.Tensor) -> _Prepared:
        key = (tensor.numel(), tensor.dtype, tensor.device.type)
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepared[key] = self._make(tensor)
        return prepared

    def _make(self, tensor: torch.Tensor) -> _Prepared:
        plan = self.plan_for(tensor.nbytes, tensor.itemsize, tensor.device.type)
        if tensor.device.type != "cpu":
            return _Prepared(plan, None, None, tensor.dtype)
        schedule = lower(plan, tensor.numel(), tensor.itemsize)
        program = compile_program(schedule, self.rank, SLOT_NBYTES)
        if program is not None and not supported(tensor.dtype):
            program = None
            logger.info("plain all-reduce for %s", tensor.dtype)
        else:
            logger.info("plan for %d bytes: %s", tensor.nbytes, plan.reason)
        kernel = Kernel(tensor.dtype) if supported(tensor.dtype) else None
        return _Prepared(plan, program, kernel, tensor.dtype)

    @property
    def error(self) -> ExecutionError | None:
        """The failure that ended this communicator, or None."""
        return self._loop.error

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def nics_per_node(self) -> int:
        """The number of NICs of the node that has the fewest."""
        return min(len(node.nics) for node in self._levels.nodes)

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, in rank order. Collective, while nothing is in flight."""
        return self._channel.all_gather(data)

    def record_spans(self, enabled: bool = True) -> list[Span]:
        """Return what was recorded so far and start (or stop) recording spans of every chunk."""
        recorded = self._loop.pipeline.spans or []
        self._loop.pipeline.spans = [] if enabled else None
        return recorded

    @property
    def congestion_control(self) -> str | None:
        """The TCP congestion control of the flows between nodes; None without flows."""
        return next((flow.congestion_control for flow in self._flows.values()), None)

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish open collectives, end the thread and release memory, sockets and the group."""
        if self._closed:
            return
        self._closed = True
        _live.discard(self)
        self._loop.close(timeout_s)
        for flow in self._flows.values():
            flow.close()
        if self._stage_groups is not None:
            self._stage_groups.close()
        if not self._loop.alive:
            self._node.close()
            self._channel.close()

    def _forget_after_fork(self) -> None:
        # A forked child (a data loader's worker) must not keep connections open after its parent.
        for flow in self._flows.values():
            flow.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check(tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType") -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"all_reduce needs a contiguous tensor, not strides {tensor.stride()} for shape "
            f"{tuple(tensor.shape)}; pass tensor.contiguous()"
        )
    if op == dist.ReduceOp.AVG and not tensor.dtype.is_floating_point:
        raise ValueError(f"AVG of {tensor.dtype} is not defined; use SUM and divide")


@atexit.register
def _close_all() -> None:
    for communicator in list(_live):
        communicator.close(timeout_s=5.0)


def _after_fork() -> None:
    for communicator in list(_live):
        communicator._forget_after_fork()
    _live.clear()


os.register_at_fork(after_in_child=_after_fork)
