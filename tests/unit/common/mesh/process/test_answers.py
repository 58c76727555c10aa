"""A process of its own answers in its last line, or by how it ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from meshrl.common.base.errors import DeadlineExceeded, MeshError
from meshrl.common.mesh.process.answers import answer_of
from meshrl.common.mesh.process.host import SystemHost
from tests.load import scaled


async def asked(logs: Path, code: str, within_s: float = 0.0) -> dict[str, object]:
    command = [sys.executable, "-c", code]
    return await answer_of(SystemHost(), command, "asked/j", logs, within_s or scaled(60.0))


async def test_the_last_line_is_the_answer_and_nothing_is_left(tmp_path: Path) -> None:
    logs = tmp_path / "mesh" / "logs"
    assert await asked(logs, "print('first'); print('{\"a\": 1}')") == {"a": 1}
    assert list(logs.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("", "without a word"),
        ("raise SystemExit('no such file')", "no such file"),
        ("print('[1]')", r"\[1\]"),
    ],
)
async def test_who_ends_without_an_answer_is_told_by_its_last_words(
    tmp_path: Path, code: str, why: str
) -> None:
    with pytest.raises(MeshError, match=f"asked/j has ended without an answer: {why}"):
        await asked(tmp_path, code)
    assert not os.listdir(tmp_path)


async def test_one_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match="asked/j"):
        await asked(tmp_path, "import time; time.sleep(1e6)", within_s=0.2)
    assert not os.listdir(tmp_path)
