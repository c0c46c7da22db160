"""Entry point of ``topo-ar``: collects the verbs and turns our errors into one line."""

import sys
from typing import Any

import typer

from topo_ar._version import __version__
from topo_ar.cli.advise import advise
from topo_ar.cli.bench import bench
from topo_ar.cli.diff import diff
from topo_ar.cli.doctor import doctor
from topo_ar.cli.emulate import emulate
from topo_ar.cli.explain import explain
from topo_ar.cli.export import export
from topo_ar.cli.plan import plan
from topo_ar.cli.probe import probe
from topo_ar.cli.report import report
from topo_ar.cli.run import run
from topo_ar.cli.show import show
from topo_ar.cli.simulate import simulate
from topo_ar.cli.top import top
from topo_ar.errors import TopoError

app = typer.Typer(
    name="topo-ar",
    help="Topology-aware hierarchical all-reduce: probe, plan, emulate, measure.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


_INTERRUPTED = 130
_USAGE = 2
# Typer brings a click of its own or uses an installed one: its errors are known by this one's kind.
_UsageError: Any = typer.BadParameter.__mro__[1]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version."),
) -> None:
    if version:
        typer.echo(f"topo-ar {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(_USAGE)


app.command()(probe)
app.command()(show)
app.command()(diff)
app.command()(plan)
app.command()(simulate)
app.command()(bench)
app.command()(explain)
app.command()(report)
app.command()(export)
app.command()(emulate)
app.command()(top)
app.command()(doctor)
# What follows the script is the script's.
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command(context_settings={"allow_interspersed_args": False})(advise)


def main() -> None:
    """Run the command line; bad input becomes one line on stderr, Ctrl-C the exit code 130."""
    try:
        code = app(standalone_mode=False)
    except TopoError as error:
        code = _complain(str(error), error.exit_code)
    except _UsageError as error:
        code = _complain(_sentence(error), _USAGE)
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    sys.exit(code)


def _complain(sentence: str, code: int) -> int:
    print(f"topo-ar: error: {sentence}", file=sys.stderr)
    return code


def _sentence(error: Any) -> str:
    said = " ".join(error.format_message().split()).rstrip(".")
    return said if error.ctx is None else f"{said}; see {error.ctx.command_path} --help"
