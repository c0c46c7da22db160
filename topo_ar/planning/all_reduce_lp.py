"""The largest all-reduce rate of a network: a linear program over cuts, solved by HiGHS.

Each piece of the buffer has a root: it is reduced to the root over an in-tree and broadcast from
it over an out-tree. Variables are the rate x_v that each rank roots, and for each edge the
bandwidth a_e for broadcasts and r_e for reductions, with ``a_e + r_e <= b_e``. By Edmonds' theorem
broadcasts of the rates x fit into a exactly if every set A of vertices that leaves out a rank lets
out what it roots: ``a(A -> rest) >= sum of x in A``; reductions likewise with the edges that enter
A. A switch without multicast passes on as much broadcast as it takes in, ``a(in) = a(out)``, and
one that cannot add as much reduction; without this rule a plain flow would copy and add in switches
for free. The largest sum of x is bytes of buffer per second.

There are exponentially many sets, but few matter: minimum cuts find those that a solution violates,
and they are added until there are none. Symmetry leaves one variable per orbit (see
`topo_ar.planning.symmetry`).

The result is proven by exact arithmetic: the dual values of the solver are rounded to rationals
and mended to a feasible dual solution, whose value no all-reduce can exceed (weak duality).

References
----------
J. Edmonds, "Edge-disjoint branchings", 1973; ForestColl (Zhao et al., 2024) for all-gather.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topo_ar.errors import PlanError
from topo_ar.planning.cuts import Mask, minimum_cut
from topo_ar.planning.machines import machines
from topo_ar.planning.network import Network
from topo_ar.planning.symmetry import Ints, Symmetry, View

Floats = NDArray[np.float64]

# A cut violated by less, relative to the rate, is taken for rounding.
_VIOLATION = 1e-7
_FLOW_SCALE = 1 << 28
_MAX_ROUNDS = 400
_MAX_DENOMINATOR = 10**6


@dataclass(frozen=True, slots=True, eq=False)
class LpResult:
    """Units of capacity per second, proven; whether it is the optimum; and what limits it.

    `side` marks the vertices that the edges of the heaviest cut lead away from, `limits` the edges
    whose capacities the rate is a weighted sum of.
    """

    rate: Fraction
    optimal: bool
    side: Mask
    limits: Mask


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """What a set roots, and the edges that let it out (or, for a reduction, in); by orbit."""

    side: Mask
    roots: Ints
    edges: Ints
    reduction: bool


def all_reduce_rate(
    network: Network,
    symmetry: Symmetry,
    multicast: frozenset[int] = frozenset(),
    reducing: frozenset[int] = frozenset(),
) -> LpResult | None:
    """Return the optimum of the program for switches of these abilities, None if it has no proof.

    Raises
    ------
    PlanError
        If the solver gives up; the message is the solver's.
    """
    program = _Program(network, symmetry, multicast, reducing)
    for side in _likely_sides(network, symmetry):
        program.add(side, reduction=False)
        program.add(side, reduction=True)
    solution, before = program.solve(), math.inf
    for _ in range(_MAX_ROUNDS):
        stalled = math.isclose(solution.rate, before, rel_tol=1e-9)
        if not _add_violated(program, symmetry, program.spread(solution) if stalled else solution):
            return program.proven(solution, optimal=True)
        solution, before = program.solve(), solution.rate
    # Fewer cuts than there are still bound the rate.
    return program.proven(solution, optimal=False)


def _likely_sides(network: Network, symmetry: Symmetry) -> Iterator[Mask]:
    """Yield all vertices but one rank, and all but one machine, one of each orbit."""
    labels = np.array(machines(network))
    for view in symmetry.views:
        apart = view.class_of == view.sink
        yield ~apart
        (label,) = labels[apart]
        elsewhere = labels != label
        if label >= 0 and elsewhere[list(network.ranks)].any():
            yield elsewhere


@dataclass(frozen=True, slots=True, eq=False)
class _Solution:
    rate: float
    roots: Floats
    broadcast: Floats
    reduce: Floats
    cut_duals: Floats
    balance_duals: Floats


class _Program:
    """The linear program over the cuts found so far. Rates are relative to `scale` units."""

    def __init__(
        self,
        network: Network,
        symmetry: Symmetry,
        multicast: frozenset[int],
        reducing: frozenset[int],
    ) -> None:
        self.symmetry = symmetry
        self.tails, self.heads = np.array(network.tails), np.array(network.heads)
        self.capacities = [network.capacities[edge] for edge in symmetry.edge_first]
        self.limit = network.limit
        self.scale = self._scale(network)
        self.cuts: list[_Cut] = []
        self._known = set[bytes]()
        self._balance = _balance_rows(network, symmetry, multicast, reducing)

    def _scale(self, network: Network) -> float:
        large = float(self.limit)
        values = np.array([large if c is None else float(c) for c in network.capacities])
        ranks = np.array(network.ranks)
        sums = [
            np.bincount(ends, values, minlength=len(network.names))[ranks].min()
            for ends in (self.tails, self.heads)
        ]
        return float(min(sums))

    def add(self, side: Mask, *, reduction: bool) -> bool:
        """Add the cut with these vertices on the side of the roots; False if it is known."""
        inside, outside = (self.heads, self.tails) if reduction else (self.tails, self.heads)
        crossing = side[inside] & ~side[outside]
        num_edges, num_ranks = len(self.symmetry.edge_sizes), len(self.symmetry.rank_sizes)
        edges = np.bincount(self.symmetry.edge_orbit[crossing], minlength=num_edges)
        held = self.symmetry.rank_orbit[side]
        roots = np.bincount(held[held >= 0], minlength=num_ranks)
        key = edges.tobytes() + roots.tobytes() + bytes([reduction])
        if key in self._known:
            return False
        self._known.add(key)
        self.cuts.append(_Cut(side, roots, edges, reduction))
        return True

    def solve(self) -> _Solution:
        """Return an optimum over the cuts found so far."""
        goal = -np.concatenate([self.symmetry.rank_sizes, np.zeros(2 * len(self.capacities))])
        upper, limits = self._rows()
        balance = self._balance_matrix()
        num_balance = balance.shape[0]
        result = _minimum(goal, upper, limits, balance)
        return self._solution(
            result.x,
            -result.fun,
            cut_duals=-result.ineqlin.marginals[: len(self.cuts)],
            balance_duals=result.eqlin.marginals if num_balance else np.zeros(0),
        )

    def spread(self, solution: _Solution) -> _Solution:
        """Return a solution of the same rate that uses the bandwidth as evenly as it can.

        Among the optima the one with the least relative shortfall, in sum, from equal roots and
        half of each edge for broadcasts and half for reductions. An optimum as the solver finds
        it leaves bandwidth unused, and violates many cuts that do not matter.
        """
        from scipy.sparse import block_array, csr_array, identity

        upper, limits = self._rows()
        sizes = self.symmetry.rank_sizes.astype(float)
        half = [self.limit if c is None else c for c in self.capacities]
        halves = np.array(half, dtype=float) / self.scale / 2
        even = np.concatenate([np.full(len(sizes), solution.rate / sizes.sum()), halves, halves])
        counts = np.concatenate([sizes, self.symmetry.edge_sizes, self.symmetry.edge_sizes])
        columns = len(even)
        rate = csr_array(-np.concatenate([sizes, np.zeros(columns - len(sizes))])[None, :])
        one = identity(columns, format="csr")
        balance = self._balance_matrix()
        result = _minimum(
            np.concatenate([np.zeros(columns), counts / even]),
            block_array([[upper, None], [rate, None], [-one, -one]], format="csr"),
            np.concatenate([limits, [-solution.rate * (1 - 1e-9)], -even]),
            block_array([[balance, csr_array(balance.shape)]], format="csr"),
        )
        return self._solution(result.x, solution.rate, solution.cut_duals, solution.balance_duals)

    def _solution(
        self, x: Floats, rate: float, cut_duals: Floats, balance_duals: Floats
    ) -> _Solution:
        num_ranks, num_edges = len(self.symmetry.rank_sizes), len(self.capacities)
        return _Solution(
            rate=rate,
            roots=x[:num_ranks],
            broadcast=x[num_ranks : num_ranks + num_edges],
            reduce=x[num_ranks + num_edges : num_ranks + 2 * num_edges],
            cut_duals=cut_duals,
            balance_duals=balance_duals,
        )

    def _rows(self) -> tuple[Any, Floats]:
        """Return the inequalities: the cuts, a limit of the rate, and the shared edges."""
        from scipy.sparse import csr_array, hstack, identity, vstack

        num_ranks, num_edges = len(self.symmetry.rank_sizes), len(self.capacities)
        roots = csr_array(np.array([cut.roots for cut in self.cuts], dtype=float))
        edges = csr_array(-np.array([cut.edges for cut in self.cuts], dtype=float))
        reduction = np.array([cut.reduction for cut in self.cuts], dtype=float)[:, None]
        cut_rows = hstack([roots, edges * (1 - reduction), edges * reduction])
        shared = hstack(
            [csr_array((num_edges, num_ranks)), identity(num_edges), identity(num_edges)]
        )
        sizes = self.symmetry.rank_sizes.astype(float)
        top = csr_array(np.concatenate([sizes, np.zeros(2 * num_edges)])[None, :])
        finite = np.array([c is not None for c in self.capacities])
        limits = np.array([float(c) for c in self.capacities if c is not None]) / self.scale
        return (
            vstack([cut_rows, top, csr_array(shared)[finite]], format="csr"),
            # Twice the largest rate of all only keeps a program of few cuts bounded.
            np.concatenate([np.zeros(len(self.cuts)), [2 * self.limit / self.scale], limits]),
        )

    def _balance_matrix(self) -> Any:
        from scipy.sparse import csr_array

        rows, columns, values = self._balance
        num_ranks = len(self.symmetry.rank_sizes)
        shape = int(rows.max(initial=-1)) + 1, num_ranks + 2 * len(self.capacities)
        return csr_array((values.astype(float), (rows, columns + num_ranks)), shape=shape)

    def proven(self, solution: _Solution, *, optimal: bool) -> LpResult | None:
        """Return what the dual solution proves, in exact arithmetic.

        None where rounding has put a price on an edge without a limit, which proves nothing.
        """
        weights = [_rational(value) for value in solution.cut_duals]
        weights = [max(weight, Fraction(0)) for weight in weights]
        balance = [_rational(value) for value in solution.balance_duals]
        num_edges = len(self.capacities)
        # The price of one unit of an edge's bandwidth, for broadcasts and then for reductions.
        prices = [Fraction(0)] * (2 * num_edges)
        rooted = [Fraction(0)] * len(self.symmetry.rank_sizes)
        for cut, weight in zip(self.cuts, weights, strict=True):
            if weight:
                for edge in np.flatnonzero(cut.edges).tolist():
                    prices[edge + num_edges * cut.reduction] += weight * int(cut.edges[edge])
                for orbit in np.flatnonzero(cut.roots).tolist():
                    rooted[orbit] += weight * int(cut.roots[orbit])
        for row, column, value in zip(*(part.tolist() for part in self._balance), strict=True):
            prices[column] += balance[row] * value
        total = Fraction(0)
        limits = np.zeros(num_edges, dtype=np.bool_)
        for edge, capacity in enumerate(self.capacities):
            price = max(prices[edge], prices[num_edges + edge], Fraction(0))
            limits[edge] = price > 0
            if capacity is not None:
                total += price * capacity
            elif price:
                return None
        shares = [r / int(n) for r, n in zip(rooted, self.symmetry.rank_sizes, strict=True)]
        rate = total / min(shares)
        heaviest = max(range(len(weights)), key=weights.__getitem__)
        return LpResult(
            rate=rate,
            optimal=optimal and math.isclose(float(rate), solution.rate * self.scale, rel_tol=1e-6),
            side=self.cuts[heaviest].side ^ self.cuts[heaviest].reduction,
            limits=limits[self.symmetry.edge_orbit],
        )


def _minimum(goal: Floats, upper: Any, limits: Floats, balance: Any) -> Any:
    """Return what minimises `goal` with ``upper @ x <= limits``, ``balance @ x = 0``, x >= 0."""
    from scipy.optimize import linprog

    num_balance = balance.shape[0]
    result = linprog(
        goal,
        A_ub=upper,
        b_ub=limits,
        A_eq=balance if num_balance else None,
        b_eq=np.zeros(num_balance) if num_balance else None,
        method="highs",
        options={"primal_feasibility_tolerance": 1e-9, "dual_feasibility_tolerance": 1e-9},
    )
    if result.status != 0:
        raise PlanError(f"the linear program of the all-reduce bound failed: {result.message}")
    return result


def _rational(value: float) -> Fraction:
    return Fraction(float(value)).limit_denominator(_MAX_DENOMINATOR)


def _balance_rows(
    network: Network, symmetry: Symmetry, multicast: frozenset[int], reducing: frozenset[int]
) -> tuple[Ints, Ints, Ints]:
    """Return rows, columns and values of "in equals out" for one switch of each orbit."""
    held = frozenset(network.ranks)
    first: dict[int, int] = {}
    for vertex, orbit in enumerate(symmetry.vertex_orbit.tolist()):
        if vertex not in held:
            first.setdefault(orbit, vertex)
    chosen = np.zeros(len(network.names), dtype=np.bool_)
    chosen[list(first.values())] = True
    sums: dict[tuple[int, int, int], int] = {}
    for ends, sign in ((np.array(network.heads), 1), (np.array(network.tails), -1)):
        for edge in np.flatnonzero(chosen[ends]).tolist():
            vertex = int(ends[edge])
            orbit = int(symmetry.edge_orbit[edge])
            for kind, free in ((0, multicast), (1, reducing)):
                if vertex not in free:
                    key = (vertex, kind, orbit)
                    sums[key] = sums.get(key, 0) + sign
    numbers: dict[tuple[int, int], int] = {}
    rows = [numbers.setdefault(key[:2], len(numbers)) for key in sums]
    offset = len(symmetry.edge_sizes)
    columns = [orbit + offset * kind for _, kind, orbit in sums]
    return (
        np.array(rows, dtype=np.int64),
        np.array(columns, dtype=np.int64),
        np.array(list(sums.values()), dtype=np.int64),
    )


def _add_violated(program: _Program, symmetry: Symmetry, solution: _Solution) -> bool:
    """Add the cuts that `solution` violates; False if there are none that are new."""
    added = False
    for view in symmetry.views:
        classes, orbits, counts = view.sources
        offered = np.bincount(classes, counts * solution.roots[orbits], minlength=view.num_classes)
        unit = _FLOW_SCALE / max(float(offered.sum()), 1e-12)
        wanted = np.floor(np.maximum(offered, 0) * unit).astype(np.int64).tolist()
        for values, reduction in ((solution.broadcast, False), (solution.reduce, True)):
            value, within = minimum_cut(
                view, _folded(view, values, unit), wanted, backwards=reduction
            )
            if value < sum(wanted) * (1 - _VIOLATION):
                added |= program.add(within[view.class_of], reduction=reduction)
    return added


def _folded(view: View, values: Floats, unit: float) -> list[int]:
    weights = view.count * np.maximum(values[view.orbit], 0)
    sums = np.bincount(view.folded, weights, minlength=len(view.tails)) * unit
    return [int(value) for value in np.minimum(np.ceil(sums), 2.0 * _FLOW_SCALE).tolist()]
