"""The joint choice of bucket cap, algorithm and codec."""

import json
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning_cases import any_levels, cluster
from topo_ar.errors import PlanError
from topo_ar.planning.buckets import Backward, uniform_backward
from topo_ar.planning.codec_costs import CPU_COSTS, CodecCost
from topo_ar.planning.joint import CAPS_MIB, plan_training
from topo_ar.planning.models import model_parameters
from topo_ar.planning.nccl_machine import nccl_machine
from topo_ar.planning.nccl_search import nccl_job
from topo_ar.planning.nccl_tuning import choice
from topo_ar.planning.parameters import Parameter
from topo_ar.planning.plan import Family
from topo_ar.planning.planner import plan
from topo_ar.planning.policy import parse_policy
from topo_ar.planning.runtime import CPU_RUNTIME, GPU_RUNTIME, runtime_of
from topo_ar.planning.training_plan import TrainingPlan
from topo_ar.topology.levels import levels
from topo_ar.topology.presets import preset

FREE = replace(CPU_COSTS, seconds_per_byte={}, by_rank={1: 0.0})


def _resnet(seconds=0.5):
    return uniform_backward(model_parameters("resnet50"), seconds)


def _slow_wire(nic="1gbit"):
    rate = {"1gbit": 0.125e9, "10gbit": 1.25e9, "100gbit": 12.5e9, "400gbit": 50e9}[nic]
    return levels(preset("cpu-host", 2, 4, [rate]))


def _codecs(made):
    return {bucket.codec for bucket in made.buckets}


# --- what is chosen ---


def test_a_slow_wire_is_worth_a_named_codec():
    made = plan_training(_slow_wire(), _resnet(), policy=parse_policy("bf16"))
    assert "bf16" in _codecs(made)
    assert made.exposed_seconds < 0.75 * made.exact_exposed_seconds
    assert made.exact_exposed_seconds < made.flat_exposed_seconds
    assert "Compress with bf16" in made.reason


def test_a_fast_wire_is_not_worth_one():
    fast = levels(preset("dgx-a100", nodes=4))
    made = plan_training(
        fast, _resnet(0.1), policy=parse_policy("lossy:1", "adamw"), runtime=GPU_RUNTIME
    )
    assert _codecs(made) == {"none"}
    assert made.exposed_seconds == made.exact_exposed_seconds
    assert "Do not compress: the best codec" in made.reason
    assert any("assumed" in note for note in made.notes)


def test_on_one_node_it_stays_flat_and_exact():
    one = levels(preset("dgx-a100", nodes=1))
    made = plan_training(one, _resnet(), policy=parse_policy("lossy:1"), runtime=GPU_RUNTIME)
    assert {bucket.family for bucket in made.buckets} <= {Family.FLAT_RING, Family.DIRECT}
    assert made.floor_ratio is None
    assert made.codecs == ()
    assert "Stay flat (" in made.reason
    assert "on one node there is no wire to spare." in made.reason
    assert "Do not compress: there is no wire between nodes." in made.reason


def test_one_rank_communicates_nothing():
    made = plan_training(cluster([1], 300, []), _resnet())
    assert made.exposed_seconds == made.communication_seconds == 0
    assert made.reason == "There is one rank: nothing has to be communicated."


def test_the_floor_is_the_quotient_of_the_slopes():
    """2 x 8, 300 and 8 x 25 GB/s: 1.1667; 4 x 4 with one NIC: 1 / 12."""
    a100 = cluster([8, 8], 300e9, [25e9] * 8)
    made = plan_training(a100, _resnet(), runtime=GPU_RUNTIME, policy=parse_policy("bf16"))
    assert made.floor_ratio == pytest.approx(7 / 6)
    assert "no ratio helps" in made.reason
    one_nic = cluster([4] * 4, 300e9, [25e9])
    assert plan_training(one_nic, _resnet()).floor_ratio == pytest.approx(1 / 12)


def test_break_even_rates_are_the_closed_forms():
    slow = _slow_wire()
    made = plan_training(slow, _resnet(), policy=parse_policy("bf16"))
    (bf16,) = made.codecs
    assert bf16.slope == pytest.approx(5.9e-11 / 4)
    # Half of all but the vectors of ResNet-50, 54,120 of 25,557,032 elements.
    assert bf16.ratio == pytest.approx((1 + 54_120 / 25_557_032) / 2)
    k1 = 2 * 3 / 4 / slow.nodes[0].intra.payload
    assert bf16.overlapped_break_even == pytest.approx(1 / max(k1, bf16.slope))
    assert bf16.sequential_break_even == pytest.approx((1 - bf16.ratio) / bf16.slope)
    assert bf16.exposed_seconds >= made.exposed_seconds


def test_buckets_that_backward_hides_stay_exact():
    made = plan_training(_slow_wire(), _resnet(0.7), policy=parse_policy("int8"))
    coded = [bucket.codec != "none" for bucket in made.buckets]
    assert any(coded)
    assert not coded[0]
    assert made.exposed_seconds < made.exact_exposed_seconds


def test_among_equals_the_smallest_error_is_taken():
    """Both hide everything but the last bucket; fp16 is finer than bf16."""
    made = plan_training(_slow_wire("10gbit"), _resnet(0.2), policy=parse_policy("lossy:0.01"))
    assert _codecs(made) <= {"fp16", "none"}


def test_risky_codecs_are_left_out_with_the_reason():
    made = plan_training(_slow_wire(), _resnet(), policy=parse_policy("lossy:1", "adam"))
    topk = next(verdict for verdict in made.codecs if verdict.codec == "topk:0.01")
    assert topk.exposed_seconds is None
    assert "69 %" in topk.excluded
    named = plan_training(_slow_wire(), _resnet(), policy=parse_policy("topk:0.01", "adam"))
    assert "topk:0.01" in _codecs(named)
    assert any("not safe with adam" in note for note in named.notes)


def test_another_cap_is_set_only_where_it_is_worth_it():
    """With rails over 512 nodes each bucket waits for a thousand messages: fewer buckets."""
    many = levels(preset("dgx-h100", nodes=512))
    backward = uniform_backward(model_parameters("bert-large"), 0.1)
    rails = {Family.FLAT_RING, Family.HIERARCHICAL_SEQUENTIAL, Family.HIERARCHICAL_PIPELINED}
    made = plan_training(many, backward, runtime=GPU_RUNTIME, families=rails)
    assert made.bucket_cap_mib == 256
    assert "Set the bucket cap to 256 MiB" in made.reason
    few = plan_training(levels(preset("dgx-a100", nodes=4)), backward, runtime=GPU_RUNTIME)
    assert few.bucket_cap_mib is None
    assert "Keep the bucket cap, torch's default of 25 MiB" in few.reason


def test_the_cap_a_job_has_is_the_one_to_beat():
    backward = uniform_backward(model_parameters("bert-large"), 0.1)
    made = plan_training(_slow_wire(), backward, reference_cap_mib=25)
    assert made.reference_cap_mib == made.bucket_cap_mib == 25
    assert made.caps[0].bucket_cap_mib == 25
    assert len(made.caps) == len(CAPS_MIB) + 1


def test_only_what_can_run_is_chosen():
    made = plan_training(_slow_wire(), _resnet(), families={Family.FLAT_RING})
    assert {bucket.family for bucket in made.buckets} == {Family.FLAT_RING}
    assert made.exposed_seconds == made.flat_exposed_seconds


def test_a_bucket_alone_takes_what_its_plan_predicts():
    slow = _slow_wire()
    made = plan_training(slow, _resnet())
    assert made.mode == "auto"
    for bucket in made.buckets[:4]:
        own = plan(slow, bucket.nbytes, runtime=CPU_RUNTIME)
        assert bucket.family == own.family
        assert bucket.num_chunks == len(own.chunk_nbytes)
        assert bucket.seconds == pytest.approx(own.predicted_seconds, rel=1e-9)


def test_gradients_without_bytes_are_refused():
    with pytest.raises(PlanError, match="hold no bytes"):
        plan_training(_slow_wire(), uniform_backward([Parameter("none", (0,))], 1.0))


# --- form ---


def test_equal_arguments_equal_json_and_back():
    made = plan_training(_slow_wire(), _resnet(), policy=parse_policy("int8"))
    again = plan_training(_slow_wire(), _resnet(), policy=parse_policy("int8"))
    assert made.to_json() == again.to_json()
    assert TrainingPlan.from_json(made.to_json()) == made
    first = json.loads(made.to_json())["buckets"][0]
    assert {"algorithm", "chunks", "codec", "nbytes", "done_seconds"} <= set(first)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not a training plan"), ('{"policy": 3}', "policy"), ("[]", "not a training plan")],
)
def test_what_is_no_training_plan_is_explained(text, message):
    with pytest.raises(PlanError, match=message):
        TrainingPlan.from_json(text)


def test_another_schema_is_refused():
    made = plan_training(_slow_wire(), _resnet())
    text = made.to_json().replace(b'"schema":1', b'"schema":99')
    with pytest.raises(PlanError, match="schema 99 is not known; this version reads 1"):
        TrainingPlan.from_json(text)


@pytest.mark.parametrize("nodes", [1, 8, 512])
def test_bert_on_many_gpus_is_planned_quickly(nodes):
    found = levels(preset("dgx-h100", nodes=nodes))
    backward = uniform_backward(model_parameters("bert-large"), 0.1)
    begin = time.monotonic()
    plan_training(found, backward, policy=parse_policy("lossy:1"), runtime=GPU_RUNTIME)
    assert time.monotonic() - begin < 20  # a second on an idle machine


# --- laws ---

_SIZES = st.lists(st.integers(1, 3_000_000), min_size=1, max_size=12)
_SECONDS = st.sampled_from([0.0, 1e-3, 0.05, 1.0])


def _backward(sizes, seconds) -> Backward:
    return uniform_backward([Parameter(str(i), (n,)) for i, n in enumerate(sizes)], seconds)


def _number(value):
    return value * 1e8


@given(any_levels(number=_number), _SIZES, _SECONDS)
@settings(max_examples=15)
def test_an_exact_policy_is_exact_and_nothing_is_below_its_limits(found, sizes, seconds):
    made = plan_training(found, _backward(sizes, seconds), caps_mib=(None, 1, 8))
    assert _codecs(made) == {"none"}
    assert made.exposed_seconds == made.exact_exposed_seconds >= 0
    last = made.buckets[-1]
    assert last.ready_seconds == seconds
    assert made.exposed_seconds >= last.seconds - 1e-9 * (seconds + last.seconds)
    assert made.exposed_seconds <= made.communication_seconds * (1 + 1e-9) + 1e-12
    assert sum(bucket.nbytes for bucket in made.buckets) == 4 * sum(sizes)
    assert made.exposed_seconds <= 1.01 * made.reference_exposed_seconds + 0.01 * seconds + 1e-12


@given(any_levels(even=True, number=_number), _SIZES, _SECONDS)
@settings(max_examples=10)
def test_a_codec_is_only_chosen_where_it_helps(found, sizes, seconds):
    made = plan_training(
        found, _backward(sizes, seconds), caps_mib=(None, 8), policy=parse_policy("int8,topk:0.01")
    )
    if _codecs(made) != {"none"}:
        assert made.exposed_seconds < made.exact_exposed_seconds


@pytest.mark.parametrize("policy", ["exact", "bf16", "powersgd:4"])
@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.5])
def test_a_larger_nic_never_exposes_more(policy, seconds):
    made = [
        plan_training(_slow_wire(nic), _resnet(seconds), policy=parse_policy(policy))
        for nic in ("1gbit", "10gbit", "100gbit", "400gbit")
    ]
    for slow, fast in pairwise(made):
        # The best of the search, and the choice up to the 1 % that a simpler one may cost.
        assert min(c.exposed_seconds for c in fast.caps) <= min(
            c.exposed_seconds for c in slow.caps
        )
        worth = 0.01 * (seconds + slow.exposed_seconds)
        assert fast.exposed_seconds <= slow.exposed_seconds + worth


@pytest.mark.parametrize(("ranks", "nic"), [(8, 25e9), (4, 25e9)])
def test_a_codec_below_the_floor_brings_nothing_more(ranks, nic):
    """With free codecs and many chunks, int4 and sign gain no more than bf16 beyond a floor."""
    found = cluster([ranks] * 2, 50e9, [nic] * ranks)
    backward = _backward([64 << 20], 0.0)
    runtime = replace(GPU_RUNTIME, max_chunk_nbytes=1 << 20)

    def exposed(policy):
        made = plan_training(
            found, backward, policy=parse_policy(policy), costs=FREE, runtime=runtime
        )
        assert made.floor_ratio is not None
        return made.floor_ratio, made.exposed_seconds

    floor, exact = exposed("exact")
    assert floor > 1
    assert exposed("bf16")[1] == pytest.approx(exact, rel=0.02)
    assert exposed("int4")[1] == pytest.approx(exact, rel=0.02)


def test_runtime_of_a_preset_chooses_the_costs():
    gpus = preset("dgx-a100", nodes=2)
    made = plan_training(
        levels(gpus), _resnet(), runtime=runtime_of(gpus), policy=parse_policy("bf16")
    )
    assert made.codecs[0].slope == pytest.approx(7.6e-13 / 8)


def test_a_plan_says_whose_codec_costs_are_measured():
    backward = uniform_backward((Parameter("w", (1000, 1000), "float32"),), 0.1)
    policy = parse_policy("int8,topk:0.01")
    costs = CPU_COSTS.with_measured([{"int8": CodecCost(1e-9, 1e-4)}], "measured here")
    cluster = _slow_wire()
    assumed = plan_training(cluster, backward, policy=policy).notes[-1]
    measured = plan_training(cluster, backward, policy=policy, costs=costs).notes[-1]
    assert "not measured here" in assumed
    assert measured == "Codec costs are measured here, those of topk:0.01 assumed."


def test_buckets_that_are_compressed_on_cpus_follow_one_another():
    """The engine moves a compressed bucket from end to end before it looks at the next."""
    backward = uniform_backward((Parameter("w", (1000, 1000), "float32"),), 0.0)
    costs = replace(FREE, seconds_per_byte={"int8": 1e-8})
    made = {
        overlaps: plan_training(
            _slow_wire(),
            backward,
            policy=parse_policy("int8"),
            costs=costs,
            runtime=replace(CPU_RUNTIME, overlaps_codecs=overlaps),
        ).codecs[0]
        for overlaps in (True, False)
    }
    assert made[False].exposed_seconds > made[True].exposed_seconds
    # 4 MB at 1e-8 s per byte on four ranks that share them, and what the wire takes, in turn.
    assert made[False].exposed_seconds > 4e6 * 1e-8 / 4


@pytest.mark.parametrize(("codec", "overlaps"), [("int8", True), ("sign", False)])
def test_codec_and_wire_overlap_on_cpus_where_a_codec_works_by_runs(codec, overlaps):
    """A bucket of four runs, whose coding is shorter than the wire: only the first shows."""
    backward = uniform_backward((Parameter("w", (4096, 1024), "float32"),), 0.0)

    def exposed(seconds_per_byte):
        made = plan_training(
            _slow_wire(),
            backward,
            policy=parse_policy(codec),
            costs=replace(FREE, seconds_per_byte={codec: seconds_per_byte}),
            runtime=CPU_RUNTIME,
        )
        return made.codecs[0].exposed_seconds

    wire, nbytes, runs = exposed(0.0), 4096 * 1024 * 4, 4
    coding = wire / 2
    found = exposed(4 * coding / nbytes) - wire
    assert found == pytest.approx(coding / runs if overlaps else coding, rel=0.05)


def test_flat_buckets_of_gpus_cost_what_nccl_takes():
    """NCCL takes a tree over many nodes, a ring of all ranks would wait 2(n - 1) times."""
    topology = preset("dgx-h100", nodes=1250)
    many, nccl = levels(topology), nccl_machine(topology)
    backward = uniform_backward(model_parameters("bert-large"), 0.1)
    made = plan_training(many, backward, runtime=GPU_RUNTIME, modes=("flat",), nccl=nccl)
    ring = plan_training(many, backward, runtime=GPU_RUNTIME, modes=("flat",))
    for bucket in made.buckets:
        assert bucket.seconds == pytest.approx(choice(nccl_job(nccl), bucket.nbytes).seconds)
    assert made.communication_seconds < ring.communication_seconds / 10
