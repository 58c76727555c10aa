"""A document tells whatever bit of it has changed, and people may write one without a check."""

from __future__ import annotations

import pytest

from meshrl.common.base.errors import Damaged
from meshrl.common.base.files import documents

CONTENT = {"cpu": {"a": {"x": 0.1 + 0.2}}, "wall_s": 1e22, "cached": False, "s": [[1, 2], []]}


def test_every_flipped_bit_shows() -> None:
    whole = documents.encode(CONTENT)
    assert documents.decode(whole, "there") == CONTENT
    for place in range(len(whole) - 1):  # the last one ends the line
        for bit in range(8):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            try:
                found = documents.decode(bytes(changed), "there")
            except Damaged:
                continue
            assert found == CONTENT and bytes(changed).split() == whole.split(), (place, bit)


def test_one_that_people_wrote_needs_no_check() -> None:
    assert documents.decode(b'{"share": 1.50, "name": "a"}', "there") == {"share": 1.5, "name": "a"}
    assert documents.decode(b"{}", "there") == {}


def test_one_that_was_laid_out_anew_is_the_same() -> None:
    packed = b"".join(documents.encode({"a": [1.25, 2]}).split())
    assert documents.decode(packed, "there") == {"a": [1.25, 2]}


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff"])
def test_what_is_no_document_says_so(content: bytes) -> None:
    with pytest.raises(Damaged):
        documents.decode(content, "there")
