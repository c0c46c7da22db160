"""A codec that raises on one rank ends the job on all, naming that rank and what it raised."""

import time

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.compressed_training import attached, batch, model, on_hosts, train_step
from tests.jobs import blocks
from topo_ar.compression.powersgd_job import Job
from topo_ar.compression.quantize import BlockInteger
from topo_ar.compression.topk import TopK

VICTIM = 1
FAULTS = {
    "encode": ("int8", BlockInteger, "encode"),
    "decode": ("int4", BlockInteger, "decode"),
    "reduce": ("topk:0.05", TopK, "reduce"),
    "factors": ("powersgd:2", Job, "times_rows"),
}


def _trains(rank: int, world_size: int, hosts: list[int], fault: str) -> dict[str, object]:
    """Train with several buckets; a rank's codec raises in step 4, on its second call."""
    on_hosts(rank, hosts)
    codec, owner, name = FAULTS[fault]
    real = getattr(owner, name)
    calls = []

    def stumbles(*arguments: object, **options: object) -> object:
        calls.append(name)
        if len(calls) == 2:
            raise ValueError("injected")
        return real(*arguments, **options)

    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.02)
    texts: list[str] = []
    try:
        with attached(ddp, codec) as handle:
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            for step in range(4):
                train_step(ddp, optimizer, batch(rank, step))
            compressed = bool(handle.compression.buckets)
            if rank == VICTIM:
                setattr(owner, name, stumbles)
            begin = time.monotonic()
            for step in range(4, 7):
                try:
                    train_step(ddp, optimizer, batch(rank, step))
                except RuntimeError as error:
                    texts.append(str(error))
            seconds = time.monotonic() - begin
            error = handle.error
    finally:
        setattr(owner, name, real)
    return {
        "compressed": compressed,
        "texts": texts,
        "seconds": seconds,
        "ranks": getattr(error, "ranks", None),
        "error": str(error),
        "fallbacks": handle.fallbacks,
    }


@pytest.mark.parametrize(
    ("hosts", "fault"),
    [*((blocks(2, 2), fault) for fault in FAULTS), (blocks(3, 1), "encode")],
    ids=str,
)
def test_a_codec_that_raises_on_one_rank_ends_the_job_on_all(ranks, hosts, fault) -> None:
    for found in ranks.run(_trains, len(hosts), hosts, fault):
        assert found["compressed"]
        assert len(found["texts"]) == 3, found  # and every step after it
        assert "ValueError: injected" in found["texts"][0]
        assert found["ranks"] == (VICTIM,), found
        assert f"rank {VICTIM} is on node" in found["error"]
        assert found["fallbacks"] == 0
        assert found["seconds"] < 10.0
