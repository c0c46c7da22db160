"""``topo_ar.mirror(fn)``: a function on several ranks of this machine, also from a notebook."""

import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from topo_ar.emulation.launch import Results, start
from topo_ar.emulation.loopback import LoopbackCluster
from topo_ar.emulation.spec import ClusterSpec
from topo_ar.errors import ConfigError, ExecutionError
from topo_ar.integrations.injection import environment
from topo_ar.integrations.run_options import RunOptions

MIRROR_ENV = "TOPO_AR_MIRROR"
CALL, RESULT, ERROR = "call", "result", "error"
_DAY_S = 86400.0
_INSTALL = "`pip install cloudpickle`, or define it at the top of a module"


class Call(msgspec.Struct, frozen=True):
    """What the ranks are told: how to find modules, the script they may need, and the call."""

    sys_path: list[str]
    main_path: str
    packed: bytes


class Failure(msgspec.Struct, frozen=True):
    """What a rank that raised says; `packed` is its exception, empty where it cannot be pickled."""

    kind: str
    text: str
    traceback: str
    packed: bytes


def mirror(
    fn: Callable[..., Any],
    *args: Any,
    nproc: int | None = None,
    timeout_s: float = _DAY_S,
    **options: Any,
) -> list[Any]:
    """Return what ``fn(*args)`` returns on each of several ranks of this machine, in rank order.

    A process group exists in the ranks (NCCL where each has a GPU, else gloo), and every
    DistributedDataParallel is attached as under ``topo-ar run``. The ranks' output is printed here,
    each line with its rank. No process is left when it returns or raises, Ctrl-C included.

    Parameters
    ----------
    fn : callable
        Sent by value with cloudpickle, where that is installed: what is defined in a notebook, and
        lambdas, need it. Without it, a function that can be imported or that a script defines.
    *args
        What it is called with on every rank; it can ask ``torch.distributed.get_rank()``.
    nproc : int, optional
        How many ranks; one a GPU, else one a core, at most eight.
    timeout_s : float
        Seconds after which the ranks are ended.
    **options
        Such as ``plan`` and ``compression``, as for `attach`.

    Raises
    ------
    ConfigError
        If `fn` or `args` cannot be sent, or an option is none.
    ExecutionError
        If a rank raised, died or was not through in time: names it and holds its traceback; what it
        raised is the cause.

    Examples
    --------
    ::

        losses = topo_ar.mirror(train, 3, nproc=4)
    """
    if os.environ.get(MIRROR_ENV):
        raise ConfigError(
            "mirror was called while a rank loads the script that defines the function; put the "
            'call under `if __name__ == "__main__":`'
        )
    try:
        chosen = RunOptions(**options)
    except TypeError as error:
        raise ConfigError(f"mirror: {error}; options are those of topo_ar.attach") from None
    assert chosen.compression_settings
    assert chosen.hook_options
    local = import_module("topo_ar.integrations.local_launch")  # torch, which planning must not
    ranks = local.default_num_ranks() if nproc is None else nproc
    with (
        tempfile.TemporaryDirectory(prefix="topo-ar-mirror-") as name,
        LoopbackCluster(ClusterSpec.uniform(1, ranks)) as cluster,
    ):
        folder = Path(name)
        call = Call(sys.path, _script_of(fn), packed((fn, args)))
        (folder / CALL).write_bytes(msgspec.msgpack.encode(call))
        variables = {
            "OMP_NUM_THREADS": str(max(1, local.num_cores() // ranks)),
            MIRROR_ENV: name,
            **environment(chosen, os.environ),
        }
        command = [sys.executable, "-m", "topo_ar.integrations.mirror_rank"]
        job = start(cluster, command, env=variables, on_line=_print)
        ended = job.wait(timeout_s)
        if ended.exit_code:
            _complain(folder, ended, timeout_s)
        return [pickle.loads((folder / f"{RESULT}{rank}").read_bytes()) for rank in range(ranks)]


def packed(what: Any) -> bytes:
    """Return `what` as bytes for `pickle.loads` in another process.

    Raises
    ------
    ConfigError
        If it cannot be pickled.
    """
    by_value = find_spec("cloudpickle") is not None
    pickler = import_module("cloudpickle") if by_value else pickle
    try:
        data: bytes = pickler.dumps(what)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        remedy = "it holds what no other process can have, such as a lock or a process group"
        if not by_value:
            remedy = _INSTALL
        raise ConfigError(f"cannot be sent to another process: {error}; {remedy}") from error
    return data


def _script_of(fn: Callable[..., Any]) -> str:
    """Return the script that ranks have to load for `fn`; empty where they need none."""
    if find_spec("cloudpickle") is not None or fn.__module__ != "__main__":
        return ""
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None or not Path(path).is_file():
        raise ConfigError(f"{fn.__qualname__} is defined in a notebook or a shell; {_INSTALL}")
    return str(Path(path).absolute())


def _print(rank: int, line: bytes) -> None:
    sys.stdout.write(f"[rank {rank}] {line.decode(errors='replace')}")
    sys.stdout.flush()


def _complain(folder: Path, ended: Results, timeout_s: float) -> NoReturn:
    """Raise for the rank that failed first; what others say is mostly that they lost it."""
    told = sorted(folder.glob(f"{ERROR}*"), key=lambda path: path.stat().st_mtime_ns)
    codes = ended.returncodes
    if told:
        rank = int(told[0].name.removeprefix(ERROR))
        failure = msgspec.msgpack.decode(told[0].read_bytes(), type=Failure)
        cause = pickle.loads(failure.packed) if failure.packed else None
        raise ExecutionError(
            f"rank {rank} of {len(codes)} raised {failure.kind}: {failure.text}\n\n"
            f"{failure.traceback}",
            ranks=[rank],
        ) from cause
    if ended.timed_out:
        late = sorted(ended.stopped)
        raise ExecutionError(
            f"ranks {late} of {len(codes)} were not through after {timeout_s:g} s", ranks=late
        )
    dead: Sequence[int] = [r for r, code in enumerate(codes) if code and r not in ended.stopped]
    said = ", ".join(f"rank {rank} with {codes[rank]}" for rank in dead)
    raise ExecutionError(
        f"of {len(codes)} ranks {said} ended without a word (128 + n is death by signal n)",
        ranks=dead,
    )
