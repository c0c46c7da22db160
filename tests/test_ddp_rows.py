"""Sparse embeddings under DDP: rows travel, exactly, and all of them where that is less."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.compressed_training import TWO_BY_TWO, attached, on_hosts
from tests.hosts import rows_of_ranks, skip_without_hosts
from tests.wire_worker import NUM_ROWS, WIDTH, bags, embeddings
from topo_ar.emulation.spec import ClusterSpec


def _trained(rank, world_size, num_different, width):
    """Gradients with rows and with plain DDP, and what a step sent to other nodes."""
    on_hosts(rank, TWO_BY_TWO)
    module, plain = embeddings(width), embeddings(width)
    ddp, plain = DistributedDataParallel(module), DistributedDataParallel(plain)
    sent = []
    with attached(ddp, "rows", plan="hierarchical") as handle:
        for step in range(3):
            before = handle.communicator.nbytes_sent_between
            for each in (ddp, plain):
                each.zero_grad()
                # Whole numbers, whose sums are the same in any order.
                each(bags(rank, step, num_different)).sum().backward()
            handle.communicator.gather(b"")
            sent.append(handle.communicator.nbytes_sent_between - before)
    found = [m.module.weight.grad for m in (ddp, plain)]
    rows = [torch.zeros(0)] * world_size
    dist.all_gather_object(rows, bags(rank, 2, num_different).flatten())
    return (*found, sent[-1], rows)


def test_rows_are_exact_and_fewer_bytes_than_those_of_all_ranks(ranks) -> None:
    results = ranks.run(_trained, 4, 300, WIDTH)
    ours, _, _, rows = results[0]
    for mine, theirs, _, _ in results:
        assert mine.is_sparse
        assert torch.equal(mine.to_dense(), ours.to_dense())
        assert torch.equal(mine.to_dense(), theirs.to_dense())
    assert len(ours.coalesce().values()) < NUM_ROWS
    sent = sum(nbytes for _, _, nbytes, _ in results)
    # Each node's rows once, with indices of 4 bytes; 8 bytes for each of the rails' counts.
    nodes = [torch.cat(rows[:2]).unique(), torch.cat(rows[2:]).unique()]
    assert sent == sum(map(len, nodes)) * (4 + 4 * WIDTH) + 4 * 8
    # Gloo hands every rank's rows, duplicates too, to each rank of the other node, indices of 8.
    assert sent < 0.2 * sum(2 * len(each) * (8 + 4 * WIDTH) for each in rows)


def test_rows_go_dense_where_that_is_less(ranks) -> None:
    """All rows occur on each node: with no indices an all-reduce of the whole table is less."""
    results = ranks.run(_trained, 4, NUM_ROWS, 1)
    ours, _, _, rows = results[0]
    for mine, theirs, _, _ in results:
        assert torch.equal(mine.to_dense(), ours.to_dense())
        assert torch.equal(mine.to_dense(), theirs.to_dense())
    sent = sum(nbytes for _, _, nbytes, _ in results)
    assert sent == 2 * NUM_ROWS * 4 + 4 * 8
    assert all(len(torch.cat(each).unique()) > 0.9 * NUM_ROWS for each in (rows[:2], rows[2:]))


def test_the_layer_is_an_embedding_bag() -> None:
    module = embeddings(WIDTH)
    assert isinstance(module, nn.EmbeddingBag)
    assert module.sparse


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.timeout(120)
def test_the_wire_carries_fewer_bytes_than_with_plain_ddp() -> None:
    """Counted by the NICs of two hosts with two ranks each."""
    skip_without_hosts()
    found = {
        which: rows_of_ranks(
            ClusterSpec.uniform(2, 2, ["1gbit"]), "tests.wire_worker", "rows", which
        )
        for which in ("plain", "rows")
    }
    assert len({row["sum"] for rows in found.values() for row in rows}) == 1
    for plain, ours in zip(found["plain"], found["rows"], strict=True):
        assert ours["nic"] < 0.35 * plain["nic"]
