"""Notebook of a test: cells whose source Python has as of IPython's."""

from __future__ import annotations

import linecache
from typing import Any


class Notebook:
    """Namespace in which cells are executed, one after the other."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self._count = 0

    def execute(self, source: str) -> Notebook:
        """Execute a cell; a traceback of its code has its lines."""
        self._count += 1
        file = f"/tmp/ipykernel_{id(self)}/{self._count}.py"
        lines = source.splitlines(keepends=True)
        linecache.cache[file] = (len(source), None, lines, file)
        exec(compile(source, file, "exec", dont_inherit=True), self.names)
        return self

    def __getitem__(self, name: str) -> Any:
        return self.names[name]
