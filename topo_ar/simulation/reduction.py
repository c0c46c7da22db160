"""How a job reduces its buckets: plans and codecs, and every chunk as tasks on the links.

What NCCL runs as a whole takes what its own model expects where nothing else is on its links.
"""

from collections.abc import Sequence

import msgspec

from topo_ar.errors import ConfigError
from topo_ar.planning.buckets import Bucket
from topo_ar.planning.candidates import Candidate, Setting
from topo_ar.planning.codec_costs import CodecCosts, costs_of
from topo_ar.planning.codecs import NONE, Codec
from topo_ar.planning.cost import CostParameters
from topo_ar.planning.nccl_machine import nccl_machine_of
from topo_ar.planning.occupancy import STAGED, Pricing
from topo_ar.planning.plan import Family, Plan
from topo_ar.planning.planner import plan as make_plan
from topo_ar.planning.runtime import Runtime
from topo_ar.planning.schedule import Op, Stage
from topo_ar.simulation.engine import Task
from topo_ar.simulation.flows import Uses
from topo_ar.simulation.task_list import TaskList
from topo_ar.simulation.templates import FoldedStep, Lanes, Templates
from topo_ar.simulation.units import on_groups, one_chunk
from topo_ar.topology.levels import Levels, levels
from topo_ar.topology.model import Topology

_BETWEEN = (
    Stage.INTER_EXCHANGE,
    Stage.INTER_REDUCE_SCATTER,
    Stage.INTER_ALL_GATHER,
    Stage.INTER_RING_REDUCE_SCATTER,
    Stage.INTER_RING_ALL_GATHER,
    Stage.INTER_FOLD,
    Stage.INTER_HALVING,
    Stage.INTER_DOUBLING,
    Stage.INTER_UNFOLD,
)
_ENCODED = (
    Stage.INTER_EXCHANGE,
    Stage.INTER_REDUCE_SCATTER,
    Stage.INTER_RING_REDUCE_SCATTER,
    Stage.INTER_FOLD,
    Stage.INTER_HALVING,
)


class Reduction:
    """The all-reduce of each bucket of a job.

    Parameters
    ----------
    topology : Topology
        Links and ranks.
    buckets : sequence of Bucket
        In the order of the hook's calls.
    mode : str
        ``auto``, ``hierarchical`` or ``flat``.
    codecs : sequence of Codec or Codec
        For each bucket, or for all.
    groups : sequence of sequence of int
        The data-parallel groups: of equal size, planned as the first.
    runtime : Runtime
        What runs it.
    costs : CodecCosts or None
        Of codecs; None for the starting values.
    templates : Templates
        Where its schedules are added.

    Attributes
    ----------
    levels : Levels
        Of a data-parallel group.
    codecs : list of Codec
        Those that are used, for each bucket.
    """

    def __init__(
        self,
        topology: Topology,
        buckets: Sequence[Bucket],
        *,
        mode: str,
        codecs: Sequence[Codec] | Codec,
        groups: Sequence[tuple[int, ...]],
        runtime: Runtime,
        costs: CodecCosts | None,
        templates: Templates,
    ) -> None:
        self.buckets = buckets
        self._mode, self._groups, self._runtime = mode, groups, runtime
        self._templates = templates
        self._world = len(topology.ranks)
        own = msgspec.structs.replace(
            topology, ranks=tuple(topology.ranks[rank] for rank in groups[0])
        )
        self.levels: Levels = levels(own)
        self._nccl = nccl_machine_of(own, self.levels) if runtime.ring_rails else None
        parameters = CostParameters.from_levels(self.levels, runtime=runtime)
        self._pricing = Pricing(
            Setting(parameters, runtime=runtime, families=runtime.families, nccl=self._nccl),
            costs or costs_of(runtime),
        )
        each = [codecs] * len(buckets) if isinstance(codecs, Codec) else list(codecs)
        if len(each) != len(buckets):
            raise ConfigError(
                f"{len(each)} codecs do not fit {len(buckets)} buckets; give one each"
            )
        self.codecs = [
            codec if codec != NONE and self._pricing.suits(bucket, mode, codec) else NONE
            for bucket, codec in zip(buckets, each, strict=True)
        ]
        self._plans: dict[Family, Plan] = {}
        self._numbers: dict[tuple[Family, int], int] = {}
        self._numel: dict[int, int] = {}
        # Links of their own, behind those of the topology, pace what runs as a whole.
        self._wholes: dict[int, tuple[float, Uses]] = {}
        self._paces: list[float] = []
        for number in range(len(buckets)):
            for turn in range(self._turns(number)):
                self._number(self.candidate(number).family, turn)

    @property
    def capacities(self) -> list[float]:
        """Bytes/s of all links, as far as they are known to be needed."""
        return [*self._templates.capacities, *self._paces]

    def candidate(self, number: int) -> Candidate:
        """Return what reduces a bucket."""
        return self._pricing.candidate(self.buckets[number].nbytes, self._mode)

    def staged(self, number: int) -> bool:
        """Return whether the stages of a bucket overlap those of its neighbours."""
        staged = self.candidate(number).family in STAGED
        return staged and (self.codecs[number] == NONE or self._runtime.overlaps_codecs)

    def chunks(self, number: int) -> list[tuple[int, int]]:
        """Return the template and the bytes of each chunk of a bucket; none with a single rank."""
        if len(self._groups[0]) < 2:
            return []
        candidate, turns = self.candidate(number), self._turns(number)
        sizes = self._pricing.chunks(self.buckets[number], self._mode, self.codecs[number])
        return [
            (self._numbers[candidate.family, chunk % turns], size)
            for chunk, size in enumerate(sizes)
        ]

    def add_chunk(
        self,
        tasks: TaskList,
        lanes: Lanes,
        place: tuple[int, int],
        copied: Sequence[int],
        before: tuple[int, ...],
    ) -> list[tuple[int, FoldedStep]]:
        """Add the steps of chunk ``place[1]`` of bucket ``place[0]``; return their tasks.

        A step waits for ``copied`` of all classes of its ranks, and for `before`.
        """
        number, chunk = place
        codec = self.codecs[number]
        template, nbytes = self.chunks(number)[chunk]
        inside, outwards = self._inside(number, chunk)
        made: list[int] = []
        folded_steps = self._templates.folded[template]
        for folded in folded_steps:
            stage = folded.step.stage
            if stage in _BETWEEN:
                inside = outwards
            scale = (nbytes if stage in _BETWEEN else inside) / self._numel[template]
            after = {made[other] for other in folded.after}
            after.update(copied[rank] for rank in folded.ranks)
            after.update(before)
            ratio = hops = 1.0
            if codec != NONE and stage in _BETWEEN:
                ratio, hops = self._pricing.wire(self.buckets[number], codec)
            if codec != NONE and stage in _ENCODED:
                lane = [(rank, "codec") for rank in folded.ranks]
                behind = lanes.enter(lane, place, len(tasks))
                seconds = self._pricing.codec_seconds(codec, nbytes, first=not chunk)
                task = Task(after=tuple(sorted(after)), behind=behind, before=seconds)
                after = {
                    tasks.add(task, f"{codec} {number}.{chunk}", "codec", folded.ranks, number)
                }
            flows = tuple((each * scale * ratio, uses) for each, uses in folded.flows)
            busy = self._templates.busy(folded, scale, hops)
            if not scale:
                flows, busy = (), (0, 0, 0)
            if self._nccl is not None and folded.step.op is Op.ALL_REDUCE:
                flows, busy = (self._whole(folded, nbytes, scale),), (0, 0, 0)
            behind = lanes.enter(self._templates.lanes(folded), place, len(tasks))
            task = Task(flows, tuple(sorted(after)), behind, 0, *busy)
            kind = "inter" if folded.between_nodes else "intra"
            made.append(tasks.add(task, f"{stage} {number}.{chunk}", kind, folded.ranks, number))
        return list(zip(made, folded_steps, strict=True))

    def _inside(self, number: int, chunk: int) -> tuple[int, int]:
        """Return the bytes that a chunk moves inside the node before the wire, and after it."""
        sizes = [size for _, size in self.chunks(number)]
        if self.codecs[number] == NONE or self._runtime.overlaps_codecs:
            return sizes[chunk], sizes[chunk]
        # The bucket is reduced before the first of them, and gathered after the last.
        return 0 if chunk else sum(sizes), sum(sizes) if chunk + 1 == len(sizes) else 0

    def nbytes_sent(self, number: int) -> "tuple[list[float], list[float]]":
        """Return what each rank sends for a bucket, inside and between nodes."""
        import numpy as np

        codec, sent = self.codecs[number], np.zeros((2, self._world))
        ratio = 1.0 if codec == NONE else self._pricing.wire(self.buckets[number], codec)[0]
        totals: dict[int, int] = {}
        for template, nbytes in self.chunks(number):
            totals[template] = totals.get(template, 0) + nbytes
        for template, nbytes in totals.items():
            elements = self._templates.elements_sent(template) / self._numel[template]
            sent += nbytes * elements * np.array([[1], [ratio]])
        return sent[0].tolist(), sent[1].tolist()

    def _turns(self, number: int) -> int:
        """Return after how many chunks a family begins again with the same ranks."""
        candidate = self.candidate(number)
        if len(self._groups[0]) < 2:
            return 0
        if candidate.family is not Family.DOUBLE_BINARY_TREE:
            return 1
        widths = [len(node.ranks) for node in self.levels.nodes]
        return min(len(candidate.chunk_nbytes), max(widths))

    def _number(self, family: Family, turn: int) -> None:
        if (family, turn) in self._numbers:
            return
        if family not in self._plans:
            self._plans[family] = make_plan(
                self.levels, 1 << 20, family=family, runtime=self._runtime
            )
        unit = one_chunk(self._plans[family], turn)
        number = self._templates.add(on_groups(unit, self._groups, self._world))
        self._numbers[family, turn] = number
        self._numel[number] = unit.numel

    def _whole(self, folded: FoldedStep, nbytes: int, scale: float) -> tuple[float, Uses]:
        """Return one flow that takes what the candidate predicts where it is alone."""
        if nbytes not in self._wholes:
            seconds = float(self._pricing.candidate(nbytes, "flat").seconds)
            carried: dict[int, float] = {}
            for elements, uses in folded.flows:
                for link, count in uses:
                    carried[link] = carried.get(link, 0) + elements * count * scale
            most = max(carried.values())
            bandwidths = self._templates.capacities
            shares = {link: min(n, bandwidths[link] * seconds) for link, n in carried.items()}
            own = len(self.capacities)
            self._paces.append(most / seconds)
            uses = (*((link, share / most) for link, share in shares.items()), (own, 1))
            self._wholes[nbytes] = (most, uses)
        return self._wholes[nbytes]
