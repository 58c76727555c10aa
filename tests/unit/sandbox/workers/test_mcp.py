"""Tools of an MCP server: listed for the model, called from a worker, killed with the worker."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ToolFailed
from meshrl.common.environment import mcp_client
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.environment.environments import load_tools
from meshrl.services.environment.model_tools import InvalidToolCall
from meshrl.services.sandbox.workers.calls import PoolCall, PoolFunctions, PoolLimits
from meshrl.services.sandbox.workers.pool import WorkerPool
from meshrl.services.sandbox.workers.worker import TOOL
from tests.load import scaled

SERVER = Path(__file__).parents[1] / "servers" / "weather.py"
COMMAND = [sys.executable, "weather.py"]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    shutil.copy(SERVER, tmp_path)
    return str(tmp_path)


@pytest.mark.rotating(3)
def test_mcp_tools_are_described_to_the_model(folder: str) -> None:
    tool_uses = {"ahead": "mcp:weather/forecast", "run": "python", "count": "calculator"}
    tools = load_tools(tool_uses, {"weather": COMMAND}, folder)
    spec = tools["ahead"].description_for_template["function"]
    assert spec["name"] == "ahead" and spec["description"] == "Forecast the weather."
    assert spec["parameters"]["required"] == ["city"]
    assert tools["ahead"].prepare_input({"city": "Ulm"}) == {"city": "Ulm"}
    with pytest.raises(InvalidToolCall, match="city is missing"):
        tools["ahead"].prepare_input({"days": 2})
    assert tools["run"].prepare_input({"code": "print(1)"}) == "print(1)"
    assert tools["run"].description_for_template["function"]["parameters"]["required"] == ["code"]
    with pytest.raises(ValueError, match="has no tool 'sunset'"):
        load_tools({"x": "mcp:weather/sunset"}, {"weather": COMMAND}, folder)


async def open_pool(folder: str, tool_uses: dict[str, str]) -> WorkerPool:
    references = {TOOL + name: use for name, use in tool_uses.items()}
    functions = PoolFunctions("j", folder, references, {"weather": COMMAND})
    limits = PoolLimits(warm_workers=1, max_workers=1, rlimits={})
    pool = WorkerPool(SystemHost(), SystemClock(), functions, limits, Path(folder) / "log")
    await pool.start()
    return pool


@pytest.mark.deep
async def test_mcp_tools_are_called_and_their_errors_returned(folder: str) -> None:
    names = ("forecast", "measured", "broken")
    pool = await open_pool(folder, {name: f"mcp:weather/{name}" for name in names})

    async def call_tool(name: str, arguments: Any) -> Any:
        return (await pool.run([PoolCall(TOOL + name, [arguments], scaled(20.0))]))[0]

    try:
        assert (
            await call_tool("forecast", {"city": "Ulm", "days": 3})
        ).value == "Ulm: sun for 3 days"
        measured_value = (await call_tool("measured", {"city": "Ulm"})).value
        assert "21.5" in str(measured_value)
        failure = await call_tool("broken", {"city": "Ulm"})
        assert failure.status == "ok" and "broken" in failure.value["error"]
        assert (await call_tool("forecast", "Ulm")).status == "raised"
    finally:
        await pool.stop()


@pytest.mark.rotating(3)
def test_all_tool_pages_and_answer_parts_are_read(tmp_path: Path) -> None:
    shutil.copy(SERVER.with_name("gallery.py"), tmp_path)
    server = mcp_client.McpServer([sys.executable, "gallery.py"], str(tmp_path))
    try:
        assert list(server.list_tools()) == ["picture", "file", "bytes", "link", "chart", "numbers"]
        answers = {tool: server.call_tool(tool, {}) for tool in server.list_tools()}
    finally:
        server.close()
    assert answers == {
        "picture": "a cat\n[image of image/png, 3 bytes: it cannot be shown as text]",
        "file": "the text of it",
        "bytes": "[resource file:///b of unknown type, 3 bytes: it cannot be shown as text]",
        "link": "[link to c, file:///c: all of it]",
        "chart": '[audio of audio/wav, 3 bytes: it cannot be shown as text]\n{"n": 1}',
        "numbers": {"n": 1},
    }


@pytest.mark.deep
async def test_server_without_the_tool_fails_the_load(folder: str) -> None:
    with pytest.raises(ToolFailed, match="has no tool 'sunset'; it has forecast, measured"):
        await open_pool(folder, {"x": "mcp:weather/sunset"})


def test_error_of_a_failing_server_start_is_reported(folder: str) -> None:
    with pytest.raises(RuntimeError, match="raise SystemExit"):
        mcp_client.list_server_tools([sys.executable, "-c", "raise SystemExit(3)"], folder)
