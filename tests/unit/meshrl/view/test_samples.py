"""Sampled trajectories, read during a run and afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshrl.cli import app
from meshrl.view.history.sample_files import (
    describe_row,
    find_file_ends,
    format_heading,
    read_new,
    read_samples,
    split_parts,
)
from meshrl.view.report.trajectory_table import render_trajectories


def sample(n: int, reward: float | None, step: int = 1, **more: Any) -> dict[str, Any]:
    turns = [
        {"role": "model", "text": "add(1, 1);", "stop": ";", "truncated": False},
        {"role": "tool", "name": "add", "input": {"a": 1, "b": 1}, "value": 2, "text": "2"},
        {"role": "environment", "text": " 2 so?"},
        {"role": "model", "text": f"it is <{n}>", "stop": "", "truncated": True},
    ]
    error = "" if reward is not None else "reward: raised: ValueError: no"
    return {
        "at": float(n),
        "step": step,
        "set": "train",
        "group": n,
        "member": 0,
        "why": ["best"],
        "reward": reward,
        "ending": "failed" if error else "length",
        "failure": "reward raised" if error else "",
        "error": error,
        "tokens": 30,
        "sampled": 20,
        "versions": [0, 1],
        "staleness": 1,
        "row": {"answer": 2},
        "prompt": "1+1=",
        "turns": turns,
    } | more


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "job.json").write_text(json.dumps({"job": "j", "document": {}}))
    return tmp_path


def write(run: Path, *kept: dict[str, Any], name: str = "samples.jsonl") -> None:
    with (run / name).open("a") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in kept)


def run_samples_command(run: Path, *options: str) -> list[dict[str, Any]]:
    ran = CliRunner().invoke(app, ["samples", str(run), "--json", *options])
    assert ran.exit_code == 0, ran.output
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_best_worst_and_failed_samples_of_a_step_are_found(run: Path) -> None:
    write(run, sample(0, 0.1), sample(1, 0.9), sample(2, None), sample(3, 0.5))
    write(run, sample(4, 1.0, step=2), name="samples-1.jsonl")
    assert [s["group"] for s in run_samples_command(run, "--best", "--step", "1", "-n", "2")] == [
        3,
        1,
    ]
    assert [s["group"] for s in run_samples_command(run, "--worst", "-n", "1")] == [0]
    assert [s["group"] for s in run_samples_command(run, "--failed")] == [2]
    assert [s["group"] for s in run_samples_command(run, "-n", "2")] == [3, 4], (
        "the last ones, of all shards"
    )


def test_sample_shows_turns_tools_reward_versions_and_outcome(run: Path) -> None:
    write(run, sample(7, 0.25))
    output = CliRunner().invoke(app, ["samples", str(run)]).stdout
    for wanted in (
        "step 1 | train, group 7.0 | reward 0.250 | cut at rollout.max_tokens | ",
        "30 tokens, 20 sampled | version 0-1, staleness 1 | best",
        "prompt: 1+1=",
        "model: add(1, 1);",
        'tool add({"a": 1, "b": 1}): 2',
        "environment:  2 so?",
        "model (cut): it is <7>",
        "gold answer: 2",
    ):
        assert wanted in output, output


def test_sample_shows_the_gold_and_other_keys_of_its_row() -> None:
    row = {"question": "1+1", "level": 3, "solution": "2", "extra": {"a": [1]}}
    document = {
        "dataset": {"prompt": "question"},
        "reward": {"parts": [{"use": "math", "options": {"answer": "solution"}}]},
    }
    found = list(describe_row(sample(1, 1.0, row=row), document))
    expected = [("gold solution", "2"), ("row level", "3"), ("row extra", '{"a": [1]}')]
    assert found == expected


def test_run_without_samples_is_reported(run: Path) -> None:
    for options, says in (([], "has no samples yet"), (["--step", "3"], "no samples of step 3")):
        ran = CliRunner().invoke(app, ["samples", str(run), *options])
        assert ran.exit_code != 0 and says in str(ran.exception)


def test_incomplete_line_is_read_when_complete(run: Path) -> None:
    write(run, sample(0, 0.5))
    line = json.dumps(sample(1, 0.5)) + "\n"
    path, read_to = run / "samples.jsonl", find_file_ends(run)
    with path.open("a") as file:
        file.write(line[:20])
    assert [s["group"] for s in read_samples(run)] == [0] and not list(read_new(run, read_to))
    with path.open("a") as file:
        file.write(line[20:])
    assert [s["group"] for s in read_new(run, read_to)] == [1]
    assert not list(read_new(run, read_to))


def test_new_and_restarted_sample_files_are_followed(run: Path) -> None:
    write(run, sample(0, 0.5))
    read_to = find_file_ends(run)
    write(run, sample(1, 0.5), sample(2, 0.5), name="samples-1.jsonl")
    assert [s["group"] for s in read_new(run, read_to)] == [1, 2]
    (run / "samples-1.jsonl").rename(run / "samples-1.older.jsonl")
    write(run, sample(3, 0.5), name="samples-1.jsonl")
    assert [s["group"] for s in read_new(run, read_to)] == [3]
    assert [s["group"] for s in read_samples(run)] == [0, 1, 2, 3]


def test_heading_and_report_show_evaluated_trajectories() -> None:
    more: dict[str, Any] = {"set": "held_out.greedy", "evaluation": "step-10"}
    page = render_trajectories([sample(0, 0.5), sample(1, 1.0, **more), sample(2, None, **more)])
    assert page.count("<details>") == 3
    assert "it is &lt;1&gt;" in page and "no reward | reward: raised: ValueError" in page
    assert format_heading(sample(1, 1.0, **more)).startswith(
        "step 1 | evaluation step-10, held_out.gr"
    )
    assert [role for role, *_ in split_parts(sample(1, 1.0))][1:3] == ["model", "tool"]
