"""Algorithm and protocol by size, for the CSV that NCCL's example tuner plug-in reads.

An unmodified NCCL job takes the file by::

    NCCL_TUNER_PLUGIN=libnccl-tuner-example.so NCCL_TUNER_CONFIG_FILE=tuner.csv

(``plugins/tuner/example`` in NCCL's repository; -1 stands for any value, and the largest size is
4294967295.)
"""

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from topo_ar.errors import PlanError
from topo_ar.planning.nccl_tuning import Algorithm, Protocol

COLUMNS = (
    "collective_type",
    "min_bytes",
    "max_bytes",
    "algorithm",
    "protocol",
    "channels",
    "nNodes",
    "nRanks",
    "numPipeOps",
    "regBuff",
)
LARGEST_NBYTES = 4294967295
_ANY = -1

Pick = tuple[Algorithm, Protocol]


@dataclass(frozen=True, slots=True)
class Rule:
    """For all-reduces of `min_nbytes` to `max_nbytes` bytes, both included: this one."""

    min_nbytes: int
    max_nbytes: int
    algorithm: Algorithm
    protocol: Protocol


def rules(pick: Callable[[int], Pick]) -> list[Rule]:
    """Return `pick` as rules without gaps from 0 to 4294967295 bytes.

    Parameters
    ----------
    pick : callable
        From bytes to algorithm and protocol. It is asked at powers of two and, where two of them
        differ, at the bytes between until the change is found.
    """
    edges = [0, *(1 << k for k in range(32)), LARGEST_NBYTES]
    found: list[Rule] = []
    begin = 0
    for low, high in pairwise(edges):
        while pick(low) != pick(high):
            change = _first_change(pick, low, high)
            found.append(Rule(begin, change - 1, *pick(low)))
            begin = low = change
    found.append(Rule(begin, LARGEST_NBYTES, *pick(LARGEST_NBYTES)))
    return found


def _first_change(pick: Callable[[int], Pick], low: int, high: int) -> int:
    """Return a size in (low, high] whose pick differs from that of the size before."""
    at_low = pick(low)
    while high - low > 1:
        middle = (low + high) // 2
        if pick(middle) == at_low:
            low = middle
        else:
            high = middle
    return high


def to_csv(found: list[Rule], num_nodes: int, world_size: int) -> str:
    """Return the rules for a job of this shape as the tuner's CSV."""
    text = io.StringIO()
    # A header that is no comment would be taken for a rule.
    text.write(f"# {','.join(COLUMNS)}\n")
    writer = csv.writer(text, lineterminator="\n")
    for rule in found:
        writer.writerow(
            (
                "allreduce",
                rule.min_nbytes,
                rule.max_nbytes,
                rule.algorithm.value,
                rule.protocol.value,
                _ANY,
                num_nodes,
                world_size,
                _ANY,
                _ANY,
            )
        )
    return text.getvalue()


def from_csv(text: str) -> list[Rule]:
    """Read the all-reduce rules back.

    Raises
    ------
    PlanError
        Naming the line that is no rule, or leaves sizes out or covers them twice.
    """
    found: list[Rule] = []
    for number, row in enumerate(csv.reader(text.splitlines()), 1):
        if not row or row[0].startswith("#"):
            continue
        try:
            kind, least, most, algorithm, protocol = row[:5]
            rule = Rule(int(least), int(most), Algorithm(algorithm), Protocol(protocol))
        except ValueError as error:
            raise PlanError(f"line {number}: not a rule: {error}") from None
        if kind != "allreduce" or len(row) != len(COLUMNS):
            raise PlanError(f"line {number}: expected an allreduce rule of {len(COLUMNS)} columns")
        expected = found[-1].max_nbytes + 1 if found else 0
        if rule.min_nbytes != expected or rule.max_nbytes < rule.min_nbytes:
            raise PlanError(f"line {number}: must begin at {expected} bytes and not end before")
        found.append(rule)
    return found
