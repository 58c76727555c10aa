"""Environment process: runs the job author's environment code, and owns the tokenizer.

It decodes what the model sampled for `step` and encodes only what the environment appends. Each
frame, a list of [key, operation, argument], is answered by one frame, a list of [key, status,
value].
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgpack

from meshrl.common.environment import mcp_client
from meshrl.common.environment.creation_errors import convert_creation_errors
from meshrl.common.environment.framing import check_packable, replace_surrogates
from meshrl.common.grading.row_values import find_value, get_value
from meshrl.common.job import builtin
from meshrl.common.job.bundle.source_locations import append_location, locate_error, locate_function
from meshrl.common.mesh.process.entry.child import ChildChannel
from meshrl.common.model.chat import demonstrations
from meshrl.common.model.chat.chat_format import (
    SPECIAL_TOKENS_ANYWHERE,
    TEMPLATE_FORMAT,
    ChatFormat,
)
from meshrl.common.model.chat.messages import add_system_prompt
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.services.environment import threaded_server
from meshrl.services.environment.answers import InvalidAnswer
from meshrl.services.environment.model_tools import JobTool, ModelTool
from meshrl.services.environment.sessions import ChatSession, EnvironmentSession, TextSession

StatusReply = tuple[str, Any]


class Environments:
    """Open environments of one process, by trajectory."""

    def __init__(
        self,
        factory: Callable[[], Any] | None,
        tokenizer: Tokenizer,
        prompt: str,
        chat: ChatFormat | None = None,
        tools: dict[str, ModelTool] | None = None,
        modules: str = "",
        special_tokens: str = TEMPLATE_FORMAT,
        end_tokens: Sequence[str] = (),
        system: str = "",
    ) -> None:
        """Create an empty table.

        `special_tokens` and `ends`, the tokens of `rollout.stop`, are for texts without chat.
        """
        self._module_directory = modules  # directory of the author's code
        self._escapes_special_tokens, self._end_tokens = (
            special_tokens != SPECIAL_TOKENS_ANYWHERE,
            end_tokens,
        )
        self._factory = factory or partial(SingleTurn, prompt, system)
        self._tokenizer = tokenizer
        self._chat, self._tools = chat, tools or {}
        self._sessions: dict[int, EnvironmentSession] = {}

    def run_operation(self, key: int, operation: str, argument: Any) -> StatusReply:
        """Run one operation; an exception of the author's code becomes the status `raised`."""
        try:
            answer = getattr(self, "_" + operation)(key, argument)
            check_packable(answer)  # an unencodable value is the author's error
            return "ok", answer
        except Exception as error:
            if isinstance(error, KeyError) and error.args == (key,):
                return "unknown", f"this process has no environment of trajectory {key}"
            return "raised", self._describe_error(error)

    def _describe_error(self, error: Exception) -> str:
        """Return the type and text of an error, and the line of the author's code."""
        if isinstance(error, InvalidAnswer):
            own = isinstance(getattr(error.function, "__self__", None), SingleTurn)
            place = "" if own else locate_function(error.function, self._module_directory)
            return append_location(replace_surrogates(str(error)), place)
        text = f"{type(error).__name__}: {error}"
        return append_location(
            replace_surrogates(text), locate_error(error, self._module_directory)
        )

    def _begin(self, key: int, row: dict[str, Any]) -> list[int]:
        environment, tokenizer = self._factory(), self._tokenizer
        session: EnvironmentSession = (
            ChatSession(environment, self._chat, self._tools, tokenizer)
            if self._chat
            else TextSession(
                environment,
                tokenizer,
                escapes_special_tokens=self._escapes_special_tokens,
                end_tokens=self._end_tokens,
            )
        )
        ids = session.start(row)
        self._sessions[key] = session
        return ids

    def _answer(self, key: int, argument: Any) -> list[list[Any]]:
        """Return the prompt and the rest of a supervised row in pieces, [ids, text] each.

        The text is that of learned ids, and None for the others. No environment stays open.
        """
        row, response, train_on = argument
        value = find_value(row, response)
        if self._chat is not None and demonstrations.is_demonstration(row, value):
            messages, tools = demonstrations.parse_demonstration(row)
            specs = [tool.description_for_template for tool in self._tools.values()]
            pieces = demonstrations.encode_demonstration(
                self._chat, messages, specs if tools is None else tools, train_on
            )
        else:
            ids = self._begin(key, row)
            try:
                answer = self._sessions[key].encode_answer(value)
            finally:
                self._close(key, None)
            pieces = [(ids, False), (answer, True)]
        return [[ids, self._tokenizer.decode(ids) if learned else None] for ids, learned in pieces]

    def _step(self, key: int, ids: list[int]) -> list[Any]:
        return self._sessions[key].step(ids)

    def _result(self, key: int, value: Any) -> list[Any]:
        return self._sessions[key].result(value)

    def _cut(self, key: int, ids: list[int]) -> list[Any]:
        """Truncate a trajectory in mid-turn; return the turn's text and the environment's score, if
        any.
        """
        return [self._tokenizer.decode(ids), self._sessions[key].truncate(ids)]

    def _restore(self, key: int, argument: Any) -> None:
        row, operations, *ids = argument
        self._begin(key, row)
        session = self._sessions[key]
        for operation, value in operations:
            (session.step if operation == "step" else session.result)(value)
        if ids:
            session.check_replay(ids[0])

    def _close(self, key: int, _: Any) -> None:
        if (session := self._sessions.pop(key, None)) is not None:
            session.close()

    def close(self) -> None:
        """Close all open environments; log the errors of closing."""
        for key in list(self._sessions):
            status, error = self.run_operation(key, "close", None)
            if status == "raised":
                print(f"error on closing trajectory {key}: {error}", file=sys.stderr)


class SingleTurn:
    """Environment of a job that names none: the prompt, one turn without a call, done."""

    def __init__(self, prompt: str, system: str = "") -> None:
        self._prompt, self._system = prompt, system

    def open(self, row: dict[str, Any]) -> Any:
        return add_system_prompt(get_value(row, self._prompt), self._system)

    def step(self, text: str) -> dict[str, Any]:
        return {"done": True}

    def close(self) -> None:
        return None


def load_tools(
    references: dict[str, str], servers: dict[str, list[str]], modules: str
) -> dict[str, ModelTool]:
    """Load the tools that the model may call."""
    found: dict[str, ModelTool] = {}
    served: dict[str, dict[str, Any]] = {}
    for name, use in references.items():
        if builtin.is_mcp(use):
            server, _, tool = use.removeprefix(builtin.MCP).partition("/")
            if server not in served:
                served[server] = mcp_client.list_server_tools(servers[server], modules)
            if tool not in served[server]:
                raise ValueError(f"the MCP server {server} has no tool {tool!r}")
            found[name] = ModelTool(name, *served[server][tool])
        elif builtin.is_builtin(use):
            found[name] = ModelTool.from_builtin(name, builtin.TOOLS[use])
        else:
            found[name] = JobTool(name, import_reference(use, modules))
    return found


def import_reference(reference: str, directory: str) -> Callable[..., Any]:
    """Return the object that `module:function` names, with `directory` first on the path."""
    if directory not in sys.path:
        sys.path.insert(0, directory)
    module, _, name = reference.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def build_parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("--use", default="", help="factory of the environment, as module:function")
    found.add_argument("--modules", default=".", help="directory of the job's modules")
    found.add_argument("--tokenizer", required=True)
    found.add_argument("--prompt", default="prompt", help="key of a row's prompt")
    found.add_argument("--system", default="", help="system prompt before prompts that are texts")
    found.add_argument("--chat", default="", help="chat format; empty: plain text")
    found.add_argument("--chat-options", type=json.loads, default={})
    found.add_argument("--chat-template", type=json.loads, default={}, help="options of Chat.load")
    found.add_argument(
        "--special-tokens",
        default=TEMPLATE_FORMAT,
        help="texts that may contain special tokens: template or anywhere",
    )
    found.add_argument("--ends", type=json.loads, default=[], help="tokens at which an answer ends")
    found.add_argument(
        "--tools", type=json.loads, default={}, help="functions by tool name, as module:function"
    )
    found.add_argument("--mcp", type=json.loads, default={}, help="commands by MCP server")
    found.add_argument("--threads", type=int, default=1, help="maximum of concurrent operations")
    return found


def main() -> None:
    arguments = build_parser().parse_args()
    channel = ChildChannel.from_env()
    with convert_creation_errors():
        served = build_environments(arguments)
    if arguments.threads > 1:
        threaded_server.serve_threaded(channel, served.run_operation, arguments.threads)
    else:
        serve_channel(channel, served)
    served.close()


def build_environments(arguments: argparse.Namespace) -> Environments:
    """Build the environments that a command line describes."""
    tokenizer = Tokenizer.load(arguments.tokenizer)
    chat, tools = None, {}
    if arguments.chat:
        format, options = arguments.chat, arguments.chat_options
        chat = ChatFormat.load(format, options, tokenizer, **arguments.chat_template)
        tools = load_tools(arguments.tools, arguments.mcp, arguments.modules)
    factory = import_reference(arguments.use, arguments.modules) if arguments.use else None
    return Environments(
        factory,
        tokenizer,
        arguments.prompt,
        chat,
        tools,
        os.path.realpath(arguments.modules),
        arguments.special_tokens,
        arguments.ends,
        arguments.system,
    )


def serve_channel(channel: ChildChannel, served: Environments) -> None:
    """Answer the shard until it closes the channel, which may be in the middle of an operation."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while (block := channel.recv()) is not None:
            channel.send(answer_frame(served, block))


def answer_frame(served: Environments, block: bytes) -> bytes:
    """Answer one frame of operations with a frame."""
    answers = [
        [key, *served.run_operation(key, operation, argument)]
        for key, operation, argument in msgpack.unpackb(block, raw=False)
    ]
    packed: bytes = msgpack.packb(answers, use_bin_type=True)
    return packed
