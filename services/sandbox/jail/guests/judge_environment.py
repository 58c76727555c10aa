"""What a program finds when it is judged by cases: the room that judges of such programs give it,
and its function as they look it up.
"""

from __future__ import annotations

import _thread
import io
import os
import resource
import sys
import types
from typing import Any

MAIN_STACK_BYTES = (
    120 << 20
)  # bytes of the main thread's stack; the kernel leaves 128 MiB free below it
THREAD_STACK_DIVISOR = 2  # of a jail's memory, that the stack of one thread may claim
SOLUTION_CLASS = "Solution"
_streams: list[Any] = []  # standard output for who prints much, and the usual one


def prepare(keeps_stdout: bool) -> None:
    """Room for recursion, and for numbers of any length, as statements of problems assume. What
    nobody will read goes nowhere: errors, and all output of a program that is not to print.
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
    """The stream with the mode that an interpreter gives its own: templates for fast input and
    output ask for it.
    """
    text.mode = mode  # type: ignore[misc]
    return text


def prepare_zygote() -> None:
    """What `prepare` needs and is alike for all guests: the zygote makes it once, as each costs as
    much as opening a file.
    """
    out = set_mode(
        io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", errors="backslashreplace"), "w"
    )
    _streams[:] = [out, sys.stdout]  # which would close its descriptor if nobody kept it
    given = _thread.stack_size

    def stack_size(size: int = 0) -> int:
        memory, _ = resource.getrlimit(resource.RLIMIT_AS)
        return given(
            size if memory == resource.RLIM_INFINITY else min(size, memory // THREAD_STACK_DIVISOR)
        )

    _thread.stack_size = stack_size  # one that fits is as good as all of a judge's memory
    if "threading" in sys.modules:
        sys.modules["threading"].stack_size = stack_size  # type: ignore[attr-defined]


def resolve_function(module: types.ModuleType, path: str) -> Any:
    """A function, or a method of a fresh instance of a class; a bare name may be one of the class
    Solution.
    """
    first, *_ = parts = path.split(".")
    if not hasattr(module, first) and hasattr(getattr(module, SOLUTION_CLASS, None), first):
        parts = [SOLUTION_CLASS, *parts]
    found: Any = module
    for part in parts:
        found = getattr(found() if isinstance(found, type) else found, part)
    return found


def await_result(value: Any) -> Any:
    """What a function comes to: one that is `async` has returned something to wait for."""
    if isinstance(value, types.CoroutineType):
        import asyncio  # slow to import, and hardly ever needed

        return asyncio.run(value)
    return value
