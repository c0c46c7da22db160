"""Text that a person names: a file or a pipe of limited size, in UTF-8 or what Windows writes."""

import codecs
import os
import select
import stat
from collections.abc import Iterator
from pathlib import Path

from topo_ar.errors import TopologyError

MOST_BYTES = 16 << 20
# Our JSON of ten thousand machines is larger than what any tool prints of one.
MOST_BYTES_OF_JSON = 1 << 30
MOST_LINES = 500_000

_TOO_LARGE = "no description of machines is; give the output of one command alone"
_PATIENCE_S = 10
_PIECE = 1 << 20
_BYTE_ORDER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_text_file(path: Path) -> str:
    """Return the text in `path`, its line ends made those of Unix.

    A pipe, such as ``/dev/stdin`` or the shell's ``<(...)``, is read until it is closed.

    Raises
    ------
    TopologyError
        If it cannot be read, is a directory or a device, is no text, has more than `MOST_BYTES` or
        `MOST_LINES` (JSON: `MOST_BYTES_OF_JSON`), or is a pipe that stays silent; the message names
        the path.
    """
    raw = bytearray()
    is_json = False
    try:
        for piece in _pieces(path):
            raw += piece
            is_json = raw[:64].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
            most = MOST_BYTES_OF_JSON if is_json else MOST_BYTES
            if len(raw) > most:
                raise TopologyError(f"{path}: is larger than {most >> 20} MiB; {_TOO_LARGE}")
    except TopologyError:
        raise
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise TopologyError(f"{path}: cannot be read: {why}") from None
    text = _decode(bytes(raw), path)
    if not is_json and text.count("\n") > MOST_LINES:
        raise TopologyError(f"{path}: has more than {MOST_LINES} lines; {_TOO_LARGE}")
    return text


def _pieces(path: Path) -> Iterator[bytes]:
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise TopologyError(f"{path}: is a directory; give the file in it")
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        raise TopologyError(f"{path}: is a device or a socket; give a file")
    # Otherwise the opening of a pipe that nobody writes to would never end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        ready = select.poll()
        ready.register(descriptor, select.POLLIN)
        while True:
            if not ready.poll(_PATIENCE_S * 1000):
                raise TopologyError(
                    f"{path}: is a pipe that said nothing for {_PATIENCE_S} s; "
                    "start the command that writes to it"
                )
            piece = os.read(descriptor, _PIECE)
            if not piece:
                return
            yield piece
    finally:
        os.close(descriptor)


def _decode(raw: bytes, path: Path) -> str:
    # PowerShell redirects into UTF-16.
    encoding = "utf-16" if raw.startswith(_BYTE_ORDER_MARKS) else "utf-8-sig"
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as error:
        wanted = "UTF-16" if encoding == "utf-16" else "UTF-8"
        raise TopologyError(f"{path}: is not text: byte {error.start} is no {wanted}") from None
    if (position := text.find("\0")) >= 0:
        raise TopologyError(f"{path}: is not text: character {position} is NUL")
    return text.replace("\r\n", "\n").replace("\r", "\n")
