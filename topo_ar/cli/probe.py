"""``topo-ar probe``: the topology of this machine, for a person or as JSON."""

from pathlib import Path
from typing import Annotated

import typer

from topo_ar.errors import ConfigError
from topo_ar.units import parse_seconds


def probe(
    ranks: Annotated[
        int | None, typer.Option("--ranks", help="Ranks on CPUs where there are no GPUs.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the topology as JSON.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, nothing else.")
    ] = False,
    record_nvml: Annotated[
        Path | None,
        typer.Option("--record-nvml", help="Write what NVML answers, to be looked at elsewhere."),
    ] = None,
    nvml: Annotated[
        Path | None,
        typer.Option("--nvml", help="Take NVML's answers from such a recording."),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="On every rank of a job: measure all pairs of ranks instead, and tell hosts, "
            "racks and slow NICs from the figures alone.",
        ),
    ] = False,
    budget: Annotated[
        str, typer.Option("--budget", help="With --measure: about how long, 20s or 500ms.")
    ] = "20s",
    times: Annotated[
        Path | None,
        typer.Option("--times", help="With --measure: write latency and rate of each pair."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", help="With --measure: a topology to compare the figures with."),
    ] = None,
) -> None:
    """Describe this machine: GPUs, NICs, links, and where each figure comes from.

    Example: topo-ar probe --ranks 4 -o here.json

    Example of a measured job: topo-ar emulate --grid 4x2 -- topo-ar probe --measure --budget 20s
    """
    if measure:
        from topo_ar.cli.probe_measure import measure_job

        measure_job(parse_seconds(budget), output, times, against, as_json=as_json)
        return
    if times is not None or against is not None:
        raise ConfigError("--times and --against go with --measure; add it, or leave them out")
    from topo_ar.cli.show import print_topology
    from topo_ar.topology.model import to_json
    from topo_ar.topology.nvml_answers import read_answers, write_answers
    from topo_ar.topology.nvml_ask import ask_nvml
    from topo_ar.topology.probe import probe as probe_host

    answers = read_answers(nvml) if nvml is not None else ask_nvml()
    if record_nvml is not None:
        write_answers(answers, record_nvml)
    topology = probe_host(ranks, nvml=answers)
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
