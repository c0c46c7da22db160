"""One rank of ``topo-ar bench --emulate``: measures, and rank 0 reports a marked line an event.

The marks let the parent tell events from whatever else a rank prints. Lines stay below a pipe's
atomic size, so that nothing is written into the middle of one.
"""

import json
import os
from collections.abc import Callable
from typing import Any

MARK = "@topo-ar-bench "
CONFIG_ENV = "TOPO_AR_BENCH_CONFIG"
_PART_CHARS = 1500  # quoted as JSON still below the 4096 bytes that a pipe takes at once


def measure(config: dict[str, Any], announce: Callable[[str, dict[str, Any]], None]) -> None:
    """Run the benchmark that `config` describes on this rank; rank 0 announces its events.

    Events are ``topology`` (in parts), those of `run_benchmark`, and ``row``.
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
                text = to_json(communicator.topology).decode()
                for at in range(0, len(text), _PART_CHARS):
                    announce("topology", {"part": text[at : at + _PART_CHARS]})
            for row in run_benchmark(settings, communicator, announce):
                announce("row", row)
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Run as a rank under the environment that torchrun sets."""

    def write(event: str, data: dict[str, Any]) -> None:
        print(MARK + json.dumps([event, data], allow_nan=False), flush=True)

    measure(json.loads(os.environ[CONFIG_ENV]), write)


if __name__ == "__main__":
    main()
