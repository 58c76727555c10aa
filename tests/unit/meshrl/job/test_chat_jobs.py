"""A job file's chat format is checked, resolved, and brings its stop tokens along."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

from loadtests.chat_templates.comparing import directory_of
from meshrl.common.base.errors import ConfigError
from meshrl.job.jobfile import load
from tests.unit.common.model.chatting import qwen3_tokenizer
from tests.unit.common.model.templates.formats import FORMATS
from tests.unit.meshrl.job.conftest import Given


def test_the_formats_stop_tokens_join_the_jobs(chat: Given) -> None:
    config = chat.load("environment.chat=qwen3", 'rollout.stop=["a"]')
    assert config.rollout.stop == ["a", "<|im_end|>", "<|endoftext|>"]


def test_auto_is_resolved_by_the_models_published_name(chat: Given, shape: str) -> None:
    model = chat.path.parent / "models/Qwen/Qwen3-8B"
    model.mkdir(parents=True)
    (model / "config.json").write_text(shape)
    (chat.path.parent / "tokenizer.json").rename(model / "tokenizer.json")
    config = chat.load("environment.chat=auto", f"model.path={model}", "model.tokenizer=''")
    assert config.environment.chat == "qwen3"


def test_rows_of_a_chat_may_hold_messages(chat: Given) -> None:
    line = '{"prompt": [{"role": "user", "content": "1+1="}]}\n'
    (chat.path.parent / "train.jsonl").write_text(line)
    assert chat.load("environment.chat=qwen3")


def model_of(job: Path, shape: str, config: object, generation: object) -> Path:
    """A model directory whose two files name these end tokens."""
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
def test_the_models_own_end_tokens_end_a_turn(
    job: Path, shape: str, config: object, generation: object, ends: list[str]
) -> None:
    found = qwen3_tokenizer(job.parent)

    def ids(named: object) -> object:
        if isinstance(named, list):
            return [ids(name) for name in named]
        return None if named is None else found.token_to_id(str(named))

    model = model_of(job, shape, ids(config), ids(generation))
    named = [f"model.path={model}", "model.tokenizer=''", 'rollout.stop=["a"]']
    assert load(job, named)[0].rollout.stop == ["a", *ends]


def test_a_model_from_scratch_has_the_end_tokens_it_is_described_with(chat: Given) -> None:
    end = qwen3_tokenizer(chat.path.parent).token_to_id("<|im_end|>")
    assert chat.load(f"model.config.eos_token_id={end}").rollout.stop == ["<|im_end|>"]


@pytest.mark.parametrize(
    ("config", "says"), [(5000, "token 5000, which the tokenizer lacks"), ("x", "not 'x'")]
)
def test_an_end_token_that_is_none_is_refused(
    job: Path, shape: str, config: object, says: str
) -> None:
    model = model_of(job, shape, None, config)
    with pytest.raises(ConfigError, match=says):
        load(job, [f"model.path={model}", "model.tokenizer=''"])


def templated(job: Path, shape: str, name: str, rows: str = "") -> list[str]:
    """Overrides for a model directory of no published name, with a chat template."""
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
def test_auto_is_the_models_own_template_where_its_name_is_unknown(
    job: Path, shape: str, name: str, ends: str
) -> None:
    config, _ = load(job, templated(job, shape, name))
    assert (config.environment.chat, config.rollout.stop) == ("template", [ends])


def test_a_template_that_writes_the_date_has_one_for_the_whole_run(job: Path, shape: str) -> None:
    overrides = templated(job, shape, "llama-3")
    before = date.today().isoformat()
    found = load(job, overrides)[0].environment.chat_date
    assert found in (before, date.today().isoformat())
    named = load(job, [*overrides, "environment.chat_date=2024-02-09"])[0]
    assert named.environment.chat_date == "2024-02-09"
    with pytest.raises(ConfigError, match="is no day"):
        load(job, [*overrides, "environment.chat_date=today"])
    assert load(job, templated(job, shape, "gemma"))[0].environment.chat_date == ""


SYSTEM_ROW = '{"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]}\n'


@pytest.mark.parametrize(
    ("name", "overrides", "says"),
    [
        ("gemma", ['environment.tools={add="tools:add"}'], "tells the model of no tools"),
        ("gemma", [], r"train\.jsonl, line 1: .*System role not supported"),
    ],
)
def test_what_a_template_cannot_do_is_refused(
    job: Path, shape: str, name: str, overrides: list[str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        load(job, [*templated(job, shape, name, SYSTEM_ROW), *overrides])


def test_a_tokenizer_of_an_older_kind_is_told_how_to_become_one(job: Path, shape: str) -> None:
    model = model_of(job, shape, None, None)
    (model / "tokenizer.json").rename(model / "tokenizer.model")
    with pytest.raises(ConfigError, match=r"makes one of tokenizer\.model.*save_pretrained"):
        load(job, [f"model.path={model}", "model.tokenizer=''"])
