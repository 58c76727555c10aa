"""Small MCP server: one tool that answers with text, one with a structure, one that fails."""

from mcp.server import MCPServer

server = MCPServer("weather")


@server.tool()
def forecast(city: str, days: int = 1) -> str:
    """Forecast the weather."""
    return f"{city}: sun for {days} days"


@server.tool()
def measured(city: str) -> dict[str, float]:
    """Return the measured weather."""
    return {"celsius": 21.5}


@server.tool()
def broken(city: str) -> str:
    """Fail always."""
    raise ValueError(f"no station in {city}")


if __name__ == "__main__":
    server.run()
