"""Built-in tools and rewards, by their names in a job file.

A name without a colon is a built-in's; `module:function` is the author's own, `mcp:server/tool` a
tool of a Model Context Protocol server.
"""

from __future__ import annotations

from dataclasses import dataclass

MCP = "mcp:"


@dataclass(frozen=True)
class BuiltinTool:
    """Built-in tool."""

    description: str  # for the model
    argument: str  # name of its one argument, a text
    needs_jail: bool  # it runs the model's code
    has_session: bool = False  # it keeps state between calls


@dataclass(frozen=True)
class BuiltinReward:
    """Built-in reward, with its allowed and required options in a job file."""

    options: frozenset[str]
    required_options: frozenset[str] = frozenset()
    needs_jail: bool = False


TOOLS = {
    "python": BuiltinTool(
        "Runs a Python program and returns what it prints.", "code", needs_jail=True
    ),
    "python_session": BuiltinTool(
        "Runs Python as a notebook cell: variables stay for the next call, and the value of a last "
        "expression is shown.",
        "code",
        needs_jail=True,
        has_session=True,
    ),
    "shell": BuiltinTool(
        "Runs a command line and returns what it prints.", "command", needs_jail=True
    ),
    "calculator": BuiltinTool(
        "Works out an arithmetic expression.", "expression", needs_jail=False
    ),
}

# of tests in Python; auto: isolated if it can run them
TEST_RUNNERS = ("auto", "isolated", "pytest")

# as a tool of a trajectory; a model cannot call it: it is not a function's name
PERSON = "the person"

_TEXT_OPTIONS = frozenset({"answer", "strip"})
REWARDS = {
    "math": BuiltinReward(_TEXT_OPTIONS),
    "exact": BuiltinReward(_TEXT_OPTIONS | {"ignore_case", "ignore_space"}),
    "choice": BuiltinReward(_TEXT_OPTIONS | {"letters"}),
    "regex": BuiltinReward(_TEXT_OPTIONS | {"pattern"}, required_options=frozenset({"pattern"})),
    "code_tests": BuiltinReward(
        frozenset(
            {"tests", "strip", "prefix", "partial", "case_s", "memory_mb", "rel_tol", "abs_tol"}
        )
        | {"runner"},
        needs_jail=True,
    ),
}


def is_builtin(use: str) -> bool:
    """Return True if `use` has the form of a built-in's name, which has no colon."""
    return bool(use) and ":" not in use


def is_mcp(use: str) -> bool:
    """Return True if `use` names a tool of an MCP server: `mcp:server/tool`."""
    return use.startswith(MCP)


def select_jailed(uses: list[str]) -> list[str]:
    """Return the names among `uses` that run code of the model."""
    run = {name for name, tool in TOOLS.items() if tool.needs_jail}
    run |= {name for name, reward in REWARDS.items() if reward.needs_jail}
    return [use for use in uses if use in run]
