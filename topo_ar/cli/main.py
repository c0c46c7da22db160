"""Entry point of ``topo-ar``: collects the verbs and turns our errors into one line."""

import sys

import typer

from topo_ar._version import __version__
from topo_ar.cli.bench import bench
from topo_ar.cli.doctor import doctor
from topo_ar.cli.emulate import emulate
from topo_ar.cli.explain import explain
from topo_ar.cli.plan import plan
from topo_ar.cli.probe import probe
from topo_ar.cli.show import show
from topo_ar.errors import TopoError

app = typer.Typer(
    name="topo-ar",
    help="Topology-aware hierarchical all-reduce: probe, plan, emulate, measure.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        typer.echo(f"topo-ar {__version__}")
        raise typer.Exit


app.command()(probe)
app.command()(show)
app.command()(plan)
app.command()(bench)
app.command()(explain)
app.command()(emulate)
app.command()(doctor)


def main() -> None:
    """Run the command line; a `TopoError` becomes one line on stderr and its exit code."""
    try:
        app()
    except TopoError as error:
        print(f"topo-ar: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
