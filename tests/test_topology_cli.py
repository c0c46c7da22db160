"""The verbs probe and show."""

import json
import re
import sys
import time
from pathlib import Path

import pytest

from tests.foreign import all_foreign, foreign
from topo_ar.cli import main as cli
from topo_ar.cli.topology_table import print_topology
from topo_ar.errors import TopologyError
from topo_ar.topology.merge import merge_hosts
from topo_ar.topology.model import from_json
from topo_ar.topology.paths import Paths
from topo_ar.topology.presets import PRESETS, preset
from topo_ar.topology.readers import read
from topo_ar.topology.summary import summarize

DATA = Path(__file__).parent / "data" / "nccl-xml"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["topo-ar", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_show_json_of_a_file(monkeypatch, capsys) -> None:
    name = str(DATA / "perlmutter-4x-a100-4-slingshot.xml")
    assert run(monkeypatch, "show", name, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) == {
        "format",
        "nodes",
        "devices",
        "links",
        "gpu_pairs",
        "nearest_nics",
        "notes",
    }
    assert shown["format"] == "nccl-xml"
    assert [node["ranks"] for node in shown["nodes"]] == [[0, 1, 2, 3]]
    assert shown["nodes"][0]["intra"]["payload"] == pytest.approx(240e9)
    assert len(shown["gpu_pairs"]) == 6
    assert {pair["path_class"] for pair in shown["gpu_pairs"]} == {"NVL"}
    assert shown["gpu_pairs"][0] == {
        "a": "node0/gpu0",
        "b": "node0/gpu1",
        "link_count": 4,
        "path_class": "NVL",
        "nvidia_class": "NV4",
        "p2p": None,
        "bandwidth": 80e9,
        "narrowest_link": {"a": "node0/gpu0", "b": "node0/gpu1", "kind": "nvlink", "count": 4},
        "devices": ["node0/gpu0", "node0/gpu1"],
    }
    assert shown["nearest_nics"][0] == {
        "rank": 0,
        "device": "node0/gpu0",
        "nics": ["node0/nic3"],
        "path_class": "PHB",
        "nvidia_class": "PHB or NODE",
        "bandwidth": 24e9,
        "narrowest_link": {"a": "node0/gpu0", "b": "node0/numa3", "kind": "pcie", "count": 1},
    }


def test_show_of_a_preset_and_of_a_lone_rank(monkeypatch, capsys) -> None:
    assert run(monkeypatch, "show", "cpu-host", "--nodes", "2", "--nic", "1gbit", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["format"] == "preset"
    assert [node["nics"][0]["nominal"] for node in shown["nodes"]] == [125e6, 125e6]
    name = str(DATA / "aws-g5-48xl.xml")
    assert run(monkeypatch, "show", name, "--json") == 0
    [node] = json.loads(capsys.readouterr().out)["nodes"]
    assert node == {
        "name": "node0",
        "devices": {"cpu": 2, "pcie_switch": 9},
        "ranks": [],
        "intra": None,
        "nics": [],
    }


def test_show_for_a_person(monkeypatch, capsys) -> None:
    name = str(DATA / "rccl-8x-gfx908-2hives-1nic.xml")
    assert run(monkeypatch, "show", name) == 0
    out = capsys.readouterr().out
    assert "port of a rank 138 GB/s nominal, 24 GB/s payload (file)" in out
    assert "4     gpu4    2     PHB or NODE  PHB   24 GB/s pcie  mlx5_0" in out
    assert "XGMI/NVL" in out
    assert "12     1            not known  XGMI        NVL   24 GB/s xgmi" in out
    assert run(monkeypatch, "show", "dgx-h100", "--nodes", "6") == 0
    out = capsys.readouterr().out
    assert "node0 and 5 like it, to node5: " in out
    assert "48 ranks" in out
    assert "mlx5_11" in out
    assert "28     18           not known  NV18        NVL   370.8 GB/s nvlink x18" in out
    assert "1 NICs" not in out


@pytest.mark.parametrize("name", [*all_foreign(), *PRESETS])
def test_every_topology_is_shown_in_100_columns(capsys, name) -> None:
    try:
        topology = preset(name) if name in PRESETS else read(foreign(name))
    except TopologyError:
        pytest.skip(f"{name} is one that must be refused")
    print_topology(topology, "x")
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert out.count("\n") < 200
    assert not re.search(r"\b1 (NICs|nodes|links|ranks|GPUs|CPUs)\b", out)


def test_hint_files_are_not_without_nvlink(monkeypatch, capsys) -> None:
    name = str(DATA / "aws-p4d-24xl.xml")
    assert run(monkeypatch, "show", name, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert {pair["link_count"] for pair in shown["gpu_pairs"]} == {None}
    assert any("8 GPU-class devices; NVLink is not described" in n for n in shown["notes"])
    assert run(monkeypatch, "show", name) == 0
    assert (
        "16     not described  not known  SYS         SYS   10 GB/s upi" in capsys.readouterr().out
    )


def test_a_matrix_without_rates_is_shown(monkeypatch, capsys) -> None:
    name = str(foreign("nvidia-smi-topo/workstation-3x-a6000-one-pair.txt"))
    assert run(monkeypatch, "show", name, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    found = {(p["a"][-1], p["b"][-1]): p for p in shown["gpu_pairs"]}
    assert [found["0", "1"][key] for key in ("link_count", "nvidia_class", "path_class")] == [
        4,
        "NV4",
        "NVL",
    ]
    assert [found["0", "2"][key] for key in ("link_count", "nvidia_class", "path_class")] == [
        0,
        "NODE",
        "PHB",
    ]
    assert shown["nodes"][0]["intra"] is None
    assert any("rates of ranks and NICs are not known" in note for note in shown["notes"])


def test_peer_access_is_a_column_of_its_own(monkeypatch, capsys) -> None:
    name = str(foreign("nvlink-p2p/perlmutter-4x-a100-p2p-n.txt"))
    assert run(monkeypatch, "show", name, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert {(p["p2p"], p["link_count"]) for p in shown["gpu_pairs"]} == {("OK", None)}


def test_a_fabric_is_shown_by_its_tiers(monkeypatch, capsys) -> None:
    name = str(foreign("ibnetdiscover/quantum2-dgx-582ca.txt"))
    assert run(monkeypatch, "show", name) == 0
    out = capsys.readouterr().out
    assert "108 like it" in out
    assert "31 switches" in out
    assert "9 switches" in out
    assert run(monkeypatch, "show", name, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert sum(node["devices"]["nic"] == 4 for node in shown["nodes"]) == 109
    assert shown["gpu_pairs"] == shown["nearest_nics"] == []


def test_ten_thousand_nodes_are_shown_in_time(monkeypatch, capsys) -> None:
    name = str(foreign("slurm/slurm-test1-4level-10000nodes.conf"))
    for arguments in ((), ("--json",)):
        start = time.monotonic()
        assert run(monkeypatch, "show", name, *arguments) == 0
        # Two seconds on a machine of its own.
        assert time.monotonic() - start < 10
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["nodes"]) == 10000


def test_many_gpus_are_searched_once(monkeypatch, capsys) -> None:
    topology = preset("dgx-h100", nodes=512)
    start = time.monotonic()
    shown = summarize(topology, "preset")
    assert time.monotonic() - start < 10
    assert len(shown["gpu_pairs"]) == 512 * 28
    last = shown["gpu_pairs"][-1]
    assert (last["a"], last["b"]) == ("node511/gpu6", "node511/gpu7")
    assert last["devices"] == ["node511/gpu6", "node511/nvswitch", "node511/gpu7"]
    assert last["narrowest_link"]["b"] == "node511/nvswitch"
    assert shown["nearest_nics"][-1]["nics"] == ["node511/nic7"]


@pytest.mark.parametrize("name", ["azure-ndv4.xml", "rccl-16gcd-mi250x-8nic.xml"])
def test_alike_nodes_say_what_a_search_would(name: str) -> None:
    host = read(DATA / name)
    topology = merge_hosts(
        [host] * 3, [range(i * len(host.ranks), (i + 1) * len(host.ranks)) for i in range(3)]
    )
    shown = summarize(topology, "x")
    paths = Paths(topology)
    assert len(shown["gpu_pairs"]) == 3 * len(host.ranks) * (len(host.ranks) - 1) // 2
    for pair in shown["gpu_pairs"]:
        path = paths.between(pair["a"], pair["b"])
        assert pair["path_class"] == path.path_class.name
        assert pair["bandwidth"] == path.bandwidth
        assert pair["nvidia_class"] == paths.nvidia_class(pair["a"], pair["b"])
        assert pair["link_count"] in (None, paths.fast_links(pair["a"], pair["b"]))
        narrowest = pair["narrowest_link"]
        assert {narrowest["a"], narrowest["b"]} <= set(pair["devices"])
    for found in shown["nearest_nics"]:
        assert tuple(found["nics"]) == paths.nearest_nics(found["device"]).nics


def test_a_hand_trimmed_file(monkeypatch, capsys, tmp_path: Path) -> None:
    path = tmp_path / "trimmed.xml"
    text = """<system version="1">
      <cpu numaid="0" arch="x86_64" vendor="AuthenticAMD" familyid="175" modelid="1">
        <pci busid="0000:01:00.0" class="0x030200" link_speed="16 GT/s" link_width="16">
          <gpu dev="0" sm="80" rank="0" gdr="1"/></pci></cpu>
      <cpu numaid="1">
        <pci busid="0000:81:00.0" class="0x020000" link_speed="16 GT/s" link_width="16">
          <nic><net name="mlx5_0" dev="0" speed="100000" port="1" gdr="1"/></nic></pci></cpu>
    </system>"""
    path.write_text(text)
    assert run(monkeypatch, "show", str(path)) == 0
    out = capsys.readouterr().out
    assert "cpu 1: arch, vendor not in the file" in out
    assert re.search(r"upi +- +6 GB/s +- +assumed", out)
    assert "SYS         SYS   6 GB/s upi    mlx5_0" in out
    path.write_text(text.replace('version="1"', 'version="2"'))
    assert run(monkeypatch, "show", str(path)) == 2
    assert "trimmed.xml:1: attribute version of <system>: found 2, known is 1" in (
        capsys.readouterr().err
    )
    path.write_text(text.replace("</system>", ""))
    assert run(monkeypatch, "show", str(path)) == 2
    assert "trimmed.xml:8: not well-formed" in capsys.readouterr().err


def test_show_writes_other_formats(monkeypatch, capsys, tmp_path: Path) -> None:
    name = str(DATA / "perlmutter-4x-a100-4-slingshot.xml")
    paths = [
        tmp_path / f"out.{suffix}" for suffix in ("json", "xml", "graphml", "dot", "svg", "png")
    ]
    outputs = [part for path in paths for part in ("-o", str(path))]
    assert run(monkeypatch, "show", name, *outputs) == 0
    assert capsys.readouterr().out.splitlines() == [f"wrote {path}" for path in paths]
    assert all(path.stat().st_size > 1000 for path in paths)
    assert from_json(paths[0].read_bytes()).devices == read(paths[1]).devices
    assert run(monkeypatch, "show", "cpu-host", "-o", str(paths[1]), "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["format"] == "preset"
    assert "out.xml: 4 ranks without a GPU are left out" in captured.err
    assert run(monkeypatch, "show", name, "--svg", str(tmp_path / "a.svg")) == 0
    assert (tmp_path / "a.svg").read_bytes() == paths[4].read_bytes()


def test_several_files_make_one_topology(monkeypatch, capsys) -> None:
    files = [
        str(foreign(name))
        for name in (
            "nvidia-smi-topo/perlmutter-4x-a100.txt",
            "nvlink-p2p/perlmutter-4x-a100-nvlink-s.txt",
        )
    ]
    assert run(monkeypatch, "show", *files, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["format"] == "nvidia-smi-topo + nvidia-smi-nvlink"
    assert len(shown["gpu_pairs"]) == 6
    assert run(monkeypatch, "show", files[0], "dgx-h100") == 2
    assert "dgx-h100 is a preset; it stands alone" in capsys.readouterr().err


def test_probe_writes_what_show_reads(monkeypatch, capsys, tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    assert run(monkeypatch, "probe", "--ranks", "3", "-o", str(path)) == 0
    assert f"wrote {path}" in capsys.readouterr().out
    assert len(from_json(path.read_bytes()).ranks) >= 3
    assert run(monkeypatch, "probe", "--ranks", "3", "--json") == 0
    assert from_json(capsys.readouterr().out) == from_json(path.read_bytes())
    assert run(monkeypatch, "show", str(path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["format"] == "topo-ar"
    assert run(monkeypatch, "probe") == 0
    assert "Devices" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", str(DATA / "azure-ncv4-graph.xml")), "<graphs> is the result of"),
        (("show", "dgx-z"), "neither a file nor a preset"),
        (("show", "x" * 300), "neither a file nor a preset"),
        (("doctor", "/dev/zero"), "is a device or a socket"),
        (("plan", "/dev/zero", "-s", "1MB"), "is a device or a socket"),
        (("probe", "--nvml", "/dev/zero"), "is a device or a socket"),
        (("show", str(DATA / "azure-ndv2.xml"), "--nodes", "2"), "shape a preset, but"),
        (("show", "dgx-h100", "dgx-z"), "dgx-h100 is a preset; it stands alone"),
        (("show", "dgx-h100", "-o", "x.doc"), "cannot tell what to write; endings are .json, .xml"),
        (("show", "dgx-h100", "-o", "/nowhere/at/all.xml"), "cannot write"),
        (("show", "dgx-h100", "--svg", "/nowhere/at/all.svg"), "cannot write"),
        (("show", str(DATA)), "is a directory"),
        (("probe", "--ranks", "0"), "0 ranks are not possible"),
        (("probe", "-o", "/nowhere/at/all.json"), "cannot write"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(monkeypatch, capsys, arguments, message) -> None:
    assert run(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
