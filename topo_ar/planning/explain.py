"""A plan as text for a person."""

import textwrap

from topo_ar.planning.plan import Alternative, Family, Plan
from topo_ar.units import format_rate, format_seconds, format_size

_WIDTH = 100
_MAX_NAMED_NODES = 4
_MAX_NAMED_RANKS = 8


def explain(plan: Plan) -> str:
    """Return several lines: who takes part, the choice, its bound, all candidates, the reason.

    ``algbw`` is buffer bytes per predicted second, a property of the whole all-reduce and of no
    link; the rates of links stand next to the links' names. Sizes of one plan are all shown in
    binary or all in decimal units.
    """
    facts = [
        ("ranks", _nodes(plan)),
        ("algorithm", _algorithm(plan)),
        ("predicted", _predicted(plan)),
        ("bound", f"{format_seconds(plan.bound_seconds)} on nominal rates, gap {_gap(plan.gap)}"),
        ("wire limit", f"{format_seconds(plan.wire_limit_seconds)} on payload rates"),
        ("bottleneck", plan.bottleneck),
    ]
    if plan.family is Family.HIERARCHICAL_WEIGHTED:
        facts.insert(2, ("shards", _shards(plan)))
    if plan.codec != "none":
        facts.insert(2, ("codec", plan.codec))
    lines = [f"Plan {plan.hash}: all-reduce of {format_size(plan.nbytes)}"]
    lines += [f"  {name:<11} {text}" for name, text in facts]
    lines += _table(plan)
    lines += textwrap.wrap(plan.reason, _WIDTH, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)


def _nodes(plan: Plan) -> str:
    def name(ranks: tuple[int, ...]) -> str:
        shown = ",".join(map(str, ranks[:_MAX_NAMED_RANKS]))
        return "{" + shown + (",..." if len(ranks) > _MAX_NAMED_RANKS else "") + "}"

    groups = " ".join(name(ranks) for ranks in plan.nodes[:_MAX_NAMED_NODES])
    more = " ..." if len(plan.nodes) > _MAX_NAMED_NODES else ""
    count = f"{len(plan.nodes)} node" + ("s" if len(plan.nodes) > 1 else "")
    return f"{plan.world_size} on {count}: {groups}{more}"


def _algorithm(plan: Plan) -> str:
    sizes = plan.chunk_nbytes
    if len(sizes) < 2:
        return str(plan.family)
    return (
        f"{plan.family}, {len(sizes)} chunks: first {format_size(sizes[0], like=plan.nbytes)}, "
        f"largest {format_size(max(sizes), like=plan.nbytes)}, "
        f"last {format_size(sizes[-1], like=plan.nbytes)}"
    )


def _shards(plan: Plan) -> str:
    def parts(weights: tuple[int, ...]) -> str:
        shown = ":".join(map(str, weights[:_MAX_NAMED_RANKS]))
        return shown + (":..." if len(weights) > _MAX_NAMED_RANKS else "")

    inside = " ".join(parts(weights) for weights in plan.shards.ranks[:_MAX_NAMED_NODES])
    more = " ..." if len(plan.shards.ranks) > _MAX_NAMED_NODES else ""
    return f"nodes {parts(plan.shards.nodes)}, ranks inside {inside}{more}"


def _algbw(nbytes: int, seconds: float) -> str:
    return format_rate(nbytes / seconds) if seconds else "-"


def _gap(gap: float) -> str:
    return f"{gap:.1%}" if gap < 10 else f"{gap:.3g}x"


def _predicted(plan: Plan) -> str:
    algbw = _algbw(plan.nbytes, plan.predicted_seconds)
    seconds = format_seconds(plan.predicted_seconds)
    return f"{seconds}, algbw {algbw} (buffer bytes per second, no link's rate)"


def _table(plan: Plan) -> list[str]:
    header = f"  {'':1} {'candidate':<24} {'predicted':>10} {'algbw':>11} {'gap':>9} {'chunks':>6}"
    ordered = sorted(plan.alternatives, key=lambda a: (bool(a.excluded), a.seconds))
    return [header, *(_row(plan, alternative) for alternative in ordered)]


def _row(plan: Plan, alternative: Alternative) -> str:
    bound = plan.bound_seconds
    gap = _gap(alternative.seconds / bound - 1) if bound else "-"
    notes = ["measured"] if alternative.measured else []
    if alternative.excluded:
        notes.append(f"out: {alternative.excluded}")
    mark = "*" if alternative.family == plan.family else " "
    return (
        f"  {mark} {alternative.family:<24} {format_seconds(alternative.seconds):>10} "
        f"{_algbw(plan.nbytes, alternative.seconds):>11} {gap:>9} {alternative.num_chunks:>6}  "
        f"{', '.join(notes)}"
    ).rstrip()
