"""Measured times of whole all-reduces, and what they predict for other sizes."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

from topo_ar.errors import ConfigError
from topo_ar.planning.plan import Family
from topo_ar.topology.measure import AlphaBeta, fit_alpha_beta

Sample = tuple[int, float]

# A straight line that misses a measured point by more gives way to lines between the points.
_MAX_RESIDUAL = 0.05
# How far beyond the measured sizes a prediction is still called one.
_REACH = 8


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of whole all-reduces measured on this cluster, as (nbytes, seconds) per family."""

    samples: dict[Family, tuple[Sample, ...]]

    def predict(self, family: Family, nbytes: int) -> float | None:
        """Return what `predict_seconds` says of a family, None for one that was not measured."""
        return predict_seconds(self.samples.get(family, ()), nbytes)

    def misfit(self, family: Family) -> tuple[int, float] | None:
        """Return the size that latency and rate miss most, and by which part of its time.

        None where they miss no measured size by more than 5 %, or fewer than two were measured.
        """
        points = _medians(self.samples.get(family, ()))
        if len(points) < 2:
            return None
        worst = _worst(points, fit_alpha_beta(points))
        return worst if abs(worst[1]) > _MAX_RESIDUAL else None


def predict_seconds(samples: Sequence[Sample], nbytes: int) -> float | None:
    """Return predicted seconds for `nbytes` bytes, or None where the samples say nothing.

    ``alpha + beta * nbytes`` through all sizes where that fits within 5 %, else lines between
    neighbouring sizes. Several times for one size count by their median. Fewer than two sizes
    predict nothing, nor is predicted what lies more than 8 times beyond the measured sizes.

    Raises
    ------
    TopologyError
        If a measured time is not positive or a size negative.
    """
    points = _medians(samples)
    if len(points) < 2:
        return None
    if points[0][0] > nbytes * _REACH or nbytes > points[-1][0] * _REACH:
        return None
    fit = fit_alpha_beta(points)
    if abs(_worst(points, fit)[1]) <= _MAX_RESIDUAL:
        return fit.alpha_seconds + fit.beta_seconds_per_byte * nbytes
    return _piecewise(points, nbytes)


def calibration_from_records(
    records: Sequence[Mapping[str, Any]], world_size: int, hosts: int
) -> Calibration:
    """Return the calibration in the rows of ``topo-ar bench --json``.

    Rows of all-reduces that name a family count with their median times; others, such as those of
    another library, are passed over.

    Parameters
    ----------
    records : sequence of mapping
        As `topo_ar.telemetry.records.read_records` returns them.
    world_size, hosts : int
        The ranks and nodes that are planned for.

    Raises
    ------
    ConfigError
        If no row can be used, or one was measured with another number of ranks or hosts.
    """
    samples: dict[Family, list[Sample]] = {}
    for number, row in enumerate(records, 1):
        family, seconds = row.get("family"), row.get("median_seconds")
        if row.get("collective") != "all_reduce" or family not in set(Family) or not seconds:
            continue
        if (row.get("world_size"), row.get("hosts")) != (world_size, hosts):
            raise ConfigError(
                f"record {number} was measured with {row.get('world_size')} ranks on "
                f"{row.get('hosts')} hosts, the topology has {world_size} on {hosts}; calibrate "
                "with records of this cluster"
            )
        samples.setdefault(Family(family), []).append((row["nbytes"], seconds))
    if not samples:
        raise ConfigError(
            "no record holds the time of an all-reduce by a known algorithm; write some with "
            "`topo-ar bench --json FILE`"
        )
    return Calibration({family: tuple(found) for family, found in samples.items()})


def _worst(points: Sequence[Sample], fit: AlphaBeta) -> tuple[int, float]:
    """Return the size at which `fit` is farthest off, and its relative error there."""
    errors = [
        (size, (fit.alpha_seconds + fit.beta_seconds_per_byte * size) / seconds - 1)
        for size, seconds in points
    ]
    return max(errors, key=lambda error: abs(error[1]))


def _medians(samples: Sequence[Sample]) -> list[Sample]:
    by_size: dict[int, list[float]] = {}
    for size, seconds in samples:
        by_size.setdefault(size, []).append(seconds)
    return [(size, median(by_size[size])) for size in sorted(by_size)]


def _piecewise(points: Sequence[Sample], nbytes: int) -> float:
    """Draw a line through the two measured neighbours of `nbytes`, or the nearest two sizes."""
    right = next((i for i, (size, _) in enumerate(points) if size >= nbytes), len(points) - 1)
    (s0, t0), (s1, t1) = points[max(right, 1) - 1], points[max(right, 1)]
    line = t0 + (t1 - t0) * (nbytes - s0) / (s1 - s0)
    # Noise must not extend to times that fall with size, or to less than the smallest size implies.
    if nbytes < s0:
        return max(line, t0 * nbytes / s0)
    return max(line, t1) if nbytes > s1 else line
