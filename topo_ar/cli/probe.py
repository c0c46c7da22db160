"""``topo-ar probe``: the topology of this machine, for a person or as JSON."""

from pathlib import Path
from typing import Annotated

import typer

from topo_ar.errors import ConfigError


def probe(
    ranks: Annotated[
        int | None, typer.Option("--ranks", help="Ranks on CPUs where there are no GPUs.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the topology as JSON.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the topology as JSON, nothing else.")
    ] = False,
) -> None:
    """Describe this machine: GPUs, NICs, links, and where each figure comes from.

    Example: topo-ar probe --ranks 4 -o here.json
    """
    from topo_ar.cli.show import print_topology
    from topo_ar.topology.model import to_json
    from topo_ar.topology.probe import probe as probe_host

    topology = probe_host(ranks)
    if output is not None:
        try:
            output.write_bytes(to_json(topology) + b"\n")
        except OSError as error:
            raise ConfigError(f"cannot write {output}: {error.strerror}") from None
    if as_json:
        print(to_json(topology).decode())
    elif output is None:
        print_topology(topology, "probe")
    else:
        print(f"wrote {output}")
