"""Replays an MSCCL all-reduce as an executor would, following every contribution.

Thread blocks run their steps in order, a receive takes the oldest message of its connection, a step
waits for the step it depends on. Sends never block here, receives do; what then stands still would
stand still in an executor too.
"""

from collections import deque
from dataclasses import dataclass
from xml.etree.ElementTree import Element, ParseError

from topo_ar.errors import PlanError
from topo_ar.planning.export.msccl_xml import MAX_COUNT, MAX_THREAD_BLOCKS

_ALGO = (
    *("name", "proto", "nchannels", "nchunksperloop", "ngpus", "coll"),
    *("inplace", "outofplace", "minBytes", "maxBytes"),
)
_GPU = ("id", "i_chunks", "o_chunks", "s_chunks")
_BLOCK = ("id", "send", "recv", "chan")
_STEP = (
    *("s", "type", "srcbuf", "srcoff", "dstbuf", "dstoff"),
    *("cnt", "depid", "deps", "hasdep"),
)


@dataclass(slots=True)
class _Block:
    gpu: int
    number: int
    send: int
    recv: int
    channel: int
    steps: list[dict[str, str]]
    at: int = 0


def check(text: str) -> int:
    """Return the number of ranks for which `text` is a correct in-place MSCCL all-reduce.

    Raises
    ------
    PlanError
        Naming the element that lacks an attribute or breaks a limit, the step that adds a
        contribution twice, the thread blocks that wait for each other, or the first rank and chunk
        that end incomplete.
    """
    from defusedxml.ElementTree import fromstring

    try:
        root = fromstring(text)
    except ParseError as error:
        raise PlanError(f"not an MSCCL file: {error}") from None
    _require(root, _ALGO, "algo")
    if root.tag != "algo" or root.attrib["coll"] != "allreduce" or root.attrib["inplace"] != "1":
        raise PlanError("only an <algo> with coll=allreduce and inplace=1 can be checked")
    return _Replay(root).run()


def _require(element: Element, names: tuple[str, ...], what: str) -> None:
    missing = [name for name in names if name not in element.attrib]
    if missing:
        raise PlanError(f"{what} lacks {', '.join(missing)}, which executors ask for")


class _Replay:
    def __init__(self, root: Element) -> None:
        self.num_ranks = int(root.attrib["ngpus"])
        self.num_chunks = int(root.attrib["nchunksperloop"])
        self.blocks: list[_Block] = []
        for gpu in root.iter("gpu"):
            self._add_gpu(gpu)
        if sorted({block.gpu for block in self.blocks}) != list(range(self.num_ranks)):
            raise PlanError(f"each of the {self.num_ranks} ranks must have a <gpu> that does work")
        self.held = [[1 << rank] * self.num_chunks for rank in range(self.num_ranks)]
        self.wires: dict[tuple[int, int, int], deque[list[int]]] = {}

    def _add_gpu(self, gpu: Element) -> None:
        _require(gpu, _GPU, f"gpu {gpu.attrib.get('id')}")
        found = list(gpu.iter("tb"))
        if len(found) > MAX_THREAD_BLOCKS:
            raise PlanError(f"gpu {gpu.attrib['id']} has more than {MAX_THREAD_BLOCKS} blocks")
        for number, block in enumerate(found):
            name = f"gpu {gpu.attrib['id']}, tb {number}"
            _require(block, _BLOCK, name)
            steps = [dict(step.attrib) for step in block.iter("step")]
            for position, step in enumerate(block.iter("step")):
                _require(step, _STEP, f"{name}, step {position}")
                if int(step.attrib["s"]) != position or int(step.attrib["cnt"]) > MAX_COUNT:
                    raise PlanError(f"{name}, step {position} is out of order or too long")
            peers = (int(block.attrib["send"]), int(block.attrib["recv"]))
            channel = int(block.attrib["chan"])
            self.blocks.append(_Block(int(gpu.attrib["id"]), number, *peers, channel, steps))

    def run(self) -> int:
        done: set[tuple[int, int, int]] = set()
        moving = True
        while moving:
            moving = False
            for block in self.blocks:
                while block.at < len(block.steps) and self._step(block, done):
                    done.add((block.gpu, block.number, block.at))
                    block.at += 1
                    moving = True
        stuck = [block for block in self.blocks if block.at < len(block.steps)]
        if stuck:
            names = ", ".join(f"gpu {b.gpu} tb {b.number} step {b.at}" for b in stuck[:4])
            raise PlanError(f"the blocks wait for each other: {names}")
        if any(self.wires.values()):
            pair = next(wire for wire, queue in self.wires.items() if queue)
            raise PlanError(f"a message from rank {pair[0]} to {pair[1]} is never received")
        self._check_end()
        return self.num_ranks

    def _step(self, block: _Block, done: set[tuple[int, int, int]]) -> bool:
        """Run the block's next step and return whether it could."""
        step = block.steps[block.at]
        depends = (block.gpu, int(step["depid"]), int(step["deps"]))
        if depends[1] >= 0 and depends not in done:
            return False
        if step["type"] == "nop":
            return True
        begin, count = int(step["srcoff"]), int(step["cnt"])
        mine = self.held[block.gpu]
        if step["type"] == "s":
            wire = (block.gpu, block.send, block.channel)
            self.wires.setdefault(wire, deque()).append(mine[begin : begin + count])
            return True
        queue = self.wires.get((block.recv, block.gpu, block.channel))
        if not queue:
            return False
        message = queue.popleft()
        name = f"gpu {block.gpu}, tb {block.number}, step {block.at}"
        if len(message) != count:
            raise PlanError(f"{name} receives {len(message)} chunks and expects {count}")
        for offset, contributions in enumerate(message):
            chunk = begin + offset
            if step["type"] == "r":
                mine[chunk] = contributions
            elif step["type"] == "rrc":
                if mine[chunk] & contributions:
                    raise PlanError(f"{name} adds a contribution twice to chunk {chunk}")
                mine[chunk] |= contributions
            else:
                raise PlanError(f"{name} is of type {step['type']!r}; known are s, r, rrc, nop")
        return True

    def _check_end(self) -> None:
        everybody = (1 << self.num_ranks) - 1
        for rank, held in enumerate(self.held):
            for chunk, contributions in enumerate(held):
                if contributions != everybody:
                    raise PlanError(f"rank {rank} ends without all contributions to chunk {chunk}")
