"""Makes ``topo`` known to torch.distributed; what it is comes when a group is made.

Installed, this is an entry point of torch's (``torch.backends``), called at the end of ``import
torch``: ``init_process_group("topo")`` works in scripts that import nothing of ours.
"""

import sys
from importlib import import_module
from typing import Any

NAME = "topo"


def register_backend() -> None:
    """Make ``topo`` known to torch.distributed; called again it does nothing.

    Only needed where torch does not call it itself: the package is not installed but found by
    ``PYTHONPATH``, or ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` is set.
    """
    dist = import_module("torch.distributed")
    if dist.is_available() and not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def register_if_loaded() -> None:
    """Do so where torch has been imported."""
    # While torch is on its way in, the entry point follows.
    if hasattr(sys.modules.get("torch.distributed"), "Backend"):
        register_backend()


def _create(request: Any, options: Any) -> Any:
    # Loaded here for the same reason as in topo_ar/__init__.py: planning does without torch.
    return import_module("topo_ar.integrations.backend").TopoGroup(request, options)
