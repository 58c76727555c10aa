"""Conversion of text to token ids and back, with any tokenizer.json and the files beside it."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.tokens.token_escaping import SpecialTokenEscaper, has_escape_marks

# Special tokens of some tokenizers that are part of a model's turn and do not begin or end it.
REASONING_WORDS = ("<think>", "</think>", "[THINK]", "[/THINK]")
COVERAGE_PROBES = (
    "\U000103a0",
    "\u1699",
)  # letters of Old Persian and Ogham, which a vocabulary treats alike
# Categories of spaces, control and format characters and marks, which normalizers drop and move.
INVISIBLE_CATEGORIES = ("Zs", "Zl", "Zp", "Cc", "Cf", "Mn", "Me")
# companion files of a tokenizer.json, as transformers writes them
COMPANION_PATTERNS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "tokenizer.model.v3",
    "spiece.model",
    "tiktoken.model",
    "tekken.json",
    "additional_chat_templates/*.jinja",
)


def list_companion_files(tokenizer: Path) -> list[Path]:
    """List the files that belong to a tokenizer.json, without itself, relative to its directory."""
    place = tokenizer.parent
    found = [file for pattern in COMPANION_PATTERNS for file in sorted(place.glob(pattern))]
    return [file.relative_to(place) for file in found if file.is_file()]


class Tokenizer:
    """Tokenizer that drops no special tokens and adds only those that begin a sequence.

    `encode_start` adds them; callers write all other special tokens into the text.
    """

    def __init__(
        self, backend: Backend, file: Path | None = None, guarded_tokens: Iterable[str] = ()
    ) -> None:
        """Wrap a tokenizer; `guarded_tokens` are a chat format's tokens beside special ones."""
        backend.no_truncation()  # a file may enable either, from its last use
        backend.no_padding()
        self._backend = backend
        special = {t for t in self.special_tokens if t not in REASONING_WORDS}
        self._coverage = VocabularyCoverage(backend)
        self._escaper = SpecialTokenEscaper(backend, special.union(guarded_tokens))
        self.file = file  # the tokenizer.json
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Load a tokenizer.json, or that of a directory; raise ConfigError if there is none."""
        file = Path(path)
        if file.is_dir():
            file /= "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                "there is no tokenizer at this path",
                where=str(file),
                fix="Give the path of a tokenizer.json or of its directory",
            )
        try:
            return cls(Backend.from_file(str(file)), file)
        except Exception as error:  # the library raises no narrower error
            raise ConfigError(
                f"the tokenizer cannot be read: {error}",
                where=str(file),
                fix="Copy the complete file again",
            ) from error

    @property
    def vocabulary(self) -> dict[str, int]:
        """Id of each token."""
        found: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return found

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the tokens that the tokenizer never forms from parts of a text."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}

    @property
    def added_words(self) -> dict[int, str]:
        """Texts by id that are one token at every position and not special."""
        added = self._backend.get_added_tokens_decoder()
        return {i: token.content for i, token in added.items() if not token.special}

    def with_guarded_tokens(self, guarded_tokens: Iterable[str]) -> Tokenizer:
        """Return this tokenizer with these tokens escaped like special ones."""
        return Tokenizer(self._backend, self.file, guarded_tokens)

    def escape(self, text: str, *, guard_edges: bool = True) -> str:
        """Escape untrusted text so that `encode` makes no special token of it.

        See `SpecialTokenEscaper.escape`.
        """
        return self._escaper.escape(text, guard_edges)

    def find_special_tokens(self, text: str) -> list[str]:
        """Return the special tokens that a text contains as text."""
        return self._escaper.find_special_tokens(text)

    def find_lossy_pieces(self, text: str) -> list[str]:
        """Return the pieces of a text that the tokenizer drops or replaces by its unknown token."""
        return self._coverage.find_lossy_pieces(text)

    def encode(self, text: str) -> list[int]:
        """Encode a text with its special tokens, except for those that `escape` has marked.

        Raise ConfigError if the vocabulary cannot express the text.
        """
        try:
            if has_escape_marks(text):
                return self._escaper.encode(text)
            encoding = self._backend.encode(text, add_special_tokens=False)
        except Exception as error:  # the library raises no narrower error
            raise ConfigError(
                f"text {text[:80]!r} cannot be encoded: {error}",
                where="tokenizer.json",
                fix="Use only characters of its vocabulary, or a tokenizer with an unknown token",
            ) from error
        ids: list[int] = encoding.ids
        return ids

    def encode_start(self, text: str, *, escape: bool = False) -> list[int]:
        """Encode a text that begins a sequence.

        The ids are those of `encode`, after the tokens that the tokenizer's own post-processor puts
        first, such as `<s>`, unless the text begins with them. Tokens that it would put last are
        left out, since the sequence continues. With `escape`, the text is untrusted, and no other
        special token is made of it.
        """
        head: list[int] = []
        if self._backend.num_special_tokens_to_add(False):
            # An empty text would not show which tokens come first and which last.
            bare = self._backend.encode(text or self.id_to_token(0), add_special_tokens=False)
            encoding = self._backend.post_process(bare, None, True)
            head = encoding.ids[: encoding.special_tokens_mask.index(0)]
        if escape:
            written = "".join(self.id_to_token(i) or "" for i in head)
            written = written if text.startswith(written) else ""
            text = written + self.escape(text[len(written) :])
        ids = self.encode(text)
        return ids if ids[: len(head)] == head else head + ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token by its text, or None."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def id_to_token(self, token_id: int) -> str | None:
        """Return the text of a token by its id, or None."""
        found: str | None = self._backend.id_to_token(token_id)
        return found


def build_character_tokenizer(chars: str, path: str | Path) -> Tokenizer:
    """Write a tokenizer.json to `path` in which `chars[i]` is token i.

    Encoding other characters fails.
    """
    if len(set(chars)) != len(chars):
        twice = next(c for c in chars if chars.count(c) > 1)
        raise ConfigError(f"character {twice!r} is listed twice", fix="List each character once")
    vocabulary = {char: index for index, char in enumerate(chars)}
    backend = Backend(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    backend.save(str(path))
    return Tokenizer(backend)


class VocabularyCoverage:
    """Characters that a tokenizer drops or replaces by its unknown token.

    Tokenizers of bytes, or with bytes as fallback, encode every text.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._dropped: dict[str, bool] = {}

    @cached_property
    def _loss_probe(self) -> tuple[bool, int | None]:
        """Pair: True if characters are lost without an error, and the id of the unknown token."""
        try:
            first, second = (
                self._backend.encode(p, add_special_tokens=False) for p in COVERAGE_PROBES
            )
        except Exception:  # the library raises no narrower error, and then drops nothing silently
            return False, None
        if first.ids != second.ids:
            return False, None
        return True, first.ids[-1] if first.ids else None

    def find_lossy_pieces(self, text: str) -> list[str]:
        """Return the pieces of a text that its ids do not represent, each once."""
        loses, unknown = self._loss_probe
        if not loses:
            return []
        found = dict.fromkeys(c for c in dict.fromkeys(text) if self._is_dropped(c))
        if unknown is not None:
            encoding = self._backend.encode(text, add_special_tokens=False)
            for i, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
                piece = text[begin:end].strip() or text[begin:end]
                if i == unknown and piece and piece != self._backend.id_to_token(i):
                    found[piece] = None
        return list(found)

    def _is_dropped(self, character: str) -> bool:
        if character not in self._dropped:
            ids = self._backend.encode(character, add_special_tokens=False).ids
            self._dropped[character] = not ids and (
                unicodedata.category(character) not in INVISIBLE_CATEGORIES
            )
        return self._dropped[character]


def find_absent_ids(ids: Iterable[int], vocab_size: int) -> tuple[tuple[int, int], ...]:
    """Return the ranges [first, end) of [0, vocab_size) that hold none of `ids`, ascending."""
    found, expected = [], 0
    for present in sorted({i for i in ids if 0 <= i < vocab_size} | {vocab_size}):
        if present > expected:
            found.append((expected, present))
        expected = present + 1
    return tuple(found)


def with_tokenizer(config: ModelConfig, tokenizer: Path) -> ModelConfig:
    """Return the shape of a model that generates and trains with this tokenizer.json.

    Ids of a model's head that the tokenizer lacks have no text (many published heads are padded):
    rewards, environments and later prompts cannot represent them. They are never sampled, and have
    no probability (`ModelConfig.absent_ids`).
    """
    return replace(config, absent_ids=_read_absent_ids(tokenizer, config.vocab_size))


@cache
def _read_absent_ids(tokenizer: Path, vocab_size: int) -> tuple[tuple[int, int], ...]:
    """Read the absent ids once per process, because a bundle never changes."""
    return find_absent_ids(Tokenizer.load(tokenizer).vocabulary.values(), vocab_size)
