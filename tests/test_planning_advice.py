"""What a plan says beside its choice: other rates, other nodes, degraded links, records, rates."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.planning_cases import any_levels, cluster, rate
from topo_ar.cli.main import app
from topo_ar.errors import ConfigError, PlanError
from topo_ar.planning.calibration import calibration_from_records
from topo_ar.planning.candidates import Setting, candidates, network_share
from topo_ar.planning.cost import CostParameters
from topo_ar.planning.explain import explain
from topo_ar.planning.level_bounds import Bound
from topo_ar.planning.plan import Family
from topo_ar.planning.planner import plan
from topo_ar.planning.runtime import CPU_RUNTIME, GPU_RUNTIME
from topo_ar.topology.levels import Levels, levels
from topo_ar.topology.presets import preset

WIDTH = 79


def dgx(nodes, nic=1.0):
    found = levels(preset("dgx-a100", nodes=nodes))

    def times(port):
        return replace(port, nominal=port.nominal * nic, payload=port.payload * nic)

    return Levels(tuple(replace(n, nics=tuple(map(times, n.nics))) for n in found.nodes))


def seconds_of(made, family):
    return next(a.seconds for a in made.alternatives if a.family == family)


def test_the_named_rate_of_nics_is_where_the_runner_up_begins_to_win():
    made = plan(dgx(4), 128 << 20, runtime=GPU_RUNTIME, advice=True)
    found = re.search(r"(\w+) would win if the NICs were ([\d.]+) times (\w+)", made.reason)
    runner_up, times, word = found.groups()
    assert runner_up == made.runner_up.family
    for margin, ahead in ((1.1, True), (0.9, False)):
        factor = float(times) * margin
        there = plan(
            dgx(4, factor if word == "faster" else 1 / factor), 128 << 20, runtime=GPU_RUNTIME
        )
        theirs, mine = seconds_of(there, runner_up), seconds_of(there, made.family)
        assert (theirs < mine) == ahead
    assert "would win if" not in plan(dgx(4), 128 << 20, runtime=GPU_RUNTIME).reason


def test_the_named_number_of_nodes_is_where_the_runner_up_is_ahead():
    made = plan(dgx(4), 1 << 30, runtime=GPU_RUNTIME, advice=True)
    (count,) = re.findall(r"With (\d+) nodes flat_ring would be ahead", made.reason)
    there = plan(dgx(int(count)), 1 << 30, runtime=GPU_RUNTIME)
    assert seconds_of(there, Family.FLAT_RING) < seconds_of(there, made.family)


def test_a_degraded_link_names_what_the_plan_and_the_best_plan_would_take():
    equal = cluster([2] * 4, 4e9, [125e6])
    made = plan(equal, 25_000_000, advice=True)
    assert made.family == Family.HIERARCHICAL_PIPELINED
    half = cluster([2] * 4, 4e9, [[125e6]] * 3 + [[62.5e6]])
    best = plan(half, 25_000_000)
    assert best.family == Family.HIERARCHICAL_WEIGHTED
    assert re.search(
        r"With the NICs of node3 at half rate this plan would take 60\d.*ms, the best one then, "
        r"hierarchical_weighted in \d+ chunks, 40\d.*ms\.",
        made.reason,
    )
    assert "With the rank ports of node3 at half rate" in made.reason
    # Its own shards are kept: with half of another NIC they would be the wrong ones.
    again = plan(half, 25_000_000, advice=True)
    assert re.search(
        r"With the NICs of node3 at half rate this plan would take 8\d\d", again.reason
    )


def test_a_bound_from_elsewhere_is_named():
    slow = levels(preset("cpu-host", nodes=2))
    made = plan(slow, 25_000_000, bound=Bound(0.205, "a cut"), bound_kind="exact optimum")
    assert made.bound_seconds == 0.205
    assert made.bottleneck == "a cut"
    assert "faster than 205 ms (exact optimum): the bottleneck is a cut" in made.reason


def test_the_exact_bound_is_asked_for_and_named():
    pytest.importorskip("scipy")
    made = json.loads(
        run("plan", "cpu-host", "--nodes", 2, "-s", "25MB", "--exact", "--json").output
    )
    assert made["bound_seconds"] == pytest.approx(0.2)
    assert "(the exact optimum of the whole topology, by linear program" in made["reason"]
    two = json.loads(run("plan", "dgx-a100", "--nodes", 2, "-s", "1G", "--exact", "--json").output)
    assert two["predicted_seconds"] >= two["bound_seconds"]
    alone = run("plan", "cpu-host", "--ranks-per-node", 1, "-s", "1M", "--exact")
    assert "There is one rank" in alone.output
    step = run("plan", "cpu-host", "--params", "1M", "--exact")
    assert "leave out --size" in str(step.exception)


# --- R11: no rate above what its link can carry ---


@settings(max_examples=60)
@given(any_levels(number=float), st.sampled_from([100, 10**5, 10**8]))
def test_no_link_is_said_to_carry_more_than_it_can(some_levels, nbytes):
    for runtime in (CPU_RUNTIME, GPU_RUNTIME):
        setting = Setting(CostParameters.from_levels(some_levels, runtime=runtime), 4, runtime)
        for found in candidates(setting, nbytes):
            assert 0 <= network_share(setting, found) <= 1 + 1e-9
    made = plan(some_levels, nbytes)
    capacities = [sum(nic.payload for nic in node.nics) for node in some_levels.nodes]
    for number, unit in re.findall(r": ([\d.]+) ([kMGT]?B/s) each way", made.reason):
        carried = (
            float(number) * {"B/s": 1, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12}[unit]
        )
        assert carried <= max(capacities) * 1.001
    if len(capacities) > 1:
        # A cut of one node: nothing leaves it faster than its NICs carry.
        assert nbytes / made.predicted_seconds <= min(capacities) * (1 + 1e-9)


def test_every_rate_of_a_plan_names_its_link():
    for shape in (
        ["cpu-host", "--nodes", "2"],
        ["dgx-a100", "--nodes", "4"],
        ["dgx-h100", "--nodes", "1"],
    ):
        text = run("plan", *shape, "-s", "64K,25MB").output
        # The columns of the table have a head; sentences must name the link themselves.
        said = "\n".join(line for line in text.splitlines() if not re.match(r"  [* ] ", line))
        for line in re.sub(r"\n {2}(?=\w)", " ", said).split(". "):
            for found in re.finditer(r"[\d.]+ [kMGT]?B/s", line):
                around = line[max(0, found.start() - 90) : found.end() + 60]
                assert re.search(r"NIC|port|algbw|inside", around), around
        assert "buffer bytes per second, no link's rate" in text


# --- records ---


def rows(family="flat_ring", world_size=8, hosts=2, bend=1.0):
    sizes = (10**5, 10**6, 10**7)
    times = [1e-3 + size * 9e-9 for size in sizes]
    times[1] *= bend
    return [
        {
            "collective": "all_reduce",
            "family": family,
            "nbytes": size,
            "median_seconds": seconds,
            "world_size": world_size,
            "hosts": hosts,
        }
        for size, seconds in zip(sizes, times, strict=True)
    ]


def test_records_predict_and_a_bad_fit_says_so():
    slow = levels(preset("cpu-host", nodes=2))
    other_library = [{**rows()[0], "family": None, "median_seconds": 1e-9}]
    straight = calibration_from_records([*rows(), *other_library], 8, 2)
    assert set(straight.samples) == {Family.FLAT_RING}
    made = plan(slow, 10**6, calibration=straight, family=Family.FLAT_RING)
    assert made.predicted_seconds == pytest.approx(1e-3 + 9e-3)
    assert "do not describe" not in made.reason
    bent = calibration_from_records(rows(bend=1.5), 8, 2)
    reason = plan(slow, 10**6, calibration=bent, family=Family.FLAT_RING).reason
    assert re.search(
        r"measured times of flat_ring: they miss 1 MB by \d+ %|miss 1 MB by \d+%", reason
    )


@pytest.mark.parametrize(
    ("records", "complaint"),
    [
        ([], "no record holds the time"),
        (rows(world_size=4), "record 1 was measured with 4 ranks on 2 hosts, the topology has 8"),
        ([{"event": "prediction"}], "topo-ar bench --json"),
    ],
)
def test_records_that_cannot_calibrate(records, complaint):
    with pytest.raises(ConfigError, match=complaint):
        calibration_from_records(records, 8, 2)


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_the_command_line_takes_records_and_both_spellings(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    result = run(
        "plan", "cpu-host", "--nodes", 2, "--sizes", "1MB", "--calibration", path, "--json"
    )
    made = json.loads(result.output)
    flat = next(a for a in made["alternatives"] if a["algorithm"] == "flat_ring")
    assert flat["measured"]
    assert flat["seconds"] == pytest.approx(10e-3)
    assert {
        "algorithm", "chunks", "codec", "shards", "predicted_seconds", "bound_seconds", "gap",
        "bottleneck", "reason", "runner_up",
    } <= set(made)  # fmt: skip
    missing = run("plan", "cpu-host", "-s", "1MB", "--calibration", "/nosuch.jsonl")
    assert isinstance(missing.exception, ConfigError)
    assert "/nosuch.jsonl" in str(missing.exception)
    unknown = run("plan", "cpu-host", "-s", "1MB", "--family", "best")
    assert "'best' is no algorithm; known are flat_ring" in str(unknown.exception)


def test_help_names_whole_algorithms():
    text = run("plan", "--help").output
    for family in Family:
        assert family in text
    assert "runner_up" in text


def test_a_table_keeps_to_one_system_of_units_and_lists_what_is_out_last():
    slow = levels(preset("cpu-host", nodes=2))
    for nbytes, wrong in ((25_000_000, r"[KMG]iB"), (32 << 20, r"\d [kMG]B\b(?!/s)")):
        text = explain(plan(slow, nbytes))
        table = text[: text.index("predicted from")].rsplit("\n", 1)[0]
        assert not re.search(wrong, table)
        rows_ = [line for line in table.splitlines() if re.match(r"  [* ] \w+ ", line)][1:]
        out = ["out:" in line for line in rows_]
        assert any(out)
        assert out == sorted(out)


# --- nonsense ---


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (lambda n: replace(n, nics=()), "node1 has no NIC"),
        (lambda n: replace(n, nics=(rate(0.0),)), "node1's NIC 0"),
        (lambda n: replace(n, intra=rate(1.0, -1.0)), "node1's rank port"),
        (lambda n: replace(n, ranks=(0, 1)), "each of 0..3 once"),
    ],
)
def test_nonsense_is_one_sentence_that_names_the_place(broken, complaint):
    first, second = cluster([2, 2], 1e9, [1e9]).nodes
    with pytest.raises(PlanError, match=complaint):
        plan(Levels((first, broken(second))), 100)


def test_more_ranks_than_gpus_and_one_rank():
    result = run("plan", "dgx-a100", "--ranks-per-node", 9, "-s", "1M")
    assert "9 ranks do not fit a node with 8 GPUs" in str(result.exception)
    alone = run("plan", "cpu-host", "--ranks-per-node", 1, "-s", "1M")
    assert "There is one rank" in alone.output


@pytest.mark.slow
def test_thousands_of_gpus_are_planned():
    made = plan(dgx(2048), 1 << 30, runtime=GPU_RUNTIME)
    assert made.world_size == 16_384
    assert made.predicted_seconds >= made.bound_seconds
