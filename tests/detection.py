"""How long faults took to be noticed, kept where the environment names a file for it."""

import json
import os
from pathlib import Path

FILE = "TOPO_AR_FAULT_TIMES"


def note(fault: str, ranks: list[int], seconds: float, deadline_s: float) -> None:
    """Keep the seconds from a fault to the last rank's exception, under a deadline."""
    if path := os.environ.get(FILE):
        row = {
            "fault": fault,
            "hosts": ranks,
            "seconds": round(seconds, 3),
            "deadline_seconds": deadline_s,
        }
        with Path(path).open("a") as file:
            file.write(json.dumps(row) + "\n")
