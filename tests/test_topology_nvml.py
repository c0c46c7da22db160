"""What is concluded from NVML's answers on machines that are not here.

The answers are composed after NVML's documentation and the captures of other tools; each goes
through its file form first.
"""

import copy
import ctypes

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from topo_ar.cli.main import app
from topo_ar.errors import TopologyError
from topo_ar.topology.cuda_order import cuda_order, visibility_note
from topo_ar.topology.levels import levels
from topo_ar.topology.model import DeviceKind, LinkKind, Source, from_json, to_json
from topo_ar.topology.nvml import conclude
from topo_ar.topology.nvml_answers import (
    FabricAnswer,
    Failure,
    GpuAnswer,
    LinkAnswer,
    NvmlAnswers,
    PairAnswer,
    read_answers,
    write_answers,
)
from topo_ar.topology.nvml_ask import ask_nvml
from topo_ar.topology.probe import probe
from topo_ar.topology.summary import summarize

NO_MORE = Failure("nvmlDeviceGetNvLinkState", 2, "Invalid Argument")
NOT_SUPPORTED = Failure("nvmlDeviceGetNvLinkState", 3, "Not Supported")
SWITCH, GPU = 2, 0
OK, CNS, GNS = 0, 1, 2
CLUSTER = "0123456789abcdef0123456789abcdef"


def busid(index):
    return f"00000000:{16 + index:02x}:00.0"


def switched(count, speed, version):
    return tuple(LinkAnswer(k, 1, 1, version, SWITCH, None, speed) for k in range(count))


def direct(*peers, speed=14062, version=5):
    """One link to each of `peers`, by index."""
    return tuple(
        LinkAnswer(k, 1, 1, version, GPU, busid(peer), speed) for k, peer in enumerate(peers)
    )


def gpu(index, name, capability, links=(), **more):
    end = NO_MORE if links else NOT_SUPPORTED
    return GpuAnswer(
        index,
        busid(index),
        f"GPU-{index:08x}",
        name,
        capability,
        links=links,
        links_end=end,
        **more,
    )


def machine(gpus, p2p=OK, **more):
    pairs = tuple(
        PairAnswer(a.index, b.index, 50, p2p, p2p) for a in gpus for b in gpus if a.index < b.index
    )
    return NvmlAnswers(tuple(gpus), pairs, count=len(gpus), driver="580.65.06", **more)


def dgx(name, capability, count, speed, version, **more):
    gpus = [gpu(i, name, capability, switched(count, speed, version), **more) for i in range(8)]
    return machine(gpus)


def healthy(clique=1, health=0b10_1010_1010, state=3):
    return FabricAnswer(CLUSTER, clique, state, health)


def through_a_file(answers, tmp_path):
    path = tmp_path / "nvml.json"
    write_answers(answers, path)
    assert read_answers(path) == answers
    return conclude(read_answers(path), "node0")


def nvlinks(found):
    return [link for link in found.links.links if link.kind is LinkKind.NVLINK]


@pytest.mark.parametrize(
    ("answers", "count", "nominal", "effective"),
    [
        (dgx("NVIDIA A100-SXM4-80GB", (8, 0), 12, 25000, 5), 12, 300e9, 240e9),
        (dgx("NVIDIA H100 80GB HBM3", (9, 0), 18, 26562, 6), 18, 450e9, 370.8e9),
        (dgx("NVIDIA B200", (10, 0), 18, 53125, 7), 18, 900e9, 721.8e9),
    ],
)
def test_eight_gpus_on_nvswitches(answers, count, nominal, effective, tmp_path):
    found = through_a_file(answers, tmp_path)
    assert len(found.gpus) == 8
    assert [switch.id for switch in found.links.switches] == ["node0/nvswitch"]
    assert {link.count for link in nvlinks(found)} == {count}
    for link in nvlinks(found):
        assert link.nominal.value == pytest.approx(nominal)
        assert link.effective.value == pytest.approx(effective)
        assert link.nominal.source is Source.NVML
    assert found.notes == ()


def test_two_cards_with_a_bridge(tmp_path):
    cards = [gpu(i, "NVIDIA GeForce RTX 3090", (8, 6), direct(*[1 - i] * 4)) for i in (0, 1)]
    found = through_a_file(machine(cards), tmp_path)
    [link] = nvlinks(found)
    assert {link.a, link.b} == {"node0/gpu0", "node0/gpu1"}
    assert (link.count, link.nominal.value, link.effective.value) == (4, 56.248e9, 48e9)


def test_one_bridge_among_three_cards(tmp_path):
    cards = [gpu(i, "NVIDIA RTX A6000", (8, 6), direct(*[1 - i] * 4)) for i in (0, 1)]
    idle = tuple(LinkAnswer(k, 0) for k in range(4))
    found = through_a_file(machine([*cards, gpu(2, "NVIDIA RTX A6000", (8, 6), idle)]), tmp_path)
    assert len(nvlinks(found)) == 1
    assert "node0/gpu2: 4 NVLinks are inactive" in found.notes


def test_cards_without_nvlink_and_without_peer_access(tmp_path):
    cards = [gpu(i, "NVIDIA GeForce RTX 4090", (8, 9)) for i in range(4)]
    found = through_a_file(machine(cards, GNS), tmp_path)
    assert found.links.links == ()
    [note] = found.notes
    assert note.startswith("no peer access between 6 pairs of GPUs (0-1, 0-2,")
    assert "the GPU does not support it" in note


def test_mig_instances_have_no_nvlink(tmp_path):
    gpus = [
        gpu(i, "NVIDIA A100-SXM4-80GB", (8, 0), switched(12, 25000, 5), mig=int(i == 0))
        for i in range(2)
    ]
    found = through_a_file(machine(gpus), tmp_path)
    assert [link.a for link in nvlinks(found)] == ["node0/gpu1"]
    assert found.gpus[0].attributes["mig"] is True
    assert any("node0/gpu0: MIG is on" in note for note in found.notes)


def test_a_container_that_may_not_see_the_switches(tmp_path):
    hidden = tuple(
        LinkAnswer(
            k,
            1,
            1,
            6,
            Failure("nvmlDeviceGetNvLinkRemoteDeviceType", 3, "Not Supported"),
            "ffffffff:ff:ff.0",
            26562,
        )
        for k in range(18)
    )
    found = through_a_file(
        machine([gpu(i, "NVIDIA H100", (9, 0), hidden) for i in range(2)]), tmp_path
    )
    assert [(link.b, link.count) for link in nvlinks(found)] == [("node0/nvswitch", 18)] * 2


def test_a_gpu_whose_links_cannot_be_read_is_named(tmp_path):
    lost = tuple(
        LinkAnswer(k, Failure("nvmlDeviceGetNvLinkState", 999, "Unknown Error")) for k in range(18)
    )
    gpus = [gpu(i, "NVIDIA GB300", (10, 3), switched(18, 53125, 7)) for i in range(3)]
    found = through_a_file(machine([*gpus, gpu(3, "NVIDIA GB300", (10, 3), lost)]), tmp_path)
    assert any(
        "node0/gpu3 links 0, 1, 2, 3, 4, 5, 6, 7 and 10 more: nvmlDeviceGetNvLinkState failed "
        "(Unknown Error); whether it works is not known" in note
        for note in found.notes
    )
    assert any(
        "node0/gpu3: shows 0 NVLink or XGMI links, others of its node 18" in n for n in found.notes
    )


def test_links_that_carry_nothing_now_and_slower_ones(tmp_path):
    links = (
        *switched(2, 26562, 6),
        LinkAnswer(2, 2, 1, 6, SWITCH, None, 26562),
        LinkAnswer(3, 1, 0, 6, SWITCH, None, 26562),
        LinkAnswer(4, 1, 1, 6, SWITCH, None, 13281),
    )
    found = through_a_file(machine([gpu(0, "NVIDIA H100", (9, 0), links)]), tmp_path)
    [link] = nvlinks(found)
    assert link.count == 3
    assert link.nominal.value == pytest.approx(3 * 13.281e9)
    assert "node0/gpu0 link 2: is in state 2 and carries nothing now" in found.notes
    assert any("link 3: does not support peer access" in note for note in found.notes)
    assert any("differ in speed (13.281, 25 GB/s)" in note for note in found.notes)


def test_fabric_cliques_health_and_state(tmp_path):
    links = switched(18, 53125, 7)
    gpus = [
        gpu(0, "NVIDIA GB200", (10, 0), links, fabric=healthy(1)),
        gpu(1, "NVIDIA GB200", (10, 0), links, fabric=healthy(2, health=0b101_1001_0101)),
        gpu(2, "NVIDIA GB200", (10, 0), links, fabric=healthy(2, state=2)),
        gpu(3, "NVIDIA GB200", (10, 0), links, fabric=FabricAnswer("0" * 32, 0, 0)),
    ]
    found = through_a_file(machine(gpus), tmp_path)
    text = "\n".join(found.notes)
    assert "GPUs [0] and [1, 2] are in 2 NVLink fabric cliques: there is no NVLink" in text
    assert "node0/gpu1: the NVLink fabric says that its bandwidth is degraded" in text
    assert "node0/gpu1: the NVLink fabric says that a route is being recovered" in text
    assert "node0/gpu1: the NVLink fabric says that it has too few NVLinks" in text
    assert "node0/gpu2: registration with the NVLink fabric is in progress" in text
    assert "node0/gpu0:" not in text
    assert [g.attributes.get("fabric_clique") for g in found.gpus] == [1, 2, 2, None]


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (Failure("import pynvml", -1), "pynvml is not installed, so no NVIDIA GPU was looked for"),
        (Failure("nvmlInit", 12), "no NVML library on this machine"),
        (Failure("nvmlInit", 9, "Driver Not Loaded"), "nvmlInit failed (Driver Not Loaded), so"),
        (Failure("nvmlInit", 18, "Driver/library version mismatch"), "what GPUs there are is not"),
    ],
)
def test_a_machine_that_cannot_be_asked(failure, expected, tmp_path):
    found = through_a_file(NvmlAnswers(absent=failure), tmp_path)
    assert found.gpus == ()
    [note] = found.notes
    assert expected in note


def test_a_count_or_a_gpu_that_is_refused(tmp_path):
    refused = Failure("nvmlDeviceGetHandleByIndex", 4, "Insufficient Permissions")
    found = through_a_file(
        NvmlAnswers((GpuAnswer(0, refused), gpu(1, "NVIDIA L4", (8, 9))), count=2), tmp_path
    )
    assert [g.device for g in found.gpus] == ["node0/gpu1"]
    assert any("node0/gpu0: nvmlDeviceGetHandleByIndex failed" in note for note in found.notes)
    unknown = Failure("nvmlDeviceGetCount", 999, "Unknown Error")
    assert conclude(NvmlAnswers(count=unknown), "node0").notes == (
        "this machine: nvmlDeviceGetCount failed (Unknown Error); what it would say is not known",
    )


# --- CUDA's order ---


def visible(value, order="PCI_BUS_ID", names=("NVIDIA A100",) * 4):
    gpus = [gpu(i, name, (8, 0)) for i, name in enumerate(names)]
    return machine(gpus, visible=value, order=order)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, {0: 0, 1: 1, 2: 2, 3: 3}),
        ("2,0", {2: 0, 0: 1}),
        ("GPU-00000003,1", {3: 0, 1: 1}),
        ("1,-1,2", {1: 0}),
        ("1,1", {}),
        ("2,GPU-00000002", {}),
        ("01,+2,3x", {1: 0, 2: 1, 3: 2}),
        ("x,1", {}),
        ("1,,2", {1: 0}),
        ("9" * 30, {}),
        ("MIG-0123", {}),
        ("", {}),
        ("GPU-0000000", {}),  # the beginning of several
        (" 3 , 2", {3: 0, 2: 1}),
    ],
)
def test_visible_devices(value, expected):
    assert cuda_order(visible(value)) == expected


def test_an_order_that_cannot_be_told():
    mixed = visible(None, None, ("NVIDIA A100", "NVIDIA T4"))
    assert cuda_order(mixed) == {}
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in visibility_note(mixed)
    assert visibility_note(visible(None)) == ""
    assert "cuda:0 is gpu2" in visibility_note(visible("2"))
    assert "no whole GPU; MIG instances" in visibility_note(visible("MIG-1"))


def test_logical_and_physical_numbers_are_kept(tmp_path):
    found = through_a_file(visible("2,0"), tmp_path)
    assert [g.attributes.get("cuda_index") for g in found.gpus] == [1, None, 0, None]


# --- the whole probe on answers ---


def test_memory_affinity_helps_where_the_kernel_does_not_know(tmp_path):
    sysfs = tmp_path / "sys"
    for node in (0, 1):
        path = sysfs / "devices" / "system" / "node" / f"node{node}"
        path.mkdir(parents=True)
        (path / "cpulist").write_text("0-7\n")
    device = sysfs / "devices" / "pci0000:00" / "0000:10:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("-1\n")
    (sysfs / "bus" / "pci" / "devices").mkdir(parents=True)
    (sysfs / "bus" / "pci" / "devices" / "0000:10:00.0").symlink_to(device)
    answers = machine([gpu(0, "NVIDIA H100", (9, 0), memory_numa=(1,))])
    topology = probe(sysfs=sysfs, nvml=answers)
    assert topology.devices[2].numa == 1
    assert "node0/gpu0: NUMA node 1 is NVML's word; /sys does not know" in topology.notes


def test_grace_and_gpu_meet_over_c2c(tmp_path):
    (tmp_path / "devices" / "system" / "node" / "node0").mkdir(parents=True)
    (tmp_path / "devices" / "system" / "node" / "node0" / "cpulist").write_text("0-71\n")
    answers = machine([gpu(0, "NVIDIA GB300", (10, 3), c2c_links=5, c2c_megabytes_per_s=44712)])
    topology = probe(sysfs=tmp_path, nvml=answers)
    [link] = [link for link in topology.links if link.kind is LinkKind.C2C]
    assert (link.b, link.count, link.nominal.value) == ("node0/numa0", 5, pytest.approx(223.56e9))


def test_pci_that_is_not_shown_is_said(tmp_path):
    topology = probe(sysfs=tmp_path, nvml=machine([gpu(i, "NVIDIA A2", (8, 6)) for i in range(2)]))
    notes = [note for note in topology.notes if "not under /sys (a container or WSL)" in note]
    assert len(notes) == 1
    assert "node0/gpu0, node0/gpu1" in notes[0]
    # Without /sys there is no word of NUMA node 0.
    assert [device.id for device in topology.devices if device.kind is DeviceKind.CPU] == []
    assert {device.numa for device in topology.devices} == {None}
    with pytest.raises(TopologyError, match="no link with a known rate"):
        levels(topology)


def test_without_sysfs_nvml_tells_the_rate_of_pcie(tmp_path):
    gpus = [gpu(i, "NVIDIA L4", (8, 9), pcie_generation=4, pcie_width=16) for i in range(2)]
    topology = probe(sysfs=tmp_path, nvml=machine(gpus))
    port = levels(topology).nodes[0].intra
    assert (port.payload, port.source) == (24e9, Source.NVML)


@pytest.mark.parametrize(("generation", "width"), [(0, 16), (9, 16), (4, 0), (4, 9999)])
def test_a_pcie_link_that_cannot_be_is_unknown(tmp_path, generation, width):
    gpus = [gpu(0, "NVIDIA L4", (8, 9), pcie_generation=generation, pcie_width=width)]
    topology = probe(sysfs=tmp_path, nvml=machine(gpus))
    assert [link.nominal for link in topology.links] == [None]


@pytest.mark.parametrize(
    ("end", "known"),
    [
        (NOT_SUPPORTED, True),
        (NO_MORE, True),
        (Failure("nvmlDeviceGetNvLinkState", 999, "Unknown Error"), False),
        (Failure("nvmlDeviceGetNvLinkState", -1, "the binding does not have it"), False),
        (None, False),
    ],
)
def test_no_nvlink_only_where_nvml_says_so(end, known, tmp_path):
    gpus = [msgspec.structs.replace(gpu(i, "NVIDIA A2", (8, 6)), links_end=end) for i in range(2)]
    found = through_a_file(machine(gpus), tmp_path)
    assert [g.attributes.get("links_known") for g in found.gpus] == [None if known else False] * 2
    assert any("whether it has NVLink is not known" in note for note in found.notes) is not known
    [pair] = summarize(probe(sysfs=tmp_path, nvml=machine(gpus)), "probe")["gpu_pairs"]
    assert pair["link_count"] == (0 if known else None)
    assert pair["p2p"] == "OK"


def test_failures_of_many_links_are_one_note(tmp_path):
    lost = Failure("nvmlDeviceGetNvLinkState", 15, "GPU is lost")
    links = tuple(LinkAnswer(k, lost) for k in range(36))
    found = through_a_file(machine([gpu(0, "NVIDIA H100", (9, 0), links)]), tmp_path)
    assert len(found.notes) == 1
    assert "links 0, 1, 2, 3, 4, 5, 6, 7 and 28 more: nvmlDeviceGetNvLinkState" in found.notes[0]
    assert found.gpus[0].attributes["links_known"] is False


def test_geforce_cards_that_say_ok_are_not_believed_blindly(tmp_path):
    ada = machine([gpu(i, "NVIDIA GeForce RTX 4090", (8, 9)) for i in range(2)])
    assert any("copies may hang" in note for note in through_a_file(ada, tmp_path).notes)
    ampere = machine([gpu(i, "NVIDIA GeForce RTX 3090", (8, 6)) for i in range(2)])
    assert not any("copies may hang" in note for note in through_a_file(ampere, tmp_path).notes)
    refused = machine([gpu(i, "NVIDIA GeForce RTX 4090", (8, 9)) for i in range(2)], p2p=GNS)
    assert not any("copies may hang" in note for note in through_a_file(refused, tmp_path).notes)
    assert through_a_file(refused, tmp_path).gpus[0].attributes["p2p"] == "gpu1=GNS"


def test_recordings_that_are_none(tmp_path):
    path = tmp_path / "x.json"
    with pytest.raises(TopologyError, match=r"x\.json: cannot be read"):
        read_answers(path)
    path.write_text('{"gpus": [{"index": "zero"}]}')
    with pytest.raises(TopologyError, match=r"not a recording of NVML: .*record-nvml"):
        read_answers(path)
    path.write_bytes(msgspec.json.encode(NvmlAnswers(schema=9)))
    with pytest.raises(TopologyError, match="schema 9; this version reads 1"):
        read_answers(path)
    with pytest.raises(TopologyError, match="cannot write"):
        write_answers(NvmlAnswers(), tmp_path / "no" / "where.json")


ODD = [-1, 0, 7, 1 << 40, 1 << 60, "", "zz:00.0", "²", None, [], {}, True, 1.5, "9" * 5000]


def places(value, path=()):
    """Return the path of everything inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    found = [path]
    for key, below in inside if isinstance(value, (dict, list)) else ():
        found += places(below, (*path, key)) if isinstance(below, (dict, list)) else [(*path, key)]
    return found


RECORDING = msgspec.to_builtins(
    machine(
        [
            gpu(0, "NVIDIA H100", (9, 0), switched(2, 26562, 6), fabric=healthy()),
            gpu(1, "NVIDIA H100", (9, 0), direct(0), mig=0, memory_numa=(0,), pcie_generation=5),
        ],
        visible="0,1",
    )
)


@settings(max_examples=300)
@given(st.sampled_from(places(RECORDING)[1:]), st.sampled_from(ODD))
def test_a_spoiled_recording_is_refused_or_concluded_from(tmp_path_factory, place, odd):
    spoiled = copy.deepcopy(RECORDING)
    here = spoiled
    for key in place[:-1]:
        here = here[key]
    here[place[-1]] = odd
    path = tmp_path_factory.getbasetemp() / "spoiled.json"
    path.write_bytes(msgspec.json.encode(spoiled))
    try:
        topology = probe(sysfs=path, nvml=read_answers(path))
    except TopologyError as error:
        message = str(error)
    else:
        assert from_json(to_json(topology)) == topology
        return
    assert message.startswith((f"{path}: ", "topology 'this machine'"))


def test_a_gpu_is_recorded_once(tmp_path):
    path = tmp_path / "twice.json"
    write_answers(machine([gpu(0, "NVIDIA L4", (8, 9))] * 2), path)
    with pytest.raises(TopologyError, match=r"twice\.json: two GPUs have the same index"):
        read_answers(path)


# --- asking ---


class RefusalError(Exception):
    value = 3


class SmallBinding:
    """A binding of today on one GPU: structures filled in place, field values with own codes."""

    NVMLError = RefusalError

    class c_nvmlGpuFabricInfo_v2_t(ctypes.Structure):  # noqa: N801 - NVML's name
        _fields_ = (
            ("clusterUuid", ctypes.c_uint8 * 16),
            ("cliqueId", ctypes.c_uint32),
            ("state", ctypes.c_uint),
            ("healthMask", ctypes.c_uint32),
        )

    class Value:
        def __init__(self, field, scope):
            self.nvmlReturn = 3 if field == 170 else 0
            self.valueType = 1
            self.value = self
            self.uiVal = 26562 if field == 164 and scope == 0 else 7

    class Info:
        busId = b"00000000:1B:00.0"  # noqa: N815 - NVML's name

    calls: tuple[str, ...] = ()

    def __getattr__(self, name):
        answers = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetPciInfo": self.Info(),
            "nvmlDeviceGetUUID": "GPU-abc",
            "nvmlDeviceGetName": b"NVIDIA H100",
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlDeviceGetMigMode": [0, 0],
            "nvmlDeviceGetMemoryAffinity": [2, 1, 0],
            "nvmlDeviceGetNvLinkRemoteDeviceType": 2,
            "nvmlDeviceGetNvLinkCapability": 1,
            "nvmlSystemGetDriverVersion": b"580.65.06",
        }
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments):
            if name == "nvmlDeviceGetFieldValues":
                return [self.Value(*arguments[1][0])]
            if name == "nvmlDeviceGetNvLinkState":
                if arguments[1] > 0:
                    error = RefusalError("Invalid Argument")
                    error.value = 2
                    raise error
                return 1
            if name == "nvmlDeviceGetGpuFabricInfoV":
                info = arguments[1]._obj
                info.cliqueId, info.state, info.healthMask = 5, 3, 42
                info.clusterUuid[0] = 0xAB
                return 0
            if name in answers:
                return answers[name]
            raise RefusalError("Not Supported")

        return call


def test_every_question_is_asked_by_itself(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    answers = ask_nvml(SmallBinding())
    [answer] = answers.gpus
    assert answer.busid == "00000000:1b:00.0"
    assert (answer.uuid, answer.name, answer.capability, answer.mig) == (
        "GPU-abc",
        "NVIDIA H100",
        (9, 0),
        0,
    )
    assert answer.memory_numa == (1, 64)
    assert answer.pcie_generation == Failure(
        "nvmlDeviceGetMaxPcieLinkGeneration", 3, "Not Supported"
    )
    assert answer.c2c_links == Failure("field 170", 3)
    assert answer.c2c_megabytes_per_s == 7
    assert answer.fabric == FabricAnswer("ab" + "00" * 15, 5, 3, 42)
    [link] = answer.links
    assert (link.state, link.remote_type, link.remote_busid, link.speed) == (1, 2, None, 26562)
    assert answer.links_end.error == 2
    assert (answers.driver, answers.visible, answers.order) == ("580.65.06", "0", None)
    assert levels(probe(nvml=answers)).world_size == 1


def test_a_recording_is_probed_elsewhere(tmp_path):
    recording, copy = tmp_path / "nvml.json", tmp_path / "copy.json"
    write_answers(dgx("NVIDIA H100 80GB HBM3", (9, 0), 18, 26562, 6), recording)
    arguments = ["probe", "--nvml", str(recording), "--record-nvml", str(copy), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    topology = from_json(done.output)
    assert len(topology.ranks) == 8
    assert levels(topology).nodes[0].intra.nominal == pytest.approx(450e9)
    assert read_answers(copy) == read_answers(recording)
