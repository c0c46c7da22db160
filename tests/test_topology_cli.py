"""The verbs probe and show."""

import json
import sys
from pathlib import Path

import pytest

from topo_ar.cli import main as cli
from topo_ar.topology.model import from_json

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
    assert shown["nearest_nics"][0] == {
        "rank": 0,
        "device": "node0/gpu0",
        "nics": ["node0/nic3"],
        "path_class": "PHB",
    }


def test_show_of_a_preset_and_of_a_lone_rank(monkeypatch, capsys) -> None:
    assert run(monkeypatch, "show", "cpu-host", "--nodes", "2", "--nic", "1gbit", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["format"] == "preset"
    assert [node["nics"][0]["nominal"] for node in shown["nodes"]] == [125e6, 125e6]
    name = str(DATA / "aws-g5-48xl.xml")
    assert run(monkeypatch, "show", name, "--json") == 0
    assert json.loads(capsys.readouterr().out)["nodes"] == []


def test_show_for_a_person(monkeypatch, capsys) -> None:
    name = str(DATA / "rccl-8x-gfx908-2hives-1nic.xml")
    assert run(monkeypatch, "show", name) == 0
    out = capsys.readouterr().out
    assert "port of a rank 138 GB/s nominal, 24 GB/s payload (file)" in out
    assert "4     gpu4    2     mlx5_0        PHB" in out
    assert "NVL 24" in out
    assert run(monkeypatch, "show", "dgx-h100", "--nodes", "6") == 0
    out = capsys.readouterr().out
    assert "2 more nodes; --json lists all" in out
    assert "mlx5_11" in out


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
        (("show", str(DATA)), "cannot be read"),
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
