"""Small byte-level tokenizer with the special tokens of Qwen3, for tests of chat formats."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from meshrl.common.model.tokens.tokenizer import Tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
TEXT = [
    "the sum of two numbers is the result of adding them",
    "user assistant system tool",
    "héé 好",
]


def qwen3_tokenizer(directory: Path) -> Tokenizer:
    """Write a tokenizer.json of 256 bytes, some merges and the tokens of the chat format."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    backend.save(str(directory / "tokenizer.json"))
    return Tokenizer.load(directory)
