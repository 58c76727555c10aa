"""Rows of a job: formats, keys and chat messages."""

from __future__ import annotations

import ast
import datetime
import gzip
import json
import textwrap
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from loadtests.chat_templates.comparing import directory_of
from meshrl.common.base.errors import ConfigError
from meshrl.common.job.config import EnvironmentConfig, JobConfig
from meshrl.common.model.chat.messages import parse_conversation
from meshrl.job import dataset_rows, tasksets
from meshrl.job.bundle import pack_bundle
from meshrl.job.job_reader import load_config
from meshrl.job.row_files.data_source import DataSource
from meshrl.job.row_files.file_locations import has_source
from meshrl.job.row_keys import find_unconditional_keys
from tests.unit.common.model.chatting import qwen3_tokenizer
from tests.unit.common.model.templates.formats import FORMATS
from tests.unit.meshrl.job.conftest import JobVariant

ROWS: list[dict[str, Any]] = [
    {"prompt": f"what is {i}?", "answer": i, "tags": ["a", "ü"], "more": {"share": 0.5, "no": None}}
    for i in range(7)
]


def jsonl(path: Path, values: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(v) + "\n" for v in values))
    return path


def json_array(path: Path, values: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(values, indent=1))
    return path


def gzip_file(path: Path) -> Path:
    target = path.with_name(f"{path.name}.gz")
    target.write_bytes(gzip.compress(path.read_bytes()))
    return target


def parquet_file(path: Path, values: list[dict[str, Any]]) -> Path:
    import pyarrow as pa  # starts threads, so it is never imported during collection
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(values), path, row_group_size=2)
    return path


def save_dataset(path: Path, values: list[dict[str, Any]], shards: int = 1) -> Path:
    """Write rows in the layout of `datasets.Dataset.save_to_disk` 5.2: Arrow streams and
    state.json.
    """
    import pyarrow as pa  # starts threads, so it is never imported during collection

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


def values(path: Path, *, chat: bool = False, **options: Any) -> list[dict[str, Any]]:
    source = DataSource(str(path), **options)
    return [row.value for row in dataset_rows.read_rows(source, "prompt", chat=chat)]


def test_all_formats_yield_the_same_rows(tmp_path: Path) -> None:
    several = tmp_path / "several"
    parquet_file(several / "train-00000-of-00002.parquet", ROWS[:3])
    parquet_file(several / "train-00001-of-00002.parquet", ROWS[3:])
    for path in (
        jsonl(tmp_path / "rows.jsonl", ROWS),
        jsonl(tmp_path / "lines.json", ROWS),
        json_array(tmp_path / "rows.json", ROWS),
        gzip_file(json_array(tmp_path / "zipped.json", ROWS)),
        parquet_file(tmp_path / "rows.parquet", ROWS),
        several,
        several / "train-*.parquet",
        save_dataset(tmp_path / "saved", ROWS),
        save_dataset(tmp_path / "sharded", ROWS, shards=3),
    ):
        assert has_source(DataSource(str(path)))
        assert values(path) == ROWS, path


def test_equal_rows_have_one_identity_in_all_formats(tmp_path: Path) -> None:
    written = tmp_path / "rows.jsonl"
    written.write_text('{"more":{"no":null,"share":0.5}, "tags":["a","\\u00fc"],"answer":0, ')
    written.write_text(written.read_text() + '"prompt":"what is 0?"}\n')
    (one,) = dataset_rows.read_rows(DataSource(str(written)))
    path = parquet_file(tmp_path / "rows.parquet", ROWS)
    first = next(dataset_rows.read_rows(DataSource(str(path))))
    assert one.identity == first.identity and one.json_line != first.json_line


def test_directory_with_several_splits_yields_the_named_one(tmp_path: Path) -> None:
    parquet_file(tmp_path / "hub/train-00000-of-00001.parquet", ROWS)
    parquet_file(tmp_path / "hub/test-00000-of-00001.parquet", ROWS[:2])
    save_dataset(tmp_path / "both/train", ROWS)
    save_dataset(tmp_path / "both/test", ROWS[:2])
    (tmp_path / "both/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for directory in (tmp_path / "hub", tmp_path / "both"):
        assert values(directory) == ROWS
        assert values(directory, split="test") == ROWS[:2]
        with pytest.raises(
            ConfigError, match=r"train_split = 'dev': .* has (test, train|train, t)"
        ):
            values(directory, split="dev")
    assert values(tmp_path / "both/train") == ROWS


def test_columns_add_keys_also_from_tables(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", ROWS)
    columns = {"gold": "answer", "half": "more.share"}
    assert values(path, columns=columns)[3] == {**ROWS[3], "gold": 3, "half": 0.5}
    with pytest.raises(ConfigError) as caught:
        values(path, columns={"gold": "more.solution"}, key="evaluation.datasets[0].path")
    assert caught.value.where == "evaluation.datasets[0].columns"
    assert "line 1: the row has no 'more.solution'" in caught.value.message


def test_invalid_dataset_error_names_the_expected_formats(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"is empty\. Name a JSONL, JSON, CSV or Parquet file"):
        values(tmp_path / "empty")
    (tmp_path / "text.parquet").write_text("{}")
    with pytest.raises(ConfigError, match=r"text\.parquet: not Parquet"):
        values(tmp_path / "text.parquet")
    assert not has_source(DataSource(str(tmp_path / "train-*.parquet")))


def test_csv_values_are_texts_that_may_span_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('\ufeffprompt,answer\n"1+1,\n=?",007\n\n"say ""a""",\n', encoding="utf-8")
    assert values(path) == [
        {"prompt": "1+1,\n=?", "answer": "007"},
        {"prompt": 'say "a"', "answer": ""},
    ]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", b"prompt,answer\n1,2\n1,2,3\n", "a.csv, line 3: the row has 3 values"),
        ("a.csv", b"prompt;answer\n1;2\n", "a.csv, line 1: the columns are not separated by"),
        ("a.tsv", b"prompt\tanswer\n1\t2\n", "a.tsv, line 1: not JSON.* its suffix: .json"),
        ("a.csv", b"prompt,prompt\n1,2\n", "a.csv, line 1: column 'prompt' appears twice"),
        ("a.csv", b'prompt\n"1\n', "a.csv, line 2: not CSV"),
        ("a.csv", b"prompt\n\xff\n", "a.csv, line 2: not UTF-8"),
        ("a.json", b'[{"prompt": "1"}, 2]', "a.json, item 2: a row must be a JSON object"),
        ("a.json", b'[{"prompt": "1"}', "a.json: not JSON"),
        ("a.json", b'{\n "data": []}', "a.json, line 1: not JSON"),
        ("a.jsonl.gz", b"{}", "a.jsonl.gz: the file cannot be decompressed"),
        ("a.jsonl.gz", gzip.compress(b"{}" * 99)[:-9], "a.jsonl.gz: the file cannot be"),
    ],
)
def test_malformed_file_error_names_the_line(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        values(tmp_path / name)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (datetime.datetime(2026, 1, 1), "column 'extra' is not plain data"),
        (b"\xff", "column 'extra' is not plain data"),
        (float("inf"), "column 'extra' contains a number that is not finite"),
    ],
)
def test_value_without_a_json_type_names_row_and_column(
    tmp_path: Path, value: Any, says: str
) -> None:
    cells = [{"prompt": "a", "extra": None}, {"prompt": "b", "extra": value}]
    path = parquet_file(tmp_path / "rows.parquet", cells)
    with pytest.raises(ConfigError, match=rf"rows\.parquet, row 2: {says}"):
        values(path)


@pytest.mark.parametrize("value", [1 << 64, -(1 << 63) - 1, "\ud800", [{"a\udfff": 1}]])
def test_unsendable_value_names_row_and_column(tmp_path: Path, value: Any) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": "b", "extra": value}])
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 2: column 'extra' cannot be sent"):
        values(path)
    limits = [{"prompt": "c", "extra": [(1 << 64) - 1, -(1 << 63), "\U0001f600"]}]
    assert values(jsonl(tmp_path / "rows.jsonl", limits)) == limits


def test_unsendable_task_of_a_taskset_is_named(tmp_path: Path) -> None:
    writer = tmp_path / "python"  # a stand-in for an interpreter with the package
    row = json.dumps({"prompt": "a", "answer": 1 << 64})
    writer.write_text(f"#!/bin/sh\nfor last; do :; done\necho '{row}' > \"$last\"\n")
    writer.chmod(0o755)
    environment = EnvironmentConfig(verifiers="sums", python=str(writer))
    with pytest.raises(ConfigError, match="taskset 'sums', task 1: column 'answer' cannot be sent"):
        tasksets.load_tasks(JobConfig(environment=environment), tmp_path)


def test_row_without_a_prompt_is_named(tmp_path: Path) -> None:
    path = save_dataset(tmp_path / "saved", [{"prompt": "a"}, {"prompt": None}])
    with pytest.raises(ConfigError, match=r"row 2: the row has no string 'prompt'"):
        values(path)


def test_message_prompts_need_a_chat_format(tmp_path: Path) -> None:
    message = {"role": "user", "content": "hello"}
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": [message]}, {"prompt": "hello"}])
    assert len(list(dataset_rows.read_rows(DataSource(str(path)), "prompt", chat=True))) == 2
    with pytest.raises(ConfigError, match=r"line 1: 'prompt' is a list.* the job has no chat"):
        values(path)
    for bad, says in (
        ([], "line 1: 'prompt' is not a conversation: the list of messages is empty"),
        ([message, {"role": "user"}], "line 1: .*: message 2 .user. has no content"),
        ([{"role": "nobody", "content": ""}], "message 1 has the unknown role 'nobody'"),
        ({"role": "user"}, "no string, or list of messages, 'prompt', but {'role'"),
    ):
        path = jsonl(tmp_path / "rows.jsonl", [{"prompt": bad}])
        with pytest.raises(ConfigError, match=says):
            list(dataset_rows.read_rows(DataSource(str(path)), "prompt", chat=True))


def test_conversation_with_null_fields_from_parquet_is_accepted(tmp_path: Path) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "a"},
    ]
    path = parquet_file(tmp_path / "rows.parquet", [{"prompt": messages}, {"prompt": messages[:1]}])
    read = [
        row.value["prompt"]
        for row in dataset_rows.read_rows(DataSource(str(path)), "prompt", chat=True)
    ]
    assert read[0][0] == messages[0] | {"tool_calls": None, "tool_call_id": None}
    assert parse_conversation(read[0]) == parse_conversation(messages)


def test_non_finite_number_in_jsonl_names_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for written in ("NaN", "-Infinity", "1e999", '[0, {"a": -1e400}]'):
        path.write_text('{"prompt": "a", "n": 1e300}\n{"prompt": "b", "n": ' + written + "}\n")
        says = r"rows\.jsonl, line 2: column 'n' contains a number that is not finite: "
        with pytest.raises(ConfigError, match=says):
            values(path)


def test_parquet_and_saved_datasets_are_bundled(job: Path, tmp_path: Path) -> None:
    parquet_file(job.parent / "train.parquet", ROWS[:5])
    save_dataset(job.parent / "held", ROWS[5:])
    overrides = ["dataset.train=train.parquet", "dataset.held_out=held"]
    config, base = load_config(job, overrides)
    directory, document = pack_bundle(config, base, tmp_path / "run")
    for key, want in (("train", ROWS[:5]), ("held_out", ROWS[5:])):
        bundled = (directory / document["dataset"][key]).read_text().splitlines()
        assert [json.loads(line) for line in bundled] == want


def test_held_out_row_in_the_training_set_is_found_across_formats(job: Path) -> None:
    (job.parent / "train.jsonl").write_text('{"prompt":"1+1=",   "n": 2}\n')
    parquet_file(
        job.parent / "held.parquet", [{"prompt": "1+3=", "n": 4}, {"n": 2, "prompt": "1+1="}]
    )
    with pytest.raises(ConfigError, match=r"held\.parquet, row 2: its prompt is also in .*train"):
        load_config(job, ["dataset.held_out=held.parquet"])


def test_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [
        row.value["prompt"]
        for row in dataset_rows.read_rows(DataSource(str(tmp_path / "rows.jsonl")))
    ] == [
        "a",
        "b",
    ]


def test_too_deeply_nested_row_is_rejected_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' + "[" * 5000 + "]" * 5000 + "\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 2: .* nested too deeply"):
        list(dataset_rows.read_rows(DataSource(str(tmp_path / "rows.jsonl"))))


def test_number_with_too_many_digits_is_rejected_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"n": ' + "9" * 5000 + "}\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 2: a number cannot be read"):
        list(dataset_rows.read_rows(DataSource(str(tmp_path / "rows.jsonl"))))


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
def test_invalid_saved_dataset_names_its_file(tmp_path: Path, file: str, content: str) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(ConfigError) as caught:
        list(dataset_rows.read_rows(DataSource(str(tmp_path))))
    assert str(tmp_path / ("absent.arrow" if "absent" in content else file)) in str(caught.value)
    assert "\n" not in str(caught.value) and caught.value.fix


@pytest.mark.parametrize(
    ("body", "keys"),
    [
        ("return row['a'] == row['b']", ["a", "b"]),
        ("x = row['a']\nif not turns:\n    return 0\nreturn row['b']", ["a", "b"]),
        ("if row['kind'] == 1:\n    return row['a']\nreturn row['b']", ["kind"]),
        ("if 'a' in row:\n    return row['a']\nreturn row['b']", []),
        ("return row['a'] if turns else row['b']", []),
        ("return row.get('a')", []),
        ("row = dict(row)\nreturn row['a']", []),
        ("row['a'] = 1\nreturn row['a']", []),
        ("return bool(turns and row['a'])", []),
        ("return bool(row['a'] and row['b'])", ["a"]),
        ("try:\n    return row['a']\nexcept KeyError:\n    return 0", []),
        ("for part in row['parts']:\n    use(row['a'])\nreturn 1", ["parts"]),
        ("return sum(row['a'] for _ in turns)", []),
        ("return judge(row)", []),
        ("return row[turns]", []),
        ("raise ValueError\nreturn row['a']", []),
    ],
)
def test_only_unconditionally_read_keys_are_required(body: str, keys: list[str]) -> None:
    source = "def score(row, turns):\n" + textwrap.indent(body, "    ")
    [function] = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    assert [key for key, _ in find_unconditional_keys(function)] == keys


def test_chat_formats_stop_tokens_are_added(chat: JobVariant) -> None:
    config = chat.load("environment.chat=qwen3", 'rollout.stop=["a"]')
    assert config.rollout.stop == ["a", "<|im_end|>", "<|endoftext|>"]


def test_auto_chat_format_follows_the_models_published_name(chat: JobVariant, shape: str) -> None:
    model = chat.path.parent / "models/Qwen/Qwen3-8B"
    model.mkdir(parents=True)
    (model / "config.json").write_text(shape)
    (chat.path.parent / "tokenizer.json").rename(model / "tokenizer.json")
    config = chat.load("environment.chat=auto", f"model.path={model}", "model.tokenizer=''")
    assert config.environment.chat == "qwen3"


def test_chat_rows_may_contain_messages(chat: JobVariant) -> None:
    line = '{"prompt": [{"role": "user", "content": "1+1="}]}\n'
    (chat.path.parent / "train.jsonl").write_text(line)
    assert chat.load("environment.chat=qwen3")


def write_model(job: Path, shape: str, config: object, generation: object) -> Path:
    """Write a model directory whose two files name these end tokens."""
    model = job.parent / "model"
    model.mkdir()
    qwen3_tokenizer(model)
    (model / "config.json").write_text(json.dumps(json.loads(shape) | {"eos_token_id": config}))
    if generation is not None:
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    return model


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ("<|im_end|>", None, ["<|im_end|>"]),
        ("<|endoftext|>", ["<|im_end|>", "<|endoftext|>"], ["<|im_end|>", "<|endoftext|>"]),
        (["<|endoftext|>"], "<|im_end|>", ["<|im_end|>", "<|endoftext|>"]),
        (None, None, []),
    ],
)
def test_models_end_tokens_end_a_turn(
    job: Path, shape: str, config: object, generation: object, ends: list[str]
) -> None:
    found = qwen3_tokenizer(job.parent)

    def to_ids(named: object) -> object:
        if isinstance(named, list):
            return [to_ids(name) for name in named]
        return None if named is None else found.token_to_id(str(named))

    model = write_model(job, shape, to_ids(config), to_ids(generation))
    named = [f"model.path={model}", "model.tokenizer=''", 'rollout.stop=["a"]']
    assert load_config(job, named)[0].rollout.stop == ["a", *ends]


def test_model_from_scratch_has_its_configured_end_tokens(chat: JobVariant) -> None:
    end = qwen3_tokenizer(chat.path.parent).token_to_id("<|im_end|>")
    assert chat.load(f"model.config.eos_token_id={end}").rollout.stop == ["<|im_end|>"]


@pytest.mark.parametrize(
    ("config", "says"), [(5000, "token 5000, which the tokenizer lacks"), ("x", "not 'x'")]
)
def test_invalid_end_token_is_rejected(job: Path, shape: str, config: object, says: str) -> None:
    model = write_model(job, shape, None, config)
    with pytest.raises(ConfigError, match=says):
        load_config(job, [f"model.path={model}", "model.tokenizer=''"])


def make_overrides(job: Path, shape: str, name: str, rows: str = "") -> list[str]:
    """Make overrides for a model directory without a published name but with a chat template."""
    model = directory_of(FORMATS[name], job.parent / "somebodys-model")
    (model / "config.json").write_text(shape)
    if rows:
        (job.parent / "train.jsonl").write_text(rows)
    (job.parent / "tools.py").write_text("def add(a: str):\n    return a\n")
    return [f"model.path={model}", "model.tokenizer=''", "environment.chat=auto"]


@pytest.mark.parametrize(
    ("name", "ends"),
    [("llama-3", "<|eot_id|>"), ("gemma", "<end_of_turn>"), ("tinyllama", "</s>")],
)
def test_auto_chat_format_is_the_models_template_for_unknown_names(
    job: Path, shape: str, name: str, ends: str
) -> None:
    config, _ = load_config(job, make_overrides(job, shape, name))
    assert (config.environment.chat, config.rollout.stop) == ("template", [ends])


def test_date_of_a_template_is_fixed_for_a_run(job: Path, shape: str) -> None:
    overrides = make_overrides(job, shape, "llama-3")
    before = date.today().isoformat()
    found = load_config(job, overrides)[0].environment.chat_date
    assert found in (before, date.today().isoformat())
    named = load_config(job, [*overrides, "environment.chat_date=2024-02-09"])[0]
    assert named.environment.chat_date == "2024-02-09"
    with pytest.raises(ConfigError, match="is not a date"):
        load_config(job, [*overrides, "environment.chat_date=today"])
    assert load_config(job, make_overrides(job, shape, "gemma"))[0].environment.chat_date == ""


SYSTEM_ROW = '{"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]}\n'


@pytest.mark.parametrize(
    ("name", "overrides", "says"),
    [
        ("gemma", ['environment.tools={add="tools:add"}'], "does not render tools"),
        ("gemma", [], r"train\.jsonl, line 1: .*System role not supported"),
    ],
)
def test_unsupported_template_use_is_rejected(
    job: Path, shape: str, name: str, overrides: list[str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(job, [*make_overrides(job, shape, name, SYSTEM_ROW), *overrides])


def test_old_tokenizer_error_names_the_conversion(job: Path, shape: str) -> None:
    model = write_model(job, shape, None, None)
    (model / "tokenizer.json").rename(model / "tokenizer.model")
    with pytest.raises(ConfigError, match=r"Convert tokenizer\.model.*save_pretrained"):
        load_config(job, [f"model.path={model}", "model.tokenizer=''"])
