"""Topology-aware hierarchical all-reduce for data-parallel training.

::

    topo = topo_ar.discover()                  # this host, or the whole job
    topo = topo_ar.read("topology.xml")        # or topo_ar.preset("dgx-h100", nodes=4)
    plan = topo_ar.plan(topo, nbytes=25_000_000)
    model = topo_ar.ddp(module)                # a DDP with the planned all-reduce
    handle = topo_ar.attach(model)             # the same on a DDP that exists, or an HSDP model
    results = topo_ar.mirror(train, nproc=4)   # a function on several ranks, from a notebook
    topo_ar.all_reduce(tensor)                 # the engine by hand
    dist.init_process_group("topo")            # or as a backend of torch.distributed
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from topo_ar._version import __version__
from topo_ar.errors import (
    ConfigError,
    EmulationError,
    ExecutionError,
    PlanError,
    TopoError,
    TopologyError,
)
from topo_ar.telemetry.log import log_to_stderr
from topo_ar.torch_backend import register_backend, register_if_loaded

if TYPE_CHECKING:
    from topo_ar.api import all_reduce, discover, plan
    from topo_ar.execution.communicator import Communicator
    from topo_ar.integrations.attach import attach, handle_of
    from topo_ar.integrations.averaging import DiLoCo, LocalSGD
    from topo_ar.integrations.backend import BackendOptions
    from topo_ar.integrations.ddp import ddp
    from topo_ar.integrations.mesh import init_mesh
    from topo_ar.integrations.mirror import mirror
    from topo_ar.integrations.telemetry_options import Telemetry
    from topo_ar.planning.plan import Plan
    from topo_ar.telemetry.targets import Targets
    from topo_ar.topology.model import Topology
    from topo_ar.topology.presets import preset
    from topo_ar.topology.readers import read

log_to_stderr()
register_if_loaded()

# Loaded at first use: planning must not wait for torch.
_HOMES = {
    "BackendOptions": "topo_ar.integrations.backend",
    "Communicator": "topo_ar.execution.communicator",
    "DiLoCo": "topo_ar.integrations.averaging",
    "LocalSGD": "topo_ar.integrations.averaging",
    "Plan": "topo_ar.planning.plan",
    "Targets": "topo_ar.telemetry.targets",
    "Telemetry": "topo_ar.integrations.telemetry_options",
    "Topology": "topo_ar.topology.model",
    "all_reduce": "topo_ar.api",
    "attach": "topo_ar.integrations.attach",
    "ddp": "topo_ar.integrations.ddp",
    "discover": "topo_ar.api",
    "handle_of": "topo_ar.integrations.attach",
    "init_mesh": "topo_ar.integrations.mesh",
    "mirror": "topo_ar.integrations.mirror",
    "plan": "topo_ar.api",
    "preset": "topo_ar.topology.presets",
    "read": "topo_ar.topology.readers",
}

__all__ = [
    "BackendOptions",
    "Communicator",
    "ConfigError",
    "DiLoCo",
    "EmulationError",
    "ExecutionError",
    "LocalSGD",
    "Plan",
    "PlanError",
    "Targets",
    "Telemetry",
    "TopoError",
    "Topology",
    "TopologyError",
    "__version__",
    "all_reduce",
    "attach",
    "ddp",
    "discover",
    "handle_of",
    "init_mesh",
    "mirror",
    "plan",
    "preset",
    "read",
    "register_backend",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'topo_ar' has no attribute {name!r}")
    return getattr(import_module(home), name)
