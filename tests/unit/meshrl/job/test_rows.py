"""Datasets of every format give the same rows, and a bad row is named by its place."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.config import EnvironmentConfig, JobConfig
from meshrl.common.model.chat.messages import conversation_of
from meshrl.job import rows, tasksets
from meshrl.job.bundle import pack
from meshrl.job.jobfile import load

ROWS: list[dict[str, Any]] = [
    {"prompt": f"what is {i}?", "answer": i, "tags": ["a", "ü"], "more": {"share": 0.5, "no": None}}
    for i in range(7)
]


def jsonl(path: Path, values: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(v) + "\n" for v in values))
    return path


def parquet_file(path: Path, values: list[dict[str, Any]]) -> Path:
    import pyarrow as pa  # starts threads: never while tests are collected
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(values), path, row_group_size=2)
    return path


def saved(path: Path, values: list[dict[str, Any]], shards: int = 1) -> Path:
    """The layout of `datasets.Dataset.save_to_disk`, version 5.2: Arrow streams and state.json."""
    import pyarrow as pa  # starts threads: never while tests are collected

    path.mkdir(parents=True)
    table = pa.Table.from_pylist(values)
    names = [f"data-{i:05d}-of-{shards:05d}.arrow" for i in range(shards)]
    size = -(-len(values) // shards)
    for i, name in enumerate(names):
        with pa.OSFile(str(path / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as to:
            to.write_table(table.slice(i * size, size), max_chunksize=2)
    (path / "dataset_info.json").write_text("{}")
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names]}))
    return path


def values(path: Path) -> list[dict[str, Any]]:
    return [row.value for row in rows.read(path, "prompt")]


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    several = tmp_path / "several"
    parquet_file(several / "train-00000-of-00002.parquet", ROWS[:3])
    parquet_file(several / "train-00001-of-00002.parquet", ROWS[3:])
    for path in (
        jsonl(tmp_path / "rows.jsonl", ROWS),
        parquet_file(tmp_path / "rows.parquet", ROWS),
        several,
        several / "train-*.parquet",
        saved(tmp_path / "saved", ROWS),
        saved(tmp_path / "sharded", ROWS, shards=3),
    ):
        assert rows.exists(path)
        assert values(path) == ROWS, path


def test_rows_that_say_the_same_are_the_same_in_every_format(tmp_path: Path) -> None:
    written = tmp_path / "rows.jsonl"
    written.write_text('{"more":{"no":null,"share":0.5}, "tags":["a","\\u00fc"],"answer":0, ')
    written.write_text(written.read_text() + '"prompt":"what is 0?"}\n')
    (one,) = rows.read(written)
    first = next(rows.read(parquet_file(tmp_path / "rows.parquet", ROWS)))
    assert one.identity == first.identity and one.line != first.line


def test_a_directory_of_several_splits_asks_for_one(tmp_path: Path) -> None:
    parquet_file(tmp_path / "hub/train-00000-of-00001.parquet", ROWS)
    parquet_file(tmp_path / "hub/test-00000-of-00001.parquet", ROWS)
    with pytest.raises(ConfigError, match=r"several splits: test, train.*test-\*\.parquet"):
        values(tmp_path / "hub")
    saved(tmp_path / "both/train", ROWS)
    (tmp_path / "both/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ConfigError, match=r"several splits: train, test.*both/train"):
        values(tmp_path / "both")
    assert values(tmp_path / "both/train") == ROWS


def test_what_is_no_dataset_says_what_would_be(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"neither state\.json nor"):
        values(tmp_path / "empty")
    (tmp_path / "text.parquet").write_text("{}")
    with pytest.raises(ConfigError, match=r"text\.parquet: not Parquet"):
        values(tmp_path / "text.parquet")
    assert not rows.exists(tmp_path / "train-*.parquet")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (datetime.datetime(2026, 1, 1), "column 'extra' is no plain data"),
        (b"\xff", "column 'extra' is no plain data"),
        (float("inf"), "column 'extra' holds a number that is not finite"),
    ],
)
def test_a_value_that_is_no_plain_data_names_row_and_column(
    tmp_path: Path, value: Any, says: str
) -> None:
    cells = [{"prompt": "a", "extra": None}, {"prompt": "b", "extra": value}]
    path = parquet_file(tmp_path / "rows.parquet", cells)
    with pytest.raises(ConfigError, match=rf"rows\.parquet, row 2: {says}"):
        values(path)


@pytest.mark.parametrize("value", [1 << 64, -(1 << 63) - 1, "\ud800", [{"a\udfff": 1}]])
def test_a_value_that_cannot_be_sent_names_row_and_column(tmp_path: Path, value: Any) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": "b", "extra": value}])
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 2: column 'extra' cannot be sent"):
        values(path)
    limits = [{"prompt": "c", "extra": [(1 << 64) - 1, -(1 << 63), "\U0001f600"]}]
    assert values(jsonl(tmp_path / "rows.jsonl", limits)) == limits


def test_a_task_of_a_taskset_that_cannot_be_sent_is_named(tmp_path: Path) -> None:
    writer = tmp_path / "python"  # stands in for an interpreter that has the package
    row = json.dumps({"prompt": "a", "answer": 1 << 64})
    writer.write_text(f"#!/bin/sh\nfor last; do :; done\necho '{row}' > \"$last\"\n")
    writer.chmod(0o755)
    environment = EnvironmentConfig(verifiers="sums", python=str(writer))
    with pytest.raises(ConfigError, match="taskset 'sums', task 1: column 'answer' cannot be sent"):
        tasksets.tasks(JobConfig(environment=environment), tmp_path)


def test_a_row_without_its_prompt_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path / "saved", [{"prompt": "a"}, {"prompt": None}])
    with pytest.raises(ConfigError, match=r"row 2: the row has no string 'prompt'"):
        values(path)


def test_a_prompt_may_be_messages_only_in_a_chat(tmp_path: Path) -> None:
    message = {"role": "user", "content": "hello"}
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": [message]}, {"prompt": "hello"}])
    assert len(list(rows.read(path, "prompt", chat=True))) == 2
    with pytest.raises(ConfigError, match=r"line 1: 'prompt' is a list.* the job has no chat"):
        values(path)
    for bad, says in (
        ([], "line 1: 'prompt' is no conversation: the list of messages is empty"),
        ([message, {"role": "user"}], "line 1: .*: message 2 .user. has no content"),
        ([{"role": "nobody", "content": ""}], "message 1 has the role 'nobody'"),
        ({"role": "user"}, "no string, or list of messages, 'prompt', but {'role'"),
    ):
        path = jsonl(tmp_path / "rows.jsonl", [{"prompt": bad}])
        with pytest.raises(ConfigError, match=says):
            list(rows.read(path, "prompt", chat=True))


def test_a_mixed_conversation_of_parquet_is_taken(tmp_path: Path) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "a"},
    ]
    path = parquet_file(tmp_path / "rows.parquet", [{"prompt": messages}, {"prompt": messages[:1]}])
    read = [row.value["prompt"] for row in rows.read(path, "prompt", chat=True)]
    assert read[0][0] == messages[0] | {"tool_calls": None, "tool_call_id": None}
    assert conversation_of(read[0]) == conversation_of(messages)


def test_a_number_of_jsonl_that_is_not_finite_names_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for written in ("NaN", "-Infinity", "1e999", '[0, {"a": -1e400}]'):
        path.write_text('{"prompt": "a", "n": 1e300}\n{"prompt": "b", "n": ' + written + "}\n")
        says = r"rows\.jsonl, line 2: column 'n' holds a number that is not finite: "
        with pytest.raises(ConfigError, match=says):
            values(path)


def test_a_job_takes_parquet_and_a_saved_dataset_and_bundles_them(
    job: Path, tmp_path: Path
) -> None:
    parquet_file(job.parent / "train.parquet", ROWS[:5])
    saved(job.parent / "held", ROWS[5:])
    overrides = ["dataset.train=train.parquet", "dataset.held_out=held"]
    config, base = load(job, overrides)
    directory, document = pack(config, base, tmp_path / "run")
    for key, want in (("train", ROWS[:5]), ("held_out", ROWS[5:])):
        bundled = (directory / document["dataset"][key]).read_text().splitlines()
        assert [json.loads(line) for line in bundled] == want


def test_a_held_out_row_is_found_among_the_trained_ones_whatever_the_format(job: Path) -> None:
    (job.parent / "train.jsonl").write_text('{"prompt":"1+1=",   "n": 2}\n')
    parquet_file(
        job.parent / "held.parquet", [{"prompt": "1+3=", "n": 4}, {"n": 2, "prompt": "1+1="}]
    )
    with pytest.raises(ConfigError, match=r"held\.parquet, row 2 is also in dataset\.train"):
        load(job, ["dataset.held_out=held.parquet"])


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [row.value["prompt"] for row in rows.read(tmp_path / "rows.jsonl")] == ["a", "b"]


def test_lists_in_lists_without_end_are_refused_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' + "[" * 5000 + "]" * 5000 + "\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 2: .* nested too deeply"):
        list(rows.read(tmp_path / "rows.jsonl"))


def test_a_number_of_more_digits_than_are_read_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"n": ' + "9" * 5000 + "}\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 2: a number that cannot be read"):
        list(rows.read(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("state.json", "{"),
        ("state.json", "[]"),
        ("state.json", "{}"),
        ("state.json", '{"_data_files": [{"filename": "absent.arrow"}]}'),
        ("state.json", '{"_data_files": [{"filename": "state.json"}]}'),
        ("dataset_dict.json", "{}"),
    ],
)
def test_a_saved_dataset_that_is_none_names_its_file(
    tmp_path: Path, file: str, content: str
) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(ConfigError) as caught:
        list(rows.read(tmp_path))
    assert str(tmp_path / ("absent.arrow" if "absent" in content else file)) in str(caught.value)
    assert "\n" not in str(caught.value) and caught.value.fix
