"""Reading what a user names: files, pipes, and everything that is neither."""

import os
import socket
import threading
from pathlib import Path

import pytest

from tests.foreign import foreign
from topo_ar.cli.topology_source import load_several
from topo_ar.errors import TopologyError
from topo_ar.topology import text_file
from topo_ar.topology.nvml_answers import read_answers
from topo_ar.topology.readers import describe
from topo_ar.topology.text_file import read_text_file

MATRIX = "nvidia-smi-topo/perlmutter-4x-a100.txt"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_what_editors_and_shells_make_of_a_file(tmp_path, encoding, end):
    path = foreign(MATRIX)
    other = tmp_path / path.name
    other.write_bytes(path.read_text(encoding="utf-8").replace("\n", end).encode(encoding))
    assert describe(other) == describe(path)


def test_a_pipe_is_read_to_its_end(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    whole = foreign(MATRIX).read_text(encoding="utf-8")
    writer = threading.Thread(target=path.write_text, args=(whole,))
    writer.start()
    found = describe(path)
    writer.join()
    assert found.format == "nvidia-smi-topo"
    assert len(found.topology.ranks) == 4


def test_the_command_line_reads_a_pipe_once(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=(foreign(MATRIX).read_text(),))
    writer.start()
    topology, formats = load_several([str(path)])
    writer.join()
    assert (len(topology.ranks), formats) == (4, "nvidia-smi-topo")


def test_a_pipe_nobody_writes_to_does_not_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(text_file, "_PATIENCE_S", 0.05)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(TopologyError, match="pipe.*said nothing.*start the command"):
        describe(path)


def unreadable(tmp_path: Path) -> list[tuple[object, str]]:
    loop, sock = tmp_path / "loop", tmp_path / "socket"
    loop.symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(sock))
    return [
        (tmp_path, "is a directory"),
        (tmp_path / "absent", "cannot be read: No such file"),
        (loop, "cannot be read: Too many levels"),
        (sock, "is a device or a socket"),
        (Path("/dev/zero"), "is a device or a socket"),
        (Path("a\0b"), "cannot be read: embedded null"),
        (tmp_path / ("x" * 300), "cannot be read: File name too long"),
    ]


@pytest.mark.parametrize("which", range(7))
@pytest.mark.parametrize("read", [describe, read_answers])
def test_what_is_no_file_is_refused(tmp_path, which, read):
    path, message = unreadable(tmp_path)[which]
    with pytest.raises(TopologyError, match=message):
        read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\0b", "not text: character 1 is NUL"),
        (b"ab\xff", "not text: byte 2 is no UTF-8"),
        (b"\xff\xfeabc", "not text: byte 4 is no UTF-16"),
        (b"", "is empty"),
        (b" \n" * 1000, "is empty"),
        (b"a" * (text_file.MOST_BYTES + 1), "larger than 16 MiB"),
        (b"\n" * (text_file.MOST_LINES + 1), "more than 500000 lines"),
    ],
)
def test_what_is_no_text_of_a_sane_size_is_refused(tmp_path, content, message):
    path = tmp_path / "odd"
    path.write_bytes(content)
    with pytest.raises(TopologyError, match=f"odd: .*{message}"):
        describe(path)


def test_our_json_may_be_large(tmp_path):
    path = tmp_path / "large.json"
    path.write_text("{" + "\n" * (text_file.MOST_BYTES + 1))
    assert read_text_file(path).startswith("{")
