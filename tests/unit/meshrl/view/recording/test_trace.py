"""Traces of processes in the format that Perfetto opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.base.errors import NotFound
from meshrl.common.base.files.json_lines import encode_row
from meshrl.common.state.events import Event
from meshrl.view.trace import trace_writer
from meshrl.view.trace.trace_writer import TraceNotes, draw_trace
from meshrl.view.trace.tracks import BarShape, TraceBar, TrackWriter
from tests.traced import check_trace, list_spans

START_S = 1_700_000_000.0


def trajectory(group: int, at: float, *parts: Any, training: bool = True) -> dict[str, Any]:
    row = {"kind": "trajectory", "at": START_S + at, "group": group, "member": 1, "version": 2}
    row |= {"prompt": 5, "tokens": 9, "ending": "done", "reward": 1.0, "training": training}
    return row | {"parts": list(parts)}


def step(number: int, at: float) -> dict[str, Any]:
    return {
        "kind": "step",
        "at": START_S + at,
        "step": number,
        "tokens": 700,
        "parts": ["waiting", 400.0, "computing", 500.0, "staging", 50.0, "committing", 10.0],
        "intake": ["wait", 400.0, "pack", 2.5, "", 557.5],
        "rounds": [410.0, 200.0, 610.0, 250.0],
    }


CHECKPOINT = {"kind": "checkpoint", "at": START_S + 2.0, "step": 1, "parts": ["write", 300.0]}
WEIGHTS = {"kind": "weights", "at": START_S + 1.0, "version": 1, "parts": ["pull", 5.0, "pause", 1]}


def event(at: float, kind: str, **fields: Any) -> Event:
    ms = round(1000 * (START_S + at))
    return Event(f"{ms}-0", ms, kind, {"job": "tiny"} | fields)


def desired(at: float, instance: str, role: str, *workers: str) -> Event:
    about = {"gang": "g1", "resident": instance, "role": role, "tier": "accelerator"}
    return event(at, "desired", **about, workers=list(workers), reason="stage_time", train_s=2.0)


def actual(at: float, instance: str, role: str, status: str) -> Event:
    about = {"gang": "g1", "resident": instance, "role": role, "tier": "accelerator"}
    return event(at, "actual", **about, status=status)


MOVE = {"gang": "g1", "resident": "g1.1", "from": "rollout", "to": "training", "undone": False}
EVENTS = [
    event(0.0, "phase", phase="training", error=""),
    desired(0.1, "g1.0", "rollout", "w1"),
    actual(0.2, "g1.0", "rollout", "ready"),
    event(1.0, "step", step=4, groups=[{"group": 7, "samples": 2, "scored": 2}]),
    desired(1.5, "g1.0", "idle", "w1"),
    desired(1.5, "g1.1", "training", "w1"),
    actual(2.0, "g1.1", "training", "ready"),
    event(2.1, "move", **MOVE, policy="user", started_ms=1000 * (START_S + 1.5)),
    event(3.0, "phase", phase="finished", error=""),
]
NOTED = TraceNotes(
    shards={
        "shard 0": [
            trajectory(7, 0.5, "open", 1.5, "queue", 0.25, "prefill", 30.0, "decode", 70.125),
            trajectory(8, 0.55, "open", 100.0, "reward", 200.0),
            trajectory(1 << 40, 0.9, "open", 5.0, training=False),
        ]
    },
    trainer=[step(4, 0.2), step(5, 1.2), CHECKPOINT],
    engines={"g1.0": [WEIGHTS]},
)


def test_trace_has_trajectories_trainer_engines_and_gangs() -> None:
    events = list(draw_trace(NOTED, EVENTS))
    check_trace(events)
    names = [span["name"] for span in list_spans(events, "shard 0")]
    assert names[:5] == ["7.1", "open", "queue", "prefill", "decode"]
    assert "evaluation 0.1" in names
    first = list_spans(events, "shard 0")[0]
    assert (first["ts"], first["dur"]) == (500_000, 101_875)
    assert first["args"]["trained in step"] == 4 and first["args"]["reward"] == 1.0
    trainer = [(span["name"], span["dur"]) for span in list_spans(events, "trainer")]
    assert trainer[:3] == [("step 4", 960_000), ("wait", 400_000), ("train", 500_000)]
    assert ("sync: stage", 50_000) in trainer and ("sync: commit", 10_000) in trainer
    assert ("pack", 2_500) in trainer and trainer.count(("round", 200_000)) == 2
    assert ("checkpoint: write", 300_000) in trainer
    engines = [(s["name"], s["ts"], s["dur"]) for s in list_spans(events, "engines")]
    assert engines == [
        ("version 1", 1_000_000, 6_000),
        ("pull", 1_000_000, 5_000),
        ("pause", 1_005_000, 1_000),
    ]
    gangs = [(s["name"], s["ts"], s["dur"]) for s in list_spans(events, "gangs")]
    assert gangs == [
        ("rollout", 200_000, 1_300_000),
        ("rollout (leaving)", 1_500_000, 500_000),
        ("training", 2_000_000, 1_000_000),
    ]
    assert [s["name"] for s in list_spans(events, "job")] == ["training", "finished"]


def test_arrow_connects_a_group_to_its_training_step() -> None:
    late = trajectory(7, 0.6, "open", 250.0)
    noted = TraceNotes(shards={"shard 0": [*NOTED.shards["shard 0"], late]}, trainer=NOTED.trainer)
    events = list(draw_trace(noted, EVENTS))
    check_trace(events)
    source, target = (e for e in events if e["ph"] in "sf")
    assert (source["id"], source["ts"], target["ts"]) == (7, 849_999, 850_000)
    [step] = [s for s in list_spans(events, "trainer") if s["name"] == "step 4"]
    assert (target["pid"], target["tid"]) == (step["pid"], step["tid"])
    too_late = trajectory(7, 1.1, "open", 250.0)  # after the step by its host's clock
    noted = TraceNotes(shards={"shard 0": [too_late]}, trainer=NOTED.trainer)
    assert not [e for e in draw_trace(noted, EVENTS) if e["ph"] in "sf"]


def test_move_is_an_instant_on_its_workers_track_with_its_reason() -> None:
    events = list(draw_trace(NOTED, EVENTS))
    [track] = [e for e in events if e["name"] == "thread_name" and e["args"]["name"] == "w1"]
    [move] = [e for e in events if e["ph"] == "i"]
    assert (move["pid"], move["tid"], move["ts"]) == (track["pid"], track["tid"], 2_100_000)
    assert move["args"]["reason"].startswith("g1 moved from rollout to training (user); it took")


bars = st.lists(
    st.builds(
        lambda start_s, parts, shape: TraceBar("one", start_s, parts, {"a": 1}, "any", shape),
        st.floats(0.0, 3.0),
        st.lists(st.tuples(st.sampled_from(["a", "b", ""]), st.floats(0.0, 900.0)), max_size=5),
        st.sampled_from(BarShape),
    ),
    max_size=30,
)


@given(bars)
@settings(max_examples=40)
def test_overlapping_spans_get_separate_lanes(
    found: list[TraceBar],
) -> None:
    tracks = TrackWriter(0.0)
    events = [*tracks.draw_bars("x", "first", found), *tracks.draw_bars("x", "second", found)]
    check_trace(events)
    lanes = {(e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(set(lanes.values())) == len(lanes)
    whole = [e for e in events if e["ph"] == "X" and e["name"] == "one"]
    assert len(whole) == 2 * sum(bar.shape is not BarShape.PARTS for bar in found)


def write_notes(run_dir: Path, name: str, *rows: dict[str, Any], tail: bytes = b"") -> None:
    path = run_dir / "trace" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(encode_row(row, n) for n, row in enumerate(rows)) + tail)


def test_trace_contains_complete_lines_of_every_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (trajectory(n, n, "open", 10.0) for n in (1, 2))
    write_notes(tmp_path, "shard-0.older", one)
    write_notes(tmp_path, "shard-0", two, tail=b'{"kind": "traj')
    write_notes(tmp_path, "shard-1", one)
    write_notes(tmp_path, "engine-g3.0", WEIGHTS)
    write_notes(tmp_path, "trainer", step(1, 0.0), tail=b"\x00\x00\n")
    found = trace_writer.read_notes(tmp_path)
    assert [row["group"] for row in found.shards["shard 0"]] == [1, 2]
    assert (len(found.shards["shard 1"]), len(found.trainer)) == (1, 1)
    assert list(found.engines) == ["g3.0"]
    (tmp_path / "events.jsonl").write_bytes(b"")
    trace_writer.export_trace(tmp_path, tmp_path / "mine.json")
    held = json.loads((tmp_path / "mine.json").read_text())
    check_trace(held["traceEvents"])
    assert f"{len(held['traceEvents'])} events" in capsys.readouterr().out
    assert (tmp_path / "mine.json").stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == ["events.jsonl", "mine.json", "trace"]


def test_trace_of_a_long_run_shows_the_last_trajectories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_writer, "MAX_TRAJECTORIES", 3)
    rows = [trajectory(n, n, "open", 10.0) for n in range(8)]
    write_notes(tmp_path, "shard-0.older", *rows[:6])
    write_notes(tmp_path, "shard-0", *rows[6:])
    assert [r["group"] for r in trace_writer.read_notes(tmp_path).shards["shard 0"]] == [5, 6, 7]


def test_run_without_traces_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"has no traces.*tracking\.trace"):
        trace_writer.export_trace(tmp_path, None)
