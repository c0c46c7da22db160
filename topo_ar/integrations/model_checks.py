"""What in the use of a DDP keeps gradients from being reduced, and what differs between ranks."""

import logging
import os
import platform
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from topo_ar._version import __version__
from topo_ar.errors import ConfigError
from topo_ar.execution.network import interface_address, interface_names, local_nics
from topo_ar.execution.torch_private import is_static_graph, watch_gradient
from topo_ar.integrations.observer import Observer
from topo_ar.topology.findings import TopologyFinding
from topo_ar.topology.host_findings import (
    core_findings,
    interface_findings,
    launched,
    numa_findings,
    shared_memory_findings,
)
from topo_ar.topology.wording import some

logger = logging.getLogger("topo_ar")

# So many backward passes without the hook are no accident.
_UNHOOKED = 3
_NOT_CALLED = TopologyFinding(
    "hook not called",
    "gradients were computed and the communication hook was not called: they are not averaged, and "
    "the ranks' weights go apart",
    "call the DistributedDataParallel, not its module; with torch.compile compile it, and not the "
    "module inside: model = torch.compile(DistributedDataParallel(module))",
)
_STATIC_GRAPH = TopologyFinding(
    "static_graph",
    "static_graph=True with gradient accumulation: torch fails in no_sync(), hook or not",
    "build the DistributedDataParallel without static_graph=True, or step without no_sync()",
)


class ModelChecks(Observer):
    """Looks at the use of a DDP, and warns once of what goes wrong.

    Parameters
    ----------
    ddp : DistributedDataParallel
        Whose hook it observes.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp: Callable[[], DistributedDataParallel | None] = weakref.ref(ddp)
        self._unhooked = 0
        self._found: list[TopologyFinding] = []
        ddp.register_forward_pre_hook(self._forward)
        trained = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
        watch_gradient(trained[-1], self._accumulated)

    def begin(self, step: int) -> None:
        """Take note that the hook is called."""
        self._unhooked = 0

    @property
    def findings(self) -> list[TopologyFinding]:
        """What was found so far."""
        return list(self._found)

    def __getstate__(self) -> dict[str, object]:
        """Let a DDP be saved, whose hooks hold this; the copy observes nothing."""
        return {"_ddp": _gone, "_unhooked": 0, "_found": []}

    def _synchronises(self) -> bool:
        ddp = self._ddp()
        return ddp is not None and bool(ddp.require_backward_grad_sync)

    def _forward(self, module: torch.nn.Module, inputs: object) -> None:
        if (
            torch.is_grad_enabled()
            and isinstance(module, DistributedDataParallel)
            and is_static_graph(module)
            and not self._synchronises()
        ):
            self._say(_STATIC_GRAPH)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if self._synchronises():
            self._unhooked += 1
            if self._unhooked >= _UNHOOKED:
                self._say(_NOT_CALLED)

    def _say(self, finding: TopologyFinding) -> None:
        if finding not in self._found:
            self._found.append(finding)
            logger.warning("%s: %s; %s", finding.about, finding.text, finding.remedy)


def _gone() -> None:
    """Stand in for a reference to a DDP that is not there."""


def versions() -> dict[str, str]:
    """Return the versions that all ranks of a job should have alike."""
    return {
        "topo_ar": __version__,
        "torch": str(torch.__version__),
        "numpy": _version_of("numpy"),
        "Python": platform.python_version(),
    }


def differing_versions(by_rank: Sequence[Mapping[str, str]]) -> list[TopologyFinding]:
    """Return what differs between the ranks, and who is not as most are.

    Parameters
    ----------
    by_rank : sequence of dict
        The `versions` of each rank.
    """
    found = []
    for name in dict.fromkeys(name for row in by_rank for name in row):
        values = [row.get(name, "missing") for row in by_rank]
        usual = max(dict.fromkeys(values), key=values.count)
        odd = [f"rank {rank}: {value}" for rank, value in enumerate(values) if value != usual]
        if odd:
            found.append(
                TopologyFinding(
                    "versions",
                    f"ranks run different versions of {name}: {usual} on most, {some(odd)}",
                    f"install {name} {usual} on all hosts; plans and sums may differ otherwise",
                )
            )
    return found


def host_findings() -> list[TopologyFinding]:
    """Return what this host shows, for the ranks that a launcher has started on it."""
    try:
        nics = local_nics(0)
    except ConfigError:
        nics = ()  # said elsewhere
    by_address = {interface_address(name): name for name in interface_names()}
    used = [nic.name or by_address.get(nic.address, "") for nic in nics]
    found = interface_findings([name for name in used if name])
    ranks = launched(os.environ)
    if ranks is not None:
        found += core_findings(*ranks, len(os.sched_getaffinity(0)))
    return [*found, *shared_memory_findings(), *numa_findings()]


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def gathered_versions(gather: Any) -> list[TopologyFinding]:
    """Compare versions between all ranks and return what differs. Collective.

    Parameters
    ----------
    gather : callable
        Takes this rank's bytes and returns those of all.
    """
    import msgspec

    rows = [msgspec.json.decode(each) for each in gather(msgspec.json.encode(versions()))]
    return differing_versions(rows)
