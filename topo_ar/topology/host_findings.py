"""What on this host keeps a job slower than it could be, beside its topology, and the remedy."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from topo_ar.topology.findings import TopologyFinding
from topo_ar.topology.wording import some
from topo_ar.units import format_rate, format_size

_SYS, _PROC = Path("/sys"), Path("/proc")
_MBIT = 1e6 / 8
# Names of interfaces that lead to containers and virtual machines of this host.
_VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "podman", "tun", "tap")
# What data loaders need in no time; containers often have 64 MiB.
_LEAST_SHM_NBYTES = 1 << 30
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def interface_findings(used: Sequence[str], sys: Path = _SYS) -> list[TopologyFinding]:
    """Return what is wrong with the interfaces that flows between nodes use.

    Parameters
    ----------
    used : sequence of str
        Their names; may be empty where they are not known.
    sys : Path
        Where ``/sys`` is.
    """
    found = [
        TopologyFinding(
            "wrong interface",
            f"{name} leads to containers or virtual machines of this host, not to other nodes",
            "set TOPO_AR_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface between the nodes",
        )
        for name in used
        if name.startswith(_VIRTUAL)
    ]
    rates = _rates(sys)
    mine = [rates[name] for name in used if name in rates]
    if not used or not rates or (not mine and not found):
        return found
    best = max(rates.values())
    fastest = sorted(name for name, rate in rates.items() if rate == best)
    if not set(fastest) & set(used):
        found.append(
            TopologyFinding(
                "wrong interface",
                f"flows between nodes use {some(list(used))}"
                + (f" of {format_rate(max(mine))}" if mine else "")
                + f"; {some(fastest)} of {format_rate(best)} is up as well",
                f"set TOPO_AR_SOCKET_IFNAME={fastest[0]} and GLOO_SOCKET_IFNAME={fastest[0]} if it "
                "reaches the other nodes",
            )
        )
    elif set(fastest) - set(used):
        names = ",".join(fastest)
        found.append(
            TopologyFinding(
                "one NIC used",
                f"flows between nodes use {some(list(used))}, and not "
                f"{some(sorted(set(fastest) - set(used)))}, which is as fast and up",
                f"set TOPO_AR_SOCKET_IFNAME={names} if all of them reach the other nodes",
            )
        )
    return found


def _rates(sys: Path) -> dict[str, float]:
    """Return the rates of interfaces that are up and belong to a device, in bytes/s."""
    found = {}
    for directory in sorted((sys / "class" / "net").glob("*")):
        speed = _number(directory / "speed")
        if _text(directory / "operstate") == "up" and (directory / "device").exists() and speed > 0:
            found[directory.name] = speed * _MBIT
    return found


def core_findings(
    local_ranks: int, threads: int, cores: int, quota: Path = _QUOTA
) -> list[TopologyFinding]:
    """Return whether the ranks of a host want more cores than it has for them.

    Parameters
    ----------
    local_ranks, threads : int
        Ranks of this host, and threads that each computes with.
    cores : int
        That the ranks may run on.
    quota : Path
        The file in which a container's share of the cores is, see cgroups v2.
    """
    words = _text(quota).split()
    share = float(cores)
    if len(words) == 2 and words[0].isdigit() and int(words[1]) > 0:
        share = min(share, int(words[0]) / int(words[1]))
    wanted = local_ranks * threads
    if wanted <= share:
        return []
    fitting = max(1, int(share // local_ranks))
    remedy = f"set OMP_NUM_THREADS={fitting}" if local_ranks <= share else "start fewer ranks"
    return [
        TopologyFinding(
            "oversubscribed cores",
            f"{local_ranks} ranks of {threads} threads share {share:g} cores; threads that wait "
            "for a core make every rank late in turn",
            remedy,
        )
    ]


def shared_memory_findings(directory: Path = Path("/dev/shm")) -> list[TopologyFinding]:
    """Return whether /dev/shm is too small for data loaders and shared buckets."""
    try:
        status = os.statvfs(directory)
    except OSError as error:
        nbytes, text = 0, f"{directory} cannot be used: {error.strerror}"
    else:
        nbytes = status.f_frsize * status.f_blocks
        text = f"{directory} holds {format_size(nbytes)}"
    if nbytes >= _LEAST_SHM_NBYTES:
        return []
    return [
        TopologyFinding(
            "/dev/shm",
            f"{text}; our own memory is not there, but data loaders with workers and "
            "zero_copy=True need it",
            "give the container more (docker run --shm-size=8g, or an emptyDir of medium Memory)",
        )
    ]


def numa_findings(sys: Path = _SYS, proc: Path = _PROC) -> list[TopologyFinding]:
    """Return whether a virtual machine hides which memory is near which core."""
    cpuinfo = _text(proc / "cpuinfo").splitlines()
    if not any(line.startswith("flags") and " hypervisor" in line for line in cpuinfo):
        return []
    sockets = {line for line in cpuinfo if line.startswith("physical id")}
    nodes = sorted((sys / "devices" / "system" / "node").glob("node[0-9]*"))
    distances = {word for node in nodes for word in _text(node / "distance").split()}
    empty = [node.name for node in nodes if not _text(node / "cpulist")]
    text = ""
    if len(sockets) > 1 and len(nodes) < 2:
        text = f"a virtual machine of {len(sockets)} sockets shows {len(nodes)} NUMA node"
    elif len(nodes) > 1 and len(distances) == 1:
        text = f"a virtual machine says that its {len(nodes)} NUMA nodes are all equally far"
    elif empty:
        text = f"a virtual machine has NUMA nodes without cores: {some(empty)}"
    return (
        [
            TopologyFinding(
                "virtual NUMA",
                f"{text}: ranks may be bound to cores whose memory and NIC are far",
                "pass the host's NUMA through (libvirt <numa>, VMware vNUMA), or take the "
                "provider's topology file; measure with topo-ar probe --measure",
            )
        ]
        if text
        else []
    )


def launched(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return ranks of this host and threads of each, if a launcher says so; None elsewhere."""
    ranks, threads = environ.get("LOCAL_WORLD_SIZE", ""), environ.get("OMP_NUM_THREADS", "")
    if not ranks.isdigit() or not int(ranks):
        return None
    return int(ranks), int(threads) if threads.isdigit() and int(threads) else 1


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> float:
    try:
        return float(_text(path))
    except ValueError:
        return 0.0
