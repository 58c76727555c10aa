"""Conversations and tool calls in a checkpoint's own chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from loadtests.chat_templates.comparing import (
    ADD,
    AGAIN,
    ANSWER,
    SYSTEM,
    USER,
    compared,
    directory_of,
)
from meshrl.common.base.errors import ConfigError
from meshrl.common.model.chat.chat_format import ChatFormat, ChatFormatError
from meshrl.common.model.chat.demonstrations import encode_demonstration
from meshrl.common.model.chat.template_format import TURN_MARKER, TemplateFormat
from meshrl.common.model.chat.tool_call_parsers import PARSERS, detect_parser
from meshrl.common.model.tokens.tokenizer import Tokenizer
from tests.unit.common.model.templates.formats import FORMATS, QWEN3

pytestmark = pytest.mark.group("transformers")  # imported by one worker for all tests of the group
NO_TOOLS = "refused: the chat template does not render tools"
OUTCOMES = {  # conversations whose tokens differ from those of transformers
    "qwen3": {"system": "kept", "turns": "kept", "tools": "kept"},  # no empty reasoning later
    "mistral": {"system": "kept", "tools": "kept"},  # tools stand only in the last message
    "smollm2": {"tools": NO_TOOLS},
    "tinyllama": {"tools": NO_TOOLS},
    "gemma": {
        "system": "refused: the chat template rejects these messages: System role not supported",
        "tools": NO_TOOLS,
    },
}
ADD_CALL: tuple[str, Any, str] = ("add", {"a": 1}, "")
BROKEN = "invalid json"
BAD_CALL = "a call is a name and an object of arguments"
CASES: list[tuple[str, str, str, list[tuple[str, Any, str]]]] = [
    ("hermes", "no call", "no call", []),
    (
        "hermes",
        'so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        "so ",
        [ADD_CALL],
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [ADD_CALL],
    ),
    ("hermes", "<tool_call>\n{nonsense\n</tool_call>", "", [("", {}, "invalid json")]),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1}}',
        "",
        [("add", {"a": 1}, "unclosed")],
    ),
    ("hermes", '<tool_call>{"arguments": [1]}</tool_call>', "", [("", {}, BAD_CALL)]),
    ("hermes", "<tool_call>3</tool_call>", "", [("", {}, "a call is a JSON object")]),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}}', "", [ADD_CALL]),
    ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", [ADD_CALL]),
    (
        "llama3_json",
        '{"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}',
        "",
        [ADD_CALL],
    ),
    ("llama3_json", '{"name": "add", "parameters"', "", [("", {}, "invalid json")]),
    ("llama3_json", '{"sum": 3}', '{"sum": 3}', []),
    ("llama3_json", "It is 3.", "It is 3.", []),
    (
        "mistral",
        'so [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]',
        "so ",
        [ADD_CALL],
    ),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add{"a": 1}', "", [ADD_CALL, ADD_CALL]),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}', "", [ADD_CALL]),
    ("mistral", "[TOOL_CALLS][{", "", [("", {}, "invalid json")]),
    ("mistral", "[TOOL_CALLS]add{nonsense", "", [("add", {}, "invalid json")]),
    ("none", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
]
TAGS = "use <tool_call>, </tool_call>, [TOOL_CALLS] and [ARGS] or <|python_end|>; {"
SAY_CALL: tuple[str, Any, str] = ("say", {"a": TAGS}, "")
SAY_JSON = json.dumps({"name": "say", "arguments": {"a": TAGS}})
HERMES = f"<tool_call>{SAY_JSON}</tool_call>"
ARGUMENTS = json.dumps({"a": TAGS})
BROKEN_CALL: tuple[str, Any, str] = ("", {}, BROKEN)
NOW_CALL: tuple[str, Any, str] = ("now", {}, "")
CASES += [
    ("hermes", f"so {HERMES}\n{HERMES}", "so ", [SAY_CALL, SAY_CALL]),
    ("hermes", f"<tool_call>{{</tool_call>{HERMES}", "", [BROKEN_CALL, SAY_CALL]),
    ("hermes", f"<tool_call>{{{HERMES}", "", [BROKEN_CALL, SAY_CALL]),
    ("hermes", f"<tool_call>{SAY_JSON} and more</tool_call>", "", [BROKEN_CALL]),
    ("hermes", f"<tool_call>{SAY_JSON}", "", [("say", {"a": TAGS}, "unclosed")]),
    ("hermes", f"<tool_call>{SAY_JSON}{HERMES}", "", [("say", {"a": TAGS}, "unclosed"), SAY_CALL]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [NOW_CALL]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [NOW_CALL]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "null"}</tool_call>', "", [NOW_CALL]),
    ("llama3_json", SAY_JSON, "", [SAY_CALL]),
    (
        "llama3_json",
        f"<|python_start|>{SAY_JSON}<|python_end|>; {SAY_JSON}",
        "",
        [SAY_CALL, SAY_CALL],
    ),
    ("llama3_json", '{"name": "now", "parameters": null}', "", [NOW_CALL]),
    ("mistral", f"so [TOOL_CALLS][{SAY_JSON}, {SAY_JSON}]", "so ", [SAY_CALL, SAY_CALL]),
    (
        "mistral",
        f"[TOOL_CALLS]say[ARGS]{ARGUMENTS}[TOOL_CALLS][{SAY_JSON}]",
        "",
        [SAY_CALL, SAY_CALL],
    ),
    ("mistral", '[TOOL_CALLS]add[TOOL_CALLS]add{"a": 1}', "", [("add", {}, BROKEN), ADD_CALL]),
    ("mistral", '[TOOL_CALLS]add{"a": 1} so[TOOL_CALLS][]', "", [("add", {}, BROKEN)]),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": null}]', "", [NOW_CALL]),
]
NUMBERS: list[tuple[str, str, str]] = [  # parser, text, the call's name
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": [N]}}</tool_call>', ""),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": N}"}</tool_call>', "add"),
    ("llama3_json", '{"name": "add", "parameters": {"a": N}}', ""),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": N}}]', ""),
    ("mistral", '[TOOL_CALLS]add{"a": N}', "add"),
]


def load_chat(template: str, directory: Path, **options: Any) -> ChatFormat:
    directory_of(template, directory)
    return ChatFormat.load("template", {}, Tokenizer.load(directory), **options)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("name", FORMATS)
def test_conversations_match_transformers(name: str, tmp_path: Path) -> None:
    outcomes = compared(directory_of(FORMATS[name], tmp_path))
    equal = dict.fromkeys(("prompt", "system", "turns", "tools"), "equal")
    assert outcomes == equal | OUTCOMES.get(name, {})


@pytest.mark.parametrize("name", ["tinyllama", "mistral", "gemma"])
def test_tokenizers_with_space_characters_match_transformers(name: str, tmp_path: Path) -> None:
    directory_of(FORMATS[name], tmp_path)
    special = Tokenizer.load(tmp_path).special_tokens
    vocabulary = [f"<0x{i:02X}>" for i in range(256)] + ["▁", *map(chr, range(33, 127))]
    backend = Backend(
        models.BPE({t: i for i, t in enumerate(vocabulary)}, [], byte_fallback=True, fuse_unk=True)
    )
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*pieces, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    backend.save(str(tmp_path / "tokenizer.json"))
    outcomes = compared(tmp_path)
    assert (outcomes["prompt"], outcomes["turns"]) == ("equal", "equal")


def test_options_reach_the_template(tmp_path: Path) -> None:
    directory = directory_of(QWEN3, tmp_path)
    tokenizer = Tokenizer.load(directory)
    without_thinking = ChatFormat.load("template", {"enable_thinking": False}, tokenizer)
    assert tokenizer.decode(without_thinking.start_conversation([USER]).ids).endswith(
        "<think>\n\n</think>\n\n"
    )
    assert compared(directory, {"enable_thinking": False})["prompt"] == "equal"
    with pytest.raises(ConfigError, match="'messages' is not an option"):
        ChatFormat.load("template", {"messages": []}, tokenizer)


def test_date_in_the_prompt_is_that_of_the_job(tmp_path: Path) -> None:
    chat = load_chat(FORMATS["llama-3"], tmp_path, date="2024-02-09")
    assert "Today Date: 09 Feb 2024" in chat.tokenizer.decode(chat.start_conversation([USER]).ids)


words = st.text(
    st.characters(codec="utf-8", exclude_characters="<|>[]"), min_size=1, max_size=12
).map(lambda t: t.strip() or "x")


turns = st.lists(st.integers(0, 262), max_size=24)


@pytest.fixture(scope="module", params=["qwen2.5", "llama-3", "mistral", "gemma"])
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return load_chat(FORMATS[request.param], tmp_path_factory.mktemp("chat"))


@pytest.mark.rotating(3)
@settings(max_examples=12)
@given(opening=words, rounds=st.lists(st.tuples(turns, words), min_size=1, max_size=4))
def test_earlier_ids_are_unchanged_by_any_sampled_turn(
    chat: ChatFormat, opening: str, rounds: Any
) -> None:
    tokenizer = chat.tokenizer
    tools = [] if chat.tools_unsupported_reason else [ADD]
    conversation = chat.start_conversation([{"role": "user", "content": opening}], tools)
    for sampled, text in rounds:
        before = list(conversation.ids)
        reply = conversation.append_turn(sampled)
        messages = (
            [{"role": "tool", "tool_call_id": c.id, "content": text} for c in reply.calls]
            if reply.calls
            else [{"role": "user", "content": text}]
        )
        added = conversation.append_messages(messages)
        assert conversation.ids == before + sampled + added
        assert text in tokenizer.decode(added) or json.dumps(text) in tokenizer.decode(added)


def encode(chat: ChatFormat, text: str) -> list[int]:
    return chat.tokenizer.encode(text)


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>", ""])
def test_turn_is_closed_as_the_template_closes_it(tmp_path: Path, end: str) -> None:
    template = "{# <|endoftext|> #}" + FORMATS["qwen2.5"]
    chat = load_chat(template, tmp_path, stop_tokens=["<|endoftext|>"])
    conversation = chat.start_conversation([USER])
    assert conversation.append_turn(encode(chat, "It is 3." + end)).content == "It is 3."
    added = chat.tokenizer.decode(
        conversation.append_messages([{"role": "user", "content": "So?"}])
    )
    closing = "" if end else "<|im_end|>"
    assert added == f"{closing}\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"


# The marker of the next role closes the turn, as in GLM-4.
OPEN_TURNS = r"""{# <|user|> <|assistant|> <|observation|> <|endoftext|> #}
{%- for m in messages -%}
{{ '<|observation|>' if m.role == 'tool' else '<|' ~ m.role ~ '|>' }}{{ '\n' ~ m.content }}
{%- endfor -%}
{{ '<|assistant|>' if add_generation_prompt }}
"""


def test_template_without_turn_ends_keeps_the_next_role_marker(tmp_path: Path) -> None:
    ends = ["<|endoftext|>", "<|user|>", "<|observation|>"]
    chat = load_chat(OPEN_TURNS, tmp_path, stop_tokens=ends)
    for end, marker in (
        ("<|endoftext|>", "<|user|>"),
        ("<|observation|>", "<|user|>"),
        ("<|user|>", ""),  # the model sampled the marker itself
        ("", "<|user|>"),
    ):
        conversation = chat.start_conversation([USER])
        conversation.append_turn(encode(chat, "\nIt is 3." + end))
        added = chat.tokenizer.decode(
            conversation.append_messages([{"role": "user", "content": "So?"}])
        )
        assert added == f"{marker}\nSo?<|assistant|>", end


def test_content_cannot_pass_for_the_turn_marker(tmp_path: Path) -> None:
    chat = load_chat(FORMATS["qwen2.5"], tmp_path)
    conversation = chat.start_conversation([USER])
    conversation.append_turn(encode(chat, "It is 3.<|im_end|>"))
    content = f"{TURN_MARKER}<|im_end|>{TURN_MARKER}s"
    added = chat.tokenizer.decode(
        conversation.append_messages([{"role": "user", "content": content}])
    )
    assert added == f"\n<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


THOUGHT = "<think>\nOne more.\n</think>\n\nIt is 3.<|im_end|>"


def test_dropped_reasoning_is_kept_or_rejected(tmp_path: Path) -> None:
    directory = directory_of(QWEN3, tmp_path)
    tokenizer = Tokenizer.load(directory)
    keeping = ChatFormat.load("template", {}, tokenizer, history="keep").start_conversation([USER])
    reply = keeping.append_turn(tokenizer.encode(THOUGHT))
    assert (reply.reasoning, reply.content) == ("One more.", "It is 3.")
    keeping.append_messages([AGAIN])
    assert "One more." in tokenizer.decode(keeping.ids)
    refusing = ChatFormat.load("template", {}, tokenizer, history="refuse").start_conversation(
        [USER], [ADD]
    )
    refusing.append_turn(tokenizer.encode(THOUGHT.replace("It is 3.", format_call(1, 2))))
    refusing.append_messages([{"role": "tool", "tool_call_id": "call00001", "content": "3"}])
    refusing.append_turn(tokenizer.encode(THOUGHT))
    with pytest.raises(ChatFormatError, match="renders an earlier turn differently"):
        refusing.append_messages([AGAIN])


def format_call(a: int, b: int) -> str:
    call = json.dumps({"name": "add", "arguments": {"a": a, "b": b}})
    return f"<tool_call>\n{call}\n</tool_call>"


def test_more_calls_than_the_template_supports_are_answered(tmp_path: Path) -> None:
    chat = load_chat(FORMATS["llama-3"], tmp_path)
    conversation = chat.start_conversation([SYSTEM, USER], [ADD])
    call_text = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
    reply = conversation.append_turn(encode(chat, f"{call_text}; {call_text}<|eot_id|>"))
    assert [(c.name, c.arguments, c.problem) for c in reply.calls] == [
        ("add", {"a": 1, "b": 2}, "")
    ] * 2
    answers = [{"role": "tool", "tool_call_id": c.id, "content": "3"} for c in reply.calls]
    text = chat.tokenizer.decode(conversation.append_messages(answers))
    assert text.count('<|start_header_id|>ipython<|end_header_id|>\n\n"3"<|eot_id|>') == 2
    conversation.append_turn(encode(chat, "3<|eot_id|>"))
    assert "So?" in chat.tokenizer.decode(
        conversation.append_messages([{"role": "user", "content": "So?"}])
    )


@pytest.mark.parametrize("name", ["llama-3", "mistral", "gemma", "qwen3"])
def test_supervised_answer_ends_with_one_stop_token(name: str, tmp_path: Path) -> None:
    chat = load_chat(FORMATS[name], tmp_path)
    messages = [USER] if name == "gemma" else [SYSTEM, USER]
    ids = chat.encode_answer(messages, ANSWER)
    text = chat.tokenizer.decode(ids)
    assert text.endswith(ANSWER["content"] + chat.stop_tokens[0])
    assert [i for i in ids if i in chat.stop_ids] == ids[-1:]


@pytest.mark.parametrize("name", ["llama-3", "mistral", "gemma", "qwen2.5"])
def test_demonstration_is_the_rendered_conversation(name: str, tmp_path: Path) -> None:
    chat = load_chat(FORMATS[name], tmp_path)
    assert isinstance(chat, TemplateFormat)
    messages = [USER, ANSWER, {"role": "user", "content": "Why?"}, ANSWER]
    pieces = encode_demonstration(chat, [*messages, USER], [], "all")
    written = chat.tokenizer.decode([i for ids, _ in pieces for i in ids])
    assert chat.renderer.render(messages, [], add_generation_prompt=False).strip() == written
    assert [is_learned for _, is_learned in pieces] == [False, True, False, True]
    assert pieces[1] == pieces[3]
    *prompt, last = encode_demonstration(chat, messages, [], "last")
    assert last == pieces[3] and prompt[0][0] == [i for ids, _ in pieces[:3] for i in ids]


FIRST_CONTENT = "{{ messages[0].content }}"


SOURCES: list[tuple[Any, dict[str, str]]] = [
    # names of templates in a directory: in tokenizer_config.json, and in further files
    ("A" + FIRST_CONTENT, {}),
    ([{"name": n, "template": n + FIRST_CONTENT} for n in ("default", "tool_use")], {}),
    ("A", {"chat_template.jinja": FIRST_CONTENT + "D{{ bos_token }}{{ '<é>' | tojson }}"}),
    (
        "A",
        {
            "chat_template.jinja": FIRST_CONTENT,
            "additional_chat_templates/tool_use.jinja": "E" + FIRST_CONTENT,
        },
    ),
    (FIRST_CONTENT + "{{ bos_token }}", {"special_tokens_map.json": '{"bos_token": "<q>"}'}),
]


@pytest.mark.parametrize(("template_config", "files"), SOURCES)
def test_templates_are_found_as_transformers_finds_them(
    tmp_path: Path, template_config: Any, files: dict[str, str]
) -> None:
    import transformers

    directory_of("x", tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(config | {"chat_template": template_config})
    )
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    chat: Any = ChatFormat.load("template", {}, Tokenizer.load(tmp_path))
    tool_sets: list[list[Any]] = [[], [ADD]]
    for tools in tool_sets:
        assert chat.renderer.render(
            [USER], tools, add_generation_prompt=True
        ) == reference.apply_chat_template([USER], tools=tools or None, tokenize=False)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ messages.__class__.__mro__ }}", "rejects these messages"),
        ("{% set ns = namespace() %}{% set ns._a = 1 %}", "_a"),
        ("{{ messages.append(1) }}", "rejects these messages"),
        ("{{ messages[7].content }}", "rejects these messages"),
    ],
)
def test_forbidden_template_operations_raise_a_typed_error(
    tmp_path: Path, template: str, says: str
) -> None:
    chat = load_chat(template, tmp_path)
    with pytest.raises(ChatFormatError, match=says):
        chat.start_conversation([USER])


def test_directory_without_a_usable_template_is_rejected(tmp_path: Path) -> None:
    directory_of("{% for %}", tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    with pytest.raises(ConfigError, match="not valid Jinja"):
        ChatFormat.load("template", {}, tokenizer)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatFormat.load("template", {}, tokenizer)
    parts = "{% for m in messages %}{% for p in m.content if p.text %}{{ p.text }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(parts + "{% endfor %}")
    with pytest.raises(ConfigError, match="omits messages"):
        ChatFormat.load("template", {}, tokenizer)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=r"Add one to rollout\.stop"):
        ChatFormat.load("template", {}, tokenizer)
    assert ChatFormat.load("template", {}, tokenizer, stop_tokens=["</s>"]).stop_tokens == ["</s>"]


def test_tools_unknown_to_the_template_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ChatFormatError, match="does not render tools"):
        load_chat(FORMATS["smollm2"], tmp_path).start_conversation([USER], [ADD])
    template = "{{ tools | tojson if tools }}" + FORMATS["smollm2"]
    with pytest.raises(ChatFormatError, match="the tool-call format"):
        load_chat(template, tmp_path).start_conversation([USER], [ADD])
    conversation = load_chat(template, tmp_path, tool_call_parser="hermes").start_conversation(
        [USER], [ADD]
    )
    ids = Tokenizer.load(tmp_path).encode(format_call(1, 2) + "<|im_end|>")
    assert [c.name for c in conversation.append_turn(ids).calls] == ["add"]
    unparsed = load_chat(template, tmp_path, tool_call_parser="none").start_conversation(
        [USER], [ADD]
    )
    assert unparsed.append_turn(ids).content == format_call(1, 2)


CASES += [
    (parser, text.replace("N", number), "", [(name, {}, f"{number} is not a finite number")])
    for number in ("NaN", "-Infinity", "1e999")
    for parser, text, name in NUMBERS
]


@pytest.mark.parametrize(("parser", "text", "content", "calls"), CASES)
def test_tool_calls_are_parsed(
    parser: str, text: str, content: str, calls: list[tuple[str, Any, str]]
) -> None:
    parsed = PARSERS[parser](text)
    assert parsed.content == content
    assert [(c.name, c.arguments, c.problem) for c in parsed.calls] == calls


def test_parser_is_detected_from_the_template() -> None:
    parsers = {name: detect_parser(template) for name, template in FORMATS.items()}
    assert parsers == {
        "qwen2.5": "hermes",
        "qwen3": "hermes",
        "llama-3": "llama3_json",
        "mistral": "mistral",
        "smollm2": "none",
        "tinyllama": "none",
        "gemma": "none",
    }


TAG_PIECES = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]


JSON = ["[", "{", "}", '"name"', ":", '"add"', '"arguments"', "null", "1", ",", "]", "[" * 5000]


PIECES = st.lists(st.sampled_from([*TAG_PIECES, *JSON]), max_size=20).map("".join)


@given(text=PIECES)
@pytest.mark.parametrize("parser", PARSERS)
def test_any_text_is_parsed_or_reported_as_a_problem(parser: str, text: str) -> None:
    for call in PARSERS[parser](text).calls:
        assert isinstance(call.arguments, dict) and (call.problem or call.name)
