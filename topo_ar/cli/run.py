"""``topo-ar run``: an unchanged training script with the planned all-reduce in every DDP."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from topo_ar.errors import ConfigError

if TYPE_CHECKING:
    from topo_ar.integrations.run_options import RunOptions


def run(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT [ARGUMENTS]...", help="A training script and what it is given."
        ),
    ],
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as for python -m.")
    ] = False,
    nproc: Annotated[
        str,
        typer.Option(
            metavar="RANKS",
            help="Ranks to start here: a number, or auto for one a GPU, else one a core, at most "
            "8; self where the script starts its ranks itself (mp.spawn).",
        ),
    ] = "auto",
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often all ranks start anew after one failed.")
    ] = 0,
    plan: Annotated[
        str, typer.Option(help="As for topo_ar.attach: auto, flat, hierarchical, equal, a family.")
    ] = "auto",
    compression: Annotated[
        str, typer.Option(help="Between nodes: auto, int8, bf16, powersgd:4, topk:0.01, ...")
    ] = "none",
    policy: Annotated[
        str, typer.Option(help="What --compression auto may choose: exact, lossy:0.05, int8,bf16.")
    ] = "exact",
    reproducible: Annotated[
        bool, typer.Option("--reproducible", help="The same bits however ranks are placed.")
    ] = False,
    zero_copy: Annotated[
        bool, typer.Option("--zero-copy", help="Keep buckets in shared memory.")
    ] = False,
    check_replicas_every: Annotated[
        int, typer.Option(min=0, help="Compare parameters between ranks every so many steps.")
    ] = 0,
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds for which a collective may stand still.")
    ] = 600.0,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Rank 0 writes there, at the end, what was attached."),
    ] = None,
) -> None:
    """Run a training script, unchanged, with the planned all-reduce in every DDP.

    Starts the ranks of this machine, or takes those that torchrun or srun has started. Every
    DistributedDataParallel gets the planned bucket cap, unless the script gives one, and the
    planned all-reduce, which has to prove itself against the plain one. Where the script has a hook
    of its own, or makes no DistributedDataParallel, it runs as it would alone, and that is said.
    Exits with the script's code.

    Example: topo-ar run --nproc 4 train.py --epochs 3

    Example: torchrun --nnodes 2 --nproc-per-node 8 ... -m topo_ar run train.py --epochs 3
    """
    from topo_ar.integrations.injection import environment
    from topo_ar.integrations.launchers import variables_of_rank
    from topo_ar.integrations.run_options import RunOptions

    options = RunOptions(
        plan=plan,
        compression=compression,
        policy=policy,
        reproducible=reproducible,
        zero_copy=zero_copy,
        check_replicas_every=check_replicas_every,
        timeout_s=timeout,
        report="" if json_file is None else str(json_file.absolute()),
    )
    command = _command(words, is_module=module)
    _check(options)
    found = variables_of_rank(os.environ)
    if found is not None and nproc != "auto":
        raise ConfigError(f"--nproc {nproc}: a launcher has started the ranks; leave it out")
    os.environ.update(environment(options, os.environ))
    if found is not None or nproc == "self":
        os.environ.update(found or {})
        _become(command)
    from topo_ar.integrations.local_launch import default_num_ranks, launch_here

    ranks = default_num_ranks() if nproc == "auto" else _number(nproc)
    print(f"topo-ar: {ranks} rank{'s' if ranks > 1 else ''} on this machine", file=sys.stderr)
    raise typer.Exit(launch_here(command, ranks, max_restarts=max_restarts))


def _command(words: list[str], *, is_module: bool) -> list[str]:
    script = words[0]
    if is_module:
        return [sys.executable, "-m", *words]
    if not Path(script).is_file():
        raise ConfigError(
            f"there is no script {script}; options of topo-ar run stand before it, and a module is "
            "named with -m"
        )
    return [sys.executable, *words]


def _check(options: "RunOptions") -> None:
    """Refuse what no rank could use, before there are any."""
    from topo_ar.planning.codecs import parse_codec
    from topo_ar.planning.plan import Family
    from topo_ar.planning.policy import parse_policy

    if options.compression not in ("auto", "rows"):
        parse_codec(options.compression)
    parse_policy(options.policy)
    modes = ("auto", "flat", "hierarchical", "equal", *sorted(Family))
    if options.plan not in modes:
        raise ConfigError(f"--plan {options.plan} is not one of {', '.join(modes)}")
    if not options.timeout_s > 0:
        raise ConfigError(f"--timeout {options.timeout_s:g} is not a positive number of seconds")
    assert options.hook_options


def _number(nproc: str) -> int:
    if not nproc.isdecimal() or int(nproc) < 1:
        raise ConfigError(f"--nproc {nproc} is not a number of ranks, auto or self")
    return int(nproc)


def _become(command: list[str]) -> NoReturn:
    """Let the script take the place of this process: it is then exactly what it is alone."""
    sys.stdout.flush()
    os.execv(command[0], command)
