"""Special tokens in untrusted text: marked in the text, and encoded as plain text.

Only the format of a conversation writes special tokens. A text of a user, a tool or a dataset that
contains `<|im_end|>` would end a turn if it were encoded with the rest.
`SpecialTokenEscaper.escape` inserts a mark into each such token before the text enters a template.
`SpecialTokenEscaper.encode` encodes the text that the template wrote, where special tokens without
a mark are the template's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cached_property

from tokenizers import Tokenizer as Backend

# Noncharacters, which Unicode reserves for internal use. A text that contains MARK loses it.
ESCAPE_MARK = "\ufdd0\ufdd1"
JSON_ESCAPE_MARK = json.dumps(ESCAPE_MARK)[1:-1]  # form in templates that escape JSON to ASCII
ALIAS_FORMAT = "\ufdd2{}\ufdd3"
REPLACEMENT_CHARACTER = "\ufffd"


def has_escape_marks(text: str) -> bool:
    """Return True if `encode` must search for escaped tokens."""
    return ESCAPE_MARK in text or JSON_ESCAPE_MARK in text


class SpecialTokenEscaper:
    """Special tokens of one tokenizer that untrusted text must not become."""

    def __init__(self, backend: Backend, tokens: Iterable[str]) -> None:
        self._backend = backend
        longest_first = sorted({token for token in tokens if token}, key=lambda t: (-len(t), t))
        self._aliases = {token: ALIAS_FORMAT.format(i) for i, token in enumerate(longest_first)}
        # A mark follows the first character; it is doubled if the token has no other character.
        names = [re.escape(t) + f"(?!{ESCAPE_MARK * 2})" * (len(t) == 1) for t in longest_first]
        self._pattern = re.compile(f"({'|'.join(names)})") if names else None
        self._token_heads = {token[:n] for token in longest_first for n in range(1, len(token))}
        self._token_tails = {token[n:] for token in longest_first for n in range(1, len(token))}
        self._max_token_chars = max(map(len, longest_first), default=0)

    def find_special_tokens(self, text: str) -> list[str]:
        """Return the special tokens of a text, as it is or as the tokenizer normalizes it."""
        if self._pattern is None:
            return []
        return self._pattern.findall(text) or self._pattern.findall(self._normalize(text))

    def escape(self, text: str, guard_edges: bool = True) -> str:
        """Return the text with a mark in each special token.

        With `guard_edges`, also mark an edge where a template's text could complete a token, even
        if the template trims spaces. Names must have no such marks, because templates compare them.
        """
        body = text.strip()
        if self._pattern is None or not body:
            return text
        if not guard_edges:
            return self._mark_tokens(text)
        before, _, after = text.partition(body)
        sizes = range(1, self._max_token_chars)
        tail = any(text[:n] in self._token_tails or body[:n] in self._token_tails for n in sizes)
        head = any(text[-n:] in self._token_heads or body[-n:] in self._token_heads for n in sizes)
        if len(body) < self._max_token_chars:
            head = head or any(body in token for token in self._aliases)
        marked = self._mark_tokens(body)
        if marked == body and not head and self._pattern.search(self._normalize(body)):
            head = True  # normalization makes the text a token: any mark makes `encode` check it
        return before + ESCAPE_MARK * tail + marked + ESCAPE_MARK * head + after

    def _mark_tokens(self, text: str) -> str:
        """Return the text with a mark in each token, also in those that are parts of others."""
        assert self._pattern is not None
        while (marked := self._pattern.sub(_insert_mark, text)) != text:
            text = marked
        return text

    def encode(self, marked: str) -> list[int]:
        """Return the ids of a text with marks; errors of the library pass through."""
        assert self._pattern is not None or not self._aliases
        marked = marked.replace(JSON_ESCAPE_MARK, ESCAPE_MARK)
        text = marked.replace(ESCAPE_MARK, "")
        backend = self._backend
        if self._pattern is not None and self._has_escaped_tokens(marked, text):
            own = self._pattern.split(marked.replace("\ufdd2", REPLACEMENT_CHARACTER))
            own[1::2] = [self._aliases[token] for token in own[1::2]]
            text, backend = "".join(own).replace(ESCAPE_MARK, ""), self._aliased_backend
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    def _has_escaped_tokens(self, marked: str, text: str) -> bool:
        """Return True if a special token of the text is not the template's own."""
        assert self._pattern is not None
        own = self._pattern.split(marked)
        if [piece.replace(ESCAPE_MARK, "") for piece in own] != self._pattern.split(text):
            return True
        return self._pattern.findall(self._normalize(text)) != own[1::2]

    def _normalize(self, text: str) -> str:
        normalizer = self._backend.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    @cached_property
    def _aliased_backend(self) -> Backend:
        """Tokenizer with other names for the special tokens, under the same ids.

        The usual names of special tokens are plain text to it.
        """
        document, aliases = json.loads(self._backend.to_str()), self._aliases
        for token in document["added_tokens"]:
            token["content"] = aliases.get(token["content"], token["content"])
        model = document["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {aliases.get(token, token): i for token, i in vocabulary.items()}
            renamed = aliases.keys() & vocabulary.keys()
        else:  # scores of a Unigram model
            model["vocab"] = [[aliases.get(token, token), score] for token, score in vocabulary]
            renamed = set()
        if model.get("unk_token") in aliases:
            model["unk_token"] = aliases[model["unk_token"]]
        if renamed and "merges" in model:  # merges that would form such a token from its characters
            model["merges"] = [
                m for m in model["merges"] if renamed.isdisjoint(_list_merge_tokens(m))
            ]
        twin = Backend.from_str(json.dumps(document))
        for token, alias in aliases.items():
            if twin.token_to_id(alias) != self._backend.token_to_id(token):
                raise ValueError(
                    f"the special token {token!r} cannot be distinguished from its text"
                )
        return twin


def _insert_mark(found: re.Match[str]) -> str:
    token = found[0]
    return token[0] + ESCAPE_MARK + token[1:] if len(token) > 1 else token + ESCAPE_MARK * 2


def _list_merge_tokens(merge: str | list[str]) -> tuple[str, str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right
