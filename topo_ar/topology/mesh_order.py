"""In which order ranks fill a mesh, so that its inner dimensions stay on fast links."""

import math
from collections.abc import Sequence

from topo_ar.errors import ConfigError
from topo_ar.topology.levels import Levels, NodeLevel
from topo_ar.topology.model import Topology


def mesh_shape(
    levels: Levels, sizes: Sequence[int] | None, names: Sequence[str]
) -> tuple[int, ...]:
    """Return the sizes of a mesh's dimensions, outermost first.

    Parameters
    ----------
    levels : Levels
        Of the job.
    sizes : sequence of int or None
        What is asked for; one may be -1, for what is left. Without, there are two dimensions: the
        inner one is as large as nodes allow.
    names : sequence of str
        Of the dimensions.

    Raises
    ------
    ConfigError
        If the sizes do not make up the job, or do not fit its nodes; says which would.
    """
    world_size = levels.world_size
    largest = math.gcd(*(len(node.ranks) for node in levels.nodes))
    if sizes is None:
        if len(names) != 2:
            raise ConfigError(f"a mesh of {len(names)} dimensions ({_listed(names)}) needs a shape")
        sizes = (-1, largest)
    if len(sizes) != len(names) or len(set(names)) != len(names):
        raise ConfigError(
            f"a mesh of shape {tuple(sizes)} needs {len(sizes)} different names, not "
            f"{_listed(names)}"
        )
    if any(size < 1 and size != -1 for size in sizes) or list(sizes).count(-1) > 1:
        raise ConfigError(
            f"a mesh of shape {tuple(sizes)} cannot be: sizes are 1 or more, and one may be -1"
        )
    known = math.prod(size for size in sizes if size != -1)
    shape = tuple(world_size // known if size == -1 else size for size in sizes)
    if math.prod(shape) != world_size:
        what = ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
        raise ConfigError(f"a mesh of {what} does not make up the {world_size} ranks of the job")
    _check_fits(levels, shape, names, largest)
    return shape


def _check_fits(levels: Levels, shape: Sequence[int], names: Sequence[str], largest: int) -> None:
    """Refuse dimensions that nodes would cut unevenly."""
    if largest % shape[-1]:
        node = min(levels.nodes, key=lambda node: len(node.ranks) % shape[-1] == 0)
        fit = [str(size) for size in range(1, largest + 1) if largest % size == 0]
        raise ConfigError(
            f"the innermost dimension, {names[-1]}={shape[-1]}, has to stay inside nodes, but "
            f"node {node.name!r} has {len(node.ranks)} ranks; sizes that fit are "
            f"{', '.join(fit)}. torch's init_device_mesh takes any"
        )
    inner = 1
    equal = all(len(node.ranks) == largest for node in levels.nodes)
    for at in reversed(range(len(shape))):
        inner *= shape[at]
        if at and largest % inner and (not equal or inner % largest):
            together = " x ".join(
                f"{name}={size}" for name, size in zip(names[at:], shape[at:], strict=True)
            )
            raise ConfigError(
                f"{together} are {inner} ranks, which neither divide nodes of "
                f"{_listed(sorted({len(node.ranks) for node in levels.nodes}))} ranks nor are "
                "whole nodes of one size"
            )


def mesh_order(topology: Topology, levels: Levels) -> tuple[int, ...]:
    """Return all ranks, node by node and rack by rack; each at the same place in every node.

    Inside a node ranks come island by island, in the order in which the topology has their devices,
    so that ranks of equal places have the same GPU and the same NIC, whatever their numbers.
    """
    place = {device.id: at for at, device in enumerate(topology.devices)}
    by_rack = [at for rack in levels.racks for at in rack.nodes] or range(len(levels.nodes))
    return tuple(
        rank
        for at in by_rack
        for rank in _in_node(levels.nodes[at], [place[device] for device in topology.ranks])
    )


def _in_node(node: NodeLevel, place: Sequence[int]) -> list[int]:
    islands = node.islands or (node.ranks,)
    inside = [sorted(island, key=lambda rank: (place[rank], rank)) for island in islands]
    return [rank for island in sorted(inside, key=lambda i: place[i[0]]) for rank in island]


def _listed(items: Sequence[object]) -> str:
    return ", ".join(map(str, items))
