"""Why a plan is what it is, in sentences a person can check."""

from dataclasses import dataclass

from topo_ar.planning.candidates import Candidate, Setting, candidates, choose
from topo_ar.planning.level_bounds import Bound
from topo_ar.planning.plan import Family
from topo_ar.topology.levels import Levels
from topo_ar.units import format_rate, format_seconds, format_size

# Sizes between which it is looked for whether another family would win.
_SMALLEST_NBYTES = 256
_LARGEST_NBYTES = 256 << 20
_MAX_CHUNKS = 128


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the planner found, and for what."""

    levels: Levels
    setting: Setting
    nbytes: int
    chosen: Candidate
    found: list[Candidate]
    bound: Bound
    wire_limit: Bound
    forced: Family | None


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
        _uneven(verdict.levels),
        _runner_up(verdict),
        _flips(verdict),
        _sources(verdict),
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


def _limits(verdict: Verdict) -> str:
    bound, limit, seconds = verdict.bound, verdict.wire_limit, verdict.chosen.seconds
    text = (
        f"No all-reduce is faster than {format_seconds(bound.seconds)}: the bottleneck is "
        f"{bound.bottleneck}; the plan {_above(seconds, bound.seconds)} it"
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


def _uneven(levels: Levels) -> str:
    sizes = [len(node.ranks) for node in levels.nodes]
    if len(set(sizes)) == 1:
        return ""
    held = f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]}" if len(sizes) <= 8 else "unequal"
    return (
        f"The nodes hold {held} ranks; a hierarchy needs equal numbers, so the flat ring is all "
        "that can run."
    )


def _runner_up(verdict: Verdict) -> str:
    others = [c for c in verdict.found if c is not verdict.chosen and not c.excluded]
    if not others:
        return ""
    other = min(others, key=lambda candidate: candidate.seconds)
    text = f"The runner-up, {other.family}, needs {format_seconds(other.seconds)}"
    if verdict.chosen.seconds:
        text += f" ({other.seconds / verdict.chosen.seconds:.2f}x)"
    p = verdict.setting.parameters
    if other.seconds < verdict.chosen.seconds and not verdict.forced:
        return text + ", but less than 5 % does not speak against a small first and last chunk."
    if p.num_nodes > 1 and other.family == Family.FLAT_RING:
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
