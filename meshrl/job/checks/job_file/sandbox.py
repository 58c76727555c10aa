"""Checks of the sandbox keys of a job file: tools, rewards, and limits of the model's code."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshrl.common.job import builtin
from meshrl.common.job.config import RewardPartConfig, SandboxConfig
from meshrl.common.job.isolation import images
from meshrl.common.job.isolation.runners import ContainerRunner
from meshrl.job.job_file import JobFile

# Built-in rewards' options that are numbers, and whether they may be 0; and those of other types.
NUMBER_OPTIONS = {"rel_tol": True, "abs_tol": True, "case_s": False, "memory_mb": False}
OPTION_TYPES: dict[str, tuple[type, str]] = {
    "answer": (str, "the name of a key of the rows"),
    "partial": (bool, "true or false"),
    "prefix": (str, "a text"),
    "tests": (str, "the name of a key of the rows"),
}
_MCP_TOOL_PATTERN = re.compile(r"mcp:([^/]+)/(.+)")


def check_sandbox(job: JobFile) -> None:
    """Reject values that a sandbox would reject."""
    _check_tools(job)
    _check_rewards(job)
    sandbox = job.config.sandbox
    runner = ContainerRunner(tuple(sandbox.runner)) if sandbox.runner else None
    if runner is not None:
        with job.locate_errors("sandbox.runner"):
            runner.check()
        if sandbox.root and not runner.needs_bundle:
            wrong = f"sandbox.root: containers of {runner.name} have a file system of their own"
            fix = (
                "Remove sandbox.root, or set sandbox.runner to a runtime of OCI bundles "
                "with {bundle} and {id}"
            )
            raise job.make_error("sandbox.root", wrong, fix)
    elif sandbox.tier == "runner":
        wrong = "sandbox.tier: a container for each call needs a sandbox.runner"
        raise job.make_error("sandbox.tier", wrong, 'Set sandbox.runner = ["runsc"]')
    if sandbox.root:
        _check_image(job)
    elif runner is not None and not runner.needs_bundle:
        return  # the interpreter's path is the container's
    elif sandbox.python and not os.access(sandbox.python, os.X_OK):
        raise job.make_error("sandbox.python", f"there is no interpreter at {sandbox.python}")


def _check_image(job: JobFile) -> None:
    """Check that the image exists and has an interpreter for this host."""
    sandbox = job.config.sandbox
    if sandbox.tier == "landlock":
        wrong = "sandbox.root needs bubblewrap: Landlock exposes only the host's file system"
        raise job.make_error("sandbox.tier", wrong, 'Set sandbox.tier = "bwrap"')
    with job.locate_errors("sandbox.root"):
        root = images.find_root(sandbox.root)
    with job.locate_errors("sandbox.python" if sandbox.python else "sandbox.root"):
        images.find_python(root, sandbox.python)


def _check_tools(job: JobFile) -> None:
    environment = job.config.environment
    for name, use in environment.tools.items():
        key = f"environment.tools.{name}"
        if match := _MCP_TOOL_PATTERN.fullmatch(use):
            if match[1] not in environment.mcp:
                wrong = f"{key}: environment.mcp has no server {match[1]!r}"
                raise job.make_error(
                    key, wrong, f'Set environment.mcp = {{ {match[1]} = ["COMMAND"] }}'
                )
        elif builtin.is_mcp(use):
            raise job.make_error(key, f"{key}: {use!r} is not of the form mcp:SERVER/TOOL")
        elif builtin.is_builtin(use) and use not in builtin.TOOLS:
            known = ", ".join(builtin.TOOLS)
            wrong = f"{key}: {use!r} is not a built-in tool; built-in tools are {known}"
            raise job.make_error(key, wrong, "Write one of your own as module:function")
    for name in environment.no_retry_tools:
        if name not in environment.tools:
            raise job.make_error(
                "environment.no_retry_tools",
                f"environment.no_retry_tools: there is no tool {name!r}",
            )
    for server, command in environment.mcp.items():
        if not command:
            raise job.make_error("environment.mcp", f"environment.mcp.{server} has no command")


def _check_rewards(job: JobFile) -> None:
    reward = job.config.reward
    if reward.use and reward.parts:
        raise job.make_error("reward.parts", "reward.use and reward.parts exclude each other")
    if reward.options and not builtin.is_builtin(reward.use):
        wrong = "reward.options apply only to a built-in reward.use"
        raise job.make_error(
            "reward.options", wrong, "Put options of your own function into the rows"
        )
    if reward.over_group:
        _check_group_reward(job)
    for i, part in enumerate(reward.reward_parts):
        table = f"reward.parts[{i}]" if reward.parts else "reward"
        key = f"{table}.use"
        if builtin.is_builtin(part.use):
            _check_builtin_reward(job, part, table)
        elif builtin.is_mcp(part.use):
            raise job.make_error(key, f"{key}: {part.use!r} is a tool, not a reward")
        elif part.options:
            raise job.make_error(
                key, f"{key}: {part.use!r} has options but is not a built-in reward"
            )


def _check_group_reward(job: JobFile) -> None:
    """Check that a function of the author scores the groups."""
    reward, key = job.config.reward, "reward.over_group"
    if reward.parts:
        wrong = f"{key} needs reward.use, but the job has reward.parts"
        fix = "Write one function that computes the whole reward, and return its terms as metrics"
        raise job.make_error(key, wrong, fix)
    if not reward.use or builtin.is_builtin(reward.use):
        what = f"the built-in reward {reward.use!r}" if reward.use else "a judge or environment"
        wrong = f"{key} needs a function of your own, but {what} scores each trajectory alone"
        fix = 'Set reward.use = "module:function", or remove the key'
        raise job.make_error(key, wrong, fix)


def _check_builtin_reward(job: JobFile, part: RewardPartConfig, table: str) -> None:
    place = f"{table}.options"
    known = builtin.REWARDS.get(part.use)
    if known is None:
        names = ", ".join(builtin.REWARDS)
        wrong = f"{table}.use: {part.use!r} is not a built-in reward; built-in rewards are {names}"
        raise job.make_error(f"{table}.use", wrong, "Write one of your own as module:function")
    for option in part.options:
        if option not in known.options:
            names = ", ".join(sorted(known.options))
            wrong = f"{place}: {part.use} has no option {option!r}; it has {names}"
            raise job.make_error(f"{place}.{option}", wrong)
    for option in known.required_options - set(part.options):
        raise job.make_error(place, f"{place}: {part.use} needs the option {option!r}")
    for option, value in part.options.items():
        if wrong := _explain_invalid_option(part.use, option, value):
            fix = 'Write letters = "ABCD" for four choices' if option == "letters" else ""
            raise job.make_error(f"{place}.{option}", f"{place}: {wrong}", fix)


def _explain_invalid_option(use: str, option: str, value: Any) -> str:
    """Return why a value of an option is invalid; empty if it is valid."""
    if option == "runner" and value not in builtin.TEST_RUNNERS:
        return f"{use} has no runner {value!r}; runners are {', '.join(builtin.TEST_RUNNERS)}"
    if option == "letters" and not (isinstance(value, str) and re.fullmatch("[A-Za-z]+", value)):
        return f"{use}: letters must be a text of letters from A to Z, not {value!r}"
    if option == "pattern":
        try:
            re.compile(value)
        except (re.error, TypeError) as error:
            return f"{use}: {value!r} is not a valid pattern: {error}"
    expected = ""
    if option in NUMBER_OPTIONS:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and 0 <= value < math.inf and (value or NUMBER_OPTIONS[option])):
            expected = f"a number {'of at least 0' if NUMBER_OPTIONS[option] else 'above 0'}"
    elif option in OPTION_TYPES and not isinstance(value, OPTION_TYPES[option][0]):
        expected = OPTION_TYPES[option][1]
    return f"{option} must be {expected}, not {value!r:.60}" if expected else ""


def resolve_paths(sandbox: SandboxConfig, base: Path) -> SandboxConfig:
    """Return the sandbox with absolute paths.

    The interpreter's path stays as it is: links lead out of a virtual environment; in an image or a
    container it is a path inside.
    """
    root = sandbox.root and os.path.abspath(base / Path(sandbox.root).expanduser())
    python = sandbox.python
    runner = list(sandbox.runner)
    elsewhere = root or (runner and not ContainerRunner(tuple(runner)).needs_bundle)
    if python and not elsewhere:
        python = os.path.abspath(base / python)
    if runner and "/" in runner[0]:
        runner[0] = os.path.abspath(base / Path(runner[0]).expanduser())
    return replace(sandbox, root=root, python=python, runner=runner)
