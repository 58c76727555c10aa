"""A job file is accepted whole, or refused with the line and what would be right."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from common.base.errors import ConfigError
from common.job.config import JobConfig
from common.job.schema import JOB
from meshrl.job.jobfile import apply_override, load
from meshrl.job.toml_lines import key_lines, line_of
from meshrl.job.toml_writing import to_toml

EXAMPLES = Path(__file__).parents[4] / "examples"


def rewrite(job: Path, old: str, new: str) -> None:
    text = job.read_text()
    assert old in text
    job.write_text(text.replace(old, new))


def refusal(job: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(job, list(overrides))
    return str(caught.value)


def test_a_valid_file_gives_defaults_and_absolute_paths(job: Path) -> None:
    config, base = load(job, [])
    assert base == job.parent
    assert config.algorithm.group_size == 4
    assert config.budget.steps == JobConfig().budget.steps
    assert config.dataset.train == str(job.parent / "train.jsonl")


def test_an_unknown_key_names_its_line_and_the_nearest_valid_key(job: Path) -> None:
    rewrite(job, "group_size = 4", "grop_size = 4")
    message = refusal(job)
    assert "line 16" in message
    assert "algorithm.grop_size" in message
    assert "Did you mean algorithm.group_size?" in message


def test_a_key_in_the_wrong_table_is_pointed_to_the_right_one(job: Path) -> None:
    rewrite(job, "group_size = 4", "steps = 4")
    assert "budget.steps" in refusal(job) or "warm_start.steps" in refusal(job)


def test_a_wrong_type_names_its_line(job: Path) -> None:
    rewrite(job, "group_size = 4", 'group_size = "four"')
    assert "line 16: algorithm.group_size must be a whole number, not 'four'" in refusal(job)


def test_a_syntax_error_names_its_line(job: Path) -> None:
    rewrite(job, "group_size = 4", "group_size = = 4")
    assert "line 16" in refusal(job)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("budget.steps=12", "budget.steps", 12),
        ("algorithm.clip_high=0.3", "algorithm.clip_high", 0.3),
        ("name=plain-words", "name", "plain-words"),
        ("name=2024", "name", "2024"),
        ('rollout.stop=["]"]', "rollout.stop", ["]"]),
        ("evaluation.before=false", "evaluation.before", False),
    ],
)
def test_set_takes_toml_or_a_bare_string(job: Path, override: str, key: str, value: object) -> None:
    config, _ = load(job, [override])
    for part in key.split("."):
        config = getattr(config, part)
    assert config == value


def test_a_wrong_override_is_named_as_typed(job: Path) -> None:
    message = refusal(job, "budget.stepz=3")
    assert message.startswith("--set budget.stepz=3")
    assert "budget.steps" in message


def test_an_override_without_a_value_says_how_to_write_it() -> None:
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        apply_override({}, "seed")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "one JSON object on each line"),
        ("[1]", "a row is a JSON object, not list"),
        ('{"question": "?"}', "no string 'prompt'. set dataset.prompt"),
    ],
)
def test_a_broken_dataset_line_names_file_and_line(job: Path, line: str, says: str) -> None:
    (job.parent / "train.jsonl").write_text('{"prompt": "a"}\n' + line + "\n")
    message = refusal(job)
    assert "train.jsonl, line 2" in message
    assert says in message


def test_a_dataset_that_is_not_utf8_names_its_line(job: Path) -> None:
    (job.parent / "train.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    assert "train.jsonl, line 2: not UTF-8" in refusal(job)


def test_a_held_out_row_may_not_be_trained_on(job: Path) -> None:
    (job.parent / "held.jsonl").write_text('{"prompt": "1+2="}\n')
    assert "held.jsonl, line 1 is also in dataset.train" in refusal(job)


def test_a_missing_function_lists_what_the_module_has(job: Path) -> None:
    rewrite(job, "rewards:score", "rewards:scores")
    message = refusal(job)
    assert "line 13" in message
    assert "score" in message and "tally" in message


def test_a_missing_module_names_the_file_that_was_looked_for(job: Path) -> None:
    rewrite(job, "rewards:score", "prizes:score")
    assert str(job.parent / "prizes.py") in refusal(job)


def test_a_syntax_error_in_a_module_names_file_and_line(job: Path) -> None:
    (job.parent / "rewards.py").write_text("def score(:\n")
    assert "rewards.py, line 1" in refusal(job)


@pytest.mark.parametrize(
    "override",
    ["mesh.workers=1", "algorithm.group_size=1", "rollout.kv_on_update=drop", "name=a/b"],
)
def test_a_value_out_of_range_is_refused(job: Path, override: str) -> None:
    assert override in refusal(job, override)


def test_every_key_has_a_nearest_key_which_is_itself() -> None:
    assert all(JOB.nearest(key) == key for key in JOB.kinds)


def test_lines_are_found_through_multi_line_strings_and_arrays() -> None:
    text = 'a = """\n[not.a.table]\nb = 1\n"""\nc = [\n  1, # ]\n  2,\n]\n["d e".f]\ng.h = 1\n'
    lines = key_lines(text)
    assert lines == {"a": 1, "c": 5, "d e.f": 9, "d e.f.g.h": 10}
    assert line_of(lines, "c.x.y") == 5
    assert line_of(lines, "nowhere") == 0


@pytest.mark.parametrize(
    ("buckets", "says"),
    [
        ("[{max_tokens=60}]", "rollout.buckets[0].batch is missing"),
        ("[{max_tokens=60, batch=8, size=1}]", "unknown key rollout.buckets[0].size"),
        (
            "[{max_tokens='x', batch=8}]",
            "rollout.buckets[0].max_tokens must be a whole number, not 'x'",
        ),
        ("[{max_tokens=60, batch=8}, {max_tokens=60, batch=8}]", "must rise in max_tokens"),
        ("[{max_tokens=60, batch=1000}]", "batch = 1000 must lie in 1 to rollout.slots"),
        ("[{max_tokens=60, batch=8, engines=0}]", "engines = 0 must be above 0"),
    ],
)
def test_a_bucket_that_cannot_be_is_refused_where_it_stands(
    job: Path, buckets: str, says: str
) -> None:
    message = refusal(job, f"rollout.buckets={buckets}")
    assert says in message
    assert "--set rollout.buckets" in message


def test_buckets_and_pace_are_taken_as_written(job: Path) -> None:
    tables = "rollout.buckets=[{max_tokens=60, batch=32}, {max_tokens=320, batch=8, engines=0.5}]"
    config, _ = load(job, [tables, "rollout.pace=18/32/6000"])
    assert [(b.max_tokens, b.batch, b.engines) for b in config.rollout.buckets] == [
        (60, 32, 1.0),
        (320, 8, 0.5),
    ]
    assert JobConfig.from_document(config.document()) == config
    assert "there is no pace 'tpu'" in refusal(job, "rollout.pace=tpu")
    assert "there is no pace 'tpu' of training" in refusal(job, "training.pace=tpu")


@pytest.mark.parametrize("example", ["calculator", "chat", "code"])
def test_what_a_dry_run_prints_is_the_same_job(tmp_path: Path, example: str) -> None:
    base = shutil.copytree(EXAMPLES, tmp_path / "examples")
    stops = 'rollout.stop=["😀", "\\u007f", "\\\\"]'
    config, _ = load(base / f"{example}.toml", [stops])
    printed = base / "printed.toml"
    printed.write_text(to_toml(config.document()), encoding="utf-8")
    assert load(printed, []) == (config, base)


def test_a_byte_order_mark_is_no_part_of_the_job(job: Path) -> None:
    job.write_bytes(b"\xef\xbb\xbf" + job.read_bytes())
    assert load(job, [])[0].name == "tiny"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"def score(row, turns):\n    return 'caf\xe9'\n", "'utf-8' codec can't decode"),
        (b"def score(row, turns): ...\n\0", "null bytes"),
    ],
)
def test_a_module_that_is_no_text_is_named(job: Path, content: bytes, says: str) -> None:
    (job.parent / "rewards.py").write_bytes(content)
    assert "rewards.py" in (message := refusal(job)) and says in message


def test_a_module_in_an_encoding_that_it_declares_is_read(job: Path) -> None:
    source = "# coding: latin-1\n# café\ndef score(row, turns): ...\n"
    (job.parent / "rewards.py").write_bytes(source.encode("latin-1"))
    load(job, [])


def test_a_file_in_place_of_a_module_is_said(job: Path) -> None:
    assert "Write rewards:score" in refusal(job, "reward.use=rewards.py:score")


def test_a_name_on_the_hub_is_no_directory(job: Path) -> None:
    message = refusal(job, "model.path=Owner/Name-1B")
    assert "Owner/Name-1B does not exist" in message and "hf download" in message


def test_a_judges_template_that_is_no_text_is_named(job: Path) -> None:
    (job.parent / "ask.txt").write_bytes(b"\xff{answer}")
    assert "ask.txt is no UTF-8 text" in refusal(job, "reward.judge.template=ask.txt")
