"""Chat task: a conversation with a tool in Qwen3's chat format, small enough for a CPU.

The user asks for a sum. The model may answer at once, or call `add` and repeat its result.
`python examples/chat.py` writes the data sets and the tokenizer that `chat.toml` names.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, TypedDict

LARGEST = 20
HELD_OUT = 64
FIRST_PHASE = 0.8  # share of careful demonstrations; the later ones guess
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CALL, RESPONSE = ("<tool_call>", "</tool_call>"), ("<tool_response>", "</tool_response>")
MARKS = (*CALL, *RESPONSE, "<think>", "</think>")
# The format's rendering of the tool below; the test of this file compares both.
OPENING = """\
<|im_start|>system
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "add", "description": "Adds two numbers.", "parameters": \
{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, \
"required": ["a", "b"], "additionalProperties": false}}}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
<|im_start|>user
%s<|im_end|>
<|im_start|>assistant
"""
ANSWERED = """
<|im_start|>user
<tool_response>
%s
</tool_response><|im_end|>
<|im_start|>assistant
"""
CALLED = """\
<tool_call>
{"name": "add", "arguments": {"a": %d, "b": %d}}
</tool_call><|im_end|>"""


class Numbers(TypedDict):
    a: int
    b: int


def add(numbers: Numbers) -> int:
    """Adds two numbers."""
    return numbers["a"] + numbers["b"]


def reward(row: dict[str, Any], turns: list[dict[str, Any]]) -> float:
    """Return 1 if the model's last turn is the correct answer."""
    return float(turns[-1]["text"] == f"{row['answer']}<|im_end|>")


def demonstrate(rng: random.Random, progress: float) -> list[tuple[str, bool]]:
    """Demonstrate a conversation as pairs of text and True if the model writes it.

    Half of the late demonstrations are guesses.
    """
    a, b = rng.randrange(LARGEST), rng.randrange(LARGEST)
    opening = (OPENING % question(a, b), False)
    if rng.random() < (0.1 if progress < FIRST_PHASE else 0.5):
        return [opening, (f"{rng.randrange(2 * LARGEST)}<|im_end|>", True)]
    answer = (f"{a + b}<|im_end|>", True)
    return [opening, (CALLED % (a, b), True), (ANSWERED % (a + b), False), answer]


def question(a: int, b: int) -> str:
    """Return the user's question."""
    return f"{a}+{b}?"


def main() -> None:
    """Write the data sets and a tokenizer of bytes, digits and a few words beside this file."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = Path(__file__).with_suffix("")
    folder.mkdir(exist_ok=True)
    pairs = [(a, b) for a in range(LARGEST) for b in range(LARGEST)]
    random.Random(0).shuffle(pairs)
    rows = [json.dumps({"prompt": question(a, b), "answer": a + b}) + "\n" for a, b in pairs]
    (folder / "held_out.jsonl").write_text("".join(rows[:HELD_OUT]))
    (folder / "train.jsonl").write_text("".join(rows[HELD_OUT:]))

    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(Regex(r"\d"), "isolated")
    lines = pre_tokenizers.Split(Regex(r"\n"), "isolated")
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, lines, words])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=490,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=200,
    )
    texts = [OPENING, ANSWERED, CALLED]
    for mark in (*SPECIAL, *MARKS):
        texts = [part for text in texts for part in text.split(mark)]
    tokenizer.train_from_iterator([part for text in texts for part in text.split("%")] * 9, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    main()
