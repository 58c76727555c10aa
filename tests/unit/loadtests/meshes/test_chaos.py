"""Pauses under faults, and the check that chaos of a shared gang shared it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtests.chaos.pauses import describe_pauses
from loadtests.chaos.several_jobs import describe_sharing
from loadtests.sharing.gang_sharing import SliceRecording
from meshrl.common.api.node import KindMove, SliceRecord

MOVE = KindMove("g0.0", "optimizer", "accelerator", "memory", 1000, 0.1)


def write_steps(out: Path, *ends_s: float) -> Path:
    """Write the events of a run whose steps end at these times, and return its directory."""
    out.mkdir()
    lines = [
        json.dumps({"kind": "step", "ms": 1000 * end_s, "fields": {"job": out.name}})
        for end_s in ends_s
    ]
    (out / "events.jsonl").write_text("\n".join(lines) + "\n")
    return out


def make_fault(job: str, at: float, until: float) -> dict[str, Any]:
    return {"job": job, "at": at, "until": until}


def make_slice(number: int, job: str, *moves: KindMove) -> SliceRecord:
    at_s = float(number)
    times_s = (at_s, at_s, at_s, at_s + 0.5)
    return SliceRecord(
        number, f"{job}.0", job, "generate", [0], *times_s, "released", list(moves), 0
    )


def make_recording(**slices_by_gang: list[SliceRecord]) -> SliceRecording:
    return SliceRecording(
        {
            gang: {(one.number, one.requested_s): one for one in slices}
            for gang, slices in slices_by_gang.items()
        }
    )


def test_pauses_are_named_by_the_processes_that_were_hit_during_them(tmp_path: Path) -> None:
    runs = [write_steps(tmp_path / "a", 0, 1, 9, 30, 33), write_steps(tmp_path / "b", 0, 4, 9, 20)]
    faults = [make_fault("b", 3, 3), make_fault("", 10, 18), make_fault("a", 17, 18)]
    assert describe_pauses(runs, faults) == {
        "longest_pause_s": 21.0,
        "longest_pause_s_a": 21.0,
        "longest_pause_s_b": 11.0,
        "other_pause_s": 8.0,  # of a, while b was hit
        "common_pause_s": 11.0,  # of b: a's process was hit too, and one of both
        "own_pause_s": 21.0,
        "undisturbed_pause_s": 5.0,
    }


def test_run_without_a_record_has_no_pause(tmp_path: Path) -> None:
    assert set(describe_pauses([tmp_path / "a"], []).values()) == {None}


def test_shared_gang_counts_slices_switches_and_moves() -> None:
    slices = [make_slice(1, "a"), make_slice(2, "b", MOVE, MOVE), make_slice(3, "b")]
    found = describe_sharing(make_recording(g0=[*slices, make_slice(4, "a")]), {"a", "b"})
    assert found == {
        "shared": 1,
        "job_switches": 2,
        "slices": 4,
        "slices_a": 2,
        "slices_b": 2,
        "slices_cut": 0,
        "kinds_moved": 2,
        "moved_bytes": 2000,
    }


@pytest.mark.parametrize(
    ("recording", "reason"),
    [
        (make_recording(g0=[make_slice(1, "a", MOVE)], g1=[make_slice(2, "b", MOVE)]), "a, b had"),
        (make_recording(g0=[make_slice(1, "a"), make_slice(2, "b")]), "held all tensors"),
        (make_recording(), "a, b had"),
    ],
)
def test_chaos_without_sharing_is_reported(
    recording: SliceRecording, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert describe_sharing(recording, {"a", "b"})["shared"] == 0
    assert reason in capsys.readouterr().err
