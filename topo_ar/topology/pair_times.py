"""What was measured between the members of a job, pair by pair."""

import msgspec

from topo_ar.errors import TopologyError
from topo_ar.versioned_json import decode

SCHEMA_VERSION = 1

Row = tuple[float | None, ...]
Table = tuple[Row, ...]


class PairTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Latency and rate of each ordered pair of members, ``table[sender][receiver]``.

    A message of n bytes takes about ``latency + n / rate``. None is a pair that was not measured;
    the diagonal is a member with itself over its own host's loopback, as a reference.

    Attributes
    ----------
    latency, latency_spread : tuple of tuple of float or None
        Median and interquartile range of half a round trip, seconds. A round trip has no
        direction, so both tables are symmetric.
    rate, rate_spread : tuple of tuple of float or None
        Payload bytes/s of one flow one way, and the interquartile range over parts of its time.
    """

    latency: Table
    latency_spread: Table
    rate: Table
    rate_spread: Table

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.rate)


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that a job's ranks measured of their network, and the structure it was measured by.

    Attributes
    ----------
    ranks : PairTimes
        Each pair of ranks, several pairs at a time: good for telling near from far.
    groups : tuple of tuple of int
        The ranks of each host as told from `ranks`, ordered by their lowest rank.
    hosts : PairTimes
        Each pair of `groups`, every host in one pair at a time; of several tries the median.
    loaded : tuple of tuple of float or None
        What a pair got on average, bytes/s, both directions together, while as many others as
        possible took its way.
    racks : tuple of tuple of int
        Positions in `groups`; empty where no level lies between the hosts.
    uplinks : tuple of float or None
        What left each rack while all its hosts sent, bytes/s; None where no flow was measured.
    notes : tuple of str
        What was not measured or is doubtful, in sentences.
    """

    ranks: PairTimes
    groups: tuple[tuple[int, ...], ...]
    hosts: PairTimes
    loaded: Table
    racks: tuple[tuple[int, ...], ...] = ()
    uplinks: tuple[float | None, ...] = ()
    notes: tuple[str, ...] = ()
    schema: int = SCHEMA_VERSION


def measurement_to_json(measurement: Measurement) -> bytes:
    """Return the measurement as UTF-8 JSON in one stable order of keys."""
    return msgspec.json.encode(measurement)


def measurement_from_json(text: bytes | str) -> Measurement:
    """Read a measurement.

    Raises
    ------
    TopologyError
        If `text` is none, is of a schema that is not known, or its tables do not fit each other.
    """
    hint = "write one with `topo-ar probe --measure --times FILE`"
    measurement = decode(text, Measurement, SCHEMA_VERSION, "measurement", hint, TopologyError)
    for name, times, size in (
        ("ranks", measurement.ranks, sum(map(len, measurement.groups))),
        ("hosts", measurement.hosts, len(measurement.groups)),
    ):
        tables = [times.latency, times.latency_spread, times.rate, times.rate_spread]
        tables += [measurement.loaded] if name == "hosts" else []
        if any(len(table) != size or {*map(len, table)} - {size} for table in tables):
            raise TopologyError(
                f"measurement: {name}: the tables must be {size} x {size}, one row a member"
            )
    return measurement
