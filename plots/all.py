"""Every figure that a folder of results gives, as PNG, SVG and PDF.

python plots/all.py RESULTS -o FOLDER
"""

import argparse
import sys
from pathlib import Path

from topo_ar.errors import TopoError
from topo_ar.figures import save
from topo_ar.figures.catalogue import ENTRIES


def main() -> int:
    """Draw what can be drawn; return 1 when records that are there could not be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    failed = 0
    for entry in ENTRIES:
        if not entry.files(options.results):
            print(f"{entry.name}: no {entry.pattern} in {options.results}")
            continue
        try:
            paths = save(entry.figure(options.results), options.output / f"{entry.name}.png")
            print(*paths)
        except TopoError as error:
            failed += 1
            print(f"{entry.name}: {error}", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
