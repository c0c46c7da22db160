"""MSCCL files and Chakra traces of every family, replayed; and what is refused."""

import re
from xml.etree.ElementTree import fromstring

import pytest
from typer.testing import CliRunner

from tests.foreign import foreign
from tests.schedule_cases import in_order, make_plan
from topo_ar.cli.main import app
from topo_ar.errors import ConfigError, PlanError
from topo_ar.planning.export import chakra, nccl_graph, nccl_tuner
from topo_ar.planning.export.msccl_check import check
from topo_ar.planning.export.msccl_xml import to_xml
from topo_ar.planning.export.single_chunk import explicit, single_chunk
from topo_ar.planning.export.transfers import transfers
from topo_ar.planning.lowering import lower
from topo_ar.planning.plan import Family, Shards
from topo_ar.planning.schedule import Op
from topo_ar.planning.traffic import bytes_sent

F = Family


def make(family, sizes, nodes=None, **third):
    shards = Shards(nodes, tuple((1,) * size for size in sizes)) if nodes else None
    return make_plan(family, in_order(sizes), 64 * sum(sizes), itemsize=1, shards=shards, **third)


PLANS = {
    "ring": make(F.FLAT_RING, [4, 4]),
    "ring of three": make(F.FLAT_RING, [3]),
    "tree": make(F.DOUBLE_BINARY_TREE, [2, 2, 2]),
    "tree of one node": make(F.DOUBLE_BINARY_TREE, [5]),
    "halving": make(F.HALVING_DOUBLING, [4, 4]),
    "halving with surplus": make(F.HALVING_DOUBLING, [3, 3]),
    "direct": make(F.DIRECT, [3, 2]),
    "two nodes": make(F.HIERARCHICAL_PIPELINED, [4, 4]),
    "three nodes": make(F.HIERARCHICAL_PIPELINED, [2, 2, 2]),
    "leader": make(F.HIERARCHICAL_LEADER, [2, 2, 2]),
    "weighted": make(F.HIERARCHICAL_WEIGHTED, [4, 2, 2], nodes=(1, 0, 0)),
    "weighted shares": make(F.HIERARCHICAL_WEIGHTED, [2, 2, 2, 2], nodes=(2, 2, 1, 2)),
    "racks": make(F.HIERARCHICAL_THREE_LEVEL, [2] * 4, racks=((0, 1), (2, 3))),
    "islands": make(F.HIERARCHICAL_THREE_LEVEL, [4, 4], islands=((0, 1), (2, 3), (4, 5), (6, 7))),
}


@pytest.mark.parametrize("name", PLANS)
def test_an_msccl_file_is_an_all_reduce(name):
    text = to_xml(single_chunk(PLANS[name]), name, max_nbytes=1 << 20)
    assert check(text) == PLANS[name].world_size
    algo = fromstring(text)
    assert (algo.attrib["coll"], algo.attrib["inplace"], algo.attrib["maxBytes"]) == (
        "allreduce",
        "1",
        str(1 << 20),
    )


def test_one_rank_has_no_file():
    with pytest.raises(PlanError, match="each of the 1 ranks"):
        check(to_xml(single_chunk(make(F.FLAT_RING, [1])), "one"))


@pytest.mark.parametrize("name", PLANS)
def test_messages_between_nodes_carry_the_bytes_that_were_planned(name):
    plan = PLANS[name]
    schedule = explicit(plan, 4)
    node_of = {rank: i for i, node in enumerate(plan.nodes) for rank in node}
    sent = [0] * schedule.world_size
    for transfer in transfers(schedule):
        if node_of[transfer.source] != node_of[transfer.target]:
            sent[transfer.source] += (transfer.end - transfer.begin) * 4
    assert tuple(sent) == bytes_sent(schedule, plan.nodes).sent_between


def steps_of(text):
    return re.findall(r"<step [^>]*/>", text)


RING = to_xml(single_chunk(PLANS["ring of three"]), "ring")
NODES = to_xml(single_chunk(PLANS["two nodes"]), "nodes")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<algo", "not an MSCCL file"),
        ('<algo name="x"/>', "algo lacks proto, nchannels"),
        (RING.replace('outofplace="0" ', ""), "algo lacks outofplace"),
        (RING.replace(' hasdep="1"', "", 1), "lacks hasdep, which executors ask for"),
        (RING.replace('coll="allreduce"', 'coll="allgather"'), "only an <algo> with coll"),
        (RING.replace(steps_of(RING)[0], ""), "out of order or too long"),
        (RING.replace('type="rrc"', 'type="r"', 1), "ends without all contributions"),
        (RING.replace('type="rrc"', 'type="re"', 1), "is of type 're'"),
        ('type="nop"'.join(RING.rsplit('type="s"', 1)), "wait for each other"),
    ],
)
def test_msccl_files_that_are_wrong(text, message):
    with pytest.raises(PlanError, match=message):
        check(text)


def test_a_dropped_dependency_is_found():
    found = 0
    for step in steps_of(NODES):
        if 'type="nop"' in step:
            loose = step.replace(
                step, re.sub(r'depid="\d+" deps="\d+"', 'depid="-1" deps="-1"', step)
            )
            try:
                check(NODES.replace(step, loose))
            except PlanError:
                found += 1
    assert found > 0


def test_limits_of_executors():
    wide = make(F.DIRECT, [60])
    with pytest.raises(PlanError, match="118 thread blocks, and executors have 108"):
        to_xml(single_chunk(wide), "wide")
    uneven = make(F.HIERARCHICAL_WEIGHTED, [1, 1, 1], nodes=(1000003, 999983, 7))
    with pytest.raises(PlanError, match="plan with rounder weights"):
        single_chunk(uneven)
    with pytest.raises(PlanError, match="ring expanded"):
        transfers(lower(PLANS["ring"], PLANS["ring"].nbytes, 1))


# --- Chakra ---


def run_traces(traces):
    """Run the nodes of all ranks in any order their dependencies allow; return additions."""
    pending = [list(chakra.read_trace(trace)[1]) for trace in traces]
    done = [set() for _ in traces]
    sent, additions = set(), [0] * len(traces)
    moving = True
    while moving:
        moving = False
        for rank, nodes in enumerate(pending):
            for node in list(nodes):
                values = {a.name: a.int64_val for a in node.attr}
                if not done[rank].issuperset(node.data_deps):
                    continue
                if node.type == chakra.COMM_RECV_NODE and values["comm_tag"] not in sent:
                    continue
                if node.type == chakra.COMM_SEND_NODE:
                    assert values["comm_src"] == rank
                    sent.add(values["comm_tag"])
                additions[rank] += values.get("num_ops", 0)
                done[rank].add(node.id)
                nodes.remove(node)
                moving = True
    assert not any(pending), "nodes wait for each other"
    return additions


@pytest.mark.parametrize("name", PLANS)
def test_traces_run_to_their_end(name):
    plan = PLANS[name]
    schedule = explicit(plan, 4)
    traces = chakra.to_traces(schedule)
    assert len(traces) == plan.world_size
    version, nodes = chakra.read_trace(traces[0])
    assert version == "0.0.4"
    assert [node.id for node in nodes] == list(range(len(nodes)))
    additions = run_traces(traces)
    if all(step.op is not Op.EXCHANGE for step in schedule.steps):
        # Every element is added by each rank but one; an exchange adds it at both ends.
        assert sum(additions) == (plan.world_size - 1) * plan.nbytes // 4


def test_what_is_no_trace():
    trace = chakra.to_traces(explicit(PLANS["ring of three"], 4))[0]
    with pytest.raises(ConfigError, match="not a Chakra trace"):
        chakra.read_trace(trace[:-3])
    with pytest.raises(ConfigError, match="it is empty"):
        chakra.read_trace(b"")


# --- the command line ---


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_export_writes_each_format(tmp_path):
    plan_file = tmp_path / "plan.json"
    plan_file.write_bytes(PLANS["weighted"].to_json())
    xml = tmp_path / "plan.xml"
    assert "found right" in run("export", plan_file, "--to", "msccl", "-o", xml).output
    assert check(xml.read_text()) == 8
    done = run("export", plan_file, "--to", "chakra", "-o", tmp_path / "plan")
    assert done.exit_code == 0, done.output
    assert len(list(tmp_path.glob("plan.*.et"))) == 8
    csv = tmp_path / "tuner.csv"
    source = foreign("nccl-xml/perlmutter-4x-a100-4-slingshot.xml")
    assert "NCCL_TUNER_CONFIG_FILE" in run("export", source, "--to", "nccl-tuner", "-o", csv).output
    assert nccl_tuner.from_csv(csv.read_text())[-1].max_nbytes == 4294967295
    graph = tmp_path / "graph.xml"
    run("export", source, "--to", "nccl-graph", "-o", graph)
    assert len(nccl_graph.from_xml(graph.read_text())) == 2


def test_export_plans_a_topology_of_a_size(tmp_path):
    xml = tmp_path / "plan.xml"
    done = run(
        "export", "cpu-host", "--nodes", 2, "-s", "1MB", "--family", "flat_ring", "--to", "msccl",
        "-o", xml,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert check(xml.read_text()) == 8


def test_export_says_what_is_missing(tmp_path):
    done = run("export", "cpu-host", "--to", "msccl", "-o", tmp_path / "x")
    assert isinstance(done.exception, ConfigError)
    assert "cpu-host is no plan; give a topology a --size" in str(done.exception)
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    done = run("export", bad, "--to", "msccl", "-o", tmp_path / "x")
    assert "bad.json: not a plan" in str(done.exception)
    done = run("export", "cpu-host", "-s", "1K", "--to", "msccl", "-o", tmp_path / "no" / "x")
    assert "cannot write" in str(done.exception)
