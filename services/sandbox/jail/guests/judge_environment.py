"""Environment of a program that is judged by cases.

It has the resources that judges of such programs provide, and looks up functions as they do.
"""

from __future__ import annotations

import _thread
import io
import os
import resource
import sys
import types
from typing import Any

# bytes of the main thread's stack; the kernel leaves 128 MiB free below it
MAIN_STACK_BYTES = 120 << 20
THREAD_STACK_DIVISOR = 2  # of a jail's memory, which the stack of one thread may claim
SOLUTION_CLASS = "Solution"
_streams: list[Any] = []  # buffer of standard output for large outputs, and the usual one


def prepare(keeps_stdout: bool) -> None:
    """Provide room for recursion, and for numbers of any length, as problem statements assume.

    Errors go nowhere, and neither does standard output without `keeps_stdout`.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for fd in (2,) if keeps_stdout else (1, 2):
        os.dup2(nowhere, fd)
    os.close(nowhere)
    out, _ = _streams
    for name in ("stdout", "__stdout__"):
        setattr(sys, name, out)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    room = MAIN_STACK_BYTES if most == resource.RLIM_INFINITY else min(MAIN_STACK_BYTES, most)
    resource.setrlimit(resource.RLIMIT_STACK, (room, most))


def set_mode(text: io.TextIOWrapper, mode: str) -> io.TextIOWrapper:
    """Set the mode that an interpreter gives its own stream: templates for fast I/O read it."""
    text.mode = mode  # type: ignore[misc]
    return text


def prepare_zygote() -> None:
    """Prepare what all guests share, once in the zygote: each part costs an opened file."""
    out = set_mode(
        io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", errors="backslashreplace"), "w"
    )
    _streams[:] = [out, sys.stdout]  # retained: collection would close its descriptor
    original_stack_size = _thread.stack_size

    def stack_size(size: int = 0) -> int:
        memory, _ = resource.getrlimit(resource.RLIMIT_AS)
        return original_stack_size(
            size if memory == resource.RLIM_INFINITY else min(size, memory // THREAD_STACK_DIVISOR)
        )

    _thread.stack_size = stack_size  # the largest that fits serves as well as a judge's memory
    if "threading" in sys.modules:
        sys.modules["threading"].stack_size = stack_size  # type: ignore[attr-defined]


def resolve_function(module: types.ModuleType, path: str) -> Any:
    """Return a function, or a method of a new instance of a class.

    A bare name may be a method of the class Solution.
    """
    first, *_ = parts = path.split(".")
    if not hasattr(module, first) and hasattr(getattr(module, SOLUTION_CLASS, None), first):
        parts = [SOLUTION_CLASS, *parts]
    target: Any = module
    for part in parts:
        target = getattr(target() if isinstance(target, type) else target, part)
    return target


def await_result(value: Any) -> Any:
    """Return the result of a function, awaited if it is awaitable."""
    if isinstance(value, types.CoroutineType):
        import asyncio  # slow to import, and rarely needed

        return asyncio.run(value)
    return value
