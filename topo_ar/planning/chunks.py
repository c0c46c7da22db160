"""How a buffer is cut into chunks: small at both ends, large in between.

A small first chunk puts the first byte on the wire early, a small last one leaves little to do
after the last byte has arrived; large ones in between keep the number of wake-ups low.
"""

from topo_ar.errors import PlanError

KIB = 1 << 10
LARGEST_TAPER_NBYTES = 2048 * KIB
MIN_CHUNK_NBYTES = 64 * KIB


def edge_nbytes(nbytes: int) -> int:
    """Return the size of the first and the last chunk of a buffer of `nbytes` bytes."""
    if nbytes >= 4096 * KIB:
        return 256 * KIB
    return 128 * KIB if nbytes >= 1024 * KIB else MIN_CHUNK_NBYTES


def tapered_chunks(
    nbytes: int, align_nbytes: int = 1, max_chunk_nbytes: int = LARGEST_TAPER_NBYTES
) -> tuple[int, ...]:
    """Return chunk sizes in bytes that sum to `nbytes`; an empty buffer has none.

    The first and the last chunk have `edge_nbytes`; inwards the sizes double, up to 2 MiB,
    `max_chunk_nbytes` and a quarter of the buffer, but a chunk is not made smaller than 64 KiB or
    `align_nbytes` for the sake of that quarter. All are multiples of `align_nbytes`,
    except that the last also takes the remainder (as a chunk of its own where it would not fit).

    Raises
    ------
    PlanError
        If a size is negative or `align_nbytes` is not in 1..`max_chunk_nbytes`.
    """
    _check(nbytes, align_nbytes, max_chunk_nbytes)
    aligned, rest = nbytes // align_nbytes, nbytes % align_nbytes
    limit = max(1, min(max_chunk_nbytes, LARGEST_TAPER_NBYTES) // align_nbytes)
    cap = min(limit, max(1, max(nbytes // 4, MIN_CHUNK_NBYTES) // align_nbytes))
    edge = min(cap, max(1, edge_nbytes(nbytes) // align_nbytes))
    ramp: list[int] = []
    size = edge
    # A middle of at least one more chunk of this size keeps the sizes from falling again.
    while size < cap and aligned >= 3 * size:
        ramp.append(size)
        aligned -= 2 * size
        size = min(2 * size, cap)
    middle = _even_parts(aligned, -(-aligned // cap))
    sizes = [units * align_nbytes for units in [*ramp, *middle, *reversed(ramp)]]
    return _with_remainder(sizes, rest, max_chunk_nbytes)


def equal_chunks(
    nbytes: int, count: int, align_nbytes: int = 1, max_chunk_nbytes: int = LARGEST_TAPER_NBYTES
) -> tuple[int, ...]:
    """Return about `count` chunks of nearly equal size, more where one would be too large.

    Alignment, remainder and errors are those of `tapered_chunks`.
    """
    _check(nbytes, align_nbytes, max_chunk_nbytes)
    aligned, rest = nbytes // align_nbytes, nbytes % align_nbytes
    parts = min(max(count, -(-aligned // (max_chunk_nbytes // align_nbytes))), aligned)
    sizes = [units * align_nbytes for units in _even_parts(aligned, parts)]
    return _with_remainder(sizes, rest, max_chunk_nbytes)


def _check(nbytes: int, align_nbytes: int, max_chunk_nbytes: int) -> None:
    if nbytes < 0:
        raise PlanError(f"a buffer cannot hold {nbytes} bytes; give 0 or more")
    if not 1 <= align_nbytes <= max_chunk_nbytes:
        raise PlanError(
            f"chunks of at most {max_chunk_nbytes} bytes cannot be multiples of {align_nbytes} "
            "bytes; allow larger chunks"
        )


def _even_parts(total: int, count: int) -> list[int]:
    return [total * (i + 1) // count - total * i // count for i in range(count)]


def _with_remainder(sizes: list[int], rest: int, limit: int) -> tuple[int, ...]:
    if rest and sizes and sizes[-1] + rest <= limit:
        return (*sizes[:-1], sizes[-1] + rest)
    return (*sizes, rest) if rest else tuple(sizes)
