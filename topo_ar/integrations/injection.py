"""How an unchanged script gets its DDPs attached: DDP's constructor is ours when torch is loaded.

Nothing of torch is imported before the script does; `prepare` runs at the start of every Python
process that inherits the environment, workers of data loaders and ranks started by the script too.
"""

import atexit
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from topo_ar.integrations.run_options import RunOptions

_HOME = "torch.nn.parallel.distributed"
_MAIN_ENV = "TOPO_AR_RUN_MAIN"

# What the end of the script is told: how it ended for each DDP of this process.
endings: list[Callable[[], dict[str, Any]]] = []


def environment(options: "RunOptions", outer: Mapping[str, str]) -> dict[str, str]:
    """Return the variables under which Python prepares a script, on top of `outer`."""
    folder = str(Path(__file__).parent / "injected")
    rest = [each for each in outer.get("PYTHONPATH", "").split(os.pathsep) if each != folder]
    places = [folder, *filter(None, rest)]
    return {"PYTHONPATH": os.pathsep.join(places), **options.to_environment()}


def prepare() -> None:
    """Have every DDP of this process attached."""
    sys.meta_path.insert(0, _Watch())
    # The first process is the script; what it starts in turn has nothing to report.
    if _MAIN_ENV not in os.environ:
        os.environ[_MAIN_ENV] = str(os.getpid())
        if os.environ.get("RANK") == "0":
            atexit.register(_report, os.getpid())


def say(sentence: str) -> None:
    """Tell the person at the terminal."""
    sys.stderr.write(f"topo-ar: {sentence}\n")
    sys.stderr.flush()


class _Watch(MetaPathFinder):
    """Finds the module of DDP as others do, and changes the class once it is there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _HOME:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changing(spec.loader)
        return spec


class _Changing(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _change(module.DistributedDataParallel)


def _change(ddp: Any) -> None:
    original = ddp.__init__

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        # Torch is still on its way in when the class is changed.
        from topo_ar.integrations.auto_attach import construct

        construct(original, self, args, kwargs)

    ddp.__init__ = init


def _report(pid: int) -> None:
    if os.getpid() != pid:  # a child of fork
        return
    from topo_ar.integrations.run_options import options_from

    options = options_from()
    if options.observe_steps:  # it comes to its end before enough was seen
        return
    rows = [ending() for ending in endings]
    if not rows:
        say("no DistributedDataParallel was trained, so nothing was attached")
    for row in rows:
        if row.get("attached"):
            say(f"{row['model']}: {row['path']} all-reduce at the end; {row['reason']}")
    if options.report:
        import json

        Path(options.report).write_text(json.dumps({"schema": 1, "models": rows}, indent=2) + "\n")
