"""Tables and folded lines for a terminal of 100 columns."""

import textwrap
from collections.abc import Sequence

WIDTH = 100


def print_table(rows: Sequence[Sequence[str]], indent: int = 2) -> None:
    """Print rows of equal length, columns aligned to the left; a long last column is folded."""
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = indent + sum(width + 2 for width in widths[:-1])
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        head = " " * indent + "".join(f"{cell}  " for cell in cells[:-1])
        room = max(20, WIDTH - left)
        tail = textwrap.wrap(row[-1], room, break_on_hyphens=False) or [""]
        print((head + tail[0]).rstrip())
        for line in tail[1:]:
            print(" " * left + line)


def print_item(text: str) -> None:
    """Print one point of a list, folded."""
    wrapped = textwrap.wrap(text, WIDTH - 4, break_long_words=False, break_on_hyphens=False)
    print("  - " + "\n    ".join(wrapped))


def print_folded(text: str, indent: int = 2) -> None:
    """Print a sentence, folded."""
    space = " " * indent
    print(
        textwrap.fill(
            text,
            WIDTH,
            initial_indent=space,
            subsequent_indent=space,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def counted(number: int, what: str) -> str:
    """Return ``1 NIC`` or ``2 NICs``, ``2 switches``."""
    plural = "es" if what.endswith(("s", "ch")) else "s"
    return f"{number} {what}{'' if number == 1 else plural}"
