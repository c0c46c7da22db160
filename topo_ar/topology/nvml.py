"""The NVIDIA GPUs of a machine and their NVLinks, concluded from what NVML answered.

A call that failed is said with its name, device and error. It means "not known", never "not there".
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from topo_ar.topology.busid import normal_busid
from topo_ar.topology.cuda_order import cuda_order, visibility_note
from topo_ar.topology.gpu_links import (
    NO_LINKS,
    Counts,
    GpuLinks,
    GpuModel,
    connect_gpus,
    is_sentinel,
    nvswitch,
)
from topo_ar.topology.model import LinkKind, Source
from topo_ar.topology.nvml_answers import (
    FabricAnswer,
    Failure,
    GpuAnswer,
    LinkAnswer,
    NvmlAnswers,
)
from topo_ar.topology.wording import some

_LIBRARY_NOT_FOUND = 12
# What a card without NVLink answers, and one that has no further link.
_NO_LINK = (3, 2)
_LINK_ENABLED = 1
_SWITCH, _IBM_NPU = 2, 1
# Mbyte/s of signalling that NVML reports for links whose payload is less: NVLink 4 and 5.
_RAW_SPEED = {26562: 25e9, 53125: 50e9}
# By status: the word of ``nvidia-smi topo -p2p``, and why there is no access.
_P2P = {
    0: ("OK", ""),
    1: ("CNS", "the chipset does not support it"),
    2: ("GNS", "the GPU does not support it"),
    3: ("TNS", "the topology does not support it"),
    4: ("DR", "a registry key disables it"),
    5: ("NS", "it is not supported"),
    6: ("U", "NVML does not know"),
}
# Cards of consumers since this compute capability may say OK and then hang.
_UNSURE_P2P = 89
_FABRIC_STATES = {1: "not started", 2: "in progress"}
# Two bits each of the health mask (nvml.h); 1 means true. Four bits tell a wrong configuration.
_FABRIC_HEALTH = {
    0: "its bandwidth is degraded",
    2: "a route is being recovered",
    4: "a route is unhealthy",
    6: "an access timeout is being recovered",
}
_FABRIC_CONFIGURATION_SHIFT, _INSUFFICIENT_NVLINKS = 8, 5


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as NVML has it; `busid` is in sysfs spelling, ``0000:03:00.0``.

    `numa` lists the NUMA nodes that NVML holds to be nearest, empty where it does not know; `pcie`
    is the highest generation and number of lanes, None where it does not know.
    `attributes` are what a device keeps beside bus id, name and compute capability.
    """

    device: str
    busid: str
    name: str
    sm: int | None
    numa: tuple[int, ...] = ()
    pcie: tuple[int, int] | None = None
    attributes: dict[str, str | int | float | bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gpus:
    """All GPUs in NVML's order, the links between them, and what could not be found out."""

    gpus: tuple[Gpu, ...] = ()
    links: GpuLinks = NO_LINKS
    notes: tuple[str, ...] = ()


def conclude(answers: NvmlAnswers, node: str) -> Gpus:
    """Return the GPUs that `answers` describe.

    Parameters
    ----------
    answers : NvmlAnswers
        Asked on this machine or recorded on another.
    node : str
        Name of the node, the first part of the ids.
    """
    if answers.absent is not None:
        return Gpus(notes=(_why_absent(answers.absent),))
    return _Conclusion(answers, node).gpus()


def _why_absent(failure: Failure) -> str:
    if failure.call.startswith("import"):
        return "pynvml is not installed, so no NVIDIA GPU was looked for"
    if failure.error == _LIBRARY_NOT_FOUND:
        return "no NVML library on this machine, so no NVIDIA GPU was looked for"
    return f"{failure}, so what GPUs there are is not known"


class _Conclusion:
    def __init__(self, answers: NvmlAnswers, node: str) -> None:
        self.answers = answers
        self.node = node
        self.notes: list[str] = []
        self.order = cuda_order(answers)
        self.p2p = _worst_p2p(answers)

    def gpus(self) -> Gpus:
        if isinstance(self.answers.count, Failure):
            self._unknown("this machine", self.answers.count)
        answered = [gpu for gpu in self.answers.gpus if self._has_busid(gpu)]
        found = [self._gpu(answer) for answer in answered]
        by_busid = {gpu.busid: gpu.device for gpu in found}
        counts: Counts = Counter()
        asked = [
            gpu.device
            for gpu, answer in zip(found, answered, strict=True)
            if self._count(gpu, answer, by_busid, counts)
        ]
        models = {
            gpu.device: GpuModel(self.node, gpu.sm, nvlink=self._speed(gpu, answer))
            for gpu, answer in zip(found, answered, strict=True)
        }
        links = connect_gpus(models, counts, Source.NVML, asked)
        if note := visibility_note(self.answers):
            self.notes.append(note)
        self.notes += self._pair_notes()
        self.notes += self._fabric_notes()
        return Gpus(tuple(found), links, (*self.notes, *links.notes))

    def _device(self, index: int) -> str:
        return f"{self.node}/gpu{index}"

    def _unknown(self, where: str, failure: Failure) -> None:
        self.notes.append(f"{where}: {failure}; what it would say is not known")

    def _has_busid(self, answer: GpuAnswer) -> bool:
        if isinstance(answer.busid, Failure):
            self._unknown(self._device(answer.index), answer.busid)
            return False
        return True

    def _gpu(self, answer: GpuAnswer) -> Gpu:
        device = self._device(answer.index)
        for value in (answer.name, answer.capability):
            if isinstance(value, Failure):
                self._unknown(device, value)
        attributes: dict[str, str | int | float | bool] = {"index": answer.index}
        if isinstance(answer.uuid, str):
            attributes["uuid"] = answer.uuid
        if isinstance(answer.mig, int) and answer.mig:
            attributes["mig"] = True
        if isinstance(answer.fabric, FabricAnswer) and int(answer.fabric.cluster or "0", 16):
            attributes["fabric_cluster"] = answer.fabric.cluster
            attributes["fabric_clique"] = answer.fabric.clique
        if isinstance(answer.c2c_links, int) and answer.c2c_links:
            attributes["c2c_links"] = answer.c2c_links
            if isinstance(answer.c2c_megabytes_per_s, int):
                attributes["c2c_megabytes_per_s"] = answer.c2c_megabytes_per_s
        if answer.index in self.order:
            attributes["cuda_index"] = self.order[answer.index]
        if words := [
            f"gpu{far}={_P2P[status][0]}"
            for (near, far), status in self.p2p.items()
            if near == answer.index
        ]:
            attributes["p2p"] = ",".join(words)
        return Gpu(
            device,
            normal_busid(str(answer.busid)),
            answer.name if isinstance(answer.name, str) else "GPU",
            answer.capability[0] * 10 + answer.capability[1]
            if isinstance(answer.capability, tuple)
            else None,
            answer.memory_numa if isinstance(answer.memory_numa, tuple) else (),
            (answer.pcie_generation, answer.pcie_width)
            if isinstance(answer.pcie_generation, int) and isinstance(answer.pcie_width, int)
            else None,
            attributes,
        )

    def _count(self, gpu: Gpu, answer: GpuAnswer, by_busid: dict[str, str], counts: Counts) -> bool:
        """Count the active links of `gpu` by far end; return whether it could be asked."""
        if gpu.attributes.get("mig"):
            self.notes.append(
                f"{gpu.device}: MIG is on, so its instances have no NVLink and no peer access; "
                "pairs meet in the host's memory"
            )
            return False
        inactive = 0
        said: dict[str, list[str]] = {}
        for link in answer.links:
            if link.state == 0:
                inactive += 1
                continue
            far, text = self._far_end(gpu, link, by_busid)
            if text:
                said.setdefault(text, []).append(str(link.link))
            if far is not None:
                counts[gpu.device, far, LinkKind.NVLINK] += 1
        for text, links in said.items():
            plural = "s" if len(links) > 1 else ""
            self.notes.append(f"{gpu.device} link{plural} {some(links)}: {text}")
        end = answer.links_end
        if not answer.links and not (end and end.error in _NO_LINK):
            why = end or "NVLink was not asked for"
            self.notes.append(f"{gpu.device}: {why}; whether it has NVLink is not known")
        if all(isinstance(link.state, Failure) for link in answer.links) and (
            answer.links or not (end and end.error in _NO_LINK)
        ):
            gpu.attributes["links_known"] = False
        if inactive:
            plural = "NVLinks are" if inactive > 1 else "NVLink is"
            self.notes.append(f"{gpu.device}: {inactive} {plural} inactive")
        return True

    def _far_end(
        self, gpu: Gpu, link: LinkAnswer, by_busid: dict[str, str]
    ) -> tuple[str | None, str]:
        """Return the device a link leads to, None where to none that is known, and what to say."""
        if isinstance(link.state, Failure):
            return None, f"{link.state}; whether it works is not known"
        if link.state != _LINK_ENABLED:
            return None, f"is in state {link.state} and carries nothing now"
        if link.p2p == 0:
            return None, "does not support peer access and is left out"
        if link.remote_type == _SWITCH:
            return nvswitch(self.node), ""
        if isinstance(link.remote_busid, Failure):
            return None, f"{link.remote_busid}; where it leads is not known"
        if link.remote_busid is None:
            return None, "where it leads was not asked for"
        busid = normal_busid(link.remote_busid)
        if is_sentinel(busid):
            return nvswitch(self.node), ""
        if link.remote_type == _IBM_NPU:
            return None, f"leads to the CPU ({busid}), not to a GPU"
        far = by_busid.get(busid)
        if far is None or far == gpu.device:
            return None, f"leads to {busid}, which is no GPU that NVML lists"
        return far, ""

    def _speed(self, gpu: Gpu, answer: GpuAnswer) -> float | None:
        """Return what NVML says each link carries, in bytes/s of payload."""
        speeds = {
            _RAW_SPEED.get(link.speed, link.speed * 1e6)
            for link in answer.links
            if isinstance(link.speed, int) and link.speed and link.state == _LINK_ENABLED
        }
        if len(speeds) > 1:
            shown = ", ".join(f"{speed / 1e9:g}" for speed in sorted(speeds))
            self.notes.append(
                f"{gpu.device}: its NVLinks differ in speed ({shown} GB/s); the slower ones may be "
                "retraining or degraded"
            )
        return min(speeds, default=None)

    def _pair_notes(self) -> Iterator[str]:
        """Say which pairs of GPUs may not read each other directly, once for each reason."""
        by_reason: dict[int, list[str]] = {}
        for (a, b), status in self.p2p.items():
            if status and a < b:
                by_reason.setdefault(status, []).append(f"{a}-{b}")
        for status, found in by_reason.items():
            pairs = f"{len(found)} pair{'s' if len(found) > 1 else ''}"
            yield (
                f"no peer access between {pairs} of GPUs ({some(found)}): "
                f"{_P2P[status][1]}; they meet in the host's memory"
            )
        consumer = {
            gpu.index
            for gpu in self.answers.gpus
            if "GeForce" in str(gpu.name)
            and isinstance(gpu.capability, tuple)
            and gpu.capability[0] * 10 + gpu.capability[1] >= _UNSURE_P2P
        }
        if any(not status and {a, b} <= consumer for (a, b), status in self.p2p.items()):
            yield (
                "peer access between GeForce cards is the driver's word; copies may hang or arrive "
                "wrong, so try one before it is used"
            )

    def _fabric_notes(self) -> Iterator[str]:
        cliques: dict[tuple[str, int], list[int]] = {}
        for gpu in self.answers.gpus:
            fabric = gpu.fabric
            if not isinstance(fabric, FabricAnswer):
                continue
            device = self._device(gpu.index)
            if fabric.state in _FABRIC_STATES:
                yield (
                    f"{device}: registration with the NVLink fabric is "
                    f"{_FABRIC_STATES[fabric.state]}; NVLink to other trays does not work before"
                )
            for text in _unhealthy(fabric.health or 0):
                yield f"{device}: the NVLink fabric says that {text}"
            if int(fabric.cluster or "0", 16):
                cliques.setdefault((fabric.cluster, fabric.clique), []).append(gpu.index)
        if len(cliques) > 1:
            shown = " and ".join(map(str, cliques.values()))
            yield (
                f"GPUs {shown} are in {len(cliques)} NVLink fabric cliques: there is no NVLink "
                "between them"
            )


def _unhealthy(health: int) -> Iterator[str]:
    for shift, text in _FABRIC_HEALTH.items():
        if health >> shift & 3 == 1:
            yield text
    if health >> _FABRIC_CONFIGURATION_SHIFT & 15 == _INSUFFICIENT_NVLINKS:
        yield "it has too few NVLinks for its configuration"


def _worst_p2p(answers: NvmlAnswers) -> dict[tuple[int, int], int]:
    """Return the worse status of reading and writing, by pair of indices in both orders."""
    worst: dict[tuple[int, int], int] = {}
    for pair in answers.pairs:
        known = [s for s in (pair.p2p_read, pair.p2p_write) if isinstance(s, int) and s in _P2P]
        if known and pair.a != pair.b:
            worst[pair.a, pair.b] = worst[pair.b, pair.a] = max(known)
    return dict(sorted(worst.items()))
