"""Lossless encoding and decoding of text, and characters that a tokenizer lacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.tokens.tokenizer import Tokenizer, build_character_tokenizer
from tests.load import scaled
from tests.unit.common.model.chatting import qwen3_tokenizer

CHARS = '_$?[]{}#=+-*()0123456789 ,;:<>abcdefghijklmnopqrstuvwxyz\n"é'


@pytest.fixture(scope="module")
def characters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    build_character_tokenizer(CHARS, path)
    return Tokenizer.load(path.parent)


@given(text=st.text(alphabet=CHARS))
def test_each_character_is_its_own_token(characters: Tokenizer, text: str) -> None:
    ids = characters.encode(text)
    assert ids == [CHARS.index(char) for char in text]
    assert characters.decode(ids) == text


def test_character_outside_the_alphabet_is_rejected(characters: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="Z"):
        characters.encode("17Z")


def test_ids_are_found_by_token(characters: Tokenizer) -> None:
    assert characters.token_to_id("$") == 1
    assert characters.token_to_id("no such token") is None
    assert characters.vocab_size == len(CHARS)


def test_special_tokens_are_kept_and_none_are_added(tmp_path: Path) -> None:
    backend = Backend(models.BPE({c: i for i, c in enumerate(sorted(set("abc Ġ")))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>"])
    bos = backend.token_to_id("<bos>")
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    ids = tokenizer.encode("a b<eos>")
    assert bos not in ids
    assert tokenizer.decode(ids) == "a b<eos>"
    assert tokenizer.vocab_size == 7


def byte_tokenizer(directory: Path, single: str = "", **options: Any) -> Backend:
    """Write a tokenizer of bytes whose post-processor is the template `single`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    if single:
        ids = [(t, backend.token_to_id(t)) for t in ("<s>", "</s>")]
        template = processors.TemplateProcessing(single=single, special_tokens=ids)
        spaces = processors.ByteLevel(trim_offsets=False)
        backend.post_processor = processors.Sequence([spaces, template])
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | options))
    return backend


@pytest.mark.group("transformers")  # imported by one worker for all tests of the group
@pytest.mark.parametrize("text", ["a b", "é</s>", " <s>", ""])
@pytest.mark.parametrize(
    ("single", "options"),
    [("<s> $A", {}), ("", {}), ("", {"add_bos_token": True}), ("$A", {"add_bos_token": True})],
)
def test_sequence_starts_as_in_transformers(
    tmp_path: Path, single: str, options: dict[str, Any], text: str
) -> None:
    import transformers

    byte_tokenizer(tmp_path, single, **options)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode_start(text) == reference(text)["input_ids"]
    assert tokenizer.encode(text) == reference(text, add_special_tokens=False)["input_ids"]


def test_sequence_start_has_one_start_token_and_no_end_token(tmp_path: Path) -> None:
    bos = byte_tokenizer(tmp_path, "<s> $A </s>").token_to_id("<s>")
    tokenizer = Tokenizer.load(tmp_path)
    assert (
        tokenizer.encode_start("a")
        == tokenizer.encode_start("<s>a")
        == [bos, *tokenizer.encode("a")]
    )
    assert tokenizer.encode_start("") == [bos]


def test_saved_truncation_and_padding_are_ignored(tmp_path: Path) -> None:
    backend = byte_tokenizer(tmp_path)
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("a whole text")) == "a whole text"
    assert len(tokenizer.encode("ab")) == 2


def test_duplicate_character_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'a'"):
        build_character_tokenizer("abca", tmp_path / "tokenizer.json")


def test_missing_and_invalid_tokenizer_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(ConfigError, match=r"cannot be read.*tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.group("transformers")  # imported by one worker for all tests of the group
def test_transformers_loads_the_tokenizer_of_a_saved_model(tmp_path: Path) -> None:
    import torch
    import transformers

    from meshrl.common.model.files.hf_writer import save_model
    from tests.unit.common.model.test_decoder import TINY, tiny_decoder

    build_character_tokenizer(CHARS, tmp_path / "source" / "tokenizer.json")
    state: dict[str, torch.Tensor] = tiny_decoder().state_dict()
    save_model(tmp_path / "model", TINY, state, tmp_path / "source" / "tokenizer.json")
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert reference("1+2", add_special_tokens=False)["input_ids"] == [15, 9, 16]


def test_tokenizer_does_not_import_torch() -> None:
    code = "import sys, meshrl.common.model.tokens.tokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=scaled(60)).returncode == 0


def backend_without(unknown: str) -> Backend:
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
    (backend_without("."), "abc. é", []),
    (backend_without("."), "abc好x.好", ["好", "x"]),
    (backend_without("<unk>"), "a\u200bx", ["\u200b", "x"]),
    (backend_without("<unk>"), "a\n", ["\n"]),
    (backend_without("none"), "a好", []),  # does not encode, but raises an error
    (words(), "ABC abc.\n", []),
    (words(), "abc dba 好", ["dba", "好"]),
    (unigram(), "abc ａ", []),
    (unigram(), "ab x\n好a", ["x\n好"]),
    (dropping(), "abc ", []),
    (dropping(), "axb好", ["x", "好"]),
    (falling_back(), "a好\U000103a0", []),
]


def test_dropped_and_replaced_characters_are_found() -> None:
    for backend, text, lossy_pieces in CASES:
        pieces = Tokenizer(backend).find_lossy_pieces(text)
        assert pieces == lossy_pieces, (backend.model, text)


def test_byte_and_strict_tokenizers_are_lossless(tmp_path: Path) -> None:
    assert qwen3_tokenizer(tmp_path).find_lossy_pieces("好\U000103a0\ufdd0") == []
    assert (
        build_character_tokenizer("ab", tmp_path / "own" / "tokenizer.json").find_lossy_pieces("好")
        == []
    )
