"""AMD GPUs as the kernel's compute driver shows them, on a made-up /sys."""

import pytest

from topo_ar.topology.kfd import probe_amd_gpus
from topo_ar.topology.levels import levels
from topo_ar.topology.model import LinkKind, Source
from topo_ar.topology.nvml_answers import Failure, NvmlAnswers
from topo_ar.topology.probe import probe

XGMI, PCIE = 11, 2
NO_NVML = NvmlAnswers(absent=Failure("nvmlInit", 12))


class Driver:
    def __init__(self, root):
        self.nodes = root / "class" / "kfd" / "kfd" / "topology" / "nodes"

    def write(self, path, **properties):
        path.mkdir(parents=True, exist_ok=True)
        lines = "".join(f"{name} {value}\n" for name, value in properties.items())
        (path / "properties").write_text(lines)

    def cpu(self, number):
        self.write(self.nodes / str(number), cpu_cores_count=64, simd_count=0)

    def gpu(self, number, bus, version=90402, **more):
        location = bus << 8
        self.write(
            self.nodes / str(number),
            simd_count=1216,
            location_id=location,
            gfx_target_version=version,
            **more,
        )

    def link(self, a, b, kind):
        folder = self.nodes / str(a) / "io_links"
        count = len(list(folder.glob("*"))) if folder.exists() else 0
        self.write(folder / str(count), type=kind, node_from=a, node_to=b, weight=15)


@pytest.fixture
def driver(tmp_path):
    return Driver(tmp_path)


def complete(driver, gpus, first=2):
    driver.cpu(0)
    driver.cpu(1)
    for i in range(gpus):
        driver.gpu(first + i, 0x10 + i, domain=i // 8)
        driver.link(first + i, i * 2 // gpus, PCIE)
        for j in range(gpus):
            if i != j:
                driver.link(first + i, first + j, XGMI)


def test_mi300x_all_joined(driver, tmp_path):
    complete(driver, 8)
    found = probe_amd_gpus(tmp_path, "node0")
    assert [gpu.busid for gpu in found.gpus][:2] == ["0000:10:00.0", "0000:11:00.0"]
    assert {gpu.gfx for gpu in found.gpus} == {"gfx942"}
    assert len(found.links.links) == 28
    for link in found.links.links:
        assert (link.kind, link.count) == (LinkKind.XGMI, 1)
        assert (link.nominal.value, link.effective.value) == (64e9, 48e9)
        assert link.nominal.source is Source.SYSFS


def test_pcie_is_not_xgmi(driver, tmp_path):
    driver.cpu(0)
    for i in (1, 2):
        driver.gpu(i, i, version=90010)
    driver.link(1, 2, PCIE)
    driver.link(2, 1, PCIE)
    found = probe_amd_gpus(tmp_path, "node0")
    assert [gpu.gfx for gpu in found.gpus] == ["gfx90a"] * 2
    assert found.links.links == ()


def test_a_link_of_one_end_only_is_said(driver, tmp_path):
    driver.gpu(1, 1)
    driver.gpu(2, 2)
    driver.link(1, 2, XGMI)
    found = probe_amd_gpus(tmp_path, "node0")
    assert any("reported by node0/gpu0 only" in note for note in found.notes)


def test_a_gpu_that_the_container_hides(driver, tmp_path):
    driver.write(driver.nodes / "1", simd_count=1216)
    found = probe_amd_gpus(tmp_path, "node0")
    assert found.gpus == ()
    assert any("KFD node 1 is a GPU without a bus id" in note for note in found.notes)


def test_no_driver_no_gpus(tmp_path):
    assert probe_amd_gpus(tmp_path, "node0").gpus == ()


def test_the_probe_places_ranks_on_them(driver, tmp_path):
    complete(driver, 4)
    topology = probe(sysfs=tmp_path, nvml=NO_NVML)
    assert topology.ranks == tuple(f"node0/gpu{i}" for i in range(4))
    [node] = levels(topology).nodes
    assert node.intra.nominal == 3 * 64e9
    gpus = {device.id: device for device in topology.devices}
    assert gpus["node0/gpu0"].attributes["gcn"] == "gfx942"
