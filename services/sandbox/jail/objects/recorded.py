"""What is printed while one side does something for the other."""

from __future__ import annotations

import io
import sys

PRINTED = 1 << 20  # characters of what one operation prints that are told


class RecordedOutput:
    """What is printed while an operation runs."""

    def __init__(self) -> None:
        self._before = sys.stdout, sys.stderr
        self._content = io.BytesIO(), io.BytesIO()
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(raw, "utf-8", "backslashreplace", newline="", write_through=True)
            for raw in self._content
        )
        self._streams = sys.stdout, sys.stderr

    def stop(self) -> None:
        sys.stdout, sys.stderr = self._before

    def taken(self) -> list[str]:
        """Of standard output and error."""
        for stream in self._streams:
            stream.flush()
        return [raw.getvalue()[:PRINTED].decode("utf-8", "replace") for raw in self._content]
