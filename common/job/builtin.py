"""The built-in tools and rewards, as a job file names them.

A name without a colon is one of these; `module:function` is the author's own, `mcp:server/tool` a
server's of the Model Context Protocol.
"""

from __future__ import annotations

from dataclasses import dataclass

MCP = "mcp:"


@dataclass(frozen=True)
class Tool:
    """A built-in tool."""

    description: str  # what the model is told
    argument: str  # name of its one argument, a text
    jailed: bool  # it runs code that the model wrote
    session: bool = False  # it keeps state from call to call


@dataclass(frozen=True)
class Reward:
    """A built-in reward, and the options that a job file may and must give it."""

    options: frozenset[str]
    required: frozenset[str] = frozenset()
    jailed: bool = False


TOOLS = {
    "python": Tool("Runs a Python program and returns what it prints.", "code", jailed=True),
    "python_session": Tool(
        "Runs Python as a notebook cell: variables stay for the next call, and the value of a last "
        "expression is shown.",
        "code",
        jailed=True,
        session=True,
    ),
    "shell": Tool("Runs a command line and returns what it prints.", "command", jailed=True),
    "calculator": Tool("Works out an arithmetic expression.", "expression", jailed=False),
}

RUNNERS = ("auto", "isolated", "pytest")  # of tests in Python; auto: isolated where it can run them

PERSON = "the person"  # as a tool of a trajectory; no model can call it: it names no function

_TEXT = frozenset({"answer", "strip"})
REWARDS = {
    "math": Reward(_TEXT),
    "exact": Reward(_TEXT | {"ignore_case", "ignore_space"}),
    "choice": Reward(_TEXT | {"letters"}),
    "regex": Reward(_TEXT | {"pattern"}, required=frozenset({"pattern"})),
    "code_tests": Reward(
        frozenset(
            {"tests", "strip", "prefix", "partial", "case_s", "memory_mb", "rel_tol", "abs_tol"}
        )
        | {"runner"},
        jailed=True,
    ),
}


def is_builtin(use: str) -> bool:
    """Whether `use` is a built-in's name, which has no colon, known or not."""
    return bool(use) and ":" not in use


def is_mcp(use: str) -> bool:
    """Whether `use` names a tool of an MCP server: `mcp:server/tool`."""
    return use.startswith(MCP)


def jailed(uses: list[str]) -> list[str]:
    """The names among `uses` that run code which the model wrote."""
    run = {name for name, tool in TOOLS.items() if tool.jailed}
    run |= {name for name, reward in REWARDS.items() if reward.jailed}
    return [use for use in uses if use in run]
