"""What is written for NCCL: tuner rules and graph files."""

from itertools import pairwise

import msgspec
import pytest

from tests.foreign import foreign
from topo_ar.errors import PlanError
from topo_ar.planning.export import nccl_graph, nccl_tuner
from topo_ar.planning.nccl_machine import nccl_machine
from topo_ar.planning.nccl_search import nccl_job
from topo_ar.planning.nccl_tuning import choice
from topo_ar.topology.presets import preset
from topo_ar.topology.readers import read


def with_capability(topology, sm):
    devices = tuple(
        msgspec.structs.replace(device, attributes={**device.attributes, "sm": sm})
        if device.kind == "gpu"
        else device
        for device in topology.devices
    )
    return msgspec.structs.replace(topology, devices=devices)


A100_PAIR = with_capability(preset("dgx-a100", nodes=2), 80)


def test_a_topology_in_nccls_terms():
    machine = nccl_machine(A100_PAIR)
    assert (machine.num_nodes, machine.ranks_per_node, machine.compute_capability) == (2, 8, 80)
    assert machine.gpu_bytes_per_s == 240e9
    assert list(machine.nic_bytes_per_s) == [25e9] * 8
    assert machine.nvlink
    assert not machine.nvls
    assert nccl_machine(with_capability(preset("dgx-h100"), 90)).nvls


def test_a_captured_machine_gives_the_channels_of_its_own_log():
    found = read(foreign("nccl-xml/perlmutter-4x-a100-4-slingshot.xml"))
    job = nccl_job(nccl_machine(found))
    assert (job.ring.count, job.ring.intra) == (12, 20e9)


def test_machines_that_the_model_is_not_for():
    with pytest.raises(PlanError, match=r"node0/cpu0 is not known.*attribute sm"):
        nccl_machine(preset("cpu-host"))
    odd = with_capability(preset("dgx-a100", nodes=2), 80)
    odd = msgspec.structs.replace(odd, ranks=odd.ranks[:-1])
    with pytest.raises(PlanError, match="nodes differ"):
        nccl_machine(odd)


def pick(nbytes):
    best = choice(nccl_job(nccl_machine(A100_PAIR)), nbytes)
    return best.algorithm, best.protocol


def test_rules_say_what_the_model_says_at_every_edge():
    rules = nccl_tuner.rules(pick)
    assert rules[0].min_nbytes == 0
    assert rules[-1].max_nbytes == 4294967295
    for rule in rules:
        for nbytes in (rule.min_nbytes, rule.max_nbytes):
            assert (rule.algorithm, rule.protocol) == pick(nbytes)
    for before, after in pairwise(rules):
        assert after.min_nbytes == before.max_nbytes + 1
        assert (before.algorithm, before.protocol) != (after.algorithm, after.protocol)


def test_tuner_rules_survive_the_file():
    rules = nccl_tuner.rules(pick)
    text = nccl_tuner.to_csv(rules, 2, 16)
    first, second = text.splitlines()[:2]
    assert first == "# " + ",".join(nccl_tuner.COLUMNS)
    assert second.startswith("allreduce,0,")
    assert second.endswith(",-1,2,16,-1,-1")
    assert nccl_tuner.from_csv(text) == rules


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("allreduce,1,5,ring,ll,-1,2,16,-1,-1", "line 1: must begin at 0"),
        ("allreduce,0,5,rings,ll,-1,2,16,-1,-1", "line 1: not a rule"),
        ("allreduce,0,5", "line 1: not a rule"),
        ("broadcast,0,5,ring,ll,-1,2,16,-1,-1", "line 1: expected an allreduce rule"),
    ],
)
def test_tuner_rules_that_are_none(line, message):
    with pytest.raises(PlanError, match=message):
        nccl_tuner.from_csv(line)


def test_graph_file_of_two_nodes():
    ring, tree = nccl_graph.graphs(A100_PAIR)
    assert (ring.pattern, tree.pattern) == (4, 1)
    assert (ring.type_intra, ring.intra, ring.inter) == ("NVL", 24e9, 24e9)
    assert len(ring.channels) == 8
    assert sorted(channel.nic for channel in ring.channels) == list(range(8))
    for channel in ring.channels:
        assert sorted(channel.gpus) == list(range(8))
        assert channel.gpus[0] // 2 == channel.nic // 2  # both behind one PCIe switch
    assert nccl_graph.from_xml(nccl_graph.to_xml([ring, tree])) == [ring, tree]


def test_graph_file_in_another_order():
    order = [0, 2, 4, 6, 7, 5, 3, 1]
    ring, _ = nccl_graph.graphs(A100_PAIR, order)
    for channel in ring.channels:
        at = order.index(channel.gpus[0])
        assert list(channel.gpus) == order[at:] + order[:at]
    with pytest.raises(PlanError, match=r"local ranks 0\.\.7 once"):
        nccl_graph.graphs(A100_PAIR, [0, 1])


def test_a_published_graph_file_is_read():
    found = nccl_graph.from_xml(foreign("nccl-xml/azure-ncv4-graph.xml").read_text())
    assert [(graph.number, graph.pattern, len(graph.channels)) for graph in found] == [
        (0, 4, 2), (1, 1, 4), (2, 3, 4)
    ]  # fmt: skip
    assert [channel.gpus for channel in found[0].channels] == [(0, 1, 2, 3), (0, 3, 2, 1)]
    assert found[0].type_intra == "SYS"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<graphs", "not an NCCL graph file"),
        ("<system/>", "root is <system>"),
        ('<graphs><graph pattern="4"/></graphs>', "lacks or garbles 'id'"),
        (
            '<graphs><graph id="0" pattern="4"><channel><gpu dev="0"/><gpu dev="0"/></channel>'
            "</graph></graphs>",
            "graph 0, channel 0 visits",
        ),
    ],
)
def test_graph_files_that_are_none(text, message):
    with pytest.raises(PlanError, match=message):
        nccl_graph.from_xml(text)
