"""Imported by every Python process under ``topo-ar run`` before anything else, whatever it runs.

It leaves no trace in ``sys.path``, and a ``sitecustomize`` of the environment is imported too.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

_here = str(Path(__file__).parent)
sys.path[:] = [place for place in sys.path if place != _here]
_this = sys.modules.pop("sitecustomize")
if find_spec("sitecustomize") is not None:
    import_module("sitecustomize")
sys.modules.setdefault("sitecustomize", _this)
# The script may start an interpreter that does not have the package.
if find_spec("topo_ar") is not None:
    import_module("topo_ar.integrations.injection").prepare()
