"""Lanes of time slices, from the notes of a run and from a slice scheduler."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from meshrl.common.api.node import (
    RETAINED_SLICES,
    KindMove,
    SliceCandidate,
    SliceExplanation,
    SliceRecord,
)
from meshrl.common.base.files.json_lines import encode_row
from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.workers.rows import Gang, Instance, Role
from meshrl.view.history.run_snapshot import RunSnapshot
from meshrl.view.json_output import to_json_document
from meshrl.view.live import mesh_view, run_view
from meshrl.view.live.slice_tables import make_lanes
from meshrl.view.mesh.mesh_frames import MeshFrame
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot
from meshrl.view.mesh.slice_frames import GangSlicesFrame, build_slices_frame
from meshrl.view.mesh.slice_lanes import (
    MIN_SPAN_S,
    OTHER,
    OTHER_JOB,
    SLICE,
    SWITCH,
    build_lane,
    build_lanes,
    read_lanes,
)
from meshrl.view.report.slice_chart import WINDOW_S, draw_slice_chart
from meshrl.view.trace.trace_writer import TraceNotes, draw_trace
from tests.traced import check_trace, list_spans

START_S = 1_700_000_000.0


def note(
    at: float, wait_ms: float, switch_ms: float, slice_ms: float, **more: Any
) -> dict[str, Any]:
    about = {"gang": "g0", "instance": "g0.0", "role": "engine", "function": "generate"}
    parts = ["wait", wait_ms, "switch", switch_ms, "slice", slice_ms]
    row = {"kind": "slice", "at": START_S + at, "parts": parts, "loaded_bytes": 0}
    row["other_jobs_s"] = wait_ms / 1000
    return row | {"hidden_bytes": 0} | about | more


TRAINER = {"instance": "g0.1", "role": "trainer", "function": "train_step"}
NOTES = [
    note(0.0, 0.0, 0.0, 200.0),
    note(0.1, 100.0, 300.0, 400.0, loaded_bytes=30, hidden_bytes=90, **TRAINER),
    note(0.2, 1800.0, 0.0, 200.0),  # from 0.9 to 2.0 another job computed
]


def test_waits_without_own_slices_are_those_of_another_job() -> None:
    [lane] = build_lanes(NOTES)
    spans = [
        (s.kind, round(s.start_s - START_S, 3), round(s.end_s - START_S, 3)) for s in lane.spans
    ]
    assert spans == [
        (SLICE, 0.0, 0.2),
        (SWITCH, 0.2, 0.5),
        (SLICE, 0.5, 0.9),
        (OTHER, 0.9, 2.0),
        (SLICE, 2.0, 2.2),
    ]
    assert lane.spans[3].label == OTHER_JOB
    assert lane.switch_s == pytest.approx(0.3)
    assert lane.hidden_share == 0.75


times = st.tuples(*(st.integers(0, 80) for _ in range(4)))


@given(st.lists(times, min_size=1, max_size=8))
def test_other_jobs_compute_exactly_where_only_waits_are(drawn: list[tuple[int, ...]]) -> None:
    """Check each millisecond against the intervals of all notes."""
    notes = [note(at / 1000, wait, switch, length) for at, wait, switch, length in drawn]
    [lane] = build_lanes(notes)
    found = [s for s in lane.spans if s.kind == OTHER]
    runs: list[list[int]] = []
    for ms in range(340):
        waits = any(at <= ms < at + wait for at, wait, *_ in drawn)
        computes = any(at + wait <= ms < at + wait + more + of for at, wait, more, of in drawn)
        if waits and not computes:
            if runs and runs[-1][1] == ms:
                runs[-1][1] = ms + 1
            else:
                runs.append([ms, ms + 1])
    edges = [[round(1000 * (at - START_S)) for at in (s.start_s, s.end_s)] for s in found]
    shortest = round(1000 * MIN_SPAN_S)
    assert [one for one in edges if one[1] - one[0] > shortest] == [
        one for one in runs if one[1] - one[0] > shortest
    ]


def test_wait_for_the_own_job_or_a_call_is_not_another_job() -> None:
    [lane] = build_lanes([note(0.0, 500.0, 0.5, 100.0, other_jobs_s=0.0)])
    assert [span.kind for span in lane.spans] == [SLICE]


def test_lanes_are_read_from_intact_lines(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    lines = b"".join(encode_row(row, number) for number, row in enumerate(NOTES))
    (tmp_path / "trace" / "slices-g0.0.jsonl").write_bytes(lines[:-20])
    [lane] = read_lanes(tmp_path)
    assert [span.kind for span in lane.spans] == [SLICE, SWITCH, SLICE]
    assert read_lanes(tmp_path / "none") == []


def make_record(**more: Any) -> SliceRecord:
    about: dict[str, Any] = {
        **{"number": 1, "instance": "g0.0", "job": "a", "function": "generate", "ranks": [0]},
        **{"requested_s": 10.0, "chosen_s": 10.0, "granted_s": 10.0, "ended_s": 11.0},
        **{"end": "released", "moves": [], "hidden_bytes": 0},
    }
    return SliceRecord(**about | more)


def test_scheduler_names_the_jobs_and_its_running_slice_ends_now() -> None:
    moves = [
        KindMove("g0.0", "optimizer", "accelerator", "memory", 5, 0.1),
        KindMove("g0.1", "parameters", "memory", "accelerator", 7, 0.1),
    ]
    running = make_record(
        **{"number": 2, "instance": "g0.1", "job": "b", "chosen_s": 11.0, "granted_s": 11.5},
        **{"ended_s": 0.0, "end": "", "moves": moves, "hidden_bytes": 21},
    )
    lane = build_lane(SliceExplanation("g0", "hrrs", [], [make_record(), running]), 14.0)
    slices = [(one.job, one.duration_s) for one in lane.spans if one.kind == SLICE]
    assert slices == [("a", 1.0), ("b", 2.5)]
    assert (lane.switch_s, lane.hidden_share) == (0.5, 0.75)
    assert [span.label for span in lane.spans] == [
        "generate of a g0.0",
        "switch to g0.1",
        "generate of b g0.1",
    ]
    late = lane.clip(12.0, 13.0)
    assert [(span.start_s, span.end_s) for span in late.spans] == [(12.0, 13.0)]


GANG = Gang(
    "g0",
    ("w0", "w1"),
    1,
    (
        Instance("g0.0", "a", Role.ROLLOUT, time_sliced=True),
        Instance("g0.1", "b", Role.TRAINING, core=True, ranks=(0, 1), time_sliced=True),
    ),
)


def make_frame() -> GangSlicesFrame:
    moves = [KindMove("g0.1", "parameters", "memory", "accelerator", 7, 0.1)]
    records = [
        make_record(requested_s=60.0, chosen_s=60.0, granted_s=60.0, ended_s=80.0),
        make_record(
            **{"number": 2, "instance": "g0.1", "job": "b", "function": "train_step"},
            **{"ranks": [0, 1]},
            **{"chosen_s": 80.0, "granted_s": 82.0, "ended_s": 90.0, "moves": moves},
        ),
    ]
    waiting = [SliceCandidate("g0.0", "generate", 2.5, 0.5, 0.1, 5.0)]
    return build_slices_frame(GANG, SliceExplanation("g0", "hrrs", [], records, waiting), 100.0)


def test_frame_has_accelerator_time_of_the_window_by_instance_and_function() -> None:
    frame = make_frame()
    assert [(use.job, use.role, use.accelerator_s) for use in frame.uses] == [
        ("a", "rollout", {"generate": 10.0}),
        ("b", "training", {"train_step": 16.0}),
    ]
    assert (frame.switch_s, frame.hidden_share) == (4.0, 0.0)  # on two accelerators
    assert [span.role for span in frame.spans] == ["rollout", "training", "training"]
    document = json.loads(json.dumps(to_json_document(MeshFrame("/m", slices=(frame,)))))
    assert document["slices"][0]["spans"][0]["function"] == "generate"


def test_window_begins_with_the_oldest_slice_that_the_scheduler_retains() -> None:
    records = [
        make_record(
            **{"number": n, "requested_s": 88.0, "chosen_s": 88.0 + n / 32},
            **{"granted_s": 88.0 + n / 32, "ended_s": 88.0 + (n + 1) / 32},
        )
        for n in range(RETAINED_SLICES)
    ]
    gang = Gang("g0", ("w0",), 1, GANG.instances[:1])
    frame = build_slices_frame(gang, SliceExplanation("g0", "hrrs", [], records), 98.0)
    assert (frame.start_s, frame.end_s) == (88.0, 98.0)
    assert draw(make_lanes([frame]))[1:] == [
        "    a g0.0 a rollout: generate 80 %",
        "    last 10 s: switches 0 %, hidden loads -, idle 20 %; waiting: none",
    ]


def draw(part: RenderableType, width: int = 110) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(part)
    return [line.rstrip() for line in console.export_text().splitlines()]


LEGEND = [
    "    a g0.0 a rollout: generate 17 %",
    "    b g0.1 b training: train_step 27 %",
    "    last 30 s: switches 7 %, hidden loads 0 %, idle 50 %; waiting: a generate 2.5 s",
]


def test_lane_of_a_terminal_has_a_letter_for_each_instance() -> None:
    lines = draw(make_lanes([make_frame(), GangSlicesFrame("g1", error="worker/w2 is away")]))
    # 0.5 s a character, from 70 s: slices until 80 s and 90 s, a switch of 2 s
    lane = "a" * 20 + "=" * 4 + "b" * 16 + "." * 20
    assert lines == [f"g0  {lane}", *LEGEND, "g1  worker/w2 is away"]


def test_lane_of_a_narrow_terminal_is_shorter() -> None:
    lines = draw(make_lanes([make_frame()]), width=34)
    assert lines[0] == "g0  " + "a" * 10 + "=" * 2 + "b" * 8 + "." * 10
    assert " ".join(" ".join(lines[1:]).split()) == " ".join(" ".join(LEGEND).split())


def test_live_views_show_lanes_of_shared_gangs_only() -> None:
    other = Gang("g1", ("w2",), 1, GANG.instances[:1])
    mesh = MeshSnapshot(gangs=(GANG, other))
    assert [mesh.find_shared_gangs(job) for job in ("", "a", "c")] == [(GANG,), (GANG,), ()]
    run = RunSnapshot("a", Phase.TRAINING, "training", 0, 1, 8, 5.0)
    for slices, shown in (((), []), ((make_frame(),), LEGEND)):
        screens = [
            run_view.render_screen(replace(run, slices=slices), Path("runs/a")),
            mesh_view.render_screen(mesh, MeshFrame("/m", slices=slices), 5.0, "/m"),
        ]
        for screen in screens:
            lines = [line.strip("│ ") for line in draw(screen)]
            assert [line for line in lines if "g0." in line or "idle" in line] == [
                line.strip() for line in shown
            ]


def test_trace_has_a_track_for_each_gang_with_switches_of_their_own() -> None:
    other = note(0.5, 0.0, 0.0, 100.0, gang="g1")
    events = list(draw_trace(TraceNotes(slices=[*NOTES, other]), []))
    check_trace(events)
    spans = list_spans(events, "time slices")
    assert [span["name"] for span in spans] == [
        "generate of g0.0",
        "switch to g0.1",
        "train_step of g0.1",
        OTHER_JOB,
        "generate of g0.0",
        "generate of g0.0",
    ]
    tracks = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert {"g0", "g1"} <= set(tracks)
    switch = spans[1]
    assert (switch["cat"], switch["dur"]) == ("switch train_step", 300_000)
    assert switch["args"]["hidden_bytes"] == 90
    assert "args" not in spans[3] or not spans[3]["args"]  # nothing of the other job


def test_chart_shows_the_last_minute_of_each_gang() -> None:
    old = note(-200.0, 0.0, 0.0, 100.0, function="sync")
    text = draw_slice_chart(build_lanes([old, *NOTES]))
    assert text.count("<rect") == 5
    assert "train_step of g0.1: 400 ms" in text and OTHER_JOB in text and "sync" not in text
    assert f"seconds of the last {WINDOW_S:.0f}" in text
    assert "no time slices" in draw_slice_chart([])
