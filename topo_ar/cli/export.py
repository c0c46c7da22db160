"""``topo-ar export``: plans in the formats of NCCL, MSCCL and Chakra."""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from topo_ar.cli.topology_source import (
    FabricKind,
    Nics,
    Nodes,
    NodesPerLeaf,
    Oversubscription,
    RanksPerNode,
    load_topology,
)
from topo_ar.errors import ConfigError, PlanError
from topo_ar.planning.plan import Family, Plan
from topo_ar.units import parse_size

if TYPE_CHECKING:
    from topo_ar.topology.model import Topology


class Target(StrEnum):
    """What can be written."""

    NCCL_TUNER = "nccl-tuner"
    NCCL_GRAPH = "nccl-graph"
    MSCCL = "msccl"
    CHAKRA = "chakra"


def export(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A plan, a topology file or a preset.")
    ],
    target: Annotated[Target, typer.Option("--to", help="The format to write.")],
    output: Annotated[
        Path,
        typer.Option("-o", "--output", help="A file; for chakra the name its files share."),
    ],
    size: Annotated[
        str | None, typer.Option("--size", "-s", help="Buffer size to plan for, such as 25MB.")
    ] = None,
    family: Annotated[
        Family | None, typer.Option("--family", help="Insist on this algorithm.")
    ] = None,
    nodes: Nodes = None,
    ranks_per_node: RanksPerNode = None,
    nic: Nics = None,
    fabric: FabricKind = None,
    oversubscription: Oversubscription = None,
    nodes_per_leaf: NodesPerLeaf = None,
) -> None:
    """Write a plan for another program, and say how that program takes it.

    nccl-tuner and nccl-graph need a topology; msccl and chakra a plan, or a topology and --size.

    Example: topo-ar export dgx-a100 --nodes 2 --to nccl-tuner -o tuner.csv
    """

    def topology() -> "Topology":
        return load_topology(
            source, nodes, ranks_per_node, nic, fabric, oversubscription, nodes_per_leaf
        )

    def planned() -> Plan:
        return _plan(source, size, family, topology)

    writers: dict[Target, Callable[[], dict[Path, bytes]]] = {
        Target.NCCL_TUNER: lambda: {output: _nccl_tuner(topology())},
        Target.NCCL_GRAPH: lambda: {output: _nccl_graph(topology())},
        Target.MSCCL: lambda: {output: _msccl(planned())},
        Target.CHAKRA: lambda: _chakra(planned(), output),
    }
    for path, content in writers[target]().items():
        try:
            path.write_bytes(content)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    print(_USE[target].format(path=output))


_USE = {
    Target.NCCL_TUNER: "written: {path}; use it with\n"
    "  NCCL_TUNER_PLUGIN=libnccl-tuner-example.so NCCL_TUNER_CONFIG_FILE={path}",
    Target.NCCL_GRAPH: "written: {path}; use it with\n"
    "  NCCL_GRAPH_FILE={path} on machines of this kind only",
    Target.MSCCL: "written: {path}, replayed and found right; use it with\n"
    "  MSCCL_XML_FILES={path} (MSCCL) or in the folder MSCCL_ALGO_DIR (RCCL)",
    Target.CHAKRA: "written: {path}.RANK.et; name {path} in ASTRA-sim's system description",
}


def _plan(
    source: str, size: str | None, family: Family | None, topology: Callable[[], "Topology"]
) -> Plan:
    path = Path(source)
    if size is None:
        if not path.is_file():
            raise ConfigError(f"{source} is no plan; give a topology a --size to plan for")
        try:
            return Plan.from_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None
    from topo_ar.planning.planner import plan
    from topo_ar.planning.runtime import runtime_of
    from topo_ar.topology.levels import levels
    from topo_ar.topology.model import topology_hash

    found = topology()
    return plan(
        levels(found),
        parse_size(size),
        topology_hash=topology_hash(found),
        family=family,
        runtime=runtime_of(found),
    )


def _nccl_tuner(topology: "Topology") -> bytes:
    from topo_ar.planning.export import nccl_tuner
    from topo_ar.planning.nccl_machine import nccl_machine
    from topo_ar.planning.nccl_search import nccl_job
    from topo_ar.planning.nccl_tuning import choice

    job = nccl_job(nccl_machine(topology))

    def pick(nbytes: int) -> nccl_tuner.Pick:
        best = choice(job, nbytes)
        return best.algorithm, best.protocol

    return nccl_tuner.to_csv(nccl_tuner.rules(pick), job.num_nodes, job.world_size).encode()


def _nccl_graph(topology: "Topology") -> bytes:
    from topo_ar.planning.export import nccl_graph

    return nccl_graph.to_xml(nccl_graph.graphs(topology)).encode()


def _msccl(plan: Plan) -> bytes:
    from topo_ar.planning.export.msccl_check import check
    from topo_ar.planning.export.msccl_xml import to_xml
    from topo_ar.planning.export.single_chunk import single_chunk

    text = to_xml(single_chunk(plan), f"topo_ar_{plan.family}")
    check(text)
    return text.encode()


def _chakra(plan: Plan, output: Path) -> dict[Path, bytes]:
    from topo_ar.planning.export.chakra import to_traces
    from topo_ar.planning.export.single_chunk import explicit

    return {
        output.with_name(f"{output.name}.{rank}.et"): trace
        for rank, trace in enumerate(to_traces(explicit(plan, 1)))
    }
