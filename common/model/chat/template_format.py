"""Conversations in a checkpoint's own chat template, extended only by appending.

A template renders whole conversations, from texts. To find the text after a turn, the conversation
is rendered with that turn replaced by a marker. The text after the marker, from the token that ends
the turn on, is encoded and appended. So sampled ids stay as they are, even if the template would
render them differently later (`history`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.chat.chat_format import (
    PARSE_ERRORS,
    PROBE_USER_MESSAGE,
    ChatConversation,
    ChatFormat,
    ChatFormatError,
    ParsedToolCall,
    ParsedTurn,
)
from meshrl.common.model.chat.messages import Message
from meshrl.common.model.chat.template_files import load_chat_files
from meshrl.common.model.chat.template_renderer import TemplateRenderer
from meshrl.common.model.chat.tool_call_parsers import (
    AUTO_PARSER,
    NO_PARSER,
    PARSERS,
    ExtractedToolCalls,
    detect_parser,
)
from meshrl.common.model.tokens.tokenizer import Tokenizer

KEEP_HISTORY, REJECT_HISTORY = "keep", "refuse"
TURN_MARKER = "MeshRLmarksthisturn"
THINK_START, THINK_END = "<think>", "</think>"
CALL_ID_PATTERN = re.compile("[a-zA-Z0-9]{9}")  # ids of calls that Mistral's templates accept
PROBE_TOOL: Message = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}


class TemplateFormat(ChatFormat):
    """Chat template in a tokenizer's directory."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: dict[str, Any],
        *,
        history: str = KEEP_HISTORY,
        tool_call_parser: str = AUTO_PARSER,
        stop_tokens: Sequence[str] = (),
        date: str = "",
    ) -> None:
        """Load the template.

        `history`: if the template would render earlier turns differently, `keep` the sampled ids,
        or `refuse` to continue. `tool_call_parser`: parser of tool calls, one of `PARSERS`; auto:
        chosen by the template's text. `stop_tokens`: tokens that end a turn beside the template's.
        `date`: the template's date, such as 2026-11-22; empty: today.

        Raise ConfigError if there is no template, if it drops texts, or if no token ends a turn.
        """
        if tokenizer.file is None:
            raise ConfigError("a chat template needs a tokenizer.json beside it")
        files = load_chat_files(tokenizer.file.parent)
        self.renderer = TemplateRenderer(files, options, date)
        self.history = history
        self.tool_call_parser = (
            detect_parser(self.renderer.get_template_text(tools=True))
            if tool_call_parser == AUTO_PARSER
            else tool_call_parser
        )
        self._is_parser_unknown = (
            tool_call_parser == AUTO_PARSER and self.tool_call_parser == NO_PARSER
        )
        self.has_reasoning = THINK_END in self.renderer.get_template_text(tools=True)
        if not _can_render(self.renderer, PROBE_USER_MESSAGE | {"content": TURN_MARKER}):
            raise ConfigError(
                "the chat template omits messages whose content is a text",
                where=str(files.directory),
                fix="Use a template for text; templates for images need lists of parts",
            )
        special = tokenizer.special_tokens
        own = _find_end_token(self.renderer, special)
        # token by which the template closes a turn, or None
        self.end_token_id = tokenizer.token_to_id(own)
        texts = dict.fromkeys([own or files.special_tokens.get("eos_token", ""), *stop_tokens])
        found = [i for text in texts if text and (i := tokenizer.token_to_id(text)) is not None]
        if not found:
            raise ConfigError(
                "the chat template has no token that ends a turn",
                where=str(files.directory),
                fix="Add one to rollout.stop",
            )
        super().__init__(tokenizer, found)
        self.tokenizer = self.guard_tokenizer()

    @property
    def depends_on_date(self) -> bool:
        """True if the rendered text depends on the date."""
        return self.renderer.depends_on_date

    @cached_property
    def tools_unsupported_reason(self) -> str:
        """Reason why the model cannot be offered tools, or empty."""
        try:
            bare, with_tools = (
                self.renderer.render([PROBE_USER_MESSAGE], tools, add_generation_prompt=True)
                for tools in ([], [PROBE_TOOL])
            )
        except ChatFormatError as error:
            return error.message
        if bare == with_tools:
            return "the chat template does not render tools"
        if self._is_parser_unknown:
            return "the tool-call format of the chat template is unknown"
        return ""

    def _start_conversation(
        self, messages: list[Message], tools: list[Message]
    ) -> ChatConversation:
        """Start a conversation with the template's rendering of `messages`.

        Raise ChatFormatError if the template rejects them or would not render `tools`.
        """
        if tools and (problem := self.tools_unsupported_reason):
            raise ChatFormatError(problem, fix=TOOL_FIX)
        text = self.renderer.render(messages, tools, add_generation_prompt=True)
        return _TemplateConversation(self, self.tokenizer.encode(text), text, messages, tools)

    def _render(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[int]:
        return self.tokenizer.encode(
            self.renderer.render(messages, tools, add_generation_prompt=False)
        )

    def _encode_answer(
        self, messages: list[Message], answer: Message, tools: list[Message]
    ) -> list[int]:
        """Encode a given turn after `messages`, up to the first token that ends it.

        Raise ChatFormatError if the template would not render it after the prompt of
        `start_conversation`.
        """
        prompt = self.renderer.render(messages, tools, add_generation_prompt=True)
        rendered = self.renderer.render([*messages, answer], tools, add_generation_prompt=False)
        if not rendered.startswith(prompt):
            # Some templates write the system message beside the last user turn, and so move it.
            mark = _make_marker(messages)
            bare = self.renderer.render(
                [*messages, _replace_with_marker(answer, mark)], tools, add_generation_prompt=False
            )
            before, head = bare.partition(mark)[0], _get_turn_header(prompt, messages)
            if not head or not before.endswith(head) or not rendered.startswith(before):
                raise ChatFormatError(
                    "the chat template does not render this answer after its prompt"
                )
            prompt, rendered = head, head + rendered[len(before) :]
        ids, start = self.tokenizer.encode(rendered), self.tokenizer.encode(prompt)
        ends = [n for n in range(len(start), len(ids)) if ids[n] in self.stop_ids]
        if ids[: len(start)] != start or not ends:
            raise ChatFormatError("the chat template does not render this answer after its prompt")
        return ids[len(start) : ends[0] + 1]


TOOL_FIX = (
    "Remove the tools, use a model whose template has tools, or set environment.tool_call_parser"
)


class _TemplateConversation(ChatConversation):
    def __init__(
        self,
        chat: TemplateFormat,
        ids: list[int],
        text: str,
        messages: Sequence[Message],
        tools: Sequence[Message],
    ) -> None:
        super().__init__(chat, ids)
        self._chat = chat
        self._tools = list(tools)
        self._messages = list(messages)  # all ids up to the model's open turn
        self._pending_message: Message | None = None  # the sampled turn
        # the prompt contains its start
        self._prompt_opens_reasoning = text.rstrip().endswith(THINK_START)
        self._num_calls = 0
        self._end_token_id = -1  # token that ended the turn; -1: it was truncated

    def append_turn(self, ids: Sequence[int]) -> ParsedTurn:
        stops = self._chat.stop_ids
        self.ids = [*self.ids, *ids]
        turn_ids = list(ids)
        self._end_token_id = turn_ids.pop() if turn_ids and turn_ids[-1] in stops else -1
        reasoning, text = self._split_reasoning(self._chat.tokenizer.decode(turn_ids))
        written = ExtractedToolCalls(text)
        # whose calls may be plain JSON
        if self._tools or self._chat.tool_call_parser != "llama3_json":
            try:
                written = PARSERS[self._chat.tool_call_parser](text)
            except PARSE_ERRORS as error:
                written = ExtractedToolCalls(
                    "", [ParsedToolCall("", {}, "", f"{error}"[:200], text)]
                )
        calls = [self._assign_call_id(call) for call in written.calls]
        reply = ParsedTurn(written.content.strip(), reasoning, calls)
        self._pending_message = self._chat.escape(_to_message(reply))
        return reply

    def _append_messages(self, messages: list[Message]) -> list[int]:
        if self._pending_message is None:
            raise ChatFormatError("no turn of the model precedes these messages")
        chat, reply = self._chat, self._pending_message
        if chat.history == REJECT_HISTORY:
            conversation, tools = [*self._messages, reply], self._tools
            before = chat.renderer.render(conversation, tools, add_generation_prompt=False)
            ends = [(at, end) for end in chat.stop_tokens if (at := before.rfind(end)) >= 0]
            past = before[: max(ends)[0]] if ends else before
            after = chat.renderer.render(
                [*conversation, *messages], tools, add_generation_prompt=True
            )
            if not after.startswith(past):
                raise ChatFormatError(
                    "the chat template renders an earlier turn differently than it was "
                    "sampled, for example without its reasoning",
                    fix='Set environment.chat_history = "keep" to keep turns as they were sampled',
                )
        mark = _make_marker([*self._messages, *messages])
        text = self._render_conversation(
            [*self._messages, _replace_with_marker(reply, mark)], messages
        )
        added = self._encode_after_marker(text, mark, "tool_calls" in reply)
        self.ids = [*self.ids, *added]
        self._messages += [reply, *messages]
        self._pending_message = None
        self._prompt_opens_reasoning = text.rstrip().endswith(THINK_START)
        return added

    def _encode_after_marker(self, text: str, mark: str, calls: bool) -> list[int]:
        """Return the ids of `text` after the marked turn, from the token that ends it on.

        A closed turn has that token already, or another one in its place. If the template closes no
        turn, the token is the marker of the next role, and stays unless the model sampled it.
        """
        tokenizer, stops = self._chat.tokenizer, self._chat.stop_ids
        _, marked, rest = text.rpartition(mark)
        if not marked:
            raise ChatFormatError("the chat template does not render the model's turn")
        places = [(at, end) for end in self._chat.stop_tokens if (at := rest.find(end)) >= 0]
        if not places:
            if calls:
                raise ChatFormatError("the chat template has no token that ends a turn with calls")
            return tokenizer.encode(rest)
        added = tokenizer.encode(rest[min(places)[0] :])
        if added[0] not in stops:
            raise ChatFormatError(
                "the tokenizer does not encode the end token of a turn as a separate token"
            )
        has_end = self._end_token_id in (
            added[0],
            *([] if self._chat.end_token_id != added[0] else stops),
        )
        return added[1:] if has_end else added

    def _render_conversation(self, before: list[Message], messages: Sequence[Message]) -> str:
        """Render the conversation with one call per earlier turn if the template supports no more.

        Llama 3.1's does not. The text after a turn does not depend on earlier calls.
        """
        rendering = self._chat.renderer
        try:
            return rendering.render([*before, *messages], self._tools, add_generation_prompt=True)
        except ChatFormatError:
            single = [
                message | {"tool_calls": calls[-1:]}
                if (calls := message.get("tool_calls"))
                else message
                for message in before
            ]
            if single == before:
                raise
            return rendering.render([*single, *messages], self._tools, add_generation_prompt=True)

    def _split_reasoning(self, text: str) -> tuple[str, str]:
        has_start = text.lstrip().startswith(THINK_START)
        if not self._chat.has_reasoning or not (has_start or self._prompt_opens_reasoning):
            return "", text
        head, closed, rest = text.partition(THINK_END)
        reasoning = head.lstrip().removeprefix(THINK_START) if has_start else head
        return reasoning.strip("\n"), rest if closed else ""

    def _assign_call_id(self, call: ParsedToolCall) -> ParsedToolCall:
        """Return the call with its id, or with an id that every template accepts."""
        self._num_calls += 1
        identity = call.id if CALL_ID_PATTERN.fullmatch(call.id) else f"call{self._num_calls:05d}"
        return replace(call, id=identity)


def _get_turn_header(prompt: str, messages: Sequence[Message]) -> str:
    """Return the template's text between the last message and the model's turn."""
    last = messages[-1].get("content") if messages else None
    text = last.strip() if isinstance(last, str) else ""
    return prompt.rpartition(text)[2] if text and text in prompt else ""


def _can_render(rendering: TemplateRenderer, message: Message) -> bool:
    """Return True if the template renders a first message with the marker or rejects it itself."""
    try:
        return TURN_MARKER in rendering.render([message], (), add_generation_prompt=True)
    except ChatFormatError:
        return True


def _find_end_token(rendering: TemplateRenderer, special: dict[str, int]) -> str:
    """Return the special token that the template writes after a turn of the model, or empty."""
    try:
        text = rendering.render(
            [PROBE_USER_MESSAGE, {"role": "assistant", "content": TURN_MARKER}],
            (),
            add_generation_prompt=False,
        )
    except ChatFormatError:
        return ""
    rest = text.rpartition(TURN_MARKER)[2]
    places = [(at, -len(token), token) for token in special if (at := rest.find(token)) >= 0]
    return min(places)[2] if places else ""


def _to_message(reply: ParsedTurn) -> Message:
    message: Message = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in reply.calls
        ]
    return message


def _make_marker(messages: Sequence[Message]) -> str:
    """Return a text that none of the messages contains."""
    content, mark = str(messages), TURN_MARKER
    while mark in content:
        mark += "s"
    return mark


def _replace_with_marker(message: Message, mark: str) -> Message:
    """Return the turn with the marker as its last words: its text, or its only call's argument."""
    calls = message.get("tool_calls")
    if not calls:
        return {"role": "assistant", "content": mark}
    called = calls[-1]["function"] | {"arguments": {"value": mark}}
    return {"role": "assistant", "content": "", "tool_calls": [calls[-1] | {"function": called}]}
