"""Asks NVML everything a topology needs, each question by itself: no failure hides another answer.

A driver that is older than the binding lacks functions, a container or a virtual machine refuses
some, a consumer card supports few. Each of these is an answer too.
"""

import contextlib
import ctypes
import importlib
import os
from collections.abc import Callable
from typing import Any, TypeVar

from topo_ar.topology.nvml_answers import (
    FabricAnswer,
    Failure,
    GpuAnswer,
    LinkAnswer,
    NvmlAnswers,
    PairAnswer,
)

# NVML's numbers, where a binding has none, or a tuple by mistake (NVML_P2P_CAPS_INDEX_READ).
_P2P_READ, _P2P_WRITE = 0, 1
_CAP_P2P_SUPPORTED = 0
_FIELD_LINK_SPEED = 164
_FIELD_C2C_COUNT, _FIELD_C2C_MAX_RATE = 170, 172
_SCOPE_NODE = 0
_MAX_LINKS = 36
_ERROR_INVALID_ARGUMENT, _ERROR_NOT_SUPPORTED = 2, 3
_NOT_THERE = -1
_NUMA_WORDS = 16

_Answer = TypeVar("_Answer")


def ask_nvml(library: Any = None) -> NvmlAnswers:
    """Return what NVML says of this machine; never raises for what it refuses.

    Parameters
    ----------
    library : module, optional
        The binding to NVML; ``pynvml`` when left out.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    order = os.environ.get("CUDA_DEVICE_ORDER")
    if library is None:
        try:
            library = importlib.import_module("pynvml")
        except ImportError:
            return NvmlAnswers(absent=Failure("import pynvml", _NOT_THERE, "not installed"))
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        return NvmlAnswers(absent=_failure("nvmlInit", error), visible=visible, order=order)
    try:
        return _Inquiry(library).answers(visible, order)
    finally:
        # Of a GPU that was lost meanwhile it may fail, which takes nothing back.
        with contextlib.suppress(library.NVMLError):
            library.nvmlShutdown()


def _failure(call: str, error: Any) -> Failure:
    return Failure(call, int(getattr(error, "value", _NOT_THERE)), str(error))


class _Inquiry:
    def __init__(self, library: Any) -> None:
        self.library = library

    def answers(self, visible: str | None, order: str | None) -> NvmlAnswers:
        count = self._ask("nvmlDeviceGetCount")
        handles: dict[int, Any] = {}
        gpus = []
        for index in range(count if isinstance(count, int) else 0):
            handle = self._ask("nvmlDeviceGetHandleByIndex", index)
            if isinstance(handle, Failure):
                gpus.append(GpuAnswer(index, handle))
                continue
            handles[index] = handle
            gpus.append(self._gpu(index, handle))
        pairs = [
            self._pair(a, b, handles[a], handles[b]) for a in handles for b in handles if a < b
        ]
        return NvmlAnswers(
            tuple(gpus),
            tuple(pairs),
            count=count,
            driver=self._text("nvmlSystemGetDriverVersion"),
            visible=visible,
            order=order,
        )

    def _ask(self, call: str, *arguments: Any) -> Any:
        function = getattr(self.library, call, None)
        if function is None:
            return Failure(call, _NOT_THERE, "the binding does not have it")
        try:
            return function(*arguments)
        except self.library.NVMLError as error:
            return _failure(call, error)

    def _then(
        self, read: Callable[[Any], _Answer], call: str, *arguments: Any
    ) -> _Answer | Failure:
        answer = self._ask(call, *arguments)
        return answer if isinstance(answer, Failure) else read(answer)

    def _text(self, call: str, *arguments: Any) -> str | Failure:
        return self._then(_decoded, call, *arguments)

    def _number(self, call: str, *arguments: Any) -> int | Failure:
        return self._then(int, call, *arguments)

    def _gpu(self, index: int, handle: Any) -> GpuAnswer:
        links, links_end = self._links(handle)
        return GpuAnswer(
            index=index,
            busid=self._then(_busid, "nvmlDeviceGetPciInfo", handle),
            uuid=self._text("nvmlDeviceGetUUID", handle),
            name=self._text("nvmlDeviceGetName", handle),
            capability=self._then(
                lambda pair: (int(pair[0]), int(pair[1])),
                "nvmlDeviceGetCudaComputeCapability",
                handle,
            ),
            mig=self._then(lambda modes: int(modes[0]), "nvmlDeviceGetMigMode", handle),
            memory_numa=self._then(
                _set_bits, "nvmlDeviceGetMemoryAffinity", handle, _NUMA_WORDS, _SCOPE_NODE
            ),
            pcie_generation=self._number("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            pcie_width=self._number("nvmlDeviceGetMaxPcieLinkWidth", handle),
            c2c_links=self._field(handle, _FIELD_C2C_COUNT),
            c2c_megabytes_per_s=self._field(handle, _FIELD_C2C_MAX_RATE),
            fabric=self._fabric(handle),
            links=links,
            links_end=links_end,
        )

    def _field(self, handle: Any, field: int, scope: int = 0) -> int | Failure:
        """Ask for one field value, whose own return code counts beside that of the call."""
        values = self._ask("nvmlDeviceGetFieldValues", handle, [(field, scope)])
        if isinstance(values, Failure):
            return values
        value = values[0]
        if value.nvmlReturn != 0:
            return Failure(f"field {field}", int(value.nvmlReturn))
        return int(_VALUE_OF_TYPE.get(value.valueType, _unsigned)(value.value))

    def _links(self, handle: Any) -> tuple[tuple[LinkAnswer, ...], Failure | None]:
        found: list[LinkAnswer] = []
        for link in range(getattr(self.library, "NVML_NVLINK_MAX_LINKS", _MAX_LINKS)):
            state = self._number("nvmlDeviceGetNvLinkState", handle, link)
            if isinstance(state, Failure) and (
                state.error == _ERROR_INVALID_ARGUMENT
                or (state.error == _ERROR_NOT_SUPPORTED and link == 0)
                or state.error == _NOT_THERE
            ):
                return tuple(found), state
            found.append(self._link(handle, link, state))
        return tuple(found), None

    def _link(self, handle: Any, link: int, state: int | Failure) -> LinkAnswer:
        if state == 0:
            return LinkAnswer(link, state)
        # The type is asked first: of a switch it may be all that is told.
        remote_type = self._number("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        switch = getattr(self.library, "NVML_NVLINK_DEVICE_TYPE_SWITCH", 2)
        remote_busid: str | Failure | None = None
        if remote_type != switch:
            remote_busid = self._then(_busid, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        return LinkAnswer(
            link,
            state,
            self._number("nvmlDeviceGetNvLinkCapability", handle, link, _CAP_P2P_SUPPORTED),
            self._number("nvmlDeviceGetNvLinkVersion", handle, link),
            remote_type,
            remote_busid,
            self._field(handle, _FIELD_LINK_SPEED, link),
        )

    def _fabric(self, handle: Any) -> FabricAnswer | Failure:
        kind = getattr(self.library, "c_nvmlGpuFabricInfo_v2_t", None)
        if kind is None:
            return Failure("nvmlDeviceGetGpuFabricInfoV", _NOT_THERE, "the binding lacks it")
        info = kind()
        answer = self._ask("nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info))
        if isinstance(answer, Failure):
            return answer
        return FabricAnswer(
            bytes(info.clusterUuid).hex(), int(info.cliqueId), int(info.state), int(info.healthMask)
        )

    def _pair(self, a: int, b: int, first: Any, second: Any) -> PairAnswer:
        return PairAnswer(
            a,
            b,
            self._number("nvmlDeviceGetTopologyCommonAncestor", first, second),
            self._number("nvmlDeviceGetP2PStatus", first, second, _P2P_READ),
            self._number("nvmlDeviceGetP2PStatus", first, second, _P2P_WRITE),
        )


def _decoded(raw: bytes | str) -> str:
    return raw.decode(errors="replace") if isinstance(raw, bytes) else raw


def _busid(info: Any) -> str:
    return _decoded(info.busId).lower()


def _set_bits(words: Any) -> tuple[int, ...]:
    return tuple(
        64 * position + bit
        for position, word in enumerate(words)
        for bit in range(64)
        if word >> bit & 1
    )


def _unsigned(value: Any) -> int:
    return int(value.uiVal)


_VALUE_OF_TYPE: dict[int, Callable[[Any], int]] = {
    1: _unsigned,
    2: lambda value: int(value.ulVal),
    3: lambda value: int(value.ullVal),
    4: lambda value: int(value.sllVal),
    5: lambda value: int(value.siVal),
}
