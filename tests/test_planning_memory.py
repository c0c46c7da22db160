"""Bytes of a replica, and hybrid sharding where it does not fit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning_cases import cluster
from topo_ar.errors import ConfigError
from topo_ar.execution import communicator, slots
from topo_ar.execution.transports import segment
from topo_ar.planning.codecs import NONE, Codec
from topo_ar.planning.memory import (
    OPTIMIZERS,
    SEGMENT_HEADER_NBYTES,
    SEGMENT_SLOTS,
    SUM_SLOTS,
    optimizer_nbytes,
    plan_memory,
    residual_nbytes,
    staging_nbytes,
)
from topo_ar.planning.models import model_parameters
from topo_ar.planning.parameters import Parameter, assumed_parameters
from topo_ar.planning.runtime import CPU_RUNTIME, GPU_RUNTIME

GB = 10**9
A100 = cluster([8, 8], 300e9, [25e9] * 8)
BILLION = [Parameter(f"p{i}", (1000, 1000)) for i in range(1000)]


# --- optimizers ---


@pytest.mark.parametrize(
    ("optimizer", "dtype", "each"),
    [
        ("sgd", "float32", 0),
        ("momentum", "float32", 4),
        ("adam", "float32", 8),
        ("adamw", "float32", 8),
        ("adamw", "bfloat16", 4),
        ("sgd-master", "bfloat16", 4),
        ("momentum-master", "float16", 8),
        ("adamw-master", "bfloat16", 12),
        ("adamw-master", "float32", 8),
        ("adam-master", "float64", 16),
    ],
)
def test_bytes_of_the_optimizer_for_each_parameter(optimizer, dtype, each):
    parameters = [Parameter("a", (10, 10), dtype), Parameter("b", (7,), dtype)]
    assert optimizer_nbytes(optimizer, parameters) == each * 107


def test_16_bit_adam_takes_16_bytes_a_parameter():
    """Rajbhandari et al., ZeRO (2020): 2 + 2 + K with K = 12; 1.5 B parameters need 24 GB."""
    parameters = assumed_parameters(1_500_000_000, "bfloat16")
    made = plan_memory(
        cluster([1], 1, []), parameters, optimizer="adamw-master", runtime=GPU_RUNTIME
    )
    assert made.nbytes == 24 * GB
    assert made.buckets == made.staging == 0


def _made(name, parameters):
    if name in ("sgd", "momentum"):
        return torch.optim.SGD(parameters, momentum=0.9 if name == "momentum" else 0.0)
    return (torch.optim.Adam if name == "adam" else torch.optim.AdamW)(parameters)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torchs_optimizers_keep_that_much(name, dtype):
    tensor = torch.nn.Parameter(torch.ones(30, 40, dtype=getattr(torch, dtype)))
    optimizer = _made(name, [tensor])
    tensor.grad = torch.ones_like(tensor)
    optimizer.step()
    kept = sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.numel() > 1
    )
    assert kept == optimizer_nbytes(name, [Parameter("a", (30, 40), dtype)])


def test_an_unknown_optimizer_is_explained():
    with pytest.raises(ConfigError, match="'lion' is not an optimizer; choose sgd, momentum"):
        optimizer_nbytes("lion", BILLION)


# --- what the runtime keeps ---


def test_the_planners_constants_are_the_engines():
    assert SEGMENT_SLOTS == segment.STAGING_SLOTS + segment.RESULT_SLOTS
    assert SUM_SLOTS == slots.SUM_SLOTS
    assert CPU_RUNTIME.max_chunk_nbytes == communicator.SLOT_NBYTES
    own = SEGMENT_HEADER_NBYTES + SEGMENT_SLOTS * communicator.SLOT_NBYTES
    assert segment.segment_nbytes(communicator.SLOT_NBYTES) == own
    assert staging_nbytes(CPU_RUNTIME, 1, 8, 0) == own


def test_staging():
    slot = CPU_RUNTIME.max_chunk_nbytes
    one, three = staging_nbytes(CPU_RUNTIME, 1, 4, 0), staging_nbytes(CPU_RUNTIME, 3, 4, 0)
    assert three - one == 4 * (slot + 2 * slot // 4)
    assert staging_nbytes(GPU_RUNTIME, 1, 8, 25_000_000) == 0
    assert staging_nbytes(GPU_RUNTIME, 2, 8, 25_000_001) == 3_125_001


def test_residuals_are_divided_among_the_owners():
    bert = model_parameters("bert-base")
    numel = sum(p.numel for p in bert)
    assert residual_nbytes(NONE, bert, 4, 8) == residual_nbytes(Codec("bf16"), bert, 4, 8) == 0
    assert residual_nbytes(Codec("topk", 0.01), bert, 4, 8) == numel * 4 // 8
    assert residual_nbytes(Codec("topk", 0.01), bert, 1, 8) == 0
    two_shot = residual_nbytes(Codec("int8"), bert, 4, 8)
    assert two_shot == pytest.approx(numel * 4 / 8 * (1 + 1 / 4), abs=2)
    one = [Parameter("w", (4096, 1024))]
    assert residual_nbytes(Codec("powersgd", 4), one, 2, 8) == 4096 * 1024 * 4 // 8 + 4 * 4 * 5120
    half = [Parameter("w", (4096, 1024), "bfloat16")]
    assert residual_nbytes(Codec("topk", 0.1), half, 2, 8) == 4096 * 1024 * 4 // 8


# --- the sum, and what to do where it does not fit ---


def test_a_billion_parameters_with_adam():
    made = plan_memory(A100, BILLION, runtime=GPU_RUNTIME, device_nbytes=80 * GB)
    assert (made.parameters, made.gradients, made.optimizer) == (4 * GB, 4 * GB, 8 * GB)
    assert made.buckets == 4 * GB
    assert made.nbytes == 20 * GB
    assert made.fits
    assert made.hsdp is None
    view = plan_memory(A100, BILLION, gradient_as_bucket_view=True, runtime=GPU_RUNTIME)
    assert view.nbytes == 16 * GB
    assert view.fits is None
    assert "Activations" in view.notes[0]


def test_hybrid_sharding_over_the_fewest_ranks_of_a_node():
    """7 B parameters in fp32 with Adam are 112 GB: two GPUs of 80 GB hold them, one does not."""
    seven = [Parameter(f"p{i}", (1000, 1000)) for i in range(7000)]
    made = plan_memory(A100, seven, runtime=GPU_RUNTIME, device_nbytes=80 * GB)
    assert made.fits is False
    assert (made.hsdp.shard_size, made.hsdp.num_replicas) == (2, 8)
    assert made.hsdp.nbytes == 56 * GB + 8_000_000
    nbytes = 28 * GB
    once = nbytes / 2 / 300e9
    assert made.hsdp.gather_seconds == pytest.approx(2 * once)
    assert made.hsdp.scatter_seconds == pytest.approx(once)
    # Four replicas of each shard in a node, then every shard over two nodes.
    reduce = 2 * 3 / 4 * nbytes / 2 / 300e9 + nbytes / 200e9
    assert made.hsdp.reduce_seconds == pytest.approx(reduce)
    assert made.hsdp.seconds == pytest.approx(3 * once + reduce)


def test_a_view_of_the_buckets_may_be_enough():
    made = plan_memory(A100, BILLION, runtime=GPU_RUNTIME, device_nbytes=18 * GB)
    assert made.fits is False
    assert any("gradient_as_bucket_view=True a replica fits" in note for note in made.notes)


def test_what_fits_no_node_is_said():
    made = plan_memory(A100, BILLION, runtime=GPU_RUNTIME, device_nbytes=GB)
    assert made.fits is False
    assert made.hsdp is None
    assert any("shard over several nodes" in note for note in made.notes)


def test_unequal_nodes_shard_over_a_common_divisor():
    made = plan_memory(
        cluster([4, 6], 300e9, [25e9]), BILLION, runtime=GPU_RUNTIME, device_nbytes=10 * GB
    )
    assert made.hsdp.shard_size == 2
    assert made.hsdp.num_replicas == 5


def test_a_device_without_memory_is_refused():
    with pytest.raises(ConfigError, match="cannot have 0 bytes"):
        plan_memory(A100, BILLION, runtime=GPU_RUNTIME, device_nbytes=0)


@given(
    st.integers(1, 3000),
    st.sampled_from(OPTIMIZERS),
    st.sampled_from([1, 2, 3, 4, 6, 8]),
    st.integers(1, 40),
)
@settings(max_examples=40)
def test_a_proposal_fits_and_is_the_smallest(millions, optimizer, ranks, gigabytes):
    parameters = assumed_parameters(millions * 10**6)
    made = plan_memory(
        cluster([ranks] * 2, 300e9, [25e9]),
        parameters,
        optimizer=optimizer,
        runtime=GPU_RUNTIME,
        device_nbytes=gigabytes * GB,
    )
    assert made.fits == (made.nbytes <= gigabytes * GB)
    if made.hsdp is not None:
        size = made.hsdp.shard_size
        assert made.hsdp.nbytes <= gigabytes * GB
        assert ranks % size == 0
        assert size * made.hsdp.num_replicas == 2 * ranks
        state = made.parameters + made.gradients + made.optimizer
        largest = max(p.nbytes for p in parameters)
        smaller = [k for k in range(2, size) if ranks % k == 0]
        assert all(math.ceil(state / k) + 2 * largest > gigabytes * GB for k in smaller)
