"""Descriptions that were cut off or damaged: a result with notes, or one clear error."""

from hypothesis import strategies as st

from tests.foreign import foreign
from topo_ar.errors import TopologyError
from topo_ar.topology.model import validate
from topo_ar.topology.readers import describe


def survives(text):
    """Read `text`; a topology must be sound and say something, an error must be ours."""
    try:
        topology = describe(text if "\n" in text else text + "\n").topology
    except TopologyError:
        return
    validate(topology)
    assert topology.notes


def survives_every_cut(name, pieces=60):
    """Cut a captured file at every tenth line and at about `pieces` other places."""
    lines = foreign(name).read_text().splitlines(keepends=True)
    for end in range(0, len(lines), 10):
        survives("".join(lines[:end]))
    text = "".join(lines)
    for end in range(1, len(text), max(1, len(text) // pieces)):
        survives(text[:end])


@st.composite
def damaged(draw, files):
    """The text of one of the captured `files` with up to eight bytes replaced."""
    raw = bytearray(foreign(draw(st.sampled_from(files))).read_bytes())
    for _ in range(draw(st.integers(1, 8))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return raw.decode(errors="replace")
