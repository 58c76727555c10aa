"""Conversations in a checkpoint's own chat template, to which turns only append.

A template writes whole conversations, from texts. What follows a turn is found by rendering the
conversation with that turn replaced by a mark: what the template writes after the mark, from the
token that ends the turn on, is encoded and appended. So ids that were sampled stay as they are,
even where the template would write them otherwise later (`history`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.chat.calls import AUTO, NONE, PARSERS, Written, parser_of
from meshrl.common.model.chat.chat import (
    ASKED,
    UNREADABLE,
    Chat,
    ChatBroken,
    ChatConversation,
    ParsedCall,
    Reply,
)
from meshrl.common.model.chat.files import chat_files
from meshrl.common.model.chat.messages import Message
from meshrl.common.model.chat.rendering import Rendering
from meshrl.common.model.tokens.tokenizer import Tokenizer

KEEP, REFUSE = "keep", "refuse"
MARK = "MeshRLmarksthisturn"
THINK, THOUGHT = "<think>", "</think>"
IDENTITY = re.compile("[a-zA-Z0-9]{9}")  # ids of calls that Mistral's templates take
TOOL: Message = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}


class TemplateChat(Chat):
    """The chat template in the directory of a tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: dict[str, Any],
        *,
        history: str = KEEP,
        parser: str = AUTO,
        ends: Sequence[str] = (),
        date: str = "",
    ) -> None:
        """`history`: where the template would write earlier turns otherwise, `keep` what was
        sampled, or `refuse` to go on. `parser`: how tool calls are read, one of `PARSERS`; auto: by
        the template's text. `ends`: tokens that end a turn beside the template's. `date`: the
        day that it is to the template, as 2026-11-22; empty: today.

        ConfigError when there is no template, or one that leaves out texts, or nothing that ends
        a turn.
        """
        if tokenizer.file is None:
            raise ConfigError("a chat template is read beside a tokenizer.json")
        files = chat_files(tokenizer.file.parent)
        self.rendering = Rendering(files, options, date)
        self.history = history
        self.parser = parser_of(self.rendering.source(tools=True)) if parser == AUTO else parser
        self._untaught = parser == AUTO and self.parser == NONE
        self.reasons = THOUGHT in self.rendering.source(tools=True)
        if not _writes(self.rendering, ASKED | {"content": MARK}):
            raise ConfigError(
                "the chat template leaves out messages whose content is a text",
                where=str(files.directory),
                fix="use a template for text; those for images take lists of parts",
            )
        special = tokenizer.special_tokens
        own = _end(self.rendering, special)
        self.end = tokenizer.token_to_id(own)  # by which the template closes a turn; None: by none
        texts = dict.fromkeys([own or files.special_tokens.get("eos_token", ""), *ends])
        found = [i for text in texts if text and (i := tokenizer.token_to_id(text)) is not None]
        if not found:
            raise ConfigError(
                "the chat template writes no token that ends a turn",
                where=str(files.directory),
                fix="name one in rollout.stop",
            )
        super().__init__(tokenizer, found)
        self.tokenizer = self.guard()

    @property
    def dated(self) -> bool:
        """Whether what the template writes depends on the day."""
        return self.rendering.dated

    @cached_property
    def tool_problem(self) -> str:
        """Why the model cannot be offered tools; empty: it can."""
        try:
            bare, told = (
                self.rendering.text([ASKED], tools, generate=True) for tools in ([], [TOOL])
            )
        except ChatBroken as error:
            return error.message
        if bare == told:
            return "the chat template tells the model of no tools"
        if self._untaught:
            return "nobody knows how the chat template has tools called"
        return ""

    def _begin(self, messages: list[Message], tools: list[Message]) -> ChatConversation:
        """The template's rendering of `messages`; ChatBroken when it does not take them, or would
        not tell the model of `tools`.
        """
        if tools and (problem := self.tool_problem):
            raise ChatBroken(problem, fix=TOOL_FIX)
        text = self.rendering.text(messages, tools, generate=True)
        return _TemplateConversation(self, self.tokenizer.encode(text), text, messages, tools)

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[int]:
        return self.tokenizer.encode(self.rendering.text(messages, tools, generate=False))

    def _answer(self, messages: list[Message], answer: Message, tools: list[Message]) -> list[int]:
        """The ids of a given turn after `messages`, up to the first token that ends it; ChatBroken
        when the template would not write it after the prompt that `begin` renders.
        """
        prompt = self.rendering.text(messages, tools, generate=True)
        whole = self.rendering.text([*messages, answer], tools, generate=False)
        if not whole.startswith(prompt):
            # Templates that write a system message beside the last turn of a user's move it.
            mark = _mark(messages)
            bare = self.rendering.text([*messages, _marked(answer, mark)], tools, generate=False)
            before, head = bare.partition(mark)[0], _head(prompt, messages)
            if not head or not before.endswith(head) or not whole.startswith(before):
                raise ChatBroken("the chat template does not write this answer after its prompt")
            prompt, whole = head, head + whole[len(before) :]
        ids, start = self.tokenizer.encode(whole), self.tokenizer.encode(prompt)
        ends = [n for n in range(len(start), len(ids)) if ids[n] in self.stop_ids]
        if ids[: len(start)] != start or not ends:
            raise ChatBroken("the chat template does not write this answer after its prompt")
        return ids[len(start) : ends[0] + 1]


TOOL_FIX = (
    "offer no tools, take a model whose template has them, or name environment.tool_call_parser"
)


class _TemplateConversation(ChatConversation):
    def __init__(
        self,
        chat: TemplateChat,
        ids: list[int],
        text: str,
        messages: Sequence[Message],
        tools: Sequence[Message],
    ) -> None:
        super().__init__(chat, ids)
        self._chat = chat
        self._tools = list(tools)
        self._messages = list(messages)  # all up to the model's open turn
        self._reply: Message | None = None  # that turn, once it is sampled
        self._thinking = text.rstrip().endswith(THINK)  # the prompt has begun it
        self._calls = 0
        self._closed_by = -1  # the token that ended that turn; -1: it was cut short

    def sampled(self, ids: Sequence[int]) -> Reply:
        stops = self._chat.stop_ids
        self.ids = [*self.ids, *ids]
        said = list(ids)
        self._closed_by = said.pop() if said and said[-1] in stops else -1
        reasoning, text = self._thought(self._chat.tokenizer.decode(said))
        written = Written(text)
        if self._tools or self._chat.parser != "llama3_json":  # whose calls may be plain JSON
            try:
                written = PARSERS[self._chat.parser](text)
            except UNREADABLE as error:
                written = Written("", [ParsedCall("", {}, "", f"{error}"[:200], text)])
        calls = [self._numbered(call) for call in written.calls]
        reply = Reply(written.content.strip(), reasoning, calls)
        self._reply = self._chat.quoted(_message(reply))
        return reply

    def _extend(self, messages: list[Message]) -> list[int]:
        if self._reply is None:
            raise ChatBroken("the model has not had its turn")
        chat, reply = self._chat, self._reply
        if chat.history == REFUSE:
            conversation, tools = [*self._messages, reply], self._tools
            before = chat.rendering.text(conversation, tools, generate=False)
            ends = [(at, end) for end in chat.stop_tokens if (at := before.rfind(end)) >= 0]
            past = before[: max(ends)[0]] if ends else before
            after = chat.rendering.text([*conversation, *messages], tools, generate=True)
            if not after.startswith(past):
                raise ChatBroken(
                    "the chat template writes an earlier turn otherwise now than it was sampled, "
                    "as those do that drop its reasoning",
                    fix='set environment.chat_history = "keep" to go on with what was sampled',
                )
        mark = _mark([*self._messages, *messages])
        text = self._after([*self._messages, _marked(reply, mark)], messages)
        added = self._follows(text, mark, "tool_calls" in reply)
        self.ids = [*self.ids, *added]
        self._messages += [reply, *messages]
        self._reply = None
        self._thinking = text.rstrip().endswith(THINK)
        return added

    def _follows(self, text: str, mark: str, calls: bool) -> list[int]:
        """The ids of what `text` has after the marked turn: from the token that ends it on.

        A closed turn has that token already, or another one in its place. Where the template closes
        no turn, the token is the mark of the next role, and stays unless the model sampled it.
        """
        tokenizer, stops = self._chat.tokenizer, self._chat.stop_ids
        _, marked, rest = text.rpartition(mark)
        if not marked:
            raise ChatBroken("the chat template does not write the model's turn")
        places = [(at, end) for end in self._chat.stop_tokens if (at := rest.find(end)) >= 0]
        if not places:
            if calls:
                raise ChatBroken("the chat template writes no token that ends a turn with calls")
            return tokenizer.encode(rest)
        added = tokenizer.encode(rest[min(places)[0] :])
        if added[0] not in stops:
            raise ChatBroken("the tokenizer does not encode the token that ends a turn by itself")
        has_end = self._closed_by in (added[0], *([] if self._chat.end != added[0] else stops))
        return added[1:] if has_end else added

    def _after(self, before: list[Message], messages: Sequence[Message]) -> str:
        """The conversation, its earlier turns with one call each where the template takes no more
        (Llama 3.1): what follows a turn does not depend on them."""
        rendering = self._chat.rendering
        try:
            return rendering.text([*before, *messages], self._tools, generate=True)
        except ChatBroken:
            single = [
                said | {"tool_calls": calls[-1:]} if (calls := said.get("tool_calls")) else said
                for said in before
            ]
            if single == before:
                raise
            return rendering.text([*single, *messages], self._tools, generate=True)

    def _thought(self, text: str) -> tuple[str, str]:
        begun = text.lstrip().startswith(THINK)
        if not self._chat.reasons or not (begun or self._thinking):
            return "", text
        head, closed, rest = text.partition(THOUGHT)
        reasoning = head.lstrip().removeprefix(THINK) if begun else head
        return reasoning.strip("\n"), rest if closed else ""

    def _numbered(self, call: ParsedCall) -> ParsedCall:
        """The call with the id that it was given, or with one that every template takes."""
        self._calls += 1
        identity = call.id if IDENTITY.fullmatch(call.id) else f"call{self._calls:05d}"
        return replace(call, id=identity)


def _head(prompt: str, messages: Sequence[Message]) -> str:
    """What the template writes between the last message and the model's turn."""
    last = messages[-1].get("content") if messages else None
    text = last.strip() if isinstance(last, str) else ""
    return prompt.rpartition(text)[2] if text and text in prompt else ""


def _writes(rendering: Rendering, message: Message) -> bool:
    """Whether the template writes a first message that holds the mark, or refuses it by itself."""
    try:
        return MARK in rendering.text([message], (), generate=True)
    except ChatBroken:
        return True


def _end(rendering: Rendering, special: dict[str, int]) -> str:
    """The special token that the template writes after a turn of the model; empty: none."""
    try:
        text = rendering.text([ASKED, {"role": "assistant", "content": MARK}], (), generate=False)
    except ChatBroken:
        return ""
    rest = text.rpartition(MARK)[2]
    places = [(at, -len(token), token) for token in special if (at := rest.find(token)) >= 0]
    return min(places)[2] if places else ""


def _message(reply: Reply) -> Message:
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


def _mark(messages: Sequence[Message]) -> str:
    """A text that none of the messages holds."""
    said, mark = str(messages), MARK
    while mark in said:
        mark += "s"
    return mark


def _marked(message: Message, mark: str) -> Message:
    """The turn with the mark as its last words: its text, or the argument of its only call."""
    calls = message.get("tool_calls")
    if not calls:
        return {"role": "assistant", "content": mark}
    called = calls[-1]["function"] | {"arguments": {"value": mark}}
    return {"role": "assistant", "content": "", "tool_calls": [calls[-1] | {"function": called}]}
