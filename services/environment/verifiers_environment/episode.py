"""One trajectory as an episode of a `verifiers` environment.

The environment owns its loop: it is a task here, and requests turns from its client. The shard
requests actions. So each request becomes an action that appends what the environment has added, and
the model's next turn is the request's answer.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from verifiers.v1 import (
    AssistantMessage,
    Env,
    ModelContext,
    ProviderError,
    Response,
    Task,
    Tool,
    ToolCall,
    Trace,
    TurnTokens,
    Usage,
)
from verifiers.v1.clients.train import serialize_completion, tool_to_wire
from verifiers.v1.dialects import ChatDialect, Dialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.graph import PendingTurn

from meshrl.common.base.errors import MeshError
from meshrl.common.environment.reward_numbers import average_valid_metrics, to_finite_float
from meshrl.common.model.chat.chat_format import ChatConversation, ChatFormat, ParsedTurn

Action = list[Any]
Score = Any  # a number, or with metrics as in `reward_numbers`
CLOSE_TIMEOUT_S = 10.0  # for the environment's clean-up when its trajectory is cancelled


class UnsupportedRollout(MeshError):
    """Error raised when the environment needs more than one growing sequence of tokens."""

    code = "rollout_broken"


class RolloutFailed(MeshError):
    """Error raised when the environment's own code, tools or scoring failed."""

    code = "rollout_failed"


class Episode:
    """Running episode; its methods return at the environment's next request or its end."""

    def __init__(
        self, env: Env, chat: ChatFormat, context: ModelContext, traces: dict[str, Any]
    ) -> None:
        self._env, self._chat, self._context, self._traces = env, chat, context, traces
        self._conversation: ChatConversation | None = None
        self._task: asyncio.Task[Score] | None = None
        self._requested_ids: asyncio.Future[list[int]] | None = None  # ids that a request has added
        self._sampled_ids: asyncio.Future[list[int]] | None = None  # the turn in answer to it
        self._unsupported: UnsupportedRollout | None = None
        self._is_cut = False

    @property
    def ids(self) -> list[int]:
        """Ids of the trajectory so far."""
        return self._conversation.ids if self._conversation else []

    async def start(self, task: Task) -> list[int]:
        """Start the environment and return the prompt's ids."""
        self._requested_ids = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run_episode(task))
        action, value = await self._wait_for_action()
        if action != "append":
            raise RolloutFailed("the environment ended without a request to the model")
        return list(value)

    async def step(self, ids: list[int]) -> Action:
        """Answer the open request with a turn of the model; return `append` or `done`."""
        self._answer_request(ids)
        return await self._wait_for_action()

    async def truncate(self, ids: list[int]) -> Score:
        """End the episode after an unfinished turn, or instead of one, and return its score."""
        self._is_cut = True
        self._answer_request(ids)
        action, value = await self._wait_for_action()
        if action != "done":
            raise RolloutFailed("the environment continued after its trajectory was truncated")
        return value

    async def close(self) -> None:
        """Cancel the episode if it still runs."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S)

    def _answer_request(self, ids: list[int]) -> None:
        if self._sampled_ids is None or self._sampled_ids.done():
            raise UnsupportedRollout("the environment did not request a turn")
        self._requested_ids = asyncio.get_running_loop().create_future()
        self._sampled_ids.set_result(ids)

    async def _wait_for_action(self) -> Action:
        """Return the next action at the environment's next request or end; the pool has the
        deadline.
        """
        assert self._task is not None and self._requested_ids is not None
        await asyncio.wait([self._task, self._requested_ids], return_when=asyncio.FIRST_COMPLETED)
        if self._requested_ids.done():
            return ["append", self._requested_ids.result()]
        return ["done", self._task.result()]

    async def _run_episode(self, task: Task) -> Score:
        minted: list[Trace] = []

        def mint(trace: Trace) -> None:
            minted.append(trace)
            self._traces[trace.id] = self

        try:
            episode = await self._env.run_episode(task, self._context, on_trace=mint)
        finally:
            for trace in minted:
                self._traces.pop(trace.id, None)
        if self._unsupported is not None:
            raise self._unsupported
        if not episode.ok:
            errors = [*episode.errors, *(e for t in episode.traces for e in t.errors)]
            reason = (
                f"{errors[-1].type}: {errors[-1].message}" if errors else "no error was reported"
            )
            raise RolloutFailed(f"the episode failed: {reason}")
        if episode.is_timeout or any(t.is_timeout for t in episode.traces):
            # An expired stage is no error there, and leaves a reward of 0 that no scorer gave.
            raise RolloutFailed(
                "a stage of the episode timed out, so its reward is invalid",
                fix="Make it finish, or raise the timeout of the task or the agent",
            )
        ours = [t for t in episode.traces if t.agent.trainable and t.num_turns] or episode.traces
        try:
            reward = to_finite_float(sum(t.reward for t in ours), "a reward")
        except (TypeError, ValueError) as error:
            raise RolloutFailed(str(error)) from error
        metrics = average_valid_metrics(t.metrics for t in ours)
        return {"reward": reward, "metrics": metrics} if metrics else reward

    # -- client of the environment -----------------------------------------------------------------

    async def answer_request(self, dialect: Dialect, model: str, turn: PendingTurn) -> Response:
        """Return the model's answer to a request; ProviderError ends the rollout that made it."""
        try:
            added = self._encode_request(dialect, turn)
        except MeshError as error:
            self._unsupported = UnsupportedRollout(error.message)
            raise ProviderError(str(error), status_code=400) from error
        assert self._conversation is not None and self._requested_ids is not None
        self._sampled_ids = asyncio.get_running_loop().create_future()
        if self._is_cut:
            ids: list[int] = []
        else:
            self._requested_ids.set_result(added)
            ids = await self._sampled_ids
        if self._is_cut and not ids:
            turn.trace.stop("max_total_tokens")
            raise ProviderError("the trajectory has reached its limit of tokens", status_code=400)
        prompt = list(self._conversation.ids)
        reply = self._conversation.append_turn(ids)
        return self._build_response(model, prompt, ids, reply, bridged=bool(turn.prefix_node_ids))

    def _encode_request(self, dialect: Dialect, turn: PendingTurn) -> list[int]:
        """Return the ids that the request adds to those so far; UnsupportedRollout unless it only
        adds.
        """
        if not isinstance(dialect, ChatDialect):
            raise UnsupportedRollout(
                f"requests of {type(dialect).__name__} have no chat template",
                fix="Use a harness with chat completions",
            )
        if self._sampled_ids is not None and not self._sampled_ids.done():
            raise UnsupportedRollout("the environment requests two turns at once")
        if self._conversation is None:
            messages = [_message_to_wire(m) for m in turn.prompt]
            texts = (str(m.get("content") or "") for m in messages)
            if lost := [
                piece for text in texts for piece in self._chat.tokenizer.find_lossy_pieces(text)
            ]:
                raise UnsupportedRollout(
                    f"the tokenizer drops or replaces {lost[:5]} of the prompt"
                )
            self._conversation = self._chat.start_conversation(
                messages, [_tool_to_wire(t) for t in turn.tools]
            )
            return self._conversation.ids
        before = turn.previous_renderer_token_ids()
        if before is None or before[0] + before[1] != self._conversation.ids:
            raise UnsupportedRollout(
                "the environment's request does not begin with the conversation so far",
                fix=(
                    "Only append to the conversation: no compaction, no second agent, no "
                    "edited turns"
                ),
            )
        return self._conversation.append_messages([_message_to_wire(m) for m in turn.tail])

    def _build_response(
        self, model: str, prompt: list[int], ids: list[int], reply: ParsedTurn, bridged: bool
    ) -> Response:
        written = [(c, c.raw if c.problem else json.dumps(c.arguments)) for c in reply.calls]
        calls = [
            ToolCall(id=c.id, name=c.name, arguments=arguments)
            for c, arguments in written
            if c.name
        ]
        response = Response(
            id="",
            created=0,
            model=model,
            message=AssistantMessage(
                content=reply.content or None,
                reasoning_content=reply.reasoning or None,
                tool_calls=calls or None,
            ),
            finish_reason="length" if self._is_cut else "tool_calls" if calls else "stop",
            usage=Usage(prompt_tokens=len(prompt), completion_tokens=len(ids)),
            # The engines have the log-probabilities; the shard's are those that are trained.
            tokens=TurnTokens(prompt_ids=prompt, completion_ids=ids, bridged=bridged),
        )
        response.raw = serialize_completion(response, model)
        return response


def _message_to_wire(message: Any) -> dict[str, Any]:
    wire = dict(message_to_wire(message))
    if not isinstance(wire.get("content"), str | None):
        parts = wire["content"]
        if any(part.get("type") != "text" for part in parts):
            raise UnsupportedRollout("the environment sends the model content other than text")
        wire["content"] = "".join(part["text"] for part in parts)
    return wire


def _tool_to_wire(tool: Tool) -> dict[str, Any]:
    try:
        return dict(tool_to_wire(tool))
    except NotImplementedError as error:
        raise UnsupportedRollout(str(error)) from error
