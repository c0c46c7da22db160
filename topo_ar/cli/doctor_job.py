"""``topo-ar doctor`` on every rank of a job: each host is looked at, and the ranks compared."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from topo_ar.cli.doctor import Finding

_TIMEOUT_S = 60.0


def is_launched() -> bool:
    """Tell whether a launcher has started this process as one rank of several."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in needed) and int(os.environ["WORLD_SIZE"]) > 1


def job_findings(look: "Callable[[], Sequence[Finding]]") -> "list[Finding] | None":
    """Return what all hosts show, on rank 0; None on the others. Collective over the job.

    Parameters
    ----------
    look : callable
        Returns what this host shows; called once on each host.
    """
    import torch.distributed as dist

    from topo_ar.cli.doctor import Finding, Verdict
    from topo_ar.integrations.model_checks import differing_versions, versions

    dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S))
    try:
        first = os.environ.get("LOCAL_RANK", "0") == "0"
        mine = {
            "versions": versions(),
            "node": os.environ.get("GROUP_RANK", "0"),
            "findings": [asdict(finding) for finding in look()] if first else [],
        }
        rows: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(rows, mine)
    finally:
        dist.destroy_process_group()
    if int(os.environ["RANK"]) != 0:
        return None
    by_finding: dict[tuple[str, ...], list[str]] = {}
    nodes = [row["node"] for row in rows if row["findings"]]
    for row in rows:
        for each in row["findings"]:
            key = (each["check"], each["verdict"], each["text"], each["remedy"])
            by_finding.setdefault(key, []).append(row["node"])
    found = []
    for (check, verdict, text, remedy), where in by_finding.items():
        place = "" if len(where) == len(nodes) else f"node {', '.join(where)}: "
        found.append(Finding(check, Verdict(verdict), place + text, remedy))
    differing = differing_versions([row["versions"] for row in rows])
    found += [Finding(d.about, Verdict.PROBLEM, d.text, d.remedy) for d in differing]
    if not differing:
        found.append(Finding("versions", Verdict.OK, f"the same on all {len(rows)} ranks"))
    return found
