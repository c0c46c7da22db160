"""MSCCL XML: a schedule as thread blocks of sends and receives.

Executors: the MSCCL fork of NCCL (``MSCCL_XML_FILES=plan.xml``) and RCCL, which has it on by
default on MI300X and takes ``RCCL_MSCCL_FORCE_ENABLE=1`` elsewhere, its files in a folder named by
``MSCCL_ALGO_DIR``. An executor that finds the file unfit falls back to NCCL without a word: every
attribute it asks for is written, and `msccl_check` replays the file as the executor would.
"""

import math
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from topo_ar.errors import PlanError
from topo_ar.planning.export.transfers import Transfer, transfers
from topo_ar.planning.schedule import Schedule

MAX_THREAD_BLOCKS = 108
MAX_COUNT = 72
LARGEST_NBYTES = 4294967295


def to_xml(
    schedule: Schedule, name: str, *, min_nbytes: int = 0, max_nbytes: int = LARGEST_NBYTES
) -> str:
    """Return `schedule` as an in-place MSCCL all-reduce.

    The buffer is cut into the coarsest equal chunks that all shard edges are multiples of; the
    executor loops over buffers that are longer than its own slots, so one chunk of the plan is
    enough. Each ordered pair of ranks that talks has a thread block at both ends.

    Parameters
    ----------
    schedule : Schedule
        Without whole all-reduces.
    name : str
        Shown by the executor.
    min_nbytes, max_nbytes : int
        The sizes for which the executor shall take the file.

    Raises
    ------
    PlanError
        If the schedule needs more chunks in one step or more thread blocks than executors have.
    """
    edges = {edge for step in schedule.steps for shard in step.shards for edge in shard}
    unit = math.gcd(schedule.numel, *edges) or 1
    chunks = schedule.numel // unit
    root = Element(
        "algo",
        name=name,
        proto="Simple",
        nchannels="1",
        nchunksperloop=str(chunks),
        ngpus=str(schedule.world_size),
        coll="allreduce",
        inplace="1",
        outofplace="0",
        minBytes=str(min_nbytes),
        maxBytes=str(max_nbytes),
    )
    programs = [_Program() for _ in range(schedule.world_size)]
    for transfer in transfers(schedule):
        count = (transfer.end - transfer.begin) // unit
        if count > MAX_COUNT:
            raise PlanError(
                f"a message of {count} chunks is longer than the {MAX_COUNT} an executor moves at "
                "once; export a plan whose shards are more alike"
            )
        programs[transfer.source].send(transfer)
        programs[transfer.target].receive(transfer)
    for rank, program in enumerate(programs):
        program.write(root, rank, chunks, unit)
    indent(root)
    return tostring(root, encoding="unicode") + "\n"


class _Program:
    """The thread blocks of one rank: by direction and peer, each a list of transfers."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, int], list[Transfer]] = {}

    def send(self, transfer: Transfer) -> None:
        self._blocks.setdefault(("s", transfer.target), []).append(transfer)

    def receive(self, transfer: Transfer) -> None:
        self._blocks.setdefault(("r", transfer.source), []).append(transfer)

    def write(self, root: Element, rank: int, chunks: int, unit: int) -> None:
        if len(self._blocks) > MAX_THREAD_BLOCKS:
            raise PlanError(
                f"rank {rank} would need {len(self._blocks)} thread blocks, and executors have "
                f"{MAX_THREAD_BLOCKS}; choose a family in which it talks to fewer ranks"
            )
        gpu = SubElement(
            root, "gpu", id=str(rank), i_chunks=str(chunks), o_chunks=str(chunks), s_chunks="0"
        )
        rows = self._rows()
        place = {
            (direction, transfer.index): (block, step)
            for block, ((direction, _), block_rows) in enumerate(rows)
            for step, (transfer, waits) in enumerate(block_rows)
            if waits is None
        }
        awaited = {
            place[wait] for _, block_rows in rows for _, wait in block_rows if wait is not None
        }
        for block, ((direction, peer), block_rows) in enumerate(rows):
            send, recv = (peer, -1) if direction == "s" else (-1, peer)
            element = SubElement(gpu, "tb", id=str(block), send=str(send), recv=str(recv), chan="0")
            for step, (transfer, wait) in enumerate(block_rows):
                kind = "nop" if wait else _kind(direction, transfer)
                begin = 0 if wait else transfer.begin // unit
                count = 0 if wait else (transfer.end - transfer.begin) // unit
                depends = place[wait] if wait else (-1, -1)
                SubElement(
                    element,
                    "step",
                    s=str(step),
                    type=kind,
                    srcbuf="i",
                    srcoff=str(begin),
                    dstbuf="i",
                    dstoff=str(begin),
                    cnt=str(count),
                    depid=str(depends[0]),
                    deps=str(depends[1]),
                    hasdep=str(int((block, step) in awaited)),
                )

    def _rows(
        self,
    ) -> list[tuple[tuple[str, int], list[tuple[Transfer, tuple[str, int] | None]]]]:
        """Return each block's transfers, every one after the nops that wait for other blocks."""
        home = {
            (direction, transfer.index): (direction, peer)
            for (direction, peer), block in self._blocks.items()
            for transfer in block
        }
        found = []
        for key, block in self._blocks.items():
            rows: list[tuple[Transfer, tuple[str, int] | None]] = []
            latest: dict[tuple[str, int], int] = {}
            for transfer in block:
                for wait in _waits(key[0], transfer):
                    other = home[wait]
                    # A block runs in order: one that was waited for covers all before it.
                    if other != key and latest.get(other, -1) < wait[1]:
                        latest[other] = wait[1]
                        rows.append((transfer, wait))
                rows.append((transfer, None))
            found.append((key, rows))
        return found


def _waits(direction: str, transfer: Transfer) -> list[tuple[str, int]]:
    """Return what must be done at this end before: received ("r") or sent ("s")."""
    if direction == "s":
        return [("r", index) for index in transfer.source_after]
    received = [("r", index) for index in transfer.target_after]
    return received + [("s", index) for index in transfer.target_sent]


def _kind(direction: str, transfer: Transfer) -> str:
    if direction == "s":
        return "s"
    return "rrc" if transfer.adds else "r"
