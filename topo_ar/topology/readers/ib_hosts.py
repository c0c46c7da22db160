"""Which channel adapters of a fabric belong to one host.

The names are set by whoever runs the hosts: ``HOST DEVICE`` at best, the model of the card or
``localhost`` at worst. Only a name with a host in it groups adapters; the others go by the GUID of
the system they sit in, which is that of a card.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from topo_ar.topology.readers.ib_records import Record

# ``HCA-3`` is the name by order, the others are those of the driver.
_DEVICE = re.compile(r"(?:HCA-\d+|(?:mlx|hfi|qib|mthca|bnxt_re|irdma|ib|rocep)[\w-]*\d+)", re.I)
_DEFAULT_NAMES = frozenset({"localhost", "localhost.localdomain", "ubuntu", "debian", "none"})


@dataclass(frozen=True, slots=True)
class Adapter:
    """A channel adapter with its host; `is_named` tells whether the host's name is known."""

    record: Record
    host: str
    device: str
    is_named: bool


def find_hosts(adapters: Sequence[Record]) -> tuple[list[Adapter], list[str]]:
    """Return each adapter with its host, and notes on those whose name tells none."""
    parts = [_parts(adapter) for adapter in adapters]
    uses = Counter(part for part in parts if part is not None)
    found = []
    nameless = Counter[str]()
    for adapter, part in zip(adapters, parts, strict=True):
        if part is not None and part[0].lower() not in _DEFAULT_NAMES and uses[part] == 1:
            found.append(Adapter(adapter, part[0], part[1], is_named=True))
        elif not adapter.system_guid and not adapter.name:
            # In ibsim the id is all there is.
            found.append(Adapter(adapter, adapter.id, "hca", is_named=True))
        else:
            nameless[adapter.name if part is None else part[0]] += 1
            host = f"guid-{adapter.system_guid or adapter.guid or adapter.id}"
            device = part[1] if part else adapter.name or "hca"
            found.append(Adapter(adapter, host, device, is_named=False))
    notes = [
        f"{count} channel adapters called {name!r} do not tell their host; each system image GUID "
        "counts as a host, which may be several for one"
        for name, count in nameless.items()
    ]
    return found, notes


def _parts(adapter: Record) -> tuple[str, str] | None:
    """Return host and device of a name such as ``node17 mlx5_0``, None where it is not of two."""
    words = adapter.name.split()
    if len(words) == 2 and _DEVICE.fullmatch(words[1]):
        return words[0], words[1]
    return None
