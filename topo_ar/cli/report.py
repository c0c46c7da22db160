"""``topo-ar report``: a folder of results as one page that opens without a network."""

from pathlib import Path
from typing import Annotated

import typer

from topo_ar.errors import ConfigError


def report(
    results: Annotated[
        Path, typer.Argument(metavar="RESULTS", help="A folder with records (*.jsonl).")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The page to write.")] = Path(
        "report.html"
    ),
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a Markdown table of timings instead.")
    ] = False,
) -> None:
    """Make one self-contained page of figures, tables, plan and environment from records.

    Figures whose records are missing are left out; those whose records do not fit are named on
    the page and on stderr. Tables sort when a heading is clicked.

    Example: topo-ar report demo-results -o report.html

    Example: topo-ar report demo-results --markdown
    """
    from topo_ar.cli.report_page import markdown_table, page
    from topo_ar.cli.report_results import read

    if not results.is_dir():
        raise ConfigError(f"{results} is not a folder; pass the folder that an experiment wrote")
    found = read(results)
    if markdown:
        print(markdown_table(found))
        return
    text = page(found)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}") from error
    for reason in found.not_drawn:
        typer.echo(f"left out: {reason}", err=True)
    print(f"{output}: {len(found.pictures)} figures, {len(found.tables)} tables")
