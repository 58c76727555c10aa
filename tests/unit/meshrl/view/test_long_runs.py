"""What a recorder holds of a run of many steps: the last rows, and of the rest what it reads."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from meshrl.common.base.files.lines import LineFile
from meshrl.view.recording.recorded import EVENTS, RECENT, Recorded, rare_events, thinned

MANY = 3 * RECENT


def rows(n: int) -> list[dict[str, Any]]:
    return [{"step": step, "reward": step / n} for step in range(1, n + 1)]


def test_the_last_rows_are_held_and_all_of_them_are_in_the_file(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, "job")
    for row in rows(MANY):
        recorded.add_rows([row])
    assert RECENT <= len(recorded.rows) <= 2 * RECENT
    assert recorded.rows == rows(MANY)[-len(recorded.rows) :]
    assert list(recorded.every_row()) == rows(MANY)
    again = Recorded(tmp_path, "job")
    assert again.rows == rows(MANY)[-RECENT:]
    again.keep_rows(RECENT // 2)  # a new lineage begins before all that is held
    assert again.rows == list(again.every_row()) == rows(MANY)[: RECENT // 2]
    again.add_rows([{"step": RECENT // 2 + 1, "reward": 0.0}])
    assert [row["step"] for row in again.every_row()] == list(range(1, RECENT // 2 + 2))


def test_a_curve_has_some_of_the_rows_evenly_spaced_and_the_last() -> None:
    assert thinned(rows(7), 10) == rows(7)
    for n in (20, 21, 22, 999, 1000):
        found = [row["step"] for row in thinned(rows(n), 10)]
        assert found[0] == 1
        assert found[-1] == n
        assert 10 <= len(found) <= 22
        gaps = [b - a for a, b in pairwise(found[:-1])]
        assert len(set(gaps)) == 1


def test_the_page_of_a_long_run_reads_no_event_of_each_group(tmp_path: Path) -> None:
    told = [("leader", 1), ("opened", 2), ("ready", 3), ("step", 4), ("opened", 5), ("move", 6)]
    file = LineFile(tmp_path / EVENTS)
    file.append({"id": f"{ms}-0", "ms": ms, "kind": kind, "fields": {}} for kind, ms in told)
    assert [e.ms for e in rare_events(tmp_path)] == [1, 2, 3, 4, 6]
