"""Share of the wire limit by message size and by shape of the job, from the benchmark of record.

python plots/wire_share.py RESULTS/wire_*.jsonl -o wire_share.png
"""

from _command import plot, records

from topo_ar.figures import wire_share


def rows(files: list[str]) -> list[dict[str, object]]:
    """Return the timings of all files; predictions, which lie beside them, are passed over."""
    return [record for record in records(files) if "candidate" in record]


plot(__doc__, rows, wire_share)
