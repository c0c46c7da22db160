"""The NVIDIA GPUs of this machine and their NVLinks, asked from NVML.

A call that fails is said with its name, device and error. It means "not known", never "not there".
"""

import importlib
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from topo_ar.topology.gpu_links import (
    Counts,
    GpuLinks,
    GpuModel,
    connect_gpus,
    is_sentinel,
    nvswitch,
)
from topo_ar.topology.model import LinkKind, Source

_NO_LINKS = GpuLinks((), (), ())


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as NVML has it; `busid` is in sysfs spelling, ``0000:03:00.0``."""

    device: str
    busid: str
    name: str
    sm: int | None


@dataclass(frozen=True, slots=True)
class Gpus:
    """All GPUs in NVML's order, the links between them, and what could not be found out."""

    gpus: tuple[Gpu, ...] = ()
    links: GpuLinks = _NO_LINKS
    notes: tuple[str, ...] = ()


def probe_gpus(node: str, library: Any = None) -> Gpus:
    """Return the GPUs of this machine.

    Parameters
    ----------
    node : str
        Name of the node, the first part of the ids.
    library : module, optional
        The binding to NVML; ``pynvml`` when left out.
    """
    if library is None:
        try:
            library = importlib.import_module("pynvml")
        except ImportError:
            return Gpus(notes=("pynvml is not installed, so no NVIDIA GPU was looked for",))
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        if error.value == library.NVML_ERROR_LIBRARY_NOT_FOUND:
            return Gpus(notes=("no NVML library on this machine, so no NVIDIA GPU was looked for",))
        return Gpus(notes=(f"nvmlInit failed ({error}), so what GPUs there are is not known",))
    try:
        return _Inquiry(library, node).gpus()
    finally:
        library.nvmlShutdown()


@dataclass(slots=True)
class _Inquiry:
    library: Any
    node: str
    notes: list[str] = field(default_factory=list)

    def gpus(self) -> Gpus:
        count = self._ask("nvmlDeviceGetCount", "this machine") or 0
        handles = dict[str, Any]()
        gpus = []
        for index in range(count):
            device = f"{self.node}/gpu{index}"
            handle = self._ask("nvmlDeviceGetHandleByIndex", device, index)
            info = handle and self._ask("nvmlDeviceGetPciInfo", device, handle)
            if info:
                handles[device] = handle
                gpus.append(self._describe(device, handle, _busid(info.busId)))
        if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
            self.notes.append(
                "CUDA_VISIBLE_DEVICES is set; GPUs are listed all, in the order of NVML, "
                "which need not be that of CUDA"
            )
        counts: Counts = Counter()
        asked = [gpu.device for gpu in gpus if self._count(gpu, handles[gpu.device], gpus, counts)]
        models = {gpu.device: GpuModel(self.node, gpu.sm) for gpu in gpus}
        links = connect_gpus(models, counts, Source.NVML, asked)
        return Gpus(tuple(gpus), links, (*self.notes, *links.notes))

    def _ask(self, call: str, device: str, *arguments: Any) -> Any:
        """Return the answer of a call, or None and a note that says why there is none."""
        try:
            return getattr(self.library, call)(*arguments)
        except self.library.NVMLError as error:
            self.notes.append(f"{device}: {call} failed ({error}); what it would say is not known")
            return None

    def _describe(self, device: str, handle: Any, busid: str) -> Gpu:
        name = self._ask("nvmlDeviceGetName", device, handle) or "GPU"
        capability = self._ask("nvmlDeviceGetCudaComputeCapability", device, handle)
        return Gpu(
            device,
            busid,
            name.decode() if isinstance(name, bytes) else name,
            capability[0] * 10 + capability[1] if capability else None,
        )

    def _count(self, gpu: Gpu, handle: Any, gpus: list[Gpu], counts: Counts) -> bool:
        """Count the active links of `gpu` by far end; return whether it could be asked."""
        nvml = self.library
        if self._in_mig_mode(handle):
            self.notes.append(f"{gpu.device}: MIG is on, so its instances have no NVLink")
            return False
        inactive = 0
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                if nvml.nvmlDeviceGetNvLinkState(handle, link) != nvml.NVML_FEATURE_ENABLED:
                    inactive += 1
                    continue
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_INVALID_ARGUMENT or (
                    error.value == nvml.NVML_ERROR_NOT_SUPPORTED and link == 0
                ):
                    break
                self.notes.append(
                    f"{gpu.device} link {link}: nvmlDeviceGetNvLinkState failed ({error}); "
                    "whether it works is not known"
                )
                continue
            far = self._far_end(gpu, handle, link, gpus)
            if far is not None:
                counts[gpu.device, far, LinkKind.NVLINK] += 1
        if inactive:
            self.notes.append(f"{gpu.device}: {inactive} NVLinks are inactive")
        return True

    def _in_mig_mode(self, handle: Any) -> bool:
        try:
            return bool(self.library.nvmlDeviceGetMigMode(handle)[0])
        except self.library.NVMLError:
            # GPUs that know no MIG do not support the question.
            return False

    def _far_end(self, gpu: Gpu, handle: Any, link: int, gpus: list[Gpu]) -> str | None:
        """Return where a link leads; the type is asked first, all that is told of a switch."""
        nvml = self.library
        where = f"{gpu.device} link {link}"
        kind = self._ask("nvmlDeviceGetNvLinkRemoteDeviceType", where, handle, link)
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return nvswitch(self.node)
        info = self._ask("nvmlDeviceGetNvLinkRemotePciInfo", where, handle, link)
        if info is None:
            return None
        busid = _busid(info.busId)
        if is_sentinel(busid):
            return nvswitch(self.node)
        peers = [other.device for other in gpus if other.busid == busid and other != gpu]
        if not peers:
            self.notes.append(f"{where}: leads to {busid}, which is no GPU that NVML lists")
            return None
        return peers[0]


def _busid(raw: bytes | str) -> str:
    """Return a bus id in sysfs spelling: NVML writes eight digits for the domain."""
    text = (raw.decode() if isinstance(raw, bytes) else raw).lower()
    domain, _, rest = text.partition(":")
    return f"{domain[-4:] if is_sentinel(text) else format(int(domain, 16), '04x')}:{rest}"
