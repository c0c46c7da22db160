"""A CPU or PCIe switch and what hangs below it, as the drawing of a node needs it."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Branch:
    """A CPU or PCIe switch with what hangs below it; `name` is None for what hangs on nothing.

    `tops` are drawn above (GPUs, ranks on CPUs), `nics` below. `is_tied` is false where nothing but
    a GPU's own link leads to the CPU.
    """

    name: str | None
    tops: list[str] = field(default_factory=list)
    nics: list[str] = field(default_factory=list)
    branches: list["Branch"] = field(default_factory=list)
    is_tied: bool = True

    @property
    def has_top(self) -> bool:
        """Whether anything below is drawn above."""
        return bool(self.tops) or any(branch.has_top for branch in self.branches)

    @property
    def has_nic(self) -> bool:
        """Whether there is a NIC below."""
        return bool(self.all_nics())

    def all_nics(self) -> list[str]:
        """Return the NICs below, also below switches."""
        return [*self.nics, *(nic for branch in self.branches for nic in branch.all_nics())]

    def first(self) -> str:
        """Return the first leaf below, which places a branch among others."""
        own = [*self.tops[:1], *(branch.first() for branch in self.branches), *self.nics[:1]]
        return own[0] if own else self.name or ""


def without_lone_switches(branch: Branch) -> Branch:
    """Return `branch` with each switch that has one thing below replaced by that thing."""
    result = Branch(branch.name, list(branch.tops), list(branch.nics), is_tied=branch.is_tied)
    for below in branch.branches:
        inner = without_lone_switches(below)
        if len(inner.tops) + len(inner.nics) + len(inner.branches) == 1 and inner.is_tied:
            result.tops += inner.tops
            result.nics += inner.nics
            result.branches += inner.branches
        elif not inner.tops and not inner.nics and not inner.branches:
            result.tops.append(inner.name or "")
        else:
            result.branches.append(inner)
    return result


def shape(branch: Branch) -> object:
    """Return what branches that carry the same have in common."""
    return (len(branch.tops), len(branch.nics), tuple(map(shape, branch.branches)))


def split(root: Branch) -> tuple[Branch, Branch]:
    """Return what is drawn above a CPU and what below: NICs and switches with nothing but NICs."""
    above = Branch(root.name, root.tops, [], [b for b in root.branches if b.has_top])
    below = Branch(root.name, [], root.nics, [b for b in root.branches if not b.has_top])
    return above, below


def depth(branch: Branch) -> int:
    """Return how many switches lie one below the other."""
    return max((1 + depth(inner) for inner in branch.branches), default=0)


def width_of(branch: Branch) -> float:
    """Return how many columns a branch takes."""
    own = max(len(branch.tops), len(branch.nics))
    return own + sum(map(width_of, branch.branches))
