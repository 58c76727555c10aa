"""Locations in the code of a job's author, as text: `rewards.py:12 in score()`.

A location ends an error's text, in parentheses, and is parsed from there. Only the standard library
is imported: the sandbox's workers import this module.
"""

from __future__ import annotations

import inspect
import linecache
import os
import re
from types import CodeType, FrameType
from typing import Any

MAX_ERROR_CHARS = 500  # of an error's text, without its location
GENERATED_MODULE = "inline_code"  # module of definitions from a notebook's cells or a script
_LOCATION = re.compile(r" \(([^()\s]+:\d+ in [^()\s]+\(\))\)$")


_MARK = re.compile(r"# Source: (.+), line (\d+)$")


def format_mark(origin: str, line: int) -> str:
    """Return the comment before a definition of the generated module: where it was written."""
    return f"# Source: {origin}, line {line}"


def find_origin(path: str, line: int) -> tuple[str, int]:
    """Return the file, or the cell as `In[3]`, and the line in which the author wrote a line.

    They differ from the arguments only in the generated module.
    """
    if os.path.basename(path) == f"{GENERATED_MODULE}.py":
        lines = linecache.getlines(path)[:line]
        for distance, text in enumerate(reversed(lines)):
            if found := _MARK.match(text):
                return found[1], int(found[2]) + distance - 1
    return path, line


def locate_error(error: BaseException, directory: str) -> str:
    """Return the innermost line below `directory` that an error passed through.

    Without one, return the innermost line. Empty if the frame that catches the error raised it.
    """
    trace = error.__traceback__
    if trace is None or trace.tb_next is None:  # the first frame is the one that catches the error
        return ""
    frames: list[tuple[FrameType, int]] = []
    while trace.tb_next is not None:
        trace = trace.tb_next
        frames.append((trace.tb_frame, trace.tb_lineno))
    own = [f for f in frames if directory and _is_below(f[0].f_code.co_filename, directory)]
    frame, line = (own or frames)[-1]
    return _format_location(frame.f_code, line, directory)


def locate_function(function: Any, directory: str) -> str:
    """Return the first line of a function; empty if it has no Python code."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None:
        code = getattr(vars(type(function)).get("__call__"), "__code__", None)
    return (
        _format_location(code, code.co_firstlineno, directory) if isinstance(code, CodeType) else ""
    )


def append_location(text: str, location: str) -> str:
    """Return the text of an error, cut to its maximum length, with the location appended."""
    text = text.encode("utf-8", "replace").decode()[:MAX_ERROR_CHARS]
    return f"{text} ({location})" if location else text


def extract_location(text: str) -> str:
    """Return the location at the end of an error's text; empty if there is none."""
    found = _LOCATION.search(text)
    return found[1] if found else ""


def strip_location(text: str) -> str:
    """Return an error's text without the location at its end."""
    return _LOCATION.sub("", text)


def _is_below(path: str, directory: str) -> bool:
    return os.path.realpath(path).startswith(os.path.join(os.path.realpath(directory), ""))


def _format_location(code: CodeType, line: int, directory: str) -> str:
    path, line = find_origin(code.co_filename, line)
    below = directory and _is_below(path, directory)
    relative_path = (
        os.path.relpath(os.path.realpath(path), os.path.realpath(directory)) if below else ""
    )
    return f"{relative_path or os.path.basename(path)}:{line} in {code.co_name.strip('<>')}()"
