"""Work space that goes back to the system when it is dropped."""

import mmap

import numpy as np
from numpy.typing import NDArray

# Below, the allocator finds room among what is small and short-lived.
_LEAST_NBYTES = 1 << 16


def work_space(nbytes: int) -> NDArray[np.uint8]:
    """Return uninitialised bytes for as long as a communicator lives.

    malloc would keep large blocks when they are freed, and a job that makes communicators again,
    with other blocks in between, would hold ever more memory that nobody uses.

    Parameters
    ----------
    nbytes : int
        How many.
    """
    if nbytes < _LEAST_NBYTES:
        return np.empty(nbytes, np.uint8)
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE), np.uint8)
