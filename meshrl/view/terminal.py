"""Console of commands: like rich's, but texts neither control the terminal nor are markup."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

from rich import console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from meshrl.common.base.host.terminal import EscapingStream, escape_controls


class Console(console.Console):
    """Console for texts of any origin; its own styles and cursor movements reach the terminal."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    @property
    def file(self) -> IO[str]:
        """Stream that takes rich's own escape sequences."""
        found = super().file
        return found.raw_stream if isinstance(found, EscapingStream) else found

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string as a text, its control characters shown."""
        return super().render_str(escape_controls(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Return segments; control characters that are not rich's own are shown."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else escape_controls(segment.text)
            yield segment if text == segment.text else Segment(text, segment.style)
