"""CUDA's two ways: NCCL's stages, here on gloo and CPU tensors, and copies through host memory."""

import logging
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.jobs import blocks, communicator
from tests.ranks import RankPool
from tests.schedule_cases import in_order
from topo_ar.errors import ExecutionError
from topo_ar.execution import torch_private
from topo_ar.execution.arguments import check
from topo_ar.execution.communicator import Communicator
from topo_ar.execution.entrance import Entrance
from topo_ar.execution.host_copies import HostCopies
from topo_ar.execution.nccl_path import NcclPath
from topo_ar.execution.plans import Plans
from topo_ar.execution.ticket import Pending, Ticket
from topo_ar.execution.transports.stages import InlineStages, StageGroups
from topo_ar.planning.plan import Family
from topo_ar.topology.merge import merge_hosts
from topo_ar.topology.presets import preset

NODES = [(0, 2), (1, 3)]
CASES = [(0, ()), (1, (4,)), (7, (28,)), (1000, (1600, 1200, 1200)), (4099, (8192, 8204))]


def _run(rank: int, world_size: int, device: str) -> list[str]:
    backend = "nccl" if device == "cuda" else "gloo"
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    groups = StageGroups(NODES, rank, "stages", backend, 20.0)
    stages = InlineStages(groups, place)
    wrong = []
    for numel, chunks in CASES:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            for plan in (chunks, None):
                tensor = (torch.arange(numel, device=place) % 5 + rank).float()
                expected = torch.arange(numel, device=place).remainder(5) * 4.0 + 6.0
                if op == dist.ReduceOp.AVG:
                    expected /= 4
                result = stages.all_reduce(tensor, op, plan).wait()
                if result.data_ptr() != tensor.data_ptr() or not torch.equal(tensor, expected):
                    wrong.append(f"{numel} {op} {plan}")
    half = torch.full((1001,), 60_000.0, dtype=torch.float16, device=place)
    if float(stages.all_reduce(half, dist.ReduceOp.AVG, (1000, 1002)).wait().max()) != 60_000.0:
        wrong.append("overflow")
    complex_ones = torch.full((5,), 1 + 2j, device=place)
    total = stages.all_reduce(complex_ones, dist.ReduceOp.SUM, (24, 16)).wait()
    if not torch.equal(total, torch.full((5,), 4 + 8j, device=place)):
        wrong.append("complex")
    groups.close()
    return wrong


def test_inline_stages_give_exact_sums(ranks: RankPool) -> None:
    assert ranks.run(_run, 4, "cpu") == [[]] * 4


@pytest.mark.gpu
def test_inline_stages_give_exact_sums_on_cuda(ranks: RankPool) -> None:
    if torch.cuda.device_count() < 4:
        pytest.skip("four CUDA devices are needed for two nodes of two")
    assert ranks.run(_run, 4, "cuda") == [[]] * 4


def _groups_of_some(rank: int, world_size: int) -> float:
    """Groups of some ranks, again and again, while a rank that is in none of them does nothing."""
    total = torch.zeros(3)
    if rank > 0:
        for name in ("first", "second"):
            groups = StageGroups([(0,), (1,)], rank - 1, name, "gloo", 10.0)
            total.fill_(rank)
            InlineStages(groups, total.device).all_reduce(total, dist.ReduceOp.SUM, (12,)).wait()
            groups.close()
    dist.barrier()
    return float(total[0])


def test_groups_are_made_by_their_own_ranks_alone_and_again(ranks: RankPool) -> None:
    assert ranks.run(_groups_of_some, 3) == [0.0, 3.0, 3.0]


class _Broken(InlineStages):
    def _reduce(self, *arguments: object) -> None:
        raise RuntimeError("the backend fell over")


def _failing(rank: int, world_size: int) -> list[str]:
    path = NcclPath([(0, 1)], rank, "broken", 10.0, "gloo")
    tensor = torch.ones(4)
    path.all_reduce(tensor, dist.ReduceOp.SUM, (16,)).wait()
    assert tensor.tolist() == [2.0] * 4
    path._stages = {tensor.device: _Broken(path._groups, tensor.device)}
    texts = []
    for _ in range(2):  # for good: the ranks may not be in one place any more
        with pytest.raises(ExecutionError, match="fell over") as caught:
            path.all_reduce(tensor, dist.ReduceOp.SUM, None)
        texts.append(f"{caught.value.ranks} {caught.value}")
    return texts


def test_a_failure_ends_the_stages(ranks: RankPool) -> None:
    for rank, texts in enumerate(ranks.run(_failing, 2)):
        assert texts[0] == texts[1]
        assert texts[0].startswith(f"({rank},) rank {rank}: all-reduce on cpu failed")


class _Slow:
    """A copy that takes a while, another while on each rank."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def synchronize(self) -> None:
        time.sleep(max(0.0, self._end - time.monotonic()))


def _through_host(rank: int, world_size: int) -> int:
    delays = torch.rand(60, generator=torch.Generator().manual_seed(rank)) * 2e-3
    fetch = HostCopies.fetch

    def slow(self: HostCopies, tensor: torch.Tensor, host: torch.Tensor) -> _Slow:
        fetch(self, tensor, host)
        return _Slow(float(delays[int(tensor[0]) % 60]))

    HostCopies.fetch = slow
    try:
        with communicator(rank, blocks(2, 2), plan="hierarchical") as made:
            pairs = []
            for step in range(60):
                tensor = torch.full((1 + 700 * (step % 7),), float(60 * rank + step))
                if step % 3 == 2:  # on CPU anyway, and as fast as it goes
                    pairs.append((step, made.all_reduce(tensor)))
                elif step % 11 == 0:
                    made.all_reduce_sync(tensor)
                    done = torch.futures.Future()
                    done.set_result(tensor)
                    pairs.append((step, done))
                else:
                    pairs.append(
                        (
                            step,
                            made._device_calls.reduce_on_host(
                                tensor, dist.ReduceOp.SUM, None, plain=False
                            ),
                        )
                    )
            expected = [60.0 * 6 + 4 * step for step, _ in pairs]
            return sum(
                not bool((future.wait() == value).all())
                for (_, future), value in zip(pairs, expected, strict=True)
            )
    finally:
        HostCopies.fetch = fetch


def test_tensors_through_host_memory_keep_the_order_of_the_calls(ranks: RankPool) -> None:
    assert ranks.run(_through_host, 4) == [0] * 4


class _Gone:
    def synchronize(self) -> None:
        raise RuntimeError("an illegal memory access was encountered")


def _lost_copy(rank: int, world_size: int) -> tuple[float, list[str]]:
    fetch = HostCopies.fetch
    if rank == 1:
        HostCopies.fetch = lambda self, tensor, host: _Gone()
    told: list[str] = []
    try:
        with Communicator(timeout_s=20.0, plan="hierarchical") as made:
            begin = time.monotonic()
            future = made._device_calls.reduce_on_host(
                torch.ones(1000), dist.ReduceOp.SUM, lambda: told.append("done"), plain=False
            )
            with pytest.raises(ExecutionError, match="illegal memory access") as caught:
                future.wait()
            assert caught.value.ranks == (1,)
            return time.monotonic() - begin, told
    finally:
        HostCopies.fetch = fetch


def test_a_copy_that_fails_on_one_rank_raises_on_all(ranks: RankPool) -> None:
    for seconds, told in ranks.run(_lost_copy, 2):
        assert seconds < 10.0
        assert not told


class _ListLoop:
    """A loop that only notes what it is given, and may always be claimed."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def submit(self, ticket: Ticket) -> None:
        self.given.append(ticket.number)

    def claim(self, ticket: Ticket) -> bool:
        self.given.append(ticket.number)
        return True

    def claim_idle(self) -> bool:
        return True


class _Gate:
    def __init__(self) -> None:
        self.open = threading.Event()

    def synchronize(self) -> None:
        assert self.open.wait(5.0)


def _ticket(number: int) -> Ticket:
    return Ticket(number, torch.empty(0), Pending(lambda: False), lambda: None)


def test_nothing_overtakes_a_tensor_on_its_way_to_the_host() -> None:
    loop, gates = _ListLoop(), [_Gate(), _Gate()]
    entrance = Entrance(loop)
    entrance.submit(_ticket(0))
    assert entrance.claim(_ticket(1))
    entrance.submit(_ticket(2), gates[0])
    entrance.submit(_ticket(3))
    assert not entrance.claim(_ticket(4))
    entrance.submit(_ticket(5), gates[1])
    assert not entrance.claim_idle()
    assert loop.given == [0, 1]
    gates[1].open.set()  # the later one is there first
    gates[0].open.set()
    entrance.drain(5.0)
    assert loop.given == [0, 1, 2, 3, 4, 5]
    assert entrance.claim_idle()
    entrance.submit(_ticket(6))
    assert loop.given[-1] == 6


def test_what_the_caller_adds_to_a_copy_back_fails_only_the_caller() -> None:
    def refuse() -> None:
        raise KeyError("mine")

    reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    ticket = Ticket(0, torch.zeros(2), Pending(lambda: False), lambda: None, refuse)
    reduced.add_done_callback(lambda f: HostCopies(torch.device("cpu")).bring_back(ticket, f))
    reduced.set_result(torch.ones(2))
    with pytest.raises(KeyError):
        ticket.future.wait()
    assert ticket.tensor.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("through_nccl", [True, False])
def test_capturing_a_graph_is_refused(monkeypatch, through_nccl: bool) -> None:
    with FakeTensorMode():
        tensor = torch.empty(4, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert check(tensor, dist.ReduceOp.SUM, through_nccl=through_nccl) == dist.ReduceOp.SUM
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match=r"cannot be captured in a CUDA graph.*torch\.cuda\.graph"):
        check(tensor, dist.ReduceOp.SUM, through_nccl=through_nccl)


def test_what_nccl_knows_is_left_to_nccl() -> None:
    with FakeTensorMode():
        eighths = torch.empty(4, device="cuda", dtype=torch.float8_e4m3fn)
        waves = torch.empty(4, device="cuda", dtype=torch.complex64)
        elsewhere = torch.empty(4, device="meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        check(eighths, dist.ReduceOp.SUM, through_nccl=True)
        with pytest.raises(ValueError, match="float8"):
            check(eighths, dist.ReduceOp.SUM)
        for through_nccl in (True, False):
            with pytest.raises(ValueError, match="knows sums only"):
                check(waves, dist.ReduceOp.MAX, through_nccl=through_nccl)
    with pytest.raises(ValueError, match="CPU and CUDA, not on meta"):
        check(elsewhere, dist.ReduceOp.SUM)


@pytest.mark.parametrize(
    ("sizes", "mode", "family", "says"),
    [
        ((2, 2), "auto", None, ""),
        ((2, 2), "equal", Family.HIERARCHICAL_PIPELINED, ""),
        ((2, 2), "hierarchical_weighted", Family.FLAT_RING, "equal shares"),
        ((2, 2), "hierarchical_leader", Family.FLAT_RING, "no leaders"),
        ((3, 1), "auto", Family.FLAT_RING, "equal numbers of ranks"),
        ((3, 1), "equal", Family.FLAT_RING, "equal numbers of ranks"),
        ((3, 1), "flat", Family.FLAT_RING, ""),
    ],
)
def test_plans_on_cuda_are_what_the_stages_can_do(caplog, sizes, mode, family, says) -> None:
    caplog.set_level(logging.WARNING, "topo_ar")
    nodes = in_order(sizes)
    hosts = [preset("cpu-host", nodes=1, ranks_per_node=size) for size in sizes]
    plans = Plans(merge_hosts(hosts, nodes), nodes, 0, mode, None, 2 << 20)
    made = [plans.plan_for(nbytes, 4, "cuda") for nbytes in (25_000_000, 4_000_000)]
    if family is not None:
        assert {plan.family for plan in made} == {family}
    assert says in made[0].reason
    assert len(caplog.records) == bool(says)


def _ways(rank: int, world_size: int) -> tuple[str, str, bool]:
    with Communicator() as made:
        return (
            torch_private.backend_of(None, "cuda"),
            torch_private.backend_of(None, "xpu"),
            made.uses_nccl,
        )


def test_the_way_of_cuda_tensors_follows_the_users_group(ranks: RankPool) -> None:
    assert ranks.run(_ways, 1) == [("gloo", "", False)]


def test_nccl_groups_take_the_arguments_that_this_torch_has() -> None:
    if not dist.is_nccl_available():
        with pytest.raises(RuntimeError, match="no NCCL"):
            torch_private.nccl_group("name", 0, 1, 1.0)
        return
    options = dist.ProcessGroupNCCL.Options()
    for name in ("_timeout", "group_name"):
        assert hasattr(options, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_private, "default_store", lambda name: dist.HashStore())
        if torch.cuda.is_available():
            assert torch_private.nccl_group("name", 0, 1, 1.0).size() == 1
        else:
            with pytest.raises((RuntimeError, ValueError), match="no GPUs found"):
                torch_private.nccl_group("name", 0, 1, 1.0)
