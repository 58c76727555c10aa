"""A job file's chat format is checked, resolved, and brings its stop tokens along."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from meshrl.job.jobfile import load
from tests.unit.common.model.chatting import qwen3_tokenizer


@pytest.fixture
def chat_job(job: Path) -> Path:
    qwen3_tokenizer(job.parent)
    return job


def test_the_formats_stop_tokens_join_the_jobs(chat_job: Path) -> None:
    config, _ = load(chat_job, ["environment.chat=qwen3", 'rollout.stop=["a"]'])
    assert config.rollout.stop == ["a", "<|im_end|>", "<|endoftext|>"]


def test_auto_is_resolved_by_the_models_published_name(chat_job: Path, shape: str) -> None:
    model = chat_job.parent / "models/Qwen/Qwen3-8B"
    model.mkdir(parents=True)
    (model / "config.json").write_text(shape)
    (chat_job.parent / "tokenizer.json").rename(model / "tokenizer.json")
    config, _ = load(
        chat_job, ["environment.chat=auto", f"model.path={model}", "model.tokenizer=''"]
    )
    assert config.environment.chat == "qwen3"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["environment.chat=qwen33"], "no chat format 'qwen33'"),
        (["environment.chat=auto"], "nobody knows the chat format"),
        (["environment.chat=glm-4.5"], r"chat format 'glm-4\.5'"),
        (["environment.chat=qwen3", "environment.chat_options={x=1}"], r"chat format 'qwen3'"),
        (["environment.chat_options={x=1}"], "chat_options without environment.chat"),
    ],
)
def test_a_format_that_cannot_work_is_refused(
    chat_job: Path, overrides: list[str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        load(chat_job, overrides)


def test_rows_of_a_chat_may_hold_messages(chat_job: Path) -> None:
    line = '{"prompt": [{"role": "user", "content": "1+1="}]}\n'
    (chat_job.parent / "train.jsonl").write_text(line)
    assert load(chat_job, ["environment.chat=qwen3"])
    with pytest.raises(ConfigError, match="no string 'prompt'"):
        load(chat_job, [])
