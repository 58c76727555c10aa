"""Guest of a jail: runs a program, a shell command, cells of a session, calls, or tests.

Everything here but `testing` shares its interpreter with code that the model wrote. So the sandbox
treats all its messages as output of that code.
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

from ..objects import object_connection
from ..testing import runner
from ..wire import frames, plain_data
from . import judge_environment, pytest_suite

# Exit statuses that name why a program ended; the sandbox describes them to the model.
OUT_OF_MEMORY_EXIT, DENIED_EXIT = 72, 77
DENIED_ERRNOS = {
    *(errno.EPERM, errno.EACCES, errno.EAGAIN, errno.EFBIG),
    *(errno.ENOSPC, errno.EMFILE, errno.EROFS, errno.EDQUOT),
}
SOURCE_NAME = "main.py"


def run(program: dict[str, Any], channel: int, peer: int) -> NoReturn:
    """Run `program` and end the process; never returns."""
    mode = program["mode"]
    seed_random()
    try:
        if mode == "shell":
            shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
            os.execv(shell, [shell, "-c", program["source"]])
        sys.argv = [SOURCE_NAME]
        for name in ("exit", "quit"):  # as `site` adds them, which is not imported here
            setattr(builtins, name, sys.exit)
        if program.get("is_graded"):
            judge_environment.prepare(keeps_stdout=mode == "program")
        if mode == "cells":
            _serve_cells(channel)
        elif mode == "calls":
            _serve_calls(program, channel)
        elif mode == "objects":
            object_connection.serve_solution(
                peer, lambda: _execute_module(program["source"], "solution")
            )
        elif mode == "tests":
            runner.run(program, channel, peer)
        elif mode == "suite":
            pytest_suite.run(program, channel)
        else:
            _execute_module(program["source"], "__main__")
        _end(0)
    except frames.FrameChannelClosed:
        _end(0)
    except SystemExit as request:
        _end(_exit_code(request))
    except BaseException as error:
        print_traceback(error)
        _end(_exit_status(error))


def create_streams() -> None:
    """Create the standard streams over descriptors 0 to 2; the zygote makes them once for all
    guests.

    Streams check at creation whether their file is seekable: it must be a pipe.
    """
    reading, writing = os.pipe()
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        saved_fd = os.dup(fd)
        if fd:
            os.dup2(writing, fd)
        file = io.FileIO(fd, "w" if fd else "r", closefd=False)
        file.name = f"<{name}>"  # as an interpreter does; all streams over it have the same
        raw = io.BufferedWriter(file) if fd else io.BufferedReader(file)
        options: dict[str, Any] = (
            {"errors": "backslashreplace", "line_buffering": True} if fd else {}
        )
        # Line-buffered: output before a time-out is not lost.
        text = judge_environment.set_mode(
            io.TextIOWrapper(raw, "utf-8", **options), "w" if fd else "r"
        )
        os.dup2(saved_fd, fd)
        os.close(saved_fd)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    os.close(reading)
    os.close(writing)
    judge_environment.prepare_zygote()


def seed_random() -> None:
    """Seed `random`: else all guests of a zygote draw the same numbers; children reseed."""
    generator = random._inst
    _random.Random.seed(generator)
    os.register_at_fork(after_in_child=generator.seed)


def _execute_module(source: str, name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__file__ = SOURCE_NAME
    sys.modules[name] = module
    _cache_source_lines(source, SOURCE_NAME)
    exec(compile(source, SOURCE_NAME, "exec", dont_inherit=True), module.__dict__)
    return module


def _cache_source_lines(source: str, name: str) -> None:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)


def print_traceback(error: BaseException) -> None:
    """Print the traceback, without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    try:
        traceback.print_exception(type(error), error, trace)
    except BaseException:  # its text is the program's own, and may raise or need more memory
        os.write(2, f"{type(error).__name__}\n".encode())


def _exit_status(error: BaseException) -> int:
    if isinstance(error, MemoryError) or getattr(error, "errno", 0) == errno.ENOMEM:
        return OUT_OF_MEMORY_EXIT
    if isinstance(error, OSError) and error.errno in DENIED_ERRNOS:
        return DENIED_EXIT
    if isinstance(error, RuntimeError) and str(error).startswith("can't start new thread"):
        return DENIED_EXIT
    return 1


def _exit_code(request: SystemExit) -> int:
    if request.code is None or isinstance(request.code, int):
        return (request.code or 0) & 0xFF
    print(request.code, file=sys.stderr)
    return 1


def _end(code: int) -> NoReturn:
    """End as an interpreter does: threads that are no daemons, exit handlers, buffers."""
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


def _serve_cells(fd: int) -> None:
    """Run cells one after the other in one namespace, as a notebook: a last expression is shown."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    own_pid = os.getpid()
    number = 0
    while True:
        cell = frames.receive(fd)
        number += 1
        status = 0
        try:
            _execute_cell(cell["source"], f"cell {number}", module.__dict__)
        except SystemExit as request:
            status = _exit_code(request)
        except BaseException as error:
            print_traceback(error)
            status = _exit_status(error)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        if os.getpid() != own_pid:  # a process that the cell has forked returned here
            os._exit(status)
        frames.send(fd, {"cell": cell["token"], "exit": status})


def _execute_cell(source: str, name: str, namespace: dict[str, Any]) -> None:
    tree = ast.parse(source, name)
    _cache_source_lines(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec", dont_inherit=True), namespace)
    if isinstance(last, ast.Expr):
        code = compile(ast.Expression(last.value), name, "eval", dont_inherit=True)
        value = eval(code, namespace)
        if value is not None:
            namespace["_"] = value
            print(repr(value))


# ---- calls --------------------------------------------------------------------------------------


def _serve_calls(program: dict[str, Any], fd: int) -> None:
    """Call one function of the program with each request, and send its results."""
    module = _execute_module(program["source"], "solution")
    judge_environment.resolve_function(module, program["function"])
    own_pid = os.getpid()
    frames.send(fd, {"ready": True})
    while True:
        request = frames.receive(fd)
        answer: dict[str, Any] = {"call": request["call"]}
        args, kwargs = plain_data.decode(request["args"]), plain_data.decode(request["kwargs"])
        try:
            function = judge_environment.resolve_function(module, program["function"])
            answer["value"] = plain_data.to_jsonable(
                judge_environment.await_result(function(*args, **kwargs))
            )
        except MemoryError:
            os._exit(OUT_OF_MEMORY_EXIT)
        except BaseException as error:
            answer["raised"] = type(error).__name__
            print_traceback(error)
        if os.getpid() != own_pid:
            os._exit(0)
        frames.send(fd, answer)
