"""What callers do to the engine: odd tensors and sizes, mistakes, callbacks, calls in flight."""

import os
import random
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import topo_ar
from tests.jobs import blocks, communicator
from topo_ar.errors import ConfigError, ExecutionError, PlanError
from topo_ar.execution.communicator import Communicator
from topo_ar.execution.guard import Failure, decode_failure
from topo_ar.execution.plans import Plans
from topo_ar.execution.transports.segment import FAILURE_NBYTES, HOST_ID_ENV
from topo_ar.topology.presets import preset

HOSTS = [0, 0, 1, 1]
SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX
DTYPES = [torch.float32, torch.float64, torch.int32, torch.int64, torch.float16, torch.bfloat16]


def _all_equal(results: list[object]) -> object:
    assert all(result == results[0] for result in results), results
    return results[0]


def _any_sequence(rank: int, world_size: int, hosts: list[int], seed: int) -> list[str]:
    """One sequence of sizes, dtypes, operations and ways to call; no rank keeps step."""
    shared, own = random.Random(seed), random.Random(100 * seed + rank)
    unit = 16 * world_size
    edges = [
        1,
        2,
        3,
        unit - 1,
        unit,
        unit + 1,
        *(size + d for size in (65_536, 524_288) for d in (-1, 0, 1)),
    ]
    wrong, pending = [], []

    def settle(keep: int) -> None:
        while len(pending) > keep:
            result, expected, what = pending.pop(0)
            if not torch.equal(result(), expected):
                wrong.append(what)

    with communicator(rank, hosts, plan="hierarchical") as made:
        for step in range(50):
            dtype, way = shared.choice(DTYPES), shared.choice(["async", "sync", "max", "drop"])
            numel = shared.choice([shared.choice(edges), shared.randrange(1, 3000)])
            parts = [
                ((torch.arange(numel) * 7 + r * 3 + step) % 11).to(dtype) for r in range(world_size)
            ]
            tensor = parts[rank].clone()
            expected = sum(part.double() for part in parts).to(dtype)
            what = f"{step}: {way} {dtype} {numel}"
            if own.random() < 0.1:
                time.sleep(own.random() * 0.003)
            if way == "sync":
                pending.append((made.all_reduce_sync(tensor).clone, expected, what))
            elif way == "max":
                most = torch.stack(parts).amax(0)
                pending.append((made.all_reduce(tensor, MAX).wait, most, what))
            else:  # the future alone keeps a dropped tensor alive
                pending.append((made.all_reduce(tensor).wait, expected, what))
            del tensor
            settle(shared.randrange(8))
        settle(0)
    return wrong


@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (4, 1)], ids=str)
def test_any_sequence_of_calls_in_flight(ranks, shape) -> None:
    hosts = blocks(*shape)
    assert ranks.run(_any_sequence, len(hosts), hosts, sum(shape)) == [[]] * len(hosts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", [(3, 2), (2, 4), (4, 2), (8, 1)], ids=str)
def test_any_sequence_of_calls_on_more_ranks(ranks, shape, seed) -> None:
    hosts = blocks(*shape)
    results = ranks.run(_any_sequence, len(hosts), hosts, seed, deadline_s=40.0)
    assert results == [[]] * len(hosts)


def _any_bits(rank: int, world_size: int, hosts: list[int]) -> list[bytes]:
    found = []
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-8])
    with communicator(rank, hosts, plan="hierarchical") as made:
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            for numel in (33, 4099, 300_007):
                source = np.random.default_rng(rank).integers(
                    0, 256, numel * dtype.itemsize, np.uint8
                )
                tensor = torch.from_numpy(source).view(dtype)  # with NaNs of every payload
                tensor[::3] = special.to(dtype)[(torch.arange(len(tensor[::3])) + rank) % 5]
                for op in (SUM, AVG):
                    reduced = made.all_reduce_sync(tensor.clone(), op)
                    found.append(reduced.view(torch.uint8).numpy().tobytes())
    return found


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 2, 3], [0, 0, 0, 0]], ids=str)
def test_infinities_and_nans_of_any_payload_end_with_the_same_bits(ranks, hosts) -> None:
    results = ranks.run(_any_bits, 4, hosts)
    assert all(result == results[0] for result in results)


def _overflows(rank: int, world_size: int) -> list[str]:
    with warnings.catch_warnings(), communicator(rank, HOSTS, plan="hierarchical") as made:
        warnings.simplefilter("error")
        opposite = torch.full((1000,), float("inf") if rank % 2 else -float("inf"))
        made.all_reduce(opposite).wait()
        large = made.all_reduce_sync(torch.full((1000,), 3e38))
    return [str(float(opposite[0])), str(float(large[0]))]


def test_a_gradient_that_overflows_is_no_error_under_strict_warnings(ranks) -> None:
    assert ranks.run(_overflows, 4) == [["nan", "inf"]] * 4


def _odd_tensors(rank: int, world_size: int) -> list[float]:
    parameter = torch.nn.Parameter(torch.full((3, 5), float(rank)))
    with torch.inference_mode():
        inference = torch.full((7,), 60_000.0, dtype=torch.float16)
    tensors = [torch.tensor(1.0 + rank), parameter, parameter * 2, inference]
    with communicator(rank, HOSTS, plan="hierarchical") as made:
        for tensor in tensors[:3]:
            made.all_reduce(tensor).wait()
        made.all_reduce(inference, AVG).wait()
    return [float(tensor.detach().float().mean()) for tensor in tensors]


def test_zero_dimensions_parameters_and_inference_tensors(ranks) -> None:
    assert ranks.run(_odd_tensors, 4) == [[10.0, 6.0, 12.0, 60_000.0]] * 4


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], object]] = {
    "negated view": (lambda: torch._neg_view(torch.ones(9)), SUM),
    "conjugated view": (lambda: torch.ones(9, dtype=torch.complex64).conj(), SUM),
    "channels last": (lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), SUM),
    "expanded": (lambda: torch.ones(1).expand(9), SUM),
    "CSR": (lambda: torch.eye(9).to_sparse_csr(), SUM),
    "MAX of sparse": (lambda: torch.eye(9).to_sparse(), MAX),
    "float8": (lambda: torch.ones(9).to(torch.float8_e4m3fn), SUM),
    "uint16": (lambda: torch.ones(9).to(torch.uint16), SUM),
    "int16": (lambda: torch.ones(9).to(torch.int16), SUM),
    "BOR of floats": (lambda: torch.ones(9), dist.ReduceOp.BOR),
    "AVG of integers": (lambda: torch.ones(9, dtype=torch.int32), AVG),
    "MAX of complex": (lambda: torch.ones(9, dtype=torch.complex64), MAX),
}


def _refused_on_one_rank(rank: int, world_size: int) -> list[str]:
    """A refusal sends nothing and counts for nothing: the ranks stay in step."""
    taken = []
    with communicator(rank, HOSTS, plan="hierarchical") as made:
        for what, (make, op) in REFUSED.items() if rank == 1 else ():
            try:
                made.all_reduce(make(), op)  # type: ignore[arg-type]
                taken.append(what)
            except ValueError:
                pass
        total = made.all_reduce_sync(torch.ones(1000))
        most = made.all_reduce(torch.tensor([float(rank)]), MAX).wait()
    return [*taken, str(float(total[0])), str(float(most))]


def test_what_cannot_be_reduced_is_refused_without_a_trace(ranks) -> None:
    assert ranks.run(_refused_on_one_rank, 4) == [["4.0", "3.0"]] * 4


def _sparse_and_complex(rank: int, world_size: int) -> list[object]:
    with communicator(rank, HOSTS, plan="hierarchical") as made:
        sparse = torch.zeros(5, 2)
        sparse[rank] = 4.0
        sparse = sparse.to_sparse(1)
        made.all_reduce(sparse, AVG).wait()
        turned = torch.full((3,), 1 + rank * 1j)
        made.all_reduce(turned).wait()
    return [sparse.to_dense().sum(1).tolist(), turned.tolist()]


def test_sparse_and_complex_tensors_take_the_plain_path(ranks) -> None:
    assert ranks.run(_sparse_and_complex, 4) == [[[2.0, 2.0, 2.0, 2.0, 0.0], [4 + 6j] * 3]] * 4


def _half_average(rank: int, world_size: int, hosts: list[int], plan: str) -> float:
    with communicator(rank, hosts, plan=plan) as made:
        tensor = torch.full((1000,), 60_000.0, dtype=torch.float16)
        return float(made.all_reduce(tensor, AVG).wait()[0])


@pytest.mark.parametrize(("hosts", "plan"), [([0, 0, 1, 1], "flat"), ([0, 0, 0, 1], "auto")])
def test_a_half_precision_average_does_not_overflow_on_the_plain_path(ranks, hosts, plan) -> None:
    assert ranks.run(_half_average, 4, hosts, plan) == [60_000.0] * 4


def _callers_mistakes(rank: int, world_size: int) -> list[str]:
    def stumble() -> None:
        raise KeyError("mine")

    texts = []
    with communicator(rank, HOSTS, plan="hierarchical") as made:
        for future in (
            made.all_reduce(torch.ones(99), SUM, stumble),
            made.all_reduce(torch.ones(0), SUM, stumble),
        ):
            try:
                future.wait()
            except KeyError as error:
                texts.append(str(error))
        mine = made.all_reduce(torch.ones(1_000_000))
        mine.set_result(torch.ones(1))
        made.all_reduce(torch.ones(99)).add_done_callback(lambda future: 1 / 0)
        texts.append(str(float(made.all_reduce_sync(torch.ones(99))[0])))
    return texts


def test_a_mistake_of_the_callers_fails_the_callers_future_only(ranks) -> None:
    assert ranks.run(_callers_mistakes, 4) == [["'mine'", "'mine'", "4.0"]] * 4


def _callbacks(rank: int, world_size: int) -> list[object]:
    found: list[object] = []
    ready = threading.Event()
    with communicator(rank, HOSTS, plan="hierarchical", timeout_s=3.0) as made:

        def again(future: object) -> None:
            following = made.all_reduce(torch.ones(1000))
            following.add_done_callback(lambda future: found.append(float(future.value()[0])))
            for wait in (following.wait, lambda: made.all_reduce_sync(torch.ones(1000))):
                try:
                    wait()
                except ExecutionError as error:
                    found.append("callback" in str(error))
            ready.set()

        made.all_reduce(torch.ones(1_000_000)).add_done_callback(again)
        ready.wait(5.0)
        found.append(float(made.all_reduce(torch.ones(1000)).wait()[0]))
    return found


def test_a_callback_may_reduce_again_but_not_wait_for_it(ranks) -> None:
    """Waiting there would wait for itself for ever."""
    for found in ranks.run(_callbacks, 4):
        # A rank whose future was complete at once ran the callback itself, and may wait.
        assert found in ([True, True, 4.0, 4.0], [4.0, 4.0], [4.0, True, 4.0], [True, 4.0, 4.0])


def _is(counter: list[int], value: int) -> bool:
    return counter[0] == value


def _threads(rank: int, world_size: int) -> int:
    wrong, turn, condition = [], [0], threading.Condition()

    def work(made: Communicator, which: int) -> None:
        for step in range(40):
            tensor = torch.full((500 * (which + 1),), float(rank + step))
            with condition:  # the threads agree on an order, the same on every rank
                condition.wait_for(partial(_is, turn, 3 * step + which))
                future = None
                if which == 1:
                    made.all_reduce_sync(tensor)
                else:
                    future = made.all_reduce(tensor, MAX if which else SUM)
                turn[0] += 1
                condition.notify_all()
            if future is not None:
                future.wait()
            expected = step + world_size - 1 if which == 2 else world_size * step + 6
            wrong.append(not bool((tensor == expected).all()))

    with communicator(rank, HOSTS, plan="hierarchical") as made:
        threads = [threading.Thread(target=work, args=(made, which)) for which in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return sum(wrong) + 120 - len(wrong)


def test_several_threads_may_call(ranks) -> None:
    assert ranks.run(_threads, 4) == [0] * 4


def _under_a_busy_interpreter(rank: int, world_size: int) -> float:
    with communicator(rank, HOSTS, plan="hierarchical") as made:
        tensor = torch.ones(1_000_000)
        future = made.all_reduce(tensor)
        while not future.done():
            sum(range(1000))
        return float(tensor[-1])


def test_a_main_thread_busy_in_the_interpreter_does_not_stop_the_engine(ranks) -> None:
    assert ranks.run(_under_a_busy_interpreter, 4) == [4.0] * 4


def _under_a_default_device(rank: int, world_size: int) -> float:
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        with communicator(rank, HOSTS, plan="hierarchical", measure=True) as made:
            return float(made.all_reduce_sync(torch.ones(1000, device="cpu"))[0])
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_torchs_default_device_and_dtype_do_not_matter(ranks) -> None:
    assert ranks.run(_under_a_default_device, 4) == [4.0] * 4


def _wrong_plans(rank: int, world_size: int) -> list[str]:
    texts = []
    for kind in ({"nodes": 2, "ranks_per_node": 4}, {"nodes": 1, "ranks_per_node": 4}):
        plan = topo_ar.plan(preset("cpu-host", **kind), 4_000_000)
        try:
            with communicator(rank, HOSTS, plan=plan) as made:
                made.all_reduce(torch.ones(1_000_000)).wait()
        except PlanError as error:
            texts.append(str(error).split(",")[0])
    for seconds in (0.0, -1.0, float("inf"), float("nan")):
        try:
            Communicator(timeout_s=seconds)
        except ConfigError as error:
            texts.append(str(error).split("=")[0])
    return texts


def test_plans_of_other_nodes_and_impossible_time_outs_are_refused(ranks) -> None:
    for texts in ranks.run(_wrong_plans, 4):
        assert texts[:2] == ["the plan places the ranks on nodes as ((0"] * 2
        assert texts[2:] == ["timeout_s"] * 4


def _without_proc(rank: int, world_size: int) -> tuple[int, float]:
    real = os.open

    def refuse(path: str, *rest: object, **options: object) -> int:
        if str(path).startswith("/proc/"):
            raise PermissionError(path)
        return real(path, *rest, **options)  # type: ignore[arg-type]

    os.open = refuse  # type: ignore[assignment]
    try:
        with Communicator(plan="hierarchical", timeout_s=10.0) as made:
            return len(made.nodes), float(made.all_reduce(torch.ones(10_000)).wait()[0])
    finally:
        os.open = real


def test_where_proc_is_hidden_every_rank_counts_as_a_host(ranks) -> None:
    assert ranks.run(_without_proc, 4) == [(4, 4.0)] * 4


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(x))


def _sparse_gradients(rank: int, world_size: int, hosts: list[int]) -> float:
    os.environ[HOST_ID_ENV] = str(hosts[rank])
    plain, hooked = DistributedDataParallel(_Words()), DistributedDataParallel(_Words())
    with topo_ar.attach(hooked, plan="hierarchical", timeout_s=10.0):
        for model in (plain, hooked):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            generator = torch.Generator().manual_seed(rank)
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randint(0, 50, (6,), generator=generator)).sum().backward()
                optimizer.step()
    pairs = zip(plain.parameters(), hooked.parameters(), strict=True)
    return max(float((a - b).abs().max().detach()) for a, b in pairs)


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 0, 0, 1]], ids=str)
def test_sparse_gradients_of_an_embedding(ranks, hosts) -> None:
    assert max(ranks.run(_sparse_gradients, 4, hosts)) < 1e-6


def _one_gradient_at_a_time(rank: int, world_size: int) -> list[str]:
    """Where torch hands hooks single gradients and ignores their futures (python_reducer)."""
    import torch._dynamo

    texts = []
    model = DistributedDataParallel(nn.Linear(2, 2))
    with topo_ar.attach(model, timeout_s=10.0) as handle:
        try:
            parameter = model.module.weight
            handle.hook.hook(None, (torch.ones(2, 2), parameter))  # type: ignore[arg-type]
        except ConfigError as error:
            texts.append(str(error))
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        topo_ar.attach(DistributedDataParallel(nn.Linear(2, 2)))
    except ConfigError as error:
        texts.append(str(error))
    finally:
        torch._dynamo.config.optimize_ddp = True
    return texts


def test_gradients_that_would_silently_stay_unreduced_are_refused(ranks) -> None:
    for texts in ranks.run(_one_gradient_at_a_time, 2):
        assert len(texts) == 2
        assert all("python_reducer" in text for text in texts)


def test_a_report_that_names_very_many_ranks_still_fits() -> None:
    report = Failure("x" * 5000, tuple(range(10**6, 10**6 + 5000)), "intra_all_gather", 7)
    data = report.encode()
    assert len(data) <= FAILURE_NBYTES
    assert decode_failure(data, 0).ranks == report.ranks[:64]


def test_plans_are_not_kept_for_ever() -> None:
    plans = Plans(
        preset("cpu-host", nodes=2, ranks_per_node=2), ((0, 1), (2, 3)), 0, "auto", None, 1 << 21
    )
    for numel in range(1, 1100):
        plans.prepared(torch.empty(numel))
    assert len(plans._kept) <= 1024
    assert plans.prepared(torch.empty(7)) is plans.prepared(torch.empty(7))
