"""Sleeping on a word of shared memory, and waking all who do (futex(2))."""

import ctypes
import platform

_NUMBERS = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1
_EVERYONE = 1 << 30


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_syscall = ctypes.CDLL(None).syscall
_syscall.argtypes = [ctypes.c_long] * 2 + [ctypes.c_int] * 2 + [ctypes.c_void_p]
_syscall.restype = ctypes.c_long
_NUMBER = _NUMBERS.get(platform.machine(), 202)


class Sleep:
    """A wait of at most `seconds`, made once and used often."""

    def __init__(self, seconds: float) -> None:
        whole = int(seconds)
        self._timespec = _Timespec(whole, int((seconds - whole) * 1e9))
        self._pointer = ctypes.addressof(self._timespec)

    def while_equal(self, address: int, value: int) -> None:
        """Sleep while the low half of the 64-bit word at `address` is that of `value`."""
        low = ctypes.c_int(value & 0xFFFFFFFF).value
        _syscall(_NUMBER, address, _WAIT, low, self._pointer)


def wake(address: int) -> None:
    """Wake all who sleep on the word at `address`, in any process."""
    _syscall(_NUMBER, address, _WAKE, _EVERYONE, None)
