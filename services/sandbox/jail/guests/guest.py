"""The guest of a jail: runs a program, a shell command, cells of a session, calls, or tests.

Everything here but `testing` shares its interpreter with code that the model wrote, so the sandbox
believes nothing that it says beyond "this is what the code answered".
"""

from __future__ import annotations

import _random
import ast
import atexit
import builtins
import contextlib
import errno
import io
import linecache
import os
import random
import sys
import traceback
import types
from typing import Any, NoReturn

from ..objects import side
from ..testing import running
from ..wire import frames, plain
from . import judged, suite

# Exit statuses that name why a program ended; the sandbox tells the model in words.
OUT_OF_MEMORY, REFUSED = 72, 77
REFUSALS = {
    *(errno.EPERM, errno.EACCES, errno.EAGAIN, errno.EFBIG),
    *(errno.ENOSPC, errno.EMFILE, errno.EROFS, errno.EDQUOT),
}
SOURCE_NAME = "main.py"


def run(program: dict[str, Any], cells: int, peer: int) -> NoReturn:
    """Runs `program` and ends the process; never returns."""
    mode = program["mode"]
    seed_random()
    try:
        if mode == "shell":
            shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
            os.execv(shell, [shell, "-c", program["source"]])
        sys.argv = [SOURCE_NAME]
        for name in ("exit", "quit"):  # as `site` adds them, which is not imported here
            setattr(builtins, name, sys.exit)
        if program.get("graded"):
            judged.prepare(prints=mode == "program")
        if mode == "cells":
            _cells(cells)
        elif mode == "calls":
            _calls(program, cells)
        elif mode == "objects":
            side.serve(peer, lambda: _module(program["source"], "solution"))
        elif mode == "tests":
            running.run(program, cells, peer)
        elif mode == "suite":
            suite.run(program, cells)
        else:
            _module(program["source"], "__main__")
        _end(0)
    except frames.Closed:
        _end(0)
    except SystemExit as request:
        _end(_exit_code(request))
    except BaseException as error:
        show(error)
        _end(_status(error))


def make_streams() -> None:
    """Standard streams over descriptors 0 to 2, whatever these are when a guest runs: the zygote
    makes them once. They ask then whether one can seek in what they write to: it must be a pipe.
    """
    reading, writing = os.pipe()
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        kept = os.dup(fd)
        if fd:
            os.dup2(writing, fd)
        file = io.FileIO(fd, "w" if fd else "r", closefd=False)
        file.name = f"<{name}>"  # as an interpreter does; all streams over it have the same
        raw = io.BufferedWriter(file) if fd else io.BufferedReader(file)
        how: dict[str, Any] = {"errors": "backslashreplace", "line_buffering": True} if fd else {}
        # By lines: what was printed before a time-out is not lost.
        text = judged.as_opened(io.TextIOWrapper(raw, "utf-8", **how), "w" if fd else "r")
        os.dup2(kept, fd)
        os.close(kept)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    os.close(reading)
    os.close(writing)
    judged.ready()


def seed_random() -> None:
    """Else all guests of a zygote would draw the same numbers; children of this one draw others."""
    generator = random._inst
    _random.Random.seed(generator)
    os.register_at_fork(after_in_child=generator.seed)


def _module(source: str, name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__file__ = SOURCE_NAME
    sys.modules[name] = module
    _show_lines(source, SOURCE_NAME)
    exec(compile(source, SOURCE_NAME, "exec", dont_inherit=True), module.__dict__)
    return module


def _show_lines(source: str, name: str) -> None:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)


def show(error: BaseException) -> None:
    """The traceback, without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    try:
        traceback.print_exception(type(error), error, trace)
    except BaseException:  # its text is the program's own, and may raise or need more memory
        os.write(2, f"{type(error).__name__}\n".encode())


def _status(error: BaseException) -> int:
    if isinstance(error, MemoryError) or getattr(error, "errno", 0) == errno.ENOMEM:
        return OUT_OF_MEMORY
    if isinstance(error, OSError) and error.errno in REFUSALS:
        return REFUSED
    if isinstance(error, RuntimeError) and str(error).startswith("can't start new thread"):
        return REFUSED
    return 1


def _exit_code(request: SystemExit) -> int:
    if request.code is None or isinstance(request.code, int):
        return (request.code or 0) & 0xFF
    print(request.code, file=sys.stderr)
    return 1


def _end(code: int) -> NoReturn:
    """Ends as an interpreter does: threads that are no daemons, exit handlers, buffers."""
    try:
        if code == 0 and "threading" in sys.modules:
            sys.modules["threading"]._shutdown()

        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    streams: list[Any] = [sys.stdout, sys.stderr, sys.__stdout__]
    main = vars(sys.modules.get("__main__", sys))
    streams += [value for value in main.values() if issubclass(type(value), io.IOBase)]
    for stream in streams:
        with contextlib.suppress(BaseException):  # the program has closed or replaced it
            stream.flush()
    os._exit(code)


# ---- sessions -----------------------------------------------------------------------------------


def _cells(fd: int) -> None:
    """One cell after the other in one namespace, as in a notebook: a last expression is shown."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    own = os.getpid()
    number = 0
    while True:
        cell = frames.receive(fd)
        number += 1
        status = 0
        try:
            _cell(cell["source"], f"cell {number}", module.__dict__)
        except SystemExit as request:
            status = _exit_code(request)
        except BaseException as error:
            show(error)
            status = _status(error)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        if os.getpid() != own:  # a process that the cell has forked came back
            os._exit(status)
        frames.send(fd, {"cell": cell["token"], "exit": status})


def _cell(source: str, name: str, namespace: dict[str, Any]) -> None:
    tree = ast.parse(source, name)
    _show_lines(source, name)
    shown = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec", dont_inherit=True), namespace)
    if isinstance(shown, ast.Expr):
        code = compile(ast.Expression(shown.value), name, "eval", dont_inherit=True)
        value = eval(code, namespace)
        if value is not None:
            namespace["_"] = value
            print(repr(value))


# ---- calls --------------------------------------------------------------------------------------


def _calls(program: dict[str, Any], fd: int) -> None:
    """Calls one function of the program with what comes, and says what it returned."""
    module = _module(program["source"], "solution")
    judged.named(module, program["function"])
    own = os.getpid()
    frames.send(fd, {"ready": True})
    while True:
        asked = frames.receive(fd)
        answer: dict[str, Any] = {"call": asked["call"]}
        args, kwargs = plain.unpacked(asked["args"]), plain.unpacked(asked["kwargs"])
        try:
            function = judged.named(module, program["function"])
            answer["value"] = plain.jsonable(judged.returned(function(*args, **kwargs)))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BaseException as error:
            answer["raised"] = type(error).__name__
            show(error)
        if os.getpid() != own:
            os._exit(0)
        frames.send(fd, answer)
