"""All jobs of a mesh at once: each with its own figures, and why it does nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from common.pool.rows import Role
from common.state.jobs import JobRow, Phase
from common.state.registry import Entry
from meshrl.view.history.run_snapshot import History
from meshrl.view.live.mesh_view import MeshLines, MeshShot, screen, shot
from tests.unit.meshrl.view.test_tables import POOL, WAITS, row


def shard(job: str, tokens: float, in_flight: int) -> Entry:
    stats = {"tokens": tokens, "in_flight": in_flight}
    return Entry(f"rollout/{job}/0", "rollout", alive=True, stats=stats, renewed_ms=1_000_000)


def steps(*rewards: float) -> list[dict[str, Any]]:
    return [
        {"step": n, "reward": reward, "tokens_trained": 500, "wall": 100.0 + 2 * n}
        for n, reward in enumerate(rewards, 1)
    ]


ROWS = (row("a"), row("b", WAITS, Phase.QUEUED))


def looked(at_s: float, rows: tuple[JobRow, ...], histories: dict[str, History]) -> MeshShot:
    entries = [shard("a", 100 * at_s, 7), shard("b", 10 * at_s, 3)]
    return shot(at_s, rows, {"a": steps(0.25, 0.5)}, entries, POOL, histories)


def test_each_job_has_its_own_figures() -> None:
    histories: dict[str, History] = {}
    looked(10.0, ROWS, histories)
    a, b = looked(20.0, ROWS, histories).jobs
    assert (a.rolled_out_s, a.trained_s, a.in_flight) == pytest.approx((100.0, 250.0, 7))
    assert (b.rolled_out_s, b.trained_s, b.in_flight) == pytest.approx((10.0, 0.0, 3))
    assert (a.rewards, b.rewards) == ((0.25, 0.5), ())
    assert a.roles == f"w0:{Role.TRAINING} w0:{Role.ROLLOUT}"


def test_a_job_that_stands_still_is_named_and_one_that_waits_is_not() -> None:
    still = tuple(replace(row, progress_ms=1) for row in ROWS)
    a, b = looked(1.0, still, {}).jobs
    assert "no group, step or evaluation has come" in a.quiet
    assert b.quiet == ""


def test_the_screen_has_all_jobs_and_all_workers() -> None:
    console = Console(width=130, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    failed = row("c", phase=Phase.FAILED)
    console.print(screen(looked(65.0, (*ROWS, failed), {}), "/mesh"))
    text = console.export_text()
    for wanted in ("3 jobs", "1:05", "3/48", "0.500", f"b is {WAITS}", "c failed: it broke", "w3"):
        assert wanted in text, wanted


def test_without_a_terminal_there_is_a_line_for_each_news(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = MeshLines()
    histories: dict[str, Any] = {}
    a, b = ROWS
    for at_s, rows in (
        (1.0, ROWS),
        (2.0, ROWS),
        (3.0, (replace(a, steps_done=4), replace(b, held=""))),
        (4.0, (replace(a, steps_done=4, held="paused: job b"), replace(b, held=""))),
    ):
        lines.show(looked(at_s, rows, histories))
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[0] for line in printed] == [
        "[0:01] a: training",
        f"[0:01] b: {WAITS}",
        "[0:03] a: step 4/48",
        "[0:03] b: queued",
        "[0:04] a: paused: job b",
    ]
