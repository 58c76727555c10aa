"""Requests of Python code for a run: configuration, code and rows, up to the start of a mesh."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.tokens.tokenizer import build_character_tokenizer
from meshrl.job import bundle
from meshrl.job.job_file import JobFile
from meshrl.scripting.job_request import JobRequest, write_request
from meshrl.scripting.run_process import read_checked_job
from tests.unit.common.model.chatting import qwen3_tokenizer
from tests.unit.meshrl.conftest import SHAPE
from tests.unit.meshrl.scripting.cells import Notebook

PAGE = Path(__file__).parents[4] / "docs/use/python.md"
EXAMPLE = re.search(r"```python\n(.+?)```", PAGE.read_text(), re.DOTALL)[1]  # type: ignore[index]
HUB_MODEL = '"path": "Qwen/Qwen3-0.6B"'
ROWS = [{"prompt": "1+1=", "answer": 2}, {"prompt": "1+2=", "answer": 3}]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Make a configuration of a tiny model in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    build_character_tokenizer("0123456789+=", tmp_path / "tokenizer.json")
    return {
        "model": {"tokenizer": "tokenizer.json", "config": SHAPE},
        "rollout": {"max_tokens": 32},
        "algorithm": {"group_size": 4},
    }


def check(
    config: Any,
    *,
    reward: Any = None,
    dataset: Any = None,
    held_out: Any = None,
    overrides: Sequence[str] = (),
) -> tuple[JobFile, Path]:
    """Check the arguments of a run, up to its start; return the job and the request's directory."""
    objects = {"reward.use": reward, "dataset.train": dataset, "dataset.held_out": held_out}
    directory = write_request(config, objects, overrides, False)
    return read_checked_job(directory)[0], directory


def test_documented_example_of_at_most_ten_lines_passes_all_checks(
    config: dict[str, Any], tmp_path: Path
) -> None:
    lines = [line for line in EXAMPLE.splitlines() if line.strip()]
    assert len(lines) <= 10 and HUB_MODEL in EXAMPLE
    vocabulary = qwen3_tokenizer(tmp_path).vocab_size  # the example has a chat format
    model = json.dumps(config["model"] | {"config": SHAPE | {"vocab_size": vocabulary}})[1:-1]
    code = EXAMPLE.replace(HUB_MODEL, model).replace("meshrl.run(", "check_run(")
    code = "\n".join(line for line in code.splitlines() if not line.startswith("print("))
    cells = Notebook()
    cells.names["check_run"] = check
    job, directory = cells.execute(code)["run"]
    _, document = bundle.pack_bundle(job.config, job.base, tmp_path / "run")
    assert document["reward"]["use"] == "inline_code:is_right"
    packed = Path(document["bundle"]["dir"])
    assert len((packed / document["dataset"]["train"]).read_text().splitlines()) == 3200
    assert "def is_right" in (packed / "modules/inline_code.py").read_text()
    assert str(directory) not in json.dumps(document)


def test_objects_anywhere_in_the_config_are_carried(config: dict[str, Any]) -> None:
    cells = Notebook().execute(
        "def score(row, turns):\n    return 1.0\ndef add(input):\n    return input"
    )
    config |= {
        "environment": {"tools": {"add": cells["add"]}},
        "reward": {"parts": [{"use": cells["score"], "weight": 0.5}, {"use": "exact"}]},
        "evaluation": {"datasets": [{"name": "more", "path": iter(ROWS)}]},
        "out": Path("runs/here"),
    }
    directory = write_request(config, {"dataset.train": ROWS}, ["seed=1"], True)
    request = JobRequest.read(directory)
    document = request.document
    assert document["environment"]["tools"] == {"add": "inline_code:add"}
    assert document["reward"]["parts"][0] == {"use": "inline_code:score", "weight": 0.5}
    rows = Path(document["evaluation"]["datasets"][0]["path"]).read_text().splitlines()
    assert [json.loads(row) for row in rows] == ROWS
    assert (document["out"], request.overrides, request.force) == ("runs/here", ["seed=1"], True)
    assert "score" not in config["model"] and config["reward"]["parts"][0]["use"] == cells["score"]


def test_rows_of_other_libraries_are_written_as_plain_data(config: dict[str, Any]) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"prompt": ["1+1=", "1+2="], "answer": np.array([2, 3])})
    arrays = [{"prompt": "1+1=", "answer": np.int64(2), "more": np.array([[1.5]])}]
    directory = write_request(
        config, {"dataset.train": frame, "dataset.held_out": arrays}, (), False
    )
    document = JobRequest.read(directory).document
    texts = [Path(document["dataset"][key]).read_text() for key in ("train", "held_out")]
    assert [json.loads(line) for line in texts[0].splitlines()] == ROWS
    assert json.loads(texts[1]) == {"prompt": "1+1=", "answer": 2, "more": [[1.5]]}


def test_job_file_is_completed_and_its_modules_are_found(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(job.parent))
    build_character_tokenizer("0123456789+=", job.parent / "tokenizer.json")
    (job.parent / "rewards.py").write_text("import tally\ndef score(row, turns):\n    return 1.0\n")
    found, directory = check(job, dataset=ROWS, overrides=["rollout.max_tokens=32"])
    assert found.config.reward.use == "rewards:score"
    assert Path(found.config.dataset.train) == directory / "dataset.train.jsonl"
    assert Path(found.config.dataset.held_out) == job.parent / "held.jsonl"
    assert {path.name for path in found.base.iterdir()} == {"rewards.py", "tally.py"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"algorithm": {"nam": "grpo"}}, "the job: unknown key algorithm.nam. Did you mean"),
        ({"budget": {"steps": None}}, "budget.steps is None. Leave the key out"),
        ({"reward": {"use": "math"}}, "config['reward']['use'] is set, and so is the argument"),
        ({"dataset": ["1+1="]}, "dataset.train[0] is of type str, not a dict"),
        ({"dataset": {"train": ROWS}}, "dataset.train is a dict with the keys 'train'"),
        ({"dataset": 3}, "dataset.train is of type int, not rows"),
        ({"dataset": [*ROWS, {"prompt": float("nan")}]}, "dataset.train[2]['prompt'] is no plain"),
        ({"dataset": [*ROWS, {"answer": 1}]}, "dataset.train[2]: the row has no"),
        ({"dataset": []}, "dataset.train: the list has no rows"),
        ({"environment": {"use": object()}}, "environment.use is an object of type object, not"),
        ({"seed": 1j}, "seed is of type complex"),
        (3, "the config is of type int"),
        ("def reward(row):\n    return 1", "reward.use: inline_code:reward cannot be called as a"),
    ],
)
def test_mistake_is_refused_with_its_key_before_a_mesh_starts(
    config: dict[str, Any], arguments: Any, words: str
) -> None:
    cell = "def reward(row, turns):\n    return 1.0"
    rows: Any = ROWS
    given: Any = config
    if isinstance(arguments, str):
        cell = arguments
    elif isinstance(arguments, dict):
        rows = arguments.pop("dataset", rows)
        given = config | arguments
    else:
        given = arguments
    with pytest.raises(ConfigError) as caught:
        check(given, reward=Notebook().execute(cell)["reward"], dataset=rows)
    assert words in str(caught.value)
    assert "meshrl-job-" not in str(caught.value)
