"""What is in flight on a rank: collectives, their chunks, and what was done for them."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from topo_ar.execution.kernels import Array, Kernel
from topo_ar.execution.program import ChunkProgram
from topo_ar.planning.schedule import Stage

if TYPE_CHECKING:
    from topo_ar.execution.straight import Line


@dataclass(frozen=True, slots=True)
class Span:
    """What one rank did for one chunk; `begin` and `end` are `time.monotonic` seconds."""

    stage: Stage
    chunk: int
    what: str
    begin: float
    end: float


@dataclass(slots=True)
class Collective:
    """One all-reduce in flight on this rank; `line` is set if it needs no lanes when they idle.

    `source` tells co-located ranks where this rank's input lies, see `SharedInputs`; `inputs` are
    those that this rank reads where they lie, by local rank: others lie in staging slots.
    """

    number: int
    fingerprint: int
    program: tuple[ChunkProgram, ...]
    kernel: Kernel
    buffer: Array
    line: "Line | None" = None
    source: int = 0
    inputs: dict[int, Array] | None = None
    first: int = 0

    @property
    def end(self) -> int:
        """The number of the chunk after this collective's last."""
        return self.first + len(self.program)


@dataclass(slots=True)
class Chunk:
    """The state of one chunk on this rank.

    `round` and `missing`, the frames that each round lacks, are those of its `Relay` if it has one;
    the first round can begin when the node has its sum.
    """

    collective: Collective
    program: ChunkProgram
    awaited: int = 0
    gathering: int = 0
    missing: list[int] = field(default_factory=list)
    round: int = -1
    unsent: int = 0
    added: bool = False
    copied_out: bool = False
    wire_begin: float = 0.0
