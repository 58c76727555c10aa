"""Text that a tokenizer does not write: characters that it drops, or replaces by its unknown token.

Tokenizers of bytes, or with bytes to fall back on, write every text.
"""

from __future__ import annotations

import unicodedata
from functools import cached_property

from tokenizers import Tokenizer as Backend

PROBES = ("\U000103a0", "\u1699")  # letters of Old Persian and Ogham, alike to a vocabulary
# Spaces, control and format characters and marks, which normalizers drop and move.
UNSEEN = ("Zs", "Zl", "Zp", "Cc", "Cf", "Mn", "Me")


class Coverage:
    """The characters that one tokenizer can write."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._dropped: dict[str, bool] = {}

    @cached_property
    def _probed(self) -> tuple[bool, int | None]:
        """(True if characters are lost without an error, the id of the unknown token)."""
        try:
            first, second = (self._backend.encode(p, add_special_tokens=False) for p in PROBES)
        except Exception:  # the library raises nothing narrower, and loses nothing silently then
            return False, None
        if first.ids != second.ids:
            return False, None
        return True, first.ids[-1] if first.ids else None

    def lost(self, text: str) -> list[str]:
        """The pieces of a text that its ids do not say, each once."""
        loses, unknown = self._probed
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
            self._dropped[character] = not ids and _is_seen(character)
        return self._dropped[character]


def _is_seen(character: str) -> bool:
    return unicodedata.category(character) not in UNSEEN
