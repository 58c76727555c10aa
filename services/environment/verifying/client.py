"""The client by which a `verifiers` environment asks the model for turns: our engines, by token
ids.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from verifiers.v1 import Client, Env, Response, SamplingConfig, TrainClientConfig
from verifiers.v1.dialects import Dialect
from verifiers.v1.graph import PendingTurn
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.session import RolloutSession

from meshrl.services.environment.verifying.episode import Episode

MODEL = "meshrl"
# Marks the agents whose turns our engines sample; an agent with a client of its own keeps it.
ENGINES = TrainClientConfig(base_url="http://engines.invalid/v1", api_key_var="MESHRL_NO_KEY")


class EngineClient(Client):
    """Hands each request to the episode that its trace belongs to."""

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
        return await self._episodes[session_id].complete(dialect, body["model"], turn)


class EngineInterception(InterceptionServer):
    """The server that an environment's harness programs talk to, with our client behind it."""

    def __init__(self, client: Client, secrets: tuple[str, ...]) -> None:
        super().__init__(state_service_secrets=secrets)
        self._engines = client

    def register(self, session: RolloutSession) -> tuple[str, str]:
        registered = super().register(session)
        if session.ctx.client == ENGINES:
            session.client = self._engines
        return registered


@asynccontextmanager
async def serving(env: Env, client: Client) -> AsyncIterator[None]:
    """The environment's shared servers, and the engines as its model.

    `Env.serving` makes its own interception from a fixed choice; ours takes its place.
    """
    async with env.serving():
        secrets = tuple(t.state_secret for t in env._shared_tools.values() if t.state_secret)
        async with EngineInterception(client, secrets) as interception:
            env._interception = interception
            yield
