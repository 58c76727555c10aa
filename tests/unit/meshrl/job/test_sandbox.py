"""What a job file says of tools, rewards and isolation is checked before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from common.base.errors import ConfigError, Refused
from common.job.isolation import containment
from common.job.isolation.isolation import ORDER
from common.job.schema import JOB
from meshrl.job import jobfile
from meshrl.job.references import all_references

EXAMPLE = Path(__file__).parents[4] / "examples" / "calculator.toml"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("environment.tools={a='pyton'}", "'pyton' is no built-in tool; there are python,"),
        ("environment.tools={a='mcp:web/search'}", "environment.mcp has no server 'web'"),
        ("environment.tools={a='mcp:web'}", "not of the form mcp:SERVER/TOOL"),
        ("environment.mcp={web=[]}", "environment.mcp.web has no command"),
        ("environment.once=['b']", "there is no tool 'b'"),
        ("reward.use=maths", "'maths' is no built-in reward; there are math,"),
        ("reward.options={answer='a'}", "reward.options are of a built-in reward.use"),
        ("reward.parts=[{use='exact'}]", "reward.use and reward.parts exclude each other"),
        ("sandbox.tier=none", "must be one of runner, cgroup, bwrap, landlock"),
        ("sandbox.memory_mb=1", "sandbox.memory_mb = 1 must be at least 32"),
        ("sandbox.python=nowhere/python", "there is no interpreter at"),
        ("sandbox.tier=runner", "a container for each call takes a sandbox.runner"),
        ("sandbox.runner=['no_such_program']", "there is no program no_such_program"),
        ("sandbox.runner=['env', 'run', '{bundle}']", "takes {bundle}, but no {id}"),
        ("sandbox={runner=['env'], root='.'}", "bring a file system of their own"),
        ("sandbox.root=nowhere", "sandbox.root: there is no directory"),
        ("sandbox.root=.", "sandbox.root: "),
    ],
)
def test_a_mistake_is_named(override: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        jobfile.load(EXAMPLE, [override])
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ("{use='regex'}", "regex needs the option 'pattern'"),
        ("{use='regex', options={pattern='('}}", "is no pattern"),
        ("{use='math', options={gold='x'}}", "math has no option 'gold'"),
        ("{use='code_tests', options={rel_tol='1e-6'}}", "rel_tol is a number from 0 on"),
        ("{use='code_tests', options={abs_tol=-1.0}}", "abs_tol is a number from 0 on"),
        ("{use='code_tests', options={case_s=0}}", "case_s is a number above 0, not 0"),
        ("{use='code_tests', options={memory_mb='9'}}", "memory_mb is a number above 0"),
        ("{use='code_tests', options={partial='no'}}", "partial is true or false"),
        ("{use='code_tests', options={prefix=['a']}}", "prefix is a text"),
        ("{use='calculator:reward', options={a=1}}", "which is no built-in reward"),
        ("{use='calculator:missing'}", "defines no 'missing'"),
        ("{use='mcp:a/b'}", "is a tool, not a reward"),
    ],
)
def test_a_mistake_in_a_part_of_the_reward_is_named(parts: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        jobfile.load(EXAMPLE, ["reward.use=", f"reward.parts=[{parts}]"])
    assert says in str(caught.value)


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
