"""Parameters, DDP's buckets of them, and ready times."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from topo_ar.errors import ConfigError
from topo_ar.planning.buckets import (
    FIRST_BUCKET_NBYTES,
    MIB,
    assign,
    backward_of,
    ddp_buckets,
    uniform_backward,
)
from topo_ar.planning.models import PUBLISHED_COUNTS, model_parameters
from topo_ar.planning.parameters import (
    ITEMSIZES,
    Parameter,
    assumed_parameters,
    parse_count,
    read_parameters,
    total_numel,
)
from topo_ar.telemetry.bucket_trace import BucketCall, BucketTrace, StepTrace

# --- DDP's rule ---


def _parameters(sizes, dtypes=("float32",)):
    return [Parameter(str(i), (n,), dtypes[i % len(dtypes)]) for i, n in enumerate(sizes)]


@given(
    st.lists(st.integers(1, 900_000), min_size=1, max_size=40),
    st.sampled_from([("float32",), ("float32", "bfloat16"), ("float64", "float32", "float32")]),
    st.sampled_from([None, 0.5, 1, 2, 3.3]),
)
@settings(max_examples=60)
def test_buckets_are_torchs(sizes, dtypes, cap):
    """Meta tensors in reverse order, as the reducer hands them over after its first step."""
    parameters = _parameters(sizes, dtypes)
    tensors = [
        torch.empty(p.shape, dtype=getattr(torch, p.dtype), device="meta") for p in parameters
    ]
    limit = int((25 if cap is None else cap) * MIB)
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, limit] if cap is None else [limit]
    order = list(range(len(parameters)))
    theirs, _ = dist._compute_bucket_assignment_by_size(
        tensors, limits, [False] * len(tensors), order
    )
    ours = assign(parameters, cap)
    assert sorted(ours) == sorted(theirs)
    assert [members[-1] for members in ours] == sorted(members[-1] for members in ours)


def test_torchs_constants_are_known():
    from torch.nn.parallel import distributed

    assert dist._DEFAULT_FIRST_BUCKET_BYTES == FIRST_BUCKET_NBYTES
    assert distributed._DEFAULT_BUCKET_CAP_MB == 25


def test_the_first_bucket_is_small_only_by_default():
    backward = uniform_backward(_parameters([MIB // 8] * 100), 1.0)
    default, given_cap = ddp_buckets(backward, None), ddp_buckets(backward, 25)
    assert [bucket.nbytes for bucket in default] == [MIB, 25 * MIB, 24 * MIB]
    assert [bucket.nbytes for bucket in given_cap] == [25 * MIB, 25 * MIB]
    assert default[0].ready_seconds == pytest.approx(0.02)
    assert default[-1].ready_seconds == given_cap[-1].ready_seconds == 1


def test_backward_goes_from_last_to_first():
    backward = uniform_backward([Parameter("a", (3,)), Parameter("b", (1,))], 8.0)
    assert [p.name for p in backward.parameters] == ["b", "a"]
    assert backward.ready_seconds == (2, 8)


def test_no_gradients_no_backward():
    with pytest.raises(ConfigError, match="no parameters"):
        uniform_backward([], 1.0)
    with pytest.raises(ConfigError, match="cannot take -1"):
        uniform_backward([Parameter("a", (1,))], -1)


# --- from a trace ---


def _call(index, seconds, shapes=((2, 3), (6,)), numel=12):
    names = tuple(f"p{index}.{i}" for i in range(len(shapes) or 1))
    return BucketCall(index, numel, "float32", names, seconds, shapes=shapes)


def test_ready_times_are_medians_over_steps_with_the_last_buckets():
    first = StepTrace(0, [_call(0, 9.0, ((24,),), 24)])  # before DDP changed its buckets
    later = [
        StepTrace(i, [_call(0, t), _call(1, t + 1)]) for i, t in ((1, 1.0), (2, 5.0), (3, 2.0))
    ]
    backward = backward_of(BucketTrace(2, (first, *later)))
    assert backward.seconds == 3
    assert backward.ready_seconds == (1, 2, 2.5, 3)
    assert backward.parameters[0].shape == (2, 3)
    assert "medians of 3 steps" in backward.source


def test_a_bucket_without_shapes_cannot_be_divided():
    backward = backward_of(BucketTrace(2, (StepTrace(0, [_call(0, 1.0, ())]),)))
    assert [p.shape for p in backward.parameters] == [(12,)]
    with pytest.raises(ConfigError, match="holds no bucket"):
        backward_of(BucketTrace(2, ()))


# --- models and counts ---


@pytest.mark.parametrize("name", PUBLISHED_COUNTS)
def test_a_models_parameters_sum_to_the_published_count(name):
    parameters = model_parameters(name)
    assert total_numel(parameters) == PUBLISHED_COUNTS[name]
    assert len({parameter.name for parameter in parameters}) == len(parameters)


def test_an_unknown_model_is_explained():
    with pytest.raises(ConfigError, match="'alexnet' is not a known model and not a file"):
        model_parameters("alexnet")
    with pytest.raises(ConfigError, match="'int8' is not a dtype"):
        model_parameters("gpt2", "int8")


def test_itemsizes_are_torchs():
    for name, size in ITEMSIZES.items():
        assert getattr(torch, name).itemsize == size


@pytest.mark.parametrize(
    ("text", "count"), [("7", 7), ("340M", 340_000_000), ("1.5B", 1_500_000_000), ("25k", 25_000)]
)
def test_counts(text, count):
    assert parse_count(text) == count
    assert total_numel(assumed_parameters(count)) == count


@pytest.mark.parametrize("text", ["", "0", "many", "1.5", "-3", "3X"])
def test_no_count(text):
    with pytest.raises(ConfigError, match="is not a number of parameters"):
        parse_count(text)


def test_a_list_of_parameters(tmp_path):
    path = tmp_path / "model.txt"
    path.write_text("# a model\nfc.weight,10x512\n\nfc.bias, 10\ntemperature,\n")
    found = read_parameters(path, "bfloat16")
    assert [(p.name, p.shape) for p in found] == [
        ("fc.weight", (10, 512)),
        ("fc.bias", (10,)),
        ("temperature", ()),
    ]
    assert sum(p.nbytes for p in found) == 2 * (5120 + 10 + 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fc.weight 10x512", "line 1: 'fc.weight 10x512' is not name,shape"),
        ("a,1\nb,2xx3", "line 2"),
        ("a,-1", "line 1"),
        (",3", "line 1"),
        ("a,1\na,2", "'a' is listed twice"),
        ("\n# nothing\n", "lists no parameter"),
        (None, "cannot read"),
    ],
)
def test_a_wrong_list_is_explained(tmp_path, text, message):
    path = tmp_path / "model.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_parameters(path)
