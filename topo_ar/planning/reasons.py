"""Why a plan is what it is, in sentences a person can check."""

from collections import Counter
from dataclasses import dataclass

from topo_ar.planning.candidates import Candidate, Setting, candidates, choose, network_share
from topo_ar.planning.level_bounds import Bound, node_bandwidth
from topo_ar.planning.lowering_nodes import LEADERS
from topo_ar.planning.nccl_tuning import choice
from topo_ar.planning.placement import Placement
from topo_ar.planning.plan import Family
from topo_ar.topology.levels import Levels, NodeLevel
from topo_ar.units import format_rate, format_seconds, format_size

# Sizes between which it is looked for whether another family would win.
_SMALLEST_NBYTES = 256
_LARGEST_NBYTES = 256 << 20
_MAX_CHUNKS = 128
_MAX_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the planner found, and for what."""

    placement: Placement
    setting: Setting
    nbytes: int
    chosen: Candidate
    found: list[Candidate]
    bound: Bound
    wire_limit: Bound
    forced: Family | None
    bound_kind: str

    @property
    def levels(self) -> Levels:
        """The levels in the order of the plan."""
        return self.placement.levels


def reason(verdict: Verdict) -> str:
    """Return the reason of a plan: the choice, its bound, the runner-up, when it would flip."""
    if verdict.levels.world_size == 1:
        return "There is one rank: nothing has to be communicated."
    if verdict.nbytes == 0:
        return "The buffer is empty: nothing has to be communicated."
    sentences = [
        _choice(verdict),
        _limits(verdict),
        _below_bound(verdict),
        _busy(verdict),
        _uneven(verdict),
        _shares(verdict),
        _order(verdict),
        _by_itself(verdict),
        _runner_up(verdict),
        _flips(verdict),
        _sources(verdict),
        _misfit(verdict),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _choice(verdict: Verdict) -> str:
    chosen = verdict.chosen
    fastest = all(c.excluded or c.seconds >= chosen.seconds for c in verdict.found)
    how = "the fastest that can run" if fastest else "the best that can run"
    if verdict.forced:
        how = "as you asked"
    chunks = len(chosen.chunk_nbytes)
    cut = f" in {chunks} chunks" if chunks > 1 else ""
    origin = "from measured times" if chosen.measured else "from port rates"
    speed = format_rate(verdict.nbytes / chosen.seconds) if chosen.seconds else "unlimited"
    return (
        f"{chosen.family}{cut}, {how}: {format_seconds(chosen.seconds)} predicted {origin} for "
        f"{format_size(verdict.nbytes)} (algbw {speed})."
    )


def _by_itself(verdict: Verdict) -> str:
    job = verdict.setting.nccl_job
    if job is None:
        return ""
    best = choice(job, verdict.nbytes)
    protocol = {"ll": "LL", "ll128": "LL128", "simple": "Simple"}[best.protocol]
    return (
        f"flat_ring stands for what NCCL does by itself: its {best.algorithm} with {protocol}, "
        "predicted by its own tuning model."
    )


def _limits(verdict: Verdict) -> str:
    bound, limit, seconds = verdict.bound, verdict.wire_limit, verdict.chosen.seconds
    text = (
        f"No all-reduce is faster than {format_seconds(bound.seconds)} ({verdict.bound_kind}): the "
        f"bottleneck is {bound.bottleneck}; the plan {_above(seconds, bound.seconds)} it"
    )
    if limit.seconds != bound.seconds:
        text += (
            f", and {_above(seconds, limit.seconds)} the wire limit of "
            f"{format_seconds(limit.seconds)} at payload rates"
        )
    return text + "."


def _above(seconds: float, limit: float) -> str:
    gap = seconds / limit - 1
    if abs(gap) < 5e-4:
        return "reaches"
    if gap >= 1:
        return f"takes {seconds / limit:.3g} times"
    return f"is {abs(gap):.1%} {'above' if gap > 0 else 'below'}"


def _below_bound(verdict: Verdict) -> str:
    if verdict.chosen.seconds >= verdict.bound.seconds * (1 - 1e-9):
        return ""
    source = "measured times" if verdict.chosen.measured else "payload rates"
    return (
        f"WARNING: the {source} beat the bound, so a nominal rate in the topology is too low: "
        "correct it before trusting bound or gap."
    )


def _busy(verdict: Verdict) -> str:
    """Say how much of the time the network works, and at which rate where all nodes are alike."""
    if verdict.levels.world_size == 1 or len(verdict.levels.nodes) == 1 or verdict.chosen.measured:
        return ""
    busy = network_share(verdict.setting, verdict.chosen)
    text = f"The busiest link between nodes is at work for {busy:.0%} of the time"
    descriptions = {_nics(node) for node in verdict.levels.nodes}
    if len(descriptions) == 1 and not verdict.levels.racks:
        if verdict.chosen.family in LEADERS:
            rate = busy / verdict.setting.parameters.nic_beta
            return f"{text}: {format_rate(rate)} each way through one NIC of each node."
        rate = busy * min(node_bandwidth(node, "payload") for node in verdict.levels.nodes)
        text += (
            f": {format_rate(rate)} each way through each node's NICs "
            f"({descriptions.pop()} of payload)"
        )
    return text + "."


def _nics(node: NodeLevel) -> str:
    counts = Counter(float(nic.payload) for nic in node.nics)
    return " + ".join(f"{count} x {format_rate(rate)}" for rate, count in counts.items())


def _uneven(verdict: Verdict) -> str:
    sizes = [len(node.ranks) for node in verdict.levels.nodes]
    if len(set(sizes)) == 1:
        return ""
    held = f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]}" if len(sizes) <= 8 else "unequal"
    only = next(c for c in verdict.found if c.family == Family.HIERARCHICAL_WEIGHTED)
    text = f"The nodes hold {held} ranks; of the hierarchies only {only.family} suits them"
    return f"{text}, and {only.excluded}." if only.excluded else f"{text}."


def _shares(verdict: Verdict) -> str:
    if len(verdict.levels.nodes) == 1 or not verdict.chosen.family.startswith("hierarchical"):
        return ""
    weighted = verdict.setting.weighted
    if verdict.chosen.family != Family.HIERARCHICAL_WEIGHTED:
        return f"Weighting cannot help: {weighted.pointless}." if weighted.pointless else ""
    parts = []
    if len(set(weighted.shards.nodes)) > 1:
        shown = ":".join(map(str, weighted.shards.nodes[:_MAX_SHOWN]))
        more = ":..." if len(weighted.shards.nodes) > _MAX_SHOWN else ""
        parts.append(f"the nodes sum shares of {shown}{more} for all")
    if any(len(set(weights)) > 1 for weights in weighted.shards.ranks):
        parts.append("the ranks of a node own shares in proportion to the NICs near them")
    if not parts:
        return "Their shares are equal: no others keep the NICs busier."
    text = " and ".join(parts)
    return (
        f"{text[0].upper()}{text[1:]}; with equal shares the stage between nodes would take "
        f"{weighted.gain:.2f} times as long."
    )


def _order(verdict: Verdict) -> str:
    """Say what another order of ranks or nodes gains, and for whom."""
    placement, parts = verdict.placement, []
    before, after = placement.ring_crossings
    if before > after:
        parts.append(
            f"A ring by rank number goes from node to node {before} times, one through the ranks "
            f"node by node {after} times: {before / after:.2f} times the bytes out of the nodes. "
            "torch's own ring follows rank numbers; number the ranks node by node (torchrun does; "
            "with Slurm --distribution=block, with Open MPI --map-by slot)."
        )
    before, after = placement.rack_crossings
    if before > after:
        parts.append(
            f"In the plan's order of nodes a ring goes from rack to rack {after} times, by rank "
            f"number {before} times."
        )
    if placement.rails_moved:
        parts.append(
            f"In {placement.rails_moved} of {len(verdict.levels.nodes)} nodes the ranks stand in "
            "the order of their NICs, so that a rail joins NICs at the same place."
        )
    return " ".join(parts)


def _runner_up(verdict: Verdict) -> str:
    others = [c for c in verdict.found if c is not verdict.chosen and not c.excluded]
    if not others:
        return ""
    other = min(others, key=lambda candidate: candidate.seconds)
    text = f"The runner-up, {other.family}, needs {format_seconds(other.seconds)}"
    if verdict.chosen.seconds:
        text += f" ({other.seconds / verdict.chosen.seconds:.2f}x)"
    if other.seconds < verdict.chosen.seconds and not verdict.forced:
        return text + ", but less than 5 % does not speak against a small first and last chunk."
    staged = verdict.chosen.family in (
        Family.HIERARCHICAL_PIPELINED,
        Family.HIERARCHICAL_SEQUENTIAL,
    )
    p = verdict.setting.parameters
    if p.num_nodes > 1 and other.family == Family.FLAT_RING and staged:
        flat = 2 * (p.world_size - 1) / p.world_size * p.crossings / p.num_nodes
        tree = 2 * (p.num_nodes - 1) / p.num_nodes
        text += (
            f": it sends {flat:.2f} times the buffer out of a node, a hierarchy {tree:.2f} times"
        )
    return text + "."


def _flips(verdict: Verdict) -> str:
    if verdict.forced or len(verdict.found) == 1:
        return ""
    below = _first_other(verdict, _powers_below(verdict.nbytes))
    largest = _largest_nbytes(verdict)
    above = _first_other(verdict, _powers_above(verdict.nbytes, largest))
    parts = [
        f"at {format_size(at[0])} and {side} {at[1]} would win"
        for at, side in ((below, "below"), (above, "above"))
        if at
    ]
    if not parts:
        return (
            f"It stays the best choice from {format_size(_SMALLEST_NBYTES)} "
            f"to {format_size(largest)}."
        )
    text = "; ".join(parts)
    return text[0].upper() + text[1:] + "."


def _first_other(verdict: Verdict, sizes: list[int]) -> tuple[int, Family] | None:
    for size in sizes:
        family = choose(candidates(verdict.setting, size)).family
        if family != verdict.chosen.family:
            return size, family
    return None


def _powers_below(nbytes: int) -> list[int]:
    top = min(nbytes - 1, _LARGEST_NBYTES).bit_length() - 1
    return [1 << k for k in range(top, _SMALLEST_NBYTES.bit_length() - 2, -1)]


def _powers_above(nbytes: int, largest: int) -> list[int]:
    first = max(nbytes + 1, _SMALLEST_NBYTES)
    return [1 << k for k in range((first - 1).bit_length(), largest.bit_length())]


def _largest_nbytes(verdict: Verdict) -> int:
    # Small slots would make the search itself slow: it looks at every chunk of every size.
    return min(_LARGEST_NBYTES, _MAX_CHUNKS * verdict.setting.runtime.max_chunk_nbytes)


def _sources(verdict: Verdict) -> str:
    nodes = verdict.levels.nodes
    nics = {str(nic.source) for node in nodes for nic in node.nics} if len(nodes) > 1 else set()
    inside = {str(node.intra.source) for node in nodes if len(node.ranks) > 1}
    named = [("NIC rates", nics), ("rates inside nodes", inside)]
    text = ", ".join(f"{name}: {'/'.join(sorted(found))}" for name, found in named if found)
    measured = sum(candidate.measured for candidate in verdict.found)
    if measured:
        text += f"; measured times for {measured} of {len(verdict.found)} families"
    return f"Sources: {text}." if text else ""


def _misfit(verdict: Verdict) -> str:
    """Say where a straight line through the measured times of the choice does not hold."""
    calibration = verdict.setting.calibration
    worst = calibration.misfit(verdict.chosen.family) if calibration else None
    if worst is None or not verdict.chosen.measured:
        return ""
    size, error = worst
    return (
        f"Latency and rate do not describe the measured times of {verdict.chosen.family}: they "
        f"miss {format_size(size)} by {abs(error):.0%}, so that lines between neighbouring sizes "
        "were used."
    )
