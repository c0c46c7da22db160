"""The families that can be chosen on given levels, each costed for one buffer."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from topo_ar.errors import PlanError
from topo_ar.planning import cost, cost_rounds
from topo_ar.planning.calibration import Calibration
from topo_ar.planning.chunks import equal_chunks, tapered_chunks
from topo_ar.planning.cost import CostParameters, leaders, rails
from topo_ar.planning.cost_flat import FlatRounds, Rounds, seconds_of
from topo_ar.planning.cost_levels import (
    Weighted,
    has_third_level,
    islands_of,
    three_level,
    weighted,
    weighted_stages,
)
from topo_ar.planning.cost_tree import double_binary_tree
from topo_ar.planning.level_bounds import all_reduce_lower_bound
from topo_ar.planning.nccl_search import NcclMachine, nccl_job
from topo_ar.planning.nccl_tuning import NcclJob, choice
from topo_ar.planning.pipelines import Pipeline
from topo_ar.planning.plan import Alternative, Family, Shards
from topo_ar.planning.runtime import CPU_RUNTIME, Runtime
from topo_ar.units import format_size

# Elements in a cache line of the narrowest common type: shards of whole lines share none.
_LINE_ELEMENTS = 16
# Equal chunks must promise this much over the taper, which was found by measurement.
_TAPER_MARGIN = 0.95
_NOT_HERE = "this version does not run it"
_BY_ROUNDS = (
    Family.HIERARCHICAL_RING,
    Family.HIERARCHICAL_HALVING,
    Family.HIERARCHICAL_DOUBLING,
)


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


@dataclass(frozen=True)
class Setting:
    """Everything beside the size that decides a candidate's cost.

    `families` is what can be run; None stands for all of them. With `nccl` the flat all-reduce is
    what NCCL makes of it by itself, at the time its own model expects.
    """

    parameters: CostParameters
    itemsize: int = 4
    runtime: Runtime = CPU_RUNTIME
    leader_limit_nbytes: int | None = None
    calibration: Calibration | None = None
    families: Collection[Family] | None = None
    nccl: NcclMachine | None = None

    @cached_property
    def rounds(self) -> dict[Family, Rounds]:
        """The rounds of the flat algorithms that go round by round."""
        p = self.parameters
        flat = FlatRounds(p.levels, p.rate, self.runtime)
        return {
            Family.DIRECT: flat.direct(),
            Family.HALVING_DOUBLING: flat.halving_doubling(),
        }

    @cached_property
    def nccl_job(self) -> NcclJob | None:
        """What NCCL's search makes of `nccl`."""
        return nccl_job(self.nccl) if self.nccl else None

    @cached_property
    def wire_seconds_per_byte(self) -> float:
        """What no all-reduce falls below at payload rates, for each byte of a buffer."""
        nvls = self.nccl is not None and self.nccl.nvls
        return all_reduce_lower_bound(self.parameters.levels, 1, "payload", nvls=nvls).seconds

    @cached_property
    def weighted(self) -> Weighted:
        """The weighted family."""
        return weighted(self.parameters.levels, self.parameters)

    def pipeline(self, family: Family) -> Pipeline:
        """Return the stages of a family that goes chunk by chunk."""
        made = self._pipelines.get(family)
        if made is None:
            made = self._pipeline(family).with_calls(self.runtime.call_seconds)
            self._pipelines[family] = made
        return made

    @cached_property
    def _pipelines(self) -> dict[Family, Pipeline]:
        return {}

    def _pipeline(self, family: Family) -> Pipeline:
        p = self.parameters
        match family:
            case Family.DOUBLE_BINARY_TREE:
                return double_binary_tree(p.levels, p)
            case Family.HIERARCHICAL_LEADER:
                return leaders(p)
            case Family.HIERARCHICAL_WEIGHTED:
                return self.weighted.stages
            case Family.HIERARCHICAL_THREE_LEVEL:
                return three_level(p.levels, p)
            case Family.HIERARCHICAL_RING:
                return cost_rounds.ring(p)
            case Family.HIERARCHICAL_HALVING:
                return cost_rounds.halving(p)
            case Family.HIERARCHICAL_DOUBLING:
                return cost_rounds.doubling(p)
        return rails(p)

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
    return [candidate(setting, family, nbytes) for family in families_on(setting.parameters)]


def families_on(parameters: CostParameters) -> list[Family]:
    """Return the families that make sense on these levels, simplest first."""
    p = parameters
    if p.world_size == 1:
        return [Family.FLAT_RING]
    found = [
        Family.FLAT_RING,
        Family.DIRECT,
        Family.HALVING_DOUBLING,
        Family.DOUBLE_BINARY_TREE,
    ]
    if p.ranks_per_node:
        if p.num_nodes > 1:
            found += [Family.HIERARCHICAL_SEQUENTIAL, Family.HIERARCHICAL_LEADER]
        found.append(Family.HIERARCHICAL_PIPELINED)
        if p.rail_rounds == 2:  # two nodes exchange, and who runs rings runs nothing else
            found += [*_BY_ROUNDS]
    if p.num_nodes > 1:
        found.append(Family.HIERARCHICAL_WEIGHTED)
    if has_third_level(p.levels, p):
        found.append(Family.HIERARCHICAL_THREE_LEVEL)
    return found


def candidate(setting: Setting, family: Family, nbytes: int) -> Candidate:
    """Return one of `families_on` costed, with its best chunks."""
    chunks, excluded = _chunks(setting, family, nbytes)
    measured = setting.calibration.predict(family, nbytes) if setting.calibration else None
    if not excluded and setting.families is not None and family not in setting.families:
        excluded = _NOT_HERE
    most = setting.runtime.most_direct_nodes
    between = family.startswith("hierarchical") and family not in _BY_ROUNDS
    if not excluded and between and setting.parameters.num_nodes > most:
        excluded = f"nodes send to each other directly up to {most} of them"
    seconds = _seconds(setting, family, chunks) if measured is None else measured
    return Candidate(family, chunks, seconds, measured is not None, excluded)


def seconds_as_it_is(setting: Setting, candidate: Candidate, shards: Shards) -> float:
    """Return what a candidate with these chunks and shards would take in another setting."""
    if candidate.family != Family.HIERARCHICAL_WEIGHTED:
        return _seconds(setting, candidate.family, candidate.chunk_nbytes)
    p = setting.parameters
    return weighted_stages(p.levels, p, shards).seconds(candidate.chunk_nbytes)


def network_share(setting: Setting, candidate: Candidate) -> float:
    """Return for which part of its time the busiest NICs or uplink are at work."""
    p, nbytes = setting.parameters, sum(candidate.chunk_nbytes)
    if candidate.family == Family.FLAT_RING:
        slope = 2 * (p.world_size - 1) * p.ring_network_beta / p.world_size
    elif candidate.family in setting.rounds:
        slope = sum(each.network for each in setting.rounds[candidate.family])
    else:
        slope = setting.pipeline(candidate.family).network
    return nbytes * slope / candidate.seconds if candidate.seconds else 0


def _seconds(setting: Setting, family: Family, chunks: tuple[int, ...]) -> float:
    if family == Family.FLAT_RING:
        nbytes = sum(chunks)
        if setting.nccl_job is not None:
            # On two nodes with few NICs NCCL's own model promises more than they can carry.
            least = nbytes * setting.wire_seconds_per_byte
            return max(choice(setting.nccl_job, nbytes).seconds, least)
        return cost.flat_ring(setting.parameters, nbytes)
    if family in setting.rounds:
        return seconds_of(setting.rounds[family], sum(chunks))
    return setting.pipeline(family).seconds(chunks)


def choose(found: list[Candidate]) -> Candidate:
    """Return the fastest candidate that is not excluded; the simplest of equals.

    One chunk in place of a taper must promise as much as equal chunks in place of it, and so must
    a ring in place of direct exchange.
    """
    allowed = [each for each in found if not each.excluded]
    limit = min(each.seconds for each in allowed) * (1 + 1e-9)
    best = next(each for each in allowed if each.seconds <= limit)
    direct = [Family.HIERARCHICAL_PIPELINED]
    if best.family == Family.HIERARCHICAL_RING:
        direct.append(Family.HIERARCHICAL_SEQUENTIAL)
    elif best.family != Family.HIERARCHICAL_SEQUENTIAL:
        return best
    usual = min(
        (c for c in allowed if c.family in direct), key=lambda each: each.seconds, default=best
    )
    if best.measured or usual.measured:
        return best
    return usual if best.seconds > _TAPER_MARGIN * usual.seconds else best


def pick(setting: Setting, found: list[Candidate], family: Family) -> Candidate:
    """Return the candidate of a family that the caller insists on.

    Raises
    ------
    PlanError
        If that family cannot run on these levels, with the reason.
    """
    p = setting.parameters
    for each in found:
        if each.family == family:
            too_long = max(each.chunk_nbytes, default=0) > setting.runtime.max_chunk_nbytes
            whole = family in setting.rounds or family == Family.FLAT_RING
            if each.excluded == _NOT_HERE or (too_long and not whole):
                raise PlanError(f"{family} cannot run: {each.excluded}")
            return each
    if p.world_size == 1:
        raise PlanError(f"{family} needs more than one rank; use flat_ring")
    if family == Family.HIERARCHICAL_THREE_LEVEL:
        raise PlanError(
            f"{family} needs islands of equal size in the nodes, or racks of equally many nodes; "
            "the topology has neither"
        )
    if not p.ranks_per_node:
        raise PlanError(
            f"{family} needs nodes with equal numbers of ranks; use "
            f"{Family.HIERARCHICAL_WEIGHTED} or flat_ring"
        )
    if family in _BY_ROUNDS:
        raise PlanError(f"{family} needs more than two nodes, which exchange; use another")
    raise PlanError(f"{family} needs more than one node; use flat_ring or hierarchical_pipelined")


def _chunks(setting: Setting, family: Family, nbytes: int) -> tuple[tuple[int, ...], str]:
    """Return the chunks of a family, and why it may not be chosen if so."""
    most = setting.runtime.max_chunk_nbytes
    shown = format_size(most, like=nbytes)
    match family:
        case Family.HIERARCHICAL_SEQUENTIAL:
            held = f"it needs the whole buffer in one chunk, and a chunk holds at most {shown}"
            return (nbytes,), held if nbytes > most else ""
        case Family.HIERARCHICAL_DOUBLING:
            return _whole(setting, nbytes), ""
        case Family.HIERARCHICAL_LEADER:
            chunks = _whole(setting, nbytes)
            limit = format_size(setting.leader_limit, like=nbytes)
            return chunks, (
                f"the leader path ends at {limit}" if nbytes > setting.leader_limit else ""
            )
        case Family.HIERARCHICAL_PIPELINED:
            chunks = _cut(setting, family, nbytes)
            sequential = len(chunks) == 1 and setting.parameters.num_nodes > 1
            return chunks, (
                f"with one chunk it is {Family.HIERARCHICAL_SEQUENTIAL}" if sequential else ""
            )
        case Family.HIERARCHICAL_WEIGHTED:
            return _cut(setting, family, nbytes), setting.weighted.pointless
        case Family.HIERARCHICAL_THREE_LEVEL:
            alike = not setting.runtime.islands and islands_of(setting.parameters.levels)
            return _cut(setting, family, nbytes), (
                f"in shared memory islands make no difference to {Family.HIERARCHICAL_PIPELINED}"
                if alike
                else ""
            )
        case Family.DOUBLE_BINARY_TREE | Family.HIERARCHICAL_RING | Family.HIERARCHICAL_HALVING:
            return _cut(setting, family, nbytes), ""
    return (nbytes,), ""


def _whole(setting: Setting, nbytes: int) -> tuple[int, ...]:
    """Return one chunk, or as few as hold the buffer."""
    most = setting.runtime.max_chunk_nbytes
    return (nbytes,) if nbytes <= most else tapered_chunks(nbytes, setting.align_nbytes, most)


def _cut(setting: Setting, family: Family, nbytes: int) -> tuple[int, ...]:
    """Cut for a pipeline: tapered, or into the best number of equal chunks where that is fewer.

    Inside one node of CPU ranks there are as few chunks as its slots allow.
    """
    stages, align = setting.pipeline(family), setting.align_nbytes
    limit = setting.runtime.max_chunk_nbytes
    if setting.parameters.num_nodes == 1 and setting.runtime.chunk_seconds is not None:
        # Without a wire, stages do not overlap: the rank itself does one after the other.
        return equal_chunks(nbytes, 1, align, limit)
    chunks = tapered_chunks(nbytes, align, limit)
    count = stages.best_chunk_count(nbytes)
    if count < len(chunks):
        fewer = equal_chunks(nbytes, count, align, limit)
        if stages.seconds(fewer) < _TAPER_MARGIN * stages.seconds(chunks):
            return fewer
    return chunks
