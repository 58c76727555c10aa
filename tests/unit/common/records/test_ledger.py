"""Ledgers and run files: records are read back whole by later processes."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import BadMessage, CorruptData, Refused, StorageFull
from meshrl.common.base.files.sealed_documents import encode_sealed
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.records.checkpoints import (
    find_committed,
    format_checkpoint_name,
    read_best_version,
    read_last_lineage,
)
from meshrl.common.records.ledger import (
    FORMAT,
    HEADER,
    MAGIC,
    Ledger,
    LedgerRecord,
    RecordKind,
    encode_record,
    extract_groups,
    iter_records,
    iter_records_with_offsets,
    make_header,
    make_trajectory_id,
)
from meshrl.common.records.token_records import TokenRows
from meshrl.services.rollout.trajectories.trajectory import RestoredGroups, Trajectory
from tests.simulated_host import SimulatedHost

HOST = SystemHost()
WEIGHTS = "abcdef01" * 4


def opened(group: int, member: int) -> tuple[RecordKind, list[object]]:
    return RecordKind.OPEN, [group, member, 7, 0, [1, 2, 3]]


def sampled(trajectory: int, tokens: list[int], version: int) -> tuple[RecordKind, TokenRows]:
    n = len(tokens)
    return RecordKind.TOKENS, TokenRows(
        trajectory_ids=np.array([trajectory], np.int64),
        counts=np.array([n], np.int32),
        tokens=np.array(tokens, np.int32),
        logprobs=np.full(n, -0.5, np.float32),
        versions=np.full(n, version, np.int32),
    )


def ledger_in(directory: Path, owner: str = "1") -> Ledger:
    ledger = Ledger(HOST, directory, owner)
    ledger.open_next_segment()
    return ledger


def test_an_append_without_a_segment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no segment"):
        Ledger(HOST, tmp_path, "1").append([opened(0, 0)])


records = st.lists(
    st.one_of(
        st.builds(lambda g: (RecordKind.CLOSE, [g, "ready"]), st.integers(0, 1 << 40)),
        st.builds(lambda text: (RecordKind.TURN, [1, 9 * text]), st.text(max_size=60)),
        st.builds(
            sampled,
            st.integers(0, 1 << 50),
            st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
            st.integers(0, 9),
        ),
    ),
    min_size=1,
    max_size=6,
)


def same(a: LedgerRecord, kind: RecordKind, payload: Any) -> bool:
    if kind is not RecordKind.TOKENS:
        return a.kind is kind and a.payload == payload
    return a.kind is kind and equal(a.payload, payload)


def equal(a: TokenRows, b: TokenRows) -> bool:
    pairs = [(getattr(a, field.name), getattr(b, field.name)) for field in fields(TokenRows)]
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in pairs)


@pytest.mark.rotating(2)
@settings(max_examples=40)
@given(written=records, garbage=st.binary(max_size=40))
def test_wherever_a_segment_is_cut_its_whole_records_are_read_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, written: list[tuple[RecordKind, Any]], garbage: bytes
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "1-00001.ledger"
    frames = [HEADER, *(encode_record(kind, payload) for kind, payload in written)]
    content = b"".join(frames)
    ends = np.cumsum([len(f) for f in frames]).tolist()
    for cut in range(len(content) + 1):
        whole = max(0, sum(end <= cut for end in ends) - 1)
        path.write_bytes(content[:cut])
        found = list(iter_records_with_offsets(path))
        assert len(found) == whole
        assert all(same(r, *wrote) for (r, _), wrote in zip(found, written, strict=False))
        assert [end for _, end in found] == ends[1 : whole + 1]
    path.write_bytes(content + garbage)
    found = list(iter_records_with_offsets(path))
    assert len(found) >= len(written)
    assert all(same(r, *wrote) for (r, _), wrote in zip(found, written, strict=False))


@given(place=st.integers(len(HEADER), 10_000), flip=st.integers(1, 255))
def test_a_record_with_a_wrong_byte_is_not_read(
    tmp_path_factory: pytest.TempPathFactory, place: int, flip: int
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "1-00001.ledger"
    one = encode_record(*sampled(make_trajectory_id(3, 1), [5, 700, 90_000], 2))
    content = bytearray(HEADER + 3 * one)
    place = len(HEADER) + place % (3 * len(one))
    content[place] ^= flip
    path.write_bytes(content)
    hit = (place - len(HEADER)) // len(one)
    assert len(list(iter_records(path.parent))) == hit
    for whole, is_damage in ((len(content), True), (-1, hit < 2)):  # the last one may be torn
        found, damaged = read_until_damaged(path, whole)
        assert (len(found), damaged) == (hit, is_damage)


def read_until_damaged(path: Path, whole: int = -1) -> tuple[list[LedgerRecord], bool]:
    found: list[LedgerRecord] = []
    try:
        found.extend(record for record, _ in iter_records_with_offsets(path, whole))
    except CorruptData as error:
        assert error.where == str(path)
        return found, True
    return found, False


@pytest.mark.parametrize("version", [1, 2, 4, 200])
def test_a_segment_of_another_format_is_told_from_a_damaged_one(
    tmp_path: Path, version: int
) -> None:
    path = tmp_path / "1-00001.ledger"
    whole = encode_record(RecordKind.CLOSE, [1, "ready"])
    began = make_header(version) if version > FORMAT else MAGIC + bytes([version])
    path.write_bytes(began + whole)
    with pytest.raises(BadMessage, match=f"format {version};"):
        list(iter_records_with_offsets(path))
    path.write_bytes(MAGIC + bytes([version]) + HEADER[len(MAGIC) + 1 :] + whole)
    with pytest.raises(CorruptData, match="header"):
        list(iter_records_with_offsets(path))


@pytest.mark.parametrize("place", range(len(HEADER)))
@pytest.mark.parametrize("bit", range(8))
def test_any_flipped_bit_of_a_header_is_damage(tmp_path: Path, place: int, bit: int) -> None:
    path = tmp_path / "1-00001.ledger"
    content = bytearray(HEADER + encode_record(RecordKind.CLOSE, [1, "ready"]))
    content[place] ^= 1 << bit
    path.write_bytes(content)
    assert read_until_damaged(path) == read_until_damaged(path, len(content)) == ([], True)


def test_a_torn_segment_is_damage_only_if_it_was_sealed_further(tmp_path: Path) -> None:
    path = tmp_path / "1-00001.ledger"
    for content in (b"", HEADER[:5], HEADER, bytes(4096)):
        path.write_bytes(content)
        assert (
            list(iter_records_with_offsets(path)) == list(iter_records_with_offsets(path, 0)) == []
        )
        assert read_until_damaged(path, 5000) == ([], True)
    path.write_bytes(HEADER + 3 * encode_record(RecordKind.CLOSE, [1, "ready"]) + b"torn")
    assert len(list(iter_records_with_offsets(path))) == 3
    path.unlink()
    assert list(iter_records_with_offsets(path, 0)) == []
    assert read_until_damaged(path, len(HEADER) + 1) == ([], True)


def test_of_a_damaged_trajectory_counts_what_came_before_the_gap_and_what_begins_anew() -> None:
    one, other = make_trajectory_id(1, 0), make_trajectory_id(2, 0)
    restored = RestoredGroups()

    def apply(*records: tuple[RecordKind, Any]) -> None:
        for kind, payload in records:
            restored.apply_record(LedgerRecord(kind, payload), lambda group, member: 0)

    apply(opened(1, 0), sampled(one, [10], 0))
    restored.mark_gap()
    both = TokenRows(
        trajectory_ids=np.array([one, other]),
        counts=np.array([1, 2], np.int32),
        tokens=np.array([11, 20, 21], np.int32),
        logprobs=np.zeros(3, np.float32),
        versions=np.zeros(3, np.int32),
    )
    apply(opened(2, 0), (RecordKind.TOKENS, both), (RecordKind.END, [one, "done", 1.0, ""]))
    assert restored.trajectories[one].turn_tokens.tolist() == [10]
    assert restored.trajectories[one].outcome is None
    assert restored.trajectories[other].turn_tokens.tolist() == [20, 21]
    apply(opened(1, 0), sampled(one, [10], 0), sampled(one, [12], 0))
    assert restored.trajectories[one].turn_tokens.tolist() == [10, 12], "it was written down again"


def test_what_a_zombie_writes_after_the_seal_is_not_read(tmp_path: Path) -> None:
    ledger = ledger_in(tmp_path)
    ledger.append([opened(1, 0)], [1])
    sealed = ledger.segment_path.stat().st_size
    ledger.append([(RecordKind.CLOSE, [1, "ready"])], [1])
    assert [
        record.kind for record, _ in iter_records_with_offsets(ledger.segment_path, sealed)
    ] == [RecordKind.OPEN]


def test_a_segment_goes_when_no_group_needs_it(tmp_path: Path) -> None:
    ledger = ledger_in(tmp_path)
    ledger.append([opened(1, 0), opened(2, 0)], [1, 2])
    first = ledger.segment_path
    assert ledger.open_next_segment() == (first, first.stat().st_size)
    assert ledger.forget_group(1) == []
    assert ledger.forget_group(2) == [first]


def test_a_trajectory_is_rebuilt_token_for_token(tmp_path: Path) -> None:
    key = make_trajectory_id(3, 1)
    records = [
        opened(3, 1),
        sampled(key, [10, 11], 0),
        (RecordKind.TURN, [key, "[1+1]"]),
        (RecordKind.TOOL, [key, "calculator", "1+1", 2]),
        (RecordKind.APPEND, [key, [20, 21]]),
        sampled(key, [12], 1),
    ]
    ledger = ledger_in(tmp_path)
    for record in records:
        ledger.append([record], [3])
    restored = RestoredGroups()
    for found in iter_records(tmp_path):
        assert extract_groups(found) == {3}
        restored.apply_record(found, lambda group, member: 0)
    t = restored.trajectories[key]
    assert t.tokens.tolist() == [1, 2, 3, 10, 11, 20, 21, 12]
    assert t.versions.tolist() == [-1, -1, -1, 0, 0, -1, -1, 1]
    assert t.turn_tokens.tolist() == [12]
    assert t.build_replay() == [["step", [10, 11]], ["result", 2]]
    (turn,) = t.all_turns
    assert (turn.text, turn.sampled_tokens, turn.appended_tokens) == ("[1+1]", 2, 2)
    assert turn.list_calls() == [("calculator", "1+1", 2)]


def test_a_tool_result_that_was_logged_is_not_asked_for_again(tmp_path: Path) -> None:
    key = make_trajectory_id(0, 0)
    restored = RestoredGroups()
    ledger = ledger_in(tmp_path)
    ledger.append([opened(0, 0), sampled(key, [10], 0), (RecordKind.TURN, [key, "[2]"])], [0])
    ledger.append([(RecordKind.TOOL, [key, "calculator", "2", 2])], [0])
    for record in iter_records(tmp_path):
        restored.apply_record(record, lambda group, member: 0)
    open_turn = restored.trajectories[key].open_turn
    assert open_turn is not None and open_turn.has_tool_value and open_turn.tool_value == 2
    assert restored.trajectories[key].build_replay() == [["step", [10]]]
    told = restored.trajectories[key].build_replay(answered=True)
    assert told == [["step", [10]], ["result", 2]], "the environment has gone on from its value"


def test_buffers_grow_with_the_trajectory() -> None:
    t = Trajectory(0, 0, 0, 0, 0)
    t.set_prompt(list(range(100)))
    made = np.arange(300, dtype=np.int32)
    t.append_sampled(made, made.astype(np.float32), made)
    assert t.length == 400
    assert t.turn_tokens.tolist() == list(range(300))


def test_a_full_disk_takes_whole_records_or_none_and_goes_on_when_there_is_room(
    tmp_path: Path,
) -> None:
    host = SimulatedHost(SystemClock(), Random(1), disk_bytes=150)
    ledger = Ledger(host, tmp_path, "1")
    ledger.open_next_segment()
    keys = [make_trajectory_id(1, member) for member in range(6)]
    written = 0
    with pytest.raises(StorageFull, match="free space"):
        for key in keys:
            ledger.append([sampled(key, [key, key], 0)], [1])
            written += 1
    assert 0 < written < len(keys)
    ledger.defer(RecordKind.TURN, [keys[0], "said"], 1)
    with pytest.raises(StorageFull):
        ledger.append([sampled(keys[written], [7], 0)], [1])
    assert [record.kind for record in iter_records(tmp_path)] == [RecordKind.TOKENS] * written
    host.disk_bytes = -1
    ledger.append([sampled(keys[written], [7], 0)], [1])
    last = [record.kind for record in iter_records(tmp_path)][written:]
    assert last == [RecordKind.TURN, RecordKind.TOKENS], (
        "what was deferred is written before what followed it"
    )


def test_the_text_of_a_long_turn_takes_half_its_bytes() -> None:
    text = " ".join(f"Then {n} and {n * n % 97} make {n + n * n % 97}," for n in range(60))
    assert len(encode_record(RecordKind.TURN, [1, text])) < 0.5 * len(text)


def record(run: Path, *events: tuple[str, dict[str, object]], cut: bool = False) -> None:
    lines = [json.dumps({"kind": kind, "fields": fields}) + "\n" for kind, fields in events]
    (run / "events.jsonl").write_text("".join(lines) + ('{"kind": "step", "li' if cut else ""))


def checkpoint(run: Path, lineage: int, step: int) -> str:
    """Its name."""
    (run / "checkpoints").mkdir(exist_ok=True)
    name = format_checkpoint_name(lineage, step, WEIGHTS)
    held = {"lineage": lineage, "step": step, "weights": WEIGHTS}
    (run / "checkpoints" / f"{name}.json").write_bytes(encode_sealed(held))
    return name


def test_a_lineage_is_above_all_that_events_and_checkpoints_tell_of(tmp_path: Path) -> None:
    assert read_last_lineage(tmp_path) == 0
    checkpoint(tmp_path, 2, 4)
    assert read_last_lineage(tmp_path) == 2
    record(tmp_path, ("step", {"lineage": 1}), ("restored", {"lineage": 5}), ("opened", {}))
    assert read_last_lineage(tmp_path) == 5


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
        found = read_best_version(tmp_path)
        assert (None if found is None else found.manifest_digest) == expected


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
    found, top = find_committed(tmp_path), read_best_version(tmp_path)
    assert found is not None and found.stem == name
    assert top is not None and top.version == 4
    assert read_last_lineage(tmp_path) == 0
