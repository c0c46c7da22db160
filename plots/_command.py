"""What the plot scripts share: files in, one figure out, bad input said in one line."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from topo_ar.errors import ConfigError, TopoError
from topo_ar.figures import save
from topo_ar.telemetry.records import read_records


def plot(
    description: str | None, load: Callable[[list[str]], Any], draw: Callable[..., Any]
) -> None:
    """Read the files named on the command line, draw them, and write FIGURE.png, .svg and .pdf."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("-o", "--output", required=True, metavar="FIGURE", help="such as fig.png")
    arguments = parser.parse_args()
    try:
        for path in save(draw(load(arguments.files)), arguments.output):
            print(path)
    except TopoError as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def records(files: list[str]) -> list[dict[str, Any]]:
    """Return the records of all files."""
    return [record for file in files for record in read_records(file)]


def one_json(files: list[str]) -> dict[str, Any]:
    """Return the JSON object in the only file.

    Raises
    ------
    ConfigError
        If there are several files, or the file is not a JSON object.
    """
    if len(files) > 1:
        raise ConfigError(f"this figure takes one file, not {len(files)}")
    try:
        value = json.loads(Path(files[0]).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {files[0]}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{files[0]} holds no JSON object")
    return value
