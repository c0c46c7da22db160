"""The live probe, on made-up /sys trees and on a real namespace with a shaped interface."""

# ruff: noqa: N802 - the names are those of NVML

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from topo_ar.errors import ConfigError
from topo_ar.topology.interfaces import Kernel
from topo_ar.topology.levels import levels
from topo_ar.topology.model import (
    Device,
    DeviceKind,
    LinkKind,
    Source,
    Topology,
    from_json,
    to_json,
)
from topo_ar.topology.nvml_ask import ask_nvml
from topo_ar.topology.paths import PathClass, Paths
from topo_ar.topology.probe import probe


class FakeKernel(Kernel):
    """IPv4 addresses and token buckets of interfaces that are not there."""

    def __init__(self, addressed: set[str], shaped: dict[str, float] | None = None) -> None:
        self.addressed = addressed
        self.shaped = shaped or {}

    def has_ipv4(self, name: str) -> bool:
        return name in self.addressed

    def shaped_rate(self, name: str) -> float | None:
        return self.shaped.get(name)


class Tree:
    """A directory that looks like /sys."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "devices").mkdir()

    def write(self, directory: Path, **files: object) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (directory / name).write_text(f"{content}\n")
        return directory

    def link(self, at: Path, to: Path) -> None:
        at.parent.mkdir(parents=True, exist_ok=True)
        at.symlink_to(to)

    def pci(self, *chain: str, gts: float = 32, width: int = 16, **files: object) -> Path:
        """A PCI device below the bridges of `chain`; its last element is the device."""
        directory = self.root / "devices" / "pci0000:00"
        for busid in chain:
            directory /= busid
            if not directory.exists():
                self.write(directory, max_link_speed=f"{gts} GT/s PCIe", max_link_width=width)
                self.link(self.root / "bus" / "pci" / "devices" / busid, directory)
        return self.write(directory, **files)

    def net(self, name: str, parent: Path | None = None, **files: object) -> Path:
        parent = parent or self.root / "devices" / "virtual"
        content = {"type": 1, "operstate": "up", "mtu": 1500, "speed": -1} | files
        directory = self.write(parent / "net" / name, **content)
        if parent.name != "virtual":
            self.link(directory / "device", parent)
        self.link(self.root / "class" / "net" / name, directory)
        return directory

    def rdma(self, name: str, parent: Path, rate: str, **files: object) -> None:
        directory = parent / "infiniband" / name
        content = {"state": "4: ACTIVE", "rate": rate, "link_layer": "InfiniBand"} | files
        self.write(directory / "ports" / "1", **content)
        self.link(directory / "device", parent)
        self.link(self.root / "class" / "infiniband" / name, directory)

    def numa(self, *nodes: int) -> None:
        for node in nodes:
            self.write(self.root / "devices" / "system" / "node" / f"node{node}", cpulist="0-7")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class FakeNvml:
    """NVML with given GPUs: bus id, and for each link its far end or an error number.

    A far end is ``"switch"``, a bus id, or None for a link that is inactive.
    """

    NVMLError = NvmlError
    NVML_ERROR_INVALID_ARGUMENT = 2
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_FEATURE_ENABLED = 1
    NVML_NVLINK_MAX_LINKS = 36
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2

    class Info:
        def __init__(self, busid: str) -> None:
            self.busId = busid

    def __init__(self, *gpus: tuple[str, list[str | int | None]], init_error: int = 0) -> None:
        self.gpus = gpus
        self.init_error = init_error
        self.is_open = False
        self.mig: set[int] = set()
        self.lost: set[int] = set()

    def nvmlInit(self) -> None:
        if self.init_error:
            raise NvmlError(self.init_error)
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index in self.lost:
            raise NvmlError(self.NVML_ERROR_GPU_IS_LOST)
        return f"handle {index}"

    def _of(self, handle: str) -> tuple[str, list[str | int | None]]:
        return self.gpus[int(handle.split()[1])]

    def nvmlDeviceGetPciInfo(self, handle: str) -> Info:
        return self.Info(f"0000{self._of(handle)[0]}".upper())

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA H100"

    def nvmlDeviceGetCudaComputeCapability(self, handle: str) -> tuple[int, int]:
        return (9, 0)

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        return [int(int(handle.split()[1]) in self.mig), 0]

    def _link(self, handle: str, link: int) -> str | int | None:
        links = self._of(handle)[1]
        if link >= len(links):
            error = self.NVML_ERROR_INVALID_ARGUMENT if links else self.NVML_ERROR_NOT_SUPPORTED
            raise NvmlError(error)
        return links[link]

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
        far = self._link(handle, link)
        if isinstance(far, int):
            raise NvmlError(far)
        return int(far is not None)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: str, link: int) -> int:
        return {"switch": 2, "hidden": 255}.get(str(self._link(handle, link)), 0)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: str, link: int) -> Info:
        far = str(self._link(handle, link))
        assert far != "switch", "of a switch only the type may be asked"
        return self.Info("ffffffff:ff:ff.0" if far == "hidden" else f"0000{far}")


def nics(topology: Topology) -> list[Device]:
    return [device for device in topology.devices if device.kind is DeviceKind.NIC]


def reason(topology: Topology, name: str) -> str:
    [note] = [note for note in topology.notes if f" {name} is left out" in note]
    return note.partition(": ")[2]


def without_gpu(tree: Tree, kernel: Kernel, num_ranks: int | None = None) -> Topology:
    nvml = FakeNvml(init_error=FakeNvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    topology = probe(num_ranks, sysfs=tree.root, kernel=kernel, nvml=ask_nvml(nvml))
    assert from_json(to_json(topology)) == topology
    return topology


def test_a_shaped_veth_is_a_nic_of_the_shaped_rate(tree: Tree) -> None:
    tree.net("lo", type=772, operstate="unknown")
    tree.net("eth0", speed=10000)
    topology = without_gpu(tree, FakeKernel({"lo", "eth0"}, {"eth0": 125e6}), 4)
    assert topology.ranks == tuple(f"node0/cpu{i}" for i in range(4))
    [node] = levels(topology).nodes
    [nic] = node.nics
    assert (nic.nominal, nic.source) == (125e6, Source.SYSFS)
    assert nic.payload == pytest.approx(125e6 * 1448 / 1514)
    [cable] = [link for link in topology.links if link.kind is LinkKind.ETHERNET]
    assert cable.nominal is not None
    assert cable.nominal.note == "tbf"
    assert node.intra.source is Source.ASSUMED
    assert reason(topology, "lo") == "it is a loopback or a tunnel"
    assert "no NVML library" in topology.notes[0]


@pytest.mark.parametrize(("speed", "nominal"), [(10000, 1.25e9), (-1, 1.25e9), (25000, 3.125e9)])
def test_what_a_virtual_interface_says_of_its_speed_is_assumed(
    tree: Tree, speed: int, nominal: float
) -> None:
    tree.net("eth0", speed=speed)
    [node] = levels(without_gpu(tree, FakeKernel({"eth0"}))).nodes
    [nic] = node.nics
    assert (nic.nominal, nic.payload, nic.source) == (nominal, nominal, Source.ASSUMED)


def test_a_real_port_is_taken_at_its_word(tree: Tree) -> None:
    tree.net("ens1", tree.pci("0000:00:01.0", "0000:01:00.0"), speed=25000, mtu=9000)
    topology = without_gpu(tree, FakeKernel({"ens1"}))
    [nic] = levels(topology).nodes[0].nics
    assert (nic.nominal, nic.source) == (3.125e9, Source.SYSFS)
    assert nic.payload == pytest.approx(3.125e9 * 8948 / 9038)


def test_interfaces_that_carry_no_data_are_named(tree: Tree) -> None:
    card = tree.pci("0000:00:01.0", "0000:01:00.0")
    tree.net("eth0", card, speed=1000)
    docker = tree.net("docker0")
    (docker / "bridge").mkdir()
    tree.link(tree.net("veth1a2b") / "master", docker)
    tree.net("wg0", type=65534)
    (tree.net("tun0") / "tun_flags").write_text("0x1\n")
    tree.net("eth1", operstate="down")
    tree.net("eth2")
    (tree.net("eth0.7") / "lower_eth0").mkdir()
    bond = tree.net("bond0", speed=2000)
    (bond / "bonding").mkdir()
    tree.link(tree.net("eth3") / "master", bond)
    virtual_function = tree.pci("0000:00:02.0", "0000:02:00.1")
    tree.link(virtual_function / "physfn", card)
    tree.net("eth4", virtual_function)
    addressed = {"eth0", "docker0", "wg0", "tun0", "eth1", "eth0.7", "bond0", "eth4"}
    topology = without_gpu(tree, FakeKernel(addressed))
    assert [nic.attributes["name"] for nic in nics(topology)] == ["bond0", "eth0"]
    assert reason(topology, "docker0") == "it is a bridge; its ports count"
    assert reason(topology, "veth1a2b") == "it has no IPv4 address"
    assert reason(topology, "wg0") == "it is a loopback or a tunnel"
    assert reason(topology, "tun0") == "it is a tunnel"
    assert reason(topology, "eth1") == "it is not up"
    assert reason(topology, "eth2") == "it has no IPv4 address"
    assert reason(topology, "eth3") == "it is part of bond0"
    assert reason(topology, "eth0.7") == "it sits on eth0, which counts"
    assert reason(topology, "eth4") == "it is a virtual function of another card"


def test_a_port_of_a_bridge_with_the_address_counts(tree: Tree) -> None:
    bridge = tree.net("br0")
    (bridge / "bridge").mkdir()
    port = tree.net("eth0", tree.pci("0000:00:01.0", "0000:01:00.0"), speed=1000)
    tree.link(port / "master", bridge)
    topology = without_gpu(tree, FakeKernel({"br0"}))
    assert [nic.attributes["name"] for nic in nics(topology)] == ["eth0"]


def test_a_machine_without_anything(tree: Tree) -> None:
    topology = without_gpu(tree, FakeKernel(set()))
    assert topology.ranks == ("node0/cpu0",)
    assert levels(topology).nodes[0].nics == ()
    assert "no NIC that is up was found" in topology.notes
    with pytest.raises(ConfigError, match="0 ranks"):
        probe(0, sysfs=tree.root)


def gpu_machine(tree: Tree) -> None:
    """Two sockets; on each a PCIe switch with a GPU and an RDMA card below it."""
    tree.numa(0, 1)
    for numa, base in enumerate((1, 8)):
        switch = (f"0000:00:0{base}.0", f"0000:{base}0:00.0")
        tree.pci(*switch, f"0000:{base}1:00.0", f"0000:{base}2:00.0", numa_node=numa)
        card = tree.pci(*switch, f"0000:{base}1:01.0", f"0000:{base}3:00.0", numa_node=numa)
        tree.rdma(f"mlx5_{numa}", card, "400 Gb/sec (4X NDR)")
        tree.net(f"ib{numa}", card, type=32)


GPU0, GPU1 = "0000:12:00.0", "0000:82:00.0"


def test_gpus_behind_switches_find_their_nics(tree: Tree) -> None:
    gpu_machine(tree)
    management = tree.pci("0000:00:04.0", "0000:40:00.0", numa_node=-1)
    tree.net("eno1", management, speed=1000)
    down = tree.pci("0000:00:05.0", "0000:50:00.0", numa_node=0)
    tree.rdma("mlx5_2", down, "10 Gb/sec (4X SDR)", state="1: DOWN")
    nvml = FakeNvml((GPU0, ["switch"] * 18), (GPU1, ["switch"] * 18))
    topology = probe(
        2, sysfs=tree.root, kernel=FakeKernel({"eno1", "ib0", "ib1"}), nvml=ask_nvml(nvml)
    )
    assert not nvml.is_open
    assert topology.ranks == ("node0/gpu0", "node0/gpu1")
    assert [nic.attributes["name"] for nic in nics(topology)] == ["mlx5_0", "mlx5_1", "eno1"]
    assert reason(topology, "ib0") == "it is the same card as mlx5_0"
    assert reason(topology, "mlx5_2") == "no port of it is active"
    assert any("eno1 carries no data" in note for note in topology.notes)
    assert any("nic2: NUMA node not known" in note for note in topology.notes)
    paths = Paths(topology)
    for i in (0, 1):
        nearest = paths.nearest_nics(f"node0/gpu{i}")
        assert (nearest.path_class, nearest.nics) == (PathClass.PIX, (f"node0/nic{i}",))
    assert paths.between("node0/gpu0", "node0/nic1").path_class is PathClass.SYS
    assert paths.between("node0/gpu0", "node0/nic2").path_class is PathClass.SYS
    assert paths.between(*topology.ranks).devices == ("node0/gpu0", "node0/nvswitch", "node0/gpu1")
    [node] = levels(topology).nodes
    assert (node.intra.nominal, node.intra.payload) == pytest.approx((450e9, 370.8e9))
    assert node.intra.source is Source.NVML
    assert [(nic.nominal, nic.payload) for nic in node.nics] == [(50e9, 48e9)] * 2


def test_a_slower_or_an_emulated_port_above(tree: Tree) -> None:
    tree.numa(0)
    tree.pci("0000:00:01.0", gts=16, width=8)
    tree.pci("0000:00:01.0", "0000:01:00.0", gts=32, width=16, numa_node=0)
    tree.pci("0000:00:02.0", gts=2.5, width=1)
    tree.pci("0000:00:02.0", "0000:02:00.0", gts=32, width=16, numa_node=0)
    nvml = FakeNvml(("0000:01:00.0", []), ("0000:02:00.0", []))
    topology = probe(sysfs=tree.root, kernel=FakeKernel(set()), nvml=ask_nvml(nvml))
    figures = {link.a: link.effective.value for link in topology.links if link.effective}
    assert figures == {"node0/gpu0": 12e9, "node0/gpu1": 48e9}
    assert any("0000:02:00.0: the port above claims 2.5 GT/s x1" in n for n in topology.notes)


def test_direct_links_inactive_links_and_errors(tree: Tree) -> None:
    gpu_machine(tree)
    nvml = FakeNvml((GPU0, [GPU1] * 4 + [None, 999]), (GPU1, [GPU0] * 4 + [None, None]))
    topology = probe(sysfs=tree.root, kernel=FakeKernel(set()), nvml=ask_nvml(nvml))
    [link] = [link for link in topology.links if link.kind is LinkKind.NVLINK]
    assert (link.count, link.nominal and link.nominal.value) == (4, 100e9)
    assert "node0/gpu0: 1 NVLink is inactive" in topology.notes
    assert any(
        "gpu0 link 5: nvmlDeviceGetNvLinkState failed (error 999)" in note
        for note in topology.notes
    )


def test_a_gpu_that_lost_its_links_is_named(tree: Tree) -> None:
    gpu_machine(tree)
    nvml = FakeNvml((GPU0, ["hidden"] * 18), (GPU1, [4] * 18))
    topology = probe(sysfs=tree.root, kernel=FakeKernel(set()), nvml=ask_nvml(nvml))
    assert any(
        "gpu1: shows 0 NVLink or XGMI links, others of its node 18" in note
        for note in topology.notes
    )
    assert levels(topology).nodes[0].intra.payload == 48e9


def test_a_lost_gpu_and_mig_are_said(tree: Tree) -> None:
    gpu_machine(tree)
    nvml = FakeNvml((GPU0, ["switch"] * 18), (GPU1, ["switch"] * 18))
    nvml.lost = {1}
    topology = probe(sysfs=tree.root, kernel=FakeKernel(set()), nvml=ask_nvml(nvml))
    assert topology.ranks == ("node0/gpu0",)
    assert any("gpu1: nvmlDeviceGetHandleByIndex failed" in note for note in topology.notes)
    nvml.lost, nvml.mig = set(), {0, 1}
    topology = probe(sysfs=tree.root, kernel=FakeKernel(set()), nvml=ask_nvml(nvml))
    assert not any(link.kind is LinkKind.NVLINK for link in topology.links)
    assert sum("MIG is on" in note for note in topology.notes) == 2


def test_a_driver_that_is_not_loaded_is_not_a_machine_without_gpus(tree: Tree) -> None:
    gpu_machine(tree)
    tree.write(tree.root / "bus/pci/devices" / GPU0, **{"class": "0x030200", "vendor": "0x10de"})
    nvml = FakeNvml(init_error=FakeNvml.NVML_ERROR_DRIVER_NOT_LOADED)
    topology = probe(2, sysfs=tree.root, kernel=FakeKernel(set()), nvml=ask_nvml(nvml))
    assert topology.ranks == ("node0/cpu0", "node0/cpu1")
    assert any("nvmlInit failed (error 9)" in note for note in topology.notes)
    assert any(f"PCI shows 1 GPUs that could not be asked ({GPU0})" in n for n in topology.notes)


def test_more_ranks_than_gpus_sit_on_cpus(tree: Tree) -> None:
    gpu_machine(tree)
    nvml = FakeNvml((GPU0, []), (GPU1, []))
    topology = probe(3, sysfs=tree.root, kernel=FakeKernel(set()), nvml=ask_nvml(nvml))
    assert topology.ranks == ("node0/cpu0", "node0/cpu1", "node0/cpu2")
    assert "3 ranks are more than 2 GPUs; they sit on CPUs" in topology.notes
    assert levels(topology).world_size == 3


def test_this_machine_can_be_probed() -> None:
    topology = probe(2)
    assert levels(topology).world_size >= 2
    assert from_json(to_json(topology)) == topology


@pytest.mark.netns
def test_a_token_bucket_in_a_real_namespace() -> None:
    if not all(map(shutil.which, ("unshare", "ip", "tc"))):
        pytest.skip("needs unshare, ip and tc")
    script = f"""
        mount -t sysfs sysfs /sys
        ip link add eth0 type veth peer name far && ip address add 10.0.0.1/24 dev eth0
        ip link set far up && ip link set eth0 up
        tc qdisc add dev eth0 root tbf rate 200mbit burst 128kb latency 50ms
        exec {sys.executable} -m topo_ar probe --ranks 2 --json
    """
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        ["unshare", "-rnm", "bash", "-ec", script],
        capture_output=True,
        text=True,
        timeout=30,
        env=environment,
    )
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(f"no namespaces here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    [node] = levels(from_json(json.dumps(json.loads(done.stdout)))).nodes
    assert [nic.nominal for nic in node.nics] == [25e6]
    assert node.nics[0].payload == pytest.approx(25e6 * 1448 / 1514)
