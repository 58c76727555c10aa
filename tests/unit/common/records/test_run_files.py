"""What a run's files tell of its past, when Redis tells nothing."""

from __future__ import annotations

import json
from pathlib import Path

from meshrl.common.base.files.sealed import sealed
from meshrl.common.records.checkpoints import best, checkpoint_name, committed, last_lineage

WEIGHTS = "abcdef01" * 4


def record(run: Path, *events: tuple[str, dict[str, object]], cut: bool = False) -> None:
    lines = [json.dumps({"kind": kind, "fields": fields}) + "\n" for kind, fields in events]
    (run / "events.jsonl").write_text("".join(lines) + ('{"kind": "step", "li' if cut else ""))


def checkpoint(run: Path, lineage: int, step: int) -> str:
    """Its name."""
    (run / "checkpoints").mkdir(exist_ok=True)
    name = checkpoint_name(lineage, step, WEIGHTS)
    held = {"lineage": lineage, "step": step, "weights": WEIGHTS}
    (run / "checkpoints" / f"{name}.json").write_bytes(sealed(held))
    return name


def test_a_lineage_is_above_all_that_events_and_checkpoints_tell_of(tmp_path: Path) -> None:
    assert last_lineage(tmp_path) == 0
    checkpoint(tmp_path, 2, 4)
    assert last_lineage(tmp_path) == 2
    record(tmp_path, ("step", {"lineage": 1}), ("restored", {"lineage": 5}), ("opened", {}))
    assert last_lineage(tmp_path) == 5


def test_the_best_version_is_one_that_the_lineage_has(tmp_path: Path) -> None:
    def judged(step: int, best: bool = True) -> tuple[str, dict[str, object]]:
        return "evaluation", {"best": best, "step": step, "manifest": f"m{step}", "value": 0.5}

    back = ("lineage", {"lineage": 1, "version": 8})
    for told, expected in (
        ([judged(4), judged(10)], "m10"),
        ([judged(4), judged(10), back], None),  # retention has let go of the one before
        ([judged(8), judged(10, best=False), back], "m8"),
        ([judged(10), back, judged(10)], "m10"),
    ):
        record(tmp_path, *told)
        found = best(tmp_path)
        assert (None if found is None else found.manifest) == expected


def test_an_event_that_was_cut_off_is_none(tmp_path: Path) -> None:
    name = checkpoint(tmp_path, 0, 4)
    checkpoint(tmp_path, 0, 8)
    judged = {"best": True, "step": 4, "manifest": "m", "value": 0.5}
    record(
        tmp_path,
        ("step", {"lineage": 0, "checkpoint": name}),
        ("evaluation", judged),
        cut=True,
    )
    found, top = committed(tmp_path), best(tmp_path)
    assert found is not None and found.stem == name
    assert top is not None and top.version == 4
    assert last_lineage(tmp_path) == 0
