"""Files of installed packages that are data: they are read, and the packages never imported.

``make workloads-data`` installs the packages without what they depend on. Where one is absent, a
workload trains on a generated set instead, which says in every record that it is one.
"""

import sys
from importlib.util import find_spec
from pathlib import Path


def packaged_file(package: str, *parts: str) -> Path | None:
    """Return a file of an installed package, or None after one message where it is not there.

    Parameters
    ----------
    package : str
        The name it is imported by.
    *parts : str
        The path of the file inside it.
    """
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, *parts)
        if path.is_file():
            return path
    print(
        f"{package} with {'/'.join(parts)} is not installed: training on a GENERATED set instead; "
        "get the real one with `make workloads-data`",
        file=sys.stderr,
        flush=True,
    )
    return None
