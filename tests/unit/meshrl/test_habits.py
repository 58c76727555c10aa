"""Commands, options, keys and files as users of other trainers write them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshrl.cli import app
from meshrl.cli.arguments import (
    CommandGroup,
    OverridesArgument,
    SetOption,
    WorkersOption,
    merge_overrides,
)
from meshrl.cli.habits import JobCommand
from meshrl.commands.simulation import OTHER_SCENARIOS, SCENARIOS
from meshrl.common.base.errors import ConfigError
from meshrl.common.job.familiar_keys import FAMILIAR_KEYS
from meshrl.common.job.schema import JOB_SCHEMA
from meshrl.job.toml.reader import read_toml


@pytest.mark.parametrize(
    "words, says",
    [
        ("train job.toml --workers 2", "meshrl run job.toml --workers 2"),
        ("fit", "meshrl run JOB"),
        ("start", "meshrl up"),
        ("kill calculator", "meshrl cancel RUN"),
        ("ps", "meshrl status"),
        ("ls", "meshrl status"),
        ("generate runs/x hello", "meshrl sample runs/x hello"),
        ("inference", "meshrl chat RUN"),
        ("run job.toml --steps 3", "meshrl run job.toml budget.steps=3"),
        ("run job.toml --learning-rate=1e-5", "meshrl run job.toml optimizer.adamw_lr=1e-5"),
        ("run job.toml --model Qwen/Qwen3-0.6B", "model.path=Qwen/Qwen3-0.6B"),
        ("run job.toml --budget.steps", "budget.steps=VALUE"),
        ("run job.toml --frobnicate 2", "No such option: --frobnicate"),
        ("run --config job.toml", "The job file is an argument"),
        ("run job.toml --resume", "meshrl resume RUN"),
        ("run job.toml --lora", "lora.rank=VALUE"),
        ("run a.toml b.toml", "'b.toml' is neither KEY=VALUE"),
    ],
)
def test_wrong_usage_names_what_to_type(words: str, says: str) -> None:
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 2
    assert says in result.output


@pytest.mark.parametrize(
    "words",
    [
        "job.toml budget.steps=7 --workers 2",
        "--budget.steps 7 job.toml --workers=2",
        "job.toml --budget.steps=7 --set mesh.workers=2",
    ],
)
def test_settings_are_accepted_in_each_notation(words: str) -> None:
    program = CommandGroup()

    @program.command(cls=JobCommand)
    def run(
        job: str,
        overrides: OverridesArgument = None,
        workers: WorkersOption = None,
        set_: SetOption = None,
    ) -> None:
        print(job, *merge_overrides(set_, overrides, workers=workers))

    result = CliRunner().invoke(program, words.split())
    assert result.output == "job.toml budget.steps=7 mesh.workers=2\n"


def test_familiar_names_are_no_keys_of_their_own_table() -> None:
    wrong = {n: k for n, k in FAMILIAR_KEYS.items() if k.endswith(f".{n}") and "." in n}
    assert not wrong
    assert JOB_SCHEMA.find_nearest_key("optimizer.learning_rate") == "optimizer.adamw_lr"
    assert JOB_SCHEMA.find_nearest_key("steps") == "budget.steps"
    assert JOB_SCHEMA.find_nearest_key("warm_start.steps") == "warm_start.steps"


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("job.yaml", "budget:\n  steps: 3\n", "[budget]\nsteps = 3"),
        ("job.json", '{"model": {"path": "m"}}', '[model]\npath = "m"'),
        ("job.yml", "a: [", "Write it as TOML"),
        ("train.jsonl", '{"prompt": "1"}\n', "is a dataset"),
        ("game.py", '"""A game."""\n', "is Python code"),
        ("job.toml", "a: 3\n", "line 1"),
        ("jop.toml", None, "Did you mean"),
        ("", None, "Name its job file, such as"),
    ],
)
def test_file_of_another_kind_is_named(
    tmp_path: Path, name: str, text: str | None, says: str
) -> None:
    (tmp_path / "job.toml").write_text("")
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_toml(tmp_path / name, "the job file")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "scenario, says",
    [
        ("agentc", "Did you mean agentic?"),
        ("zebre", "Did you mean zebra?"),
        ("job.toml", "is a job, not a scenario"),
        ("run", "meshrl simulate --from run"),
    ],
)
def test_wrong_scenario_names_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scenario: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text('[reward]\nuse = "math"\n')
    Path("run").mkdir()
    Path("run/job.json").touch()
    result = CliRunner().invoke(app, ["simulate", scenario])
    assert says in str(result.exception)


def test_help_of_simulate_lists_all_scenarios() -> None:
    names = [path.stem for path in SCENARIOS.glob("*.toml")] + list(OTHER_SCENARIOS)
    text = CliRunner().invoke(app, ["simulate", "--help"]).output
    assert all(name in text for name in names)
