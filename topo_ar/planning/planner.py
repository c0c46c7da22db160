"""From levels and a size to the best executable plan, with its bound and its reason."""

from collections.abc import Collection
from dataclasses import replace

from topo_ar.errors import PlanError
from topo_ar.planning import reasons, what_if
from topo_ar.planning.calibration import Calibration
from topo_ar.planning.candidates import Candidate, Setting, candidates, choose, pick
from topo_ar.planning.cost import CostParameters
from topo_ar.planning.cost_levels import islands_of, racks_of
from topo_ar.planning.level_bounds import Bound, all_reduce_lower_bound, check_levels
from topo_ar.planning.lowering_nodes import LEADERS
from topo_ar.planning.nccl_search import NcclMachine
from topo_ar.planning.placement import Distances, place
from topo_ar.planning.plan import Alternative, Family, Plan, Shards
from topo_ar.planning.runtime import CPU_RUNTIME, Runtime
from topo_ar.topology.levels import Levels

LEVEL_BOUND = "proven for the nodes and ports of the topology"
NVLS_BOUND = f"{LEVEL_BOUND}, its NVSwitches multicasting and adding"


def plan(
    levels: Levels,
    nbytes: int,
    *,
    topology_hash: str = "",
    itemsize: int = 4,
    calibration: Calibration | None = None,
    family: Family | None = None,
    leader_limit_nbytes: int | None = None,
    runtime: Runtime = CPU_RUNTIME,
    max_chunk_nbytes: int | None = None,
    families: Collection[Family] | None = None,
    bound: Bound | None = None,
    bound_kind: str = "",
    distances: Distances | None = None,
    advice: bool = False,
    nccl: NcclMachine | None = None,
) -> Plan:
    """Return the fastest plan that can run for an all-reduce of `nbytes` bytes.

    A pure function: equal arguments give equal JSON on every rank.

    Parameters
    ----------
    levels : Levels
        The nodes with their ports; costs use payload rates, the bound nominal ones.
    nbytes : int
        Size of each rank's buffer.
    topology_hash : str
        Kept in the plan, so that it is refused on another topology.
    itemsize : int
        Bytes of an element: chunks never split one.
    calibration : Calibration, optional
        Measured times; families they cover are predicted from them.
    family : Family, optional
        Insist on this family.
    leader_limit_nbytes : int, optional
        Largest size for the leader path; by default 256 KiB on 2 nodes, 64 KiB on 3, 32 KiB on
        more.
    runtime : Runtime
        What will run the plan: its chunk slots and the cost of its flat ring.
    max_chunk_nbytes : int, optional
        Chunk slots of another size than `runtime` says.
    families : collection of Family, optional
        What the caller can run; a family that is not among them is costed, but never chosen.
    bound : Bound, optional
        A bound for `nbytes` bytes to compare with, such as the exact one of the whole topology; by
        default that of the levels.
    bound_kind : str, optional
        What a given `bound` is, in a few words.
    distances : sequence of sequence of float, optional
        As for `placement.place`.
    advice : bool
        Say also with which NICs, with how many nodes and by which degraded link the choice would
        change; takes some ten times as long.
    nccl : NcclMachine, optional
        The same cluster in NCCL's terms: the flat all-reduce is then predicted by NCCL's own model
        for the algorithm it would choose.

    Raises
    ------
    PlanError
        If the levels contradict themselves, a size is not usable, or `family` cannot run here.
    """
    if max_chunk_nbytes is not None:
        runtime = replace(runtime, max_chunk_nbytes=max_chunk_nbytes)
    if nbytes < 0 or itemsize < 1 or runtime.max_chunk_nbytes < itemsize:
        raise PlanError(
            f"cannot plan {nbytes} bytes of {itemsize}-byte elements in chunks of at most "
            f"{runtime.max_chunk_nbytes} bytes; sizes must be positive and a chunk must hold an "
            "element"
        )
    check_levels(levels)
    placement = place(levels, distances)
    setting = Setting(
        CostParameters.from_levels(placement.levels, runtime=runtime),
        itemsize,
        runtime,
        leader_limit_nbytes,
        calibration,
        families,
        nccl,
    )
    if nbytes == 0 or levels.world_size == 1:
        chosen = Candidate(family or Family.FLAT_RING, (nbytes,) if nbytes else (), 0.0)
        found = [chosen]
    else:
        found = candidates(setting, nbytes)
        chosen = pick(setting, found, family) if family else choose(found)
    nvls = nccl is not None and nccl.nvls
    limit = bound or all_reduce_lower_bound(levels, nbytes, nvls=nvls)
    wire_limit = all_reduce_lower_bound(levels, nbytes, "payload", nvls=nvls)
    verdict = reasons.Verdict(
        placement,
        setting,
        nbytes,
        chosen,
        found,
        limit,
        wire_limit,
        family,
        bound_kind or (NVLS_BOUND if nvls else LEVEL_BOUND),
    )
    shards = _shards(setting, chosen.family)
    reason = reasons.reason(verdict)
    if advice:
        reason = " ".join([reason, *what_if.advice(verdict, shards)])
    third = chosen.family == Family.HIERARCHICAL_THREE_LEVEL
    islands = islands_of(placement.levels) if third else ()
    return Plan(
        topology_hash=topology_hash,
        world_size=levels.world_size,
        nbytes=nbytes,
        family=chosen.family,
        nodes=tuple(node.ranks for node in placement.levels.nodes),
        chunk_nbytes=chosen.chunk_nbytes,
        shards=shards,
        predicted_seconds=chosen.seconds,
        bound_seconds=limit.seconds,
        wire_limit_seconds=wire_limit.seconds,
        gap=chosen.seconds / limit.seconds - 1 if limit.seconds else 0.0,
        bottleneck=limit.bottleneck,
        alternatives=tuple(candidate.as_alternative() for candidate in found),
        reason=reason,
        runner_up=_runner_up(found, chosen),
        islands=islands,
        racks=racks_of(placement.levels) if third and not islands else (),
    )


def _runner_up(found: list[Candidate], chosen: Candidate) -> Alternative | None:
    others = [c for c in found if c.family != chosen.family and not c.excluded]
    best = min(others, key=lambda candidate: candidate.seconds, default=None)
    return best.as_alternative() if best else None


def _shards(setting: Setting, family: Family) -> Shards:
    if family == Family.HIERARCHICAL_WEIGHTED:
        return setting.weighted.shards
    widths = [len(node.ranks) for node in setting.parameters.levels.nodes]
    if family in LEADERS:
        ranks = tuple((1,) + (0,) * (width - 1) for width in widths)
    else:
        ranks = tuple((1,) * width for width in widths)
    return Shards((1,) * len(widths), ranks)
