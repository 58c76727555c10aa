"""Tools of MCP servers inside a worker: one server process for each worker that uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.environment.mcp_client import McpServer
from common.job import builtin

_running: dict[str, McpServer] = {}


def tool_of(use: str, servers: dict[str, list[str]], directory: str) -> Callable[[Any], Any]:
    """The function that calls `mcp:server/tool`; the server starts with the first of its tools."""
    name, _, tool = use.removeprefix(builtin.MCP).partition("/")
    if name not in _running:
        _running[name] = McpServer(servers[name], directory)
    server = _running[name]
    if tool not in server.tools():
        known = ", ".join(server.tools())
        raise LookupError(f"the MCP server {name} has no tool {tool!r}; it has {known}")
    return lambda arguments: server.call(tool, arguments)
