"""Checks what a job file has the sandbox run: tools, rewards, and limits of the model's code."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from common.errors import ConfigError
from common.grading import golds
from common.job import builtin, images
from common.job.config import JobConfig, RewardPartConfig, SandboxConfig
from common.job.runners import Runner

Fail = Callable[[str, str, str], ConfigError]  # key, message, fix
# Built-in rewards' options that are numbers, and whether they may be 0; and those of other types.
NUMBERS = {"rel_tol": True, "abs_tol": True, "case_s": False, "memory_mb": False}
TYPES: dict[str, tuple[type, str]] = {
    "partial": (bool, "true or false"),
    "prefix": (str, "a text"),
    "tests": (str, "the name of a key of the rows"),
}
_MCP = re.compile(r"mcp:([^/]+)/(.+)")


def check(config: JobConfig, fail: Fail) -> None:
    """ConfigError, by `fail`, for what a sandbox would refuse."""
    _tools(config, fail)
    _rewards(config, fail)
    sandbox = config.sandbox
    if sandbox.runner:
        _runner(sandbox, fail)
    elif sandbox.tier == "runner":
        wrong = "sandbox.tier: a container for each call takes a sandbox.runner"
        raise fail("sandbox.tier", wrong, 'Set sandbox.runner = ["runsc"]')
    if sandbox.root:
        _image(sandbox, fail)
    elif sandbox.runner and not Runner(tuple(sandbox.runner)).bundled:
        return  # the interpreter's path is the container's
    elif sandbox.python and not os.access(sandbox.python, os.X_OK):
        raise fail("sandbox.python", f"there is no interpreter at {sandbox.python}", "")


def _runner(sandbox: SandboxConfig, fail: Fail) -> None:
    """Its program is there, and what the job shows it can be shown."""
    runner = Runner(tuple(sandbox.runner))
    try:
        runner.check()
    except ConfigError as error:
        raise fail("sandbox.runner", f"sandbox.runner: {error.message}", error.fix) from error
    if sandbox.root and not runner.bundled:
        wrong = f"sandbox.root: containers of {runner.name} bring a file system of their own"
        fix = "Leave sandbox.root out, or name a runtime of OCI bundles with {bundle} and {id}"
        raise fail("sandbox.root", wrong, fix)


def _image(sandbox: SandboxConfig, fail: Fail) -> None:
    """The image is there and has an interpreter for this host."""
    if sandbox.tier == "landlock":
        wrong = "sandbox.root takes bubblewrap: Landlock shows no other file system than the host's"
        raise fail("sandbox.tier", wrong, 'Set sandbox.tier = "bwrap"')
    try:
        root = images.tree(sandbox.root)
    except ConfigError as error:
        raise fail("sandbox.root", f"sandbox.root: {error.message}", error.fix) from error
    try:
        images.python_of(root, sandbox.python)
    except ConfigError as error:
        key = "sandbox.python" if sandbox.python else "sandbox.root"
        raise fail(key, f"{key}: {error.message}", error.fix) from error


def references(config: JobConfig) -> Iterator[tuple[str, str]]:
    """(dotted key, module:function) of the author's own tools and rewards."""
    if _own(config.reward.use):
        yield "reward.use", config.reward.use
    for part in config.reward.parts:
        if _own(part.use):
            yield "reward.parts", part.use
    for tool, use in config.environment.tools.items():
        if _own(use):
            yield f"environment.tools.{tool}", use


def _own(use: str) -> bool:
    return ":" in use and not builtin.is_mcp(use)


def _tools(config: JobConfig, fail: Fail) -> None:
    environment = config.environment
    for name, use in environment.tools.items():
        key = f"environment.tools.{name}"
        if match := _MCP.fullmatch(use):
            if match[1] not in environment.mcp:
                wrong = f"{key}: environment.mcp has no server {match[1]!r}"
                raise fail(key, wrong, f'Set environment.mcp = {{ {match[1]} = ["COMMAND"] }}')
        elif builtin.is_mcp(use):
            raise fail(key, f"{key}: {use!r} is not of the form mcp:SERVER/TOOL", "")
        elif builtin.is_builtin(use) and use not in builtin.TOOLS:
            known = ", ".join(builtin.TOOLS)
            wrong = f"{key}: {use!r} is no built-in tool; there are {known}"
            raise fail(key, wrong, "One of your own is written module:function")
    for name in environment.once:
        if name not in environment.tools:
            raise fail("environment.once", f"environment.once: there is no tool {name!r}", "")
    for server, command in environment.mcp.items():
        if not command:
            raise fail("environment.mcp", f"environment.mcp.{server} has no command", "")


def _rewards(config: JobConfig, fail: Fail) -> None:
    reward = config.reward
    if reward.use and reward.parts:
        raise fail("reward.parts", "reward.use and reward.parts exclude each other", "")
    if reward.options and not builtin.is_builtin(reward.use):
        wrong = "reward.options are of a built-in reward.use"
        raise fail("reward.options", wrong, "A function of your own reads the row")
    for i, part in enumerate(reward.declared):
        table = f"reward.parts[{i}]" if reward.parts else "reward"
        key = f"{table}.use"
        if builtin.is_builtin(part.use):
            _built_in(part, table, fail)
        elif builtin.is_mcp(part.use):
            raise fail(key, f"{key}: {part.use!r} is a tool, not a reward", "")
        elif part.options:
            raise fail(key, f"{key}: options of {part.use!r}, which is no built-in reward", "")


def _built_in(part: RewardPartConfig, table: str, fail: Fail) -> None:
    key, place = f"{table}.use", f"{table}.options"
    known = builtin.REWARDS.get(part.use)
    if known is None:
        names = ", ".join(builtin.REWARDS)
        wrong = f"{key}: {part.use!r} is no built-in reward; there are {names}"
        raise fail(key, wrong, "One of your own is written module:function")
    for option in part.options:
        if option not in known.options:
            names = ", ".join(sorted(known.options))
            wrong = f"{place}: {part.use} has no option {option!r}; it has {names}"
            raise fail(f"{place}.{option}", wrong, "")
    for option in known.required - set(part.options):
        raise fail(place, f"{place}: {part.use} needs the option {option!r}", "")
    runner = part.options.get("runner", builtin.RUNNERS[0])
    if runner not in builtin.RUNNERS:
        names = ", ".join(builtin.RUNNERS)
        wrong = f"{place}: {part.use} has no runner {runner!r}; there are {names}"
        raise fail(f"{place}.runner", wrong, "")
    _option_values(part, place, fail)
    letters = part.options.get("letters", golds.LETTERS)
    if not (isinstance(letters, str) and re.fullmatch("[A-Za-z]+", letters)):
        wrong = f"{place}: {part.use}: letters are a text of letters from A to Z, not {letters!r}"
        raise fail(f"{place}.letters", wrong, 'For four choices write letters = "ABCD"')
    pattern = part.options.get("pattern")
    if pattern is not None:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            wrong = f"{place}: {part.use}: {pattern!r} is no pattern: {error}"
            raise fail(f"{place}.pattern", wrong, "") from error


def _option_values(part: RewardPartConfig, place: str, fail: Fail) -> None:
    """Refuses options of a type or size by which nothing can be graded."""
    for option, value in part.options.items():
        wanted = ""
        if option in NUMBERS:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and 0 <= value < math.inf and (value or NUMBERS[option])):
                wanted = f"a number {'from 0 on' if NUMBERS[option] else 'above 0'}"
        elif option in TYPES and not isinstance(value, TYPES[option][0]):
            wanted = TYPES[option][1]
        if wanted:
            wrong = f"{place}: {option} is {wanted}, not {value!r:.60}"
            raise fail(f"{place}.{option}", wrong, "")


def absolute(sandbox: SandboxConfig, base: Path) -> SandboxConfig:
    """With absolute paths. The interpreter's stays as it is: links lead out of a virtual
    environment; in an image or a container it is a path inside.
    """
    root = sandbox.root and os.path.abspath(base / Path(sandbox.root).expanduser())
    python = sandbox.python
    runner = list(sandbox.runner)
    elsewhere = root or (runner and not Runner(tuple(runner)).bundled)
    if python and not elsewhere:
        python = os.path.abspath(base / python)
    if runner and "/" in runner[0]:
        runner[0] = os.path.abspath(base / Path(runner[0]).expanduser())
    return replace(sandbox, root=root, python=python, runner=runner)
