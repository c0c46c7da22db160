import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from experiments import gpu_checks
from experiments.gpu import bundle, ranks
from experiments.gpu.catalogue import CHECKS
from topo_ar.errors import ConfigError
from topo_ar.telemetry.records import read_records


def _rehearse(folder: Path, *arguments: str) -> int:
    return gpu_checks.main(["--device", "cpu", "--quick", "--out", str(folder), *arguments])


def test_a_check_that_passes_is_printed_and_recorded(tmp_path, capsys) -> None:
    assert _rehearse(tmp_path, "--only", "codec equality", "capture") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 ranks on CPU, a rehearsal, 2 checks"
    assert lines[1].startswith("LEFT OUT graph capture")
    assert lines[2].startswith("PASS     codec equality")
    assert lines[3] == "1 passed, 0 failed, 1 left out"
    rows = read_records(tmp_path / "gpu_checks.jsonl")
    assert [row["status"] for row in rows] == ["LEFT OUT", "PASS"]
    assert rows[1]["figures"]["int8 scales off by"] == 0


def test_without_a_device_or_a_check_or_time_it_says_so(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(gpu_checks, "_num_devices", lambda: 0)
    assert gpu_checks.main(["--out", str(tmp_path)]) == 2
    assert "--device cpu rehearses" in capsys.readouterr().err
    assert _rehearse(tmp_path, "--only", "nosuch") == 2
    assert "gloo sums" in capsys.readouterr().err
    assert _rehearse(tmp_path, "--minutes", "0") == 1
    assert "no time was left for it" in capsys.readouterr().out


def _settings(folder: Path, check: str) -> list[ranks.Settings]:
    return [
        ranks.Settings(
            check=check,
            device="cpu",
            rank=rank,
            world_size=2,
            local_rank=rank,
            num_devices=0,
            timeout_s=5.0,
            quick=True,
            folder=str(folder),
            store=str(folder / "store"),
        )
        for rank in range(2)
    ]


def test_ranks_that_hang_or_die_fail_their_check_and_are_ended(tmp_path) -> None:
    late = ranks.run(_settings(tmp_path, CHECKS[0].name), 0.05)
    assert late.status == ranks.FAIL
    assert "rank 0 was not done in time" in late.text
    died = ranks.run(_settings(tmp_path, "nosuch"), 20.0)
    assert died.status == ranks.FAIL
    assert "ended without a report" in died.text
    assert "StopIteration" in died.text


@pytest.mark.slow
def test_under_a_launcher_each_rank_runs_its_own_part(tmp_path, monkeypatch, capsys) -> None:
    """Two launched ranks: both join for the group's check, and only one does what one can do."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "experiments.gpu_checks"),
            *("--device", "cpu", "--quick", "--out", str(tmp_path)),
            *("--only", "fixed order", "codec equality"),
        ],
        cwd=ranks.ROOT,
        env=os.environ | {"PYTHONPATH": str(ranks.ROOT)},
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks on CPU, a rehearsal, 2 checks" in done.stdout
    assert "2 passed, 0 failed, 0 left out" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_everything_that_a_cpu_can_show_passes(tmp_path, capsys) -> None:
    assert _rehearse(tmp_path) == 0, capsys.readouterr().out
    statuses = {row["check"]: row["status"] for row in read_records(tmp_path / "gpu_checks.jsonl")}
    assert statuses.keys() == {check.name for check in CHECKS}
    left_out = {name for name, status in statuses.items() if status != ranks.PASS}
    assert left_out <= {"graph capture", "nvml"}


def test_the_bundle_carries_what_is_not_there() -> None:
    names = [text.partition("==")[0] for text in bundle.needed()]
    assert names == ["defusedxml", "msgspec", "nvidia-ml-py", "pyyaml"]


def test_the_bundle_runs_where_it_is_unpacked(tmp_path, monkeypatch) -> None:
    def download(packages: list[str], wheels: Path) -> None:
        import zipfile

        with zipfile.ZipFile(wheels / "carried.whl", "w") as wheel:
            wheel.writestr("carried_with_it.py", "")

    monkeypatch.setattr(bundle, "_download", download)
    packed = bundle.pack(tmp_path / "bundle")
    with tarfile.open(packed) as tar:
        tar.extractall(tmp_path / "there", filter="data")
    there = tmp_path / "there" / "bundle"
    done = subprocess.run(
        [str(there / "run"), "--help"],
        env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 0, done.stderr
    assert "--device" in done.stdout
    assert (there / "site" / "carried_with_it.py").is_file()
    assert not list((there / "source" / "experiments").glob("results*"))


@pytest.mark.slow
def test_the_wheels_are_for_the_other_machine(tmp_path) -> None:
    try:
        packed = bundle.pack(tmp_path / "bundle")
    except ConfigError as error:
        pytest.skip(f"no package index: {error}")
    names = [path.name for path in (tmp_path / "bundle" / "wheels").iterdir()]
    assert len(names) == len(bundle.needed())
    assert any("msgspec" in name and "cp312-manylinux" in name for name in names)
    assert packed.stat().st_size < bundle.MOST_NBYTES
