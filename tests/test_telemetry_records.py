import getpass
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from topo_ar.errors import ConfigError
from topo_ar.planning.plan import Family
from topo_ar.telemetry import records
from topo_ar.telemetry.records import RecordWriter, encode, manifest, read_records

ROOT = Path(__file__).parents[1]


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "new" / "out.jsonl"
    rows = [{"nbytes": 4, "seconds": [0.1, 0.25], "wrong": None}, {"name": "größe", "ok": True}]
    with RecordWriter(path) as writer:
        for row in rows:
            writer.write(row)
            assert path.read_bytes().endswith(b"\n")
    with RecordWriter(path) as writer:
        writer.write({"later": 1})
    assert read_records(path) == [*rows, {"later": 1}]


def test_enums_and_tuples_become_plain_json():
    assert json.loads(encode({"family": Family.FLAT_RING, "ranks": (0, 1), 3: "x"})) == {
        "family": "flat_ring",
        "ranks": [0, 1],
        "3": "x",
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_is_refused_with_its_place_and_leaves_the_file_as_it_was(tmp_path, value):
    path = tmp_path / "out.jsonl"
    with RecordWriter(path) as writer:
        writer.write({"a": 1})
        with pytest.raises(ConfigError, match=r"record\.rows\[1\]\.algbw is -?(nan|inf)"):
            writer.write({"rows": [{}, {"algbw": value}]})
        with pytest.raises(ConfigError, match="cannot hold"):
            writer.write({"a": object()})
    assert read_records(path) == [{"a": 1}]


def test_a_torn_last_line_is_cut_before_the_next_record(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text('{"a": 1}\n{"b": 2, "sec')
    with RecordWriter(path) as writer:
        writer.write({"c": 3})
    assert read_records(path) == [{"a": 1}, {"c": 3}]
    path.write_text('{"torn')
    RecordWriter(path).close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not a record"),
        ("[1]", "list, must be an object"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"manifest": {"schema": 99}}', "schema 99 is newer than 1"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, said):
    path = tmp_path / "out.jsonl"
    path.write_text(f'{{"a": 1}}\n\n{line}\n')
    with pytest.raises(ConfigError, match=said) as caught:
        read_records(path)
    assert str(caught.value).startswith(f"{path}:3: ")


def test_files_that_cannot_be_opened(tmp_path):
    with pytest.raises(ConfigError, match="cannot read records from .*nothing"):
        read_records(tmp_path / "nothing.jsonl")
    with pytest.raises(ConfigError, match="cannot write records to"):
        RecordWriter(tmp_path)


INTERRUPTED = """
import sys
from topo_ar.telemetry.records import RecordWriter
with RecordWriter(sys.argv[1]) as writer:
    for number in range(10**9):
        writer.write({"number": number, "filler": "x" * 20_000})
        if number == 20:
            print("go", flush=True)
"""


def test_after_ctrl_c_the_last_line_is_whole(tmp_path):
    path = tmp_path / "out.jsonl"
    command = [sys.executable, "-c", INTERRUPTED, str(path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
    ) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) != 0
    assert path.read_bytes().endswith(b"\n")
    numbers = [row["number"] for row in read_records(path)]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > 20


def test_manifest_tells_how_but_not_who_or_where():
    block = manifest("namespaces")
    assert block["schema"] == 1
    assert block["emulation"] == "namespaces"
    assert block["cpu_count"] >= 1
    assert block["torch"].split(".")[0].isdigit()
    assert block["tcp_congestion_control"]
    text = encode(block).decode()
    for secret in (str(Path.home()), os.getcwd(), f'"{socket.gethostname()}"'):
        assert secret not in text
    assert f'"{getpass.getuser()}"' not in text


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not run from a git checkout")
def test_manifest_names_the_commit_of_the_measuring_tree():
    head = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    block = manifest()
    assert block["commit"] == head
    assert isinstance(block["dirty"], bool)


def test_an_installed_package_has_no_commit(tmp_path):
    assert records._commit(tmp_path) == {"commit": None, "dirty": None}
    repository = tmp_path / "other"
    subprocess.run(["git", "init", "-q", str(repository)], check=True)
    assert records._commit(repository) == {"commit": None, "dirty": None}


def test_records_do_not_load_torch_or_scipy():
    code = (
        "import sys, topo_ar.telemetry.records as r, topo_ar.telemetry.metrics; r.manifest();"
        "assert not {'torch', 'scipy', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
