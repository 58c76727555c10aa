"""Text for terminals: escaped control characters in texts from models, users and hosts.

A character that a terminal would execute, or that reorders a line, is written as its escape in JSON
(`\\u001b`). JSON that is printed so keeps its meaning.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TextIO, cast

ALLOWED_CONTROLS = "\n\t"
CONTROL = (*range(0x20), *range(0x7F, 0xA0))  # C0, with ESC; DEL; and C1
BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
# Line and paragraph separators, annotations, tags, and halves of surrogate pairs, which no encoding
# accepts.
INVISIBLE = (
    0x2028,
    0x2029,
    *range(0xFFF9, 0xFFFC),
    *range(0xE0000, 0xE0080),
    *range(0xD800, 0xE000),
)


def _escape(code: int) -> str:
    """Return a character's escape in JSON."""
    units = chr(code).encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


_ESCAPES = {
    code: _escape(code)
    for code in (*CONTROL, *BIDI, *INVISIBLE)
    if chr(code) not in ALLOWED_CONTROLS
}


def escape_controls(text: str) -> str:
    """Return a text as a terminal may be given it; newlines and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return text.replace("\r\n", "\n").translate(_ESCAPES)


class EscapingStream:
    """Text stream that writes to another one and escapes control characters."""

    def __init__(self, stream: TextIO) -> None:
        self.raw_stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw_stream, name)

    def write(self, text: str) -> int:
        """Write a text; return its length."""
        self.raw_stream.write(escape_controls(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts one after the other."""
        for line in lines:
            self.write(line)


def unwrap_stream(stream: TextIO) -> TextIO:
    """Return the underlying stream, for control characters that a program writes itself."""
    return stream.raw_stream if isinstance(stream, EscapingStream) else stream


def print_traceback(
    kind: type[BaseException], error: BaseException, tb: TracebackType | None
) -> None:
    """Print an unhandled exception; for `sys.excepthook`."""
    print(
        escape_controls("".join(traceback.format_exception(kind, error, tb))),
        file=sys.stderr,
        end="",
    )


@contextmanager
def escaped_output() -> Iterator[None]:
    """Within this block standard output and error show control characters."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (
        cast(TextIO, EscapingStream(unwrap_stream(stream))) for stream in before
    )
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
