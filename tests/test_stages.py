import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankPool
from topo_ar.execution.transports.stages import InlineStages, StageGroups

NODES = [(0, 2), (1, 3)]
CASES = [(0, ()), (1, (4,)), (7, (28,)), (1000, (1600, 1200, 1200)), (4099, (8192, 8204))]


def _run(rank: int, world_size: int, device: str) -> list[str]:
    backend = "nccl" if device == "cuda" else "gloo"
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    groups = StageGroups(NODES, backend, 20.0)
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
    groups.close()
    return wrong


def test_inline_stages_give_exact_sums(ranks: RankPool) -> None:
    assert ranks.run(_run, 4, "cpu") == [[]] * 4


@pytest.mark.gpu
def test_inline_stages_give_exact_sums_on_cuda(ranks: RankPool) -> None:
    if torch.cuda.device_count() < 4:
        pytest.skip("four CUDA devices are needed for two nodes of two")
    assert ranks.run(_run, 4, "cuda") == [[]] * 4
