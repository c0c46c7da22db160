"""Does torch's own distributed_test.py, made for gloo and NCCL, pass with our all-reduce as well?

Command: python -m experiments.torch_suite --out results/
Minutes: 20 on two cores; for one case: --mode hook --world-size 2 -k test_ddp_control_flow.

The cases are those of the torch that is installed (torch/testing/_internal/distributed), on CPU, on
`--world-size` ranks that count as two hosts. Mode gloo runs what is there; what passes is the
measure for the others. Mode hook gives our hook to each DDP that has none at its first forward.
Mode backend runs the cases on a group of the backend topo.

Every outcome is a line of torch_suite.jsonl; cases that are in there are not run again. At the end
what passed is compared with the lists in torch_suite_passes.json, and with gloo: exit code 1 when a
list is not right any more, or when a case that gloo passes does not pass here and no difference
in that file explains it. `--update` writes the lists anew.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from experiments.torch_suite_cases import BACKEND, GLOO, HOOK, PASSED, Outcome, environment
from topo_ar.cli.script import exit_code_of
from topo_ar.errors import ConfigError, ExecutionError

ROOT = Path(__file__).resolve().parent.parent
PASSES = Path(__file__).with_name("torch_suite_passes.json")
MODES = (GLOO, HOOK, BACKEND)
_NODES = 2
_TORCH = version("torch")  # importing it would take longer than many a case
_MOST_FAULTS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Which cases run how."""

    mode: Sequence[str] = MODES
    world_size: Sequence[int] = (2, 4)
    select: str = ""
    deadline: int = 90
    out: Path = Path("results")
    update: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """One pass through the suite."""

    mode: str
    world_size: int

    def __str__(self) -> str:
        return f"{self.mode} {self.world_size}"


def run(config: Config) -> int:
    """Run what is missing, print what differs and return the exit code."""
    if find_spec("expecttest") is None:
        raise ConfigError(
            "torch's test suite needs the package expecttest; pip install -e '.[conformance]'"
        )
    config.out.mkdir(parents=True, exist_ok=True)
    path = config.out / "torch_suite.jsonl"
    found: dict[Job, dict[str, Outcome]] = {}
    passes = json.loads(PASSES.read_text())
    for world_size in config.world_size:
        for mode in sorted(config.mode, key=MODES.index):
            job = Job(mode, world_size)
            known = read(path, job)
            names = _wanted(job, config, passes)
            missing = [name for name in names if name not in known]
            if missing:
                known |= _run_job(job, missing, config, path)
            found[job] = {name: known[name] for name in names if name in known}
            _print_sum(job, found[job])
    if config.update:
        PASSES.write_text(updated(passes, found))
        passes = json.loads(PASSES.read_text())
    faults = [fault for job, outcomes in found.items() for fault in judge(job, outcomes, passes)]
    for fault in faults[:_MOST_FAULTS]:
        print(f"FAIL {fault}")
    if len(faults) > _MOST_FAULTS:
        print(f"FAIL and {len(faults) - _MOST_FAULTS} more")
    if not faults:
        print(f"as {PASSES.name} says")
    return int(bool(faults))


def read(path: Path, job: Job) -> dict[str, Outcome]:
    """Return the outcomes of a job under this torch that are in a file already."""
    if not path.exists():
        return {}
    names = {field.name for field in fields(Outcome)}
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return {
        row["case"]: Outcome(**{name: row[name] for name in names})
        for row in rows
        if row["torch"] == _TORCH and (row["mode"], row["world_size"]) == (job.mode, job.world_size)
    }


def judge(job: Job, outcomes: dict[str, Outcome], passes: dict[str, Any]) -> list[str]:
    """Return how outcomes differ from the committed lists, a sentence each."""
    listed = set(passes["passes"].get(str(job), ()))
    gloo = set(passes["passes"].get(f"{GLOO} {job.world_size}", ()))
    explained = passes["differences"].get(job.mode, {})
    faults = []
    for name, outcome in sorted(outcomes.items()):
        passed = outcome.outcome == PASSED
        if passed and name not in listed:
            faults.append(f"{job}: {name} passes, but is not in the list")
        if not passed and name in listed:
            faults.append(f"{job}: {name} is in the list, but {_said(outcome)}")
        if not passed and name in gloo and name not in explained:
            faults.append(f"{job}: {name} passes with gloo, but {_said(outcome)}")
    return faults


def updated(passes: dict[str, Any], found: dict[Job, dict[str, Outcome]]) -> str:
    """Return the text of the lists with what was found; cases that were not run stay."""
    lists = {job: set(names) for job, names in passes["passes"].items()}
    for job, outcomes in found.items():
        passed = {name for name, outcome in outcomes.items() if outcome.outcome == PASSED}
        lists[str(job)] = lists.get(str(job), set()) - set(outcomes) | passed
    content = {
        "torch": _TORCH.partition("+")[0],
        "differences": passes["differences"],
        "passes": {job: sorted(names) for job, names in sorted(lists.items())},
    }
    return json.dumps(content, indent=1) + "\n"


def _said(outcome: Outcome) -> str:
    return f"{outcome.outcome} here: {outcome.reason or 'no reason given'}"


def _wanted(job: Job, config: Config, passes: dict[str, Any]) -> list[str]:
    """Return the cases to run: all of them with gloo, what gloo passes with ours."""
    if job.mode == GLOO:
        with _start(job, config, []) as listing:
            assert listing.stdout is not None
            text = listing.stdout.read()
        names: Iterable[str] = json.loads(text)
    else:
        here = read(config.out / "torch_suite.jsonl", Job(GLOO, job.world_size))
        listed = passes["passes"].get(f"{GLOO} {job.world_size}", ())
        names = sorted({n for n, o in here.items() if o.outcome == PASSED} | set(listed))
    if not names:
        raise ConfigError(
            f"what gloo passes with {job.world_size} ranks is not known; add --mode gloo"
        )
    chosen = [name for name in names if re.search(config.select, name)]
    if not chosen:
        raise ConfigError(f"-k {config.select!r} selects no case of {job}")
    return chosen


def _run_job(job: Job, names: Sequence[str], config: Config, path: Path) -> dict[str, Outcome]:
    found = {}
    with _start(job, config, names) as process, path.open("a") as rows:
        assert process.stdout is not None
        for number, line in enumerate(process.stdout, 1):
            outcome = Outcome(**json.loads(line))
            found[outcome.case] = outcome
            row = {"torch": _TORCH, "mode": job.mode, "world_size": job.world_size}
            rows.write(json.dumps(row | json.loads(line)) + "\n")
            rows.flush()
            said = f"{outcome.outcome} {outcome.case} {outcome.seconds:.1f} s {outcome.reason}"
            print(f"{job} {number}/{len(names)} {said[:160]}", flush=True)
    if process.returncode != 0:
        raise ExecutionError(f"{job}: the cases ended early; {config.out}/torch_suite.log says why")
    return found


def _start(job: Job, config: Config, names: Sequence[str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "experiments.torch_suite_cases", "--mode", job.mode]
    command += ["--nodes", str(_NODES), "--log", str(config.out.resolve() / "torch_suite.log")]
    return subprocess.Popen(
        [*command, *names],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | environment(job.world_size, config.deadline),
    )


def _print_sum(job: Job, outcomes: dict[str, Outcome]) -> None:
    counts = {
        kind: sum(outcome.outcome == kind for outcome in outcomes.values())
        for kind in ("passed", "failed", "skipped")
    }
    engaged = sum(outcome.engaged > 0 for outcome in outcomes.values())
    ours = "" if job.mode == GLOO else f", {engaged} with our all-reduce"
    print(f"{job}: " + ", ".join(f"{n} {kind}" for kind, n in counts.items()) + ours)


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = Config()
    parser.add_argument("--mode", nargs="+", choices=MODES, default=defaults.mode)
    parser.add_argument("--world-size", nargs="+", type=int, default=defaults.world_size)
    parser.add_argument("-k", "--select", default="", help="a regular expression for names")
    parser.add_argument("--deadline", type=int, default=defaults.deadline, help="seconds a case")
    parser.add_argument("--out", type=Path, default=defaults.out)
    parser.add_argument("--update", action="store_true", help="write the lists of what passes")
    options = vars(parser.parse_args())
    return exit_code_of(lambda: run(Config(**options)))


if __name__ == "__main__":
    sys.exit(main())
