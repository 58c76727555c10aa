"""The built-in tools and rewards, as a job file names them.

A name without a colon is one of these; `module:function` is the author's own, `mcp:server/tool` a
server's of the Model Context Protocol.
"""

from __future__ import annotations

from dataclasses import dataclass

MCP = "mcp:"


@dataclass(frozen=True)
class BuiltinTool:
    """A built-in tool."""

    description: str  # what the model is told
    argument: str  # name of its one argument, a text
    needs_jail: bool  # it runs code that the model wrote
    has_session: bool = False  # it keeps state from call to call


@dataclass(frozen=True)
class BuiltinReward:
    """A built-in reward, and the options that a job file may and must give it."""

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

TEST_RUNNERS = (
    "auto",
    "isolated",
    "pytest",
)  # of tests in Python; auto: isolated where it can run them

PERSON = "the person"  # as a tool of a trajectory; no model can call it: it names no function

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
    """Whether `use` is a built-in's name, which has no colon, known or not."""
    return bool(use) and ":" not in use


def is_mcp(use: str) -> bool:
    """Whether `use` names a tool of an MCP server: `mcp:server/tool`."""
    return use.startswith(MCP)


def select_jailed(uses: list[str]) -> list[str]:
    """The names among `uses` that run code which the model wrote."""
    run = {name for name, tool in TOOLS.items() if tool.needs_jail}
    run |= {name for name, reward in REWARDS.items() if reward.needs_jail}
    return [use for use in uses if use in run]
