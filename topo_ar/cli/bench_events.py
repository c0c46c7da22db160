"""How rank 0 of ``topo-ar bench --emulate`` reports: JSON in marked lines among all other output.

The marks let the parent tell events from whatever else a rank prints. Lines stay below what a pipe
takes at once, so that nothing is written into the middle of one; longer events come in parts.
"""

import json
from collections.abc import Callable
from typing import IO, Any

_MARK = "@topo-ar-bench "
_PART_CHARS = 3000
_MORE, _LAST = "+", "."


def write_event(stream: IO[str], name: str, data: dict[str, Any]) -> None:
    """Write an event to `stream`."""
    text = json.dumps([name, data], allow_nan=False)
    for at in range(0, len(text), _PART_CHARS):
        end = _LAST if at + _PART_CHARS >= len(text) else _MORE
        stream.write(f"{_MARK}{end}{text[at : at + _PART_CHARS]}\n")
        stream.flush()


class EventReader:
    """Takes the lines of a rank's output apart.

    Parameters
    ----------
    on_event : callable
        Called with the name and the data of each event.
    on_text : callable
        Called with everything else, line by line.
    """

    def __init__(
        self, on_event: Callable[[str, dict[str, Any]], None], on_text: Callable[[str], object]
    ) -> None:
        self._on_event = on_event
        self._on_text = on_text
        self._parts: list[str] = []

    def feed(self, line: bytes) -> None:
        """Take one line; one without an end, from a rank that died writing it, is no event."""
        text, mark, part = line.decode(errors="replace").partition(_MARK)
        if text:
            self._on_text(text)
        if not mark or not part.endswith("\n"):
            return
        self._parts.append(part[1:-1])
        if part[0] == _LAST:
            name, data = json.loads("".join(self._parts))
            self._parts.clear()
            self._on_event(name, data)
