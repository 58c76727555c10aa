"""Worker process that runs a job's tools and reward, one call after the other, until killed.

First frame in: [bundle_dir, {name: use}, {MCP server: command}, closed]; a use is "module:function"
or "mcp:server/tool". Then slices: [[id, name, its arguments, packed], ...]. Out: [LOADED, status,
{name: where its code begins}, error], then for each call as soon as it has ended: [id, status,
value, error]. A result that waited for the end of its slice would be lost with a later call that
hangs. Only the standard library and msgpack, because a pool refills while callers wait.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
from collections.abc import Callable
from numbers import Real
from typing import Any

import msgpack

from meshrl.common.environment import reward_numbers
from meshrl.common.job.bundle.source_locations import append_location, locate_error, locate_function
from meshrl.common.mesh.process.entry.child import ChildChannel

OK, BAD_VALUE, RAISED = (
    "ok",
    "bad_value",
    "raised",
)  # as in meshrl.common.api.sandbox, which imports numpy
REWARD = "reward:"  # before a reward's number: what it returns is a finite number
GROUP_REWARD = "group reward:"  # and a list of them, one for each member of its second argument
TOOL = "tool:"  # before a tool's name
MCP = "mcp:"
LOAD_RESULT_ID = 0  # the id of the first answer
MIN_CHANNEL_FD = 100  # user code that writes to small descriptors by mistake misses the channel
OUT_OF_MEMORY = 72  # exit status: a fresh process may have room for the same call
FORKED = 73  # exit status of a child of user code that returned into this loop
VALUE_BYTES = 1 << 20  # most in a packed value, which enters a context or is a mistake
DEPTH = 16  # nesting of one value; the wire allows 32 for all of a message

WireResult = tuple[int, str, Any, str]


def load_functions(
    bundle_dir: str, functions: dict[str, str], mcp_servers: dict[str, list[str]]
) -> dict[str, Callable[..., Any]]:
    sys.path.insert(0, bundle_dir)
    found: dict[str, Callable[..., Any]] = {}
    running: dict[str, Any] = {}  # MCP servers: each starts with the first of its tools
    for name, use in functions.items():
        if use.startswith(MCP):
            found[name] = make_mcp_tool(use, mcp_servers, bundle_dir, running)
            continue
        module, _, attribute = use.partition(":")
        found[name] = getattr(importlib.import_module(module), attribute)
        if not callable(found[name]):
            raise TypeError(f"{use} is a {type(found[name]).__name__}, not a function")
    return found


def make_mcp_tool(
    use: str, servers: dict[str, list[str]], directory: str, running: dict[str, Any]
) -> Callable[[Any], Any]:
    """Return the function that calls `mcp:server/tool`."""
    from meshrl.common.environment.mcp_client import McpServer  # rarely needed

    name, _, tool = use.removeprefix(MCP).partition("/")
    if name not in running:
        running[name] = McpServer(servers[name], directory)
    server: McpServer = running[name]
    if tool not in server.list_tools():
        known = ", ".join(server.list_tools())
        raise LookupError(f"the MCP server {name} has no tool {tool!r}; it has {known}")
    return lambda arguments: server.call_tool(tool, arguments)


def run_call(
    functions: dict[str, Callable[..., Any]], call: list[Any], directory: str = ""
) -> WireResult:
    """Run a call; an error has the line of the code in `directory`."""
    call_id, name, packed = call
    try:
        arguments = msgpack.unpackb(packed)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        wrong = f"the arguments of {format_name(name)} cannot be decoded: {format_error(error)}"
        return (
            call_id,
            BAD_VALUE,
            None,
            append_location(wrong, locate_function(functions[name], directory)),
        )
    try:
        value = functions[name](*arguments)
        if name.startswith(GROUP_REWARD):
            checked, problem = check_group_rewards(value, len(arguments[1]))
        elif name.startswith(REWARD):
            checked, problem = check_reward(value)
        else:
            checked, problem = check_plain_value(value)
    except MemoryError:
        # An earlier call may have leaked the memory.
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are errors of the job too
        return call_id, RAISED, None, describe_error(error, directory)
    if problem:
        place = locate_function(functions[name], directory)
        return (
            call_id,
            BAD_VALUE,
            None,
            append_location(f"{format_name(name)} returned {problem}", place),
        )
    return call_id, OK, checked, ""


def format_name(name: str) -> str:
    return "reward" if name.startswith((REWARD, GROUP_REWARD)) else name.removeprefix(TOOL)


def check_reward(value: object) -> tuple[object, str]:
    """Return (the reward, as in `reward_numbers`, "") or (None, the error)."""
    if isinstance(value, dict):
        try:
            return reward_numbers.parse_reward(value), ""
        except (TypeError, ValueError) as error:
            return None, f"{short_repr(value)}: {error}"
    if not isinstance(value, Real):
        return None, f"{short_repr(value)}, a {type(value).__name__}; a reward is a finite number"
    try:
        number = float(value)
    except OverflowError:
        return None, "an integer beyond the range of a float; a reward is a finite number"
    if not math.isfinite(number):
        return None, f"{number}; a reward is a finite number"
    return number, ""


def check_group_rewards(value: object, count: int) -> tuple[object, str]:
    """Return (the rewards of `count` members, "") or (None, the error)."""
    wanted = f"with reward.over_group, a reward is a list of {count} numbers, one a trajectory"
    if not isinstance(value, list | tuple):
        return None, f"{short_repr(value)}, a {type(value).__name__}; {wanted}"
    if len(value) != count:
        return None, f"{short_repr(value)}, {len(value)} of them; {wanted}"
    found = [check_reward(one) for one in value]
    for place, (_, problem) in enumerate(found):
        if problem:
            return None, f"at place {place} of its list {problem}"
    return [reward for reward, _ in found], ""


def check_plain_value(value: object) -> tuple[object, str]:
    """Return (the value, "") or (None, the error).

    Valid values are None, numbers, text, bytes, lists, and dicts with text keys, all small and
    shallow.
    """
    problem = find_unsupported_part(value, 0)
    if problem:
        return None, problem
    try:
        size = len(msgpack.packb(value))
    except (OverflowError, UnicodeEncodeError, ValueError, TypeError) as error:
        return None, f"a value that MessagePack cannot encode: {error}"
    if size > VALUE_BYTES:
        return None, f"{size} bytes; the limit is {VALUE_BYTES}"
    return value, ""


def find_unsupported_part(value: object, depth: int) -> str:
    if depth > DEPTH:
        return f"a value nested deeper than {DEPTH}"
    if value is None or type(value) in (bool, int, float, str, bytes):
        return ""
    if type(value) in (list, tuple):
        parts: Any = value
    elif type(value) is dict:
        if any(type(key) is not str for key in value):
            return "a dict with keys that are not text"
        parts = value.values()
    else:
        return (
            f"{short_repr(value)}, a {type(value).__name__}; a tool may return only plain JSON "
            "values"
        )
    return next((odd for part in parts if (odd := find_unsupported_part(part, depth + 1))), "")


def short_repr(value: object) -> str:
    """Return a short repr of the value; repr is user code, so it may raise."""
    try:
        text = repr(value)
    except Exception:
        return "an object without a repr"
    return text if len(text) <= 80 else f"{text[:77]}..."


def describe_error(error: BaseException, directory: str) -> str:
    """Return the type and text of an error, and the line of the job's code that raised it."""
    text = format_error(error)
    if isinstance(error, OSError | MemoryError | RuntimeError):
        from meshrl.common.mesh.process.diagnosis import host_limits  # rarely needed

        if limit := host_limits.explain_hit_limit(error):
            text = f"{text}. {limit}"
    return append_location(text, locate_error(error, directory))


def format_error(error: BaseException) -> str:
    """Return the type and text of an error, in a form that can be sent."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return text.encode("utf-8", "backslashreplace").decode()


def main() -> None:
    channel = ChildChannel.from_env()
    channel.move_above(MIN_CHANNEL_FD)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    pid = os.getpid()
    pack = msgpack.Packer().pack
    setup = channel.recv()
    if setup is None:
        return
    try:
        directory, *what, closed = msgpack.unpackb(setup)
        functions = load_functions(directory, *what)
        if closed:
            # Imported only here: a worker that is not closed starts sooner without them.
            from meshrl.services.sandbox.jail.confinement import (
                landlock,
                seccomp,
                syscall_policy,
                syscall_table,
                syscalls,
            )

            syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
            if landlock.read_abi() >= landlock.MIN_ABI:
                modules = [path for path in sys.path if os.path.isdir(path)]
                landlock.restrict(
                    [sys.prefix, sys.base_prefix, "/usr", "/lib", *modules], ["/dev/null"]
                )
            with contextlib.suppress(syscall_table.UnsupportedMachine):
                seccomp.install(syscall_policy.PROCESS_GROUP_POLICY)
    except BaseException as error:
        channel.send(pack((LOAD_RESULT_ID, RAISED, None, describe_error(error, sys.path[0]))))
        return
    places = {name: locate_function(function, directory) for name, function in functions.items()}
    channel.send(pack((LOAD_RESULT_ID, OK, places, "")))
    while (frame := channel.recv()) is not None:
        for call in msgpack.unpackb(frame):
            answer = run_call(functions, call, directory)
            if os.getpid() != pid:
                os._exit(FORKED)
            channel.send(pack(answer))


if __name__ == "__main__":
    main()
