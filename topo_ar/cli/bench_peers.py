"""Other libraries' jobs for ``topo-ar bench --emulate``: beside the ranks, on the same hosts."""

import secrets
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from topo_ar.errors import ConfigError

if TYPE_CHECKING:
    from topo_ar.emulation.cluster import Cluster
    from topo_ar.emulation.loopback import LoopbackCluster
    from topo_ar.emulation.openmpi import MpiJob

# MCA parameters that make a peer of Open MPI what its name says.
OPENMPI = {"openmpi": {}, "openmpi-han": {"coll_han_priority": "100"}}
_DTYPES = ("float64", "float32", "int64", "int32")
_FIRST_PORT = 29480
_TOLD_LINES = 8
_PATIENCE_SECONDS = 5.0


def require_peers(names: Sequence[str], dtype: str, emulated: bool) -> str | None:
    """Return the version of Open MPI if one of `names` needs it, else None.

    Raises
    ------
    ConfigError
        If a peer cannot be measured: without hosts, without the library, or for this `dtype`.
    """
    wanted = [name for name in names if name in OPENMPI]
    if not wanted:
        return None
    if not emulated:
        raise ConfigError(f"--against {wanted[0]} needs --emulate: its ranks are started by mpirun")
    if dtype not in _DTYPES:
        raise ConfigError(
            f"--against {wanted[0]} cannot reduce {dtype}; MPI has {', '.join(_DTYPES)}"
        )
    from topo_ar.emulation.openmpi import require_openmpi

    return require_openmpi()


class Peers:
    """The jobs of all peers, from ``with`` to its end; `places` is what the ranks must know."""

    def __init__(self, cluster: "Cluster | LoopbackCluster", names: Sequence[str]) -> None:
        from topo_ar.execution.orders import PeerPlace

        self._cluster = cluster
        self._jobs: dict[str, MpiJob] = {}
        address = cluster.address(cluster.layout.host_of(0).name)
        wanted = [name for name in names if name in OPENMPI]
        self.places: tuple[PeerPlace, ...] = tuple(
            PeerPlace(
                name,
                address,
                _FIRST_PORT + index if cluster.emulated else cluster.free_port(),
                secrets.token_hex(8),
            )
            for index, name in enumerate(wanted)
        )

    def __enter__(self) -> Self:
        import msgspec

        from topo_ar.emulation.openmpi import start_mpi
        from topo_ar.execution.orders import PEER_ENV

        try:
            for place in self.places:
                self._jobs[place.name] = start_mpi(
                    self._cluster,
                    [sys.executable, "-m", "topo_ar.cli.bench_mpi_worker"],
                    env={PEER_ENV: msgspec.json.encode(place).decode()},
                    parameters=OPENMPI[place.name],
                )
        except BaseException:
            self._stop(0.0)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._stop(_PATIENCE_SECONDS if kind is None else 0.0)

    def _stop(self, patience_s: float) -> None:
        for job in self._jobs.values():
            job.stop(patience_s)

    def last_words(self, name: str) -> list[str]:
        """Return what a peer's job wrote first, for the person who wonders why it is gone."""
        return self._jobs[name].said()[:_TOLD_LINES]
