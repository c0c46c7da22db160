"""Build the paper from committed records: figures, numbers, PDF. No network, same bytes each time.

Command: python -m paper.build            (writes paper/build/paper.pdf)
         python -m paper.build --pages    (each page as PNG too, to be looked at)
         python -m paper.build --check    (runs the first tier of claims.toml again and compares)

Exits with 1 when a number that the text prints is missing, or a claim does not hold.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from paper.numbers import Number, collect, stamp
from topo_ar import figures
from topo_ar.errors import ConfigError, TopoError
from topo_ar.figures.catalogue import ENTRIES

PAPER = Path(__file__).parent
RESULTS = PAPER.parent / "experiments" / "results"
BUILD = PAPER / "build"
_KEY = re.compile(r'\bn\("([^"]+)"\)')
_CHECK_SECONDS = 1800


def used_keys() -> set[str]:
    """Return the keys of all numbers that the text prints."""
    return {key for path in PAPER.rglob("*.typ") for key in _KEY.findall(path.read_text())}


def claims() -> list[dict[str, Any]]:
    """Return the claims of claims.toml in their order."""
    found: list[dict[str, Any]] = tomllib.loads((PAPER / "claims.toml").read_text())["claim"]
    return found


def holds(claim: dict[str, Any], number: Number) -> bool:
    """Return whether a number is what the claim expects.

    Raises
    ------
    ConfigError
        If the claim's relation is unknown.
    """
    expected: float = claim["expected"]
    match claim["relation"]:
        case "at-least":
            return number.value >= expected
        case "at-most":
            return number.value <= expected
        case "equal":
            return number.value == expected
    raise ConfigError(
        f"claims.toml: {claim['id']} has relation {claim['relation']!r}, which is not one of "
        "at-least, at-most, equal"
    )


def prepare(results: Path) -> dict[str, Number]:
    """Write numbers.json and everything in build/ that the text includes; return the numbers.

    Raises
    ------
    ConfigError
        If a number that the text or a claim names cannot be had from the records.
    """
    numbers = collect(results)
    wanted = used_keys() | {claim["number"] for claim in claims() if "number" in claim}
    missing = sorted(wanted - numbers.keys())
    if missing:
        raise ConfigError(f"the records in {results.name} do not give {', '.join(missing)}")
    text = "".join(path.read_text() for path in PAPER.rglob("*.typ"))
    BUILD.mkdir(exist_ok=True)
    (PAPER / "numbers.json").write_text(numbers_json(numbers))
    (BUILD / "stamp.json").write_text(json.dumps(stamp(results)))
    for entry in ENTRIES:
        if f"{entry.name}.svg" in text:
            figures.save(entry.figure(results), BUILD / f"{entry.name}.svg")
    return numbers


def numbers_json(numbers: dict[str, Number]) -> str:
    """Return numbers.json's text: sorted, a number a line."""
    lines = (f" {json.dumps(key)}: {json.dumps(asdict(numbers[key]))}" for key in sorted(numbers))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def compile_pdf(pages: bool) -> Path:
    """Compile the text; return the path of the PDF.

    Raises
    ------
    ConfigError
        If typst is not installed.
    """
    try:
        import typst
    except ImportError as error:
        raise ConfigError(
            "the paper needs typst, which is not installed: pip install -e '.[paper]'"
        ) from error
    compile_text = partial(
        typst.compile,
        str(PAPER / "main.typ"),
        root=str(PAPER.parent),
        ignore_system_fonts=True,
        timestamp=0,
    )
    pdf = BUILD / "paper.pdf"
    compile_text(output=str(pdf))
    if pages:
        compile_text(output=str(BUILD / "page{p}.png"), format="png")
    return pdf


def check(tier: str = "minutes") -> Iterator[tuple[dict[str, Any], Number | None]]:
    """Run the commands of a tier's claims, each once, and yield every claim with its new number."""
    of_tier = [claim for claim in claims() if claim["tier"] == tier]
    with tempfile.TemporaryDirectory() as folder:
        for command in dict.fromkeys(claim["command"] for claim in of_tier):
            words = [sys.executable, *shlex.split(command.replace("OUT", folder))[1:]]
            subprocess.run(words, check=False, cwd=PAPER.parent, timeout=_CHECK_SECONDS)
            numbers = collect(Path(folder))
            for claim in of_tier:
                if claim["command"] == command:
                    yield claim, numbers.get(claim["number"])


def _check() -> int:
    failed = 0
    for claim, number in check():
        passed = number is not None and holds(claim, number)
        failed += not passed
        found = "nothing" if number is None else number.text
        word = "holds" if passed else "FAILS"
        _say(f"{word} {claim['id']}: {found}, {claim['relation']} {claim['expected']}")
    return int(failed > 0)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with the records")
    parser.add_argument("--pages", action="store_true", help="write the pages as PNG too")
    parser.add_argument("--check", action="store_true", help="run the first tier of claims again")
    options = parser.parse_args()
    try:
        if options.check:
            return _check()
        begun = time.monotonic()
        prepare(options.results)
        pdf = compile_pdf(options.pages)
        _say(f"{pdf} in {time.monotonic() - begun:.1f} s")
    except TopoError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
