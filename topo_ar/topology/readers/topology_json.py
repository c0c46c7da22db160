"""The package's own JSON."""

from topo_ar.errors import TopologyError
from topo_ar.topology.model import Topology, from_json

FORMAT = "topo-ar"


def matches(text: str) -> bool:
    """Return whether `text` is a JSON object."""
    return text.lstrip().startswith("{")


def read_text(text: str, name: str) -> Topology:
    """Return the topology in `text`, which comes from the file `name`.

    Raises
    ------
    TopologyError
        If it is not a sound topology; the message names file and field.
    """
    try:
        return from_json(text)
    except TopologyError as error:
        raise TopologyError(f"{name}: {error}") from None
