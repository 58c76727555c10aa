"""Chat formats: conversations as token ids of a model's own format, extended only by appending.

Formats are those of the `renderers` package (Prime Intellect, Apache-2.0), which implements them as
functions of token ids, or the chat template of a checkpoint (`template_format.py`). In both cases a
prompt is rendered once, a turn of the model is parsed from its ids, and the text after a turn is
appended. No token that the model has read or sampled is encoded again.
"""

from __future__ import annotations

import importlib.util
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshrl.common.base.encoding.finite_json import is_finite
from meshrl.common.base.errors import ConfigError, MeshError
from meshrl.common.model.chat.messages import Message
from meshrl.common.model.tokens.tokenizer import REASONING_WORDS, Tokenizer

TEMPLATE_FORMAT = "template"  # name of the format of a checkpoint's own chat template
SPECIAL_TOKENS_ANYWHERE = "anywhere"  # texts of messages become special tokens, too
PROBE_USER_MESSAGE: Message = {"role": "user", "content": "hello"}
PROBE_ASSISTANT_MESSAGE: Message = {"role": "assistant", "content": "hello"}
FREE_TEXT_KEYS = (
    "content",
    "text",
    "reasoning_content",
    "thinking",
    "reasoning",
)  # keys of free texts
# Errors of parsers for pathological turns, such as ten thousand brackets.
PARSE_ERRORS = (AttributeError, LookupError, RecursionError, TypeError, ValueError)


class ChatFormatError(MeshError):
    """Error of a format that cannot continue without changing earlier token ids."""

    code = "chat_broken"


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """Tool call as the model wrote it; `problem` is the reason why it is invalid, or empty."""

    name: str
    arguments: dict[str, Any]
    id: str
    problem: str = ""
    raw: str = ""  # text of the arguments


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """Parsed turn of the model."""

    content: str
    reasoning: str = ""
    calls: list[ParsedToolCall] = field(default_factory=list)


class ChatFormat(ABC):
    """Chat format over one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.stop_ids: list[int] = list(stop_ids)
        self.escapes_special_tokens = True  # special tokens in messages are plain text

    def guard_tokenizer(self) -> Tokenizer:
        """Return the tokenizer with all tokens guarded by which the format separates turns.

        These are special tokens, tokens that end a turn, and the texts around plain messages.
        """
        words = {i: t for i, t in self.tokenizer.added_words.items() if t not in REASONING_WORDS}
        try:
            written = self._render(
                [PROBE_USER_MESSAGE, PROBE_ASSISTANT_MESSAGE, PROBE_USER_MESSAGE], ()
            )
        except (MeshError, AssertionError, *PARSE_ERRORS):
            written = []  # a format that rejects this conversation: guard special tokens alone
        return self.tokenizer.with_guarded_tokens(
            words[i] for i in {*written, *self.stop_ids} & words.keys()
        )

    def escape(self, value: Any, *, is_free_text: bool = False) -> Any:
        """Return messages or tools with the special tokens of all their texts escaped.

        Texts under `FREE_TEXT_KEYS` are free; others are names that templates compare.
        """
        if not self.escapes_special_tokens:
            return value
        if isinstance(value, str):
            return self.tokenizer.escape(value, guard_edges=is_free_text)
        if isinstance(value, dict):
            return {
                self.escape(key): self.escape(value, is_free_text=key in FREE_TEXT_KEYS)
                for key, value in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.escape(part, is_free_text=is_free_text) for part in value]
        return value

    @classmethod
    def load(
        cls,
        name: str,
        options: dict[str, Any],
        tokenizer: Tokenizer,
        *,
        history: str = "keep",
        tool_call_parser: str = "auto",
        stop_tokens: Sequence[str] = (),
        date: str = "",
        special_tokens: str = TEMPLATE_FORMAT,
    ) -> ChatFormat:
        """Load the format that `renderers` calls `name`, or with the name `template` the
        tokenizer's.

        Options are such as `enable_thinking`. Of a template, `history`, `tool_call_parser`,
        `stop_tokens` and `date` are those of `TemplateFormat`. With `special_tokens = "anywhere"`,
        texts of messages become special tokens, as in templates. Raise ConfigError for an unknown
        name or option, and for a tokenizer that lacks the template or the format's special tokens.
        """
        if name == TEMPLATE_FORMAT:
            from meshrl.common.model.chat.template_format import TemplateFormat

            chat: ChatFormat = TemplateFormat(
                tokenizer,
                options,
                history=history,
                tool_call_parser=tool_call_parser,
                stop_tokens=stop_tokens,
                date=date,
            )
        else:
            chat = _RendererFormat.from_name(name, options, tokenizer)
        chat.escapes_special_tokens = special_tokens != SPECIAL_TOKENS_ANYWHERE
        return chat

    @property
    def stop_tokens(self) -> list[str]:
        """Tokens that end a turn."""
        return [t for i in self.stop_ids if (t := self.tokenizer.id_to_token(i)) is not None]

    @property
    def depends_on_date(self) -> bool:
        """True if the rendered text depends on a `date` option."""
        return False

    @property
    def tools_unsupported_reason(self) -> str:
        """Reason why the model cannot be offered tools, or empty."""
        return ""

    def start_conversation(
        self, messages: Sequence[Message], tools: Sequence[Message] = ()
    ) -> ChatConversation:
        """Start a conversation with `messages`; the model's turn is next."""
        return self._start_conversation(self.escape(list(messages)), self.escape(list(tools)))

    def encode_answer(
        self, messages: Sequence[Message], answer: Message, tools: Sequence[Message] = ()
    ) -> list[int]:
        """Encode a given turn after `messages`, with the token that ends it.

        Raise ChatFormatError if the format would not render it after the prompt of
        `start_conversation`.
        """
        escaped = self.escape(list(messages)), self.escape(answer), self.escape(list(tools))
        return self._encode_answer(*escaped)

    @abstractmethod
    def _start_conversation(
        self, messages: list[Message], tools: list[Message]
    ) -> ChatConversation:
        """Start a conversation from escaped messages and tools."""

    @abstractmethod
    def _render(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[int]:
        """Render the ids of a whole conversation of escaped messages, whatever its last role."""

    def _encode_answer(
        self, messages: list[Message], answer: Message, tools: list[Message]
    ) -> list[int]:
        prompt = self._start_conversation(messages, tools).ids
        ids = self._render([*messages, answer], tools)
        ends = [n for n in range(len(prompt), len(ids)) if ids[n] in self.stop_ids]
        if ids[: len(prompt)] != prompt or not ends:
            raise ChatFormatError("the chat format does not render this answer after its prompt")
        return ids[len(prompt) : ends[-1] + 1]


class ChatConversation(ABC):
    """Token ids of a trajectory: rendered messages and sampled turns, alternating."""

    def __init__(self, chat: ChatFormat, ids: list[int]) -> None:
        self._format = chat
        self.ids = ids

    @abstractmethod
    def append_turn(self, ids: Sequence[int]) -> ParsedTurn:
        """Append a turn of the model, complete or truncated, and return it parsed."""

    def append_messages(self, messages: Sequence[Message]) -> list[int]:
        """Append messages after the model's turn, and open its next; return the new ids.

        A truncated turn is closed first. Raise ChatFormatError if the format does not allow that.
        """
        return self._append_messages(self._format.escape(list(messages)))

    @abstractmethod
    def _append_messages(self, messages: list[Message]) -> list[int]:
        """Append escaped messages."""


class _RendererFormat(ChatFormat):
    """Format of the `renderers` package."""

    def __init__(self, renderer: Any, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, renderer.get_stop_token_ids())
        self.renderer = renderer

    @classmethod
    def from_name(cls, name: str, options: dict[str, Any], tokenizer: Tokenizer) -> _RendererFormat:
        """Create the format of a name; see `load`."""
        renderers = _import_renderers()
        known = set(renderers.base.MODEL_RENDERER_MAP.values())
        if name not in known:
            raise ConfigError(
                f"there is no chat format {name!r}",
                fix=f"Use one of {TEMPLATE_FORMAT}, {', '.join(sorted(known))}",
            )
        kind = type(renderers.config_from_name(name))
        try:
            # Earlier turns stay as they were sampled: their reasoning is not removed later.
            config = kind.model_validate({"name": name, "thinking_retention": "all", **options})
            spelling = _RendererTokenizer(tokenizer)
            renderer = renderers.create_renderer(spelling, config)
        except Exception as error:  # each format checks the tokenizer differently
            raise ConfigError(
                f"chat format {name!r}: {error}", fix="Use the chat format of the tokenizer's model"
            ) from error
        chat = cls(renderer, tokenizer)
        chat.tokenizer = spelling.tokenizer = chat.guard_tokenizer()
        return chat

    def _start_conversation(
        self, messages: list[Message], tools: list[Message]
    ) -> ChatConversation:
        ids = self.renderer.render_ids(messages, tools=tools or None, add_generation_prompt=True)
        return _RendererConversation(self, [int(i) for i in ids], tools)

    def _render(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[int]:
        ids = self.renderer.render_ids(
            list(messages), tools=list(tools) or None, add_generation_prompt=False
        )
        return [int(i) for i in ids]


class _RendererConversation(ChatConversation):
    def __init__(self, chat: _RendererFormat, ids: list[int], tools: list[Message]) -> None:
        super().__init__(chat, ids)
        self._chat = chat
        self._tools = tools
        self._prompt_length = len(ids)
        self._turn_start = len(ids)  # start of the model's last turn

    def append_turn(self, ids: Sequence[int]) -> ParsedTurn:
        before = self.ids
        self._turn_start = len(before)
        self.ids = [*before, *ids]
        try:
            parsed = self._chat.renderer.parse_response(
                list(ids), tools=self._tools or None, prompt_ids=before
            )
        except PARSE_ERRORS as error:
            return ParsedTurn(
                "", calls=[ParsedToolCall("", {}, f"call_{len(before)}", f"{error}"[:200])]
            )
        calls = [
            _convert_call(c, f"call_{len(before)}_{i}") for i, c in enumerate(parsed.tool_calls)
        ]
        reply = ParsedTurn(parsed.content or "", parsed.reasoning_content or "", calls)
        return _reparse_calls(reply, self._chat.tokenizer.decode(list(ids)))

    def _append_messages(self, messages: list[Message]) -> list[int]:
        added = self._bridge_to_next_turn(
            self.ids[: self._turn_start], self.ids[self._turn_start :], messages
        )
        # The turn's content may prevent this: the format would cut it where it first looks closed,
        # or does not close it. The text after a closed turn does not depend on earlier content.
        last = self.ids[-1:] if self.ids[-1] in self._chat.stop_ids else []
        for length in (self._prompt_length, 1):
            if added is None:
                added = self._bridge_to_next_turn(self.ids[:length], last, messages)
        if added is None:
            raise ChatFormatError(
                "the chat format cannot be continued after this turn of the model"
            )
        self.ids = [*self.ids, *added]
        self._turn_start = len(self.ids)
        return added

    def _bridge_to_next_turn(
        self, prompt: list[int], turn: list[int], messages: Sequence[Message]
    ) -> list[int] | None:
        bridged = self._chat.renderer.bridge_to_next_turn(
            prompt, turn, list(messages), tools=self._tools or None
        )
        if bridged is None:
            return None
        earlier = prompt + turn
        ids = [int(i) for i in bridged.token_ids]
        return ids[len(earlier) :] if ids[: len(earlier)] == earlier else None


class _RendererTokenizer:
    """Tokenizer with the interface of `renderers`: no special tokens are added or dropped."""

    unk_token_id = None
    eos_token_id = None
    name_or_path = ""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, token_ids: Any, *_: Any, **__: Any) -> str:
        return self.tokenizer.decode([token_ids] if isinstance(token_ids, int) else token_ids)

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        if isinstance(tokens, str):
            return self.tokenizer.token_to_id(tokens)
        return [self.tokenizer.token_to_id(t) for t in tokens]


def _reparse_calls(reply: ParsedTurn, text: str) -> ParsedTurn:
    """Parse calls from the text if `renderers` could not parse one from its ids.

    A tag inside a string of a call's JSON is the same token as the tag that ends the call.
    """
    from meshrl.common.model.chat.tool_call_parsers import parse_hermes

    if not any(call.problem for call in reply.calls):
        return reply
    answer_text = text.partition("</think>")[2] if reply.reasoning else text
    written = parse_hermes(answer_text)
    if not written.calls or any(call.problem for call in written.calls):
        return reply
    first = reply.calls[0].id.rpartition("_")[0]
    calls = [replace(c, id=c.id or f"{first}_{i}") for i, c in enumerate(written.calls)]
    return ParsedTurn(written.content.strip(), reply.reasoning, calls)


def _convert_call(parsed: Any, identity: str) -> ParsedToolCall:
    """Convert one attempt at a call; a parse error becomes a problem that the model receives."""
    name, arguments = parsed.name, parsed.arguments
    problem = "" if parsed.status == "ok" else str(parsed.status).replace("_", " ")
    if not problem and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            problem = "invalid json"
    arguments = {} if arguments is None else arguments
    if not problem and not is_finite(arguments):
        problem = "a number of its arguments is not finite"
    if not problem and not (isinstance(name, str) and isinstance(arguments, dict)):
        problem = "a call is a name and an object of arguments"
    return ParsedToolCall(
        name if isinstance(name, str) else "",
        arguments if isinstance(arguments, dict) else {},
        parsed.id or identity,
        problem,
        parsed.raw,
    )


def detect_format(model: Path, tokenizer: Path | None = None) -> str:
    """Return the chat format of a Hugging Face model directory.

    It is the name in `renderers` of the published model, or else the template beside `tokenizer` or
    in it. The published name is in the path (`.../Qwen/Qwen3-8B`, or the Hub's cache) or in
    config.json.
    """
    from meshrl.common.model.chat.template_files import has_template

    templated = has_template(tokenizer.parent if tokenizer else model)
    if templated and importlib.util.find_spec("renderers") is None:
        return TEMPLATE_FORMAT
    published = _import_renderers().base.MODEL_RENDERER_MAP
    parts = model.parts
    names = ["/".join(parts[i : i + 2]) for i in range(len(parts) - 1) if "--" not in parts[i]] + [
        part.removeprefix("models--").replace("--", "/") for part in parts
    ]
    config = model / "config.json"
    if config.is_file():
        names.append(str(json.loads(config.read_text(encoding="utf-8")).get("_name_or_path", "")))
    for name in names:
        if name in published:
            return str(published[name])
    if templated:
        return TEMPLATE_FORMAT
    known = ", ".join(sorted(set(published.values())))
    raise ConfigError(
        f"the chat format of {model} is unknown, and its tokenizer has no chat template",
        fix=f"Set environment.chat to one of: {known}",
    )


def _import_renderers() -> Any:
    try:
        import renderers
        import renderers.base
    except ImportError as error:
        raise ConfigError(
            "chat formats need the package renderers, which is not installed",
            fix="Run `pip install 'meshrl[chat]'`",
        ) from error
    return renderers
