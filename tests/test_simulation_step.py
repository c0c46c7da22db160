"""Simulated training steps against the planner's model, exact sums, and each other."""

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.simulation_cases import star
from topo_ar.errors import ConfigError
from topo_ar.planning.buckets import Bucket, backward_of, ddp_buckets, trace_buckets
from topo_ar.planning.codecs import parse_codec
from topo_ar.planning.joint import balanced_backward, plan_training
from topo_ar.planning.models import model_parameters
from topo_ar.planning.nccl_machine import nccl_machine
from topo_ar.planning.nccl_search import nccl_job
from topo_ar.planning.nccl_tuning import choice
from topo_ar.planning.plan import Family
from topo_ar.planning.policy import parse_policy
from topo_ar.planning.runtime import CPU_RUNTIME, GPU_RUNTIME
from topo_ar.simulation.compute import Compute
from topo_ar.simulation.step import StepSimulator
from topo_ar.simulation.step_result import step_record
from topo_ar.simulation.units import GroupTraffic
from topo_ar.telemetry.bucket_trace import BucketCall, BucketTrace, StepTrace
from topo_ar.telemetry.records import encode
from topo_ar.telemetry.trace import read_trace, write_trace
from topo_ar.topology.levels import levels
from topo_ar.topology.presets import preset

CPU = replace(CPU_RUNTIME, chunk_seconds=None, message_seconds=0.0)


def buckets(*sizes, ready=0.0):
    return [Bucket(((size // 4,),), size, 4, ready * (i + 1)) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("mode", "policy"), [("auto", "exact"), ("flat", "exact"), ("auto", "bf16")]
)
def test_what_is_exposed_without_contention_is_what_the_planner_says(mode, policy):
    topology = preset("cpu-host", 2)
    known = levels(topology)
    backward = balanced_backward(known, model_parameters("resnet50", "float32"))
    planned = plan_training(
        known,
        backward,
        policy=parse_policy(policy),
        caps_mib=(25,),
        reference_cap_mib=25,
        modes=(mode,),
    )
    step = StepSimulator(
        topology,
        ddp_buckets(backward, 25),
        Compute(0.1, backward.seconds, 0.05),
        mode=mode,
        codecs=[parse_codec(bucket.codec) for bucket in planned.buckets],
    ).run()
    assert step.exposed_seconds == pytest.approx(planned.exposed_seconds, rel=2e-3)
    assert step.communication_seconds == pytest.approx(planned.communication_seconds, rel=2e-3)
    assert step.seconds == pytest.approx(0.15 + backward.seconds + step.exposed_seconds)
    for bucket, plan in zip(step.buckets, planned.buckets, strict=True):
        assert (bucket.family, bucket.codec) == (plan.family, plan.codec)
        assert bucket.done_seconds == pytest.approx(0.1 + plan.done_seconds, rel=2e-3)


def test_without_communication_a_step_is_its_computation():
    step = StepSimulator(preset("cpu-host", 1, 1), buckets(4096), Compute(1, 2, 3)).run()
    assert step.seconds == step.compute_seconds == 6
    assert (step.exposed_seconds, step.overlap_efficiency) == (0, None)
    assert step.links == ()


def test_copies_and_stragglers_delay_everybody():
    topology = star([2, 2], 1000.0, [10.0])
    compute = Compute(1, 2, 4, copy_seconds_per_byte=0.5)
    even = StepSimulator(topology, buckets(400, ready=2), compute, runtime=CPU).run()
    alone = even.communication_seconds
    # Ready at 1 + 2, copied in for 100, reduced, copied out for 100; then the optimizer.
    without = StepSimulator(topology, buckets(400), Compute(), runtime=CPU).run().seconds
    assert alone == pytest.approx(200 + without)
    assert even.seconds == pytest.approx(3 + alone + 4)
    slow = StepSimulator(
        topology, buckets(400, ready=2), replace(compute, slowdowns={3: 2.0}), runtime=CPU
    ).run()
    assert slow.compute_seconds == 14
    assert slow.buckets[0].ready_seconds == 6
    assert slow.seconds == pytest.approx(6 + alone + 8)
    assert slow.num_kinds == 4  # rank 3, its neighbour, and who meets them on the other node


def test_folded_steps_are_exact_with_stragglers_and_other_traffic():
    topology = star([2] * 4, 100.0, [10.0])
    pairs = tuple((rank, rank + 1) for rank in range(0, 8, 2))
    tensor = GroupTraffic("tensor", pairs, "all_reduce", 900, 3)
    results = [
        StepSimulator(
            topology,
            buckets(640, 1280, ready=1),
            Compute(1, 2, 1, slowdowns={4: 1.5}),
            mode=mode,
            traffic=[tensor],
            runtime=CPU,
            fold=fold,
        ).run()
        for mode in ("auto", "flat")
        for fold in (True, False)
    ]
    for folded, whole in (results[:2], results[2:]):
        assert folded.seconds == pytest.approx(whole.seconds, rel=1e-9)
        assert folded.sent_inside == pytest.approx(whole.sent_inside)
        assert whole.num_kinds == 8
        assert folded.exact
    # A ring has no two places alike that are equally far from the straggler; rails do.
    assert results[0].num_kinds == 4


def test_one_simulator_serves_several_lengths_of_computing():
    topology = star([2, 2], 1000.0, [10.0])
    long = Compute(5, 9, 3, copy_seconds_per_byte=0.1)
    made = StepSimulator(topology, buckets(400, ready=2), Compute(1, 2), runtime=CPU)
    fresh = StepSimulator(topology, buckets(400, ready=2), long, runtime=CPU).run()
    first = made.run()
    assert made.run(0, long) == fresh
    assert made.run(0, Compute(1, 2)) == first
    with pytest.raises(ConfigError, match="other stragglers"):
        made.run(0, Compute(slowdowns={0: 2.0}))


def test_jitter_is_the_same_for_the_same_seed_and_folding_only_overestimates_it():
    topology = star([2, 2], 1000.0, [10.0])

    def steps(fold=True, seed=1, count=3):
        simulator = StepSimulator(
            topology,
            buckets(400, 800, ready=10),
            Compute(10, 20, 5, jitter=0.2, seed=seed),
            runtime=CPU,
            fold=fold,
        )
        return [simulator.run(step) for step in range(count)]

    folded, whole = steps(), steps(fold=False)
    assert [step.seconds for step in folded] == [step.seconds for step in steps()]
    assert [step.seconds for step in folded] != [step.seconds for step in steps(seed=2)]
    assert len({step.seconds for step in folded}) == 3
    for above, step in zip(folded, whole, strict=True):
        assert above.seconds >= step.seconds * (1 - 1e-9)
        assert step.exact
        assert not above.exact
    assert folded[0].compute_seconds == pytest.approx(whole[0].compute_seconds)


@pytest.mark.parametrize("codec", ["bf16", "int8", "topk:0.01", "powersgd:2"])
def test_bytes_between_nodes_are_those_of_the_codec(codec):
    topology = preset("cpu-host", 3)
    shapes = ((512, 512), (2048, 256))
    bucket = Bucket(shapes, 4 * (512 * 512 + 2048 * 256), 4, 0.0)
    chosen = parse_codec(codec)
    exact, coded = (
        StepSimulator(topology, [bucket], Compute(), mode="hierarchical", codecs=each).run()
        for each in (parse_codec("none"), chosen)
    )
    # What a node sends, over its ranks.
    for step, each in ((exact, parse_codec("none")), (coded, chosen)):
        assert sum(step.sent_between) == pytest.approx(3 * each.sent_nbytes(shapes, 3))
    assert coded.sent_inside == pytest.approx(exact.sent_inside)
    assert coded.seconds < exact.seconds
    wire = sum(use.nbytes * use.count for use in coded.links if use.kind == "ethernet")
    assert wire == pytest.approx(2 * sum(coded.sent_between))


def test_what_nccl_runs_as_a_whole_takes_what_its_model_expects():
    topology = preset("dgx-h100", 4)
    sizes = (1 << 20, 25 << 20, 25 << 20)
    step = StepSimulator(topology, buckets(*sizes), Compute(), mode="flat").run()
    job = nccl_job(nccl_machine(topology))
    for bucket in step.buckets:
        assert bucket.seconds_alone == pytest.approx(choice(job, bucket.nbytes).seconds)
    assert step.seconds == pytest.approx(sum(bucket.seconds_alone for bucket in step.buckets))
    for before, after in pairwise(step.buckets):
        assert after.done_seconds == pytest.approx(before.done_seconds + after.seconds_alone)


def test_tensor_groups_take_the_links_inside_and_data_groups_those_between():
    topology = preset("dgx-h100", 2)
    data = [(rank, rank + 8) for rank in range(8)]
    tensor = GroupTraffic("tensor", ((*range(8),), (*range(8, 16),)), "all_reduce", 1 << 30, 4)
    alone, both = (
        StepSimulator(
            topology,
            buckets(25 << 20, 25 << 20, ready=1e-3),
            Compute(1e-3, 2e-3),
            groups=data,
            traffic=traffic,
        ).run()
        for traffic in ((), (tensor,))
    )
    # Eight pairs over the NICs; what is sent inside are the tensor groups alone, on other links.
    assert sum(alone.sent_inside) == 0
    assert sum(alone.sent_between) == pytest.approx(2 * 16 * (25 << 20))
    assert both.sent_between == pytest.approx(alone.sent_between)
    assert sum(both.sent_inside) == pytest.approx(4 * 2 * 2 * 7 * (1 << 30))
    assert both.seconds == pytest.approx(alone.seconds)
    # Over the network it is felt.
    across = GroupTraffic("sharded", tuple(data), "all_gather", 1 << 30, 4)
    felt = StepSimulator(
        topology,
        buckets(25 << 20, 25 << 20, ready=1e-3),
        Compute(1e-3, 2e-3),
        groups=data,
        traffic=[across],
    ).run()
    assert felt.seconds > alone.seconds * 1.1


def test_pipeline_stages_send_to_the_next():
    topology = star([1] * 3, 100, [10.0])
    stages = GroupTraffic("pipeline", ((0, 1, 2),), "send", 100, 2)
    step = StepSimulator(
        topology,
        buckets(40),
        Compute(100, 100),
        groups=[(0,), (1,), (2,)],
        traffic=[stages],
        runtime=GPU_RUNTIME,
    ).run()
    assert step.sent_between == pytest.approx((200, 200, 0))
    assert step.seconds == 200


def test_trees_take_turns_and_can_be_reduced_beside_others():
    topology = star([2, 2, 2], 1000.0, [10.0])
    runtime = replace(CPU, families=frozenset({Family.DOUBLE_BINARY_TREE}))
    step = StepSimulator(topology, buckets(1 << 20), Compute(), runtime=runtime).run()
    assert step.buckets[0].family == Family.DOUBLE_BINARY_TREE
    assert sum(step.sent_between) == pytest.approx(2 * 2 * (1 << 20))
    assert sum(step.sent_inside) == pytest.approx(2 * 3 * (1 << 20))


def test_the_buckets_of_a_trace_are_taken_as_they_were():
    calls = [
        BucketCall(0, 20, "float32", ("b", "c"), 0.5, 0.7, ((4, 4), (4,))),
        BucketCall(1, 8, "bfloat16", ("a",), 0.9, 1.1, ((8,),)),
    ]
    trace = BucketTrace(2, (StepTrace(0, []), StepTrace(1, calls)))
    found = trace_buckets(trace)
    assert [(b.nbytes, b.itemsize, b.ready_seconds) for b in found] == [(80, 4, 0.5), (16, 2, 0.9)]
    assert found[0].shapes == ((4, 4), (4,))
    assert sum(b.nbytes for b in found) == backward_of(trace).nbytes


def test_records_and_traces_can_be_read_back(tmp_path):
    topology = preset("cpu-host", 2)
    simulator = StepSimulator(topology, buckets(1 << 20, 4 << 20, ready=0.01), Compute(0.01, 0.02))
    step = simulator.run()
    record = step_record([step, step], "auto", 2, 0.03)
    assert encode(record)
    assert record["communication_ratio"] == pytest.approx(step.communication_seconds / 0.03)
    assert record["seconds"] == [step.seconds] * 2
    write_trace(step.spans, tmp_path / "step.json")
    spans = read_trace(tmp_path / "step.json")
    assert {span.lane for span in spans} == {"compute", "intra", "inter"}
    assert {span.name for span in spans} >= {"forward", "backward"}
    assert max(span.end_seconds for span in spans) == pytest.approx(step.seconds, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compute": Compute(-1)}, "forward is -1"),
        ({"compute": Compute(slowdowns={9: 2})}, "straggler 9 is no rank; they go from 0 to 3"),
        ({"compute": Compute(slowdowns={0: 0})}, "positive factor"),
        ({"groups": [(0, 1), (2,)]}, "equal size"),
        ({"groups": [(0, 1), (1, 2)]}, "no rank twice"),
        ({"groups": [(0, 7)]}, "beyond 0 to 3"),
        ({"traffic": [GroupTraffic("tensor", ((0,),), "send", 1)]}, "two or more"),
        ({"codecs": []}, "0 codecs do not fit 1 bucket"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    options = {"compute": Compute(), **options}
    with pytest.raises(ConfigError, match=message):
        StepSimulator(preset("cpu-host", 2, 2), buckets(64), **options)


def test_a_thousand_gpus_are_one_kind():
    parameters = model_parameters("resnet50", "float32")
    topology = preset("dgx-h100", 128)
    backward = balanced_backward(levels(topology), parameters, runtime=GPU_RUNTIME)
    step = StepSimulator(
        topology, ddp_buckets(backward, 25), Compute(0.01, 0.02), mode="hierarchical"
    ).run()
    assert (step.num_kinds, step.exact, len(step.sent_inside)) == (1, True, 1024)
    nbytes = backward.nbytes
    assert step.sent_between == pytest.approx([2 * 127 / 128 * nbytes / 8] * 1024)
    assert step.sent_inside == pytest.approx([2 * 7 / 8 * nbytes] * 1024)


@pytest.mark.slow
def test_ten_thousand_gpus_are_one_kind():
    topology = preset("dgx-h100", 1250)
    step = StepSimulator(topology, buckets(25 << 20), Compute(), mode="hierarchical").run()
    assert (step.num_kinds, len(step.sent_inside)) == (1, 10_000)
