"""What a writer returns."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Written:
    """The text of a file, and in sentences what its format has no place for."""

    text: str
    left_out: tuple[str, ...] = ()
