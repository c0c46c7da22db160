"""How fast can any all-reduce be, what limits it, and how long does it take to know?

Command: python experiments/14_planning.py --out results/
Minutes: 2 on two cores; --quick leaves out 64 GPUs that all differ and 16,384 GPUs.

Writes limits.jsonl: one row per topology and mode of the switches (plain, NVLink SHARP in the
nodes, SHARP in the fabric too) with the exact all-reduce bound, the limit of a reduce-scatter and
an all-gather one after the other, and the closed form on levels, in GB/s; and one row per size with
the seconds and the peak memory of a whole answer, from the topology's name to the bottleneck in
words. Sizes are run in a process each.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from topo_ar.cli.script import exit_code_of
from topo_ar.planning.bounds import all_gather_bound, reduce_scatter_bound
from topo_ar.planning.flow_graph import flow_graph
from topo_ar.planning.level_bounds import all_reduce_lower_bound
from topo_ar.planning.topology_bound import topology_bound
from topo_ar.telemetry.records import RecordWriter, manifest
from topo_ar.topology.levels import levels
from topo_ar.topology.model import Device, DeviceKind, Figure, Link, LinkKind, Source, Topology
from topo_ar.topology.presets import preset

MODES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "nvls": ("nvswitch",),
    "nvls and sharp": ("nvswitch", "switch"),
}
# Name: how many nodes of which preset, and whether every NIC is at a rate of its own.
SIZES = {
    "32 GPUs": ("dgx-h100", 4, False),
    "32 GPUs that all differ": ("dgx-h100", 4, True),
    "64 GPUs": ("dgx-h100", 8, False),
    "64 GPUs that all differ": ("dgx-h100", 8, True),
    "1024 GPUs": ("dgx-h100", 128, False),
    "16384 GPUs": ("dgx-h100", 2048, False),
}
LONG = ("64 GPUs that all differ", "16384 GPUs")
GB = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Where to write, and whether to leave out what takes long."""

    out: Path = Path("results")
    quick: bool = False


def clusters() -> Iterator[tuple[str, Topology]]:
    """Yield the topologies of the tables, by name."""
    for nodes in (1, 2, 4, 16):
        yield f"A100 x{nodes}", preset("dgx-a100", nodes)
        yield f"H100 x{nodes}", preset("dgx-h100", nodes)
    for sizes in ((4, 4), (4, 2), (4, 2, 2), (4, 4, 2), (8, 8, 8, 4)):
        yield "+".join(map(str, sizes)), unequal(sizes)
    yield "DGX-1V", direct("DGX-1V", CUBE_MESH, 25 * GB)
    yield "ring 8", direct("ring 8", {(k, (k + 1) % 8): 1 for k in range(8)}, 25 * GB)
    mesh = {(i, i + 3): 1 for i in range(9)} | {(i, i + 1): 1 for i in range(12) if i % 3 < 2}
    yield "mesh 4x3", direct("mesh 4x3", mesh, 50 * GB)


CUBE_MESH = {
    **{(a + k, b + k): n for k in (0, 4) for a, b, n in ((0, 1, 1), (0, 2, 1), (0, 3, 2))},
    **{(a + k, b + k): n for k in (0, 4) for a, b, n in ((1, 2, 2), (1, 3, 1), (2, 3, 1))},
    **{(k, k + 4): 2 for k in range(4)},
}


def unequal(sizes: tuple[int, ...]) -> Topology:
    """Return nodes of so many GPUs, on NVSwitches of 300 GB/s, with a NIC of 25 GB/s each."""
    devices = [Device("fabric", DeviceKind.SWITCH)]
    links, ranks = [], []
    for node, size in enumerate(sizes):
        switch = f"node{node}/nvswitch"
        devices.append(Device(switch, DeviceKind.NVSWITCH, f"node{node}"))
        for k in range(size):
            gpu, nic = f"node{node}/gpu{k}", f"node{node}/nic{k}"
            devices.append(Device(gpu, DeviceKind.GPU, f"node{node}"))
            devices.append(Device(nic, DeviceKind.NIC, f"node{node}"))
            links.append(_link(gpu, switch, LinkKind.NVLINK, 300 * GB))
            links.append(_link(gpu, nic, LinkKind.PCIE, 32 * GB))
            links.append(_link(nic, "fabric", LinkKind.INFINIBAND, 25 * GB))
            ranks.append(gpu)
    return Topology("+".join(map(str, sizes)), tuple(devices), tuple(links), tuple(ranks))


def direct(name: str, counts: dict[tuple[int, int], int], rate: float) -> Topology:
    """Return one node of GPUs with so many NVLinks of `rate` between them."""
    ranks = tuple(f"node0/gpu{k}" for k in range(1 + max(max(pair) for pair in counts)))
    links = tuple(
        _link(ranks[a], ranks[b], LinkKind.NVLINK, rate * count) for (a, b), count in counts.items()
    )
    return Topology(
        name, tuple(Device(rank, DeviceKind.GPU, "node0") for rank in ranks), links, ranks
    )


def _link(a: str, b: str, kind: LinkKind, rate: float) -> Link:
    return Link(a, b, kind, nominal=Figure(rate, Source.ASSUMED))


def limits(name: str, topology: Topology) -> Iterator[dict[str, Any]]:
    """Yield the bounds of one topology, a row for each mode of its switches."""
    graph = flow_graph(topology)
    network = graph.digraph()
    gathered = all_gather_bound(network, graph.ranks)
    scattered = reduce_scatter_bound(network, graph.ranks)
    composed = 1 / (1 / gathered.algbw + 1 / scattered.algbw)
    coarse = all_reduce_lower_bound(levels(topology), GB)
    for mode, switches in MODES.items():
        bound = topology_bound(topology, multicast=switches, reducing=switches)
        row: dict[str, Any] = {
            "experiment": "limits",
            "topology": name,
            "world_size": len(topology.ranks),
            "mode": mode,
            "kind": bound.kind,
            "tight": bound.tight,
            "algbw_GB_s": float(bound.algbw / GB),
            "bottleneck": bound.bottleneck,
        }
        if not switches:
            row |= {
                "all_gather_algbw_GB_s": float(gathered.algbw / GB),
                # The two make an all-reduce: where their cuts are loose, its bound is the limit.
                "composed_algbw_GB_s": float(min(composed, bound.algbw) / GB),
                "levels_algbw_GB_s": 1 / coarse.seconds,
                "levels_bottleneck": coarse.bottleneck,
            }
        yield row


def answer(size: str) -> dict[str, Any]:
    """Return what one whole answer costs: the seconds, and the most memory this process held."""
    import resource

    name, nodes, differ = SIZES[size]
    start = time.perf_counter()
    topology = preset(name, nodes)
    if differ:
        topology = _spread(topology)
    bound = topology_bound(topology)
    return {
        "experiment": "limits_cost",
        "size": size,
        "world_size": len(topology.ranks),
        "kind": bound.kind,
        "tight": bound.tight,
        "seconds": time.perf_counter() - start,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "algbw_GB_s": float(bound.algbw / GB),
        "bottleneck": bound.bottleneck,
    }


def _spread(topology: Topology) -> Topology:
    """Return the topology with NICs of 40 to 50 GB/s, so that no two nodes are alike."""
    chance = random.Random(0)
    links = [
        msgspec.structs.replace(
            link, nominal=Figure(float(chance.randint(40, 50) * GB), Source.ASSUMED)
        )
        if link.kind is LinkKind.INFINIBAND
        else link
        for link in topology.links
    ]
    return msgspec.structs.replace(topology, links=tuple(links))


def run(config: Config) -> int:
    """Compute, print and write all rows; return the exit code."""
    about = manifest()
    with RecordWriter(config.out / "limits.jsonl") as writer:
        for name, topology in clusters():
            for row in limits(name, topology):
                writer.write({**row, "manifest": about})
                print(
                    f"{name:12} {row['mode']:14} {row['algbw_GB_s']:9.3f} GB/s  "
                    f"{row['kind']:24} {row['bottleneck']}"
                )
        for size in SIZES:
            if config.quick and size in LONG:
                continue
            command = [sys.executable, __file__, "--answer", size]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            row = json.loads(done.stdout)
            writer.write({**row, "manifest": about})
            print(
                f"{size:24} {row['seconds']:6.2f} s  {row['peak_bytes'] / 1e6:6.0f} MB  "
                f"{row['kind']:24} {row['bottleneck']}"
            )
    return 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Config().out)
    parser.add_argument("--quick", action="store_true", help="leave out what takes long")
    parser.add_argument("--answer", choices=SIZES, help=argparse.SUPPRESS)
    options = parser.parse_args()

    def work() -> int:
        if options.answer:
            print(json.dumps(answer(options.answer)))
            return 0
        return run(Config(out=options.out, quick=options.quick))

    return exit_code_of(work)


if __name__ == "__main__":
    sys.exit(main())
