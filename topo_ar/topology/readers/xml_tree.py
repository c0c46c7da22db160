"""XML of unknown origin as a small tree that remembers line numbers."""

import io
import math
from dataclasses import dataclass, field
from xml.sax import SAXException, SAXParseException
from xml.sax.handler import ContentHandler
from xml.sax.xmlreader import AttributesImpl, InputSource, Locator

import defusedxml.sax
from defusedxml import DefusedXmlException

from topo_ar.errors import TopologyError

_MAX_DEPTH, _MAX_ELEMENTS = 256, 100_000
# Beyond this a file holds noise, and a float would round.
_LARGEST = 1 << 53


@dataclass(slots=True)
class Element:
    """An element: its tag, attributes, children in file order, and the file and line it is in.

    `pieces` are the text directly inside it.
    """

    tag: str
    attributes: dict[str, str]
    file: str
    line: int
    children: list["Element"] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    @property
    def place(self) -> str:
        """Where the element is, as ``FILE:LINE``."""
        return f"{self.file}:{self.line}"

    def each(self, tag: str) -> list["Element"]:
        """Return the children with this tag."""
        return [child for child in self.children if child.tag == tag]

    def text(self, name: str) -> str | None:
        """Return an attribute, None where it is absent or empty."""
        return self.attributes.get(name, "").strip() or None

    def integer(self, name: str) -> int | None:
        """Return an attribute as an integer (decimal), None where it is absent or empty.

        Raises
        ------
        TopologyError
            If it is something else; the message names file, line, attribute and value.
        """
        text = self.text(name)
        try:
            value = None if text is None else int(text)
        except ValueError:
            value = _LARGEST + 1
        if value is not None and abs(value) > _LARGEST:
            raise TopologyError(
                f"{self.place}: {name}={text!r} of <{self.tag}> is not a whole number"
            )
        return value

    def number(self, name: str) -> float | None:
        """Return an attribute as a float, None where it is absent or empty.

        Raises
        ------
        TopologyError
            If it is something else; the message names file, line, attribute and value.
        """
        text = self.text(name)
        try:
            value = None if text is None else float(text)
        except ValueError:
            value = math.nan
        if value is not None and not math.isfinite(value):
            raise TopologyError(f"{self.place}: {name}={text!r} of <{self.tag}> is not a number")
        return value


def parse(text: str, file: str) -> Element:
    """Return the root element of `text`. Blank lines before an XML declaration are allowed.

    Raises
    ------
    TopologyError
        If `text` is not well-formed, declares entities, is nested too deeply or has too many
        elements; the message names file and line.
    """
    body = text.lstrip("\ufeff \t\r\n")
    builder = _Builder(file, text[: len(text) - len(body)].count("\n"))
    source = InputSource()
    source.setByteStream(io.BytesIO(body.encode()))
    # What the declaration says no longer holds: the bytes have been decoded before.
    source.setEncoding("utf-8")
    try:
        defusedxml.sax.parse(source, builder)
    except SAXParseException as error:
        line = (error.getLineNumber() or 1) + builder.skipped
        raise TopologyError(f"{file}:{line}: not well-formed XML: {error.getMessage()}") from None
    except (SAXException, DefusedXmlException) as error:
        raise TopologyError(f"{file}: XML that cannot be read safely: {error}") from None
    if builder.root is None:
        raise TopologyError(f"{file}: holds no XML element")
    return builder.root


class _Builder(ContentHandler):
    def __init__(self, file: str, skipped: int) -> None:
        super().__init__()
        self.root: Element | None = None
        self.skipped = skipped
        self._file = file
        self._count = 0
        self._open: list[Element] = []
        self._locator: Locator | None = None

    def setDocumentLocator(self, locator: Locator) -> None:  # noqa: N802
        self._locator = locator

    def startElement(self, name: str, attrs: AttributesImpl) -> None:  # noqa: N802
        line = ((self._locator and self._locator.getLineNumber()) or 1) + self.skipped
        if len(self._open) >= _MAX_DEPTH:
            raise TopologyError(f"{self._file}:{line}: nested deeper than {_MAX_DEPTH} elements")
        self._count += 1
        if self._count > _MAX_ELEMENTS:
            raise TopologyError(
                f"{self._file}:{line}: more than {_MAX_ELEMENTS} elements; no machine has as many"
            )
        element = Element(name, dict(attrs.items()), self._file, line)
        if self._open:
            self._open[-1].children.append(element)
        else:
            self.root = element
        self._open.append(element)

    def characters(self, content: str) -> None:
        if self._open:
            self._open[-1].pieces.append(content)

    def endElement(self, name: str) -> None:  # noqa: N802
        self._open.pop()
