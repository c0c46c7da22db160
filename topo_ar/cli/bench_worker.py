"""One rank of ``topo-ar bench``: measures, and rank 0 announces what it finds."""

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from topo_ar.cli.bench_events import write_event
from topo_ar.errors import TopoError

CONFIG_ENV = "TOPO_AR_BENCH_CONFIG"


def measure(config: dict[str, Any], announce: Callable[[str, dict[str, Any]], None]) -> None:
    """Run the benchmark that `config` describes on this rank; rank 0 announces its events.

    Events are ``topology``, those of `run_benchmark`, and ``row``.
    """
    import msgspec
    import torch
    import torch.distributed as dist

    from topo_ar.execution.benchmark import BenchConfig, run_benchmark
    from topo_ar.execution.communicator import Communicator
    from topo_ar.topology.model import to_json

    settings = msgspec.convert(config, BenchConfig)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        with Communicator(
            plan=settings.plan, measure=True, timeout_s=settings.timeout_s
        ) as communicator:
            if communicator.rank == 0:
                announce("topology", {"json": to_json(communicator.topology).decode()})
            for row in run_benchmark(settings, communicator, announce):
                announce("row", row)
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Run as a rank under the environment that torchrun sets."""
    # An interrupted rank has nothing to save; it need not say where it was interrupted.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    config = json.loads(os.environ[CONFIG_ENV])
    try:
        measure(config, lambda name, data: write_event(sys.stdout, name, data))
    except TopoError as error:
        print(f"rank {os.environ['RANK']}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
