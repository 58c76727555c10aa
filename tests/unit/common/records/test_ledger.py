"""Ledgers and run files, read completely by later processes."""

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


def open_record(group: int, member: int) -> tuple[RecordKind, list[object]]:
    return RecordKind.OPEN, [group, member, 7, 0, [1, 2, 3]]


def tokens_record(trajectory: int, tokens: list[int], version: int) -> tuple[RecordKind, TokenRows]:
    n = len(tokens)
    return RecordKind.TOKENS, TokenRows(
        trajectory_ids=np.array([trajectory], np.int64),
        counts=np.array([n], np.int32),
        tokens=np.array(tokens, np.int32),
        logprobs=np.full(n, -0.5, np.float32),
        versions=np.full(n, version, np.int32),
    )


def open_ledger(directory: Path, owner: str = "1") -> Ledger:
    ledger = Ledger(HOST, directory, owner)
    ledger.open_next_segment()
    return ledger


def test_append_without_a_segment_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no segment"):
        Ledger(HOST, tmp_path, "1").append([open_record(0, 0)])


records = st.lists(
    st.one_of(
        st.builds(lambda g: (RecordKind.CLOSE, [g, "ready"]), st.integers(0, 1 << 40)),
        st.builds(lambda text: (RecordKind.TURN, [1, 9 * text]), st.text(max_size=20)),
        st.builds(
            tokens_record,
            st.integers(0, 1 << 50),
            st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
            st.integers(0, 9),
        ),
    ),
    min_size=1,
    max_size=6,
)


def is_same_record(a: LedgerRecord, kind: RecordKind, payload: Any) -> bool:
    if kind is not RecordKind.TOKENS:
        return a.kind is kind and a.payload == payload
    return a.kind is kind and is_equal_rows(a.payload, payload)


def is_equal_rows(a: TokenRows, b: TokenRows) -> bool:
    pairs = [(getattr(a, field.name), getattr(b, field.name)) for field in fields(TokenRows)]
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in pairs)


@settings(max_examples=15)
@given(written=records, garbage=st.binary(max_size=40))
def test_complete_records_of_a_cut_segment_are_read(
    tmp_path_factory: pytest.TempPathFactory, written: list[tuple[RecordKind, Any]], garbage: bytes
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "1-00001.ledger"
    frames = [HEADER, *(encode_record(kind, payload) for kind, payload in written)]
    content = b"".join(frames)
    ends = np.cumsum([len(f) for f in frames]).tolist()
    for length in range(len(content) + 1):
        record_count = max(0, sum(end <= length for end in ends) - 1)
        path.write_bytes(content[:length])
        read_records = list(iter_records_with_offsets(path))
        assert len(read_records) == record_count
        assert all(
            is_same_record(r, *wrote) for (r, _), wrote in zip(read_records, written, strict=False)
        )
        assert [end for _, end in read_records] == ends[1 : record_count + 1]
    path.write_bytes(content + garbage)
    read_records = list(iter_records_with_offsets(path))
    assert len(read_records) >= len(written)
    assert all(
        is_same_record(r, *wrote) for (r, _), wrote in zip(read_records, written, strict=False)
    )


@given(position=st.integers(len(HEADER), 10_000), flip=st.integers(1, 255))
def test_records_from_a_corrupt_byte_on_are_not_read(
    tmp_path_factory: pytest.TempPathFactory, position: int, flip: int
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "1-00001.ledger"
    encoded = encode_record(*tokens_record(make_trajectory_id(3, 1), [5, 700, 90_000], 2))
    content = bytearray(HEADER + 3 * encoded)
    position = len(HEADER) + position % (3 * len(encoded))
    content[position] ^= flip
    path.write_bytes(content)
    first_corrupt = (position - len(HEADER)) // len(encoded)
    assert len(list(iter_records(path.parent))) == first_corrupt
    # The last record may be torn.
    for sealed_bytes, expected_corrupt in ((len(content), True), (-1, first_corrupt < 2)):
        found, is_corrupt = read_until_corrupt(path, sealed_bytes)
        assert (len(found), is_corrupt) == (first_corrupt, expected_corrupt)


def read_until_corrupt(path: Path, sealed_bytes: int = -1) -> tuple[list[LedgerRecord], bool]:
    records: list[LedgerRecord] = []
    try:
        records.extend(record for record, _ in iter_records_with_offsets(path, sealed_bytes))
    except CorruptData as error:
        assert error.where == str(path)
        return records, True
    return records, False


@pytest.mark.parametrize("version", [1, 2, 4, 200])
def test_segment_of_another_format_is_not_reported_as_corrupt(tmp_path: Path, version: int) -> None:
    path = tmp_path / "1-00001.ledger"
    record_bytes = encode_record(RecordKind.CLOSE, [1, "ready"])
    header_bytes = make_header(version) if version > FORMAT else MAGIC + bytes([version])
    path.write_bytes(header_bytes + record_bytes)
    with pytest.raises(BadMessage, match=f"format {version};"):
        list(iter_records_with_offsets(path))
    path.write_bytes(MAGIC + bytes([version]) + HEADER[len(MAGIC) + 1 :] + record_bytes)
    with pytest.raises(CorruptData, match="header"):
        list(iter_records_with_offsets(path))


@pytest.mark.parametrize("position", range(len(HEADER)))
@pytest.mark.parametrize("bit", range(8))
def test_any_flipped_header_bit_is_corruption(tmp_path: Path, position: int, bit: int) -> None:
    path = tmp_path / "1-00001.ledger"
    content = bytearray(HEADER + encode_record(RecordKind.CLOSE, [1, "ready"]))
    content[position] ^= 1 << bit
    path.write_bytes(content)
    assert read_until_corrupt(path) == read_until_corrupt(path, len(content)) == ([], True)


def test_torn_segment_is_corrupt_only_below_its_sealed_size(tmp_path: Path) -> None:
    path = tmp_path / "1-00001.ledger"
    for content in (b"", HEADER[:5], HEADER, bytes(4096)):
        path.write_bytes(content)
        assert (
            list(iter_records_with_offsets(path)) == list(iter_records_with_offsets(path, 0)) == []
        )
        assert read_until_corrupt(path, 5000) == ([], True)
    path.write_bytes(HEADER + 3 * encode_record(RecordKind.CLOSE, [1, "ready"]) + b"torn")
    assert len(list(iter_records_with_offsets(path))) == 3
    path.unlink()
    assert list(iter_records_with_offsets(path, 0)) == []
    assert read_until_corrupt(path, len(HEADER) + 1) == ([], True)


def test_restored_trajectory_ignores_records_between_gap_and_reopening() -> None:
    one, other = make_trajectory_id(1, 0), make_trajectory_id(2, 0)
    restored = RestoredGroups()

    def apply(*records: tuple[RecordKind, Any]) -> None:
        for kind, payload in records:
            restored.apply_record(LedgerRecord(kind, payload), lambda group, member: 0)

    apply(open_record(1, 0), tokens_record(one, [10], 0))
    restored.mark_gap()
    both = TokenRows(
        trajectory_ids=np.array([one, other]),
        counts=np.array([1, 2], np.int32),
        tokens=np.array([11, 20, 21], np.int32),
        logprobs=np.zeros(3, np.float32),
        versions=np.zeros(3, np.int32),
    )
    apply(open_record(2, 0), (RecordKind.TOKENS, both), (RecordKind.END, [one, "done", 1.0, ""]))
    assert restored.trajectories[one].turn_tokens.tolist() == [10]
    assert restored.trajectories[one].outcome is None
    assert restored.trajectories[other].turn_tokens.tolist() == [20, 21]
    apply(open_record(1, 0), tokens_record(one, [10], 0), tokens_record(one, [12], 0))
    assert restored.trajectories[one].turn_tokens.tolist() == [10, 12], "it was written down again"


def test_records_after_the_sealed_size_are_not_read(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    ledger.append([open_record(1, 0)], [1])
    sealed = ledger.segment_path.stat().st_size
    ledger.append([(RecordKind.CLOSE, [1, "ready"])], [1])
    assert [
        record.kind for record, _ in iter_records_with_offsets(ledger.segment_path, sealed)
    ] == [RecordKind.OPEN]


def test_segment_is_released_when_no_group_needs_it(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    ledger.append([open_record(1, 0), open_record(2, 0)], [1, 2])
    first = ledger.segment_path
    assert ledger.open_next_segment() == (first, first.stat().st_size)
    assert ledger.forget_group(1) == []
    assert ledger.forget_group(2) == [first]


def test_trajectory_is_restored_token_for_token(tmp_path: Path) -> None:
    key = make_trajectory_id(3, 1)
    records = [
        open_record(3, 1),
        tokens_record(key, [10, 11], 0),
        (RecordKind.TURN, [key, "[1+1]"]),
        (RecordKind.TOOL, [key, "calculator", "1+1", 2]),
        (RecordKind.APPEND, [key, [20, 21]]),
        tokens_record(key, [12], 1),
    ]
    ledger = open_ledger(tmp_path)
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


def test_logged_tool_result_is_not_requested_again(tmp_path: Path) -> None:
    key = make_trajectory_id(0, 0)
    restored = RestoredGroups()
    ledger = open_ledger(tmp_path)
    ledger.append(
        [open_record(0, 0), tokens_record(key, [10], 0), (RecordKind.TURN, [key, "[2]"])], [0]
    )
    ledger.append([(RecordKind.TOOL, [key, "calculator", "2", 2])], [0])
    for record in iter_records(tmp_path):
        restored.apply_record(record, lambda group, member: 0)
    open_turn = restored.trajectories[key].open_turn
    assert open_turn is not None and open_turn.has_tool_value and open_turn.tool_value == 2
    assert restored.trajectories[key].build_replay() == [["step", [10]]]
    replay = restored.trajectories[key].build_replay(answered=True)
    assert replay == [["step", [10]], ["result", 2]], "the environment has gone on from its value"


def test_buffers_grow_with_the_trajectory() -> None:
    t = Trajectory(0, 0, 0, 0, 0)
    t.set_prompt(list(range(100)))
    sampled_values = np.arange(300, dtype=np.int32)
    t.append_sampled(sampled_values, sampled_values.astype(np.float32), sampled_values)
    assert t.length == 400
    assert t.turn_tokens.tolist() == list(range(300))


def test_full_disk_accepts_only_complete_records_and_recovers(
    tmp_path: Path,
) -> None:
    host = SimulatedHost(SystemClock(), Random(1), disk_bytes=150)
    ledger = Ledger(host, tmp_path, "1")
    ledger.open_next_segment()
    keys = [make_trajectory_id(1, member) for member in range(6)]
    record_count = 0
    with pytest.raises(StorageFull, match="Free space"):
        for key in keys:
            ledger.append([tokens_record(key, [key, key], 0)], [1])
            record_count += 1
    assert 0 < record_count < len(keys)
    ledger.defer(RecordKind.TURN, [keys[0], "said"], 1)
    with pytest.raises(StorageFull):
        ledger.append([tokens_record(keys[record_count], [7], 0)], [1])
    assert [record.kind for record in iter_records(tmp_path)] == [RecordKind.TOKENS] * record_count
    host.disk_bytes = -1
    ledger.append([tokens_record(keys[record_count], [7], 0)], [1])
    last = [record.kind for record in iter_records(tmp_path)][record_count:]
    assert last == [RecordKind.TURN, RecordKind.TOKENS], (
        "what was deferred is written before what followed it"
    )


def test_long_turn_text_is_compressed_to_half_its_bytes() -> None:
    text = " ".join(f"Then {n} and {n * n % 97} make {n + n * n % 97}," for n in range(60))
    assert len(encode_record(RecordKind.TURN, [1, text])) < 0.5 * len(text)


def write_events(run: Path, *events: tuple[str, dict[str, object]], cut: bool = False) -> None:
    lines = [json.dumps({"kind": kind, "fields": fields}) + "\n" for kind, fields in events]
    (run / "events.jsonl").write_text("".join(lines) + ('{"kind": "step", "li' if cut else ""))


def write_checkpoint(run: Path, lineage: int, step: int) -> str:
    """Write a checkpoint's document and return the checkpoint's name."""
    (run / "checkpoints").mkdir(exist_ok=True)
    name = format_checkpoint_name(lineage, step, WEIGHTS)
    document = {"lineage": lineage, "step": step, "weights": WEIGHTS}
    (run / "checkpoints" / f"{name}.json").write_bytes(encode_sealed(document))
    return name


def test_last_lineage_is_the_highest_of_events_and_checkpoints(tmp_path: Path) -> None:
    assert read_last_lineage(tmp_path) == 0
    write_checkpoint(tmp_path, 2, 4)
    assert read_last_lineage(tmp_path) == 2
    write_events(tmp_path, ("step", {"lineage": 1}), ("restored", {"lineage": 5}), ("opened", {}))
    assert read_last_lineage(tmp_path) == 5


def test_best_version_belongs_to_the_current_lineage(tmp_path: Path) -> None:
    def evaluation(step: int, best: bool = True) -> tuple[str, dict[str, object]]:
        return "evaluation", {"best": best, "step": step, "manifest": f"m{step}", "value": 0.5}

    rollback = ("lineage", {"lineage": 1, "version": 8})
    # Retention has removed the previous best version.
    for recorded_events, expected in (
        ([evaluation(4), evaluation(10)], "m10"),
        ([evaluation(4), evaluation(10), rollback], None),
        ([evaluation(8), evaluation(10, best=False), rollback], "m8"),
        ([evaluation(10), rollback, evaluation(10)], "m10"),
    ):
        write_events(tmp_path, *recorded_events)
        best = read_best_version(tmp_path)
        assert (None if best is None else best.manifest_digest) == expected


def test_truncated_event_is_ignored(tmp_path: Path) -> None:
    name = write_checkpoint(tmp_path, 0, 4)
    write_checkpoint(tmp_path, 0, 8)
    evaluation = {"best": True, "step": 4, "manifest": "m", "value": 0.5}
    write_events(
        tmp_path,
        ("step", {"lineage": 0, "checkpoint": name}),
        ("evaluation", evaluation),
        cut=True,
    )
    found, best = find_committed(tmp_path), read_best_version(tmp_path)
    assert found is not None and found.stem == name
    assert best is not None and best.version == 4
    assert read_last_lineage(tmp_path) == 0
