"""Characters that a tokenizer does not write are found, and no others."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from meshrl.common.model.tokens.tokenizer import Tokenizer, character_tokenizer
from tests.unit.common.model.chatting import qwen3_tokenizer


def characters(unknown: str) -> Backend:
    vocabulary = {c: i for i, c in enumerate(["<unk>", *"abcdefgh .é"])}
    backend = Backend(models.WordLevel(vocabulary, unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return backend


def words() -> Backend:
    backend = Backend(models.WordPiece({"[UNK]": 0, "ab": 1, "##c": 2, ".": 3}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


def unigram() -> Backend:
    backend = Backend(models.Unigram([("<unk>", 0.0), *((c, -1.0) for c in "▁abc")], 0, False))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return backend


def dropping() -> Backend:
    return Backend(models.BPE({c: i for i, c in enumerate("abc ")}, []))


def falling_back() -> Backend:
    vocabulary = [f"<0x{i:02X}>" for i in range(256)] + ["<unk>", "a"]
    return Backend(
        models.BPE(
            {t: i for i, t in enumerate(vocabulary)}, [], byte_fallback=True, unk_token="<unk>"
        )
    )


CASES: list[tuple[Backend, str, list[str]]] = [
    (characters("."), "abc. é", []),
    (characters("."), "abc好x.好", ["好", "x"]),
    (characters("<unk>"), "a\u200bx", ["\u200b", "x"]),
    (characters("<unk>"), "a\n", ["\n"]),
    (characters("none"), "a好", []),  # which does not encode, with an error
    (words(), "ABC abc.\n", []),
    (words(), "abc dba 好", ["dba", "好"]),
    (unigram(), "abc ａ", []),
    (unigram(), "ab x\n好a", ["x\n好"]),
    (dropping(), "abc ", []),
    (dropping(), "axb好", ["x", "好"]),
    (falling_back(), "a好\U000103a0", []),
]


def test_dropped_and_replaced_characters_are_found() -> None:
    for backend, text, lost in CASES:
        found = Tokenizer(backend).lost(text)
        assert found == lost, (backend.model, text)


def test_tokenizers_of_bytes_and_those_that_refuse_lose_nothing(tmp_path: Path) -> None:
    assert qwen3_tokenizer(tmp_path).lost("好\U000103a0\ufdd0") == []
    assert character_tokenizer("ab", tmp_path / "own" / "tokenizer.json").lost("好") == []
