"""All jobs of a mesh at once: each with its own figures, and why it does nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from meshrl.common.state.jobs import JobRow, Phase
from meshrl.common.state.pool.workers.rows import Role
from meshrl.common.state.registry import Entry
from meshrl.view.live.mesh_view import MeshLines, screen
from meshrl.view.live.view import roles
from meshrl.view.mesh.frames import Frame, frame
from meshrl.view.mesh.rates import TokenRate
from meshrl.view.mesh.snapshot import MeshSnapshot
from meshrl.view.mesh.workers import lines
from tests.unit.meshrl.view.test_tables import MESH, WAITS, row


def shard(job: str, tokens: float, in_flight: int) -> Entry:
    stats = {"tokens": tokens, "in_flight": in_flight}
    return Entry(f"rollout/{job}/0", "rollout", alive=True, stats=stats, renewed_ms=1_000_000)


def steps(*rewards: float) -> list[dict[str, Any]]:
    return [
        {"step": n, "reward": reward, "tokens_trained": 500, "wall": 100.0 + 2 * n}
        for n, reward in enumerate(rewards, 1)
    ]


ROWS = (row("a"), row("b", WAITS, Phase.QUEUED))


def mesh(at_s: float = 0.0, *rows: JobRow) -> MeshSnapshot:
    entries = [shard("a", 100 * at_s, 7), shard("b", 10 * at_s, 3)]
    took = {"a": steps(0.25, 0.5)}
    return replace(MESH, jobs=rows or ROWS, entries=entries, steps=took, now_ms=1_000_000)


def shown(*rows: JobRow) -> tuple[MeshSnapshot, Frame]:
    found = mesh(1.0, *rows)
    return found, frame(found, {"a": 100.0, "b": 10.0}, "/mesh")


def test_each_job_has_its_own_figures() -> None:
    a, b = shown()[1].jobs
    assert (a.rolled_out_s, a.trained_s, a.in_flight) == pytest.approx((100.0, 250.0, 7))
    assert (b.rolled_out_s, b.trained_s, b.in_flight) == pytest.approx((10.0, 0.0, 3))
    assert (a.rewards, b.rewards) == ((0.25, 0.5), ())
    assert roles(list(lines(mesh())), "a") == f"w0:{Role.TRAINING} w0:{Role.ROLLOUT}"


def test_a_rate_is_of_the_last_seconds_and_of_one_process() -> None:
    rate = TokenRate()
    assert [rate.see(at_s, 100 * at_s) for at_s in (10.0, 20.0, 30.0)] == [0.0, 100.0, 100.0]
    assert (rate.see(31.0, 5.0), rate.see(32.0, 15.0)) == (0.0, 10.0)


def test_a_job_that_stands_still_is_named_and_one_that_waits_is_not() -> None:
    still = tuple(replace(row, progress_ms=1) for row in ROWS)
    a, b = shown(*still)[1].jobs
    assert "no group, step or evaluation has come" in a.quiet
    assert b.quiet == ""


def test_the_screen_has_all_jobs_and_all_workers() -> None:
    console = Console(width=130, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    failed = row("c", phase=Phase.FAILED)
    console.print(screen(*shown(*ROWS, failed), 65.0, "/mesh"))
    text = console.export_text()
    for wanted in ("3 jobs", "1:05", "3/48", "0.500", f"b is {WAITS}", "c failed: it broke", "w3"):
        assert wanted in text, wanted


def test_without_a_terminal_there_is_a_line_for_each_news(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed_lines = MeshLines()
    a, b = ROWS
    for at_s, rows in (
        (1.0, ROWS),
        (2.0, ROWS),
        (3.0, (replace(a, steps_done=4), replace(b, held=""))),
        (4.0, (replace(a, steps_done=4, held="paused: job b"), replace(b, held=""))),
    ):
        printed_lines.show(*shown(*rows), at_s)
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[0] for line in printed] == [
        "[0:01] a: training",
        f"[0:01] b: {WAITS}",
        "[0:03] a: step 4/48",
        "[0:03] b: queued",
        "[0:04] a: paused: job b",
    ]
