"""Client of MCP servers, which it starts and calls over their standard streams.

It uses the official `mcp` package (https://github.com/modelcontextprotocol/python-sdk).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from meshrl.common.mesh.process.entry import child

START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 3600.0  # a caller with a shorter limit kills this process

ToolSpecs = dict[str, tuple[str, dict[str, Any]]]  # tool -> (description, JSON schema of arguments)


class McpServer:
    """Running server. Its methods block; they are called from one thread."""

    def __init__(self, command: list[str], directory: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._session_future: asyncio.Future[Any] = self._loop.create_future()
        self._close_requested = asyncio.Event()
        # The package requires that one task enters and leaves its scopes.
        self._serve_task = self._loop.create_task(self._serve(command, directory))
        self._session = self._run_blocking(self._session_future, START_TIMEOUT_S)

    def list_tools(self) -> ToolSpecs:
        """List the server's tools by name, of all pages: description, and JSON schema of the
        arguments.

        Raise TimeoutError after `START_TIMEOUT_S`.
        """
        found = self._run_blocking(self._list_all_pages(), START_TIMEOUT_S)
        schemas = [_get_attribute(tool, "input_schema", "inputSchema") for tool in found]
        return {t.name: (t.description or "", s) for t, s in zip(found, schemas, strict=True)}

    def call_tool(self, tool: str, arguments: Any) -> Any:
        """Call a tool and return its text, or the structure if it returns nothing else.

        A line represents each part that is no text. A failed call returns {"error": text}. Raise
        TypeError if the arguments are no table, TimeoutError after `CALL_TIMEOUT_S`.
        """
        if not isinstance(arguments, dict):
            raise TypeError(f"an MCP tool takes a table of arguments, not {arguments!r:.80}")
        result = self._run_blocking(self._session.call_tool(tool, arguments), CALL_TIMEOUT_S)
        text = "\n".join(map(_to_text, result.content))
        if _get_attribute(result, "is_error", "isError"):
            return {"error": text}
        structure = _get_attribute(result, "structured_content", "structuredContent")
        if structure and any(part.type != "text" for part in result.content):
            return f"{text}\n{json.dumps(structure, ensure_ascii=False)}"
        return structure if structure and not result.content else text

    async def _list_all_pages(self) -> list[Any]:
        from mcp.types import PaginatedRequestParams

        page = await self._session.list_tools()
        found, known_cursors = list(page.tools), set()
        while cursor := _get_attribute(page, "next_cursor", "nextCursor"):
            if cursor in known_cursors:
                raise RuntimeError(f"tools/list returned the page {cursor!r} twice")
            known_cursors.add(cursor)
            page = await self._session.list_tools(params=PaginatedRequestParams(cursor=cursor))
            found += page.tools
        return found

    def close(self) -> None:
        """Stop the server's process; raise TimeoutError after `START_TIMEOUT_S`."""
        self._close_requested.set()
        self._run_blocking(self._serve_task, START_TIMEOUT_S)
        self._loop.close()

    async def _serve(self, command: list[str], directory: str) -> None:
        from mcp import ClientSession, StdioServerParameters, stdio_client

        program = sys.executable if command[0] == "python" else command[0]
        # The server must exit with this process in any case: the package gives it a session of its
        # own.
        tied = ["-I", child.__file__, f"parent={os.getpid()}", "--", f"exec:{program}"]
        arguments = [*tied, *command[1:]]
        parameters = StdioServerParameters(command=sys.executable, args=arguments, cwd=directory)
        try:
            async with (
                stdio_client(parameters, sys.stderr) as streams,
                ClientSession(*streams) as session,
            ):
                await session.initialize()
                self._session_future.set_result(session)
                await self._close_requested.wait()
        except Exception as error:
            if self._session_future.done():
                raise
            self._session_future.set_exception(RuntimeError(f"{' '.join(command)}: {error}"))

    def _run_blocking(self, work: Any, deadline_s: float) -> Any:
        async def limited() -> Any:
            async with asyncio.timeout(deadline_s):
                return await work

        return self._loop.run_until_complete(limited())


def list_server_tools(command: list[str], directory: str) -> ToolSpecs:
    """Start a server, list its tools, and stop it."""
    server = McpServer(command, directory)
    try:
        return server.list_tools()
    finally:
        server.close()


def _to_text(part: Any) -> str:
    """Return a part of an answer as text: its text, or a line that describes another type."""
    resource = getattr(part, "resource", None)
    if (text := getattr(resource or part, "text", None)) is not None:
        return str(text)
    if part.type == "resource_link":
        described = f": {part.description}" if part.description else ""
        return f"[link to {part.name}, {part.uri}{described}]"
    kind = _get_attribute(resource or part, "mime_type", "mimeType") or "unknown type"
    data = str(getattr(part, "data", None) or getattr(resource, "blob", ""))
    of = f" {resource.uri}" if resource is not None else ""
    return f"[{part.type}{of} of {kind}, {len(data) * 3 // 4} bytes: it cannot be shown as text]"


def _get_attribute(thing: Any, *names: str) -> Any:
    """Return an attribute that has different names in releases of the package."""
    return next((getattr(thing, name) for name in names if hasattr(thing, name)), None)
