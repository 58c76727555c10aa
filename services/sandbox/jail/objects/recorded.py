"""What is printed while one side does something for the other."""

from __future__ import annotations

import io
import sys
from typing import Any

PRINTED = 1 << 20  # characters of what one operation prints that are told


class RecordedOutput:
    """What is printed while an operation runs."""

    def __init__(self) -> None:
        self._before = sys.stdout, sys.stderr
        self._streams = [_stream(), _stream()]
        sys.stdout, sys.stderr = self._streams

    def stop(self) -> None:
        sys.stdout, sys.stderr = self._before

    def taken(self) -> list[str]:
        """Of standard output and error."""
        texts = []
        for stream in self._streams:
            stream.flush()
            raw: Any = stream.buffer
            texts.append(raw.getvalue()[:PRINTED].decode("utf-8", "replace"))
        return texts


def _stream() -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BytesIO(), "utf-8", "backslashreplace", newline="", write_through=True
    )
