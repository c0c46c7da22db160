"""Wire bytes, errors, costs and policies of codecs, against published and measured values."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topo_ar.errors import ConfigError
from topo_ar.planning.codec_costs import (
    CPU_COSTS,
    GPU_COSTS,
    CodecCost,
    costs_of,
    overlapped_break_even,
    sequential_break_even,
)
from topo_ar.planning.codecs import BLOCK, BUILT_IN, NONE, Codec, factors_pay, parse_codec
from topo_ar.planning.policy import parse_policy
from topo_ar.planning.runtime import CPU_RUNTIME, GPU_RUNTIME

MIB = 1 << 20


def _resnet18_cifar():
    """ResNet-18 for CIFAR-10: a 3 x 3 stem, four stages of two blocks, 10 classes."""
    convolutions = [(64, 3, 3, 3)] + [(64, 64, 3, 3)] * 4
    for width in (128, 256, 512):
        half = width // 2
        convolutions += [(width, half, 3, 3), (width, width, 3, 3), (width, half, 1, 1)]
        convolutions += [(width, width, 3, 3)] * 2
    norms = [(shape[0],) for shape in convolutions for _ in range(2)]
    return [*convolutions, *norms, (10, 512), (10,)]


def _lstm():
    """Three layers of 650, tied 28869-word embedding, as in the PowerSGD paper."""
    return [(28869, 650), (28869,), *[(2600, 650)] * 6, *[(2600,)] * 6]


RESNET, LSTM = _resnet18_cifar(), _lstm()


def _payload(codec, shapes):
    return sum(message.nbytes for message in codec.messages(shapes, 16))


# --- PowerSGD's headline, in MiB although it is printed as MB ---


def test_resnet18_has_11_173_962_parameters():
    assert sum(map(math.prod, RESNET)) == 11_173_962


def test_dense_resnet18_moves_1023_mib_an_epoch():
    assert _payload(NONE, RESNET) * 24 / MIB == pytest.approx(1023.0, abs=0.05)


@pytest.mark.parametrize(
    ("rank", "mib", "ratio"), [(1, 4.21, 243.3), (2, 7.53, 135.8), (4, 14.18, 72.1)]
)
def test_powersgd_on_resnet18(rank, mib, ratio):
    nbytes = _payload(Codec("powersgd", rank), RESNET)
    assert nbytes * 24 / MIB == pytest.approx(mib, abs=0.005)
    assert _payload(NONE, RESNET) / nbytes == pytest.approx(ratio, abs=0.05)


@pytest.mark.parametrize(("rank", "ratio"), [(1, 309.7), (2, 203.1), (4, 120.3)])
def test_powersgd_on_the_lstm(rank, ratio):
    assert _payload(NONE, LSTM) / MIB == pytest.approx(110.43, abs=0.005)
    dense, coded = _payload(NONE, LSTM), _payload(Codec("powersgd", rank), LSTM)
    assert dense / coded == pytest.approx(ratio, abs=0.06)


def test_powersgd_compresses_only_where_it_pays():
    assert factors_pay((1024, 1024), 4)
    assert not factors_pay((16, 16), 4)  # 32 * 4 * 2 = 256 is not below 256
    assert factors_pay((16, 17), 4)
    assert not factors_pay((1000,), 1)
    assert not factors_pay((), 1)
    assert Codec("powersgd", 4).messages([(16, 16), (7,)], 4) == NONE.messages([(16, 16), (7,)], 4)


def test_powersgd_needs_two_rounds_and_is_linear():
    first, second = Codec("powersgd", 4).messages([(4096, 1024), (1024,)], 2)
    assert (first.nbytes, second.nbytes) == (4 * (4 * 4096 + 1024), 4 * 4 * 1024)
    assert Codec("powersgd", 4).linear


# --- the table of schemes: bytes each member sends ---

D = 128 * 1000


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize(
    ("name", "sent", "rounds", "linear"),
    [
        ("none", lambda n: Fraction(2 * (n - 1), n) * 4 * D, 1, True),
        ("fp16", lambda n: Fraction(2 * (n - 1), n) * 2 * D, 1, True),
        ("bf16", lambda n: Fraction(2 * (n - 1), n) * 2 * D, 1, True),
        ("int8", lambda n: Fraction(2 * (n - 1), n) * D * (1 + Fraction(4, 128)), 2, False),
        ("int4", lambda n: Fraction(2 * (n - 1), n) * D * Fraction(17, 32), 2, False),
        ("sign", lambda n: Fraction(2 * (n - 1), n) * (Fraction(D, 8) + 4), 2, False),
        ("topk:0.01", lambda n: (n - 1) * 8 * Fraction(D, 100), 1, False),
        ("randomk:0.01", lambda n: Fraction(2 * (n - 1), n) * 4 * Fraction(D, 100), 1, True),
    ],
)
def test_bytes_sent(name, n, sent, rounds, linear):
    codec = parse_codec(name)
    assert codec.sent_nbytes([(D, 1)], n) == pytest.approx(float(sent(n)), rel=1e-12)
    assert len(codec.messages([(D, 1)], n)) == rounds
    assert codec.linear == linear


@pytest.mark.parametrize("n", [2, 3, 8, 100])
def test_topk_sends_less_below_a_density_of_1_over_n(n):
    def ratio(density, itemsize=4):
        return Codec("topk", float(density)).ratio([(10_000, n)], n, itemsize)

    assert ratio(Fraction(1, n)) == pytest.approx(1)
    assert ratio(Fraction(99, 100 * n)) < 1 < ratio(Fraction(101, 100 * n))
    # Gradients of 16 bits; values travel as fp32 beside int32 indices: 1 / (2 n).
    assert ratio(Fraction(99, 200 * n), 2) < 1 < ratio(Fraction(101, 200 * n), 2)


def test_the_measured_ratios_of_the_quantisers():
    for name, ratio in (("int8", 3.9), ("int4", 7.5), ("sign", 32)):
        assert 1 / parse_codec(name).ratio([(BLOCK, 10_000)], 2) == pytest.approx(ratio, rel=0.01)


def test_a_cast_saves_nothing_on_gradients_that_are_16_bit_already():
    assert Codec("bf16").ratio([(100, 100)], 4, 2) == 1
    assert not Codec("bf16").shortens(2)
    assert Codec("bf16").shortens(4)
    assert Codec("int8").shortens(2)


def test_nothing_is_sent_on_one_node():
    for codec in (NONE, *BUILT_IN):
        assert codec.sent_nbytes([(64, 64)], 1) == 0
        assert codec.ratio([(64, 64)], 1) == 1


# --- errors: the limits hold for real encodings ---


def _decoded(codec, x):
    if codec.name == "fp16":
        return x.astype(np.float16).astype(np.float64)
    if codec.name in ("int8", "int4"):
        top = 127 if codec.name == "int8" else 7
        blocks = x.reshape(-1, BLOCK)
        scale = np.abs(blocks).max(axis=1, keepdims=True) / top
        scale[scale == 0] = 1
        return (np.rint(blocks / scale) * scale).reshape(-1)
    kept = np.argsort(-np.abs(x))[: math.ceil(codec.argument * x.size)]
    decoded = np.zeros_like(x)
    decoded[kept] = x[kept]
    return decoded


@pytest.mark.parametrize("name", ["fp16", "int8", "int4", "topk:0.01", "topk:0.25"])
@given(st.integers(0, 2**32 - 1), st.sampled_from(["normal", "equal", "one", "heavy"]))
@settings(max_examples=15)
def test_no_gradient_loses_more_than_the_limit(name, seed, kind):
    generator = np.random.default_rng(seed)
    x = {
        "normal": generator.standard_normal(512),
        "equal": generator.choice([-1.0, 1.0], 512),
        "one": np.eye(1, 512, seed % 512)[0] + 0.0625,
        "heavy": np.clip(generator.standard_cauchy(512), -1e4, 1e4),
    }[kind]
    codec = parse_codec(name)
    lost = np.linalg.norm(x - _decoded(codec, x)) / np.linalg.norm(x)
    assert lost <= codec.relative_error


def test_error_limits():
    assert NONE.relative_error == 0
    assert Codec("fp16").relative_error == 2**-11
    assert Codec("bf16").relative_error == 2**-8
    assert Codec("int8").relative_error == pytest.approx(math.sqrt(128) / 254)
    assert Codec("topk", 0.19).relative_error == pytest.approx(0.9)
    assert all(0 < codec.relative_error <= 1 for codec in BUILT_IN)


# --- costs: the wire below which one compressing core pays, n = 2 ---


@pytest.mark.parametrize(
    ("name", "break_even"),
    [("bf16", 8.5e9), ("int8", 2.2e9), ("topk:0.01", 4.6e9), ("powersgd:4", 2.8e9)],
)
def test_measured_break_even_of_one_core(name, break_even):
    codec = parse_codec(name)
    ratio = codec.ratio([(4096, 1024)], 2)
    found = sequential_break_even(CPU_COSTS.per_byte(codec), ratio, 2)
    assert found == pytest.approx(break_even, rel=0.02)
    # The work is divided among the ranks of a node.
    shared = sequential_break_even(CPU_COSTS.per_byte(codec) / 8, ratio, 2)
    assert shared == pytest.approx(8 * found)


def test_break_even_formulas():
    # k1 = 1/300, kappa = 1/100 s per byte: below k2 = 1/100, which is C = 2 (n-1) / n * 100.
    assert overlapped_break_even(1 / 100, 1 / 300, 0.25, 2) == pytest.approx(100)
    assert overlapped_break_even(1 / 400, 1 / 300, 0.25, 4) == pytest.approx(450)
    assert overlapped_break_even(0, 0, 0.25, 2) == math.inf
    assert sequential_break_even(0, 0.25, 2) == math.inf
    for ratio, n in ((1.0, 2), (2.0, 2), (0.5, 1)):
        assert overlapped_break_even(1e-9, 1e-9, ratio, n) is None
        assert sequential_break_even(1e-9, ratio, n) is None


def test_powersgd_between_measured_ranks():
    kappa = [CPU_COSTS.per_byte(Codec("powersgd", r)) for r in (1, 2, 3, 4, 8, 16)]
    assert kappa == sorted(kappa)
    assert kappa[2] == pytest.approx((kappa[1] + kappa[3]) / 2)


def test_every_codec_has_a_cost_on_either_machine():
    assert costs_of(CPU_RUNTIME) is CPU_COSTS
    assert costs_of(GPU_RUNTIME) is GPU_COSTS
    assert "not measured" in GPU_COSTS.source
    for costs in (CPU_COSTS, GPU_COSTS):
        assert all(costs.per_byte(codec) > 0 for codec in BUILT_IN)
        assert costs.per_byte(NONE) == costs.launch(NONE) == 0


def test_the_slowest_rank_of_each_codec_replaces_what_was_assumed():
    one = {"int8": CodecCost(4e-9, 1e-4), "powersgd:4": CodecCost(1e-9, 1e-3)}
    other = {"int8": CodecCost(3e-9, 2e-4), "powersgd:4": CodecCost(2e-9, 1e-5)}
    found = CPU_COSTS.with_measured([one, other], "measured")
    int8, powersgd = parse_codec("int8"), parse_codec("powersgd:4")
    assert (found.per_byte(int8), found.launch(int8)) == (4e-9, 2e-4)
    assert (found.per_byte(powersgd), found.launch(powersgd)) == (2e-9, 1e-3)
    assert found.per_byte(parse_codec("bf16")) == CPU_COSTS.per_byte(parse_codec("bf16"))
    assert found.measured == ("int8", "powersgd:4")
    assert found.source == "measured"


def test_of_one_codec_with_several_arguments_the_slowest_counts():
    measured = {"topk:0.1": CodecCost(5e-9, 1e-4), "topk:0.01": CodecCost(1e-9, 2e-4)}
    found = CPU_COSTS.with_measured([measured], "measured")
    assert found.per_byte(parse_codec("topk:0.01")) == 5e-9
    assert found.launch(parse_codec("topk:0.1")) == 2e-4


# --- names and policies ---


@pytest.mark.parametrize("text", ["none", "bf16", "topk:0.01", "randomk:0.5", "powersgd:4"])
def test_a_codec_comes_back_from_its_name(text):
    assert str(parse_codec(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zip", "'zip' is not a codec; choose none, fp16"),
        ("int8:3", "int8 takes no argument"),
        ("topk", "topk needs a density above 0 and at most 1, such as topk:0.01"),
        ("topk:2", "topk needs a density"),
        ("topk:nan", "topk needs a density"),
        ("powersgd:0", "powersgd needs a whole rank"),
        ("powersgd:1.5", "powersgd needs a whole rank"),
        ("powersgd:many", "powersgd needs a whole rank"),
        ("", "is not a codec"),
    ],
)
def test_a_wrong_codec_is_explained(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_codec(text)


def test_the_exact_policy_allows_nothing_lossy():
    policy = parse_policy("exact", "adamw")
    assert policy.allowed == ()
    assert [codec for codec, _ in policy.excluded] == list(BUILT_IN)


@pytest.mark.parametrize(
    ("bound", "names"),
    [
        ("0.001", ["fp16"]),
        ("0.01", ["fp16", "bf16"]),
        ("0.05", ["fp16", "bf16", "int8"]),
        ("0.9", ["fp16", "bf16", "int8", "int4"]),
    ],
)
def test_a_lossy_policy_goes_by_the_limit_of_the_error(bound, names):
    assert [str(codec) for codec in parse_policy(f"lossy:{bound}").allowed] == names


def test_topk_is_left_out_with_adam_and_kept_with_momentum():
    adam, momentum = parse_policy("lossy:1", "adamw"), parse_policy("lossy:1", "momentum")
    topk = Codec("topk", 0.01)
    assert topk not in adam.allowed
    assert "69 %" in dict(adam.excluded)[topk]
    assert topk in momentum.allowed
    assert Codec("powersgd", 4) in adam.allowed


def test_named_codecs_are_kept_with_a_warning():
    policy = parse_policy("none,topk:0.01,bf16,bf16", "adam")
    assert [str(codec) for codec in policy.allowed] == ["topk:0.01", "bf16"]
    (warning,) = policy.warnings
    assert "not safe with adam" in warning
    assert parse_policy("topk:0.01", "sgd").warnings == ()


@pytest.mark.parametrize("text", ["lossy", "lossy:", "lossy:no", "lossy:-1", "lossy:0"])
def test_a_lossy_policy_needs_a_bound(text):
    with pytest.raises(ConfigError, match="needs a relative error above 0"):
        parse_policy(text)


@pytest.mark.parametrize("text", ["", "fast", "exact:1"])
def test_no_policy(text):
    with pytest.raises(ConfigError, match="is not a codec"):
        parse_policy(text)


@pytest.mark.parametrize("codec", BUILT_IN[:7], ids=str)
def test_vectors_and_small_tensors_are_sent_in_full(codec):
    small = [(5000,), (31, 33), ()]
    assert codec.sent_nbytes(small, 2) == NONE.sent_nbytes(small, 2)
    beside = codec.sent_nbytes([(100, 100), *small], 2) - codec.sent_nbytes([(100, 100)], 2)
    assert beside == NONE.sent_nbytes(small, 2)
