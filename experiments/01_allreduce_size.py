"""How fast is the planned all-reduce against flat gloo, from 4 KiB to 100 MB?

Command: python experiments/01_allreduce_size.py --out results/
Minutes: 3 on two cores (2 hosts of 4 ranks, 1 Gbit/s NICs).

Writes allreduce_size.jsonl (one row per size and candidate, raw samples and a manifest in each),
allreduce_size.predictions.jsonl (made before the timings), and bucket_trace.json (one 25 MB
all-reduce, for ui.perfetto.dev).
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from topo_ar.cli.bench import cluster_spec, run_emulated
from topo_ar.cli.bench_report import Report
from topo_ar.cli.script import exit_code_of
from topo_ar.units import parse_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """What to measure; sizes in bytes, decimal for MB and binary for K and M."""

    cluster: str = "2x4"
    nic: str = "1gbit"
    sizes: str = "4K,64K,1M,4M,25MB,100MB"
    trace_size: str = "25MB"
    iterations: int = 20
    large_iterations: int = 10
    against: tuple[str, ...] = ("gloo",)
    out: Path = Path("results")


def run(config: Config) -> int:
    """Measure, write the records and return the exit code: 1 when a result was wrong."""
    config.out.mkdir(parents=True, exist_ok=True)
    settings = {
        "sizes": [parse_size(size) for size in config.sizes.split(",")],
        "iterations": config.iterations,
        "large_iterations": config.large_iterations,
        "trace_nbytes": parse_size(config.trace_size),
        "against": list(config.against),
    }
    rows, trace = config.out / "allreduce_size.jsonl", config.out / "bucket_trace.json"
    with Report(str(rows), trace, config.out / "topology.json") as report:
        run_emulated(settings, cluster_spec(config.cluster, config.nic), report)
    return report.exit_code(None)


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = Config()
    parser.add_argument("--cluster", default=defaults.cluster, help="grid or cluster spec (TOML)")
    parser.add_argument("--nic", default=defaults.nic, help="NICs of each host of a grid")
    parser.add_argument("--sizes", default=defaults.sizes)
    parser.add_argument("--trace-size", default=defaults.trace_size)
    parser.add_argument("--iterations", type=int, default=defaults.iterations)
    parser.add_argument("--large-iterations", type=int, default=defaults.large_iterations)
    parser.add_argument("--against", nargs="+", default=defaults.against)
    parser.add_argument("--out", type=Path, default=defaults.out)
    options = vars(parser.parse_args())
    config = Config(**{**options, "against": tuple(options["against"])})
    return exit_code_of(lambda: run(config))


if __name__ == "__main__":
    sys.exit(main())
