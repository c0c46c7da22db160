"""The all-reduce engine of one process group: set-up, plans, and tickets.

``Communicator(group).all_reduce(tensor)`` is what the DDP hook and `topo_ar.all_reduce` call.
"""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Self

import torch
import torch.distributed as dist

from topo_ar.errors import ConfigError, ExecutionError
from topo_ar.execution import alive
from topo_ar.execution.agreement import (
    Agreement,
    Facts,
    call_facts,
    debug_wanted,
    tensor_facts,
)
from topo_ar.execution.arguments import check
from topo_ar.execution.bootstrap import Bootstrap
from topo_ar.execution.calls import Calls
from topo_ar.execution.device_calls import DeviceCalls
from topo_ar.execution.discover import discover_job
from topo_ar.execution.flight import Span
from topo_ar.execution.job import Job
from topo_ar.execution.loop import Loop
from topo_ar.execution.measure import measure_levels
from topo_ar.execution.nccl_path import NcclPath
from topo_ar.execution.node_group import NodeGroup
from topo_ar.execution.options import check_options, require_equal
from topo_ar.execution.pipeline import Pipeline
from topo_ar.execution.plain import reduce_plainly
from topo_ar.execution.plans import Plans
from topo_ar.execution.program import node_program
from topo_ar.execution.rail_group import RailGroup
from topo_ar.execution.reach import rail_of, why_no_rails
from topo_ar.execution.recovery import Recovery
from topo_ar.execution.shared_inputs import SharedInputs
from topo_ar.execution.slow_nics import ring_rates, with_slow_nics
from topo_ar.execution.ticket import GroupWork
from topo_ar.execution.torch_private import backend_of
from topo_ar.planning.plan import Plan
from topo_ar.topology.model import Topology, topology_hash

SLOT_NBYTES = 2 << 20
DEFAULT_TIMEOUT_S = 600.0


class Communicator:
    """All-reduces tensors over one process group by the plan that suits its topology.

    Creating one is collective: every rank of `group` does so, in the same order as its other
    communicators. Afterwards every rank calls `all_reduce` with equal shapes, dtypes and operations
    in equal order, as for torch.distributed. One that is dropped without `close` ends by itself.

    Parameters
    ----------
    group : ProcessGroup, optional
        The ranks to reduce over; the default group when left out.
    topology : Topology, optional
        The job's cluster, its ranks numbered as in `group`; probed when left out.
    plan : str or Plan
        ``"auto"`` lets the planner choose for every size, ``"flat"`` keeps to torch.distributed,
        ``"hierarchical"`` excludes it, ``"equal"`` gives all ranks and nodes equal shares whatever
        their NICs carry, and a family's name insists on it; a `Plan` is used for tensors of its
        size, its family for others.
    measure : bool
        Measure latency and payload rate of both levels first, about a second, and plan with them.
    timeout_s : float
        How long a collective may stand still before it fails.
    reproducible : bool
        Add floats in an order that only the number of ranks decides: the same bits for every
        placement of the ranks on hosts, plan and bucket. 16-bit types are rounded once, at the end.
        Costs nothing between hosts of equal powers of two of consecutive ranks, except that 16-bit
        types travel there as fp32; elsewhere a rank sends several partial sums instead of one (see
        `topo_ar.execution.fixed_order`). Takes tensors on CPU; excludes the flat plan.
    debug : bool, optional
        Compare every collective between the ranks before it begins, also what goes to gloo, and
        raise on all of them where one differs. Costs a small all-gather each time, and collectives
        do not overlap. By default as ``TOPO_AR_DEBUG`` says; the same on all ranks.

    Raises
    ------
    ConfigError
        If this rank is not in `group`, or ``GLOO_SOCKET_IFNAME`` or an argument is not usable, or
        ranks were given different arguments.
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
        reproducible: bool = False,
        debug: bool | None = None,
    ) -> None:
        self.bootstrap = bootstrap = Bootstrap(group)
        with ExitStack() as undo, bootstrap.all_or_none():
            flat = check_options(plan, timeout_s, reproducible=reproducible)
            self._timeout_s = timeout_s
            self._reproducible = reproducible
            self._debug = debug_wanted() if debug is None else debug
            self._job = job = Job(bootstrap, timeout_s, SLOT_NBYTES)
            undo.callback(job.close)
            self.rank, self.world_size = job.channel.rank, job.channel.world_size
            self.nodes = job.nodes
            uses_nccl = backend_of(group, "cuda") == "nccl"
            options = {
                "plan": plan.hash if isinstance(plan, Plan) else plan,
                "topology": topology_hash(topology) if topology else "probed",
                "measure": str(measure),
                "reproducible": str(reproducible),
                "CUDA tensors by": "NCCL" if uses_nccl else "host memory",
                "debug": str(self._debug),
            }
            require_equal(job.channel.all_gather, options)
            self._given, self._measured = topology, measure
            self.topology = topology or discover_job(job.channel, job.nodes)
            job.connect(self.topology)
            control = None
            # The plain path has no fixed order; debug mode is there to show what fails.
            if not (flat or job.plain_reason or reproducible or self._debug):
                control = job.open_control()
            self._shared = SharedInputs(job.channel, job.node)
            pipeline = Pipeline(job.node, self.rank, job.flows, SLOT_NBYTES, self._shared)
            recovery = Recovery(control, pipeline) if control is not None else None
            self._loop = Loop(pipeline, job, timeout_s, recovery, rail_of(job.nodes, self.rank))
            self._end = weakref.finalize(self, self._loop.abandon)
            self._end.atexit = False
            self._calls = Calls(self._loop, job.channel, self._shared)
            self._device_calls = DeviceCalls(self._calls, self._loop, None)
            self._closed = False
            self._agreement = Agreement(job.channel)
            undo.pop_all()
            undo.callback(self.close)
            if uses_nccl:
                nccl = NcclPath(job.nodes, self.rank, job.channel.name, timeout_s)
                self._device_calls = DeviceCalls(self._calls, self._loop, nccl)
            if measure:
                self.topology = self._with_measured_levels(self.topology)
            self._plans_for = partial(
                Plans,
                nodes=self.nodes,
                rank=self.rank,
                mode=plan,
                plain_reason=job.plain_reason,
                slot_nbytes=SLOT_NBYTES,
                reproducible=reproducible,
                nics=job.nics,
            )
            self._plan_with(self.topology)
            job.channel.all_gather_words([self.rank])  # all have one, or none has
            undo.pop_all()
        alive.add(self)

    def plan_for(self, nbytes: int, itemsize: int = 4, device: str = "cpu") -> Plan:
        """Return the plan for a tensor of `nbytes` bytes; the same on every rank.

        `device` is the type of the tensor's device: where the process group has NCCL, CUDA tensors
        take its stages.

        Raises
        ------
        PlanError
            If no plan can be made.
        """
        return self._plans.plan_for(nbytes, itemsize, device if self.uses_nccl else "cpu")

    @property
    def uses_nccl(self) -> bool:
        """Whether CUDA tensors are reduced by NCCL; else they are in host memory."""
        return self._device_calls.nccl is not None

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: "dist.ReduceOp.RedOpType" = dist.ReduceOp.SUM,
        on_done: Callable[[], None] | None = None,
        *,
        plain: bool = False,
        name: str = "",
    ) -> "torch.futures.Future[torch.Tensor]":
        """Reduce `tensor` in place over all ranks and return a future of it.

        Every rank ends with the same bits. 16-bit types are added in fp32 and rounded once in the
        node and once between nodes. Integers wrap around, the sum of bools is their OR, and a NaN
        is kept by MIN and MAX. Sparse tensors and operations on bits go to gloo, in the same order;
        there calls that differ between ranks are noticed in debug mode only.

        CUDA tensors are reduced after what the current stream has to do, and whoever waits for the
        future makes its current stream wait. NCCL adds 16-bit types as they are, and its MIN and
        MAX may lose a NaN; without NCCL in the process group they go through host memory.

        Callbacks of the future run on the thread that does the work: they may call `all_reduce`
        but not wait for it.

        Parameters
        ----------
        tensor : Tensor
            Contiguous, any shape, also empty; COO tensors take the plain path. Not to be touched,
            nor reduced again, before the future is complete.
        op : ReduceOp
            ``SUM``, ``AVG`` (floating point), or another operation of torch.distributed.
        on_done : callable, optional
            Called on the communication thread just before the future completes without error.
        plain : bool
            Leave it to torch.distributed, in its turn, whatever the plan; the same on all ranks.
        name : str
            What debug mode calls this collective: the function that calls, unless given.

        Raises
        ------
        ValueError
            If `tensor` cannot be reduced by `op`, for instance because it is not contiguous, or by
            the plain path where the order of summation is fixed; raised before anything is sent.
        """
        op = check(tensor, op, through_nccl=self.uses_nccl)
        if self._reproducible and self.uses_nccl and tensor.is_cuda:
            raise ValueError(
                f"reproducible=True does not fix NCCL's order of summation on {tensor.device}; "
                "move the tensor or make a communicator without it"
            )
        if self._reproducible and plain:
            raise ValueError("reproducible=True excludes the plain path, whose order is another")
        if self._debug:
            self._compare_call(tensor, op, name, "plain" if plain else "planned")
        if tensor.numel() == 0 or self.world_size == 1:
            return self._calls.settled(tensor, on_done)
        calls = self._device_calls if tensor.is_cuda else self._calls
        return calls.reduce(tensor, op, on_done, plain=plain)

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
        if not self._debug and self._calls.reduce_known(tensor, op):
            return tensor
        if tensor.device.type != "cpu" or tensor.numel() == 0 or self.world_size == 1:
            return self.all_reduce(tensor, op).wait()
        op = check(tensor, op)
        if self._debug:
            self._compare_call(tensor, op, "")
        return self._calls.reduce_here(tensor, op)

    @property
    def groups_reason(self) -> str | None:
        """Why `run` has no groups to offer; None where it has. The same on all ranks."""
        return self.plain_reason or self._why_no_groups

    @property
    def _why_no_groups(self) -> str | None:
        if self._job.plain_reason is not None:
            return self._job.plain_reason
        return why_no_rails(self.nodes)

    def run(
        self,
        tensor: torch.Tensor,
        work: Callable[[NodeGroup, RailGroup], None],
        fingerprint: int,
        on_done: Callable[[], None] | None = None,
        *,
        averages: bool = False,
    ) -> "torch.futures.Future[torch.Tensor]":
        """Let the communication thread do `work` with the groups of this rank.

        It waits its turn among the all-reduces; those called later wait for it. All ranks call it
        in the same order and make the same exchanges in it. What it raises ends the communicator
        on all ranks, as a failed all-reduce does.

        Parameters
        ----------
        tensor : Tensor
            What the future will hold; `work` writes to it.
        work : callable
            Called with the co-located ranks, and the ranks in this one's place on all nodes.
        fingerprint : int
            64 bits, signed: tells works apart that ranks must not mix.
        on_done : callable, optional
            As for `all_reduce`.
        averages : bool
            Whether `work` puts the mean over the ranks of what is in `tensor` in its place: where
            the job has left the fast path before, gloo does that instead. Otherwise the future then
            fails, on every rank.

        Raises
        ------
        ConfigError
            If there never were such groups; see `groups_reason`.
        """
        if self._why_no_groups is not None:
            raise ConfigError(f"there are no groups to work with: {self._why_no_groups}")
        if self._debug:
            self.require_equal({"work of codecs": f"{fingerprint:x}", **tensor_facts(tensor)})
        plain = partial(reduce_plainly, self._job.channel, op=dist.ReduceOp.AVG)
        group_work = GroupWork(work, fingerprint)
        return self._calls.submit(tensor, group_work, on_done, plain if averages else None)

    def require_equal(self, facts: Facts) -> "torch.futures.Future[torch.Tensor]":
        """Compare facts with those of all ranks, in the order of the collectives. Collective.

        Parameters
        ----------
        facts : dict of str to str
            Name and value of each.

        Returns
        -------
        Future
            Fails on all ranks, with every collective after it, where the facts differ: they are
            then shown in a table, with the ranks that are not as most are.
        """
        return self._calls.submit(torch.empty(0), partial(self._agreement.require_equal, facts))

    def gather_rows(
        self, row: torch.Tensor, on_done: Callable[[], None] | None = None
    ) -> "torch.futures.Future[torch.Tensor]":
        """Gather a few numbers of every rank, in the order of the collectives. Collective.

        Parameters
        ----------
        row : Tensor
            One-dimensional, on the CPU, of the same size and dtype on all ranks.
        on_done : callable, optional
            As for `all_reduce`.

        Returns
        -------
        Future
            A tensor of one row per rank, in rank order.
        """
        rows = row.new_empty((self.world_size, row.numel()))
        gathering = partial(self._job.channel.gather_rows, row, rows)
        return self._calls.submit(rows, gathering, on_done)

    def share(self, tensor: torch.Tensor) -> "torch.futures.Future[torch.Tensor]":
        """Let co-located ranks read `tensor` where it lies when it is reduced. Collective.

        Its storage moves into shared memory, with all views of it, and is held until `close`. All
        ranks share tensors in the same order; where a rank cannot, for want of room in /dev/shm,
        what it has is copied in as before. Worth it where memory and cores are the limit, not the
        wire.

        Parameters
        ----------
        tensor : Tensor
            Strided, on the CPU.

        Returns
        -------
        Future
            Complete when all ranks have mapped it.

        Raises
        ------
        ValueError
            If it is not a strided tensor on the CPU.
        """
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise ValueError("only strided tensors on the CPU can be shared")
        fd = self._shared.offer(tensor)
        return self._calls.submit(tensor, partial(self._shared.register, tensor, fd))

    def _compare_call(
        self,
        tensor: torch.Tensor,
        op: "dist.ReduceOp.RedOpType",
        name: str,
        path: str = "planned",
    ) -> None:
        if self.world_size == 1:
            return
        compared = self.require_equal({**call_facts(tensor, op, name), "path": path})
        # What does not go through the loop must not overtake; a callback cannot wait.
        beside = (self.uses_nccl and tensor.is_cuda) or tensor.numel() == 0
        if beside and not self._loop.drives_here():
            compared.wait()

    def plan_anew(self) -> None:
        """Look at hosts and NICs again, and plan for what they are now.

        Collective, while nothing is in flight and before any fallback. A topology that was given
        is not probed; in either case a NIC counts for what it carries where that is less than half
        of what is said of it.

        Raises
        ------
        ConfigError
            If ranks come to different topologies.
        ExecutionError
            If a rank is gone.
        """
        channel = self._job.channel
        found = self._given or discover_job(channel, self.nodes)
        if self._measured:
            found = self._with_measured_levels(found)
        found = with_slow_nics(channel, self.nodes, found)
        require_equal(channel.all_gather, {"what is measured of the network": topology_hash(found)})
        self._plan_with(found)
        self.topology = found

    @property
    def planning(self) -> tuple[Plans, Topology]:
        """The plans in use and the topology that they are for; see `restore`."""
        return self._plans, self.topology

    def restore(self, planning: tuple[Plans, Topology]) -> None:
        """Go back to plans that were in use before, on all ranks, while nothing is in flight."""
        self._plans, self.topology = planning
        self._calls.plan_with(self._plans)

    def _plan_with(self, topology: Topology) -> None:
        self._plans = self._plans_for(topology)
        self._calls.plan_with(self._plans)

    def _with_measured_levels(self, topology: Topology) -> Topology:
        return measure_levels(self._job.channel, self.nodes, topology, self._all_reduce_in_node)

    def _all_reduce_in_node(self, tensor: torch.Tensor) -> None:
        node = self._job.node
        program = node_program(
            tensor.numel(), len(node.ranks), node.local_rank, tensor.itemsize, SLOT_NBYTES
        )
        self._calls.reduce_in_node(tensor, program)

    @property
    def error(self) -> ExecutionError | None:
        """The failure that ended this communicator, or None."""
        nccl = self._device_calls.nccl
        return self._loop.error or (nccl.error if nccl else None)

    @property
    def plain_reason(self) -> str | None:
        """Why every collective takes the plain path; None when they need not."""
        if self._loop.fallback is not None:
            return self._loop.fallback.reason(self.nodes)
        return self._job.plain_reason

    @property
    def reproducible(self) -> bool:
        """Whether floats are added in a fixed order."""
        return self._reproducible

    @property
    def fallbacks(self) -> int:
        """How often a failure made all ranks leave the fast path; they do not come back to it."""
        return int(self._loop.fallback is not None)

    @property
    def nbytes_sent_between(self) -> int:
        """Bytes of payload that this rank has sent to other nodes by flows of its own, so far."""
        return sum(flow.payload_nbytes_sent for flow in self._job.flows.values())

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def nics_per_node(self) -> int:
        """The number of NICs of the node that has the fewest."""
        return self._plans.nics_per_node

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, in rank order. Collective, while nothing is in flight."""
        return self._job.channel.all_gather(data)

    def node_rates(self) -> list[float]:
        """Measure what NICs carry now: see `ring_rates`. Collective, while nothing is in flight."""
        return ring_rates(self._job.channel, self.nodes)

    def record_spans(self, enabled: bool = True) -> list[Span]:
        """Return what was recorded so far and start (or stop) recording spans of every chunk."""
        recorded = self._loop.pipeline.spans or []
        self._loop.pipeline.spans = [] if enabled else None
        return recorded

    @property
    def congestion_control(self) -> str | None:
        """The TCP congestion control of the flows between nodes; None without flows."""
        return next((flow.congestion_control for flow in self._job.flows.values()), None)

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish open collectives, end the thread and release memory, sockets and the group."""
        if self._closed:
            return
        self._closed = True
        alive.discard(self)
        self._end.detach()
        self._calls.drain(timeout_s)
        self._loop.close(timeout_s)
        self._shared.close()
        if self._device_calls.nccl is not None:
            self._device_calls.nccl.close()

    def forget_after_fork(self) -> None:
        """Let go of everything in a forked child, such as a data loader's worker.

        It must not keep connections open after its parent.
        """
        self._end.detach()
        self._calls.forget_after_fork()
        if self._device_calls.nccl is not None:
            self._device_calls.nccl.forget()
        self._loop.disown()
        for flow in self._job.flows.values():
            flow.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
