"""Run the experiments one after the other, and say how long the rest may take.

Commands: python -m experiments.run_all --quick --out results/   (`make experiments-quick`)
          python -m experiments.run_all --out results/           (`make experiments`)
Minutes: 25 with --quick, 170 without, on two cores, as its parts add up.

What an experiment has kept it does not measure again, so that the same command goes on after an
interruption. Exits with 1 when one of them failed; those that only tell whether targets are
reached do not fail for a target that is missed. Left out are the suite of torch's own tests and
what needs GPUs.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.jobs import ROOT
from topo_ar.cli.script import exit_code_of

KEPT = "experiments/results"


@dataclass(frozen=True, slots=True)
class Experiment:
    """A script with its arguments; minutes in full and with --quick, which a `plain` one lacks."""

    module: str
    minutes: float
    quick: float
    arguments: tuple[str, ...] = ()
    plain: bool = False

    def command(self, out: Path, *, quick: bool) -> list[str]:
        """Return the command line."""
        flags = ["--quick"] if quick and not self.plain else []
        module = f"experiments.{self.module}"
        return [sys.executable, "-m", module, *self.arguments, *flags, "--out", str(out)]


EXPERIMENTS = (
    Experiment("01_allreduce_size", 3, 3, plain=True),
    Experiment("02_ddp_parity", 1, 1, plain=True),
    Experiment("02_limits", 24, 5),
    Experiment("03_comm_compute_ratio", 5, 0.7),
    Experiment("04_bucket_cap", 2, 0.5),
    Experiment("compute_load", 10, 2),
    Experiment("05_compression", 2, 0.3, ("--kernels",)),
    Experiment("05_compression", 35, 1, ("--accuracy",)),
    Experiment("05_compression", 20, 0.7, ("--ddp",)),
    Experiment("06_uneven", 4, 1.5),
    Experiment("07_placement", 3, 0.7),
    Experiment("08_predicted_measured", 1, 1, (KEPT,), plain=True),
    Experiment("09_scaling", 6, 0.3),
    Experiment("10_published", 1, 1, plain=True),
    Experiment("10_published_training", 1, 1, plain=True),
    Experiment("11_time_to_accuracy", 35, 1.5),
    Experiment("12_faults", 5, 2),
    Experiment("14_planning", 2, 0.5),
    Experiment("15_averaging", 4, 0.7),
    Experiment("13_targets", 0.1, 0.1, (KEPT,), plain=True),
)


def run(out: Path, only: Sequence[str], *, quick: bool) -> list[str]:
    """Run what is wanted and return the names of those that failed."""
    wanted = [each for each in EXPERIMENTS if not only or each.module in only]
    failed = []
    for number, each in enumerate(wanted):
        left = sum(later.quick if quick else later.minutes for later in wanted[number:])
        name = " ".join((each.module, *each.arguments))
        print(f"==== {name}: {number + 1} of {len(wanted)}, about {left:.0f} min left", flush=True)
        begun = time.monotonic()
        code = subprocess.run(each.command(out, quick=quick), cwd=ROOT, check=False).returncode
        if code:
            failed.append(name)
        word = f"FAILED with {code}" if code else "done"
        print(f"==== {name}: {word} in {(time.monotonic() - begun) / 60:.1f} min", flush=True)
        if code == 130:  # interrupted
            raise KeyboardInterrupt
    return failed


def listed() -> Iterator[str]:
    """Yield a line for each experiment with its minutes."""
    for each in EXPERIMENTS:
        name = " ".join((each.module, *each.arguments))
        yield f"{name:40} {each.minutes:5g} min, quick {each.quick:g}"
    totals = [sum(each.minutes for each in EXPERIMENTS), sum(each.quick for each in EXPERIMENTS)]
    yield f"{'all':40} {totals[0]:5.0f} min, quick {totals[1]:.0f}"


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(dict.fromkeys(each.module for each in EXPERIMENTS))
    parser.add_argument("--only", nargs="+", choices=names, default=[], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the minutes")
    parser.add_argument("--quick", action="store_true", help="show that all of them run")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for records")
    options = parser.parse_args()

    def work() -> int:
        if options.list:
            print("\n".join(listed()))
            return 0
        failed = run(options.out.resolve(), options.only, quick=options.quick)
        print(f"records: {options.out}")
        if failed:
            print(f"error: {', '.join(failed)} failed; run again for these", file=sys.stderr)
        return int(bool(failed))

    return exit_code_of(work, "interrupted; the same command goes on")


if __name__ == "__main__":
    sys.exit(main())
