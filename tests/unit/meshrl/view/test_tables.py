"""Tables of a mesh: its workers, instances and jobs, and the reasons of idle ones."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from typing import Any, cast

import pytest
from rich.console import Console
from rich.table import Table

from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.process.supervision.exit_reports import LastExit
from meshrl.common.state.jobs import COUNT_FIELDS, JobRow, Phase
from meshrl.common.state.pool.workers.rows import (
    Gang,
    Instance,
    InstancePhase,
    InstanceReport,
    Role,
    Tier,
    WorkerRow,
)
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.common.state.registry import RegistryEntry
from meshrl.view.live import console_tables, mesh_tables
from meshrl.view.live.mesh_view import MeshLines, render_screen
from meshrl.view.live.run_text import format_roles
from meshrl.view.mesh.mesh_frames import MeshFrame, build_frame
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot
from meshrl.view.mesh.rates import TokenRate
from meshrl.view.mesh.worker_lines import list_worker_lines

WAITS = "waiting: it needs 2 workers, and 1 is idle"


def row(name: str, held: str = "", phase: Phase = Phase.TRAINING, **pool: Any) -> JobRow:
    document = JobConfig(name=name).to_document()
    return JobRow(
        id=name,
        phase=phase,
        document=document | {"pool": document["pool"] | pool},
        run_dir=f"/runs/{name}",
        lineage=0,
        version=3,
        manifest="",
        checkpoint="",
        steps_done=3,
        cursor=0,
        admitted=0,
        error="it broke" if phase == Phase.FAILED else "",
        block_reason=held,
        **cast(dict[str, Any], dict.fromkeys(COUNT_FIELDS, 0)),
    )


def make_instance(id: str, job: str, role: Role, **more: Any) -> Instance:
    report = InstanceReport(0, 1, 1, 7, InstancePhase.READY, more.get("tier", Tier.ACCELERATOR))
    return Instance(id, job, role, reports={0: report}, **more)


MESH = MeshSnapshot(
    tuple(WorkerRow(f"w{n}", "h0", f"cpu:{n}", 7, alive=n != 3) for n in range(4)),
    (
        Gang(
            "g0",
            ("w0",),
            1,
            (
                make_instance("g0.0", "a", Role.TRAINING, core=True, time_sliced=True),
                make_instance("g0.1", "a", Role.ROLLOUT, time_sliced=True),
            ),
        ),
        Gang(
            "g4",
            ("w1",),
            1,
            (make_instance("g4.2", "b", Role.ROLLOUT, tier=Tier.DISK, pinned=True),),
        ),
    ),
)


def render_cells(table: Table) -> list[list[str]]:
    """Return the cells of each line as a wide terminal shows them."""
    console = Console(width=240, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    lines = console.export_text().splitlines()
    return [[cell.strip() for cell in line.split("   ") if cell.strip()] for line in lines]


def test_jobs_table_has_resources_and_block_reasons() -> None:
    rows = [
        row("a", priority=2, share=3.0),
        row("b", WAITS, Phase.QUEUED),
        row("c", "paused: job a has priority 2", Phase.FINISHED),
    ]
    cells = render_cells(
        mesh_tables.make_jobs_table(replace(MESH, jobs=rows, entitlements={"a": 2, "b": 0}))
    )
    assert cells[1:] == [
        ["a", "training", "3/48", "1/2", "2", "3", "0", "/runs/a"],
        ["b", "waiting", "3/48", "1/0", "0", "1", "0", "/runs/b"],
        ["c", "finished", "3/48", "0", "1", "0", "/runs/c"],
    ]
    assert render_cells(mesh_tables.make_jobs_table(replace(MESH, jobs=rows[:1])))[1][3] == "1"
    assert mesh_tables.list_block_reasons(rows) == [f"b is {WAITS}"]


def test_jobs_table_has_the_price_of_an_hour_if_workers_have_prices() -> None:
    priced = replace(MESH, jobs=[row("a"), row("b")], settings=PoolSettings(reserved_price=3))
    head, a, b = render_cells(mesh_tables.make_jobs_table(priced))
    assert head[4] == "cost/h"
    assert (a[4], b[4]) == ("3", "0"), "an engine on disk costs nothing"


def test_shared_gangs_are_listed_with_their_jobs() -> None:
    shares = [
        Instance(f"g0.{n}", id, Role.TRAINING, core=True, time_sliced=True, pinned=n == 1)
        for n, id in enumerate(["a", "b"])
    ]
    gang = Gang("g0", ("w0",), 1, tuple(shares))
    line = "g0 is shared by time slices: a, b (by request)"
    assert mesh_tables.list_shared_gangs(replace(MESH, gangs=(gang,))) == [line]
    alone = replace(gang, instances=gang.instances[:1])
    assert mesh_tables.list_shared_gangs(replace(MESH, gangs=(alone,))) == []


def test_workers_table_has_all_instances_of_each_worker() -> None:
    said = {"running": 31, "version": 9, "job": "a"}
    engine = RegistryEntry(name="engine/g0.1", kind="engine", alive=True, stats=said)
    cells = render_cells(mesh_tables.make_workers_table(replace(MESH, entries=[engine])))
    on = "accelerator"
    assert cells[1:] == [
        ["w0", "cpu:0", "g0", "g0.0", "a", "training", on, "ready", "core, time-sliced"],
        [
            "w0",
            "cpu:0",
            "g0",
            "g0.1",
            "a",
            "rollout",
            on,
            "ready",
            "31 running, version 9, time-sliced",
        ],
        [
            "w1",
            "cpu:1",
            "g4",
            "g4.2",
            "b",
            "rollout",
            "disk",
            "ready",
            "asleep, placed manually",
        ],
        ["w2", "cpu:2", "idle", "idle"],
        ["w3", "cpu:3", "idle", "lost"],
    ]


def test_json_document_has_the_same_data() -> None:
    found = json.loads(json.dumps(mesh_tables.to_document(MESH)))
    assert [w["id"] for w in found["workers"]] == ["w0", "w1", "w2", "w3"]
    assert found["gangs"][1]["residents"][0]["tier"] == "disk"


LONG = "a-name-that-somebody-has-given-to-a-job-of-his-and-has-to-type-again"


def test_names_are_never_cut_and_piped_output_has_no_width() -> None:
    notes = {0: InstanceReport(0, 1, 1, 7, InstancePhase.STARTING, Tier.ACCELERATOR, "so " * 40)}
    starts = replace(make_instance("g0.0", LONG, Role.TRAINING), reports=notes)
    table = mesh_tables.make_workers_table(
        MeshSnapshot(MESH.workers, (Gang("g0", ("w0",), 1, (starts,)),))
    )
    for terminal in (80, None):
        console = Console(width=console_tables.measure_width(table, terminal), file=StringIO())
        console.print(table)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert LONG in text and "…" not in text
        assert (("so " * 40).strip() in text) == (terminal is None), "a note may take several lines"
    assert console_tables.measure_width(table, 400) == 400


def test_last_exits_are_listed_below() -> None:
    end = LastExit("rollout/a/0", "a", 1, "exit status 1", 98_000, 3, final=False)
    assert mesh_tables.format_exits(MeshSnapshot(last_exits=[end], now_ms=100_000)) == [
        "rollout/a/0 exited 2 s ago, 3 times in total: exit status 1"
    ]


def shard(job: str, tokens: float, in_flight: int) -> RegistryEntry:
    stats = {"tokens": tokens, "in_flight": in_flight}
    return RegistryEntry(
        f"rollout/{job}/0", "rollout", alive=True, stats=stats, renewed_ms=1_000_000
    )


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


def make_frames(*rows: JobRow) -> tuple[MeshSnapshot, MeshFrame]:
    found = mesh(1.0, *rows)
    return found, build_frame(found, {"a": 100.0, "b": 10.0}, "/mesh")


def test_each_job_has_its_own_figures() -> None:
    a, b = make_frames()[1].jobs
    assert (a.rollout_tokens_per_s, a.trained_tokens_per_s, a.in_flight) == pytest.approx(
        (100.0, 250.0, 7)
    )
    assert (b.rollout_tokens_per_s, b.trained_tokens_per_s, b.in_flight) == pytest.approx(
        (10.0, 0.0, 3)
    )
    assert (a.rewards, b.rewards) == ((0.25, 0.5), ())
    assert (
        format_roles(list(list_worker_lines(mesh())), "a")
        == f"w0:{Role.TRAINING} w0:{Role.ROLLOUT}"
    )


def test_rate_covers_recent_seconds_of_one_process() -> None:
    rate = TokenRate()
    assert [rate.update(at_s, 100 * at_s) for at_s in (10.0, 20.0, 30.0)] == [0.0, 100.0, 100.0]
    assert (rate.update(31.0, 5.0), rate.update(32.0, 15.0)) == (0.0, 10.0)


def test_job_without_progress_is_marked_and_a_blocked_one_is_not() -> None:
    still = tuple(replace(row, progress_ms=1) for row in ROWS)
    a, b = make_frames(*still)[1].jobs
    assert "no group, step or evaluation has completed" in a.no_progress_reason
    assert b.no_progress_reason == ""


def test_screen_has_all_jobs_and_workers() -> None:
    console = Console(width=130, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    failed = row("c", phase=Phase.FAILED)
    console.print(render_screen(*make_frames(*ROWS, failed), 65.0, "/mesh"))
    text = console.export_text()
    for wanted in ("3 jobs", "1:05", "3/48", "0.500", f"b is {WAITS}", "c failed: it broke", "w3"):
        assert wanted in text, wanted


def test_output_without_a_terminal_has_one_line_for_each_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed_lines = MeshLines()
    a, b = ROWS
    for at_s, rows in (
        (1.0, ROWS),
        (2.0, ROWS),
        (3.0, (replace(a, steps_done=4), replace(b, block_reason=""))),
        (
            4.0,
            (replace(a, steps_done=4, block_reason="paused: job b"), replace(b, block_reason="")),
        ),
    ):
        printed_lines.show(*make_frames(*rows), at_s)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[0] for line in lines] == [
        "[0:01] a: training",
        f"[0:01] b: {WAITS}",
        "[0:03] a: step 4/48",
        "[0:03] b: queued",
        "[0:04] a: paused: job b",
    ]
