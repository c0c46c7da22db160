"""`plan="auto"` in live jobs: the faster path wins, all ranks agree, and every step is right."""

import copy
import logging
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

import topo_ar
from tests.compressed_training import TWO_BY_TWO, batch, model, on_hosts
from topo_ar.integrations.ddp import Handle
from topo_ar.integrations.path_choice import PathChooser
from topo_ar.integrations.path_trial import LOOKS, TURN_STEPS

DELAY_S = 0.05
# The steps before the trial, those of the first look, and some to keep the choice.
STEPS = 5 + LOOKS[0] * TURN_STEPS + 3


def _topology(num_nodes: int = 2, ranks_per_node: int = 2):
    return topo_ar.preset("cpu-host", nodes=num_nodes, ranks_per_node=ranks_per_node)


class Clock:
    """A clock of its own for each rank, which all-reduces and nothing else advance."""

    def __init__(self, handle: Handle, slow: str) -> None:
        self.seconds = 100.0 * handle.communicator.rank
        self._submit, self._slow = handle.communicator.all_reduce, slow
        handle.communicator.all_reduce = self._all_reduce
        handle.hook.path.clock = lambda: self.seconds

    def _all_reduce(self, *args, plain: bool = False, **options):
        self.seconds += DELAY_S if plain == (self._slow == "plain") else DELAY_S / 2
        return self._submit(*args, plain=plain, **options)


def _step(each: DistributedDataParallel, rank: int, step: int, *, accumulate: bool) -> None:
    each.zero_grad()
    if accumulate:
        with each.no_sync():
            each(batch(rank, 1000 + step, torch.float64)).square().mean().backward()
    each(batch(rank, step, torch.float64)).square().mean().backward()


def _trains(rank, world_size, slow, ddp_options, options, accumulate=False):
    """Train beside plain DDP; return the largest difference, bits and what was chosen."""
    on_hosts(rank, TWO_BY_TWO)
    heard: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("topo_ar")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    plain = DistributedDataParallel(model(torch.float64), **ddp_options)
    ours = DistributedDataParallel(copy.deepcopy(plain.module), **ddp_options)
    worst, choices = 0.0, []
    with ExitStack() as stack:
        stack.callback(logger.removeHandler, handler)
        stack.callback(logger.setLevel, logging.NOTSET)
        handle = stack.enter_context(
            topo_ar.attach(ours, topology=_topology(), timeout_s=20.0, **options)
        )
        Clock(handle, slow)
        for step in range(STEPS):
            for each in (plain, ours):
                _step(each, rank, step, accumulate=accumulate)
            pairs = [
                (a.grad, b.grad)
                for a, b in zip(plain.parameters(), ours.parameters(), strict=True)
                if a.grad is not None
            ]
            worst = max(worst, *(float((a - b).abs().max()) for a, b in pairs))
            if options.get("grad_norm"):
                norm = handle.grad_norm()
                assert norm.step == step
                assert norm.norm == pytest.approx(float(get_total_norm([a for a, _ in pairs])))
            choices.append(handle.choice)
        assert handle.error is None
    bits = torch.cat([p.grad.flatten() for p in ours.parameters() if p.grad is not None])
    return worst, bits, choices, [text for text in heard if " all-reduce from step " in text]


@pytest.mark.parametrize(
    ("slow", "ddp_options", "options", "accumulate"),
    [
        ("planned", {"bucket_cap_mb": 0.02}, {"grad_norm": True}, False),
        ("plain", {"bucket_cap_mb": 0.02}, {"zero_copy": True, "grad_norm": True}, False),
        ("planned", {"find_unused_parameters": True}, {}, True),
        ("planned", {"static_graph": True, "gradient_as_bucket_view": True}, {}, False),
    ],
    ids=["planned is slow", "plain is slow, zero copy", "unused, no_sync", "static graph"],
)
def test_the_faster_path_stays_and_every_step_is_right(
    ranks, slow, ddp_options, options, accumulate
) -> None:
    results = ranks.run(_trains, 4, slow, ddp_options, options, accumulate, deadline_s=40.0)
    _, bits, choices, heard = results[0]
    for worst, theirs, their_choices, _ in results:
        assert worst <= 1e-12
        assert torch.equal(theirs, bits)
        assert their_choices == choices
    assert choices[3].path == "undecided"
    last = choices[-1]
    winner = "plain" if slow == "planned" else "planned"
    assert (last.path, last.trials, last.steps) == (winner, 1, LOOKS[0] * TURN_STEPS)
    ratio = 0.5 if slow == "planned" else 2.0
    assert (last.speedup.ratio, last.speedup.low, last.speedup.high) == pytest.approx((ratio,) * 3)
    assert choices[last.since_step - 1].path == "undecided"
    assert {choice.path for choice in choices[last.since_step :]} == {winner}
    [said] = heard
    assert said == f"{winner} all-reduce from step {last.since_step} on: {last.reason}"
    assert all(not heard for _, _, _, heard in results[1:])


def _joins(rank, world_size):
    """Rank 1 runs out of batches in the middle of the trial."""
    on_hosts(rank, [0, 1])
    module = nn.Linear(3, 2, bias=False)
    nn.init.constant_(module.weight, 7.0)
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    with ExitStack() as stack:
        handle = stack.enter_context(topo_ar.attach(ddp, topology=_topology(2, 1), timeout_s=20.0))
        Clock(handle, "planned")
        with ddp.join():
            for _ in range(STEPS if rank == 0 else 12):
                optimizer.zero_grad()
                ddp(torch.ones(1, 3) * (rank + 1)).sum().backward()
                optimizer.step()
        return module.weight.detach().flatten().tolist(), handle.choice


def test_ranks_that_run_out_of_batches_take_their_turns(ranks) -> None:
    """Every weight is its start value minus 12 x 1.5 and 0.5 for each step after."""
    (weights, choice), (theirs, their_choice) = ranks.run(_joins, 2)
    assert weights == theirs == [7.0 - 12 * 1.5 - (STEPS - 12) * 0.5] * 6
    assert choice == their_choice
    assert choice.path == "plain"


def _rebuilt(rank, world_size):
    """New buckets in the middle of a trial: it begins anew, and its seconds are not mixed."""
    on_hosts(rank, [0, 1])
    ddp = DistributedDataParallel(nn.Linear(8, 8, bias=False))
    found = []
    with topo_ar.attach(ddp, topology=_topology(2, 1), timeout_s=20.0) as handle:
        for step in range(20):
            if step == 10:
                ddp._update_process_group(ddp.process_group)
            ddp(torch.ones(1, 8)).sum().backward()
            found.append((handle.choice.trials, handle.choice.path))
            if step == 11:
                handle.hook.path.called(_Bucket(), torch.zeros(3))
    return found


class _Bucket:
    """One bucket more than DDP has: what a rebuild looks like."""

    def index(self) -> int:
        return 1


def test_other_buckets_begin_a_trial_anew(ranks) -> None:
    one, other = ranks.run(_rebuilt, 2)
    assert one == other
    assert one[4] == (1, "undecided")
    assert one[-1] == (2, "undecided")


def _only(rank, world_size, options):
    on_hosts(rank, [0, 1, 1, 1])
    ddp = DistributedDataParallel(nn.Linear(8, 8, bias=False))
    with topo_ar.attach(ddp, timeout_s=20.0, **options) as handle:
        seen = []
        made = handle.communicator.all_reduce

        def all_reduce(*args, plain: bool = False, **options):
            seen.append(plain)
            return made(*args, plain=plain, **options)

        handle.communicator.all_reduce = all_reduce
        for step in range(8):
            ddp(batch(rank, step)[:, :8]).sum().backward()
        return handle.choice, seen


@pytest.mark.parametrize(
    ("world_size", "options", "path", "reason"),
    [
        (1, {}, "plain", "there is one rank"),
        (2, {"plan": "hierarchical"}, "planned", "plan=hierarchical was asked for"),
        (2, {"plan": "flat"}, "plain", "plan=flat was asked for"),
        (2, {"reproducible": True}, "planned", "reproducible=True fixes the order of summation"),
        (2, {"compression": "int8"}, "planned", "codecs take the place of both"),
    ],
    ids=str,
)
def test_where_there_is_one_path_nothing_takes_turns(
    ranks, world_size, options, path, reason
) -> None:
    for choice, seen in ranks.run(_only, world_size, options):
        assert choice.path == path
        assert choice.reason.startswith(reason)
        assert choice.trials == 0
        assert not any(seen)


def _flat_plan(rank, world_size):
    """16 MB between two ranks that share no host: neighbours exchange halves in either way."""
    on_hosts(rank, [0, 1])
    ddp = DistributedDataParallel(nn.Linear(2000, 2000, bias=False))
    with topo_ar.attach(ddp, topology=_topology(2, 1), timeout_s=20.0) as handle:
        for _ in range(8):
            ddp(torch.ones(1, 2000)).sum().backward()
        assert handle.communicator.plan_for(16_000_000).family == "flat_ring"
        return handle.choice


def test_a_plan_that_is_flat_needs_no_trial(ranks) -> None:
    for choice in ranks.run(_flat_plan, 2):
        assert (choice.path, choice.trials) == ("plain", 0)
        assert choice.reason == "the plan is plain all-reduce for every bucket"


def _exact_after_all(rank, world_size):
    """One node: there is no wire between nodes to compress for, so the paths are compared."""
    on_hosts(rank, [0, 0])
    ddp = DistributedDataParallel(nn.Linear(8, 8, bias=False))
    with ExitStack() as stack:
        handle = stack.enter_context(topo_ar.attach(ddp, compression="int8", timeout_s=20.0))
        Clock(handle, "planned")
        for step in range(STEPS):
            ddp(batch(rank, step)[:, :8]).sum().backward()
        return handle.choice, handle.compression.reason


def test_where_compression_comes_to_nothing_paths_are_compared(ranks) -> None:
    (choice, reason), other = ranks.run(_exact_after_all, 2)
    assert (choice, reason) == other
    assert reason.startswith("nothing is compressed")
    assert choice.path == "plain"


class _Outlook:
    """What a compression says of itself."""

    stays_exact: bool | None = None


def _asks(rank, world_size, final):
    """Ranks learn at different steps what becomes of compression."""
    on_hosts(rank, [0, 1])
    ddp = DistributedDataParallel(nn.Linear(8, 8, bias=False))
    found = []
    with topo_ar.attach(ddp, topology=_topology(2, 1), timeout_s=20.0) as handle:
        outlook = _Outlook()
        chooser = PathChooser(handle.communicator, "auto", outlook)
        handle.hook.path = handle.hook.observers.members[0] = chooser
        for step in range(40):
            if step == (10 if rank == 0 else 20):
                outlook.stays_exact = final
            ddp(batch(rank, step)[:, :8]).sum().backward()
            found.append((chooser.choice.trials, chooser.choice.reason))
    return found


@pytest.mark.parametrize("final", [True, False])
def test_the_ranks_wait_until_all_know_what_becomes_of_compression(ranks, final) -> None:
    one, other = ranks.run(_asks, 2, final)
    assert one == other
    assert one[31] == (0, "compression is to be decided first")
    if final:
        assert one[33] == (1, "planned and plain steps take turns")
    else:
        assert one[32:] == [(0, "codecs take the place of both")] * 8


def _mixed_up(rank, world_size):
    """Plain and planned calls in turns, of all sizes, in flight together."""
    on_hosts(rank, TWO_BY_TWO)
    wrong = 0
    with topo_ar.Communicator(topology=_topology(), plan="hierarchical", timeout_s=20.0) as made:
        for _ in range(5):
            sizes = (1, 70_001, 3, 0, 300_000, 1024)
            tensors = [torch.full((n,), float(rank + n)) for n in sizes]
            futures = [
                made.all_reduce(tensor, plain=i % 2 == 0) for i, tensor in enumerate(tensors)
            ]
            for n, future in zip(sizes, futures, strict=True):
                wrong += not torch.equal(future.wait(), torch.full((n,), 4.0 * n + 6))
    with (
        topo_ar.Communicator(plan="hierarchical", reproducible=True, timeout_s=20.0) as made,
        pytest.raises(ValueError, match="reproducible=True excludes the plain path"),
    ):
        made.all_reduce(torch.ones(3), plain=True)
    return wrong


def test_plain_and_planned_calls_keep_their_order(ranks) -> None:
    assert ranks.run(_mixed_up, 4) == [0] * 4
