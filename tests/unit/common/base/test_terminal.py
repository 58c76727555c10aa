"""Texts of any origin reach a terminal without control characters, which are shown instead."""

from __future__ import annotations

import io
import json
import sys
import unicodedata
from typing import cast

from meshrl.common.base.host.terminal import VisibleStream, behind, guarded_output, visible

ATTACKS = (
    "\x1b[2J\x1b[H",  # clears the screen
    "\x1b]0;title\x07\x1b]8;;http://x\x07link\x1b]8;;\x07",  # a title and a link
    "\x1b]52;c;aGk=\x07",  # the clipboard
    "\x9b31m\x9d0;t\x9c\x90q\x9c",  # the same by C1
    "a\rb\x08\x7f\x00\x0b\x0c",
    "\u202e drow \u202c \u2066a\u2069 \u200f \u061c",  # bidirectional controls
    "\u2028\u2029\ufff9\U000e0041\ud800",
)


def is_plain(text: str) -> bool:
    """True if a terminal only shows a text."""
    return all(mark in "\n\t" or unicodedata.category(mark) not in CONTROLS for mark in text)


CONTROLS = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_control_characters_are_shown() -> None:
    assert visible("\x1b[31m\x9b\u202e\x7f") == r"\u001b[31m\u009b\u202e\u007f"
    for attack in ATTACKS:
        assert is_plain(visible(attack)) and visible(visible(attack)) == visible(attack)
    for code in (*range(0x20), *range(0x7F, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A)):
        assert is_plain(visible(chr(code))), hex(code)


def test_other_text_stays_as_it_is() -> None:
    for text in ("", "a\tb\n", "naïve 漢字 🙂 👩\u200d👩", "عربي עברית", "\\u001b"):
        assert visible(text) == text
    assert visible("one\r\ntwo\r\n") == "one\ntwo\n"


def test_printed_json_means_the_same() -> None:
    for attack in ATTACKS:
        for ascii_only in (True, False):
            printed = visible(json.dumps({"text": attack}, ensure_ascii=ascii_only))
            assert is_plain(printed) and json.loads(printed) == {"text": attack}


def test_streams_are_guarded_for_as_long_as_asked() -> None:
    out, error, before = io.StringIO(), io.StringIO(), (sys.stdout, sys.stderr)
    sys.stdout, sys.stderr = out, error
    try:
        with guarded_output(), guarded_output():
            print("\x1b[31m", file=sys.stderr)
            sys.stdout.writelines(["\x1b[32m", "b"])
            print("\x1b[1m", file=behind(sys.stdout))
        assert (sys.stdout, sys.stderr) == (out, error)
    finally:
        sys.stdout, sys.stderr = before
    assert (error.getvalue(), out.getvalue()) == ("\\u001b[31m\n", "\\u001b[32mb\x1b[1m\n")
    assert cast(io.StringIO, VisibleStream(out)).getvalue() == out.getvalue()
