"""Small MCP server: tools on several pages that answer with each kind of content."""

import asyncio
from typing import Any

from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

FILE = types.TextResourceContents(uri="file:///a", text="the text of it")
LINK = types.ResourceLink(type="resource_link", name="c", uri="file:///c", description="all of it")
BYTES = types.BlobResourceContents(uri="file:///b", blob="AAAA")
ANSWERS: dict[str, tuple[list[Any], dict[str, Any] | None]] = {
    "picture": (
        [
            types.TextContent(type="text", text="a cat"),
            types.ImageContent(type="image", data="AAAA", mime_type="image/png"),
        ],
        None,
    ),
    "file": ([types.EmbeddedResource(type="resource", resource=FILE)], None),
    "bytes": ([types.EmbeddedResource(type="resource", resource=BYTES)], None),
    "link": ([LINK], None),
    "chart": ([types.AudioContent(type="audio", data="AAAA", mime_type="audio/wav")], {"n": 1}),
    "numbers": ([], {"n": 1}),
}


async def list_tools(_: Any, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    """List two tools per page."""
    names, at = list(ANSWERS), int(params.cursor) if params and params.cursor else 0
    tools = [types.Tool(name=n, input_schema={"type": "object"}) for n in names[at : at + 2]]
    return types.ListToolsResult(
        tools=tools, next_cursor=str(at + 2) if at + 2 < len(names) else None
    )


async def call_tool(_: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
    """Return the answer of a tool."""
    content, structure = ANSWERS[params.name]
    return types.CallToolResult(content=content, structured_content=structure)


async def main() -> None:
    """Serve the standard streams."""
    server: Server[Any] = Server("gallery", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(main())
