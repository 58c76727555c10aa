"""Segments of memory: a worker's budget, and what role processes find there after a death."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from meshrl.common.api.node import MakeSegment
from meshrl.common.base.errors import Refused, StorageFull
from meshrl.common.base.files.kept import Mapped
from meshrl.services.node.residents.segments import SPARE_BYTES, Segments
from tests.load import scaled

PAGE = 4096


def plenty() -> int:
    return 1 << 40


def write_and_end(path: str) -> None:
    """In another process."""
    program = (
        "import sys, numpy as np; from meshrl.common.base.files.kept import Mapped; "
        f"Mapped(sys.argv[1]).put({PAGE}, np.full(5, 7, np.uint8))"
    )
    subprocess.run([sys.executable, "-c", program, path], check=True, timeout=scaled(60))


async def test_what_a_process_wrote_is_there_after_its_death() -> None:
    async with Segments(plenty) as segments:
        made = segments.make(MakeSegment("trainer/sums", 3 * PAGE))
        write_and_end(made.path)
        found = segments.find("trainer/sums")
        assert found == made
        assert Mapped(found.path).get(PAGE - 1, 7).tolist() == [0, 7, 7, 7, 7, 7, 0]
        assert segments.find("engine/g0.1").path == ""


async def test_who_is_told_of_something_else_than_its_own_segment_writes_nothing(
    tmp_path: Path,
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"as it was")
    async with Segments(plenty) as segments:
        mine = segments.make(MakeSegment("trainer/sums", PAGE)).path
        others = segments.make(MakeSegment("engine/g0.1", PAGE)).path
        assert Mapped(mine, "trainer/sums").size == PAGE
        with file.open("r+b") as opened:
            for path in (others, str(file), f"/proc/self/fd/{opened.fileno()}"):
                with pytest.raises(Refused, match="is no segment for trainer/sums"):
                    Mapped(path, "trainer/sums")
    assert file.read_bytes() == b"as it was"


async def test_they_end_with_the_worker() -> None:
    async with Segments(plenty) as segments:
        path = segments.make(MakeSegment("trainer/sums", PAGE)).path
        assert segments.bytes == PAGE and segments.keys == ["trainer/sums"]
    assert segments.bytes == 0
    with pytest.raises(FileNotFoundError):
        os.stat(path)


async def test_the_budget_is_of_all_together_and_a_refusal_changes_nothing() -> None:
    async with Segments(plenty, budget=10 * PAGE) as segments:
        segments.make(MakeSegment("a", 6 * PAGE))
        with pytest.raises(StorageFull, match=f"{6 * PAGE} of the worker's {10 * PAGE}"):
            segments.make(MakeSegment("b", 5 * PAGE))
        assert segments.keys == ["a"]
        segments.make(MakeSegment("a", 5 * PAGE))  # in place of its own
        segments.make(MakeSegment("b", 5 * PAGE))
        segments.drop("a")
        segments.drop("a")
        assert segments.bytes == 5 * PAGE


async def test_memory_that_another_process_has_taken_is_not_given_away() -> None:
    left = SPARE_BYTES + 10 * PAGE
    async with Segments(lambda: left) as segments:
        first = segments.make(MakeSegment("a", 4 * PAGE))
        Mapped(first.path).put(0, np.ones(4 * PAGE, np.uint8))
        left = SPARE_BYTES + PAGE
        with pytest.raises(StorageFull, match="the host has"):
            segments.make(MakeSegment("a", 6 * PAGE))
        assert Mapped(segments.find("a").path).get(0, 4 * PAGE).all()
        segments.make(MakeSegment("a", 5 * PAGE))  # its own four are free then


async def test_what_is_promised_and_not_filled_yet_is_not_given_twice() -> None:
    async with Segments(lambda: SPARE_BYTES + 10 * PAGE) as segments:
        segments.make(MakeSegment("a", 6 * PAGE))
        with pytest.raises(StorageFull, match=f"the host has {SPARE_BYTES + 4 * PAGE}"):
            segments.make(MakeSegment("b", 5 * PAGE))
        segments.make(MakeSegment("b", 4 * PAGE))


async def test_who_maps_one_can_rely_on_its_size() -> None:
    async with Segments(plenty) as segments:
        path = segments.make(MakeSegment("a", PAGE)).path
        descriptor = os.open(path, os.O_RDWR)
        for size in (0, 2 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
        os.close(descriptor)
