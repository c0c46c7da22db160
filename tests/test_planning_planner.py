"""The choice, its reason, and the command line around it."""

import json
import os
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.planning_cases import any_levels, cluster, rate
from topo_ar.cli.main import app, main
from topo_ar.errors import PlanError
from topo_ar.planning.calibration import Calibration
from topo_ar.planning.explain import explain
from topo_ar.planning.plan import Family, Plan
from topo_ar.planning.planner import plan
from topo_ar.planning.runtime import CPU_RUNTIME, GPU_RUNTIME, NCCL_RUNTIME, runtime_of
from topo_ar.topology.levels import levels
from topo_ar.topology.model import to_json
from topo_ar.topology.presets import preset

MIB = 1 << 20
# What the runtime executes.
TWO_LEVELS = {
    Family.FLAT_RING,
    Family.HIERARCHICAL_SEQUENTIAL,
    Family.HIERARCHICAL_PIPELINED,
    Family.HIERARCHICAL_LEADER,
}


@pytest.fixture
def slow_wire():
    """2 nodes x 4 ranks on 1 Gbit/s NICs."""
    return levels(preset("cpu-host", nodes=2))


# --- the choice ---


@pytest.mark.parametrize(
    ("nbytes", "family"),
    [
        (4096, Family.HIERARCHICAL_LEADER),
        (256 << 10, Family.HIERARCHICAL_LEADER),
        (MIB, Family.HIERARCHICAL_PIPELINED),
        (25_000_000, Family.HIERARCHICAL_PIPELINED),
        (100_000_000, Family.HIERARCHICAL_PIPELINED),
    ],
)
def test_two_nodes_on_a_slow_wire(slow_wire, nbytes, family):
    assert plan(slow_wire, nbytes).family == family


def test_25_mb_on_a_slow_wire_is_near_the_wire_limit(slow_wire):
    made = plan(slow_wire, 25_000_000)
    assert made.bound_seconds == 0.2
    assert made.wire_limit_seconds == pytest.approx(0.2 / ((1500 - 52) / (1500 + 14)))
    assert 1 <= made.predicted_seconds / made.wire_limit_seconds < 1.02
    assert made.gap == made.predicted_seconds / made.bound_seconds - 1
    # Two trees send the buffer out of each of two nodes once, like a hierarchy.
    assert made.runner_up.family == Family.DOUBLE_BINARY_TREE
    flat = next(a for a in made.alternatives if a.family == Family.FLAT_RING)
    # 2 (N-1) / N against 2 (n-1) / n: 1.75 times the bytes.
    assert flat.seconds / made.wire_limit_seconds == pytest.approx(1.75, rel=0.02)
    assert made.nodes == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert made.shards.ranks == ((1, 1, 1, 1),) * 2


def test_the_leader_path_ends_earlier_on_more_nodes():
    four = levels(preset("cpu-host", nodes=4))
    for nbytes in (8 << 10, 64 << 10):
        small = plan(four, nbytes)
        leads = small.family == Family.HIERARCHICAL_LEADER
        assert leads == (nbytes <= 32 << 10)
        assert small.shards.ranks[0] == ((1, 0, 0, 0) if leads else (1, 1, 1, 1))
    assert plan(four, 8 << 10, leader_limit_nbytes=0).family != Family.HIERARCHICAL_LEADER


def test_uneven_nodes_take_the_hierarchy_that_suits_them():
    uneven = cluster([4, 2], 4e9, [125e6])
    made = plan(uneven, 25_000_000)
    assert made.family == Family.HIERARCHICAL_WEIGHTED
    assert made.shards.nodes == (1, 1)
    assert made.shards.ranks == ((1,) * 4, (1,) * 2)
    assert "The nodes hold 4 and 2 ranks; of the hierarchies only" in made.reason
    assert "Their shares are equal" in made.reason
    flat = plan(uneven, 25_000_000, families=TWO_LEVELS)
    assert flat.family == Family.FLAT_RING
    assert "only hierarchical_weighted suits them, and this version does not run it" in flat.reason
    assert flat.runner_up is None
    with pytest.raises(PlanError, match="equal numbers of ranks"):
        plan(uneven, 100, family=Family.HIERARCHICAL_PIPELINED)
    with pytest.raises(PlanError, match="this version does not run it"):
        plan(uneven, 100, family=Family.HIERARCHICAL_WEIGHTED, families=TWO_LEVELS)


def test_one_node_reduces_in_shared_memory_on_cpus_and_stays_flat_on_gpus():
    assert plan(levels(preset("cpu-host")), MIB).family == Family.HIERARCHICAL_PIPELINED
    gpus = preset("dgx-h100")
    assert runtime_of(gpus) is NCCL_RUNTIME
    flat = plan(levels(gpus), MIB, runtime=GPU_RUNTIME, families=TWO_LEVELS)
    assert flat.family == Family.FLAT_RING
    # The same bytes through the switch, in 2 steps instead of 14.
    assert plan(levels(gpus), MIB, runtime=GPU_RUNTIME).family == Family.DIRECT
    assert runtime_of(preset("cpu-host")) is CPU_RUNTIME
    for family in (Family.HIERARCHICAL_LEADER, Family.HIERARCHICAL_SEQUENTIAL):
        with pytest.raises(PlanError, match="more than one node"):
            plan(levels(gpus), 100, family=family)


def test_nothing_to_do():
    alone = plan(cluster([1], 1e9, []), 100)
    assert (alone.predicted_seconds, alone.bound_seconds, alone.gap) == (0, 0, 0)
    assert "one rank" in alone.reason
    empty = plan(cluster([2, 2], 1e9, [1e9]), 0)
    assert (empty.chunk_nbytes, empty.predicted_seconds) == ((), 0)
    assert "empty" in empty.reason


HIERARCHICAL = [family for family in Family if family.startswith("hierarchical")][:3]


def test_a_family_can_be_forced(slow_wire):
    for family in HIERARCHICAL:
        assert plan(slow_wire, MIB, family=family).family == family
    made = plan(slow_wire, 25_000_000, family=Family.FLAT_RING)
    assert "as you asked" in made.reason
    big_leader = plan(slow_wire, 25_000_000, family=Family.HIERARCHICAL_LEADER)
    assert max(big_leader.chunk_nbytes) <= 2 * MIB
    with pytest.raises(PlanError, match=r"whole buffer in one chunk.*2.097 MB"):
        plan(slow_wire, 25_000_000, family=Family.HIERARCHICAL_SEQUENTIAL)


@pytest.mark.parametrize("arguments", [{"nbytes": -1}, {"nbytes": 4, "itemsize": 0}])
def test_sizes_that_cannot_be(slow_wire, arguments):
    with pytest.raises(PlanError, match="cannot plan"):
        plan(slow_wire, **arguments)


@given(any_levels(number=float), st.integers(1, 10**9), st.sampled_from([CPU_RUNTIME, GPU_RUNTIME]))
def test_a_plan_is_never_below_its_bound(some_levels, nbytes, runtime):
    made = plan(some_levels, nbytes, runtime=runtime)
    assert made.predicted_seconds >= made.bound_seconds * (1 - 1e-12)
    assert made.wire_limit_seconds == made.bound_seconds
    assert sum(made.chunk_nbytes) == nbytes
    if len(made.chunk_nbytes) > 1 or "hierarchical" in made.family:
        assert max(made.chunk_nbytes) <= runtime.max_chunk_nbytes
    best = min(a.seconds for a in made.alternatives if not a.excluded)
    assert best <= made.predicted_seconds <= best / 0.95
    assert "WARNING" not in made.reason
    assert explain(made)


# --- reasons ---


def test_the_reason_is_checkable(slow_wire):
    reason = plan(slow_wire, 25_000_000, families=TWO_LEVELS).reason
    assert "hierarchical_pipelined in 17 chunks, the fastest that can run" in reason
    assert "No all-reduce is faster than 200 ms (proven for the nodes and ports" in reason
    assert "Weighting cannot help: of two nodes each must send the whole buffer" in reason
    assert "each node's NICs (1 x 125 MB/s)" in reason
    assert "The runner-up, flat_ring, needs 367.7 ms (1.75x)" in reason
    assert "sends 1.75 times the buffer out of a node, a hierarchy 1.00 times" in reason
    assert "At 256 KiB and below hierarchical_leader would win." in reason


def test_the_named_flips_are_true(slow_wire):
    assert plan(slow_wire, 256 << 10).family == Family.HIERARCHICAL_LEADER
    assert plan(slow_wire, 512 << 10).family == Family.HIERARCHICAL_PIPELINED
    assert (
        "At 512 KiB and above hierarchical_pipelined would win" in plan(slow_wire, 256 << 10).reason
    )


def test_a_calibration_is_believed_and_named(slow_wire):
    sizes = (5_000_000, 50_000_000)
    calibration = Calibration(
        {
            Family.FLAT_RING: tuple((n, 1e-3 + n * 9e-9) for n in sizes),
            Family.HIERARCHICAL_PIPELINED: tuple((n, 1e-3 + n * 8.4e-9) for n in sizes),
        }
    )
    made = plan(slow_wire, 25_000_000, calibration=calibration)
    assert made.family == Family.HIERARCHICAL_PIPELINED
    assert made.predicted_seconds == pytest.approx(1e-3 + 25_000_000 * 8.4e-9)
    assert "predicted from measured times" in made.reason
    assert "measured times for 2 of 8 families" in made.reason
    assert [a.family for a in made.alternatives if a.measured] == [
        Family.FLAT_RING,
        Family.HIERARCHICAL_PIPELINED,
    ]


def test_measured_times_below_the_bound_are_shouted_about(slow_wire):
    fast = Calibration({Family.FLAT_RING: ((10**7, 0.01), (10**8, 0.1))})
    made = plan(slow_wire, 25_000_000, calibration=fast)
    assert made.family == Family.FLAT_RING
    assert made.gap < 0
    assert "WARNING: the measured times beat the bound" in made.reason


def test_payload_above_nominal_is_shouted_about():
    port = rate(1e8, payload=2e8)
    two = cluster([1, 1], 1e9, [1e8])
    fast = type(two)(tuple(type(n)(n.name, n.ranks, n.intra, (port,)) for n in two.nodes))
    assert "WARNING: the payload rates beat the bound" in plan(fast, 10**7).reason


# --- the file ---


def test_plans_survive_json(slow_wire):
    made = plan(slow_wire, 25_000_000, topology_hash="0123")
    assert Plan.from_json(made.to_json()) == made
    assert plan(slow_wire, 25_000_000, topology_hash="0123").hash == made.hash
    assert plan(slow_wire, 25_000_004, topology_hash="0123").hash != made.hash
    with pytest.raises(PlanError, match="schema 9"):
        Plan.from_json(msgspec.structs.replace(made, schema=9).to_json())
    with pytest.raises(PlanError, match="not a plan"):
        Plan.from_json(b'{"world_size": "eight"}')


def test_all_processes_make_the_same_bytes(slow_wire):
    code = (
        "import sys; from topo_ar.planning.planner import plan\n"
        "from topo_ar.topology.levels import levels; from topo_ar.topology.presets import preset\n"
        "print(plan(levels(preset('cpu-host', nodes=2)), 25_000_000).hash)"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == plan(slow_wire, 25_000_000).hash


# --- the command line ---


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_plan_and_explain(tmp_path):
    path = tmp_path / "plan.json"
    result = run("plan", "cpu-host", "--nodes", 2, "-s", "25MB", "-o", path)
    assert result.exit_code == 0
    assert "* hierarchical_pipelined" in result.output
    assert "bottleneck  each node's NICs (1 x 125 MB/s)" in result.output
    again = run("explain", path)
    assert again.exit_code == 0
    assert again.output == result.output
    assert result.output.rstrip("\n") == explain(Plan.from_json(path.read_bytes()))


def test_plan_reads_a_topology_file_and_prints_json(tmp_path):
    path = tmp_path / "topology.json"
    path.write_bytes(to_json(preset("dgx-a100", nodes=2)))
    result = run("plan", path, "-s", "64K,1G", "--json")
    rows = [json.loads(line) for line in result.output.splitlines()]
    assert [row["nbytes"] for row in rows] == [64 << 10, 1 << 30]
    assert rows == [
        json.loads(line)
        for line in run(
            "plan", "dgx-a100", "--nodes", 2, "-s", "64K,1G", "--json"
        ).output.splitlines()
    ]
    # 1 GiB at 173.333 GB/s, the exact optimum of two DGX A100.
    assert rows[1]["bound_seconds"] == pytest.approx((1 << 30) / (520e9 / 3))
    assert rows[1]["algorithm"] == "hierarchical_pipelined"


def test_presets_can_be_shaped():
    result = run(
        "plan", "cpu-host", "--nodes", 2, "--ranks-per-node", 2, "--nic", "1gbit,200mbit",
        "-s", "25MB", "--family", "flat_ring", "--json",
    )  # fmt: skip
    made = Plan.from_json(result.output)
    assert made.world_size == 4
    assert made.family == Family.FLAT_RING
    assert made.bound_seconds == pytest.approx(25e6 / 150e6)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["plan", "nosuch", "-s", "1M"], "'nosuch' is neither a file nor a preset"),
        (["plan", "cpu-host", "-s", "1X"], "'1X' is not a size"),
        (["plan", "cpu-host", "--nodes", "0", "-s", "1M"], "nodes is 0"),
        (["plan", "cpu-host", "-s", "1M,2M", "-o", "x.json"], "can hold one plan"),
        (["plan", "/", "-s", "1M"], "/: is a directory; give the file in it"),
        (["plan", "cpu-host", "-s", "1M", "-o", "/nosuch/x"], "cannot write /nosuch/x"),
        (["plan", __file__, "-s", "1M", "--nodes", "2"], "leave them out"),
        (["plan", __file__, "-s", "1M"], "no known format"),
        (["explain", "/nosuch.json"], "cannot read /nosuch.json"),
        (["explain", __file__], "not a plan"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(monkeypatch, capsys, arguments, complaint):
    monkeypatch.setattr(sys, "argv", ["topo-ar", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert complaint in captured.err


def test_planning_imports_nothing_heavy():
    code = (
        "import sys; sys.argv[1:] = ['plan', 'cpu-host', '--nodes', '2', '-s', '25MB']\n"
        "from topo_ar.cli.main import app\n"
        "app(standalone_mode=False)\n"
        "heavy = {'torch', 'scipy', 'networkx', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_one_node_of_cpu_ranks_gets_as_few_chunks_as_its_slots_allow():
    levels_of_one = cluster([8], 10e9, [1e9])
    for nbytes, count in ((MIB, 1), (4 * MIB, 2), (25_000_000, 12)):
        made = plan(levels_of_one, nbytes, runtime=CPU_RUNTIME, itemsize=4)
        assert made.family is Family.HIERARCHICAL_PIPELINED
        assert len(made.chunk_nbytes) == count
        assert max(made.chunk_nbytes) <= CPU_RUNTIME.max_chunk_nbytes
        assert sum(made.chunk_nbytes) == nbytes
