"""How the ranks of a communicator come together, and how all learn why one of them cannot.

Ranks wait for each other in gloo, which does not say why somebody stays away, or in connections
that nobody makes. Who gives up leaves its reason in the store of the process group, where those
that wait look for it: a communicator is made on all ranks or on none.
"""

import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
import torch.distributed as dist

from topo_ar.errors import ConfigError, ExecutionError
from topo_ar.execution.torch_private import default_store, gloo_group

_REASON = "reason"
# A reason is written within milliseconds of the connection that ends for it.
_NEWS_S = 1.0
_FIRST_LOOK_S, _LOOK_S = 0.001, 0.05


class _Names:
    """Names for communicators: equal on all ranks of a group, and never used twice in a store.

    Within a scope, which is equal on all ranks, they are counted apart.

    Torch's own names for groups of a part of the ranks depend on how many groups a rank is in.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._world: object = None
        self._made: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def next(self, ranks: tuple[int, ...], scope: str) -> str:
        with self._lock:
            if self._world is not dist.group.WORLD:  # a new job, in which other ranks may be new
                self._world = dist.group.WORLD
                self._made.clear()
            self._made[scope, ranks] += 1
            number = self._made[scope, ranks]
        digest = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        # A launcher that restarts ranks may hand them the store of those before. Where it does not,
        # its count must not be in the name: torchrun's agents count apart, each its own failures.
        fresh = os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1"
        restart = "0" if fresh else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return f"topo_ar/{restart}/{digest}/{scope}{number}"


_names = _Names()


class _Reason(msgspec.Struct, frozen=True):
    """Why a rank has given up, and the ranks to blame."""

    rank: int
    text: str
    ranks: tuple[int, ...]


class Bootstrap:
    """One rank's part in making a communicator. Making one is collective over the ranks of `group`.

    Parameters
    ----------
    group : ProcessGroup or None
        The group whose ranks take part; None for the default group.

    Attributes
    ----------
    rank, world_size : int
        In the numbering of `group`.
    ranks : tuple of int
        Global ranks.
    name : str
        Equal on all ranks, and never used twice in a store.

    Raises
    ------
    ConfigError
        If this rank is not in `group`.
    """

    def __init__(self, group: "dist.ProcessGroup | None") -> None:
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ConfigError(
                f"rank {dist.get_rank()} is not in the group; make communicators on the group's "
                "own ranks only"
            )
        self.ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        self.world_size = len(self.ranks)
        # Groups that make communicators by themselves do so in no common order.
        scope = getattr(group, "communicator_scope", "")
        self.name = _names.next(self.ranks, scope)
        self._own_connection = bool(scope)
        self._store = default_store(self.name)
        if self._own_connection:
            self._store = self._store.clone()  # type: ignore[attr-defined]

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Let what fails here on one rank fail on all.

        Raises
        ------
        ExecutionError
            With the reason of another rank, in place of what this one has met because of it.
        """
        try:
            yield
        except RuntimeError as error:  # perhaps what gloo says when another rank leaves
            reason = self._reason(within_s=_NEWS_S)
            if reason is not None and reason.rank != self.rank:
                raise ExecutionError(reason.text, ranks=reason.ranks) from error
            self.give_up(error)
            raise
        except BaseException as error:
            self.give_up(error)
            raise

    def give_up(self, error: BaseException) -> None:
        """Leave the reason why this rank cannot go on, unless there is one already."""
        if isinstance(error, ExecutionError):
            text = f"{error} (reported by rank {self.rank})"
            reason = _Reason(self.rank, text, error.ranks)
        else:
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            text = f"rank {self.rank} could not make its communicator: {what}"
            reason = _Reason(self.rank, text, (self.rank,))
        with suppress(RuntimeError):
            self._store.compare_set(_REASON, "", msgspec.json.encode(reason).decode())

    def look(self) -> None:
        """See whether a rank has given up.

        Raises
        ------
        ExecutionError
            If so, with its reason.
        """
        reason = self._reason()
        if reason is not None:
            raise ExecutionError(reason.text, ranks=reason.ranks)

    def _reason(self, within_s: float = 0.0) -> _Reason | None:
        end = time.monotonic() + within_s
        with suppress(RuntimeError):  # the store went with its owner
            while True:
                if self._store.check([_REASON]):
                    return msgspec.json.decode(self._store.get(_REASON), type=_Reason)
                if time.monotonic() >= end:
                    break
                time.sleep(_LOOK_S)
        return None

    def gloo(self, name: str, timeout_s: float) -> "dist.ProcessGroup":
        """Return a gloo group of all ranks. Collective.

        Parameters
        ----------
        name : str
            Tells the groups of one communicator apart.
        timeout_s : float
            How long to wait for the other ranks, and the deadline of operations of the group.

        Raises
        ------
        ExecutionError
            If the ranks do not meet.
        """
        try:
            self._meet(name, timeout_s)
            return gloo_group(
                f"{self.name}/{name}",
                self.rank,
                self.world_size,
                timeout_s,
                own_connection=self._own_connection,
            )
        except RuntimeError as error:
            if isinstance(error, ExecutionError):
                raise
            raise ExecutionError(
                f"rank {self.rank} did not meet the other {self.world_size - 1} ranks: {error}"
            ) from None

    def _meet(self, place: str, timeout_s: float) -> None:
        """Wait until all ranks are here: those that wait in gloo itself hear of nothing."""
        store, end, pause_s = self._store, time.monotonic() + timeout_s, _FIRST_LOOK_S
        store.set(f"{place}/{self.rank}", "here")
        present = store.add(f"{place}/present", 1)
        while present < self.world_size:
            self.look()
            if time.monotonic() >= end:
                absent = [
                    rank for rank in range(self.world_size) if not store.check([f"{place}/{rank}"])
                ]
                raise ExecutionError(
                    f"ranks {absent} did not come to make the communicator in {timeout_s:g} s",
                    ranks=absent,
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_S)
            present = store.add(f"{place}/present", 0)


@contextmanager
def refused_for_all(group: "dist.ProcessGroup | None") -> Iterator[None]:
    """Let what fails here, before a communicator of `group` is made, fail that on all ranks."""
    try:
        yield
    except BaseException as error:
        if dist.is_initialized() and dist.get_rank(group) >= 0:
            Bootstrap(group).give_up(error)
        raise
