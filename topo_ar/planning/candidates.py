"""The families that can be chosen on given levels, each costed for one buffer."""

from dataclasses import dataclass

from topo_ar.errors import PlanError
from topo_ar.planning import cost
from topo_ar.planning.calibration import Calibration
from topo_ar.planning.chunks import equal_chunks, tapered_chunks
from topo_ar.planning.cost import CostParameters
from topo_ar.planning.plan import Alternative, Family
from topo_ar.planning.runtime import CPU_RUNTIME, Runtime
from topo_ar.units import format_size

# Elements in a cache line of the narrowest common type: shards of whole lines share none.
_LINE_ELEMENTS = 16
# Equal chunks must promise this much over the taper, which was found by measurement.
_TAPER_MARGIN = 0.95


@dataclass(frozen=True, slots=True)
class Candidate:
    """A family with its chunks and predicted seconds; `excluded` says why it may not be chosen."""

    family: Family
    chunk_nbytes: tuple[int, ...]
    seconds: float
    measured: bool = False
    excluded: str = ""

    def as_alternative(self) -> Alternative:
        """Return what a plan keeps of this candidate."""
        return Alternative(
            self.family, self.seconds, len(self.chunk_nbytes), self.measured, self.excluded
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything beside the size that decides a candidate's cost."""

    parameters: CostParameters
    itemsize: int = 4
    runtime: Runtime = CPU_RUNTIME
    leader_limit_nbytes: int | None = None
    calibration: Calibration | None = None

    @property
    def align_nbytes(self) -> int:
        """The multiple of which chunks are made, so that every shard's part is whole lines."""
        p = self.parameters
        line = _LINE_ELEMENTS * self.itemsize
        aligned = line * max(1, p.ranks_per_node) * p.num_nodes
        if 8 * aligned <= self.runtime.max_chunk_nbytes:
            return aligned
        return line if 8 * line <= self.runtime.max_chunk_nbytes else self.itemsize

    @property
    def leader_limit(self) -> int:
        """The size in bytes up to which the leader path may be chosen.

        Each leader sends the whole buffer n-1 times, so the limits found by measurement fall
        quickly with the number of nodes.
        """
        if self.leader_limit_nbytes is not None:
            return self.leader_limit_nbytes
        return {2: 256 << 10, 3: 64 << 10}.get(self.parameters.num_nodes, 32 << 10)


def candidates(setting: Setting, nbytes: int) -> list[Candidate]:
    """Return every family that makes sense on these levels, simplest first, costed."""
    p = setting.parameters
    found = [Candidate(Family.FLAT_RING, (nbytes,), cost.flat_ring(p, nbytes))]
    if p.ranks_per_node and p.world_size > 1:
        if p.num_nodes > 1:
            found += [_sequential(setting, nbytes), _leader(setting, nbytes)]
        found.append(_pipelined(setting, nbytes))
    return [_calibrated(candidate, setting.calibration, nbytes) for candidate in found]


def choose(found: list[Candidate]) -> Candidate:
    """Return the fastest candidate that is not excluded; the simplest of equals.

    One chunk in place of a taper must promise as much as equal chunks in place of it.
    """
    allowed = [candidate for candidate in found if not candidate.excluded]
    limit = min(candidate.seconds for candidate in allowed) * (1 + 1e-9)
    best = next(candidate for candidate in allowed if candidate.seconds <= limit)
    last = allowed[-1]
    if best.family != Family.HIERARCHICAL_SEQUENTIAL or best.measured or last.measured:
        return best
    tapered = last.family == Family.HIERARCHICAL_PIPELINED
    return last if tapered and best.seconds > _TAPER_MARGIN * last.seconds else best


def pick(setting: Setting, found: list[Candidate], family: Family) -> Candidate:
    """Return the candidate of a family that the caller insists on.

    Raises
    ------
    PlanError
        If that family cannot run on these levels, with the reason.
    """
    p = setting.parameters
    for candidate in found:
        if candidate.family == family:
            too_long = max(candidate.chunk_nbytes, default=0) > setting.runtime.max_chunk_nbytes
            if family != Family.FLAT_RING and too_long:
                raise PlanError(f"{family} cannot run: {candidate.excluded}")
            return candidate
    if not p.ranks_per_node:
        raise PlanError(f"{family} needs nodes with equal numbers of ranks; use flat_ring")
    raise PlanError(
        f"{family} needs more than one node; use flat_ring or hierarchical_pipelined"
        if p.world_size > 1
        else f"{family} needs more than one rank; use flat_ring"
    )


def _sequential(setting: Setting, nbytes: int) -> Candidate:
    seconds = cost.hierarchical(setting.parameters, [nbytes])
    excluded = ""
    if nbytes > setting.runtime.max_chunk_nbytes:
        excluded = (
            f"it needs the whole buffer in one chunk, and a chunk holds at most "
            f"{format_size(setting.runtime.max_chunk_nbytes)}"
        )
    return Candidate(
        Family.HIERARCHICAL_SEQUENTIAL, (nbytes,), seconds, measured=False, excluded=excluded
    )


def _leader(setting: Setting, nbytes: int) -> Candidate:
    chunks: tuple[int, ...] = (nbytes,)
    if nbytes > setting.runtime.max_chunk_nbytes:
        chunks = tapered_chunks(nbytes, setting.align_nbytes, setting.runtime.max_chunk_nbytes)
    excluded = ""
    if nbytes > setting.leader_limit:
        excluded = f"the leader path ends at {format_size(setting.leader_limit)}"
    return Candidate(
        Family.HIERARCHICAL_LEADER,
        chunks,
        cost.leader(setting.parameters, chunks),
        measured=False,
        excluded=excluded,
    )


def _pipelined(setting: Setting, nbytes: int) -> Candidate:
    p, align, limit = setting.parameters, setting.align_nbytes, setting.runtime.max_chunk_nbytes
    chunks = tapered_chunks(nbytes, align, limit)
    seconds = cost.hierarchical(p, chunks)
    count = cost.optimal_chunk_count(p, nbytes)
    if count < len(chunks):
        fewer = equal_chunks(nbytes, count, align, limit)
        if cost.hierarchical(p, fewer) < _TAPER_MARGIN * seconds:
            chunks, seconds = fewer, cost.hierarchical(p, fewer)
    excluded = ""
    if len(chunks) == 1 and p.num_nodes > 1:
        excluded = f"with one chunk it is {Family.HIERARCHICAL_SEQUENTIAL}"
    return Candidate(
        Family.HIERARCHICAL_PIPELINED, chunks, seconds, measured=False, excluded=excluded
    )


def _calibrated(candidate: Candidate, calibration: Calibration | None, nbytes: int) -> Candidate:
    seconds = calibration.predict(candidate.family, nbytes) if calibration else None
    if seconds is None:
        return candidate
    return Candidate(candidate.family, candidate.chunk_nbytes, seconds, True, candidate.excluded)
