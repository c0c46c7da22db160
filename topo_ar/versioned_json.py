"""JSON files of ours that say their schema: one way to read them, one way to refuse them."""

from typing import Protocol, TypeVar

import msgspec

from topo_ar.errors import TopoError


class _Versioned(Protocol):
    @property
    def schema(self) -> int: ...


_T = TypeVar("_T", bound=_Versioned)


def decode(
    text: bytes | str, kind: type[_T], known: int, what: str, hint: str, error: type[TopoError]
) -> _T:
    """Return the struct that `text` holds.

    Parameters
    ----------
    text : bytes or str
        UTF-8 JSON.
    kind : type
        The struct, which has a field ``schema``.
    known : int
        The schema that this version reads.
    what, hint : str
        What it is called, and how one comes by it.
    error : type
        What is raised.

    Raises
    ------
    TopoError
        Of type `error`, if `text` is no such struct or of another schema; the message names the
        field.
    """
    try:
        found = msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as fault:
        raise error(f"not a {what}: {fault}; {hint}") from None
    if found.schema != known:
        raise error(f"{what} schema {found.schema} is not known; this version reads {known}")
    return found
