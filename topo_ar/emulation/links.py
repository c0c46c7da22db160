"""What a shaped link is: its token bucket, and the payload rate it leaves to TCP."""

_EXACT_UNITS = ((10**9, "gbit"), (10**6, "mbit"), (10**3, "kbit"))
_FRAME_HEADER = 14
_TCP_HEADERS = 52


def default_burst(rate: float) -> int:
    """Return the credit in bytes of a token bucket that holds `rate` (bytes/s) cheaply.

    A segment of 64 KiB must fit, else the kernel cuts every one; and the smaller the credit, the
    smaller the messages whose timing means something. Above 5 Gbit/s timers need more of it.
    """
    return 128 << 10 if rate <= 5e9 / 8 else 256 << 10


def payload_fraction(mtu: int) -> float:
    """Return the share of a shaped rate that TCP payload gets, 0.956 at an MTU of 1500.

    The bucket counts Ethernet frames without preamble, so a full one costs ``mtu + 14`` bytes and
    carries ``mtu - 52``: IPv4 and TCP headers with time stamps.
    """
    return (mtu - _TCP_HEADERS) / (mtu + _FRAME_HEADER)


def rate_text(rate: float) -> str:
    """Return `rate` (bytes/s) the way ``tc`` reads it, ``1gbit``; whole bits per second."""
    bits = round(rate * 8)
    for factor, unit in _EXACT_UNITS:
        if bits % factor == 0:
            return f"{bits // factor}{unit}"
    return f"{bits}bit"


def bucket(device: str, rate: float, burst: int | None) -> str:
    """Return the line for ``tc -batch`` that shapes what leaves `device`; replaces a former one.

    `rate` is in bytes/s and `burst` in bytes, by default `default_burst`. The 50 ms bound the
    queue; they are not a delay.
    """
    credit = default_burst(rate) if burst is None else burst
    return f"qdisc replace dev {device} root tbf rate {rate_text(rate)} burst {credit} latency 50ms"
