"""What a job file says of tools, rewards and isolation is checked before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from meshrl.common.base.errors import Refused
from meshrl.common.job.isolation import containment
from meshrl.common.job.isolation.isolation import ORDER
from meshrl.common.job.schema import JOB
from meshrl.job import jobfile
from meshrl.job.references import all_references

EXAMPLE = Path(__file__).parents[4] / "examples" / "calculator.toml"


def test_parts_of_all_kinds_and_tools_of_all_kinds_are_accepted() -> None:
    tools = "{calculate='calculator:calculate', p='python', s='shell', w='mcp:web/search'}"
    config, _ = jobfile.load(
        EXAMPLE,
        [
            "reward.use=",
            "reward.parts=[{use='math'}, {use='calculator:reward', weight=0.5}]",
            f"environment.tools={tools}",
            "environment.mcp={web=['server']}",
            "environment.once=['p']",
        ],
    )
    assert [(part.use, part.weight) for part in config.reward.declared] == [
        ("math", 1.0),
        ("calculator:reward", 0.5),
    ]
    assert sorted(config.jailed) == ["python", "shell"]
    references = dict(all_references(config))
    assert references["reward.parts"] == "calculator:reward"
    assert "environment.tools.p" not in references


def test_the_tiers_of_a_job_file_are_those_of_isolation_the_best_first() -> None:
    assert get_args(JOB.kinds["sandbox.tier"]) == ORDER[:0:-1]


def test_a_job_that_runs_no_code_of_the_model_needs_no_isolation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # no bwrap there
    config, _ = jobfile.load(EXAMPLE, [])
    assert config.jailed == []
    containment.require(config)


def test_a_job_that_does_is_refused_with_the_fix_where_there_is_too_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    config, _ = jobfile.load(EXAMPLE.with_name("code.toml"), [])
    with pytest.raises(Refused, match=r"code_tests run code that the model wrote") as caught:
        containment.require(config)
    assert "apt-get install bubblewrap" in str(caught.value)


@pytest.mark.rotating(2)
@pytest.mark.needs("bwrap")
def test_the_isolation_that_is_found_is_one_that_a_program_ran_in() -> None:
    found = containment.found()
    assert found.tier in ("bwrap", "cgroup")
    assert found.meaning.startswith("bwrap + seccomp")
    assert bool(found.fix) == (found.tier != "cgroup")
    config, _ = jobfile.load(EXAMPLE.with_name("code.toml"), [])
    containment.require(config)
