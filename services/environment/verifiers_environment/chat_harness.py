"""Default agent of a `verifiers` environment: a conversation with its tools.

It runs in the environment process. The default of `verifiers` would start a program with a shell on
this host for each trajectory.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
from verifiers.v1 import Harness, HarnessConfig, ModelContext, ProgramResult, Runtime, Trace
from verifiers.v1 import TaskData as Data
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]

HARNESS_ID = "meshrl_chat"  # its name in configurations
FINISHED = ProgramResult(exit_code=0, stdout="", stderr="")
TURN_TIMEOUT_S = 24 * 3600.0  # the shard bounds a turn's time; it ends the trajectory


class ChatHarness(Harness[HarnessConfig]):
    """Agent that requests turns of the model and runs its tool calls, until a turn has none."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Data,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(m) for m in prompt or []]
        wait_s = self.config.tool_timeout
        servers = {name: {"url": url, "timeout": wait_s} for name, url in mcp_urls.items()}
        asking = httpx.AsyncClient(
            base_url=endpoint,
            headers={"Authorization": f"Bearer {secret}"},
            timeout=httpx.Timeout(TURN_TIMEOUT_S, connect=10.0),
            trust_env=False,
        )
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(asking)
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            body: dict[str, Any] = {"model": ctx.model, "messages": messages}
            if tools:
                body["tools"] = tools
            while calls := await _request_turn(client, body, trace):
                for call in calls:
                    content = await _call_tool(call["function"], dispatch, connections)
                    answer = {"role": "tool", "tool_call_id": call["id"], "content": content}
                    messages.append(answer | {"name": call["function"]["name"]})
        return FINISHED


async def _request_turn(client: httpx.AsyncClient, body: dict[str, Any], trace: Trace) -> list[Any]:
    """Add the model's next turn to the messages and return its calls; empty at the end."""
    response = await client.post("chat/completions", json=body)
    if trace.stop_condition is not None:
        return []
    if response.is_error:
        raise RuntimeError(
            f"the request for a turn of the model failed: {response.status_code} "
            f"{response.text[:500]}"
        )
    message = response.json()["choices"][0]["message"]
    body["messages"].append(message)
    return list(message.get("tool_calls") or [])


async def _call_tool(function: dict[str, str], dispatch: Any, connections: Any) -> Any:
    name = function["name"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except json.JSONDecodeError as error:
        return f"error: the arguments are not JSON ({error})"
    if not isinstance(arguments, dict):
        return "error: the arguments must be a JSON object"
    if name not in dispatch:
        return f"error: there is no tool {name!r}; there are {', '.join(dispatch) or 'none'}"
    return await call_mcp(connections, dispatch, name, arguments)
