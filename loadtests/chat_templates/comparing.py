"""Conversations in a chat template, by ours and by `transformers`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from meshrl.common.model.chat.chat_format import ChatFormat, ChatFormatError
from meshrl.common.model.chat.messages import Message
from meshrl.common.model.tokens.tokenizer import Tokenizer

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}  # where the template writes none of its own
ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "</s>", "<|return|>")
MARKS = re.compile(  # texts like special tokens
    r"<\|?[a-zA-Z_▁｜/]+\|?>|<｜[^｜]+｜>|\[/?[A-Z_]{4,}\]|<\|[^|<>\s]+\|>|\[\|[a-z]+\|\]"
)
PLAIN = (  # and is a token that is not special, as in Qwen's tokenizers
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
OUTCOMES = ("equal", "kept", "unread", "refused", "unequal")  # a conversation: as its worst step
MESSAGES: dict[str, Message] = json.loads(Path(__file__).with_name("messages.json").read_text())
SYSTEM, USER, ANSWER, AGAIN, ADD, CALL, VALUE = MESSAGES.values()
CONVERSATIONS: dict[str, tuple[list[Message], list[Message], list[Message]]] = {
    # name: tools, the prompt, then a turn of the model and what follows it, and so on
    "prompt": ([], [USER], []),
    "system": ([], [SYSTEM, USER], [ANSWER, AGAIN]),
    "turns": ([], [USER], [ANSWER, AGAIN, ANSWER, USER]),
    "tools": ([ADD], [USER], [CALL, VALUE, ANSWER, AGAIN]),
}


def directory_of(template: str, place: Path) -> Path:
    """Write a tokenizer of bytes with the template and its special tokens to `place`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    marks = dict.fromkeys([*NAMED.values(), *MARKS.findall(template)])
    special = [AddedToken(m, special=True, normalized=False) for m in marks if m not in PLAIN]
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(m, special=False, normalized=False) for m in PLAIN])
    place.mkdir(parents=True, exist_ok=True)
    backend.save(str(place / "tokenizer.json"))
    end = next((e for e in ENDS if e in template), NAMED["eos_token"])
    named = NAMED | {"eos_token": end, "tokenizer_class": "PreTrainedTokenizerFast"}
    (place / "tokenizer_config.json").write_text(json.dumps(named))
    (place / "chat_template.jinja").write_text(template, encoding="utf-8")
    return place


def compared(directory: Path, options: dict[str, Any] | None = None) -> dict[str, str]:
    """Return the outcome of each conversation: equal, kept, refused, or the unequal part."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(directory)
    chat = ChatFormat.load("template", options or {}, Tokenizer.load(directory))
    found = {}
    for name, (tools, prompt, rest) in CONVERSATIONS.items():
        if tools and chat.tools_unsupported_reason:
            found[name] = f"refused: {chat.tools_unsupported_reason}"
            continue
        try:
            outcomes = list(_compare_turns(chat, theirs, tools, prompt, rest, options or {}))
        except ChatFormatError as error:
            outcomes = [f"refused: {error.message[:120]}"]
        found[name] = max(outcomes, key=lambda outcome: OUTCOMES.index(outcome.partition(":")[0]))
    return found


def _compare_turns(
    chat: ChatFormat,
    theirs: Any,
    tools: list[Message],
    messages: list[Message],
    rest: list[Message],
    options: dict[str, Any],
) -> Iterator[str]:
    """Yield the outcome of each step of a conversation whose turns come from the template."""

    def encode_all(said: list[Message]) -> list[int]:
        given: dict[str, Any] = {"tools": tools or None, "add_generation_prompt": True}
        encoded = theirs.apply_chat_template(said, **given, **options)
        ids: list[int] = encoded["input_ids"]
        return ids

    conversation = chat.start_conversation(messages, tools)
    yield "equal" if conversation.ids == encode_all(messages) else "unequal: the prompt"
    for turn, message in zip(rest[::2], rest[1::2], strict=True):
        before = list(conversation.ids)
        try:
            ids = chat.encode_answer(messages, turn, tools)
        except ChatFormatError:  # its prompt begins the turn otherwise, such as with reasoning
            if turn is CALL:
                raise
            thinks = chat.tokenizer.decode(before).rstrip().endswith("<think>")
            said = ("Easy.\n</think>\n\n" if thinks else "") + turn["content"]
            ids = chat.tokenizer.encode(said + chat.stop_tokens[0])
        reply = conversation.append_turn(ids)
        if turn is CALL:
            call = CALL["tool_calls"][0]["function"]
            if [(c.name, c.arguments, c.problem) for c in reply.calls] != [
                (call["name"], call["arguments"], "")
            ]:
                yield f"unread: the call was read as {reply}"
        elif reply.content != turn["content"]:
            yield f"unread: the turn was read as {reply}"
        added = conversation.append_messages([message])
        if conversation.ids != before + ids + added:
            yield "unequal: earlier ids changed"
        messages = [*messages, turn, message]
        expected = encode_all(messages)
        if conversation.ids == expected:
            yield "equal"
        else:
            kept = expected[-len(added) :] == added
            yield "kept" if kept else f"unequal: after {message['role']}"
