"""Process of a `verifiers` environment: many episodes at once, each a task of its event loop.

Frames in are lists of [number, key, operation, argument], frames out lists of [number, status,
value], each sent as soon as there is an answer. With `--rows FILE` it writes the tasks and exits.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
from verifiers.v1 import Client, Env, ModelContext, Response, SamplingConfig, TrainClientConfig
from verifiers.v1.dialects import Dialect
from verifiers.v1.graph import PendingTurn
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.session import RolloutSession

from meshrl.common.base.errors import MeshError
from meshrl.common.environment.creation_errors import convert_creation_errors
from meshrl.common.environment.framing import (
    build_frames,
    check_packable,
    pack_message,
    replace_surrogates,
)
from meshrl.common.mesh.process.entry.child import CHANNEL_FD, MAX_FRAME_BYTES
from meshrl.common.model.chat.chat_format import ChatFormat
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.services.environment.verifiers_environment import chat_harness, environment_config
from meshrl.services.environment.verifiers_environment.episode import Episode, RolloutFailed

MODEL_NAME = "meshrl"
# Marks the agents whose turns our engines sample; an agent with its own client keeps that.
ENGINE_CLIENT_CONFIG = TrainClientConfig(
    base_url="http://engines.invalid/v1", api_key_var="MESHRL_NO_KEY"
)


class EngineClient(Client):
    """Client that passes each request to the episode of its trace."""

    def __init__(self, episodes: Mapping[str, Episode]) -> None:
        self._episodes = episodes

    async def get_response(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        sampling: SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        assert session_id is not None and turn is not None
        return await self._episodes[session_id].answer_request(dialect, body["model"], turn)


class EngineInterception(InterceptionServer):
    """Server of an environment's harness programs, with our client behind it."""

    def __init__(self, client: Client, secrets: tuple[str, ...]) -> None:
        super().__init__(state_service_secrets=secrets)
        self._engine_client = client

    def register(self, session: RolloutSession) -> tuple[str, str]:
        registered = super().register(session)
        if session.ctx.client == ENGINE_CLIENT_CONFIG:
            session.client = self._engine_client
        return registered


@asynccontextmanager
async def run_servers(env: Env, client: Client) -> AsyncIterator[None]:
    """Run the environment's shared servers, with the engines as its model.

    `Env.serving` chooses from a fixed set of interceptions; ours replaces its choice.
    """
    async with env.serving():
        secrets = tuple(t.state_secret for t in env._shared_tools.values() if t.state_secret)
        async with EngineInterception(client, secrets) as interception:
            env._interception = interception
            yield


class Episodes:
    """Open episodes of one process, by trajectory."""

    def __init__(self, env: Env, chat: ChatFormat, tokenizer: Tokenizer) -> None:
        self._env, self._chat, self._tokenizer = env, chat, tokenizer
        self._context = ModelContext(model=MODEL_NAME, client=ENGINE_CLIENT_CONFIG)
        self._episodes: dict[int, Episode] = {}
        self.episodes_by_trace: dict[str, Episode] = {}

    async def run_operation(self, key: int, operation: str, argument: Any) -> tuple[str, Any]:
        """Run one operation; an exception of the environment becomes the status `raised`."""
        if key not in self._episodes and operation in ("step", "cut"):
            return "unknown", f"this process has no environment of trajectory {key}"
        try:
            answer = await getattr(self, "_" + operation)(key, argument)
            check_packable(answer)  # an unencodable value is the environment's error
            return "ok", answer
        except MeshError as error:
            return "raised", replace_surrogates(f"{error.code}: {error}")
        except Exception as error:
            return "raised", replace_surrogates(f"{type(error).__name__}: {error}")

    async def _begin(self, key: int, row: dict[str, Any]) -> list[int]:
        await self._close(key, None)
        task = environment_config.build_task(self._env, row)
        self._episodes[key] = Episode(self._env, self._chat, self._context, self.episodes_by_trace)
        return await self._episodes[key].start(task)

    async def _step(self, key: int, ids: list[int]) -> list[Any]:
        return [self._tokenizer.decode(ids), *await self._episodes[key].step(ids)]

    async def _cut(self, key: int, ids: list[int]) -> list[Any]:
        return [self._tokenizer.decode(ids), await self._episodes[key].truncate(ids)]

    async def _text(self, _: int, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)

    async def _restore(self, key: int, argument: Any) -> None:
        """Replay the logged turns to a new episode, which must make the same requests as before."""
        row, turns, *logged = argument
        await self._begin(key, row)
        for _, ids in turns:
            await self._episodes[key].step(ids)
        if logged and self._episodes[key].ids[: len(logged[0])] != logged[0]:
            raise RolloutFailed(
                "the environment is not reproducible: its turns differ from the logged ones",
                fix="Make it depend only on its task, or run it where no process is lost",
            )

    async def _close(self, key: int, _: Any) -> None:
        if (episode := self._episodes.pop(key, None)) is not None:
            await episode.close()

    async def close(self) -> None:
        await asyncio.gather(*(self._close(key, None) for key in list(self._episodes)))


async def serve_channel(env: Env, chat: ChatFormat, tokenizer: Tokenizer) -> None:
    """Answer the shard until it closes the channel."""
    channel = socket.socket(fileno=int(os.environ.pop(CHANNEL_FD)))
    reader, writer = await asyncio.open_connection(sock=channel)
    episodes = Episodes(env, chat, tokenizer)
    tasks: set[asyncio.Task[None]] = set()
    ready: list[bytes] = []  # answers to send together, at the end of this loop iteration

    def flush() -> None:
        messages = ready.copy()
        ready.clear()
        for frame in build_frames(messages):
            writer.write(len(frame).to_bytes(4, "little") + frame)

    async def answer(number: int, key: int, operation: str, argument: Any) -> None:
        message = pack_message([number, *await episodes.run_operation(key, operation, argument)])
        if not ready:
            asyncio.get_running_loop().call_soon(flush)
        ready.append(message)

    async with run_servers(env, EngineClient(episodes.episodes_by_trace)):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionResetError):
            while True:
                length = int.from_bytes(await reader.readexactly(4), "little")
                if length > MAX_FRAME_BYTES:
                    raise ValueError(f"a frame has {length} bytes; the limit is {MAX_FRAME_BYTES}")
                for operation in msgpack.unpackb(await reader.readexactly(length), raw=False):
                    task = asyncio.create_task(answer(*operation))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
        await episodes.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--taskset", required=True)
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--modules", default=".", help="directory of the job's modules")
    parser.add_argument("--tokenizer", default="")
    parser.add_argument("--chat", default="")
    parser.add_argument("--chat-options", type=json.loads, default={})
    parser.add_argument("--chat-template", type=json.loads, default={})
    parser.add_argument(
        "--rows", type=Path, help="write the tasks to this file, one per line, and exit"
    )
    parser.add_argument("--most", type=int, default=0, help="number of tasks to write; 0: all")
    arguments = parser.parse_args()
    sys.path.insert(0, arguments.modules)
    # Tool servers are processes that run the module which defines them.
    os.environ["PYTHONPATH"] = str(Path(arguments.modules).resolve())
    sys.modules[chat_harness.HARNESS_ID] = (
        chat_harness  # plugins are top-level modules, found by their id
    )
    with convert_creation_errors(arguments.taskset):
        env = environment_config.build_environment(arguments.taskset, arguments.options)
    if arguments.rows:
        with arguments.rows.open("w", encoding="utf-8") as file:
            for row in environment_config.iter_task_rows(env, arguments.most):
                file.write(json.dumps(row, allow_nan=False) + "\n")
        return
    tokenizer = Tokenizer.load(arguments.tokenizer)
    chat = ChatFormat.load(
        arguments.chat, arguments.chat_options, tokenizer, **arguments.chat_template
    )
    asyncio.run(serve_channel(env, chat, tokenizer))
