"""How far a run has come is read from its files, a part at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshrl.common.base.files import lines
from meshrl.common.state.server.rollback import JobMark, RollbackMark
from meshrl.launch.redis.recorded import RunRecord, recorded


def line(number: int, kind: str, **fields: Any) -> str:
    told = {"id": f"{number}-0", "ms": number, "kind": kind, "fields": {"job": "j"} | fields}
    return json.dumps(told) + "\n"


def test_a_record_is_read_on_from_where_it_ended(tmp_path: Path) -> None:
    record, file = RunRecord(tmp_path, "j"), tmp_path / "events.jsonl"
    assert record.look() == RollbackMark() and recorded(tmp_path, "j") == RollbackMark()
    begun = line(1, "registered", job="", token=7) + line(2, "opened", groups=[3, 4])
    file.write_text(begun + line(3, "step", lineage=1, version=2)[:-9])
    run_dir = str(tmp_path)
    assert record.look() == RollbackMark("2-0", 7, {"j": JobMark(next_group=5, run_dir=run_dir)})
    file.write_text(begun + line(3, "step", lineage=1, version=2) + "no line\n")
    now = RollbackMark("3-0", 7, {"j": JobMark(1, 2, 5, run_dir)})
    assert record.look() == recorded(tmp_path, "j") == now
    with file.open("a") as more:
        more.write(line(4, "opened", job="another", groups=[99]) + line(5, "phase", phase="failed"))
    assert record.look() == RollbackMark("5-0", 7, {"j": JobMark(1, 2, 5, run_dir, "failed")})
    file.write_text(begun)  # made again, from what there was
    assert record.look().event == "5-0"


def test_a_line_that_is_not_what_was_written_tells_nothing(tmp_path: Path) -> None:
    events = [line(1, "step", lineage=0, version=2), line(2, "step", lineage=0, version=3)]
    events += [line(3, "opened", groups=[4]), line(4, "note")]
    written = [lines.line(json.loads(event), n) for n, event in enumerate(events)]
    written[1] = written[1].replace(b'"version": 3', b'"version": 7')
    written[2] = written[2].replace(b"groups", b"grouqs")
    (tmp_path / "events.jsonl").write_bytes(b"".join(written))
    assert recorded(tmp_path, "j") == RollbackMark(
        "4-0", 0, {"j": JobMark(0, 2, run_dir=str(tmp_path))}
    )


def test_a_line_by_hand_that_lacks_something_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(line(1, "registered") + line(2, "note"))
    assert recorded(tmp_path, "j").event == "2-0"


def test_a_checkpoint_tells_the_version_before_its_own(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step-002-000006-abcd.json").write_text("{}")
    found = recorded(tmp_path, "j").jobs["j"]
    assert (found.lineage, found.version) == (2, 5)
