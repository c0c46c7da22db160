"""Measured times of whole all-reduces, and what they predict for other sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from topo_ar.errors import PlanError
from topo_ar.planning.plan import Family

Sample = tuple[int, float]

# An affine fit that misses a measured point by more is replaced by lines between the points.
_MAX_RESIDUAL = 0.05
# How far beyond the measured sizes a prediction is still called one.
_REACH = 4


@dataclass(frozen=True, slots=True)
class AffineFit:
    """``alpha + beta * nbytes`` seconds, and the largest relative error at a measured point."""

    alpha: float
    beta: float
    residual: float

    @staticmethod
    def of(points: Sequence[Sample]) -> "AffineFit":
        """Fit `points` (bytes, seconds) by least squares of relative errors, no term negative.

        Raises
        ------
        PlanError
            If fewer than two sizes were measured or a time is not positive.
        """
        if len({size for size, _ in points}) < 2 or any(t <= 0 for _, t in points):
            raise PlanError(
                f"{len(points)} measured points do not fit a line; measure at least two sizes, "
                "each with a positive time"
            )
        # With u = 1/t and v = S/t the model is alpha u + beta v = 1: plain least squares.
        pairs = [(1 / seconds, size / seconds) for size, seconds in points]
        uu, uv, vv = (sum(p[i] * p[j] for p in pairs) for i, j in ((0, 0), (0, 1), (1, 1)))
        su, sv = (sum(p[i] for p in pairs) for i in (0, 1))
        determinant = uu * vv - uv * uv
        alpha = (su * vv - sv * uv) / determinant
        beta = (sv * uu - su * uv) / determinant
        if alpha < 0:
            alpha, beta = 0.0, sv / vv
        elif beta < 0:
            alpha, beta = su / uu, 0.0
        residual = max(abs(alpha * u + beta * v - 1) for u, v in pairs)
        return AffineFit(alpha, beta, residual)

    def seconds(self, nbytes: float) -> float:
        """Return the fitted seconds of `nbytes` bytes."""
        return self.alpha + self.beta * nbytes


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of whole all-reduces measured on this cluster, as (nbytes, seconds) per family.

    Several times for one size count by their median.
    """

    samples: dict[Family, tuple[Sample, ...]]

    def predict(self, family: Family, nbytes: int) -> float | None:
        """Return predicted seconds, or None where the measurements say nothing.

        A straight line through all sizes where it fits within 5 %, else lines between neighbouring
        sizes. Sizes more than 4 times beyond the measured ones, and families measured at fewer
        than two sizes, are not predicted.
        """
        points = _medians(self.samples.get(family, ()))
        if len(points) < 2:
            return None
        if not points[0][0] <= nbytes * _REACH or not nbytes <= points[-1][0] * _REACH:
            return None
        fit = AffineFit.of(points)
        return fit.seconds(nbytes) if fit.residual <= _MAX_RESIDUAL else _piecewise(points, nbytes)


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
